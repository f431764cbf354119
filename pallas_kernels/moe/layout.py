"""Where routed rows lie for the GPU kernels: groups aligned to tiles.

The tables of `routing.py` without a head: all tiles of an expert in a row, plus
the first row and the number of rows of each expert. A kernel finds the expert
of a tile by one load; it never scans the experts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import movement, routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
  """Tables of the aligned layout, all int32; -1 marks what is empty.

  Attributes:
    tile_expert: [tiles], the expert whose weights a tile needs.
    num_tiles: [1], how many tiles are in use. What the others hold is
      undefined and never read.
    start: [E], the first slot of each expert, a multiple of the tile.
    size: [E], rows of each expert; its slots past them are padding.
    order: [E], experts by falling size, so that the longest work starts first.
    slot_row: [tiles * tile], the row t * K + k in each slot, or -1.
    row_slot: [T, K], the slot of each row, or -1.
  """

  tile_expert: Any
  num_tiles: Any
  start: Any
  size: Any
  order: Any
  slot_row: Any
  row_slot: Any

  @property
  def token(self) -> Int[Array, "M"]:
    """The token in each slot, or -1."""
    choices = self.row_slot.shape[1]
    return jnp.where(self.slot_row < 0, -1, self.slot_row // choices)

  def combine(self, rows, gates=None) -> Float[Array, "T H"]:
    """Sums each token's rows, [M, H], in k order, times gates if given."""
    return movement.combine(self.row_slot, rows[None], rows[None][:0], gates)


def build(
  expert_ids: Int[Array, "T K"], num_experts: int, tile: int = 128
) -> Layout:
  """Groups rows by expert; a pure function of the ids, without scatters.

  Args:
    expert_ids: the expert of each (token, k); outside [0, num_experts) no slot.
    num_experts: E.
    tile: rows a tile, see the `tiles.tile_rows` of each implementation.

  Returns:
    The tables, see `Layout`.
  """
  table = routing.route(expert_ids, num_experts, tile, head=False)
  padded = -(-table.group_sizes // tile) * tile
  start = jnp.cumsum(padded, dtype=jnp.int32) - padded
  return Layout(
    tile_expert=table.tile_expert,
    num_tiles=table.num_tiles.reshape(1),
    start=start,
    size=table.group_sizes,
    order=jnp.argsort(-table.group_sizes).astype(jnp.int32),
    slot_row=table.slot_row,
    row_slot=table.row_slot,
  )
