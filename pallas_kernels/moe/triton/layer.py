"""The MoE layer of one NVIDIA GPU, forward and backward, from Triton kernels.

Forward: routing tables, gate/up with SwiGLU (the gather rides in its loads),
down, and a combine that weights and sums each token's rows in k order. Backward
walks the same tables: the gradient through down and SwiGLU, the gradient of the
rows, two weight gradients, and a combine. No gathered copy of the tokens or
their gradients exists. Combines are XLA's, as in the portable layer.

Saved for backward: the inputs, the tables, and the gate and up pre-activations,
never the expert outputs. No atomics, one owner an output element, sums in a
fixed order: the same bits on every run.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import layout
from pallas_kernels.moe.movement import take
from pallas_kernels.moe.triton import tiles
from pallas_kernels.moe.triton.gate_up import gate_up
from pallas_kernels.moe.triton.matmul import matmul
from pallas_kernels.moe.triton.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.triton.weight_gradient import weight_gradient


def apply(
  x: Float[Array, "T H"],
  expert_ids: Int[Array, "T K"],
  gates: Float[Array, "T K"],
  w_gate_up: Float[Array, "E H 2 I"],
  w_down: Float[Array, "E I H"],
  *,
  expected_rows: int | None = None,
  out_dtype=None,
  clamp: float | None = None,
  grad_totals=None,
) -> Float[Array, "T H"]:
  """The layer of `moe_ffn`, by Triton kernels.

  Args:
    x: tokens, bfloat16 or float16; H a multiple of 64.
    expert_ids: experts of each token; ids outside [0, E) contribute nothing.
    gates: weight of each expert's output, float32.
    w_gate_up: gate and up projections; I a multiple of 64.
    w_down: down projections.
    expected_rows: how many of the T * K rows are likely to have an expert here
      (all, by default). It sizes the tiles.
    out_dtype: dtype of the result, x.dtype by default.
    clamp: limit of the pre-activations, or None.
    grad_totals: float32 weight gradients to add to, see `moe_ffn`, or None.

  Returns:
    The combined expert outputs, [T, H].
  """
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  tile = tiles.tile_rows(expected_rows or expert_ids.size, len(w_down))
  static = Static(out_dtype, clamp, tile)
  return _moe(static, x, expert_ids, gates, w_gate_up, w_down, grad_totals)


@dataclasses.dataclass(frozen=True)
class Static:
  """What is known when a layer is compiled."""

  out_dtype: Any
  clamp: float | None
  tile: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(static, *arrays):
  return _forward(static, *arrays)[0]


def _forward(static, x, expert_ids, gates, w_gate_up, w_down, totals):
  experts, inner, width = w_down.shape
  table = layout.build(expert_ids, experts, static.tile)
  used = table.tile_expert, table.num_tiles
  choice = tiles.gate_up(inner, static.tile)
  token = table.token
  act, pre = gate_up(x, token, *used, w_gate_up, choice, clamp=static.clamp)
  choice = tiles.matmul(width, static.tile)
  out = matmul(act, *used, w_down, choice, transposed=False)
  y = table.combine(out, gates).astype(static.out_dtype)
  return y, (x, gates, w_gate_up, w_down, totals, table, pre)


def _backward(static, residuals, dy):
  x, gates, w_gate_up, w_down, totals, table, pre = residuals
  experts, inner, width = w_down.shape
  used = table.tile_expert, table.num_tiles
  token, dy = table.token, dy.astype(x.dtype)
  weight = take(gates.reshape(-1), table.slot_row)

  d_pre, act, products = swiglu_gradient(
    *(dy, token, weight, pre, *used, w_down),
    tiles.swiglu_gradient(inner, static.tile),
    clamp=static.clamp,
  )
  d_x_rows = matmul(
    d_pre,
    *used,
    w_gate_up.reshape(experts, width, 2 * inner),
    tiles.matmul(width, static.tile),
    transposed=True,
  )

  def of_weights(rows, d, weights, total, gathered):
    if total is not None:
      total = total.reshape(experts, rows.shape[1], d.shape[1])
    gradient = weight_gradient(
      *(rows, d, token, table.start, table.size, table.order, total),
      tiles.weight_gradient(rows.shape[1], d.shape[1], added=total is not None),
      gathered=gathered,
      out_dtype=weights.dtype if total is None else jnp.float32,
    ).reshape(weights.shape)
    # Where a total takes the gradient, the weights get none.
    return (gradient, None) if total is None else (None, gradient)

  of_gate_up, of_down = totals or (None, None)
  d_down, of_down = of_weights(act, dy, w_down, of_down, "d")
  d_gate_up, of_gate_up = of_weights(x, d_pre, w_gate_up, of_gate_up, "x")
  return (
    table.combine(d_x_rows).astype(x.dtype),
    None,
    take(functools.reduce(jnp.add, products), table.row_slot),
    d_gate_up,
    d_down,
    totals and (of_gate_up, of_down),
  )


_moe.defvjp(_forward, _backward)
