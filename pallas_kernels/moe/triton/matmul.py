"""Grouped matrix multiplication: each tile of rows with its expert's weights.

The down projection of forward, and the gradient of the rows in backward, which
reads the same weights transposed, so no transposed copy of them exists.
"""

from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.triton import engine


def matmul(
  x: Float[Array, "M A"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  weights: Float[Array, "E B C"],
  tiles,
  *,
  transposed: bool,
) -> Float[Array, "M D"]:
  """Computes x W[expert], or x W[expert]^T if `transposed`, for rows in tiles.

  Args:
    x: rows grouped by expert, in tiles.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    weights: [E, A, D], or [E, D, A] if transposed.
    tiles: a `tiles.Tiles`.
    transposed: whether to multiply by the transpose.
  """
  rows, depth = x.shape
  width = weights.shape[1 if transposed else 2]
  (y,) = engine.launch(
    _matmul,
    *(x, tile_expert, num_tiles, weights),
    out_type=[jax.ShapeDtypeStruct((rows, width), x.dtype)],
    grid=len(tile_expert) * (width // tiles.columns),
    tiles=tiles,
    A=depth,
    D=width,
    TRANSPOSED=transposed,
    ROWS=tiles.rows,
    COLUMNS=tiles.columns,
    DEPTH=tiles.depth,
    BAND=tiles.band,
  )
  return y


@triton.jit
@no_type_check
def _matmul(
  x,
  tile_expert,
  num_tiles,
  w,
  y,
  A: tl.constexpr,
  D: tl.constexpr,
  TRANSPOSED: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  DEPTH: tl.constexpr,
  BAND: tl.constexpr,
):
  block, in_use = tl.program_id(0), tl.load(num_tiles)
  if block >= in_use * (D // COLUMNS):
    return
  row_tile, column_tile = engine.place(block, in_use, D // COLUMNS, BAND)
  first, row = row_tile.to(tl.int64) * ROWS, tl.arange(0, ROWS)
  column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
  step = tl.arange(0, DEPTH)

  x_at = x + first * A + row[:, None] * A + step[None]
  w_at = w + tl.load(tile_expert + row_tile).to(tl.int64) * (A * D)
  if TRANSPOSED:
    w_at += column[:, None] * A + step[None]
  else:
    w_at += step[:, None] * D + column[None]
  total = tl.zeros((ROWS, COLUMNS), tl.float32)
  for _ in range(A // DEPTH):
    w_tile = tl.load(w_at)
    total = tl.dot(
      tl.load(x_at), tl.trans(w_tile) if TRANSPOSED else w_tile, total
    )
    x_at += DEPTH
    w_at += DEPTH if TRANSPOSED else DEPTH * D
  y_at = y + first * D + row[:, None] * D + column[None]
  tl.store(y_at, total.to(x.dtype.element_ty))
