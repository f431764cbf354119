"""Tasks: made, validated and verified; and verifiers that aren't fooled."""

import ast
import asyncio
import dataclasses
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.tasks import (
  Probe,
  Task,
  implement,
  load,
  micro,
  repair,
  save,
)
from composer_jax.envs.tasks.examples import hold_out
from composer_jax.envs.tasks.mutate import mutants
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import verify

pytestmark = pytest.mark.sandbox

SOURCE = '''\
import math

def keep(x): return x < 1

def f(x, y=2):
  """Says é < 1 + 1."""
  if x < y and not math.pow(x, y):
    return "é", x + 10  # A comment stays.
  return True
'''


def test_mutants_have_one_fault_each():
  function = ast.parse(SOURCE).body[2]
  found = set(mutants(SOURCE, function))
  changes = set()
  for text in found:
    ast.parse(text)
    old, new = SOURCE.splitlines(), text.splitlines()
    (change,) = [b for a, b in zip(old, new, strict=True) if a != b]
    changes.add(change.strip())
  assert changes == {
    "if (x < y or not math.pow(x, y)):",
    "if (x <= y) and not math.pow(x, y):",
    "if x < y and (math.pow(x, y)):",
    "if x < y and not (math.pow(y, x)):",
    'return "é", (x - 10)  # A comment stays.',
    'return "é", x + 11  # A comment stays.',
    "return False",
  }


DOCUMENTED = '''\
def twice(x):
  """Doubles.

  >>> twice(2)
  4
  >>> twice('ab')
  'abab'
  """
  return x * 2
'''


def test_held_out_examples_leave_the_docstring():
  function = ast.parse(DOCUMENTED).body[0]
  shown, lines = hold_out(DOCUMENTED, function)
  assert shown == DOCUMENTED.replace("  >>> twice('ab')\n  'abab'\n", "")
  assert lines[:2] == ("twice(2)", "twice('ab')")
  assert set(lines[2:]) == {
    "twice(3)",
    "twice(-2)",
    "twice('ba')",
    "twice('')",
  }


@pytest.fixture(scope="module")
def provider():
  return Bubblewrap(LIMITS)


def run_build(provider, candidates):
  return asyncio.run(build(provider, candidates))


async def outcome(provider, task, solved):
  async with await start(provider, task, solved) as sandbox:
    snapshot = await sandbox.snapshot()
  return await verify(provider, snapshot, task.probe)


def test_repairs_of_a_real_package_hold(provider):
  candidates = list(repair.generate("toolz", seed=1))
  assert candidates == list(repair.generate("toolz", seed=1))
  assert len({task.task_id for task in candidates}) == len(candidates) > 40
  few = random.Random(0).sample(candidates, 6)
  kept, dropped = run_build(provider, few)
  assert len(kept) + dropped.total() == 6 and len(kept) >= 2
  for task in kept[:2]:
    assert asyncio.run(outcome(provider, task, True)).ok
    verdict = asyncio.run(outcome(provider, task, False))
    assert not verdict.ok and verdict.total == len(task.probe.lines)
    (path,) = task.files
    assert task.gold.keys() == {path} and task.gold[path] != task.files[path]


def test_bodies_are_taken_out_and_can_be_put_back(provider):
  candidates = list(implement.generate("toolz"))
  assert len(candidates) > 20
  for task in candidates:
    ((path, broken),) = task.files.items()
    name = task.task_id.split("-")[1].rsplit(".")[-1]
    old, new = (
      {n.name: n for n in ast.parse(text).body if hasattr(n, "name")}
      for text in (task.gold[path], broken)
    )
    assert old.keys() == new.keys()
    assert ast.unparse(new[name].body[1]) == "raise NotImplementedError"
    assert len(new[name].body) == 2
    for text in (old, new):
      del text[name].body[1:]
    assert {k: ast.dump(v) for k, v in old.items()} == {
      k: ast.dump(v) for k, v in new.items()
    }
  few = random.Random(0).sample(candidates, 4)
  kept, dropped = run_build(provider, few)
  assert len(kept) + dropped.total() == 4 and len(kept) >= 2


def test_the_visible_test_finds_what_the_docstring_shows(provider):
  task = next(t for t in repair.generate("toolz") if ".itertoolz." in t.task_id)

  async def test(solved):
    async with await start(provider, task, solved) as sandbox:
      return await sandbox.exec(task.test_command)

  assert asyncio.run(test(True)).ok


def test_micro_tasks_hold_and_repeat(provider):
  candidates = list(itertools.islice(micro.generate(3), 8))
  assert candidates == list(itertools.islice(micro.generate(3), 8))
  kept, dropped = run_build(provider, candidates)
  assert len(kept) == 8 and not dropped


def task(text, gold, *lines, answers=()):
  return Task(
    task_id="t",
    kind="micro",
    prompt="p",
    files={"m.py": text},
    gold={"m.py": gold},
    probe=Probe("m", lines, answers),
  )


def test_tasks_that_do_not_hold_are_dropped_and_counted(provider):
  kept, dropped = run_build(
    provider,
    [
      task("x = 1", "x = 2", "x"),
      task("x = 2", "x = 2 + 0", "x"),
      task("x = 1", "import os; x = os.urandom(8)", "x"),
      task("x = 1", "x = object()", "x"),
      task("x = 1", "import os; os._exit(0)", "x"),
      task("import random; x = random.random() < 2", "x = True", "x"),
    ],
  )
  assert [t.files for t in kept] == [{"m.py": "x = 1"}]
  assert kept[0].probe.answers == ("= 2",)
  assert dropped == {
    "the untouched state passes": 2,
    "no line gives the same answer every time": 2,
    "the gold state gives no answers": 1,
  }


def test_lines_that_waver_are_left_out(provider):
  gold = "import time\nx = 2\ndef slow(): time.sleep(60)\n"
  (kept,), _ = run_build(
    provider, [task("x = 1", gold, "x", "id(object())", "slow()", "1 / 0")]
  )
  assert kept.probe.lines == ("x", "1 / 0")
  assert kept.probe.answers == ("= 2", "! ZeroDivisionError")


CHEATS = {
  "print": "print('\\n= 5'); f = lambda: 0",
  "always_equal": """
class Any:
  def __eq__(self, other): return True
f = Any
""",
  "exit": "import os; os._exit(0)",
  "raise": "raise SystemExit(0)",
  "forged_answers": """
import gc, json, os, sys
for frame in sys._current_frames().values():
  while frame:
    request = frame.f_globals.get("request")
    if request:
      os.write(1, (request["mark"] + json.dumps(["= 0"])).encode()); os._exit(0)
    frame = frame.f_back
""",
  "look_for_answers": """
import gc, sys
found = [o for o in gc.get_objects() if isinstance(o, dict) and "answers" in o]
f = lambda: next((o["answers"][0] for o in found if o["answers"]), 0)
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass(provider, name):
  cheat = task(CHEATS[name], "", "f()", answers=("= 5",))
  verdict = asyncio.run(outcome(provider, cheat, False))
  assert (verdict.passed, verdict.total) == (0, 1)


def test_the_verifier_uses_none_of_the_policy_s_modules(provider):
  honest = task("f = lambda: 5", "", "f()", answers=("= 5",))
  shadows = {"json.py": "raise ValueError", "sitecustomize.py": "1 / 0"}
  honest = dataclasses.replace(honest, files=honest.files | shadows)
  assert asyncio.run(outcome(provider, honest, False)).ok


def test_tasks_on_disk(tmp_path):
  tasks = list(itertools.islice(micro.generate(), 5))
  path = tmp_path / "tasks.jsonl"
  save(path, tasks)
  assert load(path) == tasks
  path.write_text(path.read_text() + '{"task_id": "x"}\n')
  with pytest.raises(ValueError, match="line 6, is no task"):
    load(path)


def launch(*flags):
  return subprocess.run(
    [sys.executable, "launch/tasks.py", *flags],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[2],
  )


def test_launch_builds_tasks(tmp_path):
  path = tmp_path / "tasks.jsonl"
  result = launch("build", "--from=micro", "--count=3", f"--out={path}")
  assert result.stdout == f"3 tasks in {path}\n", result.stderr
  assert all(task.probe.answers for task in load(path))
  result = launch("build", "--from=no_such_package", f"--out={path}")
  assert result.returncode == 1 and "pip install it" in result.stderr
  assert "Traceback" not in result.stderr
  assert "Usage" in launch("buidl").stderr


def test_what_can_not_be_made_is_explained(provider):
  with pytest.raises(ValueError, match="textwrap is in the standard library"):
    next(repair.generate("textwrap"))
  with pytest.raises(ModuleNotFoundError, match="pip install it"):
    next(repair.generate("no_such_package"))
  old = dataclasses.replace(next(repair.generate("toolz")), base_digest="0")
  with pytest.raises(ValueError, match="another version of toolz"):
    asyncio.run(start(provider, old))


def test_no_sandbox_can_read_what_its_task_is_made_of(provider):
  async def test():
    async with await provider.create() as sandbox:
      found = await sandbox.exec(
        ["find", "/usr", "/image", "-name", "itertoolz*"]
      )
      assert b"/itertoolz" not in found.output

  asyncio.run(test())
