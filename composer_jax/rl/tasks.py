"""The tasks that a run trains and is tested on, and how its policy is told."""

import collections
import hashlib
import itertools
from collections.abc import Sequence

from composer_jax.data import Tokenizer
from composer_jax.envs import tasks as task_lib
from composer_jax.envs.harness import Dialect
from composer_jax.envs.tasks import Task
from composer_jax.rl.config import RlConfig
from composer_jax.rl.drills import DrillDialect, drills
from composer_jax.rl.endpoints import Stops
from composer_jax.serving.chat import HermesFormat
from composer_jax.serving.dialect import ChatDialect


def load(config: RlConfig) -> tuple[dict[str, Task], dict[str, Task]]:
  """Tasks to train on, and held-out ones, by id; the same in every process.

  Those of a file are divided by `split`.

  Raises:
    ValueError: the file has too few tasks for both.
    FileNotFoundError: there is no such file.
  """
  if config.tasks == "drills":
    train, held_out = (
      list(itertools.islice(drills(config.seed, held_out=side), count))
      for side, count in (
        (False, config.train_tasks),
        (True, config.eval_tasks),
      )
    )
  else:
    found = task_lib.load(config.tasks)
    train, held_out = split(found, config.eval_tasks)
    if not (train and held_out):
      raise ValueError(
        f"{config.tasks} has {len(found)} tasks with"
        f" {len({t.prompt for t in found})} prompts, too few to hold out"
        f" eval_tasks={config.eval_tasks} of them: build more tasks, or set it"
        " lower."
      )
    train = train[: config.train_tasks]
  return {t.task_id: t for t in train}, {t.task_id: t for t in held_out}


def split(tasks: Sequence[Task], held_out: int) -> tuple[list, list]:
  """Divides tasks, both parts in an order by chance that is always the same.

  Tasks with the same prompt, faults in one function say, are on one side:
  who knows the answer to one knows those to the others.

  Args:
    tasks: all of them.
    held_out: how many to keep back, at most.

  Returns:
    Tasks to train on, and those kept back.
  """
  alike = collections.defaultdict(list)
  for task in tasks:
    alike[hashlib.sha256(task.prompt.encode()).digest()].append(task)
  kept, train = [], []
  for digest in sorted(alike):
    fits = len(kept) + len(alike[digest]) <= held_out
    (kept if fits else train).extend(alike[digest])
  return train, kept


def speech(config: RlConfig, tokenizer: Tokenizer) -> tuple[Dialect, Stops]:
  """The harness's dialect, and what ends a reply in it."""
  if config.dialect == "drill":
    dialect = DrillDialect(tokenizer)
    return dialect, dialect
  chat = HermesFormat(tokenizer)
  return ChatDialect(chat, tokenizer.spellings), chat
