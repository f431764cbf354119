"""Inputs and the float64 oracle that all tests of moe_ffn share."""

import jax.numpy as jnp
import numpy as np

NAMES = ("y", "d_x", "d_gates", "d_w_gate_up", "d_w_down")

# name: T, H, I, E, K
ROUTINGS = {
  "balanced": (64, 16, 24, 4, 2),
  "skewed": (96, 16, 8, 8, 3),
  "single_expert": (40, 16, 8, 4, 2),
  "out_of_range": (48, 8, 16, 6, 2),
  "none_here": (8, 8, 8, 4, 2),
  "fewer_rows_than_experts": (2, 16, 8, 16, 3),
  "more_k_than_experts": (9, 8, 8, 2, 5),
  "one_token": (1, 8, 8, 2, 1),
  "one_expert_in_all": (40, 8, 16, 1, 1),
}


def make(name, dtype=jnp.float32, seed=0):
  """Returns the arguments of `moe_ffn` and a cotangent of its result."""
  T, H, I, E, K = ROUTINGS[name]  # noqa: E741
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, E, (T, K))
  if name == "balanced":
    ids = (np.arange(T * K) % E).reshape(T, K)
  elif name == "skewed":  # Some experts get nothing, one gets half.
    ids = np.minimum(rng.geometric(0.5, (T, K)) - 1, E - 3)
  elif name == "single_expert":
    ids[:] = 2
  elif name == "out_of_range":
    ids = rng.integers(-3, E + 3, (T, K))
  elif name == "none_here":
    ids[:] = -1

  def normal(*shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), dtype)

  arguments = (
    normal(T, H),
    jnp.asarray(ids, jnp.int32),
    jnp.asarray(rng.random((T, K)), jnp.float32),
    normal(E, H, 2, I, scale=H**-0.5),
    normal(E, I, H, scale=I**-0.5),
  )
  return arguments, normal(T, H)


def routed(routing, shape, dtype):
  """The same for a shape (T, H, I, E, K) that kernels with tiles can take."""
  T, H, I, E, K = shape  # noqa: E741
  rng = np.random.default_rng(0)

  def normal(*shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), dtype)

  ids = {
    "random": rng.integers(0, E, (T, K)),
    "single_expert": np.full((T, K), 1),
    "out_of_range": rng.integers(-2, E + 2, (T, K)),
    "none_here": np.full((T, K), -1),
    "one_row": np.where(np.arange(T * K).reshape(T, K) == 5, 2, E),
    # One expert gets half of the rows, some get none.
    "skewed": np.minimum(rng.geometric(0.5, (T, K)) - 1, E - 3),
  }[routing]
  arguments = (
    normal(T, H),
    jnp.asarray(ids, jnp.int32),
    jnp.asarray(rng.random((T, K)), jnp.float32),
    normal(E, H, 2, I, scale=H**-0.5),
    normal(E, I, H, scale=I**-0.5),
  )
  return arguments, normal(T, H)


def oracle(arguments, dy, clamp=np.inf):
  """y and the four gradients in float64, one row (token, k) at a time."""
  x, ids, gates, w_gate_up, w_down = (np.asarray(a) for a in arguments)
  x, gates, w_gate_up, w_down, dy = (
    a.astype(np.float64) for a in (x, gates, w_gate_up, w_down, np.asarray(dy))
  )
  y, *grads = (np.zeros_like(a) for a in (x, x, gates, w_gate_up, w_down))
  d_x, d_gates, d_w_gate_up, d_w_down = grads
  for (t, k), e in np.ndenumerate(ids):
    if not 0 <= e < len(w_down):
      continue
    gate, up = x[t] @ w_gate_up[e, :, 0], x[t] @ w_gate_up[e, :, 1]
    free_gate, free_up = gate <= clamp, abs(up) <= clamp
    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    sigmoid = 1 / (1 + np.exp(-gate))
    act = gate * sigmoid * up
    out = act @ w_down[e]
    y[t] += gates[t, k] * out
    d_gates[t, k] = dy[t] @ out
    d_out = gates[t, k] * dy[t]
    d_w_down[e] += np.outer(act, d_out)
    d_act = w_down[e] @ d_out
    d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid)) * free_gate
    d_up = d_act * gate * sigmoid * free_up
    d_w_gate_up[e, :, 0] += np.outer(x[t], d_gate)
    d_w_gate_up[e, :, 1] += np.outer(x[t], d_up)
    d_x[t] += w_gate_up[e, :, 0] @ d_gate + w_gate_up[e, :, 1] @ d_up
  return y, d_x, d_gates, d_w_gate_up, d_w_down


def relative_error(result, expected):
  """||result - expected|| / ||expected||; NaN never passes."""
  result = np.asarray(result).astype(np.float64)
  expected = np.asarray(expected).astype(np.float64)
  norm = np.linalg.norm(expected)
  return np.linalg.norm(result - expected) / (norm if norm else 1.0)
