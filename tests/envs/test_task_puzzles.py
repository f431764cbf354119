"""Tasks from other people's problems: reasoning-gym and HumanEval."""

import asyncio
import dataclasses
import importlib.metadata
import json

import pytest

from composer_jax.data.decontaminate import humaneval as problems
from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.sandbox import Limits
from composer_jax.envs.tasks import Images, humaneval, load, puzzles, save
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import verify

pytestmark = pytest.mark.sandbox


def images(limits):
  return Images(
    lambda image: Bubblewrap(limits, image.distributions, image.without)
  )


def has_puzzles():
  try:
    return importlib.metadata.version("reasoning-gym")
  except importlib.metadata.PackageNotFoundError:
    return ""


needs_puzzles = pytest.mark.skipif(
  not has_puzzles(), reason="needs the extra `puzzles`"
)


@pytest.fixture(scope="module")
def made():
  provider = images(Limits())
  names = ["leg_counting", "bitwise_arithmetic"]
  candidates = asyncio.run(puzzles.generate(provider, names, size=2, seed=3))
  kept, dropped = asyncio.run(build(provider, candidates))
  assert len(kept) == 4 and not dropped
  return provider, kept


async def score(provider, task, files):
  async with await start(provider, task) as sandbox:
    for path, text in files.items():
      await sandbox.write(path, text.encode())
    snapshot = await sandbox.snapshot()
  return await verify(provider, snapshot, task.probe)


@needs_puzzles
def test_puzzles_are_scored_by_their_own_scorer(made):
  provider, tasks = made
  task = next(t for t in tasks if "-leg_counting-" in t.task_id)
  question, due = (
    json.loads(task.probe.entry)[k] for k in ("question", "answer")
  )
  assert task.prompt.startswith(question) and task.gold == {"answer.txt": due}

  async def scores():
    return [
      await score(provider, task, files)
      for files in (
        {"answer.txt": f"{due}\n"},
        {"answer.txt": str(int(due) + 1)},
        {},
        # Code of the policy's is never run where answers are scored.
        {"reasoning_gym.py": "1 / 0", "answer.txt": due, "json.py": "1 / 0"},
      )
    ]

  right, wrong, none, beside = asyncio.run(scores())
  assert right.ok and beside.ok
  assert not wrong.ok and wrong.passed < 10
  assert (none.passed, none.total) == (0, 100)


@needs_puzzles
def test_no_policy_can_ask_the_maker_of_puzzles(made):
  provider, tasks = made

  async def look():
    async with await start(provider, tasks[0]) as sandbox:
      return await sandbox.exec(["python", "-c", "import reasoning_gym"])

  assert "No module named" in asyncio.run(look()).text


@needs_puzzles
def test_puzzles_on_disk(made, tmp_path):
  save(tmp_path / "tasks.jsonl", made[1])
  assert load(tmp_path / "tasks.jsonl") == made[1]


@needs_puzzles
def test_a_puzzle_that_is_not_there_is_explained(made):
  with pytest.raises(ValueError, match="made no puzzle of no_such_kind"):
    asyncio.run(puzzles.generate(made[0], ["no_such_kind"]))


def test_humaneval_holds_and_is_not_fooled():
  provider = Bubblewrap(dataclasses.replace(LIMITS, wall_s=30.0))
  few = dict(list(problems().items())[::20])
  candidates = list(humaneval.generate(few))
  kept, dropped = asyncio.run(build(provider, candidates))
  assert len(kept) == 9 and not dropped
  task = kept[0]
  assert task.probe.lines[1] == "check(has_close_elements)"
  assert task.probe.answers == ("=", "= None", "! AssertionError")
  for cheat in (
    "has_close_elements = None\n",
    "check = lambda function: None\n",
    "import os; os._exit(0)",
    "import sys\nsys.argv = []\nraise SystemExit(0)",
  ):
    found = asyncio.run(score(provider, task, {"solution.py": cheat}))
    assert not found.ok
