"""How fast are grouped multiplications alone, beside torch._grouped_mm?

  python -m benchmarks.grouped_mm [--shapes=gpu] [--routing=balanced]
    [--stages=down,...] [--seconds=540] [--json] [--out=FILE]

The five large multiplications of a layer and its gradients, on rows that are
grouped already. Ours are those of `benchmarks.moe_stages`, with what rides in
them: SwiGLU in gate_up, and zeros between groups, which torch has not. torch
runs in a process of its own, each stage right after ours.
"""

import sys

from benchmarks import supervise
from benchmarks.moe_shapes import named

STAGES = ("gate_up", "down", "d_rows", "d_w_down", "d_w_gate_up")
COLUMNS = {
  "shape": 14,
  "routing": 8,
  "stage": 11,
  "implementation": 14,
  "ms": 7,
  "tflops": 6,
  "relative_error": 14,
  "bitwise": 7,
}


def measure(job):
  """Yields one row."""
  if job["implementation"] == "mosaic":
    from benchmarks import moe_stages

    yield from moe_stages.measure(job | {"tiles": {}})
    return
  try:
    from benchmarks import moe_torch
  except ImportError:
    yield {"skipped": "torch is not installed"}
  else:
    yield moe_torch.measure_stage(job)


def main():
  """Measures the shapes and stages that the flags choose."""
  parser = supervise.flags(__doc__)
  add = parser.add_argument
  add("--shapes", default="gpu", help="names, or gpu for all")
  add("--routing", default="balanced", help="balanced, skewed or both")
  add("--stages", default=",".join(STAGES), help=", ".join(STAGES))
  args = parser.parse_args()
  if args.worker:
    return supervise.work(measure)
  stages = args.stages.split(",")
  if unknown := set(stages) - set(STAGES):
    raise SystemExit(f"No stages {unknown}: choose from {', '.join(STAGES)}.")
  jobs = [
    {
      "shape": shape,
      "routing": routing,
      "stage": stage,
      "implementation": implementation,
    }
    for shape in named(args.shapes)
    for routing in args.routing.split(",")
    for implementation in ("mosaic", "torch")
    for stage in stages
  ]
  table = supervise.Table(COLUMNS, as_json=args.json, path=args.out)
  left = supervise.run(
    [sys.executable, "-m", "benchmarks.grouped_mm", "--worker=1"],
    jobs,
    table.show,
    seconds=args.seconds,
    job_seconds=args.job_seconds,
    process=lambda job: (job["shape"], job["implementation"]),
  )
  supervise.report_left(left)
  return None


if __name__ == "__main__":
  main()
