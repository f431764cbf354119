import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.packing import pack
from composer_jax.data.rows import PackedRows

END, PAD, VOCAB = 0, 1, 500


def sequences_of(lengths):
  """Documents of these lengths; neighbouring tokens differ throughout."""
  ids = np.arange(sum(lengths), dtype=np.int32) % (VOCAB - 2) + 2
  return np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []


# Lengths rather than ids: drawing every id makes hypothesis slow.
SEQUENCES = st.lists(st.integers(0, 40), max_size=25).map(sequences_of)


def rows_of(sequences, seq_len=16):
  packed = pack(
    sequences, end_id=END, pad_id=PAD, seq_len=seq_len, vocab_size=VOCAB
  )
  names = tuple(f"doc{index}" for index in range(len(sequences)))
  return PackedRows(packed, names)


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 20))
def test_every_token_once_in_order_with_its_target(sequences, seq_len):
  rows = rows_of(sequences, seq_len)
  wanted = {
    f"doc{i}": [(END, *ids.tolist()), (*ids.tolist(), END)]
    for i, ids in enumerate(sequences)
  }
  # Pieces of a document, by what they hold: put together again below.
  pieces: dict[str, list] = {name: [] for name in wanted}
  for index in range(len(rows)):
    row, names = rows[index], rows.sources(index)
    segments = row["segment_ids"]
    assert row["row"] == index
    used = int(row["loss_mask"].sum())
    np.testing.assert_array_equal(row["loss_mask"], segments > 0)
    assert not segments[used:].any() and segments[:used].all()
    assert set(row["tokens"][used:]) | set(row["targets"][used:]) <= {PAD}
    assert segments.max(initial=0) == len(names)
    for segment, name in enumerate(names, 1):
      inside = np.flatnonzero(segments == segment)
      assert (np.diff(inside) == 1).all()
      np.testing.assert_array_equal(
        row["positions"][inside], np.arange(inside.size)
      )
      tokens, targets = row["tokens"][inside], row["targets"][inside]
      # The target is the next token of the same document.
      np.testing.assert_array_equal(tokens[1:], targets[:-1])
      pieces[name].append((tuple(tokens.tolist()), tuple(targets.tolist())))
  for name, (tokens, targets) in wanted.items():
    cut = [
      (tokens[i : i + seq_len], targets[i : i + seq_len])
      for i in range(0, len(tokens), seq_len)
    ]
    assert sorted(pieces[name]) == sorted(cut)


@settings(deadline=None)
@given(SEQUENCES)
def test_pairs_are_the_unmasked_positions(sequences):
  rows = rows_of(sequences)
  tokens, targets = rows.pairs()
  masked = [(rows[i]["tokens"], rows[i]["loss_mask"]) for i in range(len(rows))]
  assert tokens.tolist() == [t for row, mask in masked for t in row[mask]]
  assert len(targets) == rows.num_tokens == sum(len(s) + 1 for s in sequences)


def test_best_fit_by_hand():
  # Lengths with their start symbol: 6, 5, 4, 3, 2. A row of 10 takes 6 + 4, the
  # next 5 + 3 + 2.
  rows = rows_of([np.full(n - 1, n, np.int32) for n in (3, 6, 2, 4, 5)], 10)
  held = [rows.sources(index) for index in range(len(rows))]
  assert held == [["doc1", "doc3"], ["doc4", "doc0", "doc2"]]
  assert rows[0]["positions"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
  assert rows[0]["segment_ids"].tolist() == [1] * 6 + [2] * 4


def test_little_padding_on_many_documents():
  rng = np.random.default_rng(0)
  lengths = rng.lognormal(4, 1.2, 3000).astype(int)
  rows = rows_of([np.full(n, 7, np.int32) for n in lengths], 512)
  assert rows.num_tokens > 0.999 * (len(rows) - 1) * 512


def test_save_and_open(tmp_path):
  rows = rows_of([np.arange(2, 30, dtype=np.int32)] * 3)
  rows.save(tmp_path / "rows")
  opened = PackedRows.open(tmp_path / "rows")
  assert len(opened) == len(rows) and opened.seq_len == 16
  for index in range(len(rows)):
    assert opened.sources(index) == rows.sources(index)
    for name, value in rows[index].items():
      np.testing.assert_array_equal(opened[index][name], value)
