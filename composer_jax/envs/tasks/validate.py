"""Keeps the tasks that hold: solvable, not solved yet, and repeatably so."""

import asyncio
import collections
import dataclasses
from collections.abc import Iterable

from composer_jax.envs.sandbox import Provider
from composer_jax.envs.tasks.types import Probe, Task, start
from composer_jax.envs.tasks.verify import answers, verify

_REPEATS = 2


async def build(
  provider: Provider, candidates: Iterable[Task], lanes: int = 2
) -> tuple[list[Task], collections.Counter[str]]:
  """Records the hidden answers of candidates and validates them.

  Args:
    provider: of sandboxes.
    candidates: tasks whose probes have no answers yet.
    lanes: that work at a time.

  Returns:
    The tasks that hold, in order, and the number of all others by reason.

  Raises:
    SandboxError: a sandbox failed.
  """
  candidates = list(candidates)
  gate = asyncio.Semaphore(lanes)

  async def one(task):
    async with gate:
      return await _validated(provider, task)

  found = await asyncio.gather(*map(one, candidates))
  kept = [task for task in found if isinstance(task, Task)]
  return kept, collections.Counter(r for r in found if isinstance(r, str))


async def _validated(provider: Provider, task: Task) -> Task | str:
  runs = [await _run(provider, task, solved=True) for _ in range(_REPEATS)]
  if any(isinstance(run, str) for run in runs):
    return "the gold state gives no answers"
  steady = [
    (line, first)
    for line, first, *others in zip(task.probe.lines, *runs, strict=True)
    if all(first == other for other in others) and "TimeoutError" not in first
  ]
  if not any(answer.rsplit("\n", 1)[-1] != "=" for _, answer in steady):
    return "no line gives the same answer every time"
  lines, given = zip(*steady, strict=True)
  probe = Probe(task.probe.module, lines, given)
  task = dataclasses.replace(task, probe=probe)
  verdicts = []
  for solved in (True, False):
    for _ in range(_REPEATS):
      async with await start(provider, task, solved) as sandbox:
        snapshot = await sandbox.snapshot()
      verdicts.append((await verify(provider, snapshot, probe)).ok)
  gold, untouched = verdicts[:_REPEATS], verdicts[_REPEATS:]
  if not all(gold):
    return "flaky: the gold state fails"
  if all(untouched):
    return "the untouched state passes"
  if any(untouched):
    return "flaky: the untouched state passes at times"
  return task


async def _run(provider, task, *, solved):
  async with await start(provider, task, solved) as sandbox:
    snapshot = await sandbox.snapshot()
  async with await provider.create(snapshot) as sandbox:
    return await answers(sandbox, task.probe)
