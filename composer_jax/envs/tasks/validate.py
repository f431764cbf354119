"""Keeps the tasks that hold: solvable, not solved yet, and repeatably so.

Thousands of candidates of one repository share sandboxes here: each state that
has to be tested is a job of `runner.py`, in a process of its own that imports
the repository anew. A state is tested twice, in two sandboxes, with different
seeds of Python's hashes and with its neighbours in another order; what depends
on any of it is dropped. No policy ever sees these sandboxes.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from composer_jax.envs.sandbox import Provider
from composer_jax.envs.tasks import trees
from composer_jax.envs.tasks.types import Hidden, Probe, Task
from composer_jax.envs.tasks.verify import (
  job_of,
  judge,
  run_jobs,
  sandbox_for,
)

_BATCH = 48
_REPEATS = 2
# Stricter than when a policy is verified, so that no gold state is near a limit
# there; and mutants that never end cost less.
_LIMITS = {"line_s": 1.0, "job_s": 4.0, "wall_s": 20.0}


async def build(
  provider: Provider, candidates: Iterable[Task], lanes: int = 2
) -> tuple[list[Task], collections.Counter[str]]:
  """Records the hidden answers of candidates and validates them.

  Args:
    provider: of sandboxes.
    candidates: tasks whose probes have no answers yet.
    lanes: sandboxes that work at a time.

  Returns:
    The tasks that hold, in order, and the number of all others by reason.

  Raises:
    SandboxError: a sandbox failed.
  """
  work = _Work(provider, lanes)
  # Many faults have one cure: it is tested once.
  cures = {}
  candidates = list(candidates)
  for task in candidates:
    cures.setdefault(_cure(task), task)
  solved = await work.twice(
    [_State(task, task.files | task.gold) for task in cures.values()]
  )
  hidden = dict(zip(cures, map(_answered, cures.values(), solved), strict=True))
  dropped: collections.Counter[str] = collections.Counter()
  ready = []
  for task in candidates:
    probe = hidden[_cure(task)]
    if isinstance(probe, str):
      dropped[probe] += 1
    else:
      ready.append(dataclasses.replace(task, probe=probe))
  untouched = await work.twice([_State(task, task.files) for task in ready])
  kept = []
  for task, runs in zip(ready, untouched, strict=True):
    passed = [judge(task.probe, *run).ok for run in runs]
    if all(passed):
      dropped["the untouched state passes"] += 1
    elif any(passed):
      dropped["flaky: the untouched state passes at times"] += 1
    else:
      kept.append(task)
  return kept, dropped


def _cure(task: Task):
  files = task.files | task.gold
  return task.tree, task.image, task.probe, tuple(sorted(files.items()))


def _answered(task: Task, runs: Sequence[tuple[Any, Any]]) -> Hidden | str:
  """The hidden test with what the gold state gave, or why there is none."""
  probe = task.probe
  if not isinstance(probe, Probe):
    passed = [judge(probe, *run).ok for run in runs]
    if all(passed):
      return probe
    return ("flaky: " if any(passed) else "") + "the gold state fails"
  given = [answers for _, answers in runs]
  if not all(isinstance(g, list) and len(g) == probe.total for g in given):
    return "the gold state gives no answers"
  steady = [
    (line, first)
    for line, first, *others in zip(probe.lines, *given, strict=True)
    if all(first == other for other in others) and "TimeoutError" not in first
  ]
  if not any(answer.rsplit("\n", 1)[-1] != "=" for _, answer in steady):
    return "no line gives the same answer every time"
  lines, answers = zip(*steady, strict=True)
  return dataclasses.replace(probe, lines=lines, answers=answers)


@dataclasses.dataclass(frozen=True)
class _State:
  """A state of a task's repository that is to be tested."""

  task: Task
  files: dict[str, str]

  @property
  def place(self):
    """What states that share a sandbox have in common."""
    suite = getattr(self.task.probe, "tree", "")
    return self.task.tree, self.task.probe.image, suite

  def job(self) -> dict[str, Any]:
    job = job_of(self.task.probe)
    changes: dict[str, Any] = {"files": job["files"] | self.files}
    if isinstance(self.task.probe, Probe):
      changes |= _LIMITS | {"until": self.task.probe.answers or None}
    return job | changes


class _Work:
  """Runs states in shared sandboxes."""

  def __init__(self, provider: Provider, lanes: int):
    self._provider = provider
    self._gate = asyncio.Semaphore(lanes)

  async def twice(
    self, states: Sequence[_State]
  ) -> list[list[tuple[Any, Any]]]:
    """The job of each state and what it gives, each time."""
    places = collections.defaultdict(list)
    for number, state in enumerate(states):
      places[state.place].append(number)
    batches = [
      numbers[begin : begin + _BATCH]
      for numbers in places.values()
      for begin in range(0, len(numbers), _BATCH)
    ]
    found = [[(None, None)] * _REPEATS for _ in states]

    async def run(batch, repeat):
      async with self._gate:
        # In another order, so that no state leans on what came before.
        batch = batch[:: 1 if repeat == 0 else -1]
        given = await self._batch([states[n] for n in batch], repeat)
      for number, one in zip(batch, given, strict=True):
        found[number][repeat] = one

    async with asyncio.TaskGroup() as tasks:
      for batch in batches:
        for repeat in range(_REPEATS):
          tasks.create_task(run(batch, repeat))
    return found

  async def _batch(self, states, hash_seed):
    done = []
    while len(done) < len(states):
      # A job that ends the whole run has given nothing; the others go on in
      # another sandbox.
      left = states[len(done) :]
      task = left[0].task
      tree = trees.get(task.tree) if task.tree else b""
      jobs = [state.job() for state in left]
      sandbox = await sandbox_for(self._provider, task.probe, tree)
      async with sandbox:
        given, _ = await run_jobs(
          sandbox, jobs, hash_seed=hash_seed, warm=len(jobs) > 1
        )
      done += zip(jobs, given, strict=False)
    return done
