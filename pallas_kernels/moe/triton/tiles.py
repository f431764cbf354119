"""Tile shapes of the Triton kernels: a pure function of shapes and the card.

One table, and nothing is measured at run time, so cards of one kind make the
same bits. Tiles fit the shared memory of the smallest card that they are for:
99 KiB a block on Ada and on workstation cards (163 on an A100), 227 on Hopper.

A tile of a multiplication has `tile_rows` rows of one expert; that of a weight
gradient covers a part of the matrix. Bands of eight row tiles share the weights
that they meet in the L2 cache.
"""

import dataclasses

from pallas_kernels.moe import target


@dataclasses.dataclass(frozen=True)
class Tiles:
  """A tile of rows x columns, in steps of depth; warps and stages of a block.

  `band` is how many row tiles are walked together.
  """

  rows: int
  columns: int
  depth: int
  warps: int
  stages: int
  band: int = 8


# Kernel: the most columns a tile, depth, warps and stages. Gate and up count
# their columns each, so a tile of theirs is twice as wide.
_SMALL = {
  "gate_up": (64, 32, 8, 4),
  "matmul": (128, 32, 8, 4),
  "swiglu_gradient": (128, 32, 8, 4),
  "weight_gradient": (128, 32, 8, 4),
  "weight_gradient_added": (128, 32, 8, 4),
}
_HOPPER = {
  "gate_up": (128, 64, 8, 3),
  "matmul": (256, 64, 8, 3),
  "swiglu_gradient": (128, 64, 8, 3),
  "weight_gradient": (256, 64, 8, 3),
  "weight_gradient_added": (128, 64, 8, 3),  # A total takes registers too.
}


def tile_rows(rows: int, num_experts: int) -> int:
  """Returns the rows of a tile, for T * K = `rows`.

  As few as leave most groups in one tile: smaller tiles read more weights a
  row, larger ones compute more padding.
  """
  for tile in (16, 32, 64):
    if 2 * rows <= num_experts * tile:
      return tile
  return 128


def gate_up(inner: int, rows: int) -> Tiles:
  """Tiles of the gate and up projections, I = inner."""
  return _tiles("gate_up", inner, rows)


def matmul(width: int, rows: int) -> Tiles:
  """Tiles of a grouped multiplication to [M, width]."""
  return _tiles("matmul", width, rows)


def swiglu_gradient(inner: int, rows: int) -> Tiles:
  """Tiles of the backward pass through SwiGLU, I = inner."""
  return _tiles("swiglu_gradient", inner, rows)


def weight_gradient(height: int, width: int, *, added: bool) -> Tiles:
  """Tiles of weight gradients [height, width], added to a total or not."""
  name = "weight_gradient_added" if added else "weight_gradient"
  return _tiles(name, width, 64 if height % 128 else 128)


def _tiles(name, width, rows):
  capability = getattr(target.device(), "compute_capability", None)
  most, depth, warps, stages = (_HOPPER if capability == "9.0" else _SMALL)[
    name
  ]
  columns = next(c for c in (256, 128, 64) if c <= most and width % c == 0)
  # Fewer accumulators need fewer warps: at least 32 of them a thread.
  if rows * columns < 32 * 32 * warps:
    warps = 4
  return Tiles(rows, columns, depth, warps, stages)
