"""Weight gradients: for each expert X^T D, a contraction over its rows.

Groups are ragged: the last step of one may reach into padding, where both
operands are loaded as zeros, whatever padding holds. Each output tile has one
owner, which sums in row order in float32, and an expert without rows gets
zeros. Either operand may be gathered from tokens in the loads.
"""

from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.triton import engine


def weight_gradient(
  x: Float[Array, "X A"],
  d: Float[Array, "D B"],
  token: Int[Array, "M"],
  start: Int[Array, "E"],
  size: Int[Array, "E"],
  order: Int[Array, "E"],
  total: Float[Array, "E A B"] | None,
  tiles,
  *,
  gathered: str,
  out_dtype,
) -> Float[Array, "E A B"]:
  """x[rows of e]^T d[rows of e] for each expert e, plus total[e] if given.

  Args:
    x: rows grouped by expert, or tokens.
    d: their gradients, or those of tokens.
    token: the token of each row.
    start: the first row of each expert.
    size: rows of each expert.
    order: the experts, in the order in which to take them up.
    total: a float32 gradient to add to, or None.
    tiles: a `tiles.Tiles`.
    gathered: which of "x" and "d" holds tokens.
    out_dtype: dtype of the result; float32 if `total` is given.
  """
  height, width, experts = x.shape[1], d.shape[1], len(start)
  (gradient,) = engine.launch(
    _weight_gradient,
    *(x, d, token, start, size, order, size if total is None else total),
    out_type=[jax.ShapeDtypeStruct((experts, height, width), out_dtype)],
    grid=experts * (height // tiles.rows) * (width // tiles.columns),
    tiles=tiles,
    A=height,
    B=width,
    GATHER_X=gathered == "x",
    ADD=total is not None,
    ROWS=tiles.rows,
    COLUMNS=tiles.columns,
    DEPTH=tiles.depth,
    BAND=tiles.band,
  )
  return gradient


@triton.jit
@no_type_check
def _weight_gradient(
  x,
  d,
  token,
  start,
  size,
  order,
  total,
  out,
  A: tl.constexpr,
  B: tl.constexpr,
  GATHER_X: tl.constexpr,
  ADD: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  DEPTH: tl.constexpr,
  BAND: tl.constexpr,
):
  down: tl.constexpr = A // ROWS
  across: tl.constexpr = B // COLUMNS
  block = tl.program_id(0)
  expert = tl.load(order + block // (down * across)).to(tl.int64)
  row_tile, column_tile = engine.place(
    block % (down * across), down, across, BAND
  )
  a = row_tile * ROWS + tl.arange(0, ROWS)
  b = column_tile * COLUMNS + tl.arange(0, COLUMNS)
  count = tl.load(size + expert)
  first = tl.load(start + expert).to(tl.int64)

  gradient = tl.zeros((ROWS, COLUMNS), tl.float32)
  nth = tl.arange(0, DEPTH)
  # One step ahead of its use. A load that waits for another in the same step
  # would take stages from the pipeline of those that matter.
  source = tl.load(token + first + nth, mask=nth < count, other=0)
  for _ in range(0, count, DEPTH):
    filled, row, at = nth < count, first + nth, source.to(tl.int64)
    x_row, d_row = (at, row) if GATHER_X else (row, at)
    x_tile = tl.load(
      x + x_row[None] * A + a[:, None], mask=filled[None], other=0.0
    )
    d_tile = tl.load(
      d + d_row[:, None] * B + b[None], mask=filled[:, None], other=0.0
    )
    gradient = tl.dot(x_tile, d_tile, gradient)
    nth += DEPTH
    source = tl.load(token + first + nth, mask=nth < count, other=0)

  where = a[:, None] * B + b[None]
  if ADD:
    gradient += tl.load(total + expert * (A * B) + where)
  out += expert * (A * B)
  tl.store(out + where, gradient.to(out.dtype.element_ty))
