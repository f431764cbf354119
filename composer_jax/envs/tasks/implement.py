"""Functions of real packages to be written again.

The body is taken out; signature, docstring and the rest of the package stay.
"""

from collections.abc import Iterator

from composer_jax.envs.tasks.examples import documented
from composer_jax.envs.tasks.types import Task


def generate(base: str) -> Iterator[Task]:
  """Candidates from an installed package, one a function.

  Args:
    base: its import name, such as "toolz".

  Raises:
    ModuleNotFoundError: there is no such package of Python files.
    ValueError: it is in the standard library.
  """
  for found in documented(base):
    function = found.function
    docstring, *body = function.body
    if not body or body[0].lineno == docstring.end_lineno:
      continue
    lines = found.source.splitlines(keepends=True)
    indent = " " * docstring.col_offset
    lines[docstring.end_lineno : function.end_lineno] = [
      f"{indent}raise NotImplementedError\n"
    ]
    yield found.task(
      "implement",
      f"The function {function.name} in {found.path} has no body. Write it, so"
      " that it does what its docstring says; change nothing else.",
      "".join(lines),
    )
