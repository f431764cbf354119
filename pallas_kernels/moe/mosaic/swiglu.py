"""SwiGLU and its gradient, elementwise, as the Hopper kernels compute them.

Forward and backward share these, so that backward recomputes the activation to
the bit. Everything is float32 inside. With a clamp, gate counts as `clamp` at
most and up as -clamp to clamp, and neither has a gradient beyond.
"""

import jax.numpy as jnp


def activation(gate, up, clamp: float | None):
  """Computes silu(gate) * up in float32."""
  gate, up = _clamped(gate, up, clamp)
  return gate * (1 / (1 + jnp.exp(-gate))) * up


def gradients(gate, up, d_act, clamp: float | None):
  """Gradients of gate and up in float32, from that of the activation."""
  free_gate, free_up = gate.astype(jnp.float32), up.astype(jnp.float32)
  gate, up = _clamped(gate, up, clamp)
  sigmoid = 1 / (1 + jnp.exp(-gate))
  silu = gate * sigmoid
  d_gate, d_up = d_act * up * (sigmoid + silu * (1 - sigmoid)), d_act * silu
  if clamp is None:
    return d_gate, d_up
  held = (free_up > clamp) | (free_up < -clamp)
  zero = jnp.zeros_like(d_gate)
  return (
    jnp.where(free_gate > clamp, zero, d_gate),
    jnp.where(held, zero, d_up),
  )


def _clamped(gate, up, clamp):
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  if clamp is None:
    return gate, up
  return jnp.minimum(gate, clamp), jnp.minimum(jnp.maximum(up, -clamp), clamp)
