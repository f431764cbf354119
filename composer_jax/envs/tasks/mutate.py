"""Puts one fault into a function, and leaves the rest of the text as it is.

The operators are those of mutation testing since Mothra (King and Offutt 1991,
https://doi.org/10.1002/spe.4380210704), as cosmic-ray and mutmut have them for
Python: other operators, constants, conditions and arguments, and statements
that are gone.
"""

import ast
import dataclasses
from collections.abc import Iterator

_COMPARE = {
  "<": ("<=", ">"),
  "<=": ("<", ">="),
  ">": (">=", "<"),
  ">=": (">", "<="),
  "==": ("!=",),
  "!=": ("==",),
  "is": ("is not",),
  "is not": ("is",),
  "in": ("not in",),
  "not in": ("in",),
}
_BINARY = {
  "+": ("-",),
  "-": ("+",),
  "*": ("+", "/"),
  "/": ("*", "//"),
  "//": ("%", "/"),
  "%": ("//",),
  "**": ("*",),
  "&": ("|",),
  "|": ("&",),
  "^": ("|",),
  "<<": (">>",),
  ">>": ("<<",),
}
_BOOL = {"and": "or", "or": "and"}
_NAMES = {
  "all": "any",
  "append": "extend",
  "endswith": "startswith",
  "extend": "append",
  "find": "rfind",
  "index": "count",
  "keys": "values",
  "lower": "upper",
  "lstrip": "rstrip",
  "max": "min",
  "rfind": "find",
  "rstrip": "lstrip",
  "split": "rsplit",
  "sorted": "list",
  "startswith": "endswith",
  "upper": "lower",
  "values": "keys",
}
_NAMES |= {new: old for old, new in _NAMES.items() if new in ("any", "min")}

Function = ast.FunctionDef
Located = ast.expr | ast.stmt | ast.keyword


@dataclasses.dataclass(frozen=True)
class Fault:
  """A text to put in the place of a part of a file.

  Attributes:
    begin: of the part, in bytes.
    end: of it.
    text: to put there.
    statement: whether it stands alone, and never needs parentheses.
  """

  begin: int
  end: int
  text: str
  statement: bool = False


class Text:
  """A file's text, and where nodes of its tree are in it."""

  def __init__(self, source: str):
    """Takes the text that the tree was parsed from."""
    self.raw = source.encode()
    self._starts = [0]
    for line in self.raw.splitlines(keepends=True):
      self._starts.append(self._starts[-1] + len(line))

  def span(self, node: Located) -> tuple[int, int]:
    """Where a node begins and ends, in bytes."""
    return (
      self._starts[node.lineno - 1] + node.col_offset,
      self._starts[node.end_lineno - 1] + node.end_col_offset,
    )

  def part(self, begin: int, end: int) -> str:
    """What lies between two places."""
    return self.raw[begin:end].decode()

  def of(self, node: Located) -> str:
    """A node's text."""
    return self.part(*self.span(node))

  def replaced(self, begin: int, end: int, text: str) -> str:
    """The whole text with another part."""
    return (self.raw[:begin] + text.encode() + self.raw[end:]).decode()


def faults(source: str, function: Function) -> list[Fault]:
  """All faults that the operators put into a function.

  Args:
    source: of the file.
    function: of `ast.parse(source)`.
  """
  text = Text(source)
  body = function.body[1:] if ast.get_docstring(function) else function.body
  found: dict[Fault, None] = {}
  for statement in body:
    for node in _nodes(statement):
      for changed in _expressions(text, node):
        found[Fault(*text.span(node), changed)] = None
      for changed in _statements(text, node, only=[node] == body):
        found[Fault(*text.span(node), changed, statement=True)] = None
      for test in _conditions(node):
        loose = isinstance(test, ast.BoolOp | ast.IfExp | ast.NamedExpr)
        changed = f"not ({text.of(test)})" if loose else f"not {text.of(test)}"
        found[Fault(*text.span(test), changed)] = None
  return list(found)


def mutant(source: str, function: Function, fault: Fault) -> str | None:
  """The file with a fault in it; None if that is no Python.

  Args:
    source: of the file.
    function: of `ast.parse(source)`, which has the fault.
    fault: of `faults(source, function)`.
  """
  text = Text(source)
  _, end = text.span(function)
  # Files are long and functions short, so only the function is parsed.
  begin = text.span(function)[0] - function.col_offset

  def whole(changed):
    return text.replaced(fault.begin, fault.end, changed)

  def tree(changed):
    parts = (text.part(begin, fault.begin), changed, text.part(fault.end, end))
    return _tree("".join(parts), function.col_offset)

  if fault.statement:
    return whole(fault.text) if tree(fault.text) else None
  # Parentheses would show where the fault is, so only where they are needed.
  inside = f"({fault.text})"
  meant = tree(inside)
  if meant is None or meant == tree(text.part(fault.begin, fault.end)):
    return None
  return whole(fault.text if tree(fault.text) == meant else inside)


def _tree(function: str, indent: int) -> str | None:
  source = f"class _:\n{function}" if indent else function
  try:
    tree = ast.parse(source)
    compile(tree, "<mutant>", "exec", dont_inherit=True)
  except (SyntaxError, ValueError):
    return None
  return ast.dump(tree)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
  """What can have a fault: no annotations, no text around `{}` in f-strings."""
  yield node
  for name, field in ast.iter_fields(node):
    if name in ("annotation", "returns", "format_spec"):
      continue
    for child in field if isinstance(field, list) else [field]:
      text = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
      if isinstance(child, ast.AST) and not text:
        yield from _nodes(child)


def _expressions(text: Text, node: ast.AST) -> Iterator[str]:
  """Texts of expressions that are nearly the one given."""
  match node:
    case ast.Compare(left=left, comparators=[right]):
      yield from _operators(text, node, left, right, _COMPARE)
    case ast.BinOp(left=left, right=right):
      yield from _operators(text, node, left, right, _BINARY)
    case ast.BoolOp(values=[left, right]):
      old = "and" if isinstance(node.op, ast.And) else "or"
      yield from _operators(text, node, left, right, {old: (_BOOL[old],)})
      yield text.of(left)
      yield text.of(right)
    case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
      yield text.of(operand)
    case ast.IfExp(test=test, body=body, orelse=orelse):
      yield f"{text.of(orelse)} if {text.of(test)} else {text.of(body)}"
    case ast.Constant(value=bool(value)):
      yield str(not value)
    case ast.Constant(value=int(value)):
      yield str(value + 1)
      yield str(value - 1)
    case ast.Constant(value=float(value)):
      yield repr(value + 1.0)
    case ast.Constant(value=str(value)):
      yield '""' if value else '" "'
    case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES:
      yield _NAMES[name]
    case ast.Attribute(attr=name, ctx=ast.Load()) if name in _NAMES:
      yield f"{text.of(node.value)}.{_NAMES[name]}"
    case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper)):
      if lower and not node.slice.step:
        yield f"{text.of(value)}[:{text.of(upper) if upper else ''}]"
      if upper and not node.slice.step:
        yield f"{text.of(value)}[{text.of(lower) if lower else ''}:]"
    case ast.Call(args=args, keywords=keywords):
      yield from _calls(text, node, args, keywords)


def _operators(text, node, left, right, known) -> Iterator[str]:
  """A node's text with another operator between its two operands."""
  (_, gap), (after, _) = text.span(left), text.span(right)
  between = text.part(gap, after)
  old = between.strip("() \t\\\n")
  old = " ".join(old.split())
  if old not in known or between.count(old) != 1:
    return  # There is a comment, say.
  head = text.part(text.span(node)[0], gap)
  tail = text.part(after, text.span(node)[1])
  for new in known[old]:
    yield head + between.replace(old, new) + tail


def _calls(text, node, args, keywords) -> Iterator[str]:
  begin, end = text.span(node)
  if any(isinstance(a, ast.Starred) for a in args):
    return
  spans = [text.span(a) for a in args]
  if len(args) >= 2:
    (a, b), (c, d) = spans[:2]
    yield (
      text.part(begin, a)
      + text.part(c, d)
      + text.part(b, c)
      + text.part(a, b)
      + text.part(d, end)
    )
    yield text.part(begin, spans[-2][1]) + text.part(spans[-1][1], end)
  for before, keyword in zip([None, *keywords], keywords, strict=False):
    previous = before or (args[-1] if args else None)
    if keyword.arg and previous:
      cut = text.span(previous)[1]
      yield text.part(begin, cut) + text.part(text.span(keyword)[1], end)
  if len(args) == 1 and not keywords:
    match node.func:
      case ast.Name(id="abs" | "int" | "list" | "reversed" | "set" | "sorted"):
        yield text.of(args[0])


def _statements(text: Text, node: ast.AST, only: bool) -> Iterator[str]:
  """Texts of statements that are nearly the one given.

  Args:
    text: of the file.
    node: maybe a statement.
    only: whether it is its function's only one.
  """
  match node:
    case ast.Break():
      yield "continue"
    case ast.Continue():
      yield "break"
      yield "pass"
    case ast.AugAssign(target=target, value=value):
      known = {f"{o}=": [f"{n}=" for n in ns] for o, ns in _BINARY.items()}
      yield from _operators(text, node, target, value, known)
      yield "pass"
    case ast.Return(value=ast.expr()) if not only:
      yield "return None"
    case ast.Expr(value=ast.Call()) | ast.Raise() if not only:
      yield "pass"


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
  """Conditions that are turned around; single comparisons are above."""
  match node:
    case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
      tests = [test]
    case ast.comprehension(ifs=tests):
      pass
    case _:
      tests = []
  for test in tests:
    if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
      yield test
