"""Makes tasks, validates them in sandboxes, and checks them with agents.

    python launch/tasks.py build --from=toolz --from=stdlib --out=all.jsonl.xz
    python launch/tasks.py build --from=/path/to/checkout --require=hypothesis
    python launch/tasks.py build --from=micro --count=500 --out=micro.jsonl
    python launch/tasks.py check --tasks=all.jsonl.xz --count=200

A source is "micro", "humaneval" (for evaluation only), "puzzles" (all of
reasoning-gym's, or "puzzles:NAME"), "stdlib", a folder, or a package by name,
with a version or without. Each task that is kept was solved by its gold state
and failed by its untouched state, both twice. The others are counted by reason.

`check` lets two scripted agents work on some of the tasks, through the harness:
one that knows the answer must score 1.0, one that does nothing 0.0. The exit
code says whether they did.
"""

import asyncio
import collections
import itertools
import random
import sys
import time

from absl import app, flags

from composer_jax.data.decontaminate import humaneval as problems
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.harness import Budget
from composer_jax.envs.rewards import RewardConfig
from composer_jax.envs.sandbox import Limits, SandboxError
from composer_jax.envs.tasks import (
  Images,
  humaneval,
  implement,
  load,
  micro,
  puzzles,
  repair,
  save,
  scripted,
  sources,
  suites,
)
from composer_jax.envs.tasks.validate import build

_FROM = flags.DEFINE_multi_string(
  "from", [], "What to make tasks of; may be repeated."
)
_OUT = flags.DEFINE_string("out", "tasks.jsonl", "The file to write.")
_TASKS = flags.DEFINE_string("tasks", "tasks.jsonl", "The file to check.")
_COUNT = flags.DEFINE_integer(
  "count", 0, "Candidates of a source, or tasks to check, at most; 0: all."
)
_SEED = flags.DEFINE_integer("seed", 0, "Chooses drills, faults, checks.")
_LANES = flags.DEFINE_integer("lanes", 2, "Sandboxes that work at a time.")
_FAULTS = flags.DEFINE_integer("faults", 8, "Of a function, at most.")
_REQUIRE = flags.DEFINE_multi_string(
  "require", [], "A requirement of a source beside those that it declares."
)
_DEPENDENCIES = flags.DEFINE_bool(
  "dependencies", True, "Whether images get what sources declare."
)
_PUZZLES = flags.DEFINE_integer("puzzles", 4, "Of a dataset.")
_SUITE = flags.DEFINE_bool(
  "suite", True, "Whether a source's own tests make tasks, too."
)
_CHUNK = 512
_DRILLS = 500
# Many states share a sandbox while tasks are made.
_BUILD_LIMITS = Limits(
  memory_bytes=1 << 30, processes=128, disk_bytes=512 << 20, wall_s=600.0
)
# A whole file is one reply of a scripted agent.
_BUDGET = Budget(tokens=1 << 25, turn_tokens=1 << 24)


def main(argv) -> None:
  """Runs the verb on the command line."""
  verbs = {("build",): _build, ("check",): _check}
  verb = verbs.get(tuple(argv[1:]))
  if verb is None or (verb is _build and not _FROM.value):
    sys.exit(
      "Usage: tasks.py build --from=SOURCE [--out=FILE], or tasks.py check"
      " --tasks=FILE."
    )
  try:
    sys.exit(verb())
  except (FileNotFoundError, ImportError) as error:
    sys.exit(str(error))
  except (SandboxError, ValueError) as error:
    sys.exit(str(error))


def _build() -> int:
  provider = _provider(_BUILD_LIMITS)
  total, dropped = 0, collections.Counter()
  for place in _FROM.value:
    began = time.monotonic()
    kept, others = 0, collections.Counter()
    candidates = itertools.islice(
      _candidates(place, provider), _COUNT.value or None
    )
    for chunk in itertools.batched(candidates, _CHUNK):
      more, counts = asyncio.run(build(provider, chunk, _LANES.value))
      save(_OUT.value, more, append=total > 0)
      kept, total = kept + len(more), total + len(more)
      others += counts
      print(f"{place}: {kept} kept, {others.total()} dropped", file=sys.stderr)
    dropped += others
    seconds = time.monotonic() - began
    print(
      f"{place}: {kept} kept, {_said(others)} ({seconds:.0f} s)", flush=True
    )
  if not total:
    save(_OUT.value, [])
  print(f"{total} tasks in {_OUT.value}; {_said(dropped)}")
  return 0


def _said(dropped) -> str:
  reasons = (f"{reason}: {count}" for reason, count in dropped.most_common())
  return f"{dropped.total()} dropped" + "".join(f"; {r}" for r in reasons)


def _candidates(place, provider):
  kind, _, name = place.partition(":")
  if kind == "micro":
    drills = micro.generate(_SEED.value)
    yield from itertools.islice(drills, _COUNT.value or _DRILLS)
  elif kind == "humaneval":
    yield from humaneval.generate(problems())
  elif kind == "puzzles":
    names = [name] if name else []
    made = puzzles.generate(provider, names, _PUZZLES.value, _SEED.value)
    yield from asyncio.run(made)
  else:
    source = sources.find(place, _REQUIRE.value, _DEPENDENCIES.value)
    yield from repair.generate(source, _SEED.value, _FAULTS.value)
    yield from implement.generate(source)
    if source.tests and _SUITE.value:
      tested = asyncio.run(suites.survey(provider, source, _LANES.value))
      print(f"{place}: its own tests: {dict(tested.counts)}", file=sys.stderr)
      yield from suites.generate(tested, _SEED.value, _FAULTS.value)


def _check() -> int:
  tasks = load(_TASKS.value)
  if _COUNT.value:
    few = min(_COUNT.value, len(tasks))
    tasks = random.Random(_SEED.value).sample(tasks, few)
  agents = {"gold": (scripted.gold, 1.0), "idle": (scripted.idle, 0.0)}
  wrong = asyncio.run(_played(tasks, agents))
  for task_id, agent, score in wrong:
    print(f"{agent} scored {score} on {task_id}")
  for agent, (_, due) in agents.items():
    right = len(tasks) - sum(name == agent for _, name, _ in wrong)
    print(f"The {agent} agent scored {due} on {right} of {len(tasks)} tasks.")
  return bool(wrong)


async def _played(tasks, agents):
  from composer_jax.rl.play import play_task  # Takes seconds: it needs JAX.

  provider = _provider(Limits())
  gate = asyncio.Semaphore(_LANES.value)
  rewards = RewardConfig({"solved": 1.0})

  async def one(task, name):
    agent, due = agents[name]
    play = play_task(provider, scripted.Bytes(), task, rewards, _BUDGET)
    async with gate:
      _, parts = await play(agent(task))
    score = parts["solved"]
    return [] if score == due else [(task.task_id, name, score)]

  found = await asyncio.gather(
    *(one(t, name) for t in tasks for name in agents)
  )
  return [wrong for some in found for wrong in some]


def _provider(limits):
  return Images(
    lambda image: Bubblewrap(limits, image.distributions, image.without)
  )


if __name__ == "__main__":
  app.run(main)
