import math

import numpy as np
import pytest

from composer_jax.data.bigram import KneserNeyBigram, bigram_bits_per_byte
from composer_jax.data.packing import pack
from composer_jax.data.rows import PackedRows


def ids(*values):
  return np.array(values, np.int32)


def rows(*sequences):
  packed = pack(sequences, end_id=0, pad_id=4, seq_len=8, vocab_size=5)
  return PackedRows(packed, tuple(map(str, range(len(sequences)))))


# 0 1 2 0, 0 1 2 1 0 as pairs: (0,1) twice, (1,2) twice, (2,0), (2,1), (1,0).
# Counts: three singletons, two pairs: D = 3 / (3 + 2 * 2).
# Kinds before 0, 1, 2: {2, 1}, {0, 2}, {1}: n = 5, d = 1 / (1 + 2 * 2).
TRAIN = rows(ids(1, 2), ids(1, 2, 1))
D, LOWER_D = 3 / 7, 1 / 5
REST = LOWER_D * 3 / 5 / 5
Q = {0: 1.8 / 5 + REST, 1: 1.8 / 5 + REST, 2: 0.8 / 5 + REST, 3: REST, 4: REST}


def test_probabilities_by_hand():
  model = KneserNeyBigram(*TRAIN.pairs(), 5)
  found = model.probability(ids(0, 1, 1, 3), ids(1, 2, 3, 2))
  wanted = [
    (2 - D) / 2 + D * 1 / 2 * Q[1],
    (2 - D) / 3 + D * 2 / 3 * Q[2],
    D * 2 / 3 * Q[3],
    Q[2],  # 3 was never seen
  ]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_probabilities_sum_to_one():
  rng = np.random.default_rng(0)
  inputs = rng.integers(0, 30, 2000).astype(np.int32)
  targets = (inputs * 7 + rng.integers(0, 5, 2000)).astype(np.int32) % 40
  model = KneserNeyBigram(inputs, targets, 40)
  for context in (0, 3, 29, 35):
    every = np.arange(40, dtype=np.int32)
    p = model.probability(np.full(40, context, np.int32), every)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1, abs=1e-12)


def test_bits_per_byte_count_every_target_once():
  validation = rows(ids(1), ids(2))  # Pairs (0,1) (1,0) (0,2) (2,0).
  token_bytes = ids(0, 2, 3, 1, 0)
  model = KneserNeyBigram(*TRAIN.pairs(), 5)
  p = model.probability(ids(0, 1, 0, 2), ids(1, 0, 2, 0))
  found = bigram_bits_per_byte(TRAIN, validation, token_bytes, 5)
  assert found == pytest.approx(-sum(map(math.log2, p)) / 5)
