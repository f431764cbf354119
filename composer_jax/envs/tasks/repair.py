"""Faults in functions of real packages: find and repair them.

Faults that no line of the hidden test notices are dropped when the task is
validated.
"""

import ast
import random
from collections.abc import Iterator, Sequence

from composer_jax.envs.tasks.examples import documented
from composer_jax.envs.tasks.mutate import Function, faults, mutant
from composer_jax.envs.tasks.sources import Source
from composer_jax.envs.tasks.types import Task


def generate(
  source: Source, seed: int = 0, per_function: int = 2
) -> Iterator[Task]:
  """Candidates whose hidden tests are doctests.

  Args:
    source: of the functions.
    seed: chooses the faults.
    per_function: at most so many tasks of one function.
  """
  for found in documented(source):
    for text in some(found.source, found.function, seed, per_function):
      yield found.task(
        "repair", prompt(found.name, found.path, found.function), text
      )


def prompt(name: str, path: str, function: Function) -> str:
  """What a policy is told."""
  if ast.get_docstring(function):
    wrong = "it doesn't do what its docstring says"
  else:
    wrong = "tests that you don't have fail"
  return (
    f"The function {name} in {path} has a fault: {wrong}. Find and repair it;"
    " change nothing else."
  )


def some(
  source: str, function: Function, seed: int, most: int
) -> Sequence[str]:
  """Mutants of a file, chosen by chance, `most` or fewer.

  Args:
    source: of the file.
    function: in `ast.parse(source)` that gets the fault.
    seed: chooses.
    most: of them.
  """
  rng = random.Random(f"{seed} {function.name} {function.lineno}")
  found: dict[str, None] = {}
  possible = faults(source, function)
  for fault in rng.sample(possible, len(possible)):
    if len(found) == most:
      break
    text = mutant(source, function, fault)
    if text is not None:
      found[text] = None
  return list(found)
