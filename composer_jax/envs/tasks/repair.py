"""Faults in functions of real packages, found by their own doctests.

A function with doctests gets one fault. Its last examples are taken out of the
docstring and, with variations of all examples (other numbers, other orders),
become the hidden test; what they must give is what the original gives. Faults
that no hidden line notices are dropped when the task is validated.
"""

import ast
import doctest
import hashlib
import random
import sys
from collections.abc import Iterator

from composer_jax.envs.tasks.mutate import Function, mutants, replace
from composer_jax.envs.tasks.types import (
  Probe,
  Task,
  digest,
  source_files,
  source_tree,
)

_MAX_VARIATIONS = 24
_TEST = """\
import doctest, importlib, sys
module = importlib.import_module({module!r})
runner = doctest.DocTestRunner()
for test in doctest.DocTestFinder().find(
    getattr(module, {name!r}), {name!r}, module, dict(vars(module))):
  runner.run(test)
sys.exit(bool(runner.summarize().failed))
"""


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
  if base in sys.stdlib_module_names:
    raise ValueError(
      f"{base} is in the standard library, which every sandbox can read: its"
      " faults could be repaired by copying."
    )
  for path, source in source_files(base).items():
    module = path.removesuffix(".py").replace("/", ".")
    yield from _of_module(
      base,
      module.removesuffix(".__init__"),
      path,
      source,
      seed,
      mutants_per_function,
    )


def _of_module(base, module, path, source, seed, most) -> Iterator[Task]:
  for function in ast.parse(source).body:
    if not isinstance(function, Function):
      continue
    split = _hold_out(source, function)
    if split is None:
      continue
    shown, hidden_lines = split
    # The same function in the text whose docstring was shortened.
    shown_function = next(
      node
      for node in ast.parse(shown).body
      if isinstance(node, Function)
      and (node.name, node.lineno) == (function.name, function.lineno)
    )
    rng = random.Random(f"{seed} {module} {function.name}")
    faulty = sorted(set(mutants(shown, shown_function)))
    for text in rng.sample(faulty, min(most, len(faulty))):
      if _compiles(text):
        yield _task(
          base, module, path, function.name, shown, text, hidden_lines
        )


def _hold_out(
  source: str, function: Function
) -> tuple[str, tuple[str, ...]] | None:
  """The file without the last examples, and the lines of the hidden test."""
  docstring = ast.get_docstring(function, clean=False)
  if not docstring:
    return None
  node = function.body[0].value
  segment = ast.get_source_segment(source, node)
  try:
    examples = doctest.DocTestParser().get_examples(docstring)
  except ValueError:
    return None
  examples = [e for e in examples if not e.options]
  if len(examples) < 2 or not segment or docstring not in segment:
    return None  # With escapes, lines of docstring and file differ.
  held = examples[-(len(examples) // 2) :]
  lines = docstring.splitlines(keepends=True)
  for example in reversed(held):
    height = example.source.count("\n") + example.want.count("\n")
    del lines[example.lineno : example.lineno + height]
  # What closes the string may have followed the last example's line.
  shorter = "".join(lines)
  if docstring.rstrip(" ")[-1:] != "\n" or shorter[-1:] not in ("\n", " "):
    return None
  shown = replace(source, node, segment.replace(docstring, shorter))
  sources = [e.source.strip() for e in examples]
  varied = [v for s in sources for v in _variations(s)]
  return shown, tuple(dict.fromkeys((*sources, *varied[:_MAX_VARIATIONS])))


def _variations(line: str) -> list[str]:
  """An example's expression with other literals."""
  try:
    tree = ast.parse(line, mode="eval")
  except SyntaxError:
    return []
  found = []
  for node in ast.walk(tree):
    others = []
    match node:
      case ast.Constant(value=bool()):
        pass
      case ast.Constant(value=int(value)) if abs(value) < 1000:
        others = [str(value + 1), str(-value)]
      case ast.Constant(value=str(value)) if value:
        others = [repr(value[::-1]), "''"]
      case ast.List(elts=[_, *_]) | ast.Tuple(elts=[_, _, *_]):
        kind = type(node)
        flipped = kind(elts=node.elts[::-1], ctx=ast.Load())
        others = [ast.unparse(flipped), "[]" if kind is ast.List else "()"]
    found += [replace(line, node, other) for other in others]
  return found


def _compiles(text: str) -> bool:
  try:
    compile(text, "<mutant>", "exec")
  except (SyntaxError, ValueError):
    return False
  return True


def _task(base, module, path, name, shown, faulty, lines) -> Task:
  content = hashlib.sha256(f"{path} {name} {faulty} {lines}".encode())
  return Task(
    task_id=f"repair-{module}.{name}-{content.hexdigest()[:12]}",
    kind="repair",
    prompt=(
      f"The function {name} in {path} has a fault: it doesn't do what its"
      " docstring says. Find and repair it; change nothing else."
    ),
    files={path: faulty},
    gold={path: shown},
    probe=Probe(module, lines),
    base=base,
    base_digest=digest(source_tree(base)),
    test_command=(
      "python",
      "-c",
      _TEST.format(module=module, name=name),
    ),
  )
