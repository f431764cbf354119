"""Gate and up projections with SwiGLU; the gather of tokens rides in the loads.

Both projections of a row share one pass over its token. The epilogue rounds
the pre-activations to the storage type, which backward will read, and computes
the activation from the rounded values.
"""

from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.triton import engine, swiglu


def gate_up(
  x: Float[Array, "T H"],
  token: Int[Array, "M"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  w_gate_up: Float[Array, "E H 2 I"],
  tiles,
  *,
  clamp: float | None = None,
) -> tuple[Array, Array]:
  """silu(x Wg) * (x Wu) and its pre-activations, for rows in tiles.

  Args:
    x: tokens.
    token: the token of each row, or -1: then the row's result is zero.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    w_gate_up: weights; gate at [:, :, 0], up at [:, :, 1].
    tiles: a `tiles.Tiles`.
    clamp: limit of the pre-activations, see `swiglu`.

  Returns:
    The activation, [M, I], and gate and up side by side, [M, 2 I].
  """
  width, inner = w_gate_up.shape[1], w_gate_up.shape[3]
  act, pre = engine.launch(
    _gate_up,
    *(x, token, tile_expert, num_tiles, w_gate_up),
    out_type=[
      jax.ShapeDtypeStruct((len(token), inner), x.dtype),
      jax.ShapeDtypeStruct((len(token), 2 * inner), x.dtype),
    ],
    grid=len(tile_expert) * (inner // tiles.columns),
    tiles=tiles,
    H=width,
    I=inner,
    ROWS=tiles.rows,
    COLUMNS=tiles.columns,
    DEPTH=tiles.depth,
    BAND=tiles.band,
    LIMIT=clamp,
  )
  return act, pre


@triton.jit
@no_type_check
def _gate_up(
  x,
  token,
  tile_expert,
  num_tiles,
  w,
  act,
  pre,
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
  source = tl.load(token + first + row).to(tl.int64)
  expert = tl.load(tile_expert + row_tile).to(tl.int64)

  x_at = x + tl.maximum(source, 0)[:, None] * H + step[None]
  w_at = w + expert * (2 * H * I) + step[:, None] * (2 * I) + column[None]
  gate = tl.zeros((ROWS, COLUMNS), tl.float32)
  up = tl.zeros((ROWS, COLUMNS), tl.float32)
  for _ in range(H // DEPTH):
    x_tile = tl.load(x_at)
    gate = tl.dot(x_tile, tl.load(w_at), gate)
    up = tl.dot(x_tile, tl.load(w_at + I), up)
    x_at += DEPTH
    w_at += DEPTH * 2 * I

  dtype = x.dtype.element_ty
  # Selected, not multiplied: the token that stands in may hold anything.
  filled = (source >= 0)[:, None]
  gate = tl.where(filled, gate, 0).to(dtype)
  up = tl.where(filled, up, 0).to(dtype)
  pre_at = pre + first * (2 * I) + row[:, None] * (2 * I) + column[None]
  tl.store(pre_at, gate)
  tl.store(pre_at + I, up)
  value = swiglu.activation(gate, up, LIMIT)
  act_at = act + first * I + row[:, None] * I + column[None]
  tl.store(act_at, value.to(dtype))
