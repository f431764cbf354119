"""Texts for mid-training: what an agent does that knows the answers.

    python -m composer_jax.rl.demonstrations --tasks=tasks.jsonl.xz \
        --held_out=100 --out=demonstrations.zip

Reinforcement learning improves what a policy sometimes does already. A model
that was never told of tools does nothing of use, so before it come texts of
tasks that were worked on, in the drills' dialect: through harness, tools and
sandbox, so that they are what rollouts will read. Tasks that will be held out
(`composer_jax.rl.tasks.split`) are not in them. The .zip is a source for
`DataConfig.sources`.
"""

import argparse
import ast
import asyncio
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator

import numpy as np

from composer_jax.data import Tokenizer
from composer_jax.envs import harness, tasks
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.sandbox import Limits, Provider
from composer_jax.envs.tasks import Images, Task
from composer_jax.envs.tasks.scripted import Said
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.drills import DrillDialect, write_traces
from composer_jax.rl.tasks import split

# Lines that the agent reads at a time.
_WINDOW = 60
_NAMED = re.compile(r"[Tt]he function (\S+) in (\S+)")
_BUDGET = harness.Budget(tokens=1 << 20, turn_tokens=1 << 16)


def calls(task: Task) -> Iterator[str]:
  """Lines of an agent that looks for what is to be changed, and changes it.

  Files that are not there are written. Others are read from where the function
  begins that the prompt names, since an agent can't know where the fault is,
  and what differs is replaced.
  """
  found = _NAMED.search(task.prompt)
  begins = f"def {found[1].rpartition('.')[2]}(" if found else ""
  if found:
    pattern, path = f"{begins[:-1]}\\(", found[2].rstrip(",.:")
    yield _call("search", pattern=pattern, path=path)
  for path, new in task.gold.items():
    old = task.files.get(path)
    if old is None:
      yield _call("write_file", path=path, content=new)
      continue
    edits = list(_edits(old, new))
    for first, last in _windows(old.splitlines(), begins, edits):
      yield _call("read_file", path=path, first_line=first, last_line=last)
    for _, before, after in edits:
      yield _call("edit_file", path=path, old=before, new=after)
  yield _call("finish")


def _edits(old: str, new: str) -> Iterator[tuple[int, str, str]]:
  """Where (a line, from 0), a text that the file has once, what it becomes."""
  a, b = (text.splitlines(keepends=True) for text in (old, new))
  matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
  for tag, i, j, k, m in matcher.get_opcodes():
    if tag == "equal":
      continue
    place = i
    # An edit needs something that is there, and there once.
    while i == j or old.count("".join(a[i:j])) != 1:
      up, down = min(i, k) > 0, j < len(a) and m < len(b)
      if not (up or down):
        break
      i, k = (i - 1, k - 1) if up else (i, k)
      j, m = (j + 1, m + 1) if down else (j, m)
    yield place, "".join(a[i:j]), "".join(b[k:m])


def _windows(
  lines: list[str], begins: str, edits: list[tuple[int, str, str]]
) -> Iterator[tuple[int, int]]:
  """First and last lines of a file, from 1, until all edits were in sight."""
  shown = 0
  for place, *_ in edits:
    if place < shown:
      continue
    starts = (n for n in range(place, shown - 1, -1) if begins in lines[n])
    first = next(starts, shown) if begins else shown
    while first <= place:
      shown = min(first + _WINDOW, len(lines))
      yield first + 1, shown
      first = shown


def _call(name: str, **arguments: str | int) -> str:
  given = ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items())
  line = f"{name}({given})"
  ast.parse(line)
  return f"{line}\n"


async def demonstrate(provider: Provider, task: Task) -> str:
  """A task, worked on.

  Args:
    provider: of sandboxes.
    task: whose gold state is what the agent comes to.

  Raises:
    SandboxError: the sandbox failed.
  """
  tokenizer = _bytes()
  lines = calls(task)

  async def sample(prompt, max_tokens):
    ids = tokenizer.encode_batch([next(lines)])[0].astype(np.int32)
    return Said(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), int))

  async with await start(provider, task) as sandbox:
    transcript = await harness.run(
      sample,
      DrillDialect(tokenizer),
      sandbox,
      Toolbox(task.test_command),
      task.prompt,
      _BUDGET,
    )
  # Without the token that begins a document: the corpus has its own.
  return tokenizer.decode(transcript.token_ids[1:])


@functools.cache
def _bytes() -> Tokenizer:
  """Any would do: the dialect's text is what counts."""
  return Tokenizer.train([""], 261)


async def demonstrations(
  provider: Provider, tasks: Iterable[Task], lanes: int = 2
) -> list[str]:
  """Many of them, in order.

  Args:
    provider: of sandboxes; an `Images` if tasks need more than the plain one.
    tasks: to be worked on.
    lanes: sandboxes at a time.
  """
  gate = asyncio.Semaphore(lanes)

  async def one(task):
    async with gate:
      return await demonstrate(provider, task)

  return await asyncio.gather(*map(one, tasks))


def main() -> None:
  """Writes the .zip."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tasks", required=True, help="by launch/tasks.py")
  parser.add_argument("--held_out", type=int, default=100, help="not to show")
  parser.add_argument("--out", default="demonstrations.zip")
  args = parser.parse_args()
  train, _ = split(tasks.load(args.tasks), args.held_out)
  provider = Images(
    lambda image: Bubblewrap(Limits(), image.distributions, image.without)
  )
  texts = asyncio.run(demonstrations(provider, train))
  write_traces(args.out, texts)
  print(f"{len(texts)} demonstrations in {args.out}")


if __name__ == "__main__":
  main()
