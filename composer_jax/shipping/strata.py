"""Where a chunk changes, counted among elements whose base has one exponent.

A gap of context k is the number of k's elements that stay as they are before
its next change. Most changes are in few, low contexts, which few elements have,
so there is no need to look at every element: contexts of a block are counted,
eight of a byte in a word of 64 bits at a time, and elements are visited up to
the highest context that changes in the block. Chunks that change too much for
that go through a plain loop.
"""

import numpy as np
from jaxtyping import Int, UInt, UInt8

from composer_jax.shipping.jit import loop
from composer_jax.shipping.loops import fill_contexts

# Elements; a block's 64 words let each byte of a word count its matches.
_BLOCK = 512
# With more changes than this, looking at every element is faster.
_DENSE = 1 / 40
_PAD = np.uint8(127)  # no context, and below 128 as `_matches` needs

_ONES = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_BELOW = np.uint64(0x7F7F7F7F7F7F7F7F)
_EVEN = np.uint64(0x00FF00FF00FF00FF)
_QUARTERS = np.uint64(0x0001000100010001)
_NEVER = np.int64(1) << np.int64(62)


@loop
def _matches(word, k):
  """The top bit of each byte that is k; all bytes are below 128."""
  return ~((word ^ (np.uint64(k) * _ONES)) + _BELOW) & _TOPS


@loop
def _up_to(word, k):
  """The top bit of each byte that is k or less."""
  return ~(word + np.uint64(127 - k) * _ONES) & _TOPS


@loop
def _how_many(matches):
  return np.int64(((matches >> np.uint64(7)) * _ONES) >> np.uint64(56))


@loop
def _count(words, k):
  """How many bytes of at most 255 words are k."""
  sums = np.uint64(0)
  for i in range(words.size):
    sums += _matches(words[i], k) >> np.uint64(7)
  sums = (sums & _EVEN) + ((sums >> np.uint64(8)) & _EVEN)
  return np.int64((sums * _QUARTERS) >> np.uint64(48))


@loop
def _fill(base, start, shift, lowest, limit, contexts):
  """Contexts of the block at `start`; returns its size."""
  block = base[start : start + _BLOCK]
  fill_contexts(block, shift, lowest, limit, contexts)
  contexts[block.size :] = _PAD
  return block.size


@loop
def _find_changes(base, new, base_words, new_words, positions):
  found, a_word = 0, 8 // base.itemsize
  for i in range(base_words.size):
    if base_words[i] != new_words[i]:
      # No branch here: it would often be mispredicted.
      for j in range(i * a_word, (i + 1) * a_word):
        positions[found] = j
        found += np.int64(base[j] != new[j])
  for j in range(base_words.size * a_word, base.size):
    if base[j] != new[j]:
      positions[found] = j
      found += 1
  return found


def find_changes(
  base: UInt[np.ndarray, " N"], new: UInt[np.ndarray, " N"]
) -> Int[np.ndarray, " n"]:
  """Where two arrays differ, ascending."""
  whole = base.size - base.size % (8 // base.itemsize)
  words = [array[:whole].view(np.uint64) for array in (base, new)]
  # Pages that are never written to cost nothing.
  positions = np.empty(base.size, np.int64)
  return positions[: _find_changes(base, new, *words, positions)]


@loop
def _gaps_by_block(base, shift, lowest, positions, contexts_at, at, gaps):
  limit = at.size
  contexts = np.empty(_BLOCK, np.uint8)
  words = contexts.view(np.uint64)
  used = np.zeros(limit, np.bool_)
  for k in contexts_at:
    used[k] = True
  # Ranks among a context's elements, counted from the start of the chunk.
  passed = np.zeros(limit, np.int64)
  after_last = np.zeros(limit, np.int64)
  done = 0
  for start in range(0, base.size, _BLOCK):
    size = _fill(base, start, shift, lowest, limit, contexts)
    while done < positions.size and positions[done] < start + size:
      k, j = contexts_at[done], positions[done] - start
      below = (np.uint64(1) << np.uint64(8 * (j & 7))) - np.uint64(1)
      rank = passed[k] + _count(words[: j >> 3], k)
      rank += _how_many(_matches(words[j >> 3], k) & below)
      gaps[at[k]] = rank - after_last[k]
      at[k] += 1
      after_last[k] = rank + 1
      done += 1
    for k in range(limit):
      if used[k]:
        passed[k] += _count(words, k)


@loop
def _gaps_one_by_one(base, new, shift, lowest, at, gaps):
  limit = at.size
  contexts = np.empty(_BLOCK, np.uint8)
  seen = np.zeros(limit, np.int64)
  for start in range(0, base.size, _BLOCK):
    size = _fill(base, start, shift, lowest, limit, contexts)
    for j in range(size):
      k = contexts[j]
      if base[start + j] == new[start + j]:
        seen[k] += 1
      else:
        gaps[at[k]] = seen[k]
        at[k] += 1
        seen[k] = 0


@loop
def _first_gaps(gaps, first):
  left = np.full(first.size - 1, _NEVER)
  for k in range(left.size):
    if first[k] < first[k + 1]:
      left[k] = gaps[first[k]]
  return left


@loop
def _next_gap(gaps, first, at, k):
  at[k] += 1
  return np.int64(gaps[at[k]]) if at[k] < first[k + 1] else _NEVER


@loop
def _positions_by_block(base, shift, lowest, gaps, first, positions):
  at, left = first[:-1].copy(), _first_gaps(gaps, first)
  contexts = np.empty(_BLOCK, np.uint8)
  words = contexts.view(np.uint64)
  found = 0
  for start in range(0, base.size, _BLOCK):
    _fill(base, start, shift, lowest, left.size, contexts)
    top = left.size - 1
    while top >= 0:  # down to the highest context that changes here
      if left[top] != _NEVER:
        members = _count(words, top)
        if left[top] < members:
          break
        left[top] -= members
      top -= 1
    if top < 0:
      continue
    for i in range(words.size):
      visit = _up_to(words[i], top)
      while visit:
        lowest_bit = visit & (~visit + np.uint64(1))
        visit ^= lowest_bit
        j = 8 * i + _how_many((lowest_bit - np.uint64(1)) & _TOPS)
        k = contexts[j]
        if left[k]:
          left[k] -= 1
          continue
        positions[found] = start + j
        found += 1
        left[k] = _next_gap(gaps, first, at, k)
  return found


@loop
def _positions_one_by_one(base, shift, lowest, gaps, first, positions):
  at, left = first[:-1].copy(), _first_gaps(gaps, first)
  contexts = np.empty(_BLOCK, np.uint8)
  found = 0
  for start in range(0, base.size, _BLOCK):
    size = _fill(base, start, shift, lowest, left.size, contexts)
    for j in range(size):
      k = contexts[j]
      if left[k]:
        left[k] -= 1
        continue
      positions[found] = start + j
      found += 1
      left[k] = _next_gap(gaps, first, at, k)
  return found


def to_gaps(
  base: UInt[np.ndarray, " N"],
  new: UInt[np.ndarray, " N"],
  shift: int,
  lowest: int,
  positions: Int[np.ndarray, " n"],
  contexts: UInt8[np.ndarray, " n"],
  counts: Int[np.ndarray, " K"],
) -> UInt[np.ndarray, " n"]:
  """Gaps before each change, grouped by context.

  Args:
    base: of the chunk.
    new: the chunk.
    shift: bits of an element below those that choose its context.
    lowest: what those bits are less by.
    positions: of the changes, ascending.
    contexts: of the changes.
    counts: of the changes by context.

  Returns:
    Context 0's gaps, then context 1's, and so on, each in ascending order of
    positions.
  """
  at = np.cumsum(counts) - counts
  gaps = np.empty(len(positions), np.uint64)
  if len(positions) < _DENSE * base.size:
    _gaps_by_block(base, shift, lowest, positions, contexts, at, gaps)
  else:
    _gaps_one_by_one(base, new, shift, lowest, at, gaps)
  return gaps


def to_positions(
  base: UInt[np.ndarray, " N"],
  shift: int,
  lowest: int,
  gaps: UInt[np.ndarray, " n"],
  counts: Int[np.ndarray, " K"],
) -> Int[np.ndarray, " found"]:
  """Inverse of `to_gaps`; fewer than n if gaps lead beyond the end."""
  first = np.concatenate([[0], np.cumsum(counts)])
  positions = np.empty(len(gaps), np.int64)
  # Contexts that lie below a change in every other block, and their elements.
  after = len(gaps) - first[:-1]
  low = np.count_nonzero(2 * _BLOCK * after > base.size)
  visited = first[low] + int(gaps[: first[low]].sum())
  by_block = 8 * visited < base.size
  find = _positions_by_block if by_block else _positions_one_by_one
  found = find(base, shift, lowest, gaps, first, positions)
  return positions[:found]
