"""Puts one fault into a function, and leaves the rest of the text as it is."""

import ast
import copy
from collections.abc import Iterator

_COMPARE = {
  ast.Lt: ast.LtE,
  ast.LtE: ast.Lt,
  ast.Gt: ast.GtE,
  ast.GtE: ast.Gt,
  ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq,
  ast.Is: ast.IsNot,
  ast.IsNot: ast.Is,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
}
_BINARY = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Add,
  ast.FloorDiv: ast.Mod,
  ast.Mod: ast.FloorDiv,
  ast.BitAnd: ast.BitOr,
  ast.BitOr: ast.BitAnd,
}
_BOOL = {ast.And: ast.Or, ast.Or: ast.And}

Function = ast.FunctionDef


def mutants(source: str, function: Function) -> Iterator[str]:
  """All texts of a file with one fault in one function.

  Operators are exchanged for their neighbours, integers are one off, truth
  values and conditions are turned around, arguments change places.

  Args:
    source: of the file.
    function: of `ast.parse(source)`.
  """
  body = function.body[1:] if ast.get_docstring(function) else function.body
  for statement in body:
    for node in ast.walk(statement):
      for faulty in _faults(node):
        yield replace(source, node, f"({ast.unparse(faulty)})")


def replace(source: str, node: ast.expr, text: str) -> str:
  """The source with another text in the place of a node."""
  raw = source.encode()
  starts = [0]
  for line in raw.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  begin = starts[node.lineno - 1] + node.col_offset
  end = starts[node.end_lineno - 1] + node.end_col_offset
  if isinstance(node, ast.Constant):
    text = text.strip("()")
  return (raw[:begin] + text.encode() + raw[end:]).decode()


def _faults(node: ast.AST) -> Iterator[ast.expr]:
  def changed(**fields):
    other = copy.copy(node)
    for name, value in fields.items():
      setattr(other, name, value)
    return other

  match node:
    case ast.Compare(ops=[op]) if type(op) in _COMPARE:
      yield changed(ops=[_COMPARE[type(op)]()])
    case ast.BinOp(op=op) if type(op) in _BINARY:
      yield changed(op=_BINARY[type(op)]())
    case ast.BoolOp(op=op):
      yield changed(op=_BOOL[type(op)]())
    case ast.UnaryOp(op=ast.Not(), operand=operand):
      yield operand
    case ast.IfExp(body=body, orelse=orelse):
      yield changed(body=orelse, orelse=body)
    case ast.Constant(value=bool(value)):
      yield ast.Constant(not value)
    case ast.Constant(value=int(value)):
      yield ast.Constant(value + 1)
    case ast.Call(args=[first, second, *rest], keywords=[]) if not any(
      isinstance(a, ast.Starred) for a in node.args
    ):
      yield changed(args=[second, first, *rest])
