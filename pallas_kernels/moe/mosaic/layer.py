"""The MoE layer of one Hopper GPU, forward and backward, from Mosaic kernels.

Forward: routing tables, a gather of the rows, gate/up with SwiGLU, down, and a
combine that weights and sums each token's rows in k order. Backward walks the
same tables: a gather, the gradient through down and SwiGLU, the gradient of the
rows, two weight gradients, and a combine. Gathers and combines are XLA's, as in
the portable layer.

Saved for backward: the inputs, the tables, and the gate and up pre-activations,
never the expert outputs. No float atomics, one owner an output element, sums in
a fixed order: the same bits whatever the number of SMs. Interpreted on CPUs and
compiled for sm_90a in the tests; not yet run on a GPU, hence chosen only by
name.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import layout, tiles
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient
from pallas_kernels.moe.movement import combine, take


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
  device = jax.devices()[0]
  if device.platform != "gpu" or device.compute_capability != "9.0":
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
) -> Float[Array, "T H"]:
  """The layer of `moe_ffn`, by Mosaic kernels.

  Args:
    x: tokens, bfloat16 or float16; H a multiple of 64.
    expert_ids: experts of each token; ids outside [0, E) contribute nothing.
    gates: weight of each expert's output, float32.
    w_gate_up: gate and up projections; I a multiple of 64, and H or I of 128.
    w_down: down projections.
    expected_rows: ignored: groups are padded by less than a tile each.
    out_dtype: dtype of the result, x.dtype by default.

  Returns:
    The combined expert outputs, [T, H].
  """
  del expected_rows
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  return _moe(out_dtype, x, expert_ids, gates, w_gate_up, w_down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(out_dtype, *arrays):
  return _forward(out_dtype, *arrays)[0]


def _forward(out_dtype, x, expert_ids, gates, w_gate_up, w_down):
  experts, inner, width = w_down.shape
  table = layout.build(expert_ids, experts)
  used = table.tile_expert, table.num_tiles
  rows = take(x, _token(table, gates))
  choice = tiles.gate_up(inner)
  act, pre = gate_up(rows, *used, w_gate_up, **choice.arguments())
  choice = tiles.matmul(width)
  out = matmul(act, *used, w_down, transposed=False, **choice.arguments())
  y = _combine(table, out, gates).astype(out_dtype)
  return y, (x, gates, w_gate_up, w_down, table, pre)


def _backward(out_dtype, residuals, dy):
  del out_dtype
  x, gates, w_gate_up, w_down, table, pre = residuals
  experts, inner, width = w_down.shape
  used = table.tile_expert, table.num_tiles
  groups = table.start, table.size, table.order
  token = _token(table, gates)
  d_rows = take(dy.astype(x.dtype), token)
  weight = take(gates.reshape(-1), table.slot_row)

  choice = tiles.swiglu_gradient(inner)
  d_pre, act, products = swiglu_gradient(
    d_rows, weight, pre, *used, w_down, **choice.arguments()
  )
  choice = tiles.matmul(width)
  flat = w_gate_up.reshape(experts, width, 2 * inner)
  d_x_rows = matmul(d_pre, *used, flat, transposed=True, **choice.arguments())
  choice = tiles.weight_gradient(inner, width)
  d_w_down = weight_gradient(
    act, d_rows, *groups, out_dtype=w_down.dtype, **choice.arguments()
  )
  choice = tiles.weight_gradient(width, 2 * inner)
  d_w_gate_up = weight_gradient(
    take(x, token),
    d_pre,
    *groups,
    out_dtype=w_gate_up.dtype,
    **choice.arguments(),
  )
  return (
    _combine(table, d_x_rows).astype(x.dtype),
    None,
    take(functools.reduce(jnp.add, products), table.row_slot),
    d_w_gate_up.reshape(w_gate_up.shape),
    d_w_down,
  )


_moe.defvjp(_forward, _backward)


def _token(table, gates):
  """The token in each slot, [M], or -1."""
  return jnp.where(table.slot_row < 0, -1, table.slot_row // gates.shape[1])


def _combine(table, rows, gates=None):
  rows = rows.reshape(-1, layout.TILE, rows.shape[1])
  return combine(table.row_slot, rows, rows[:0], gates)
