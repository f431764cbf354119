import itertools

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from composer_jax.data.loader import make_loader
from composer_jax.data.packing import pack
from composer_jax.data.rows import PackedRows


def make_rows(count, seq_len=8):
  sequences = [np.full(seq_len - 1, 2 + i, np.int32) for i in range(count)]
  packed = pack(
    sequences, end_id=0, pad_id=1, seq_len=seq_len, vocab_size=2 + count
  )
  return PackedRows(packed, tuple(map(str, range(count))))


ROWS = make_rows(22)


def take(loader, count):
  return list(itertools.islice(loader, count))


def same(first, second):
  assert len(first) == len(second)
  for a, b in zip(first, second, strict=True):
    assert a.keys() == b.keys()
    for name in a:
      np.testing.assert_array_equal(a[name], b[name])


def test_shapes_and_types():
  batch = next(make_loader(ROWS, batch_size=4, seed=0, process_count=2))
  assert {n: (v.shape, v.dtype.name) for n, v in batch.items()} == {
    "tokens": ((2, 8), "int32"),
    "targets": ((2, 8), "int32"),
    "segment_ids": ((2, 8), "int32"),
    "positions": ((2, 8), "int32"),
    "loss_mask": ((2, 8), "bool"),
    "row": ((2,), "int32"),
  }
  for index, row in enumerate(batch["row"]):
    same([{n: v[index] for n, v in batch.items()}], [ROWS[int(row)]])


def test_each_epoch_is_another_permutation_of_all_rows():
  loader = make_loader(ROWS, batch_size=4, seed=0)
  rows = np.concatenate([batch["row"] for batch in take(loader, 11)])
  first, second = rows.reshape(2, 22).tolist()
  assert sorted(first) == sorted(second) == list(range(22))
  assert first != second


def test_single_rows_without_end():
  batches = take(make_loader(ROWS, batch_size=1, seed=0), 2 * len(ROWS))
  rows = sorted(int(batch["row"][0]) for batch in batches)
  assert rows == sorted(2 * list(range(len(ROWS))))


def test_seed_decides():
  def rows(seed):
    loader = make_loader(ROWS, batch_size=4, seed=seed)
    return [batch["row"].tolist() for batch in take(loader, 8)]

  assert rows(1) == rows(1) != rows(2)


@pytest.mark.parametrize("process_count", [2, 4, 8])
@pytest.mark.parametrize("epochs", [None, 3])
def test_processes_share_each_global_batch(process_count, epochs):
  whole = take(make_loader(ROWS, batch_size=8, seed=5, num_epochs=epochs), 9)
  parts = [
    take(
      make_loader(
        ROWS,
        batch_size=8,
        seed=5,
        process_index=process,
        process_count=process_count,
        num_epochs=epochs,
      ),
      9,
    )
    for process in range(process_count)
  ]
  assert len(whole) == 9
  for batch, *local in zip(whole, *parts, strict=True):
    rows = np.concatenate([part["row"] for part in local])
    assert sorted(rows) == sorted(batch["row"])


def test_resumes_bit_for_bit_and_on_other_processes():
  loader = make_loader(ROWS, batch_size=4, seed=0)
  take(loader, 9)  # Into the second epoch.
  state, ahead = loader.get_state(), take(loader, 8)
  resumed = make_loader(ROWS, batch_size=4, seed=0)
  resumed.set_state(state)
  same(take(resumed, 8), ahead)

  halves = []
  for process in range(2):
    half = make_loader(
      ROWS, batch_size=4, seed=0, process_index=process, process_count=2
    )
    half.set_state(state)
    halves.append(next(half)["row"])
  assert sorted(np.concatenate(halves)) == sorted(ahead[0]["row"])


def test_state_goes_through_a_checkpoint(tmp_path):
  loader = make_loader(ROWS, batch_size=4, seed=0)
  take(loader, 3)
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(
      3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(loader))
    )
    manager.wait_until_finished()
    ahead = take(loader, 5)
    fresh = make_loader(ROWS, batch_size=4, seed=0)
    manager.restore(
      3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh))
    )
  same(take(fresh, 5), ahead)


@pytest.mark.parametrize("process_count", [1, 2])
def test_validation_counts_every_row_once(process_count):
  seen, masked = [], 0
  for process in range(process_count):
    batches = list(
      make_loader(
        ROWS,
        batch_size=8,
        seed=0,
        process_index=process,
        process_count=process_count,
        shuffle=False,
        num_epochs=1,
      )
    )
    assert len(batches) == 3
    for batch in batches:
      assert batch["tokens"].shape == (8 // process_count, 8)
      seen += [row for row in batch["row"].tolist() if row >= 0]
      blank = batch["row"] == -1
      masked += int(blank.sum())
      assert not batch["loss_mask"][blank].any()
      assert batch["loss_mask"][~blank].all()
  assert masked == 2
  assert sorted(seen) == list(range(22))
  assert ROWS.sources(-1) == []


def test_fewer_rows_than_a_batch():
  (batch,) = make_loader(make_rows(3), batch_size=8, seed=0, num_epochs=1)
  assert sorted(batch["row"]) == [-1] * 5 + [0, 1, 2]
  endless = take(make_loader(make_rows(3), batch_size=8, seed=0), 3)
  rows = np.concatenate([batch["row"] for batch in endless])
  assert np.bincount(rows).tolist() == [8, 8, 8]


@pytest.mark.parametrize(
  "options, message",
  [
    ({"batch_size": 6, "process_count": 4}, "batch_size 6 must be a positive"),
    ({"batch_size": 0}, "batch_size 0 must be"),
    ({"process_index": 2, "process_count": 2}, r"must lie in \[0, 2\)"),
    ({"num_epochs": 0}, "num_epochs must be at least 1"),
    ({"rows": make_rows(0)}, "no rows to load"),
  ],
)
def test_mistakes_are_explained(options, message):
  with pytest.raises(ValueError, match=message):
    make_loader(**{"rows": ROWS, "batch_size": 4, "seed": 0, **options})
