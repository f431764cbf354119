"""Asynchronous against synchronous RL: the same code, tasks and machine.

  python -m benchmarks.rl_async --demo=runs/demo --out=FOLDER [--steps=30]
    [--staleness=0,1,4] [--corrections=none,tis] [--latency_s=0.5]
    [--target=0.6] [--quick] [--json]

Runs `configs/rl_tiny.py` from the drills that `make demo` was mid-trained on,
once for each staleness and correction; 0 is the synchronous baseline, which
needs no correction. In each the learner has one core, and hosts, workers and
sandboxes the other; each call of a tool takes `--latency_s` longer than it
does, as a product's tools would. Linux, with two cores.

Columns: seconds from the first update's wait to a training pass rate of
`--target` (mean of three steps; null: not reached), and to the end; held-out
pass rate after the last step; share of its core that each side kept busy in
that time; share of the time that the learner waited for rollouts; how old a
token was. `--out` keeps the runs, and gets one plot of pass rate against time.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

from benchmarks import harness

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_SMOOTH = 3


def variants(args) -> list[tuple[int, str]]:
  """Staleness and correction of each run."""
  ages = [int(age) for age in args.staleness.split(",")]
  corrections = args.corrections.split(",")
  # What is on policy has nothing to be corrected.
  return [
    (age, correction)
    for age, correction in itertools.product(ages, corrections)
    if age or correction == corrections[0]
  ]


def train(args, staleness: int, correction: str, run: pathlib.Path) -> None:
  """One run, unless it is there; raises if it fails."""
  if (run / "summary.json").exists():
    return
  demo = pathlib.Path(args.demo).absolute()
  learner, rollouts = sorted(os.sched_getaffinity(0))[:2]
  steps = 3 if args.quick else args.steps
  settings = {
    "init_from": demo / "drills" / "checkpoints",
    "tokenizer": demo / "tokenizer.json",
    "num_steps": steps,
    "eval_tasks": 20 if args.quick else 100,
    "eval_every": 0,
    "buffer.staleness": staleness,
    "objective.correction": correction,
    "tool_latency_s": args.latency_s,
    "learner_cores": f"({learner},)",
    "rollout_cores": f"({rollouts},)",
    "seed": args.seed,
  }
  subprocess.run(
    [
      sys.executable,
      str(_REPOSITORY / "launch" / "train.py"),
      f"--config={_REPOSITORY / 'configs' / 'rl_tiny.py'}",
      f"--workdir={run}",
      *(f"--config.{name}={value}" for name, value in settings.items()),
    ],
    check=True,
    stdout=subprocess.DEVNULL,
  )


def curve(run: pathlib.Path) -> tuple[list[float], list[float]]:
  """Seconds since training began, and the training pass rate by then."""
  began, lines = _read(run)
  return (
    [line["wall_time"] - began for line in lines],
    [line["reward/pass_rate"] or 0.0 for line in lines],
  )


def row(run: pathlib.Path, target: float) -> dict:
  """What a run comes to."""
  began, lines = _read(run)
  end = lines[-1]["wall_time"]
  seconds, rates = curve(run)
  reached = [
    second
    for second, *window in zip(
      seconds[_SMOOTH - 1 :],
      *(rates[i : len(rates) - _SMOOTH + 1 + i] for i in range(_SMOOTH)),
      strict=True,
    )
    if sum(window) / _SMOOTH >= target
  ]
  summary = json.loads((run / "summary.json").read_text())
  sights = [
    sight
    for sight in _lines(run / "fleet.jsonl")
    if began <= sight["time"] <= end
  ]
  busy = _busy(sights)
  waited = sum(line["time/wait"] * line["seconds"] for line in lines)
  return {
    "to_target_s": reached[0] if reached else None,
    "total_s": end - began,
    "held_out": summary["pass_rate_after"],
    "learner_core": busy["learner"],
    "rollout_core": sum(share for n, share in busy.items() if n != "learner"),
    "learner_waits": waited / sum(line["seconds"] for line in lines),
    "staleness": sum(line["staleness/mean"] for line in lines) / len(lines),
  }


def _read(run):
  """When training began, and a line for each step."""
  lines = [x for x in _lines(run / "metrics.jsonl") if "loss" in x]
  return lines[0]["wall_time"] - lines[0]["seconds"], lines


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _busy(sights) -> dict[str, float]:
  """Cores that each program kept busy from the first sight to the last."""
  first, last = sights[0], sights[-1]
  seconds = last["time"] - first["time"]
  return {
    name: (last["cpu_s"][name] - first["cpu_s"].get(name, 0.0)) / seconds
    for name in last["cpu_s"]
  }


def plot(runs: dict[str, pathlib.Path], path: pathlib.Path) -> None:
  """Training pass rate against time."""
  import matplotlib as mpl

  mpl.use("agg")
  from matplotlib import pyplot as plt

  canvas, axes = plt.subplots(figsize=(8, 4), layout="constrained")
  for name, run in runs.items():
    axes.plot(*curve(run), label=name)
  axes.set(xlabel="seconds", ylabel="share solved in training", ylim=(0, 1))
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(path, dpi=120)
  plt.close(canvas)


def add_flags(parser):
  """This benchmark's own flags."""
  parser.add_argument("--demo", default="runs/demo", help="where make demo ran")
  parser.add_argument("--out", default="runs/rl_async", help="a folder")
  parser.add_argument("--steps", type=int, default=30)
  parser.add_argument("--staleness", default="0,1,4")
  parser.add_argument("--corrections", default="none,tis")
  parser.add_argument("--latency_s", type=float, default=0.5)
  parser.add_argument("--target", type=float, default=0.6)
  parser.add_argument("--seed", type=int, default=0)


def main() -> None:
  """Trains each variant in turn, prints the table, and draws."""
  args = harness.arguments(__doc__.splitlines()[0], add_flags)
  if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
    raise SystemExit("This needs Linux and two cores, one for each side.")
  if not (pathlib.Path(args.demo) / "drills").exists():
    raise SystemExit(
      f"No drills in {args.demo}: run `make demo`, or set --demo."
    )
  out = pathlib.Path(args.out).absolute()
  rows, runs = [], {}
  for staleness, correction in variants(args):
    run = out / f"staleness_{staleness}_{correction}"
    train(args, staleness, correction, run)
    runs[f"staleness {staleness}, {correction}"] = run
    about = {"staleness_at_most": staleness, "correction": correction}
    rows.append(about | row(run, args.target))
  plot(runs, out / "pass_rate.png")
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
