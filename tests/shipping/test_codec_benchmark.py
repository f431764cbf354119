"""What the benchmark claims, on pairs small enough for every run."""

import numpy as np
import pytest

from benchmarks import train_deltas
from benchmarks.delta_codec import CODECS, make_pair, measure


@pytest.mark.parametrize("case", ["noise 1%", "noise 60%", "step 1e-5"])
def test_ours_is_the_smallest(case):
  pairs = [make_pair(case, 200_000) for _ in range(2)]
  rows = {row["codec"]: row for row in measure(case, pairs)}
  assert rows.keys() == CODECS.keys()
  ours = rows.pop("ours")
  assert ours["bytes"] < 0.95 * ours["entropy_bytes"]
  assert all(ours["bytes"] < 0.95 * row["bytes"] for row in rows.values())
  fast = rows["ours-fast"]
  assert fast["bytes"] < 1.05 * fast["entropy_bytes"] + 900  # tables


def test_trained_pairs_are_consecutive_and_kept(tmp_path, monkeypatch):
  short = train_deltas.Lengths("runlocal", start=2, updates=4, every=2)
  monkeypatch.setattr(train_deltas, "QUICK", short)
  trained = train_deltas.train_pairs(tmp_path, "muon", quick=True)
  assert list(trained) == list(train_deltas.RATES)
  changed = [
    [np.mean(base != new) for base, new in pairs] for pairs in trained.values()
  ]
  assert np.shape(changed) == (3, 2)
  # One update each, larger with the learning rate; weights go on from there.
  assert np.all(np.diff(np.mean(changed, axis=1)) > 0.001)
  assert all((a[1] != b[0]).any() for a, b in trained.values())
  monkeypatch.setattr(train_deltas, "_train", None)
  again = train_deltas.train_pairs(tmp_path, "muon", quick=True)
  np.testing.assert_array_equal(trained["train_1e-04"], again["train_1e-04"])
