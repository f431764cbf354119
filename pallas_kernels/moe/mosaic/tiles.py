"""Tile shapes of the Hopper kernels: a pure function of shape, dtype and chip.

First the table of measured choices, `tuned.json`, which `benchmarks/moe_stages`
writes and this package ships; where it has no entry, a rule. Nothing is
measured at run time, so machines of one kind make the same bits. No tile shape
changes the order of a sum over the contraction, which runs in steps of 64; the
columns of the SwiGLU gradient group the sums of the gates' gradients, so the
table may change its stages and bands only.

The rule:

- A tile has 128 rows of one expert, 64 for each of two consumer warpgroups.
  Where experts have few rows, it has 64, and the consumers split its columns.
- Columns: the most that divide the width and whose accumulators fit the
  registers: 64 x 256 float32 are 128 registers a thread. Gate and up share
  them, so 128 each. Narrower tiles would ask more of the L2 cache than it has.
- Stages: as many as shared memory has room for, at most four.
- Bands of eight row tiles share the weights that they meet in the L2 cache.
"""

import dataclasses
import functools
import json
import pathlib

from pallas_kernels.moe import target
from pallas_kernels.moe.mosaic.engine import DEPTH, FEW_ROWS, ROWS

TABLE = pathlib.Path(__file__).with_name("tuned.json")

# A block's shared memory on Hopper, less 1 KiB for barriers and row sums.
_SHARED_BYTES = 226 * 1024
# 64 rows of 128 bytes: what a consumer stores, or fetches, at once.
_CHUNK_BYTES = 64 * 128
_ELEMENT_BYTES = 2
# The largest I at which gathering costs more than it saves.
_SHORT = 1024


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


def tile_rows(rows: int, num_experts: int, inner: int, width: int) -> int:
  """Returns the rows of a tile, for T * K = rows, I = inner and H = width.

  Tiles of 64 rows move more weights a FLOP through the L2 cache, so they are
  for groups that mostly fit one: then reading weights from memory takes longer
  than that, and half the padding is half the work.
  """
  few = rows <= num_experts * FEW_ROWS // 2
  return FEW_ROWS if few and inner % 128 == width % 128 == 0 else ROWS


def gathers_in_loads(inner: int, rows: int) -> bool:
  """Whether gate/up is faster if its loads gather, for I = inner.

  A pass over memory that gathers rows first takes about 130 / I of the time of
  the multiplications, whatever H is: more than Triton loses to Mosaic.
  """
  return rows == ROWS and inner <= _SHORT


def gate_up(width: int, inner: int, rows: int = ROWS) -> Tiles:
  """Tiles of the gate and up projections, H = width and I = inner."""
  return _tiles(
    ("gate_up", width, inner), inner, rows=rows, most=128, operands=2
  )


def matmul(depth: int, width: int, rows: int = ROWS) -> Tiles:
  """Tiles of a grouped multiplication, [M, depth] to [M, width]."""
  return _tiles(("matmul", depth, width), width, rows=rows)


def swiglu_gradient(width: int, inner: int, rows: int = ROWS) -> Tiles:
  """Tiles of the backward pass through SwiGLU, H = width and I = inner."""
  return _tiles(
    ("swiglu_gradient", width, inner),
    inner,
    rows=rows,
    buffers=10 * _CHUNK_BYTES,
  )


def weight_gradient(height: int, width: int) -> Tiles:
  """Tiles of weight gradients [height, width]."""
  identity = ("weight_gradient", height, width)
  return _tiles(identity, width, rows=gradient_rows(height))


def gradient_rows(height: int) -> int:
  """Returns the rows of a tile of a weight gradient [height, ...]."""
  return FEW_ROWS if height % ROWS else ROWS


def sm_count() -> int:
  """Returns how many blocks to start: one for each SM of this GPU."""
  return getattr(target.device(), "core_count", None) or 132


def most_stages(
  columns: int, *, rows: int = ROWS, operands: int = 1, buffers: int
) -> int:
  """Returns how many stages of a pipeline fit into shared memory."""
  stage = DEPTH * (rows + operands * columns) * _ELEMENT_BYTES
  return (_SHARED_BYTES - buffers) // stage


def key(name: str, *dimensions: int, rows: int) -> str:
  """Returns the table's key of a kernel: gate_up_4096x1024_r128, for instance.

  Args:
    name: of a function of this module.
    dimensions: its arguments.
    rows: rows of a tile.
  """
  return f"{name}_{'x'.join(map(str, dimensions))}_r{rows}"


def _tiles(
  identity, width, *, rows, most=256, operands=1, buffers=4 * _CHUNK_BYTES
):
  # Consumers that split columns need 64 or 128 of them each.
  choices = (256, 192, 128, 64) if rows == ROWS else (256, 128)
  fitting = [c for c in choices if c <= most and width % c == 0]
  if not fitting:
    raise ValueError(f"{identity}: no tile of {rows} rows divides {width}.")
  columns = fitting[0]
  rule = {
    "columns": columns,
    "stages": min(
      4, most_stages(columns, rows=rows, operands=operands, buffers=buffers)
    ),
    "band": 8,
  }
  measured = _table().get(target.device().device_kind, {})
  return Tiles(
    **rule | measured.get(key(*identity, rows=rows), {}), num_sms=sm_count()
  )


@functools.cache
def _table():
  return json.loads(TABLE.read_text()) if TABLE.exists() else {}
