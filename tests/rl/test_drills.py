"""Drills: right answers, an honest split, and a dialect that training saw."""

import asyncio
import itertools
import json
import zipfile

import pytest

from composer_jax.data import Tokenizer
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.verify import verify
from composer_jax.rl.drills import DrillDialect, drills, traces, write_traces

TRACES = list(itertools.islice(traces(1), 400))
TOKENIZER = Tokenizer.train(TRACES, 500)
DIALECT = DrillDialect(TOKENIZER)


def take(count, **rest):
  return list(itertools.islice(drills(0, **rest), count))


@pytest.mark.sandbox
def test_the_hidden_tests_agree_with_a_sandbox():
  tasks = take(8, held_out=False)

  async def verdicts(task):
    found = []
    for solved in (True, False):
      async with await start(provider, task, solved) as sandbox:
        snapshot = await sandbox.snapshot()
      found.append((await verify(provider, snapshot, task.probe)).ok)
    return found

  async def all_of_them():
    return [await verdicts(task) for task in tasks]

  provider = Bubblewrap()
  assert asyncio.run(all_of_them()) == [[True, False]] * len(tasks)


def test_held_out_prompts_are_in_no_trace_and_no_other_drill():
  held_out = {task.prompt for task in take(300, held_out=True)}
  train = {task.prompt for task in take(300, held_out=False)}
  assert len(held_out) > 60
  assert not held_out & train
  seen = {text.splitlines()[0].removeprefix("# Task: ") for text in TRACES}
  assert len(seen) > 60
  assert not held_out & seen
  assert take(5, held_out=True) == take(5, held_out=True)


def test_what_a_rollout_says_is_tokenised_as_training_was():
  for text in TRACES[:50]:
    task, *rest = text.splitlines(keepends=True)
    prompt = task.removeprefix("# Task: ").removesuffix("\n")
    ids = DIALECT.begin("system", prompt, [])
    while rest:
      reply = TOKENIZER.encode_batch([rest.pop(0)])[0].tolist()
      ids += reply
      said = []
      while rest and rest[0].startswith("# "):
        said.append(rest.pop(0).removeprefix("# ").removesuffix("\n"))
      if said:
        ids += DIALECT.extend(reply, ["\n".join(said)])
    whole = TOKENIZER.encode_batch([text])[0].tolist()
    assert ids == [TOKENIZER.end_id, *whole]


@pytest.mark.parametrize(
  ("text", "call"),
  [
    (
      'write_file(path="a.py", content="x = 1\\n")\n',
      ("write_file", {"path": "a.py", "content": "x = 1\n"}),
    ),
    ("finish()\n", ("finish", {})),
    ("read_file(first_line=3)\n", ("read_file", {"first_line": 3})),
    ("finish() and more\n", None),
    ('read_file("a.py")\n', None),
    ("read_file(**{})\n", None),
    ("a.read_file()\n", None),
    ('f(path=open("x"))\n', None),
    ("f(path={1, 2})\n", None),
    ('write_file(path="a\n', None),
    ("(" * 5000 + "\n", None),
    ("\n", None),
  ],
)
def test_a_reply_is_one_call_or_an_answer(text, call):
  reply = TOKENIZER.encode_batch([text])[0].tolist()
  said, calls = DIALECT.parse(reply)
  if call is None:
    assert calls == []
    assert said == text.partition("\n")[0]
  else:
    assert said == ""
    assert [(name, json.loads(args)) for name, args in calls] == [call]


def test_a_reply_that_was_cut_is_ended_before_the_next_line():
  reply = TOKENIZER.encode_batch(["finish("])[0].tolist()
  more = TOKENIZER.decode(DIALECT.extend(reply, ["Error: too long"]))
  assert more == "\n# Error: too long\n"
  # Ids beyond the tokenizer's are a model's padding.
  unknown = [TOKENIZER.vocab_size + 1]
  assert TOKENIZER.decode(DIALECT.extend(unknown, ["no"])) == "\n# no\n"


def test_traces_are_a_source_of_training_data(tmp_path):
  for name in ("a.zip", "b.zip"):
    write_traces(tmp_path / name, itertools.islice(traces(3), 20))
  a, b = (tmp_path / name for name in ("a.zip", "b.zip"))
  assert a.read_bytes() == b.read_bytes()
  with zipfile.ZipFile(a) as archive:
    texts = [archive.read(name).decode() for name in archive.namelist()]
  assert texts == list(itertools.islice(traces(3), 20))
