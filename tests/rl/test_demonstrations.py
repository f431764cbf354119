"""Demonstrations solve their tasks, in words that rollouts use."""

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data import Tokenizer
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.tasks import Probe, Task
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.demonstrations import calls, demonstrate, demonstrations
from composer_jax.rl.drills import DrillDialect, write_traces
from composer_jax.rl.tasks import split

OTHERS = "".join(f"def other_{n}(x):\n  return x\n\n" for n in range(60))
FAULTY = OTHERS + "def f(x):\n  y = x\n  return x\n\n" + OTHERS
TASK = Task(
  task_id="t",
  kind="repair",
  prompt="The function f in m.py has a fault. Find and repair it.",
  files={"m.py": FAULTY},
  gold={"m.py": FAULTY.replace("y = x\n  return x", "y = x\n  return y")},
  probe=Probe("m", ("f(1)",), ("= 1",)),
)


class Folder:
  """A sandbox of files in memory, as far as `edit_file` needs one."""

  def __init__(self, files):
    self.files = {path: text.encode() for path, text in files.items()}

  async def read(self, path):
    return self.files[path]

  async def write(self, path, data):
    self.files[path] = data


def apply(task):
  """The files after the edits alone."""
  folder, dialect = Folder(task.files), DrillDialect(Tokenizer.train([""], 261))

  async def body():
    for line in calls(task):
      _, ((name, given),) = dialect.parse(dialect._encode(line))
      if name in ("edit_file", "write_file"):
        seen = await Toolbox().call(folder, name, given)
        assert seen.ok, seen.text

  asyncio.run(body())
  return {path: data.decode() for path, data in folder.files.items()}


def test_the_agent_looks_where_it_was_told_to_and_not_at_the_fault():
  lines = list(calls(TASK))
  assert [line.partition("(")[0] for line in lines] == [
    "search",
    "read_file",
    "edit_file",
    "finish",
  ]
  assert 'pattern="def f\\\\(", path="m.py"' in lines[0]
  # Sixty functions of three lines come before it.
  assert "first_line=181, last_line=240" in lines[1]
  assert apply(TASK) == TASK.gold


FEW = st.lists(st.sampled_from(["a\n", "b\n", "  c\n", "\n"]), max_size=12)


@given(FEW, FEW)
def test_edits_lead_to_the_gold_state(old, new):
  unlike = [f"{n}{line}" for n, line in enumerate(old)]
  task = dataclasses.replace(
    TASK,
    prompt="Do it.",
    files={"m.py": "head\n" + "".join(unlike) + "tail\n"},
    gold={"m.py": "head\n" + "".join(new) + "tail\n"},
  )
  assert apply(task) == task.gold


def test_files_that_are_not_there_are_written():
  task = dataclasses.replace(TASK, files={}, gold={"answer.txt": "4'\"\n"})
  assert apply(task) == task.gold
  assert len(list(calls(task))) == 3  # The prompt names a function.


@pytest.mark.sandbox
def test_what_is_told_is_what_happened(tmp_path):
  provider = Bubblewrap()
  text = asyncio.run(demonstrate(provider, TASK))
  first, search, hit, read, *shown, edit, edited, finish = text.splitlines()
  assert first == f"# Task: {TASK.prompt}"
  assert search.startswith("search(") and hit == "# 181:def f(x):"
  assert read.startswith("read_file(")
  assert shown[0] == "# def f(x):" and shown[-1] == "# (124 more lines)"
  assert edit.startswith("edit_file(") and edited == "# Edited m.py."
  assert finish == "finish()"

  async def untouched():
    async with await start(provider, TASK) as sandbox:
      return (await sandbox.read("m.py")).decode()

  # Each has a sandbox of its own.
  assert asyncio.run(untouched()) == FAULTY
  write_traces(
    tmp_path / "d.zip", asyncio.run(demonstrations(provider, [TASK] * 3))
  )


def test_tasks_alike_are_on_one_side():
  tasks = [
    dataclasses.replace(TASK, task_id=f"{n}", prompt=f"{n // 3}")
    for n in range(60)
  ]
  train, held_out = split(tasks, 10)
  assert (len(train), len(held_out)) == (51, 9)
  sides = [{task.prompt for task in side} for side in (train, held_out)]
  assert not sides[0] & sides[1]
  again = split(tasks[::-1], 10)
  assert {t.task_id for t in again[1]} == {t.task_id for t in held_out}
  assert [t.prompt for t in train] != sorted(t.prompt for t in train)
