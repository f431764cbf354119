"""Packed rows on disk: opened, not read, and one row at a time.

A folder of .npy files and the list of documents. Rows know which documents they
hold, so that a bad batch can be traced to its files.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from composer_jax.data.files import write_json
from composer_jax.data.packing import Packed

_ARRAYS = tuple(field.name for field in dataclasses.fields(Packed))


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """A sequence of rows of one length; see `__getitem__` for what is in one.

  Attributes:
    packed: the rows' arrays, on disk or in memory.
    documents: paths; `packed.piece_owners` counts through them.
  """

  packed: Packed
  documents: tuple[str, ...]

  @property
  def seq_len(self) -> int:
    """Positions a row."""
    return self.packed.tokens.shape[1]

  @property
  def num_tokens(self) -> int:
    """Positions with a target: all but the padding."""
    return int(self.packed.piece_lengths.sum())

  def __len__(self) -> int:
    return len(self.packed.tokens)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """One row.

    Returns:
      `tokens`, `targets`, `segment_ids` (1, 2, .. a document; 0 is padding)
      and `positions` (from 0 in each document), int32 `[S]`; `loss_mask`, bool
      `[S]`, False on padding; `row`, int32, the index.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"Row {index} of {len(self)}.")
    lengths = self.packed.piece_lengths[self._pieces(index)]
    used = lengths.sum()
    segment_ids = np.zeros(self.seq_len, np.int32)
    segment_ids[:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    starts = np.cumsum(lengths) - lengths
    positions = np.zeros(self.seq_len, np.int32)
    positions[:used] = np.arange(used) - np.repeat(starts, lengths)
    return {
      "tokens": self.packed.tokens[index].astype(np.int32),
      "targets": self.packed.targets[index].astype(np.int32),
      "segment_ids": segment_ids,
      "positions": positions,
      "loss_mask": segment_ids > 0,
      "row": np.int32(index),
    }

  def blank(self) -> dict[str, np.ndarray]:
    """A row of padding alone, to fill a batch with; its `row` is -1."""
    row = {
      name: np.zeros(self.seq_len, np.int32)
      for name in ("tokens", "targets", "segment_ids", "positions")
    }
    mask = np.zeros(self.seq_len, bool)
    return {**row, "loss_mask": mask, "row": np.int32(-1)}

  def sources(self, index: int) -> list[str]:
    """Paths of the documents in a row, left to right; none for a blank row."""
    if index == -1:
      return []
    owners = self.packed.piece_owners[self._pieces(index)]
    return [self.documents[owner] for owner in owners]

  def pairs(
    self,
  ) -> tuple[Int32[np.ndarray, " tokens"], Int32[np.ndarray, " tokens"]]:
    """Every input with its target, padding left out, in the rows' order."""
    sums = np.concatenate([[0], np.cumsum(self.packed.piece_lengths)])
    used = np.diff(sums[self.packed.row_starts])
    mask = np.arange(self.seq_len)[None] < used[:, None]
    return (
      self.packed.tokens[mask].astype(np.int32),
      self.packed.targets[mask].astype(np.int32),
    )

  def save(self, folder: Path) -> None:
    """Writes the rows into a new folder."""
    folder.mkdir()
    for name in _ARRAYS:
      np.save(folder / f"{name}.npy", getattr(self.packed, name))
    write_json(folder / "documents.json", self.documents)

  @classmethod
  def open(cls, folder: Path) -> "PackedRows":
    """Maps the rows of a folder into memory."""
    arrays = {
      name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
    }
    documents = json.loads((folder / "documents.json").read_text("utf-8"))
    return cls(Packed(**arrays), tuple(documents))

  def _pieces(self, index: int) -> slice:
    start, stop = self.packed.row_starts[index : index + 2].tolist()
    return slice(start, stop)
