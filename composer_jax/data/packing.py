"""Packs documents of every length into rows of one length.

A document t1..tn is the inputs [end, t1..tn] and the targets [t1..tn, end]:
each position has its target inside its own document. Longer ones are cut into
pieces of at most a row; pieces go, longest first, to the fullest row that has
room (best fit decreasing: Ding et al. 2024, https://arxiv.org/abs/2404.10830),
which cuts no document that fits and leaves next to no padding.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


@dataclasses.dataclass(frozen=True)
class Packed:
  """Rows of `S` positions, each filled from the left.

  Attributes:
    tokens: inputs, in the smallest unsigned type that holds them.
    targets: the token to predict at each position.
    piece_lengths: positions of each piece, row after row, left to right.
    piece_owners: the sequence that each piece is from.
    row_starts: pieces [row_starts[i], row_starts[i + 1]) are in row i.
  """

  tokens: Shaped[np.ndarray, "R S"]
  targets: Shaped[np.ndarray, "R S"]
  piece_lengths: Int[np.ndarray, " N"]
  piece_owners: Int[np.ndarray, " N"]
  row_starts: Int[np.ndarray, " R_plus_1"]


def pack(
  sequences: Sequence[Int[np.ndarray, " _"]],
  *,
  end_id: int,
  pad_id: int,
  seq_len: int,
  vocab_size: int,
) -> Packed:
  """Packs sequences of token ids.

  Args:
    sequences: the documents' ids, without the end token.
    end_id: put before and after each.
    pad_id: what unused positions hold, in tokens and targets.
    seq_len: S, positions a row.
    vocab_size: bound of the ids.

  Returns:
    The rows. The same sequences give the same rows.
  """
  dtype = np.min_scalar_type(vocab_size - 1)
  end = np.array([end_id], dtype)
  # end t1..tn end u1..um end: inputs without the last, targets without the
  # first, one document after another.
  stream = np.concatenate(
    [end, *(x for ids in sequences for x in (ids.astype(dtype), end))]
  )
  lengths, owners = _pieces([len(ids) + 1 for ids in sequences], seq_len)
  sources = np.cumsum(lengths) - lengths
  rows, columns = _place(lengths, seq_len)

  count = rows.max(initial=-1) + 1
  within = np.arange(lengths.sum()) - np.repeat(sources, lengths)
  places = np.repeat(rows * seq_len + columns, lengths) + within
  tokens = np.full((count, seq_len), pad_id, dtype)
  targets = np.full((count, seq_len), pad_id, dtype)
  tokens.reshape(-1)[places] = stream[:-1]
  targets.reshape(-1)[places] = stream[1:]

  order = np.lexsort((columns, rows))
  row_starts = np.searchsorted(rows[order], np.arange(count + 1))
  return Packed(tokens, targets, lengths[order], owners[order], row_starts)


def _pieces(
  lengths: Sequence[int], seq_len: int
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
  """Cuts each length into rows and a rest: the pieces and their owners."""
  total = np.array(lengths, np.int64)
  counts = -(-total // seq_len)
  owners = np.repeat(np.arange(len(total)), counts)
  pieces = np.full(len(owners), seq_len)
  pieces[np.cumsum(counts) - 1] = total - (counts - 1) * seq_len
  return pieces, owners


def _place(
  lengths: Int[np.ndarray, " N"], seq_len: int
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
  """Best fit decreasing: the row and first column of each piece."""
  rows, columns = np.zeros_like(lengths), np.zeros_like(lengths)
  free: list[tuple[int, int]] = []  # (room, row), sorted
  opened = 0
  for piece in np.argsort(-lengths, kind="stable").tolist():
    length = int(lengths[piece])
    fit = bisect.bisect_left(free, (length, 0))
    if fit < len(free):
      room, row = free.pop(fit)
    else:
      room, row, opened = seq_len, opened, opened + 1
    rows[piece], columns[piece] = row, seq_len - room
    if room > length:
      bisect.insort(free, (room - length, row))
  return rows, columns
