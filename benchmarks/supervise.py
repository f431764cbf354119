"""Runs jobs of a benchmark in a process that may crash or hang.

A kernel that reads a wrong address takes its whole process down, and one that
waits for a barrier for ever never returns. So the parent, which never touches
the GPU, hands its jobs to a worker, prints each row as it comes, and starts a
new worker with the jobs that are left when one dies or takes too long. It stops
by itself when its time is up.

A benchmark has a generator `measure(job)` of rows; its parent calls `run`, its
worker `work(measure)`.
"""

import argparse
import collections
import itertools
import json
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback

# How long a worker may take to start: imports, and the GPU's first use.
START_SECONDS = 45
RESTART = "restart"


def run(
  command: list[str],
  jobs: list[dict],
  show,
  *,
  seconds: float,
  job_seconds: float,
  process=None,
) -> list[dict]:
  """Has workers measure jobs in order, until all are done or time is up.

  Args:
    command: starts a worker, which calls `work`.
    jobs: dicts that JSON can hold.
    show: called with each row as it comes; one of an error has "error".
    seconds: how long all of it may take.
    job_seconds: how long one job may take.
    process: from a job to what it must share with others in one process.

  Returns:
    The jobs that there was no time for.
  """
  deadline = time.monotonic() + seconds
  left = []
  for _, group in itertools.groupby(jobs, process or bool):
    group = collections.deque(group)
    _run_group(command, group, show, deadline, job_seconds)
    left += group
  return left


def _run_group(command, left, show, deadline, job_seconds):
  while left and time.monotonic() < deadline:
    with tempfile.TemporaryFile("w+") as log:
      worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
      )
      lines = queue.SimpleQueue()
      threading.Thread(
        target=_read, args=(worker.stdout, lines), daemon=True
      ).start()
      try:
        worker.stdin.write(json.dumps(list(left)) + "\n")
        worker.stdin.flush()
        failure = _follow(lines, left, show, deadline, job_seconds)
      except BrokenPipeError:
        failure = "the worker died before it began"
      finally:
        worker.kill()
        code = worker.wait()
        worker.stdin.close()
      if failure and left:
        log.seek(0)
        show(left.popleft() | {"error": f"{failure} ({code}): {_tail(log)}"})


def _read(stream, lines):
  with stream:
    for line in stream:
      lines.put(line)
  lines.put(None)


def _follow(lines, left, show, deadline, job_seconds):
  """Takes a worker's lines; returns why it ended early, or None."""
  grace = START_SECONDS
  while left:
    limit = min(deadline - time.monotonic(), job_seconds + grace)
    try:
      line = lines.get(timeout=max(limit, 0))
    except queue.Empty:
      if time.monotonic() >= deadline:
        return None
      return f"nothing for {limit:.0f} s"
    if line is None:
      return "the worker died"
    if not line.startswith("@"):
      continue
    row, grace = json.loads(line[1:]), 0
    if row == RESTART:
      return None
    if row is None:  # A job is done.
      left.popleft()
    else:
      show(row)
  return None


def _tail(log):
  lines = [line for line in log.read().splitlines() if line.strip()]
  return " | ".join(lines[-3:])[-300:]


def work(measure) -> None:
  """Measures the jobs that come by standard input; never returns an error.

  An error is a row. After one the process goes on, unless the GPU is lost.
  """
  for job in json.loads(sys.stdin.readline()):
    try:
      for row in measure(job):
        _send(job | row)
    except Exception as error:  # Whatever went wrong, other jobs may not.
      _send(job | {"error": describe(error)})
      if not _device_alive():
        _send(None)
        return _send(RESTART)
    _send(None)
  return None


def _send(row):
  print("@" + json.dumps(row), flush=True)


def describe(error: Exception) -> str:
  """Returns the first lines of an error, and where in our code it arose."""
  text = " | ".join(str(error).splitlines()[:3])[:240]
  here = str(pathlib.Path(__file__).parents[1])
  frames = traceback.extract_tb(error.__traceback__)
  ours = [f for f in frames if f.filename.startswith(here)]
  place = f"{pathlib.Path(ours[-1].filename).name}:{ours[-1].lineno}"
  return f"{type(error).__name__}: {text} [{place}]"


def _device_alive():
  if "jax" not in sys.modules:
    return False  # torch: a new process is the surest.
  import jax
  import jax.numpy as jnp

  try:
    return float(jax.block_until_ready(jnp.ones(8).sum())) == 8
  except Exception:  # The context of a crashed kernel refuses everything.
    return False


class Table:
  """Prints rows as they come: aligned columns, or JSON; and to a file."""

  def __init__(self, columns: dict[str, int], *, as_json: bool, path: str = ""):
    self.columns = columns
    self.as_json = as_json
    self.path = path
    if not as_json:
      print(self._line(dict(zip(columns, columns, strict=True))), flush=True)

  def show(self, row: dict) -> None:
    """Prints one row and flushes it."""
    if self.path:
      with pathlib.Path(self.path).open("a") as file:
        print(json.dumps(row), file=file)
    if self.as_json:
      print(json.dumps(row), flush=True)
    else:
      print(self._line(row), flush=True)

  def _line(self, row):
    cells = [
      _cell(row.get(name)).ljust(width) for name, width in self.columns.items()
    ]
    note = row.get("error") or row.get("skipped") or ""
    return "  ".join([*cells, note]).rstrip()


def _cell(value):
  if value is None:
    return "-"
  if isinstance(value, dict):
    return " ".join(f"{k[0]}{v}" for k, v in value.items())
  return f"{value:.3g}" if isinstance(value, float) else str(value)


def report_left(jobs: list[dict]) -> None:
  """Says for which jobs no time was left."""
  if jobs:
    print(f"No time was left for {len(jobs)} jobs, the first: {jobs[0]}.")


def flags(description: str) -> argparse.ArgumentParser:
  """Returns a parser with the flags of a supervised benchmark."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--json", action="store_true", help="print one JSON object a row")
  add("--out", default="", help="also append rows as JSON to this file")
  add("--seconds", type=float, default=540, help="stop after so long")
  add("--job-seconds", type=float, default=90, help="give up a job after")
  add("--worker", default="", help=argparse.SUPPRESS)
  return parser
