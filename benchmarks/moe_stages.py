"""How fast is each Hopper kernel of the MoE layer by itself, at which tiles?

  python -m benchmarks.moe_stages [--shapes=sonic_i1024,...] [--stages=down,...]
    [--routing=balanced,skewed] [--tiles='columns=256,128 stages=4,3 band=4,8']
    [--write=tuned.json] [--seconds=540] [--json] [--out=FILE]

Rows come as they are measured; a kernel that fails, crashes or hangs is a row
with its error, and the next goes on. Beside each time: what was predicted, from
what proofs of concept reached on an H200 (FLOPs at that rate, or bytes at 4.1
TB/s, whichever takes longer), the relative error against float32 at sampled
rows, and whether three more runs (one, on a CPU) gave the same bits. Padding
holds NaN, counts for no FLOPs, and must not reach a result. On a CPU kernels
are interpreted and not timed.

`--tiles` measures every combination beside the rule's; `rows=64` or 128 is the
height of a tile. For stages that gather beside a multiplication, `movers=12,24`
is how many SMs do, `minibatch=32` how many row tiles they hand over at once
(these stages can't be interpreted, but gather+d_rows). `--write` puts the
fastest correct tiles of each kernel that beat the rule's by 1 % into a copy of
the table that the package ships (`pallas_kernels/moe/mosaic/tuned.json`).
"""

import itertools
import json
import pathlib
import sys

from benchmarks import supervise
from benchmarks.moe_shapes import SHAPES, named

# TFLOP/s expected of each multiplication, and its name in the table of tiles.
RATES = {
  "tables": (0, ""),
  "gather": (0, ""),
  "gate_up": (690, "gate_up"),
  "down": (680, "matmul"),
  "combine": (0, ""),
  "gather_dy": (0, ""),
  "swiglu_gradient": (650, "swiglu_gradient"),
  "d_rows": (680, "matmul"),
  "d_w_down": (755, "weight_gradient"),
  "d_w_gate_up": (690, "weight_gradient"),
  "gather_by_copies": (0, ""),
  "gather+gate_up": (637, "gate_up"),
  "gather+swiglu": (590, "swiglu_gradient"),
  "gather+d_rows": (620, "matmul"),
}
BYTES_PER_SECOND = 4.1e12
COLUMNS = {
  "shape": 14,
  "routing": 8,
  "stage": 15,
  "tiles": 14,
  "ms": 7,
  "predicted": 9,
  "tflops": 6,
  "gbps": 6,
  "relative_error": 14,
  "bitwise": 7,
}
GAIN = 1.01  # What tiles must gain over the rule's to get into the table.


def measure(job):
  """Yields one row: a stage of a layer, with the rule's tiles or others."""
  import jax

  from benchmarks import harness, moe_problem

  problem = moe_problem.make(
    SHAPES[job["shape"]], job["routing"], job["tiles"].get("rows")
  )
  stage = moe_problem.STAGES[job["stage"]](problem, job["tiles"])
  result = jax.block_until_ready(stage.call())
  on_gpu = jax.default_backend() == "gpu"
  row = {
    "relative_error": stage.error(result),
    "bitwise": all(
      moe_problem.same_bits(stage.call(), result, stage.defined)
      for _ in range(3 if on_gpu else 1)
    ),
    "chosen": stage.chosen,
    "key": stage.key,
  }
  del result
  rate, _ = RATES[job["stage"]]
  if on_gpu:
    ms = harness.median_ms({"": stage.call})[""]
    work = stage.flops / rate / 1e12 if rate else 0
    row |= {
      "ms": ms,
      "predicted": 1e3 * max(work, stage.bytes / BYTES_PER_SECOND),
      "tflops": stage.flops / ms / 1e9 if rate else None,
      "gbps": stage.bytes / ms / 1e6,
      "chip": jax.devices()[0].device_kind,
    }
  yield row


def make_jobs(args):
  """One job a shape, routing, stage and combination of tiles."""
  stages = args.stages.split(",") if args.stages else list(RATES)
  if unknown := set(stages) - set(RATES):
    raise SystemExit(f"No stages {unknown}: choose from {', '.join(RATES)}.")
  return [
    {"shape": shape, "routing": routing, "stage": stage, "tiles": tiles}
    for shape in named(args.shapes)
    for routing in args.routing.split(",")
    for stage in stages
    for tiles in of_stage(stage, combinations(args.tiles))
  ]


def of_stage(stage, tiles):
  """Keeps what means something to a stage: tiles, movers."""
  if not RATES[stage][1]:
    return [{}]
  names = {"columns", "stages", "band", "rows"}
  if stage.startswith("gather+"):
    names |= {"movers", "minibatch"}
  kept = [{k: v for k, v in one.items() if k in names} for one in tiles]
  return [one for n, one in enumerate(kept) if one not in kept[:n]]


def combinations(text):
  """'columns=256,128 band=4' to a list of dicts, the rule's {} first."""
  options = [option.split("=") for option in text.split()]
  values = [[int(v) for v in values.split(",")] for _, values in options]
  names = [name for name, _ in options]
  found = [dict(zip(names, v, strict=True)) for v in itertools.product(*values)]
  return [{}, *(tiles for tiles in found if tiles)]


def best_tiles(rows, table):
  """Adds to the table what beat the rule, and was right."""
  kernels = {}
  for row in rows:
    # The columns of the SwiGLU gradient are part of its result, see tiles.py.
    free = "swiglu" not in row.get("key", "") or "columns" not in row["tiles"]
    if row.get("ms") and row["key"] and _right(row) and free:
      kernels.setdefault((row["chip"], row["key"]), []).append(row)
  for (chip, key), measured in kernels.items():
    rule = [row["ms"] for row in measured if not row["tiles"]]
    best = min(measured, key=lambda row: row["ms"])
    entries = table.setdefault(chip, {})
    if best["tiles"] and rule and min(rule) > GAIN * best["ms"]:
      entries[key] = best["chosen"]
  return table


def _right(row):
  return row["bitwise"] and row["relative_error"] < 2e-2


def main():
  """Measures the stages that the flags choose."""
  parser = supervise.flags(__doc__)
  add = parser.add_argument
  add("--shapes", default="sonic_i1024", help="names, or gpu for all")
  add("--routing", default="balanced", help="balanced, skewed or both")
  add("--stages", default="", help=", ".join(RATES))
  add("--tiles", default="", help="combinations to measure")
  add("--write", default="", help="write the table of tiles to this file")
  args = parser.parse_args()
  if args.worker:
    return supervise.work(measure)
  rows = []
  table = supervise.Table(COLUMNS, as_json=args.json, path=args.out)

  def show(row):
    rows.append(row)
    table.show(row)

  left = supervise.run(
    [sys.executable, "-m", "benchmarks.moe_stages", "--worker=1"],
    make_jobs(args),
    show,
    seconds=args.seconds,
    job_seconds=args.job_seconds,
  )
  supervise.report_left(left)
  if args.write:
    from pallas_kernels.moe.mosaic import tiles

    shipped = json.loads(tiles.TABLE.read_text())
    text = json.dumps(best_tiles(rows, shipped), indent=2, sort_keys=True)
    pathlib.Path(args.write).write_text(text + "\n")
    print(f"Tiles written to {args.write}.")
  return None


if __name__ == "__main__":
  main()
