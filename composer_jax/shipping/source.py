"""Where a publisher's arrays come from: live ones, or an Orbax checkpoint.

Either way as pieces that are loaded one at a time, so that a process never
holds more of a checkpoint than what it publishes.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from composer_jax.shipping.contents import ArraySpec, Box, box_of, flatten
from composer_jax.shipping.layout import layout_of


@dataclasses.dataclass(frozen=True)
class Piece:
  """A box of an array that this process publishes.

  Attributes:
    path: of the array.
    box: which part of it.
    load: its bits, on the host; called once, or not at all.
    release: frees them, once they have been copied.
    array: the same bits on one device, if they are there.
  """

  path: str
  box: Box
  load: Callable[[], Shaped[np.ndarray, "..."]]
  release: Callable[[], object] = lambda: None
  array: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Source:
  """What to publish: all arrays, and this process's pieces of them."""

  arrays: dict[str, ArraySpec]
  pieces: list[Piece]

  @property
  def nbytes(self) -> int:
    """Bytes of this process's pieces."""
    return sum(
      piece.box.size * np.dtype(self.arrays[piece.path].dtype).itemsize
      for piece in self.pieces
    )


def from_tree(tree: PyTree, *, copy: bool = True) -> Source:
  """Live arrays, sharded in any way over the devices of any processes.

  Each process publishes those of its shards that are the first replica; arrays
  of NumPy, the same in all processes, are published by the first.

  Args:
    tree: of `jax.Array` and `numpy.ndarray`.
    copy: whether to copy jax arrays on their devices, without waiting, so that
      they may be donated at once. False for arrays that nobody will delete.

  Raises:
    DeltaError: if a leaf isn't made of plain numbers.
    ValueError: if two arrays have one path.
  """
  arrays, pieces = {}, []
  for path, leaf in flatten(tree).items():
    if not isinstance(leaf, jax.Array):
      leaf = np.array(leaf)  # The caller may write to its own.
    arrays[path] = ArraySpec(tuple(leaf.shape), leaf.dtype.name)
    layout_of(leaf.dtype)
    if not isinstance(leaf, jax.Array):
      if jax.process_index() == 0:
        pieces.append(Piece(path, arrays[path].whole, lambda leaf=leaf: leaf))
      continue
    leaf = jnp.copy(leaf) if copy else leaf
    for shard in leaf.addressable_shards:
      if shard.replica_id == 0:
        piece = Piece(
          path,
          box_of(shard.index, leaf.shape),
          functools.partial(np.asarray, shard.data),
          shard.data.delete if copy else lambda: None,
          shard.data,
        )
        pieces.append(piece)
  return Source(arrays, pieces)


def from_checkpoint(folder: str | os.PathLike, item: str = "") -> Source:
  """A checkpoint that Orbax wrote; a single process reads all of it.

  Args:
    folder: one that holds a pytree (it has a file `_METADATA`), or the step of
      a `CheckpointManager` with an item below it.
    item: path of the subtree to publish, as in "params"; "" for all.

  Raises:
    ValueError: if there is no such checkpoint, or no array under `item`.
  """
  import orbax.checkpoint as ocp

  folder = _pytree_folder(Path(folder).absolute())
  handler = ocp.PyTreeCheckpointHandler()
  tree = handler.metadata(folder).tree
  prefix = f"{item}/" if item else ""
  found = {
    path: leaf
    for path, leaf in flatten(tree).items()
    if path.startswith(prefix) and hasattr(leaf, "shape")
  }
  if not found:
    raise ValueError(f"{folder} holds no array below {item!r}")
  arrays = {
    path.removeprefix(prefix): ArraySpec(
      tuple(leaf.shape), np.dtype(leaf.dtype).name
    )
    for path, leaf in found.items()
  }
  for spec in arrays.values():
    layout_of(np.dtype(spec.dtype))
  return Source(
    arrays,
    [
      Piece(
        path.removeprefix(prefix),
        arrays[path.removeprefix(prefix)].whole,
        lambda path=path: _restore(handler, folder, tree, path),
      )
      for path in found
    ],
  )


def cast(source: Source, dtype: str) -> Source:
  """Rounds wider floats to the nearest `dtype`, ties to even.

  For masters in float32 that hosts run in bfloat16: a version then holds what
  hosts run, bit for bit. Narrower floats and other numbers stay. The payload of
  a NaN doesn't survive rounding.

  Args:
    source: what to publish.
    dtype: a float that NumPy or ml_dtypes knows: "bfloat16", "float16".

  Raises:
    ValueError: if it isn't.
  """
  try:
    narrow = np.dtype(dtype)
    if not jnp.issubdtype(narrow, np.floating):
      raise TypeError
  except TypeError:
    raise ValueError(f"{dtype!r} is no float; try bfloat16") from None

  def rounds(path):
    wide = np.dtype(source.arrays[path].dtype)
    is_float = jnp.issubdtype(wide, np.floating)
    return is_float and wide.itemsize > narrow.itemsize

  arrays = {
    path: dataclasses.replace(spec, dtype=narrow.name) if rounds(path) else spec
    for path, spec in source.arrays.items()
  }
  pieces = [
    dataclasses.replace(
      piece,
      load=lambda load=piece.load: load().astype(narrow),
      array=None,
    )
    if rounds(piece.path)
    else piece
    for piece in source.pieces
  ]
  return Source(arrays, pieces)


def _pytree_folder(folder: Path) -> Path:
  candidates = [folder, *sorted(path for path in folder.glob("*"))]
  trees = [path for path in candidates if (path / "_METADATA").is_file()]
  if not trees:
    steps = [int(path.name) for path in candidates if path.name.isdigit()]
    if steps and not folder.name.isdigit():
      raise ValueError(
        f"{folder} holds the checkpoints of {len(steps)} steps; name one, as in"
        f" {folder / str(max(steps))}"
      )
    raise ValueError(f"{folder} is no Orbax checkpoint: it has no _METADATA")
  if len(trees) > 1 and trees[0] != folder:
    names = ", ".join(path.name for path in trees)
    raise ValueError(f"{folder} holds several checkpoints; name one of {names}")
  return trees[0]


def _restore(handler, folder, tree, path):
  """Reads one array of a checkpoint whose metadata is `tree`."""
  import orbax.checkpoint as ocp

  def wanted(yes, no):
    leaves = [yes if name == path else no for name in flatten(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)

  try:
    restored = handler.restore(
      folder,
      args=ocp.args.PyTreeRestore(
        wanted(0, ocp.PLACEHOLDER),
        restore_args=wanted(
          ocp.RestoreArgs(restore_type=np.ndarray), ocp.RestoreArgs()
        ),
      ),
    )
  except (OSError, ValueError) as error:  # TensorStore's, of what it can't read
    reason = " ".join(str(error).split())[:200]
    raise ValueError(f"{path!r} of {folder} can't be read: {reason}") from error
  return flatten(restored)[path]
