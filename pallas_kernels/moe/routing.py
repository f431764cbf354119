"""Where every routed row goes: rows grouped by expert, groups cut into tiles.

A *row* is one (token, k) pair, numbered t * K + k. A *slot* is a place for a
row in the tiled layout that matrix multiplications walk: each tile holds rows
of one expert, its last slots may be empty. The tables are a pure function of
the expert ids, made of sorts, binary searches and gathers on the device: no
scatter, no read-back by the host, the same bits on every run.

Not for communication: which rank owns an expert is decided by the caller, who
passes ids relative to the first expert that it holds.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Tables of the tiled layout, all int32; -1 marks what is empty.

  Attributes:
    group_sizes: [E], rows of each expert.
    tile_expert: [tiles], the expert whose weights a tile needs. Valid for all
      tiles; those past `num_tiles` hold no rows.
    num_tiles: [], how many tiles are in use; the others are at the end.
    slot_row: [tiles * tile], the row in each slot, or -1.
    row_slot: [T, K], the slot of each row, or -1 for a row that has no expert
      here.
  """

  group_sizes: jax.Array
  tile_expert: jax.Array
  num_tiles: jax.Array
  slot_row: jax.Array
  row_slot: jax.Array


def max_tiles(rows: int, num_experts: int, tile: int, *, head: bool) -> int:
  """Returns how many tiles the most uneven routing of `rows` rows can need."""
  if head:  # Past its first tile, an expert needs ceil(n / tile) - 1 tiles.
    return num_experts + max(rows - 1, 0) // tile
  return min(rows, (rows + num_experts * (tile - 1)) // tile)


def route(
  expert_ids: Int[Array, "T K"],
  num_experts: int,
  tile: int,
  *,
  head: bool = False,
) -> Routing:
  """Groups rows by expert, in row order, into tiles of equal size.

  Args:
    expert_ids: the expert of each (token, k). An id outside [0, num_experts)
      gets no slot.
    num_experts: E.
    tile: rows a tile.
    head: if true, tile e is the first tile of expert e, for all experts, empty
      ones too, and the other tiles follow, expert after expert. So the first
      E tiles meet the weights in the order in which they lie in memory. If
      false, all tiles lie expert after expert.

  Returns:
    The tables, see `Routing`.
  """
  rows = expert_ids.size
  flat = expert_ids.reshape(-1).astype(jnp.int32)
  row = jnp.arange(rows, dtype=jnp.int32)
  expert = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
  by_expert, order = lax.sort((expert, row), num_keys=1, is_stable=True)
  _, position = lax.sort((order, row), num_keys=1)  # The inverse of `order`.

  start = jnp.searchsorted(
    by_expert, jnp.arange(num_experts + 1, dtype=jnp.int32)
  ).astype(jnp.int32)
  sizes = jnp.diff(start)
  # Tiles after the head, and where each expert's begin.
  extra = jnp.maximum(-(-sizes // tile) - head, 0)
  extra_end = jnp.cumsum(extra, dtype=jnp.int32)
  extra_start = extra_end - extra

  heads = num_experts if head else 0
  tail = jnp.arange(
    max_tiles(rows, num_experts, tile, head=head) - heads, dtype=jnp.int32
  )
  tail_expert = jnp.searchsorted(extra_end, tail, side="right")
  tail_expert = jnp.minimum(tail_expert.astype(jnp.int32), num_experts - 1)
  tail_nth = tail - extra_start[tail_expert] + head
  tile_expert = jnp.concatenate(
    [jnp.arange(heads, dtype=jnp.int32), tail_expert]
  )
  tile_nth = jnp.concatenate([jnp.zeros(heads, jnp.int32), tail_nth])

  rank = tile_nth[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
  filled = rank < sizes[tile_expert][:, None]
  source = jnp.where(filled, start[tile_expert][:, None] + rank, 0)
  slot_row = jnp.where(filled, order[source], -1).reshape(-1)

  known = expert < num_experts
  owner = jnp.minimum(expert, num_experts - 1)
  rank = position - start[owner]
  nth = rank // tile
  tile_of_row = jnp.where(
    nth < head, owner, heads + extra_start[owner] + nth - head
  )
  row_slot = jnp.where(known, tile_of_row * tile + rank % tile, -1)
  return Routing(
    group_sizes=sizes,
    tile_expert=tile_expert,
    num_tiles=heads + extra_end[-1],
    slot_row=slot_row,
    row_slot=row_slot.reshape(expert_ids.shape),
  )
