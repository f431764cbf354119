"""Where every routed row goes: rows grouped by expert, groups cut into tiles.

A *row* is one (token, k) pair, numbered t * K + k. A *slot* is a place for a
row in the tiled layout that matrix multiplications walk: each tile holds rows
of one expert, its last slots may be empty. The tables are a pure function of
the expert ids, made of sorts, comparisons and gathers on the device: no
scatter, no read-back by the host, the same bits on every run.

Not for communication: which rank owns an expert is decided by the caller, who
passes ids relative to the first expert that it holds.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# An int32 array, or what a tree transformation puts in its place.
Table = Any


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

  group_sizes: Table
  tile_expert: Table
  num_tiles: Table
  slot_row: Table
  row_slot: Table


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
  flat = expert_ids.reshape(-1).astype(jnp.int32)
  expert = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
  # A stable sort, with a mark sorted in before the rows of each expert: where
  # the marks land is where groups begin, so no search is needed.
  marks = _iota(num_experts + 1)
  keys = jnp.concatenate([marks, expert])
  _, order = lax.sort((keys, _iota(len(keys))), num_keys=1, is_stable=True)
  _, position = lax.sort((order, _iota(len(keys))), num_keys=1)  # Its inverse.
  start, position = jnp.split(position, [len(marks)])
  sizes = jnp.diff(start) - 1
  start, rows = start[:-1] + 1, len(expert)
  # Tiles after the head, and where each expert's begin.
  extra = jnp.maximum(-(-sizes // tile) - head, 0)
  extra_end = jnp.cumsum(extra, dtype=jnp.int32)
  extra_start = extra_end - extra

  heads = num_experts if head else 0
  tail = _iota(max_tiles(rows, num_experts, tile, head=head) - heads)
  tail_expert = jnp.searchsorted(
    extra_end, tail, side="right", method="compare_all"
  )
  tail_expert = jnp.minimum(tail_expert.astype(jnp.int32), num_experts - 1)
  tail_nth = tail - extra_start[tail_expert] + head
  tile_expert = jnp.concatenate([_iota(heads), tail_expert])
  tile_nth = jnp.concatenate([jnp.zeros(heads, jnp.int32), tail_nth])

  rank = tile_nth[:, None] * tile + _iota(tile)[None]
  filled = rank < sizes[tile_expert][:, None]
  source = jnp.where(filled, start[tile_expert][:, None] + rank, 0)
  slot_row = jnp.where(filled, order[source] - len(marks), -1).reshape(-1)

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


def _iota(n):
  return jnp.arange(n, dtype=jnp.int32)
