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
  Images,
  Probe,
  Task,
  implement,
  load,
  micro,
  repair,
  save,
  sources,
  trees,
)
from composer_jax.envs.tasks.examples import functions, hold_out
from composer_jax.envs.tasks.mutate import faults, mutant
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import verify

pytestmark = pytest.mark.sandbox

SOURCE = '''\
import math

def keep(x): return x < 1

def f(x: int, y=2):
  """Says é < 1 + 1."""
  if x < y and not math.pow(x, y):
    return "é", x + 10  # A comment stays.
  for i in x[1:]:
    x -= min(i, 3, key=f"{i} 1")
    continue
  return True
'''


def test_mutants_have_one_fault_each():
  function = ast.parse(SOURCE).body[2]
  changes = set()
  for fault in faults(SOURCE, function):
    text = mutant(SOURCE, function, fault)
    if text is not None:
      old, new = SOURCE.splitlines(), text.splitlines()
      (change,) = [b for a, b in zip(old, new, strict=True) if a != b]
      changes.add(change.strip())
  assert changes == {
    "if x < y or not math.pow(x, y):",
    "if x <= y and not math.pow(x, y):",
    "if x > y and not math.pow(x, y):",
    "if x < y:",
    "if not math.pow(x, y):",
    "if not (x < y and not math.pow(x, y)):",
    "if x < y and math.pow(x, y):",
    "if x < y and not math.pow(y, x):",
    "if x < y and not math.pow(x):",
    'return "", x + 10  # A comment stays.',
    'return "é", x - 10  # A comment stays.',
    'return "é", x + 11  # A comment stays.',
    'return "é", x + 9  # A comment stays.',
    "return None  # A comment stays.",
    "for i in x[:]:",
    "for i in x[2:]:",
    "for i in x[0:]:",
    'x += min(i, 3, key=f"{i} 1")',
    "pass",
    'x -= min(3, i, key=f"{i} 1")',
    'x -= min(i, key=f"{i} 1")',
    "x -= min(i, 3)",
    'x -= max(i, 3, key=f"{i} 1")',
    'x -= min(i, 4, key=f"{i} 1")',
    'x -= min(i, 2, key=f"{i} 1")',
    "break",
    "return False",
    "return None",
  }


def test_parentheses_do_not_show_where_a_fault_is():
  source = "def f(x):\n  return not (x and 2 * (x + 1))\n"
  function = ast.parse(source).body[0]
  found = {
    mutant(source, function, fault) for fault in faults(source, function)
  }
  assert "def f(x):\n  return not (x and 2 * (x - 1))\n" in found
  assert "def f(x):\n  return x and 2 * (x + 1)\n" in found
  # But they are there where the text would mean something else.
  assert "def f(x):\n  return not (x and 2 + (x + 1))\n" in found


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


def images():
  return Images(
    lambda image: Bubblewrap(LIMITS, image.distributions, image.without)
  )


def test_repairs_of_a_real_package_hold(provider):
  source = sources.find("boltons")
  candidates = list(repair.generate(source, seed=1))
  assert len({task.task_id for task in candidates}) == len(candidates) > 150
  again = itertools.islice(repair.generate(source, seed=1), 9)
  assert list(again) == candidates[:9]
  few = random.Random(0).sample(candidates, 8)
  kept, dropped = run_build(provider, few)
  assert len(kept) + dropped.total() == 8 and len(kept) >= 4
  for task in kept[:2]:
    assert asyncio.run(outcome(provider, task, True)).ok
    verdict = asyncio.run(outcome(provider, task, False))
    assert not verdict.ok and verdict.total == len(task.probe.lines)
    (path,) = task.files
    assert task.gold.keys() == {path} and task.gold[path] != task.files[path]


def test_methods_make_tasks_too():
  source = sources.find("sortedcontainers")
  names = {task.task_id for task in repair.generate(source)}
  assert any("sortedlist.SortedList.bisect_left-" in name for name in names)


def test_bodies_are_taken_out_and_can_be_put_back(provider):
  candidates = list(implement.generate(sources.find("boltons")))
  assert len(candidates) > 60
  for task in candidates:
    ((path, broken),) = task.files.items()
    module = path.removesuffix(".py").replace("/", ".")
    name = task.task_id.removeprefix(f"implement-{module}.").rsplit("-")[0]
    old, new = (dict(functions(text)) for text in (task.gold[path], broken))
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
  source = sources.find("more-itertools")
  task = next(t for t in repair.generate(source) if ".chunked-" in t.task_id)

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


def test_lines_that_waver_are_left_out():
  provider = Bubblewrap(dataclasses.replace(LIMITS, wall_s=60.0))
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


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.xz"])
def test_tasks_on_disk(tmp_path, monkeypatch, name):
  source = sources.find("more-itertools")
  tasks = [
    *itertools.islice(micro.generate(), 5),
    *itertools.islice(repair.generate(source), 2),
  ]
  path = tmp_path / name
  save(path, tasks[:5])
  save(path, tasks[5:], append=True)
  # Another machine has no trees yet.
  monkeypatch.setattr(trees, "cache_folder", lambda: tmp_path / "cache")
  trees.get.cache_clear()
  with pytest.raises(FileNotFoundError, match="its folder of trees"):
    trees.get(tasks[5].tree)
  assert load(path) == tasks
  assert b"more_itertools/more.py" in trees.get(tasks[5].tree)
  trees.get.cache_clear()


def test_what_is_no_task_is_explained(tmp_path):
  path = tmp_path / "tasks.jsonl"
  save(path, itertools.islice(micro.generate(), 2))
  path.write_text(path.read_text() + '{"task_id": "x"}\n')
  with pytest.raises(ValueError, match="line 3, is no task"):
    load(path)


def launch(*flags):
  return subprocess.run(
    [sys.executable, "launch/tasks.py", *flags],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[2],
  )


def test_launch_builds_and_checks_tasks(tmp_path):
  path = tmp_path / "tasks.jsonl"
  result = launch("build", "--from=micro", "--count=3", f"--out={path}")
  assert result.stdout.endswith(f"3 tasks in {path}; 0 dropped\n"), result
  tasks = load(path)
  assert all(task.probe.answers for task in tasks)
  result = launch("check", f"--tasks={path}")
  assert result.returncode == 0, result
  assert "gold agent scored 1.0 on 3 of 3" in result.stdout
  assert "idle agent scored 0.0 on 3 of 3" in result.stdout
  # A task whose answers are wrong can't be solved, and is named.
  wrong = ("= 0",) * tasks[0].probe.total
  probe = dataclasses.replace(tasks[0].probe, answers=wrong)
  save(path, [dataclasses.replace(tasks[0], probe=probe)])
  result = launch("check", f"--tasks={path}")
  assert result.returncode == 1
  assert f"gold scored 0.0 on {tasks[0].task_id}" in result.stdout


def test_launch_explains_what_it_can_not_do(tmp_path):
  result = launch("build", "--from=no_such_package", f"--out={tmp_path}/x")
  assert result.returncode == 1 and "check the name" in result.stderr
  assert "Traceback" not in result.stderr
  assert "Usage" in launch("buidl").stderr


def test_a_task_needs_its_image(provider):
  task = next(repair.generate(sources.find("toolz")))
  with pytest.raises(ValueError, match="needs an image of its own"):
    asyncio.run(start(provider, task))


def test_no_sandbox_can_read_what_its_task_is_made_of():
  task = next(repair.generate(sources.find("toolz")))

  async def test():
    async with await start(images(), task) as sandbox:
      found = await sandbox.exec(
        ["find", "/usr", "/image", "-name", "itertoolz*"]
      )
      assert b"/itertoolz" not in found.output
      found = await sandbox.exec(["python", "-c", "import pytest, toolz"])
      assert found.ok

  asyncio.run(test())
