"""Tile shapes of the Hopper kernels, from shape and SM count alone.

A rule, not a search: what a shape gets never depends on a measurement at run
time, so machines of one kind make the same bits. No tile shape changes the
order of a sum over the contraction, which always runs in steps of 64.

- A tile has 128 rows, one expert's, 64 for each of two consumer warpgroups.
- Columns: the most that divide the width and whose accumulators fit the
  registers: 64 x 256 float32 are 128 registers a thread. Gate and up share
  them, so 128 each. Narrower tiles would ask more of the L2 cache than it has.
- Stages: as many as shared memory has room for, at most four.
- Bands of eight row tiles share the weights that they meet in the L2 cache.
"""

import dataclasses

import jax

from pallas_kernels.moe.mosaic.engine import DEPTH
from pallas_kernels.moe.mosaic.layout import TILE

# A block's shared memory on Hopper, less 1 KiB for barriers and row sums.
_SHARED_BYTES = 226 * 1024
# 64 rows of 128 bytes: what a consumer stores, or fetches, at once.
_CHUNK_BYTES = 64 * 128
_ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Arguments of a kernel: see each for what they mean."""

  columns: int
  stages: int
  band: int
  num_sms: int

  def arguments(self) -> dict[str, int]:
    """Returns the tiles as keyword arguments."""
    return dataclasses.asdict(self)


def gate_up(inner: int) -> Tiles:
  """Tiles of the gate and up projections, I = inner."""
  return _tiles(inner, most=128, operands=2)


def matmul(width: int) -> Tiles:
  """Tiles of a grouped multiplication with so many output columns."""
  return _tiles(width, most=256)


def swiglu_gradient(inner: int) -> Tiles:
  """Tiles of the backward pass through SwiGLU, I = inner."""
  return _tiles(inner, most=256, buffers=10 * _CHUNK_BYTES)


def weight_gradient(height: int, width: int) -> Tiles:
  """Tiles of weight gradients [height, width]."""
  if height % TILE:  # The consumers split the columns, at least 64 for each.
    return _tiles(width, most=256, choices=(256, 128))
  return _tiles(width, most=256)


def sm_count() -> int:
  """Returns how many blocks to start: one for each SM of this GPU."""
  return getattr(jax.devices()[0], "core_count", None) or 132


def _tiles(
  width, *, most, operands=1, buffers=4 * _CHUNK_BYTES,
  choices=(256, 192, 128, 64),
):  # fmt: skip
  columns = next(c for c in choices if c <= most and width % c == 0)
  stage = DEPTH * (TILE + operands * columns) * _ELEMENT_BYTES
  stages = min(4, (_SHARED_BYTES - buffers) // stage)
  return Tiles(columns, stages, band=8, num_sms=sm_count())
