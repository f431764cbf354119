"""Backward through the down projection and SwiGLU, as one multiplication.

dA' = dY W_down^T, with the rows of dY gathered in the loads. The epilogue turns
dA' and the pre-activations into the gradients of gate and up, the recomputed
activation that the weight gradient of the down projection needs, and the row
sums of dA' * A, the gradient of the gate weight (so the expert outputs are
never saved). Sums over column tiles are left apart, to be added in order.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.triton import engine, swiglu


def swiglu_gradient(
  dy: Float[Array, "T H"],
  token: Int[Array, "M"],
  weight: Float[Array, "M"],
  pre: Float[Array, "M II"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  w_down: Float[Array, "E I H"],
  tiles,
  *,
  clamp: float | None = None,
) -> tuple[Array, Array, Array]:
  """Gradients of gate, up and gate weights, and the weighted activation.

  Args:
    dy: output gradient of the tokens.
    token: the token of each row, or -1: then the row's results have no meaning.
    weight: float32 gate weight of each row.
    pre: gate and up pre-activations side by side.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    w_down: weights.
    tiles: a `tiles.Tiles`.
    clamp: limit of the pre-activations, see `swiglu`.

  Returns:
    The gradients of gate and up side by side, [M, 2 I]; weight * A, [M, I];
    and, for each tile of columns of I, the row sums of dA' * A in float32,
    [parts, M].
  """
  _, inner, width = w_down.shape
  rows, parts = len(token), inner // tiles.columns
  d_pre, act, sums = engine.launch(
    _swiglu_gradient,
    *(dy, token, weight, pre, tile_expert, num_tiles, w_down),
    out_type=[
      jax.ShapeDtypeStruct((rows, 2 * inner), dy.dtype),
      jax.ShapeDtypeStruct((rows, inner), dy.dtype),
      jax.ShapeDtypeStruct((parts, rows), jnp.float32),
    ],
    grid=len(tile_expert) * parts,
    tiles=tiles,
    M=rows,
    H=width,
    I=inner,
    ROWS=tiles.rows,
    COLUMNS=tiles.columns,
    DEPTH=tiles.depth,
    BAND=tiles.band,
    LIMIT=clamp,
  )
  return d_pre, act, sums


@triton.jit
@no_type_check
def _swiglu_gradient(
  dy,
  token,
  weight,
  pre,
  tile_expert,
  num_tiles,
  w,
  d_pre,
  act,
  sums,
  M: tl.constexpr,
  H: tl.constexpr,
  I: tl.constexpr,  # noqa: E741
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  DEPTH: tl.constexpr,
  BAND: tl.constexpr,
  LIMIT: tl.constexpr,
):
  block, in_use = tl.program_id(0), tl.load(num_tiles)
  if block >= in_use * (I // COLUMNS):
    return
  row_tile, column_tile = engine.place(block, in_use, I // COLUMNS, BAND)
  first, row = row_tile.to(tl.int64) * ROWS, tl.arange(0, ROWS)
  column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
  step = tl.arange(0, DEPTH)
  source = tl.maximum(tl.load(token + first + row), 0).to(tl.int64)
  expert = tl.load(tile_expert + row_tile).to(tl.int64)

  dy_at = dy + source[:, None] * H + step[None]
  w_at = w + expert * (H * I) + column[:, None] * H + step[None]
  d_act = tl.zeros((ROWS, COLUMNS), tl.float32)
  for _ in range(H // DEPTH):
    d_act = tl.dot(tl.load(dy_at), tl.trans(tl.load(w_at)), d_act)
    dy_at += DEPTH
    w_at += DEPTH

  # A quarter of the columns at a time: more would not fit the registers.
  share = tl.load(weight + first + row)
  pre += first * (2 * I)
  d_pre += first * (2 * I)
  act += first * I
  quarter: tl.constexpr = COLUMNS // 4
  column = column_tile * COLUMNS + tl.arange(0, quarter)
  left, right = _halves(d_act)
  one, two = _halves(left)
  three, four = _halves(right)
  products = _finish(one, share, row, column, pre, d_pre, act, I, LIMIT)
  column += quarter
  products += _finish(two, share, row, column, pre, d_pre, act, I, LIMIT)
  column += quarter
  products += _finish(three, share, row, column, pre, d_pre, act, I, LIMIT)
  column += quarter
  products += _finish(four, share, row, column, pre, d_pre, act, I, LIMIT)
  tl.store(sums + column_tile.to(tl.int64) * M + first + row, products)


@triton.jit
@no_type_check
def _halves(tile):
  """The left and the right half of the columns of a tile."""
  rows: tl.constexpr = tile.shape[0]
  columns: tl.constexpr = tile.shape[1]
  halves = tl.reshape(tile, (rows, 2, columns // 2))
  return tl.split(tl.trans(halves, 0, 2, 1))


@triton.jit
@no_type_check
def _finish(
  d_act,
  share,
  row,
  column,
  pre,
  d_pre,
  act,
  I: tl.constexpr,  # noqa: E741
  LIMIT: tl.constexpr,
):
  """Stores the gradients of some columns; returns the sums of dA' * A."""
  dtype = pre.dtype.element_ty
  at = row[:, None] * (2 * I) + column[None]
  gate, up = tl.load(pre + at), tl.load(pre + at + I)
  value = swiglu.activation(gate, up, LIMIT)
  weighted = (share[:, None] * value).to(dtype)
  tl.store(act + row[:, None] * I + column[None], weighted)
  d_gate, d_up = swiglu.gradients(gate, up, share[:, None] * d_act, LIMIT)
  tl.store(d_pre + at, d_gate.to(dtype))
  tl.store(d_pre + at + I, d_up.to(dtype))
  return tl.sum(d_act * value, axis=1)
