"""Functions of real packages to be written again.

The body is taken out; signature, docstring and the rest of the package stay.
"""

import ast
from collections.abc import Iterator

from composer_jax.envs.tasks.examples import documented
from composer_jax.envs.tasks.mutate import Function
from composer_jax.envs.tasks.sources import Source
from composer_jax.envs.tasks.types import Task


def generate(source: Source) -> Iterator[Task]:
  """Candidates whose hidden tests are doctests, one a function.

  Args:
    source: of the functions.
  """
  for found in documented(source):
    text = emptied(found.source, found.function)
    if text is not None:
      yield found.task("implement", prompt(found.name, found.path), text)


def prompt(name: str, path: str) -> str:
  """What a policy is told."""
  return (
    f"The function {name} in {path} has no body. Write it, so that it does what"
    " its docstring says; change nothing else."
  )


def emptied(source: str, function: Function) -> str | None:
  """A file without a function's body.

  None if there is none, or no docstring that says what to write.

  Args:
    source: of the file.
    function: in `ast.parse(source)`.
  """
  if not ast.get_docstring(function):
    return None
  docstring, *body = function.body
  if not body or body[0].lineno == docstring.end_lineno:
    return None
  lines = source.splitlines(keepends=True)
  indent = " " * docstring.col_offset
  lines[docstring.end_lineno : function.end_lineno] = [
    f"{indent}raise NotImplementedError\n"
  ]
  return "".join(lines)
