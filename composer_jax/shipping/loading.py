"""Brings what a process publishes to the host, chunk by chunk.

On request by way of the changes: the version before stays on the devices, they
find what differs, and only that is copied to the host and put into the chunks
that the publisher holds there. Either way the bits are the same.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Shaped

from composer_jax.shipping import device
from composer_jax.shipping.contents import Chunk, cut
from composer_jax.shipping.reader import Replica
from composer_jax.shipping.source import Piece, Source


def chunks_of(piece: Piece, dtype: str, chunk_bytes: int) -> list[Chunk]:
  """Chunks of a piece; each is contiguous in it, in this order."""
  boxes = cut(piece.box, np.dtype(dtype).itemsize, chunk_bytes)
  return [Chunk(piece.path, box) for box in boxes]


class Loader:
  """Loads versions, one at a time."""

  def __init__(self, chunk_bytes: int, *, keeps_base: bool):
    """Keeps nothing yet.

    Args:
      chunk_bytes: the largest chunk, in bytes.
      keeps_base: whether each version's device arrays stay until the next one's
        are committed, to compare with them there.
    """
    self._chunk_bytes = chunk_bytes
    self._keeps_base = keeps_base
    self._version: int | None = None
    self._base: dict[tuple, Piece] = {}  # of `_version`
    self._fresh: dict[tuple, Piece] = {}  # of the version being made

  def load(
    self, source: Source, held: Mapping[int, Replica]
  ) -> Iterator[tuple[Chunk, Shaped[np.ndarray, "..."]]]:
    """Chunks and their bits, one piece in memory at a time.

    Args:
      source: what to load; call `settle` when it is published, or isn't.
      held: what is on the host of earlier versions. Chunks that did not change
        may come from there, so nobody writes to what this yields.
    """
    base = held.get(self._version)
    for piece in source.pieces:
      dtype = source.arrays[piece.path].dtype
      chunks = chunks_of(piece, dtype, self._chunk_bytes)
      changes = self._changes(piece) if base else None
      if changes is None:
        bits = piece.load()
        for chunk in chunks:
          # A copy for each: one chunk of a piece must not keep all of it.
          yield chunk, np.array(bits[chunk.box.within(piece.box)])
      else:
        start = 0
        for chunk in chunks:
          stop = start + chunk.box.size
          part = device.part_of(changes, start, stop)
          old = base.data[chunk]
          yield chunk, device.apply(old, part) if part.count else old
          start = stop
      if self._keeps_base and piece.array is not None:
        self._fresh[piece.path, piece.box] = piece
      else:
        piece.release()

  def settle(self, version: int | None) -> None:
    """Ends a version: the next one's base is this, or the one before.

    Args:
      version: its number; None if it was not published.
    """
    gone = self._fresh
    if version is not None:
      gone, self._base, self._version = self._base, self._fresh, version
    self._fresh = {}
    for piece in gone.values():
      piece.release()

  def _changes(self, piece) -> device.Changes | None:
    old = self._base.get((piece.path, piece.box))
    if (
      old is None
      or piece.array is None
      or old.array.is_deleted()
      or old.array.sharding != piece.array.sharding
      or old.array.dtype != piece.array.dtype
    ):
      return None
    return device.fetch(piece.array, old.array)


def all_chunks(source: Source, chunk_bytes: int) -> set[Chunk]:
  """Every chunk of a source."""
  return {
    chunk
    for piece in source.pieces
    for chunk in chunks_of(piece, source.arrays[piece.path].dtype, chunk_bytes)
  }
