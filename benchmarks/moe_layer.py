"""How fast is the MoE layer on one GPU, forward and backward?

  python -m benchmarks.moe_layer [--shapes=gpu] [--routing=balanced,skewed]
    [--implementations=mosaic,torch,...] [--seconds=540] [--json] [--out=FILE]

Implementations of `moe_ffn` and their peers, see IMPLEMENTATIONS, side by side;
one that is not installed or can't run here says so. Each is measured in a
process that may crash, rows come as they are measured, and the table ends when
time is up. `benchmarks/moe_stages.py` takes our kernels apart.

First results are checked: y, dx and the gates' gradients of sampled tokens and
the weights' gradients of one expert against the float32 oracle, and REPEATS
runs for equal bits. Forward runs from ids, gates and tokens to the output,
routing tables included; backward from the output gradient to all gradients.
FLOPs are 6 T K H I forward and 12 T K H I backward; padding does not count.
peak_bytes: what forward and backward together need besides inputs and results,
by XLA's account, or by torch's allocator.
"""

import concurrent.futures
import functools
import sys

from benchmarks import supervise
from benchmarks.moe_shapes import SHAPES, named

IMPLEMENTATIONS = (
  "mosaic",
  "mosaic_alone",
  "mosaic_overlap",
  "triton",
  "xla",
  "ragged_dot",
  "pallas",
  "tokamax",
  "tokamax_triton",
  "torch",
)
REPEATS = 20
COLUMNS = {
  "shape": 14,
  "routing": 8,
  "implementation": 14,
  "direction": 9,
  "ms": 7,
  "tflops": 6,
  "relative_error": 14,
  "bitwise": 7,
  "peak_bytes": 10,
}


def measure(job):
  """Yields two rows, forward and backward, of one implementation."""
  if job["implementation"] == "torch":
    try:
      from benchmarks import moe_torch
    except ImportError:
      yield {"skipped": "torch is not installed"}
    else:
      yield from moe_torch.measure(job)
    return
  from benchmarks import moe_peers

  try:
    yield from _measure_jax(job)
  except moe_peers.UnavailableError as reason:
    yield {"skipped": str(reason)}


def _measure_jax(job):
  import jax

  from benchmarks import harness, moe_peers, moe_problem, xla_moe

  T, H, I, _, K = SHAPES[job["shape"]]  # noqa: E741
  on_gpu = jax.default_backend() == "gpu"
  inputs, dy = _make_inputs(job["shape"], job["routing"])
  layer = moe_peers.layer(job["implementation"], inputs)
  forward, residuals, backward, both = _compile(programs(layer), inputs, dy)
  result = both(inputs, dy)
  checks = {
    "relative_error": max(
      xla_moe.oracle_error(result, inputs, dy),
      xla_moe.expert_error(result, inputs, dy),
    ),
    "bitwise": all(
      moe_problem.same_bits(both(inputs, dy), result)
      for _ in range(REPEATS if on_gpu else 2)
    ),
    "peak_bytes": both.memory_analysis().temp_size_in_bytes,
  }
  del result
  calls = {"forward": functools.partial(forward, inputs)}
  calls["backward"] = functools.partial(backward, residuals(inputs), dy)
  for direction, call in calls.items():
    jax.block_until_ready(call())
    row = {"direction": direction} | checks
    if on_gpu:  # A CPU's times say nothing about a GPU's.
      flops = (6 if direction == "forward" else 12) * T * K * H * I
      ms = harness.median_ms({"": call})[""]
      row |= {"ms": ms, "tflops": flops / ms / 1e9}
    yield row


@functools.lru_cache(1)
def _make_inputs(shape, routing):
  import jax.numpy as jnp

  from benchmarks import xla_moe

  return xla_moe.make_inputs(SHAPES[shape], routing, jnp.bfloat16)


def programs(layer):
  """Returns forward, residuals of backward, backward, and both in one."""
  import jax

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


def _compile(programs, inputs, dy):
  """Compiles all at once, since that takes longer than all that is measured."""
  import jax

  forward, residuals, backward, both = programs
  saved = jax.eval_shape(residuals, inputs)
  lowered = (
    forward.lower(inputs),
    residuals.lower(inputs),
    backward.lower(saved, dy),
    both.lower(inputs, dy),
  )
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return list(pool.map(lambda program: program.compile(), lowered))


def make_jobs(args):
  """One job a shape, routing and implementation."""
  chosen = args.implementations.split(",")
  if unknown := set(chosen) - set(IMPLEMENTATIONS):
    raise SystemExit(
      f"No implementations {unknown}: choose from {', '.join(IMPLEMENTATIONS)}."
    )
  return [
    {"shape": shape, "routing": routing, "implementation": name}
    for shape in named(args.shapes)
    for routing in args.routing.split(",")
    for name in chosen
  ]


def main():
  """Measures the shapes, routings and implementations that the flags choose."""
  parser = supervise.flags(__doc__)
  add = parser.add_argument
  add("--shapes", default="gpu", help="names, or gpu for all")
  add("--routing", default="balanced,skewed", help="balanced, skewed or both")
  add("--implementations", default=",".join(IMPLEMENTATIONS))
  args = parser.parse_args()
  if args.worker:
    return supervise.work(measure)
  table = supervise.Table(COLUMNS, as_json=args.json, path=args.out)
  left = supervise.run(
    [sys.executable, "-m", "benchmarks.moe_layer", "--worker=1"],
    sorted(make_jobs(args), key=_with_torch),
    table.show,
    seconds=args.seconds,
    job_seconds=args.job_seconds,
    process=_with_torch,
  )
  supervise.report_left(left)
  return None


def _with_torch(job):
  return job["implementation"] == "torch"


if __name__ == "__main__":
  main()
