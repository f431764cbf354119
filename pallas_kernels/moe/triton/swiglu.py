"""SwiGLU and its gradient, elementwise and in float32, within Triton kernels.

Forward and backward share these, so that backward recomputes the activation to
the bit. LIMIT is the clamp of the pre-activations, or None.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def activation(gate, up, LIMIT: tl.constexpr):
  """Computes silu(gate) * up."""
  gate, up = clamped(gate, up, LIMIT)
  return gate * (1 / (1 + tl.exp(-gate))) * up


@triton.jit
@no_type_check
def gradients(gate, up, d_act, LIMIT: tl.constexpr):
  """Gradients of gate and up from that of the activation."""
  free_gate, free_up = gate.to(tl.float32), up.to(tl.float32)
  gate, up = clamped(gate, up, LIMIT)
  sigmoid = 1 / (1 + tl.exp(-gate))
  silu = gate * sigmoid
  d_gate = d_act * up * (sigmoid + silu * (1 - sigmoid))
  d_up = d_act * silu
  if LIMIT is not None:
    held = (free_up > LIMIT) | (free_up < -LIMIT)
    d_gate = tl.where(free_gate > LIMIT, 0.0, d_gate)
    d_up = tl.where(held, 0.0, d_up)
  return d_gate, d_up


@triton.jit
@no_type_check
def clamped(gate, up, LIMIT: tl.constexpr):
  """What the gate and up pre-activations count as."""
  gate, up = gate.to(tl.float32), up.to(tl.float32)
  if LIMIT is not None:
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
  return gate, up
