"""The benchmark of a loaded server, quick: nothing lost, nothing wrong."""

from benchmarks import serving_load


def test_no_token_is_lost_or_of_another_version(tmp_path):
  load = serving_load.QUICK
  row = serving_load.measure(load, tmp_path / "run", prefix_sharing=True)
  print(row)
  assert (row["failed"], row["lost"], row["wrong"]) == (0, 0, 0)
  assert row["requests"] == load.sessions * load.turns
  assert row["tokens"] == row["requests"] * load.sampled
  assert row["checked"] == row["tokens"]
  assert (row["stale"], row["backwards"]) == (0, 0)
  # Else nothing was shown: no swap came in between, or no page was shared, or
  # the check takes any version's weights for the right ones.
  assert row["swaps"] == load.versions - 1
  assert row["versions"] > 1
  assert row["prefix_hit_share"] > 0.3
  assert row["control"] > 0.9
