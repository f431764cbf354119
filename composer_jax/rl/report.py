"""What a finished run leaves for people: one page with plots, and a summary.

Reads what the parts of the run wrote, and nothing else, so that it can be made
again: `python -m composer_jax.rl.report WORKDIR`.
"""

import base64
import collections
import html
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_jax.rl import journal
from composer_jax.rl.worker import read_json
from composer_jax.shipping import Chain, open_store

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; }
table { border-collapse: collapse; } td, th { padding: .2em 1em .2em 0;
text-align: left; } pre { background: #f4f4f4; padding: .6em; overflow: auto; }
img { max-width: 100%; } .solved { border-left: 4px solid #2a2; }
.failed { border-left: 4px solid #c33; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write(workdir: Path) -> dict[str, Any]:
  """Writes `report.html` and `summary.json` of a run that is done.

  Args:
    workdir: of the run.

  Returns:
    The summary.

  Raises:
    FileNotFoundError: the run isn't done.
    ImportError: matplotlib is missing.
  """
  run = _Run(workdir)
  summary = run.summary()
  (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  (workdir / "report.html").write_text(_page(run, summary), "utf-8")
  return summary


class _Run:
  """What the parts wrote."""

  def __init__(self, workdir: Path):
    for name in ("result.json", "fleet_end.json"):
      if not (workdir / name).exists():
        raise FileNotFoundError(f"{workdir} has no {name}: the run isn't done.")
    self.result = result = read_json(workdir / "result.json")
    # At the end: the digest of what each host serves, restarts of each program.
    self.fleet = read_json(workdir / "fleet_end.json")
    self.metrics = [
      line for line in journal.read(workdir / "metrics.jsonl") if "loss" in line
    ]
    self.steps = journal.read(workdir / "steps.jsonl")
    self.exams = journal.read(workdir / "evaluations.jsonl")
    self.sights = [
      json.loads(line)
      for line in (workdir / "fleet.jsonl").read_text().splitlines()
    ]
    chain = Chain(open_store(result["store"] or str(workdir / "chain")))
    # The delta against the version before; some have only a snapshot.
    self.deltas = {}
    versions = sorted(chain.versions)
    for before, version in itertools.pairwise(versions):
      sizes = [
        d.size
        for d in chain.versions[version].deliveries
        if d.base_version == before
      ]
      self.deltas[version] = sizes[0] if sizes else result["weight_bytes"]
    self.versions = versions

  @property
  def began(self) -> float:
    return self.sights[0]["time"] if self.sights else 0.0

  def summary(self) -> dict[str, Any]:
    result, exams = self.result, self.result["evaluations"]
    discarded = {
      name: count
      for name, count in result["counts"].items()
      if name not in ("ordered", "trained") and count
    }
    discarded |= {"unfinished": result["unfinished"]}
    lags = [int(lag) for step in self.steps for lag in step["lags"]]
    return {
      "pass_rate_before": exams[0]["pass_rate"],
      "pass_rate_after": exams[-1]["pass_rate"],
      "held_out_tasks": exams[-1]["tasks"],
      "steps": result["step"],
      "versions_shipped": len(self.versions),
      "delta_bytes": sum(self.deltas.values()),
      "full_bytes": result["weight_bytes"] * len(self.deltas),
      "max_staleness": max(lags, default=0),
      "trajectories_ordered": result["counts"].get("ordered", 0),
      "trajectories_trained": result["counts"].get("trained", 0),
      "trajectories_discarded": discarded,
      "swap_pause_ms": self.pause_ms(),
      **self.work(),
      "hosts_bit_identical": all(
        digest == result["weights_digest"]
        for digest in self.fleet["digests"].values()
      ),
      "restarts": self.fleet["restarts"],
    }

  def work(self) -> dict[str, float]:
    """Of training and of inference: FLOPs, processor time, and the shares.

    FLOPs of training are those of the trajectories, forward and backward, by
    `Learner.flops`. A token that a host computed, of a reply or of a prompt
    that no cache had, counts as a third of what training on one took: training
    is a forward pass and twice that backward. Padding isn't counted.
    Processor time is that of the processes, and for workers of what they
    started and reaped; a host's or a worker's counts to inference.
    """
    training = sum(line["work/flops"] for line in self.metrics)
    tokens = sum(line["work/tokens"] for line in self.metrics)
    computed = self._over_lives(
      {
        name: facts["sampled_tokens"]
        + facts["prompt_tokens"]
        - facts["cached_tokens"]
        for name, facts in sight["hosts"].items()
        if facts
      }
      for sight in self.sights
    )
    inference = sum(computed.values()) * training / tokens / 3
    cpu_s = self._over_lives(sight["cpu_s"] for sight in self.sights)
    learner_s = cpu_s.get("learner", 0.0)
    rollouts_s = sum(cpu_s.values()) - learner_s
    return {
      "training_flops": training,
      "inference_flops": inference,
      "inference_share_of_flops": inference / (inference + training),
      "training_cpu_s": round(learner_s, 1),
      "inference_cpu_s": round(rollouts_s, 1),
      "inference_share_of_cpu": rollouts_s / max(1e-9, learner_s + rollouts_s),
    }

  @staticmethod
  def _over_lives(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums of counters that begin at 0 again when a process does."""
    sums, last = collections.defaultdict(float), {}
    for now in counts:
      for name, count in now.items():
        before = last.get(name, 0)
        sums[name] += count - before if count >= before else count
        last[name] = count
    return dict(sums)

  def pause_ms(self) -> float | None:
    """The mean pause of a swap, over hosts and their last lives."""
    last = [host for s in self.sights[-1:] for host in s["hosts"].values()]
    swaps = sum(host.get("swaps", 0) for host in last)
    paused = sum(host.get("pause_s", 0) for host in last)
    return round(1e3 * paused / swaps, 3) if swaps else None


def _page(run: _Run, summary: Mapping[str, Any]) -> str:
  rows = "".join(
    f"<tr><th>{html.escape(name)}</th><td>{html.escape(_said(value))}</td></tr>"
    for name, value in summary.items()
  )
  plots = "".join(
    f"<h2>{title}</h2><img alt='{title}' src='{_image(draw, run)}'>"
    for title, draw in _PLOTS.items()
  )
  return (
    "<!doctype html><html lang='en'><meta charset='utf-8'>"
    f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
    f"<title>Reinforcement learning</title><style>{_STYLE}</style>"
    f"<h1>Reinforcement learning</h1><table>{rows}</table>{plots}"
    f"{_samples(run)}</html>\n"
  )


def _said(value: Any) -> str:
  if isinstance(value, Mapping):
    return ", ".join(f"{k}: {v}" for k, v in sorted(value.items())) or "none"
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _samples(run: _Run) -> str:
  parts = []
  exams = run.exams[:1] + run.exams[1:][-1:]
  for title, exam in zip(("before", "after"), exams, strict=False):
    parts.append(f"<h2>Held-out tasks, {title} (step {exam['step']})</h2>")
    for sample in exam["samples"]:
      kind = "solved" if sample["solved"] else "failed"
      text = html.escape(sample["text"])
      parts.append(f"<p>{kind}</p><pre class='{kind}'>{text}</pre>")
  return "".join(parts)


def _image(draw: Callable[[Any, _Run], None], run: _Run) -> str:
  """A plot, as the address of an image that holds itself."""
  import matplotlib as mpl  # Of the extra `demo`.

  mpl.use("agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
  axes.grid(alpha=0.3)
  draw(axes, run)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize="small")
  file = io.BytesIO()
  figure.savefig(file, dpi=110, format="png")
  plt.close(figure)
  return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _against_step(axes, run):
  _rates(axes, run, lambda line: line["step"])
  axes.set(xlabel="step", ylabel="share solved", ylim=(0, 1.02))


def _against_time(axes, run):
  _rates(axes, run, lambda line: line["wall_time"] - run.began)
  axes.set(xlabel="seconds", ylabel="share solved", ylim=(0, 1.02))


def _rates(axes, run, place):
  for lines, name, label, style in (
    (run.metrics, "reward/pass_rate", "all rollouts", "-"),
    (run.exams, "pass_rate", "held-out tasks", "o--"),
  ):
    axes.plot(
      [place(x) for x in lines], [x[name] for x in lines], style, label=label
    )


def _staleness(axes, run):
  lags = sorted({int(lag) for step in run.steps for lag in step["lags"]})
  shares = [
    [s["lags"].get(str(lag), 0) / sum(s["lags"].values()) for s in run.steps]
    for lag in lags
  ]
  axes.stackplot(
    [s["step"] for s in run.steps],
    shares,
    labels=[f"{lag} versions" for lag in lags],
  )
  axes.set(xlabel="step", ylabel="share of tokens", ylim=(0, 1))


def _mismatch(axes, run):
  for name in sorted({n for line in run.metrics for n in line}):
    if name.startswith("mismatch_"):
      lines = [line for line in run.metrics if line.get(name) is not None]
      axes.plot(
        [x["step"] for x in lines], [x[name] for x in lines], label=name
      )
  axes.set(xlabel="step", ylabel="nats")
  axes.set_yscale("symlog", linthresh=1e-6)


def _sizes(axes, run):
  axes.plot(list(run.deltas), list(run.deltas.values()), label="delta")
  axes.axhline(
    run.result["weight_bytes"], color="gray", linestyle="--", label="full copy"
  )
  axes.set(xlabel="version", ylabel="bytes", yscale="log")


def _hosts(axes, run):
  for name in sorted({n for s in run.sights for n in s["hosts"]}):
    points = [
      (s["time"] - run.began, s["hosts"][name]["version"])
      for s in run.sights
      if s["hosts"].get(name)
    ]
    axes.plot(*zip(*points, strict=True), drawstyle="steps-post", label=name)
  axes.set(xlabel="seconds", ylabel="version served")


def _processors(axes, run):
  for name in sorted({n for s in run.sights for n in s["cpu_s"]}):
    seen = [
      (s["time"], s["cpu_s"][name]) for s in run.sights if name in s["cpu_s"]
    ]
    # A new life begins at 0 again.
    pairs = [p for p in zip(seen, seen[5:], strict=False) if p[1][1] >= p[0][1]]
    axes.plot(
      [late[0] - run.began for _, late in pairs],
      [(late[1] - early[1]) / (late[0] - early[0]) for early, late in pairs],
      label=name,
    )
  axes.set(xlabel="seconds", ylabel="cores in use")


def _learner_time(axes, run):
  names = sorted({n for line in run.metrics for n in line if "time/" in n})
  shares = [[line.get(n) or 0.0 for line in run.metrics] for n in names]
  labels = [name.removeprefix("time/") for name in names]
  axes.stackplot([x["step"] for x in run.metrics], shares, labels=labels)
  axes.set(xlabel="step", ylabel="share of the learner's time", ylim=(0, 1))


_PLOTS = {
  "Solved, by step": _against_step,
  "Solved, by time": _against_time,
  "How old the tokens were that were trained on": _staleness,
  "Learner against sampler": _mismatch,
  "What a version weighs": _sizes,
  "Versions in the hosts": _hosts,
  "Processors": _processors,
  "Where the learner's time went": _learner_time,
}

if __name__ == "__main__":
  write(Path(sys.argv[1]))
