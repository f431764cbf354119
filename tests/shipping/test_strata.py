"""Gaps within contexts, both ways round, against lists in plain NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.shipping import strata

K = 16


def oracle(base, new, shift, lowest):
  """Contexts of all elements, positions of changes, gaps by context."""
  width = 8 * base.itemsize
  fields = (base.astype(object) % 2 ** (width - 1)) // 2**shift - lowest
  contexts = np.clip(fields.astype(np.int64), 0, K - 1)
  gaps = []
  for k in range(K):
    members = np.flatnonzero(contexts == k)
    ranks = np.flatnonzero(base[members] != new[members])
    gaps.extend(np.diff(ranks, prepend=-1) - 1)
  return contexts, np.flatnonzero(base != new), gaps


@given(
  width=st.sampled_from([1, 2, 4, 8]),
  size=st.integers(0, 1500),
  lowest=st.integers(0, 20),
  slope=st.floats(-2, 2),
  scale=st.sampled_from([0.001, 0.05, 1.0]),
  seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_both_ways(width, size, lowest, slope, scale, seed):
  rng = np.random.default_rng(seed)
  unit = np.dtype(f"u{width}")
  shift = 8 * width - 6
  base = np.frombuffer(rng.bytes(size * width), unit)
  contexts, *_ = oracle(base, base, shift, lowest)
  # From "low contexts change" to "high contexts do", and some never.
  rate = scale * 2.0 ** (slope * (contexts - K / 2)) * (contexts % 5 > 0)
  new = np.where(rng.random(size) < rate, ~base, base)
  _, positions, gaps = oracle(base, new, shift, lowest)

  found = strata.find_changes(base, new)
  np.testing.assert_array_equal(found, positions)
  at = contexts[positions].astype(np.uint8)
  counts = np.bincount(at, minlength=K)
  first = np.concatenate([[0], np.cumsum(counts)])
  made = strata.to_gaps(base, new, shift, lowest, found, at, counts)
  np.testing.assert_array_equal(made, gaps)
  back = strata.to_positions(base, shift, lowest, made, counts)
  np.testing.assert_array_equal(back, positions)

  # And by the way that was not taken.
  again = np.empty_like(made)
  strata._gaps_by_block(
    base, shift, lowest, found, at, first[:-1].copy(), again
  )
  np.testing.assert_array_equal(again, gaps)
  strata._gaps_one_by_one(base, new, shift, lowest, first[:-1].copy(), again)
  np.testing.assert_array_equal(again, gaps)
  for find in (strata._positions_by_block, strata._positions_one_by_one):
    back = np.empty(len(made), np.int64)
    assert find(base, shift, lowest, made, first, back) == len(made)
    np.testing.assert_array_equal(back, positions)


@pytest.mark.parametrize("size", [5, 600])
def test_gaps_beyond_the_end_find_fewer(size):
  base = np.zeros(size, np.uint16)
  counts = np.zeros(K, np.int64)
  counts[0] = 2
  gaps = np.array([size - 1, 0], np.uint64)
  positions = strata.to_positions(base, 7, 0, gaps, counts)
  np.testing.assert_array_equal(positions, [size - 1])
