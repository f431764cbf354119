"""The tasks that a run trains and is tested on, and how its policy is told."""

import itertools

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

  Of a file, the last `eval_tasks` are held out.

  Raises:
    ValueError: the file has no task left to train on.
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
    if len(found) <= config.eval_tasks:
      raise ValueError(
        f"{config.tasks} has {len(found)} tasks, of which eval_tasks="
        f"{config.eval_tasks} are held out: none is left to train on."
      )
    held_out = found[-config.eval_tasks :]
    train = found[: -config.eval_tasks][: config.train_tasks]
  return {t.task_id: t for t in train}, {t.task_id: t for t in held_out}


def speech(config: RlConfig, tokenizer: Tokenizer) -> tuple[Dialect, Stops]:
  """The harness's dialect, and what ends a reply in it."""
  if config.dialect == "drill":
    dialect = DrillDialect(tokenizer)
    return dialect, dialect
  chat = HermesFormat(tokenizer)
  return ChatDialect(chat, tokenizer.spellings), chat
