"""What changed between two versions: how densely, where, and what it weighs.

An array's place in a model is read off its path and shape; the rules, which
know of no model in particular, are with `classify`.
"""

import collections
import concurrent.futures
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
from jaxtyping import Bool, Shaped

from composer_jax.shipping.contents import ArraySpec, cut
from composer_jax.shipping.delta import encode
from composer_jax.shipping.layout import as_units
from composer_jax.shipping.source import Piece, Source

# A component that numbers a layer: "7", "layers_7", "h_7", "block7".
_NUMBER = re.compile(r"(?:(?:layers?|blocks?|h)_?)?(\d+)")
_STACK = re.compile(r"layers?|blocks?")
_EXPERTS = r"expert|moe\w*/[^/]+$"


@dataclasses.dataclass(frozen=True)
class Role:
  """What an array is in its model, as far as its path tells.

  Attributes:
    kind: its path with numbers replaced by `*`.
    layer: the path up to the layer's number, or up to the stack of layers.
    layer_axis: of a stack of layers; None if the path has the number.
    expert: the expert's number, if the path has one.
    expert_axis: the axis along which experts lie, if one does.
  """

  kind: str
  layer: str | None = None
  layer_axis: int | None = None
  expert: int | None = None
  expert_axis: int | None = None


@dataclasses.dataclass
class Count:
  """Elements whose bits changed, of all."""

  changed: int = 0
  elements: int = 0

  @property
  def density(self) -> float:
    """The share that changed."""
    return self.changed / self.elements if self.elements else 0.0


@dataclasses.dataclass
class Size:
  """Bytes of the delta, of the array, and of the array written by itself."""

  delta: int = 0
  full: int = 0

  @property
  def ratio(self) -> float:
    """How many times smaller the delta is than the array."""
    return self.full / self.delta if self.delta else float("inf")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What `compare` found.

  Attributes:
    cells: (kind, layer, expert) -> elements; None where there is none.
    sizes: kind -> bytes.
    unmatched: path -> why it can't be compared; sent whole.
  """

  cells: Mapping[tuple[str, str | None, int | None], Count]
  sizes: Mapping[str, Size]
  unmatched: Mapping[str, str]

  def by(self, what: Literal["kind", "layer", "expert"]) -> dict:
    """Elements by kind, layer or expert, in order of appearance.

    Arrays that belong to no layer or expert are left out of those.
    """
    place = ("kind", "layer", "expert").index(what)
    counts: dict = {}
    for key, cell in self.cells.items():
      if key[place] is not None:
        count = counts.setdefault(key[place], Count())
        count.changed += cell.changed
        count.elements += cell.elements
    return counts

  @property
  def total(self) -> tuple[Count, Size]:
    """Of everything."""
    count, size = Count(), Size()
    for cell in self.cells.values():
      count.changed += cell.changed
      count.elements += cell.elements
    for part in self.sizes.values():
      size.delta += part.delta
      size.full += part.full
    return count, size


def classify(
  arrays: Mapping[str, ArraySpec],
  *,
  expert_paths: str = _EXPERTS,
  num_experts: int | None = None,
) -> dict[str, Role]:
  """Tells layers and experts by paths and shapes.

  Layer: the first component that is a number, alone or after "layers", "block"
  or "h", and doesn't follow "experts"; else, below a component "layers" or
  "blocks", the leading axis (scanned layers). Expert: the number after a
  component with "expert" in it; else, of an array whose path `expert_paths`
  matches, the first axis that isn't the layers', if its size is the number of
  experts and two more axes follow.

  Args:
    arrays: path -> shape and dtype.
    expert_paths: a regular expression, searched for regardless of case.
    num_experts: by default the last axis of the arrays with "router" in the
      path, else the commonest first axis where `expert_paths` matches.

  Returns:
    Path -> role.

  Raises:
    ValueError: if `expert_paths` is no regular expression.
  """
  roles = {path: _role(path, spec) for path, spec in arrays.items()}
  try:
    pattern = re.compile(expert_paths, re.IGNORECASE)
  except re.error as error:
    raise ValueError(f"{expert_paths!r} is no pattern: {error}") from None
  first_axes = {
    path: 0 if role.layer_axis is None else 1
    for path, role in roles.items()
    if role.expert is None and pattern.search(path)
  }
  stacks = {
    path: axis
    for path, axis in first_axes.items()
    if len(arrays[path].shape) >= axis + 3
  }
  if num_experts is None:
    sizes = collections.Counter(
      spec.shape[-1]
      for path, spec in arrays.items()
      if "router" in path.lower() and len(spec.shape) > 1
    ) or collections.Counter(
      arrays[path].shape[axis] for path, axis in stacks.items()
    )
    num_experts = sizes.most_common(1)[0][0] if sizes else None
  for path, axis in stacks.items():
    if arrays[path].shape[axis] == num_experts:
      roles[path] = dataclasses.replace(roles[path], expert_axis=axis)
  return roles


def _role(path: str, spec: ArraySpec) -> Role:
  parts = path.split("/")
  kind = "/".join(
    part
    if not (match := _NUMBER.fullmatch(part))
    else part[: match.start(1)] + "*"
    for part in parts
  )
  layer = layer_axis = expert = None
  for place, part in enumerate(parts):
    match = _NUMBER.fullmatch(part)
    if match and place and "expert" in parts[place - 1].lower():
      expert = int(match[1])
    elif match and layer is None:
      layer = "/".join(parts[: place + 1])
  if layer is None and len(spec.shape) > 1:
    for place, part in enumerate(parts[:-1]):
      if _STACK.fullmatch(part):
        layer, layer_axis = "/".join(parts[: place + 1]), 0
        break
  return Role(kind, layer, layer_axis, expert)


def compare(
  base: Source,
  new: Source,
  roles: Mapping[str, Role],
  *,
  chunk_bytes: int = 16 * 2**20,
  workers: int = 2,
  observe: Callable[[str, int], object] = lambda stage, size: None,
) -> Comparison:
  """Compares bit for bit, and encodes what a publisher would.

  Args:
    base: what the delta starts from; its pieces are whole arrays.
    new: what it gives; likewise.
    roles: of the arrays of `new`.
    chunk_bytes: as a publisher cuts.
    workers: threads that encode.
    observe: told "compared" and bytes, from any thread.

  Returns:
    Counts and sizes; one array of each side is in memory at a time.
  """
  before = {piece.path: piece for piece in base.pieces}
  cells: dict = {}
  sizes: dict[str, Size] = {}
  unmatched = {
    path: "is gone" for path in base.arrays if path not in new.arrays
  }
  with concurrent.futures.ThreadPoolExecutor(workers, "compare") as pool:
    for piece in new.pieces:
      role = roles[piece.path]
      array, old = piece.load(), None
      if base.arrays.get(piece.path) == new.arrays[piece.path]:
        old = before[piece.path].load()
        _count(cells, role, old, array, chunk_bytes)
      else:
        there = base.arrays.get(piece.path)
        unmatched[piece.path] = f"was {there}" if there else "is new"
      size = sizes.setdefault(role.kind, Size())
      size.full += array.nbytes
      for part, delta in _encoded(pool, piece, array, old, chunk_bytes):
        size.delta += delta
        observe("compared", part)
  return Comparison(cells, sizes, unmatched)


def _encoded(pool, piece: Piece, array, old, chunk_bytes) -> Iterator[tuple]:
  """(bytes, bytes of the delta) of each chunk; none if it didn't change."""

  def weigh(box):
    chunk = np.ascontiguousarray(array[box.within(piece.box)])
    if old is None:
      return chunk.nbytes, len(encode(chunk))
    before = np.ascontiguousarray(old[box.within(piece.box)])
    same = chunk.tobytes() == before.tobytes()
    return chunk.nbytes, 0 if same else len(encode(chunk, before))

  return pool.map(weigh, cut(piece.box, array.itemsize, chunk_bytes))


def _count(cells, role: Role, old, new, chunk_bytes) -> None:
  """Adds an array's elements to its cells."""
  kept = [a for a in (role.layer_axis, role.expert_axis) if a is not None]
  others = tuple(a for a in range(new.ndim) if a not in kept)
  shape = tuple(n if a in kept else 1 for a, n in enumerate(new.shape))
  changed = np.zeros(shape, np.int64)
  whole = ArraySpec(new.shape, new.dtype.name).whole
  for box in cut(whole, new.itemsize, chunk_bytes):
    part = box.within(whole)
    into = tuple(s if a in kept else slice(1) for a, s in enumerate(part))
    changed[into] += np.count_nonzero(
      changed_bits(old[..., *part], new[..., *part]), axis=others, keepdims=True
    )
  for place in np.ndindex(shape):
    layer, expert = role.layer, role.expert
    if role.layer_axis is not None:
      layer = f"{layer}/{place[role.layer_axis]}"
    if role.expert_axis is not None:
      expert = place[role.expert_axis]
    cell = cells.setdefault((role.kind, layer, expert), Count())
    cell.changed += int(changed[place])
    cell.elements += new.size // changed.size


def changed_bits(
  old: Shaped[np.ndarray, "*shape"], new: Shaped[np.ndarray, "*shape"]
) -> Bool[np.ndarray, "*shape"]:
  """Where two arrays of one dtype differ, as bits: -0.0 is not +0.0."""
  differ = as_units(old) != as_units(new)
  return np.asarray(differ.reshape(*new.shape, -1).any(axis=-1))
