import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_code import module

from composer_jax.data.fim import Sentinels, arrange, rearrange, restore
from composer_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train([module(i) for i in range(20)], 400)
SENTINELS = Sentinels.of(TOKENIZER)
PRE, MID, SUF = SENTINELS.prefix, SENTINELS.middle, SENTINELS.suffix


def ids(*values):
  return np.array(values, np.int32)


def test_order_by_hand():
  parts = ids(10, 11), ids(20), ids(30, 31)
  psm = arrange(*parts, SENTINELS, spm=False)
  assert psm.tolist() == [PRE, 10, 11, SUF, 30, 31, MID, 20]
  spm = arrange(*parts, SENTINELS, spm=True)
  assert spm.tolist() == [PRE, SUF, 30, 31, MID, 10, 11, 20]
  for arranged in (psm, spm):
    assert restore(arranged, SENTINELS).tolist() == [10, 11, 20, 30, 31]


@settings(deadline=None, max_examples=60)
@given(
  texts=st.lists(
    st.one_of(st.text(min_size=1), st.integers(0, 9).map(module)), max_size=4
  ),
  seed=st.integers(0, 1000),
  max_tokens=st.integers(12, 200),
)
def test_rearranged_documents_restore_to_the_original(texts, seed, max_tokens):
  documents = TOKENIZER.encode_batch(texts)
  seeds = [(seed, index) for index in range(len(texts))]
  rearranged = rearrange(documents, seeds, TOKENIZER, max_tokens)
  for text, pieces in zip(texts, rearranged, strict=True):
    for piece in pieces:
      assert len(piece) <= max_tokens
      assert all((piece == mark).sum() == 1 for mark in (PRE, MID, SUF))
    restored = [restore(piece, SENTINELS) for piece in pieces]
    assert TOKENIZER.decode(np.concatenate(restored)) == text


def test_both_orders_and_all_places_occur():
  documents = TOKENIZER.encode_batch([module(0)]) * 200
  seeds = [(0, index) for index in range(200)]
  pieces = [p for (p,) in rearrange(documents, seeds, TOKENIZER, 10_000)]
  spm = [bool(piece[1] == SUF) for piece in pieces]
  assert 70 < sum(spm) < 130
  # Uniform cuts leave a third of the document to each part on average.
  middle = [
    len(p) - 1 - p.tolist().index(MID)
    for p, is_spm in zip(pieces, spm, strict=True)
    if not is_spm
  ]
  assert 0.25 < np.mean(middle) / len(documents[0]) < 0.42


def test_seed_decides():
  documents = TOKENIZER.encode_batch([module(0), module(1)])
  seeds = [(0, 1), (0, 2)]
  both = rearrange(documents, seeds, TOKENIZER, 100)
  alone = rearrange(documents[1:], seeds[1:], TOKENIZER, 100)
  other = rearrange(documents[1:], [(1, 2)], TOKENIZER, 100)
  assert [p.tolist() for p in both[1]] == [p.tolist() for p in alone[0]]
  assert [p.tolist() for p in both[1]] != [p.tolist() for p in other[0]]


def test_tokenizer_without_sentinels_is_explained():
  TOKENIZER_WITHOUT = Tokenizer.train(["x"], 261)
  TOKENIZER_WITHOUT.fim_middle_id = None
  with pytest.raises(ValueError, match="set fim_fraction=0"):
    Sentinels.of(TOKENIZER_WITHOUT)
