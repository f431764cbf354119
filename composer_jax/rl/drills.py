r"""What a model of two million parameters needs before it can learn by doing.

Drills (`composer_jax.envs.tasks.micro`) with their answers; a terse dialect,
since the product's own prompt has a thousand tokens; and traces in it, for
mid-training: of an agent that mostly doesn't bother to work. So reinforcement
learning begins with a policy that knows the tools and seldom solves anything.
Harness, tools, sandboxes and hidden tests are the product's.

    # Task: house.py: LIMIT must be 7. Repair it.
    write_file(path="house.py", content="LIMIT = 7\n")
    # Wrote house.py.
    finish()

A reply is one line, a call in Python; what isn't one is an answer, and ends the
work. What tools say comes as comments.
"""

import ast
import dataclasses
import hashlib
import itertools
import json
import random
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from composer_jax.data import Tokenizer
from composer_jax.envs.tasks import Task, micro
from composer_jax.serving.text import TextReader

# Of what the traces' agent does. Where it errs, half of the call is right, so
# that how to do things right can be learnt from most of what it writes.
_GOLD_SHARE = 0.24
_IDLE_SHARE = 0.62
_HELD_OUT_SHARE = 0.4
# Few enough that all kinds are still in turn; there are but 56 files to write.
_IN_TURN = 100
_OPERATORS = ("+", "-", "*", "//", "%")


def drills(seed: int, *, held_out: bool) -> Iterator[Task]:
  """Drills with their answers, without end; the same for the same seed.

  The answers need no sandbox: what runs is our own text.

  Args:
    seed: of the choice.
    held_out: whether those whose prompts no trace and no other drill has.
  """
  for task in micro.generate(seed):
    if _is_held_out(task) != held_out:
      continue
    answers = _answers(task, task.files | task.gold)
    if answers != _answers(task, task.files):
      probe = dataclasses.replace(task.probe, answers=answers)
      yield dataclasses.replace(task, probe=probe)


def _is_held_out(task: Task) -> bool:
  """By the prompt: drills that differ in what is to be repaired share it."""
  digest = hashlib.sha256(task.prompt.encode()).digest()
  return digest[0] < 256 * _HELD_OUT_SHARE


def _answers(task: Task, files: dict[str, str]) -> tuple[str, ...]:
  """What the hidden test's lines give, as `envs.tasks.verify` writes it."""
  module, names = task.probe.module, {}
  if module:
    exec(files[f"{module}.py"], names)
    return tuple(f"= {eval(line, names)!r}" for line in task.probe.lines)
  # Otherwise it reads a file, which may not be there.
  (path,) = task.gold
  return (f"= {files[path].strip()!r}" if path in files else "!",)


class DrillDialect:
  """A `composer_jax.envs.harness.Dialect`, and the chat that endpoints need.

  Attributes:
    stop: strings that end a reply.
    stop_ids: tokens that do.
  """

  def __init__(self, tokenizer: Tokenizer):
    """Takes the tokenizer of a model that was trained on `traces`."""
    self.stop = ("\n",)
    self.stop_ids = (tokenizer.end_id,)
    self._tokenizer = tokenizer

  def begin(
    self, system: str, prompt: str, tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """See `Dialect`; says nothing of system and tools, which don't change."""
    del system, tools
    return [self._tokenizer.end_id, *self._encode(f"# Task: {prompt}\n")]

  def extend(self, reply: Sequence[int], results: Sequence[str]) -> list[int]:
    """See `Dialect`."""
    # A model may have ids that no token has.
    spelt = self._tokenizer.spellings[reply[-1] : reply[-1] + 1]
    end = "" if spelt and spelt[0].endswith(b"\n") else "\n"
    return self._encode(end + "".join(map(_comment, results)))

  def parse(self, reply: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """See `Dialect`."""
    reader = TextReader(self._tokenizer.spellings, self.stop, self.stop_ids)
    text = "".join(map(reader.push, reply)) + reader.finish()
    call = _parse(text)
    return ("", [call]) if call else (text, [])

  def _encode(self, text):
    return self._tokenizer.encode_batch([text])[0].tolist()


def _comment(text: str) -> str:
  return "".join(f"# {line}\n" for line in text.splitlines() or [""])


def _parse(text: str) -> tuple[str, str] | None:
  """A call's name, and its arguments as JSON."""
  try:
    call = ast.parse(text, mode="eval").body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
      given = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
      if not call.args and None not in given:
        return call.func.id, json.dumps(given)
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
    pass
  return None


def traces(seed: int) -> Iterator[str]:
  """Texts for mid-training, without end; the same for the same seed.

  Each ends with its number, which no rollout comes to see: equal ones would be
  dropped as duplicates, and with them what the agent does most of the time.
  """
  rng, number = random.Random(seed), itertools.count()
  makers, shares = (_gold, _idle, _astray), (_GOLD_SHARE, _IDLE_SHARE)
  shares = (*shares, 1 - sum(shares))
  while True:
    candidates = micro.generate(rng.randrange(2**32))
    for task in itertools.islice(candidates, _IN_TURN):
      if not _is_held_out(task):
        (make,) = rng.choices(makers, shares)
        lines = (f"# Task: {task.prompt}\n", *make(task, rng))
        yield "".join(lines) + f"# {next(number)}\n"


def write_traces(path: str | Path, texts: Iterable[str]) -> None:
  """Writes traces as a source for `DataConfig.sources`: a .zip of .py files.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for number, text in enumerate(texts):
      # A fixed time, so that the same traces are the same file.
      archive.writestr(zipfile.ZipInfo(f"{number:06d}.py"), text)


def _gold(task: Task, rng: random.Random) -> list[str]:
  del rng
  (path, content), *_ = task.gold.items()
  source = re.search(r"the number that is in (\S+) into", task.prompt)
  lines = []
  if source:
    lines += _call("read_file", task.files[source[1]], path=source[1])
  lines += _call("write_file", f"Wrote {path}.", path=path, content=content)
  return [*lines, "finish()\n"]


def _astray(task: Task, rng: random.Random) -> list[str]:
  """The right kind of call, and the wrong thing in it."""
  (path, content), *_ = task.gold.items()
  if rng.random() < 0.3:
    path = path.replace(path.partition(".")[0], rng.choice(micro._WORDS))
  elif " = " in content:
    content = f"LIMIT = {rng.randrange(10)}\n"
  elif "return" in content:
    operator = rng.choice(_OPERATORS)
    content = re.sub(r"a \S+ b\n", f"a {operator} b\n", content)
  elif content.isdigit():
    content = str(rng.randrange(10))
  else:
    content = rng.choice(micro._WORDS)
  lines = _call("write_file", f"Wrote {path}.", path=path, content=content)
  return [*lines, "finish()\n"]


def _idle(task: Task, rng: random.Random) -> list[str]:
  """Nothing but a look around."""
  if rng.random() < 0.5:
    return ["finish()\n"]
  listed = "\n".join(sorted(task.files))
  return [*_call("list_files", listed), "finish()\n"]


def _call(name: str, result: str, **arguments: str) -> list[str]:
  given = ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items())
  return [f"{name}({given})\n", _comment(result)]
