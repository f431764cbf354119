"""The MoE feed-forward layer as its formula, to be read and compared with.

Every expert sees every token, in float32, so time and memory are E / K times
what is needed: an oracle for small shapes, not for training.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def cannot_run(**_) -> str:
  """Returns why this implementation can't run: never."""
  return ""


def apply(
  x: Float[Array, "T H"],
  expert_ids: Int[Array, "T K"],
  gates: Float[Array, "T K"],
  w_gate_up: Float[Array, "E H 2 I"],
  w_down: Float[Array, "E I H"],
  *,
  out_dtype: DTypeLike | None = None,
  clamp: float | None = None,
  grad_totals: tuple[Array, Array] | None = None,
  **_,
) -> Float[Array, "T H"]:
  """The layer of `moe_ffn`, computed in float32."""
  if grad_totals is not None:
    w_gate_up = _sums_gradients_in(grad_totals[0], w_gate_up)
    w_down = _sums_gradients_in(grad_totals[1], w_down)

  def add_expert(y, expert):
    index, gate_up, down = expert
    chosen = expert_ids == index  # [T, K]
    # What a token that did not choose this expert holds, even NaN, must not
    # reach the expert, nor must its cotangent: hence two selections.
    routed = chosen.any(axis=-1, keepdims=True)
    rows = jnp.where(routed, x.astype(jnp.float32), 0.0)
    gate = rows @ gate_up[:, 0].astype(jnp.float32)
    up = rows @ gate_up[:, 1].astype(jnp.float32)
    if clamp is not None:
      gate = jnp.where(gate > clamp, clamp, gate)
      up = jnp.where(jnp.abs(up) > clamp, jnp.sign(up) * clamp, up)
    out = (jax.nn.silu(gate) * up) @ down.astype(jnp.float32)
    weight = jnp.where(chosen, gates, 0.0).sum(axis=-1, keepdims=True)
    return y + jnp.where(routed, weight * out, 0.0), None

  experts = (jnp.arange(len(w_down)), w_gate_up, w_down)
  with jax.default_matmul_precision("highest"):
    y, _ = lax.scan(add_expert, jnp.zeros_like(x, jnp.float32), experts)
  return y.astype(out_dtype or x.dtype)


@jax.custom_vjp
def _sums_gradients_in(total, weights):
  """Weights in float32, whose gradient goes to `total` and is added to it."""
  del total
  return weights.astype(jnp.float32)


_sums_gradients_in.defvjp(
  lambda total, weights: (_sums_gradients_in(total, weights), total),
  lambda total, gradient: (total + gradient, None),
)
