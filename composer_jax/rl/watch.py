"""What a run of reinforcement learning does just now, seen from outside.

Asks inference hosts over HTTP, reads what learner and workers say in files, and
processor time from the kernel. What was seen goes to `<workdir>/fleet.jsonl`,
for the report, and to a terminal.
"""

import contextlib
import dataclasses
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.rl import journal
from composer_jax.rl.worker import read_json

_TIMEOUT_S = 2.0
_BARS = " ▁▂▃▄▅▆▇█"
# Names in the server's /metrics, and ours.
_HOST_METRICS = {
  "composer_engine_running": "running",
  "composer_engine_waiting": "waiting",
  "composer_engine_prompt_tokens_total": "prompt_tokens",
  "composer_engine_cached_tokens_total": "cached_tokens",
  "composer_engine_sampled_tokens_total": "sampled_tokens",
  "composer_swap_pause_seconds_sum": "pause_s",
  "composer_swap_pause_seconds_count": "swaps",
}


@dataclasses.dataclass(frozen=True)
class Sight:
  """One look at a run.

  Attributes:
    time: of it, seconds since 1970.
    learner: what `loop` says.
    hosts: what each serves, and its counts; empty while it is down.
    workers: what each says.
    cpu_s: processor time of each program, and of what it started and reaped,
      since it was last started.
    restarts: of each program.
  """

  time: float
  learner: Mapping[str, Any]
  hosts: Mapping[str, Mapping[str, Any]]
  workers: Mapping[str, Mapping[str, Any]]
  cpu_s: Mapping[str, float]
  restarts: Mapping[str, int]


class Watch:
  """Looks at a run; keeps the last look, for rates."""

  def __init__(self, workdir: Path):
    """Opens the log, to which earlier runs in this folder wrote, too."""
    self._workdir = workdir
    self._log = (workdir / "fleet.jsonl").open("a")
    self._last: Sight | None = None

  def look(
    self,
    urls: Mapping[str, str | None],
    pids: Mapping[str, int | None],
    restarts: Mapping[str, int],
  ) -> Sight:
    """Looks, and writes it down.

    Args:
      urls: of hosts by name; None while one is down.
      pids: of all programs by name.
      restarts: of them.
    """
    status = self._workdir / "status"
    sight = Sight(
      time=time.time(),
      learner=read_json(self._workdir / "learner.json") or {},
      hosts={n: host_facts(url) if url else {} for n, url in urls.items()},
      workers={
        path.stem: read_json(path) or {}
        for path in sorted(status.glob("[!.]*.json"))
      },
      cpu_s={n: seconds for n, p in pids.items() if (seconds := cpu_s(p))},
      restarts=restarts,
    )
    self._log.write(json.dumps(dataclasses.asdict(sight)) + "\n")
    self._log.flush()
    return sight

  def close(self) -> None:
    """Closes the log."""
    self._log.close()

  def picture(self, sight: Sight) -> Any:
    """What `rich` shows of a look."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    before, self._last = self._last, sight
    learner = sight.learner
    table = Table(
      "", "version", "running", "waiting", "tokens/s", "CPU", "note"
    )
    for name, host in sight.hosts.items():
      table.add_row(
        name,
        *(str(host.get(k, "-")) for k in ("version", "running", "waiting")),
        _rate(before, sight, _sampled(name)),
        _cpu(before, sight, name),
        "" if host else "down",
      )
    for name, worker in sight.workers.items():
      running, cpu = str(worker.get("running", "-")), _cpu(before, sight, name)
      table.add_row(name, "", running, "", "", cpu, _spent(worker))
    version, cpu = learner.get("version", "-"), _cpu(before, sight, "learner")
    doing = str(learner.get("doing", "starting"))
    table.add_row("learner", str(version), "", "", "", cpu, doing)
    solved = [
      line["reward/pass_rate"]
      for line in journal.read(self._workdir / "metrics.jsonl")
      if line.get("reward/pass_rate") is not None
    ]
    lines = journal.read(self._workdir / "steps.jsonl")
    counts = learner.get("counts", {})
    shown = f"{solved[-1]:.0%}" if solved else "-"
    return Group(
      Text(
        f"step {learner.get('step', 0)} of {learner.get('steps', '?')};"
        f" groups: {learner.get('outstanding', 0)} on their way,"
        f" {learner.get('complete', 0)} complete"
      ),
      Text(f"solved    {bars(solved[-60:])} {shown}"),
      Text(f"staleness {_lags(lines)}"),
      Text(f"discarded {_discarded(counts)}"),
      table,
    )


def host_facts(url: str) -> dict[str, Any]:
  """Version and counts of a host; none if it doesn't answer."""
  with contextlib.suppress(OSError, ValueError, urllib.error.URLError):
    health = json.loads(_get(f"{url}/health"))
    facts = {"version": health["version"]}
    for line in _get(f"{url}/metrics").splitlines():
      name, _, value = line.rpartition(" ")
      if name in _HOST_METRICS:
        facts[_HOST_METRICS[name]] = float(value)
    return facts
  return {}


def weights_digest(url: str, key: str) -> str:
  """The digest of the bits that a host serves, as it computes it itself.

  Raises:
    OSError: it doesn't answer.
  """
  headers = {"Authorization": f"Bearer {key}"}
  answer = _get(f"{url}/admin/weights?digest=1", headers)
  return json.loads(answer)["weights_digest"]


def cpu_s(pid: int | None) -> float:
  """Processor seconds of a process and of its children that ended (Linux)."""
  try:
    stat = Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return 0.0
  # After the name in brackets; see proc(5), fields 14 to 17.
  ticks = map(int, stat.rpartition(")")[2].split()[11:15])
  return sum(ticks) / os.sysconf("SC_CLK_TCK")


def bars(values: list[float]) -> str:
  """Shares from 0 to 1 as a line of bars."""
  last = len(_BARS) - 1
  return "".join(_BARS[round(min(1.0, max(0.0, v)) * last)] for v in values)


def _get(url: str, headers: Mapping[str, str] | None = None) -> str:
  request = urllib.request.Request(url, headers=dict(headers or {}))
  with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
    return response.read().decode()


def _rate(before: Sight | None, now: Sight, of) -> str:
  if before is None:
    return "-"
  first, last = of(before), of(now)
  if first is None or last is None or last < first:
    return "-"
  return f"{(last - first) / max(1e-9, now.time - before.time):.0f}"


def _sampled(name):
  return lambda sight: sight.hosts[name].get("sampled_tokens")


def _cpu(before, now, name):
  rate = _rate(before, now, lambda s: s.cpu_s.get(name, 0.0) * 100)
  return rate if rate == "-" else f"{rate}%"


def _spent(worker: Mapping[str, Any]) -> str:
  """Where the time of rollouts went."""
  seconds = worker.get("seconds", {})
  total = seconds.get("rollouts", 0.0)
  if not total:
    return ""
  sampling = seconds["sampling"] / total
  return f"sampling {sampling:.0%}, tools and tests {1 - sampling:.0%}"


def _lags(lines: list[dict[str, Any]]) -> str:
  if not lines:
    return "-"
  lags = lines[-1]["lags"]
  total = sum(lags.values())
  return ", ".join(f"{lag}: {count / total:.0%}" for lag, count in lags.items())


def _discarded(counts: Mapping[str, int]) -> str:
  kept = {k: v for k, v in counts.items() if k not in ("ordered", "trained")}
  told = ", ".join(f"{name} {count}" for name, count in sorted(kept.items()))
  return f"{told or 'none'} (trained on {counts.get('trained', 0)})"
