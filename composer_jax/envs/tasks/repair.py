"""Faults in functions of real packages: find and repair them.

Faults that no line of the hidden test notices are dropped when the task is
validated.
"""

import random
from collections.abc import Iterator

from composer_jax.envs.tasks.examples import documented
from composer_jax.envs.tasks.mutate import mutants
from composer_jax.envs.tasks.types import Task


def generate(
  base: str, seed: int = 0, mutants_per_function: int = 2
) -> Iterator[Task]:
  """Candidates from an installed package.

  Args:
    base: its import name, such as "toolz".
    seed: chooses the faults.
    mutants_per_function: at most so many tasks of one function.

  Raises:
    ModuleNotFoundError: there is no such package of Python files.
    ValueError: it is in the standard library.
  """
  for found in documented(base):
    name = found.function.name
    rng = random.Random(f"{seed} {found.module} {name}")
    faulty = sorted(set(mutants(found.source, found.function)))
    faulty = [text for text in faulty if _compiles(text)]
    for text in rng.sample(faulty, min(mutants_per_function, len(faulty))):
      yield found.task(
        "repair",
        f"The function {name} in {found.path} has a fault: it doesn't do what"
        " its docstring says. Find and repair it; change nothing else.",
        text,
      )


def _compiles(text: str) -> bool:
  try:
    compile(text, "<mutant>", "exec")
  except (SyntaxError, ValueError):
    return False
  return True
