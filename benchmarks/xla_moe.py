"""How fast is the portable MoE layer, against jax.lax.ragged_dot?

  python -m benchmarks.xla_moe [--quick] [--json]

The peer is what a JAX user gets without further work: sort the rows by expert,
two `ragged_dot`s round a SwiGLU, gather back and sum. Both get the same inputs
in the same process; before they are timed, their outputs and gradients are
compared with the float32 oracle on sampled tokens, and with each other on all
tokens and weights. Off the TPU `ragged_dot` is a dense multiplication by every
expert under a mask, so it takes no part where E times its rows outgrow memory.

Ratios are times: ratio_to_ragged_dot 5 is five times as fast. Milliseconds and
TFLOP/s are given on a GPU only. FLOPs are 6 T K H I forward, twice that
backward.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness, moe_shapes
from pallas_kernels.moe import moe_ffn, reference

# T, H, I, E, K. On a GPU: a wide layer, Qwen3-30B-A3B's, and a small model's;
# the shorter T are what ragged_dot's E-fold memory leaves room for.
GPU_SHAPES = [
  (32768, 4096, 1024, 128, 8),
  (2048, 4096, 1024, 128, 8),
  (32768, 2048, 768, 128, 8),
  (2048, 2048, 768, 128, 8),
  (32768, 1024, 512, 64, 8),
  (8192, 1024, 512, 64, 8),
  (32768, 1024, 512, 8, 2),
]
CPU_SHAPES = [
  (4096, 256, 256, 8, 2),
  (2048, 128, 128, 64, 4),
  (1024, 128, 128, 128, 4),
]
QUICK_SHAPES = [
  (1024, 64, 64, 8, 2),
  (128, 64, 64, 64, 2),
  (128, 64, 64, 128, 2),
]
PEER_BYTES = 20e9  # What ragged_dot's masked copies of its rows may take.
SAMPLED_TOKENS = 16


def composed(dot, x, expert_ids, gates, w_gate_up, w_down):
  """The layer of `moe_ffn` from `dot`, which is called as lax.ragged_dot is."""
  (tokens, top_k), (experts, width, _, inner) = gates.shape, w_gate_up.shape
  order = jnp.argsort(expert_ids.reshape(-1), stable=True)
  sizes = jnp.bincount(expert_ids.reshape(-1), length=experts)
  sizes = sizes.astype(jnp.int32)
  w_gate_up = w_gate_up.reshape(experts, width, 2 * inner)
  gate, up = jnp.split(dot(x[order // top_k], w_gate_up, sizes), 2, axis=1)
  y = dot(jax.nn.silu(gate) * up, w_down, sizes)
  y = y[jnp.argsort(order)].reshape(tokens, top_k, width)
  return (y * gates[..., None]).sum(axis=1).astype(x.dtype)


ragged_dot_moe = functools.partial(composed, lax.ragged_dot)


def make_inputs(shape, routing, dtype):
  """Random inputs, see `moe_shapes.route`, and an output gradient."""
  T, H, I, E, K = shape  # noqa: E741
  keys = jax.random.split(jax.random.key(0), 5)
  x = jax.random.normal(keys[0], (T, H), dtype)
  gates = jax.nn.softmax(jax.random.normal(keys[1], (T, K)))
  w_gate_up = jax.random.normal(keys[2], (E, H, 2, I), dtype) * H**-0.5
  w_down = jax.random.normal(keys[3], (E, I, H), dtype) * I**-0.5
  dy = jax.random.normal(keys[4], (T, H), dtype)
  expert_ids = jnp.asarray(moe_shapes.route(shape, routing))
  return (x, expert_ids, gates, w_gate_up, w_down), dy


LAYERS = {
  "xla": functools.partial(moe_ffn, implementation="xla"),
  "ragged_dot": ragged_dot_moe,
}
FORWARD = {name: jax.jit(layer) for name, layer in LAYERS.items()}


@functools.partial(jax.jit, static_argnums=0)
def forward_backward(name, inputs, dy):
  """Returns y and the gradients of x, gates, w_gate_up, w_down."""
  x, expert_ids, *rest = inputs
  y, pullback = jax.vjp(
    lambda x, *rest: LAYERS[name](x, expert_ids, *rest), x, *rest
  )
  return (y, *pullback(dy))


def relative_error(result, expected):
  """||result - expected|| / ||expected||, the largest over the arrays."""

  def error(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

  pairs = zip(result, expected, strict=True)
  return max(float(jax.jit(error)(a, b)) for a, b in pairs)


@jax.jit
def oracle(inputs, dy):
  """y, dx and d_gates; the weights' gradients sum over all tokens."""
  x, expert_ids, gates, *weights = inputs
  y, pullback = jax.vjp(
    lambda x, gates: reference.apply(x, expert_ids, gates, *weights), x, gates
  )
  return (y, *pullback(dy))


def oracle_error(result, inputs, dy):
  """Compares y, dx and d_gates of sampled tokens with the oracle."""
  tokens = np.random.default_rng(1).integers(0, len(dy), SAMPLED_TOKENS)
  x, expert_ids, gates, *weights = inputs
  sampled = (x[tokens], expert_ids[tokens], gates[tokens], *weights)

  return relative_error(
    [a[tokens] for a in result[:3]], oracle(sampled, dy[tokens])
  )


def expert_error(result, inputs, dy):
  """Compares the gradients of the weights of the least busy expert."""
  x, expert_ids, gates, w_gate_up, w_down = inputs
  ids = np.asarray(expert_ids)
  loads = np.bincount(ids.ravel(), minlength=len(w_down))
  e = int(np.where(loads > 0, loads, loads.max()).argmin())
  tokens, ks = np.nonzero(ids == e)
  rows, d_rows, weight = (
    a.astype(jnp.float32) for a in (x[tokens], dy[tokens], gates[tokens, ks])
  )

  def outputs(gate_up, down):
    gate, up = rows @ gate_up[:, 0], rows @ gate_up[:, 1]
    return weight[:, None] * ((jax.nn.silu(gate) * up) @ down)

  with jax.default_matmul_precision("highest"):
    weights = (w[e].astype(jnp.float32) for w in (w_gate_up, w_down))
    expected = jax.vjp(outputs, *weights)[1](d_rows)
  return relative_error([d[e] for d in result[3:]], expected)


def measure(shape, routing, dtype, on_gpu):
  """Yields the rows of one problem: two directions of each implementation."""
  T, H, I, E, K = shape  # noqa: E741
  inputs, dy = make_inputs(shape, routing, dtype)
  loads = np.bincount(np.asarray(inputs[1]).ravel(), minlength=E)
  peers = ["xla"]
  if E * T * K * max(H, 2 * I) * dtype.itemsize <= PEER_BYTES:
    peers.append("ragged_dot")
  results = {name: forward_backward(name, inputs, dy) for name in peers}
  errors = {name: oracle_error(r, inputs, dy) for name, r in results.items()}
  bound = 1e-4 if dtype == jnp.float32 else 2e-2
  for name, result in results.items():
    difference = relative_error(result, results["xla"])
    assert errors[name] < bound, (shape, routing, name, errors[name])
    assert difference < bound, (shape, routing, name, difference)
  del results, result
  for direction in ("forward", "forward+backward"):
    calls = {
      name: functools.partial(FORWARD[name], *inputs)
      if direction == "forward"
      else functools.partial(forward_backward, name, inputs, dy)
      for name in peers
    }
    for call in calls.values():
      jax.block_until_ready(call())
    times = harness.median_ms(calls)
    flops = (6 if direction == "forward" else 18) * T * K * H * I
    for name, ms in times.items():
      row = {
        "shape": f"T={T} H={H} I={I} E={E} K={K}",
        "routing": routing,
        "max_load": round(float(loads.max() / loads.mean()), 2),
        "implementation": name,
        "direction": direction,
        "relative_error": errors[name],
        "ratio_to_ragged_dot": None,
      }
      if "ragged_dot" in times:
        row["ratio_to_ragged_dot"] = times["ragged_dot"] / ms
      if on_gpu:
        row |= {"ms": ms, "tflops": flops / ms / 1e9}
      yield row


def main():
  """Measures every shape and routing, then prints the rows."""
  args = harness.arguments(__doc__)
  on_gpu = jax.default_backend() == "gpu"
  shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
  if args.quick:
    shapes = GPU_SHAPES[-1:] if on_gpu else QUICK_SHAPES
  dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
  rows = [
    row
    for shape in shapes
    for routing in ("balanced", "skewed")
    for row in measure(shape, routing, dtype, on_gpu)
  ]
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
