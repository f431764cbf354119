"""How fast is the MoE layer on one GPU, forward and backward?

  python -m benchmarks.moe_layer [--quick] [--json]

Every implementation of `moe_ffn` that can run here, and a composition of
`jax.lax.ragged_dot` where its E-fold memory fits, on the same inputs in one
process. Outputs and gradients are compared with the float32 oracle on sampled
tokens, and repeated for equal bits, before anything is timed. Forward runs from
ids, gates and tokens to the output, routing tables included; backward from the
output gradient to all gradients. FLOPs are 6 T K H I forward and 12 T K H I
backward; padding does not count. peak_bytes: what forward and backward together
need besides inputs and results, by the compiler's account.

Rows whose direction begins with "stage" time one Hopper kernel by itself, on
rows that are grouped already. Milliseconds and TFLOP/s are given on a GPU only.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import harness, xla_moe
from pallas_kernels.moe import moe_ffn, mosaic
from pallas_kernels.moe.mosaic import layout, tiles
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient

# T, H, I, E, K. SonicMoE's shapes, Qwen3-30B-A3B, one expert-parallel rank of
# Kimi K2.5 at EP 64 and EP 8, of GLM-5.2, Qwen3.5-397B and DeepSeek-V4-Pro at
# EP 64 (about 16,384 rows each), and decoding.
GPU_SHAPES = [
  (32768, 4096, 1024, 128, 8),
  (32768, 4096, 512, 128, 8),
  (32768, 4096, 256, 256, 16),
  (32768, 2048, 768, 128, 8),
  (4096, 7168, 2048, 6, 4),
  (2048, 7168, 2048, 48, 8),
  (4096, 6144, 2048, 4, 4),
  (2048, 4096, 1024, 8, 8),
  (4096, 7168, 3072, 6, 4),
  (64, 4096, 1024, 128, 8),
  (256, 4096, 1024, 128, 8),
  (1024, 4096, 1024, 128, 8),
]
CPU_SHAPES = [(256, 128, 128, 8, 2)]
REPEATS = 20


def layers(inputs):
  """Returns name -> layer, of those that can run on these inputs."""
  x, expert_ids, _, w_gate_up, w_down = inputs
  (experts, _, _, inner), width = w_gate_up.shape, x.shape[1]
  found = {"xla": functools.partial(moe_ffn, implementation="xla")}
  if not mosaic.cannot_run(x=x, w_gate_up=w_gate_up, w_down=w_down):
    found["mosaic"] = functools.partial(moe_ffn, implementation="mosaic")
  masked = experts * expert_ids.size * max(width, 2 * inner)
  if masked * x.dtype.itemsize <= xla_moe.PEER_BYTES:
    found["ragged_dot"] = xla_moe.ragged_dot_moe
  return found


def programs(layer):
  """Returns forward, residuals of backward, backward, and both in one."""

  def with_pullback(inputs):
    x, ids, *rest = inputs
    return jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *rest)

  def both(inputs, dy):
    y, pullback = with_pullback(inputs)
    return (y, *pullback(dy))

  return (
    jax.jit(lambda inputs: layer(*inputs)),
    jax.jit(lambda inputs: with_pullback(inputs)[1]),
    jax.jit(lambda pullback, dy: pullback(dy)),
    jax.jit(both),
  )


def measure(shape, routing, on_gpu):
  """Yields the rows of one problem: two directions of each implementation."""
  T, H, I, E, K = shape  # noqa: E741
  dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
  inputs, dy = xla_moe.make_inputs(shape, routing, dtype)
  calls, checks = {"forward": {}, "backward": {}}, {}
  for name, layer in layers(inputs).items():
    forward, residuals, backward, both = programs(layer)
    both = both.lower(inputs, dy).compile()
    result = both(inputs, dy)
    error = xla_moe.oracle_error(result, inputs, dy)
    assert error < (2e-2 if on_gpu else 1e-4), (shape, routing, name, error)
    checks[name] = {
      "relative_error": error,
      "bitwise": all(_same(both(inputs, dy), result) for _ in range(REPEATS)),
      "peak_bytes": both.memory_analysis().temp_size_in_bytes,
    }
    del result
    calls["forward"][name] = functools.partial(forward, inputs)
    calls["backward"][name] = functools.partial(backward, residuals(inputs), dy)
  common = {"shape": f"T={T} H={H} I={I} E={E} K={K}", "routing": routing}
  for direction, passes in calls.items():
    for call in passes.values():
      jax.block_until_ready(call())
    flops = (6 if direction == "forward" else 12) * T * K * H * I
    for name, ms in harness.median_ms(passes).items():
      row = common | {"implementation": name, "direction": direction}
      yield row | _speed(flops, ms, on_gpu) | checks[name]
  if "mosaic" in checks:
    del calls
    for name, (call, flops) in stages(inputs, dy).items():
      jax.block_until_ready(call())
      ms = harness.median_ms({name: call})[name]
      row = common | {"implementation": "mosaic", "direction": f"stage {name}"}
      yield row | _speed(flops, ms, on_gpu)


def stages(inputs, dy):
  """Returns name -> (call of one kernel, its FLOPs); 0 where it only moves."""
  x, ids, gates, w_gate_up, w_down = inputs
  experts, inner, width = w_down.shape
  table = jax.jit(layout.build, static_argnums=1)(ids, experts)
  used = table.tile_expert, table.num_tiles
  groups = table.start, table.size, table.order
  token = jnp.maximum(table.slot_row, 0) // ids.shape[1]
  rows, d_rows = x[token], dy[token]
  weight = gates.reshape(-1)[jnp.maximum(table.slot_row, 0)]
  flat = w_gate_up.reshape(experts, width, 2 * inner)

  def kernel(function, choice, **static):
    return jax.jit(functools.partial(function, **choice.arguments(), **static))

  wide, narrow = tiles.matmul(width), tiles.swiglu_gradient(inner)
  up = kernel(gate_up, tiles.gate_up(inner))
  act, pre = up(rows, *used, w_gate_up)
  down = kernel(matmul, wide, transposed=False)
  transposed = kernel(matmul, wide, transposed=True)
  swiglu = kernel(swiglu_gradient, narrow)
  d_pre = swiglu(d_rows, weight, pre, *used, w_down)[0]
  static = {"out_dtype": x.dtype}
  d_up = kernel(
    weight_gradient, tiles.weight_gradient(width, 2 * inner), **static
  )
  d_down = kernel(
    weight_gradient, tiles.weight_gradient(inner, width), **static
  )
  build = jax.jit(functools.partial(layout.build, num_experts=experts))
  one = 2 * ids.size * width * inner
  bind = functools.partial
  return {
    "tables": (bind(build, ids), 0),
    "gather": (bind(jax.jit(lambda x, token: x[token]), x, token), 0),
    "gate_up": (bind(up, rows, *used, w_gate_up), 2 * one),
    "down": (bind(down, act, *used, w_down), one),
    "swiglu_gradient": (
      bind(swiglu, d_rows, weight, pre, *used, w_down),
      one,
    ),
    "d_rows": (bind(transposed, d_pre, *used, flat), 2 * one),
    "d_w_gate_up": (bind(d_up, rows, d_pre, *groups), 2 * one),
    "d_w_down": (bind(d_down, act, d_rows, *groups), one),
  }


@jax.jit
def _all_equal(a, b):
  as_bits = {2: jnp.uint16, 4: jnp.uint32}

  def equal(a, b):
    kind = as_bits[a.dtype.itemsize]
    return (jax.lax.bitcast_convert_type(a, kind) ==
            jax.lax.bitcast_convert_type(b, kind)).all()  # fmt: skip

  return jnp.stack([equal(*pair) for pair in zip(a, b, strict=True)]).all()


def _same(a, b):
  return bool(_all_equal(a, b))


def _speed(flops, ms, on_gpu):
  return {"ms": ms, "tflops": flops / ms / 1e9} if on_gpu else {}


def main():
  """Measures every shape and routing, then prints the rows."""
  args = harness.arguments(__doc__)
  on_gpu = jax.default_backend() == "gpu"
  shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
  rows = [
    row
    for shape in (shapes[:1] if args.quick else shapes)
    for routing in ("balanced", "skewed")
    for row in measure(shape, routing, on_gpu)
  ]
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
