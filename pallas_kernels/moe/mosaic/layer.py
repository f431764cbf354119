"""The MoE layer of one Hopper GPU, forward and backward, from Mosaic kernels.

Forward: routing tables, a gather of the rows, gate/up with SwiGLU, down, and a
combine that weights and sums each token's rows in k order. Backward walks the
same tables: a gather, the gradient through down and SwiGLU, the gradient of the
rows, two weight gradients, and a combine. Gathers and combines are XLA's, as in
the portable layer. Where rows are short beside their multiplication, gathering
them costs more than a slower kernel: gate/up then is Triton's, if that is
installed, whose loads follow the tokens' numbers.

Saved for backward: the inputs, the tables, and the gate and up pre-activations,
never the expert outputs. No float atomics, one owner an output element, sums in
a fixed order: the same bits whatever the number of SMs.

Padding between groups is zero throughout, from the gathered rows on, so that
the weight gradients need not tell it from rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import layout, target, triton
from pallas_kernels.moe.mosaic import tiles
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.gather import Movers
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient
from pallas_kernels.moe.movement import take


def cannot_run(*, x, w_gate_up, w_down, **_) -> str:
  """Returns why this implementation can't run here, or an empty string."""
  del w_gate_up
  _, inner, width = w_down.shape
  if x.dtype not in (jnp.bfloat16, jnp.float16):
    return f"it computes in bfloat16 or float16, not in {x.dtype}"
  if width % 64 or inner % 64 or (width % 128 and inner % 128):
    return (
      f"H = {width} and I = {inner} are not both multiples of 64, and one of"
      " 128"
    )
  device = target.device()
  if getattr(device, "compute_capability", None) != "9.0":
    return f"it needs a Hopper GPU (sm_90), not {device.device_kind}"
  return ""


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
  overlap: Movers | None = None,
  in_loads: bool | None = None,
) -> Float[Array, "T H"]:
  """The layer of `moe_ffn`, by Mosaic kernels.

  Args:
    x: tokens, bfloat16 or float16; H a multiple of 64.
    expert_ids: experts of each token; ids outside [0, E) contribute nothing.
    gates: weight of each expert's output, float32.
    w_gate_up: gate and up projections; I a multiple of 64, and H or I of 128.
    w_down: down projections.
    expected_rows: how many of the T * K rows are likely to have an expert here
      (all, by default). It sizes the tiles.
    out_dtype: dtype of the result, x.dtype by default.
    clamp: limit of the pre-activations, or None.
    overlap: private: gathers beside multiplications, by these.
    in_loads: private: whether Triton's gate/up gathers in its loads; None
      where that is faster.
    grad_totals: float32 weight gradients to add to, see `moe_ffn`, or None.

  Returns:
    The combined expert outputs, [T, H].
  """
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  tile = tiles.tile_rows(expected_rows or expert_ids.size, *w_down.shape)
  if in_loads is None:
    in_loads = (
      not overlap
      and tiles.gathers_in_loads(w_down.shape[1], tile)
      and not triton.cannot_run(x=x, w_gate_up=w_gate_up, w_down=w_down)
    )
  static = Static(out_dtype, clamp, tile, overlap, in_loads)
  return _moe(static, x, expert_ids, gates, w_gate_up, w_down, grad_totals)


@dataclasses.dataclass(frozen=True)
class Static:
  """What is known when a layer is compiled."""

  out_dtype: Any
  clamp: float | None
  tile: int
  overlap: Movers | None
  in_loads: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(static, *arrays):
  return _forward(static, *arrays)[0]


def _forward(static, x, expert_ids, gates, w_gate_up, w_down, totals):
  experts, inner, width = w_down.shape
  table = layout.build(expert_ids, experts, static.tile)
  used = table.tile_expert, table.num_tiles
  act, pre = _gate_up(static, x, table, w_gate_up)
  choice = tiles.matmul(inner, width, static.tile)
  out = matmul(act, *used, w_down, transposed=False, **choice.arguments())
  y = table.combine(out, gates).astype(static.out_dtype)
  return y, (x, gates, w_gate_up, w_down, totals, table, pre)


def _gate_up(static, x, table, weights):
  _, width, _, inner = weights.shape
  used = table.tile_expert, table.num_tiles
  token, movers = table.token, static.overlap
  if static.in_loads:
    return triton.apply_gate_up(
      x, token, *used, weights, rows=static.tile, clamp=static.clamp
    )
  choice = tiles.gate_up(width, inner, static.tile)
  return gate_up(
    x if movers else take(x, token),
    *used,
    weights,
    token if movers else None,
    movers=movers,
    clamp=static.clamp,
    **choice.arguments(),
  )


def _backward(static, residuals, dy):
  x, gates, w_gate_up, w_down, totals, table, pre = residuals
  experts, inner, width = w_down.shape
  used = table.tile_expert, table.num_tiles
  groups = table.start, table.size, table.order
  token, movers = table.token, static.overlap
  dy = dy.astype(x.dtype)
  d_rows = None if movers else take(dy, token)
  weight = take(gates.reshape(-1), table.slot_row)

  choice = tiles.swiglu_gradient(width, inner, static.tile)
  d_pre, act, products, *gathered = swiglu_gradient(
    dy if movers else d_rows,
    weight,
    pre,
    *used,
    w_down,
    token if movers else None,
    movers=movers,
    clamp=static.clamp,
    **choice.arguments(),
  )
  choice = tiles.matmul(2 * inner, width, static.tile)
  flat = w_gate_up.reshape(experts, width, 2 * inner)
  d_x_rows = matmul(
    d_pre,
    *used,
    flat,
    *((x, token) if movers else ()),
    movers=movers,
    transposed=True,
    **choice.arguments(),
  )
  if movers:
    (d_rows,), (d_x_rows, x_rows) = gathered, d_x_rows
  else:
    x_rows = take(x, token)

  def of_weights(rows, d, weights, total):
    if total is not None:
      total = total.reshape(experts, rows.shape[1], d.shape[1])
    choice = tiles.weight_gradient(rows.shape[1], d.shape[1])
    gradient = weight_gradient(
      rows,
      d,
      *groups,
      total,
      out_dtype=weights.dtype if total is None else jnp.float32,
      **choice.arguments(),
    ).reshape(weights.shape)
    # Where a total takes the gradient, the weights get none.
    return (gradient, None) if total is None else (None, gradient)

  total_gate_up, total_down = totals or (None, None)
  d_down, total_down = of_weights(act, d_rows, w_down, total_down)
  d_gate_up, total_gate_up = of_weights(x_rows, d_pre, w_gate_up, total_gate_up)
  return (
    table.combine(d_x_rows).astype(x.dtype),
    None,
    take(functools.reduce(jnp.add, products), table.row_slot),
    d_gate_up,
    d_down,
    totals and (total_gate_up, total_down),
  )


_moe.defvjp(_forward, _backward)
