"""Functions of real packages whose doctests become hidden tests.

A function's last examples are taken out of its docstring and, with variations
of all examples (other numbers, other orders), become the hidden test. What they
must give is what the original gives, so it's recorded later, in a sandbox.
"""

import ast
import dataclasses
import doctest
import hashlib
import sys
from collections.abc import Iterator

from composer_jax.envs.tasks.mutate import Function, replace
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


@dataclasses.dataclass(frozen=True)
class Documented:
  """A function with examples.

  Attributes:
    base: import name of the package.
    module: that it is in.
    path: of the module's file in the repository.
    source: of that file, without the examples that are held out.
    function: the function in `ast.parse(source)`.
    lines: of the hidden test.
  """

  base: str
  module: str
  path: str
  source: str
  function: Function
  lines: tuple[str, ...]

  def task(self, kind: str, prompt: str, broken: str) -> Task:
    """A task whose repository has `broken` in the place of the file."""
    name = self.function.name
    content = f"{self.path} {name} {broken} {self.lines}".encode()
    short = hashlib.sha256(content).hexdigest()[:12]
    return Task(
      task_id=f"{kind}-{self.module}.{name}-{short}",
      kind=kind,
      prompt=prompt,
      files={self.path: broken},
      gold={self.path: self.source},
      probe=Probe(self.module, self.lines),
      base=self.base,
      base_digest=digest(source_tree(self.base)),
      test_command=(
        "python",
        "-c",
        _TEST.format(module=self.module, name=name),
      ),
    )


def documented(base: str) -> Iterator[Documented]:
  """The functions of an installed package that have examples enough.

  Args:
    base: its import name, such as "toolz".

  Raises:
    ModuleNotFoundError: there is no such package of Python files.
    ValueError: it is in the standard library.
  """
  if base in sys.stdlib_module_names:
    raise ValueError(
      f"{base} is in the standard library, which every sandbox can read: its"
      " tasks could be solved by copying."
    )
  for path, source in source_files(base).items():
    module = path.removesuffix(".py").replace("/", ".")
    module = module.removesuffix(".__init__")
    for function in ast.parse(source).body:
      split = None
      if isinstance(function, Function):
        split = hold_out(source, function)
      if split is None:
        continue
      shown, lines = split
      # The same function in the text whose docstring was shortened.
      (same,) = (
        node
        for node in ast.parse(shown).body
        if isinstance(node, Function) and node.lineno == function.lineno
      )
      yield Documented(base, module, path, shown, same, lines)


def hold_out(
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
  varied = [v for s in sources for v in variations(s)]
  return shown, tuple(dict.fromkeys((*sources, *varied[:_MAX_VARIATIONS])))


def variations(line: str) -> list[str]:
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
