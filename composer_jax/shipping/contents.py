"""What a version holds: named arrays, cut into chunks along a grid.

A chunk is a box of one array and the unit of everything: of a delta, of a
download, of a check. The publisher's sharding decides the grid, so that each
chunk comes from one device of one process; a reader takes the chunks that its
own sharding meets. A version's digest is one over all its arrays and chunks,
the same however the reader got there.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import ml_dtypes  # noqa: F401  Gives NumPy the names of the small floats.
import numpy as np
import xxhash
from jaxtyping import PyTree, Shaped

from composer_jax.shipping.errors import ChainError


@dataclasses.dataclass(frozen=True, order=True)
class Box:
  """A part of an array: `start[i]` to `start[i] + shape[i]` of each axis."""

  start: tuple[int, ...]
  shape: tuple[int, ...]

  @property
  def stop(self) -> tuple[int, ...]:
    """Where it ends, exclusive."""
    return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.shape)

  def meets(self, other: "Box") -> bool:
    """Whether they have an element in common."""
    return all(
      max(a, b) < min(c, d)
      for a, b, c, d in zip(
        self.start, other.start, self.stop, other.stop, strict=True
      )
    )

  def within(self, outer: "Box") -> tuple[slice, ...]:
    """Its slices of an array that holds `outer`; cut to what lies in there."""
    return tuple(
      slice(max(a, o) - o, min(b, p) - o)
      for a, b, o, p in zip(
        self.start, self.stop, outer.start, outer.stop, strict=True
      )
    )


@dataclasses.dataclass(frozen=True, order=True)
class Chunk:
  """A box of an array; the key of its contents."""

  path: str
  box: Box


@dataclasses.dataclass(frozen=True)
class ArraySpec:
  """Shape and NumPy name of the dtype of a whole array."""

  shape: tuple[int, ...]
  dtype: str

  @property
  def whole(self) -> Box:
    """All of it."""
    return Box((0,) * len(self.shape), self.shape)


@dataclasses.dataclass(frozen=True)
class Contents:
  """All of a version but the bits: those are known by their digests.

  Attributes:
    arrays: path -> shape and dtype.
    digests: chunk -> XXH3-128 of its bytes, hexadecimal.
  """

  arrays: Mapping[str, ArraySpec]
  digests: Mapping[Chunk, str]

  def digest(self) -> str:
    """SHA-256 over all that this says, in hexadecimal."""
    total = hashlib.sha256()
    for path in sorted(self.arrays):
      spec = self.arrays[path]
      total.update(f"{path}\0{spec.shape}\0{spec.dtype}\n".encode())
    for chunk in sorted(self.digests):
      box = chunk.box
      line = f"{chunk.path}\0{box.start}\0{box.shape}\0{self.digests[chunk]}\n"
      total.update(line.encode())
    return total.hexdigest()

  def check(self) -> None:
    """Checks that the chunks of each array are a grid that covers it.

    Raises:
      ChainError: if not.
    """
    boxes: dict[str, list[Box]] = {path: [] for path in self.arrays}
    for chunk in self.digests:
      if chunk.path not in boxes:
        raise ChainError(f"a chunk of {chunk.path!r}, which is not an array")
      boxes[chunk.path].append(chunk.box)
    for path, spec in self.arrays.items():
      if not _is_grid(boxes[path], spec.shape):
        raise ChainError(f"the chunks of {path!r} don't cover it once")


def flatten(tree: PyTree) -> dict[str, object]:
  """Leaves of a pytree by path, as in "layers/0/kernel".

  Raises:
    ValueError: if two leaves have one path.
  """
  leaves = {}
  for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    if path in leaves:
      raise ValueError(f"two arrays are called {path!r}; rename one")
    leaves[path] = leaf
  return leaves


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
  """The box that a shard's index selects."""
  spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
  return Box(
    tuple(start for start, _ in spans),
    tuple(stop - start for start, stop in spans),
  )


def cut(box: Box, itemsize: int, chunk_bytes: int) -> Iterator[Box]:
  """Cuts a box into pieces of contiguous rows, of `chunk_bytes` at most.

  A single element is never cut, whatever its size.
  """
  axis = next((i for i, n in enumerate(box.shape) if n > 1), None)
  if axis is None or box.size * itemsize <= chunk_bytes:
    if box.size:
      yield box
    return
  row_bytes = math.prod(box.shape[axis + 1 :]) * itemsize
  rows = max(1, chunk_bytes // row_bytes)
  for first in range(0, box.shape[axis], rows):
    start, shape = list(box.start), list(box.shape)
    start[axis] += first
    shape[axis] = min(rows, box.shape[axis] - first)
    yield from cut(Box(tuple(start), tuple(shape)), itemsize, chunk_bytes)


def digest_of(array: Shaped[np.ndarray, "..."]) -> str:
  """XXH3-128 of an array's bytes, as the codec's header has it."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return xxhash.xxh3_128_hexdigest(flat.view(np.uint8))


def assemble(
  box: Box, dtype: str, parts: Mapping[Box, Shaped[np.ndarray, "..."]]
) -> Shaped[np.ndarray, "..."]:
  """A box of an array from the chunks that meet it; no copy if it is one."""
  if box in parts:
    return parts[box]
  array = np.empty(box.shape, np.dtype(dtype))
  for part, data in parts.items():
    array[part.within(box)] = data[box.within(part)]
  return array


def _is_grid(boxes: Collection[Box], shape: tuple[int, ...]) -> bool:
  if 0 in shape:
    return not boxes
  starts = [
    sorted({box.start[axis] for box in boxes}) for axis in range(len(shape))
  ]
  # As many as there are boxes, before anything of that size is made.
  if len(boxes) != math.prod(map(len, starts)) or not boxes:
    return False
  stops = [
    dict(zip(column, [*column[1:], n], strict=True))
    for column, n in zip(starts, shape, strict=True)
  ]
  expected = {
    start: tuple(stops[axis][a] for axis, a in enumerate(start))
    for start in itertools.product(*starts)
  }
  return all(first[0] == 0 for first in starts) and all(
    expected[box.start] == box.stop for box in boxes
  )
