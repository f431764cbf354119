"""What the benchmark claims, on pairs small enough for every run."""

import pytest

from benchmarks.delta_codec import CODECS, measure


@pytest.mark.parametrize("case", ["noise 1%", "noise 60%", "step 1e-5"])
def test_ours_is_the_smallest(case):
  rows = {row["codec"]: row for row in measure(case, 400_000)}
  assert rows.keys() == CODECS.keys()
  ours = rows.pop("ours")
  assert ours["bytes"] < 0.9 * ours["entropy_bytes"]
  assert all(ours["bytes"] < 0.9 * row["bytes"] for row in rows.values())
  fast = rows["ours-fast"]
  assert fast["bytes"] < 1.05 * fast["entropy_bytes"] + 300  # tables
