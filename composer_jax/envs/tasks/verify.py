"""Runs hidden tests on what a policy left behind.

Always in a fresh sandbox that gets the repository alone: no process, no file
outside `/work` and no changed tool of the policy's is there. The sandbox runs
the test and says what came out (`runner.py`); only the host judges.

What it doesn't protect from: a package's own suite runs in one process with the
code that it tests. Code that reports each test as passed is found out, because
one test must fail, by a name of chance; code that looks for it is not.
"""

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_jax.envs.sandbox import Provider, Sandbox
from composer_jax.envs.tasks import trees
from composer_jax.envs.tasks.providers import with_image
from composer_jax.envs.tasks.types import Hidden, Probe, Riddle, Suite

_RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")
# Of the processor: for all lines or an import, for a line, for a test. By the
# clock it may be five times as much, and for all _WALL_S.
_JOB_S = 10.0
_LINE_S = 2.0
_TEST_S = 5.0
_WALL_S = 100.0


@dataclasses.dataclass(frozen=True)
class Verdict:
  """How a repository did.

  Attributes:
    passed: lines that gave the right answer, tests that passed, or hundredths
      of a score.
    total: of them.
    detail: why there were no answers at all, or "".
  """

  passed: int
  total: int
  detail: str = ""

  @property
  def ok(self) -> bool:
    """Whether everything passed."""
    return self.passed == self.total


async def verify(provider: Provider, snapshot: bytes, probe: Hidden) -> Verdict:
  """Runs a hidden test on a snapshot of a repository.

  Raises:
    FileError: the snapshot can't be unpacked.
    FileNotFoundError: the hidden suite is not on this machine.
    ValueError: the provider has one image, and the test needs another.
    SandboxError: the sandbox failed; nothing is known about the repository.
  """
  job = job_of(probe)
  async with await sandbox_for(provider, probe, snapshot) as sandbox:
    (given,), problem = await run_jobs(sandbox, [job])
  return judge(probe, job, given, problem)


async def sandbox_for(
  provider: Provider, probe: Hidden, snapshot: bytes
) -> Sandbox:
  """A sandbox with a repository and what the hidden test needs."""
  sandbox = await with_image(provider, probe.image).create(snapshot)
  if isinstance(probe, Suite):
    try:
      # Only the suite's own fixtures count.
      clean = ["find", ".", "-name", "conftest.py", "-delete"]
      await sandbox.exec(clean)
      await sandbox.restore(trees.get(probe.tree))
    except BaseException:
      await sandbox.destroy()
      raise
  return sandbox


def job_of(probe: Hidden, **changes: Any) -> dict[str, Any]:
  """A hidden test as `runner.py` wants it, with fields replaced."""
  job = {"files": {}, "wall_s": _WALL_S, "line_s": _LINE_S}
  match probe:
    case Probe():
      job |= {
        "kind": "probe",
        "module": probe.module,
        "root": probe.root,
        "lines": probe.lines,
        "job_s": _JOB_S,
        "until": None,
      }
    case Suite():
      # Nothing in it passes: see the module's docstring.
      name = f"test_{secrets.token_hex(8)}"
      control = f"{name}.py::{name}"
      job |= {
        "kind": "suite",
        "root": probe.root,
        "nodes": [*probe.nodes, control],
        "line_s": _TEST_S,
        "trace": False,
        "files": {f"{name}.py": f"def {name}():\n  assert not {name}\n"},
      }
    case Riddle():
      job |= {
        "kind": "score",
        "dataset": probe.dataset,
        "entry": probe.entry,
        "path": probe.path,
      }
  return job | changes


async def run_jobs(
  sandbox: Sandbox,
  jobs: Sequence[dict[str, Any]],
  *,
  hash_seed: int = 0,
  warm: bool = False,
) -> tuple[list[Any], str]:
  """What jobs of `runner.py` give, and how the run ended.

  Args:
    sandbox: with the repository in it.
    jobs: see `job_of`.
    hash_seed: of Python, which decides the order of sets.
    warm: spend time first so that each of many jobs takes less.

  Returns:
    For each job what it gave, None if it gave nothing; those after the one
    that ended the run are left out. And a sentence about the end, for people.

  Raises:
    SandboxError: the sandbox failed.
  """
  mark = secrets.token_hex(16)
  request = {"mark": mark, "warm": warm, "jobs": list(jobs)}
  result = await sandbox.exec(
    # Isolated, but for the environment, which is the sandbox's own.
    ["python", "-P", "-s", "-c", _RUNNER],
    stdin=json.dumps(request).encode(),
    cwd="/tmp",
    env={"PYTHONHASHSEED": str(hash_seed)},
    output_bytes=64 << 20,
  )
  given = []
  for line in result.text.split("\n"):
    if line.startswith(mark):
      # What is tested may have written this line.
      with contextlib.suppress(ValueError, TypeError, RecursionError):
        number, value = json.loads(line.removeprefix(mark))
        if number == len(given):
          given.append(value)
  ended = f"{result.reason}, exit code {result.exit_code}: "
  if len(given) < len(jobs):
    given.append(None)
  return given, ended + result.text[-300:]


def judge(
  probe: Hidden, job: dict[str, Any], given: Any, problem: str = ""
) -> Verdict:
  """What a job's result says about the repository.

  Args:
    probe: the hidden test, with its answers.
    job: that was made of it.
    given: by the job.
    problem: what to say if that is nothing.
  """
  total = probe.total
  match probe, given:
    case Probe(), list() if len(given) == total:
      right = zip(given, probe.answers, strict=True)
      return Verdict(sum(a == b for a, b in right), total)
    case Suite(), dict():
      *nodes, control = job["nodes"]
      outcomes = {
        n: t[0] for n, t in given.items() if isinstance(t, list) and t
      }
      if outcomes.get(control) != "failed":
        return Verdict(0, total, "a test that can't pass did not fail")
      return Verdict(sum(outcomes.get(n) == "passed" for n in nodes), total)
    case Riddle(), int() | float():
      return Verdict(round(100 * min(max(given, 0.0), 1.0)), total)
  return Verdict(0, total, problem or "no answers")
