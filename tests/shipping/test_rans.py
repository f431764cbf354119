"""The entropy coder: exact, near the entropy, whole streams only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.shipping import DeltaError, rans


def count(symbols, contexts, limit):
  counts = np.zeros((limit, 256), np.int64)
  np.add.at(counts, (contexts, symbols), 1)
  return counts


@given(
  size=st.integers(0, 3000),
  limit=st.integers(1, 16),
  alphabet=st.integers(1, 256),
  skew=st.floats(0, 4),
  seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_round_trip_near_the_entropy(size, limit, alphabet, skew, seed):
  rng = np.random.default_rng(seed)
  weights = 1.0 / np.arange(1, alphabet + 1) ** skew
  symbols = rng.choice(alphabet, size, p=weights / weights.sum())
  symbols = symbols.astype(np.uint8)
  contexts = rng.integers(0, limit, size).astype(np.uint8)
  counts = count(symbols, contexts, limit)
  tables, code = rans.encode(symbols, contexts, counts)
  freqs = rans.unpack_tables(tables)
  assert (freqs.astype(bool) == counts.astype(bool)).all()
  assert (rans.decode(freqs, code, contexts) == symbols).all()
  shares = (freqs / rans.TOTAL)[contexts, symbols]
  # Four states of 32 bits, of which 16 are spent before the first symbol.
  assert len(code) <= 16 + 1.002 * -np.log2(shares).sum() / 8 + 8


def test_division_is_exact_at_every_frequency():
  """States near each multiple of a frequency, where rounding would show."""
  words = np.zeros(1, np.uint16)
  for f in [*range(1, 260), 1023, 2048, 3001, 4095, 4096]:
    inverse = 1.0 / f * (1 + 2.3e-16)
    top = f << (32 - rans.BITS)
    for k in (top // f, top // f - 1, 65537, 65536 // f + 2):
      for x in (k * f - 1, k * f, k * f + 1):
        if 65536 <= x < top:
          y, _ = rans._push(
            np.uint64(x), np.uint64(f), np.uint64(0), inverse, words, 1
          )
          assert y == ((x // f) << rans.BITS) + x % f, (x, f)


def test_one_symbol_costs_nothing():
  symbols = np.full(100_000, 7, np.uint8)
  contexts = np.zeros(100_000, np.uint8)
  _, code = rans.encode(symbols, contexts, count(symbols, contexts, 1))
  assert len(code) == 16


def test_streams_must_be_whole():
  symbols = np.arange(200, dtype=np.uint8)
  contexts = np.zeros(200, np.uint8)
  tables, code = rans.encode(symbols, contexts, count(symbols, contexts, 1))
  freqs = rans.unpack_tables(tables)
  for bad in (code[:-2], code + b"\0\0", code[:-1], b"", code[:15]):
    with pytest.raises(DeltaError):
      rans.decode(freqs, bad, contexts)
  with pytest.raises(DeltaError, match="no table"):
    rans.decode(freqs, code, contexts + np.uint8(1))
  for bad in (b"", b"\0", b"\x11", tables[:-1], tables + b"\0", b"\1\1\0\0\5"):
    with pytest.raises(DeltaError):
      rans.unpack_tables(bad)
