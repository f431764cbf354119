"""Functions of real packages whose doctests become hidden tests.

A function's last examples are taken out of its docstring and, with variations
of all examples (other numbers, other orders), become the hidden test. What they
must give is what the original gives, so it's recorded later, in a sandbox.
"""

import ast
import dataclasses
import doctest
import hashlib
from collections.abc import Iterator

from composer_jax.envs.tasks.mutate import Function, Text
from composer_jax.envs.tasks.sources import Source
from composer_jax.envs.tasks.types import Probe, Task

_MAX_VARIATIONS = 24
_TEST = """\
import doctest, functools, importlib, sys
sys.path.insert(0, {root!r})
module = importlib.import_module({module!r})
found = functools.reduce(getattr, {name!r}.split("."), module)
runner = doctest.DocTestRunner()
for test in doctest.DocTestFinder().find(
    found, {name!r}, module, dict(vars(module))):
  runner.run(test)
sys.exit(bool(runner.summarize().failed))
"""


@dataclasses.dataclass(frozen=True)
class Documented:
  """A function or method with examples.

  Attributes:
    repository: that it is in.
    tree: of that, by digest.
    module: import name of the module.
    path: of the module's file in the repository.
    source: of that file, without the examples that are held out.
    name: with the class, if there is one.
    function: the function in `ast.parse(source)`.
    lines: of the hidden test.
  """

  repository: Source
  tree: str
  module: str
  path: str
  source: str
  name: str
  function: Function
  lines: tuple[str, ...]

  def task(self, kind: str, prompt: str, broken: str) -> Task:
    """A task whose repository has `broken` in the place of the file."""
    root, image = self.repository.root, self.repository.image
    content = f"{self.path} {self.name} {broken} {self.lines}".encode()
    short = hashlib.sha256(content).hexdigest()[:12]
    test = _TEST.format(root=root or ".", module=self.module, name=self.name)
    return Task(
      task_id=f"{kind}-{self.module}.{self.name}-{short}",
      kind=kind,
      prompt=prompt,
      files={self.path: broken},
      gold={self.path: self.source},
      probe=Probe(self.module, self.lines, (), root, image),
      tree=self.tree,
      image=image,
      test_command=("python", "-c", test),
    )


def documented(repository: Source) -> Iterator[Documented]:
  """The functions and methods of a source that have examples enough."""
  tree = repository.keep()
  for path, (module, source) in repository.modules.items():
    for name, function in functions(source):
      split = hold_out(source, function)
      if split is None:
        continue
      shown, lines = split
      # The same function in the text whose docstring was shortened.
      (same,) = (
        node
        for other, node in functions(shown)
        if (other, node.lineno) == (name, function.lineno)
      )
      yield Documented(repository, tree, module, path, shown, name, same, lines)


def functions(source: str) -> list[tuple[str, Function]]:
  """Functions of a file, and methods of its classes, by dotted name."""
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError):
    return []
  found = []
  for node in tree.body:
    if isinstance(node, Function):
      found.append((node.name, node))
    elif isinstance(node, ast.ClassDef):
      found += [
        (f"{node.name}.{child.name}", child)
        for child in node.body
        if isinstance(child, Function)
      ]
  return found


def hold_out(
  source: str, function: Function
) -> tuple[str, tuple[str, ...]] | None:
  """The file without the last examples, and the lines of the hidden test."""
  docstring = ast.get_docstring(function, clean=False)
  if not docstring:
    return None
  node = function.body[0].value
  text = Text(source)
  segment = text.of(node)
  try:
    examples = doctest.DocTestParser().get_examples(docstring)
  except ValueError:
    return None
  examples = [e for e in examples if not e.options]
  if len(examples) < 2 or docstring not in segment:
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
  shown = text.replaced(*text.span(node), segment.replace(docstring, shorter))
  sources = [e.source.strip() for e in examples]
  varied = [v for s in sources for v in variations(s)]
  return shown, tuple(dict.fromkeys((*sources, *varied[:_MAX_VARIATIONS])))


def variations(line: str) -> list[str]:
  """An example's expression with other literals."""
  try:
    tree = ast.parse(line, mode="eval")
  except SyntaxError:
    return []
  text, found = Text(line), []
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
    found += [text.replaced(*text.span(node), other) for other in others]
  return found
