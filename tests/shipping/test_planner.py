"""Few downloads, and the cheapest of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.shipping.errors import ChainError
from composer_jax.shipping.manifest import Delivery, Shard
from composer_jax.shipping.planner import plan, skip_distances


def delivery(base, size):
  return Delivery(base, "", (Shard("k", size, ""),))


def skip_chain(count):
  return {
    i: [delivery(i - d, 10 + d) for d in skip_distances(i)]
    + ([delivery(None, 10_000)] if i == 0 else [])
    for i in range(count)
  }


@given(have=st.integers(0, 200), behind=st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_downloads_grow_with_the_logarithm(have, behind):
  steps = plan(skip_chain(have + behind + 1), have + behind, have)
  # Bytes count, so a few cheap steps may replace a long one; 64 is longest.
  bound = 2 * math.log2(behind) + 1 + behind // 64
  assert len(steps) <= bound
  at = have
  for step in steps:
    assert step.delivery.base_version == at
    at = step.version
  assert at == have + behind


def test_two_deltas_a_version_on_average():
  assert sum(len(skip_distances(i)) for i in range(1000)) < 2000
  assert skip_distances(0) == []
  assert skip_distances(12) == [1, 2, 4]
  assert skip_distances(64, longest=16) == [1, 2, 4, 8, 16]


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_nothing_is_cheaper(data):
  """Against every path there is."""
  count = data.draw(st.integers(1, 6))
  edges = {
    i: [
      delivery(base, data.draw(st.integers(0, 9)))
      for base in [None, *range(i)]
      if data.draw(st.booleans())
    ]
    for i in range(count)
  }
  want = data.draw(st.integers(0, count - 1))
  have = data.draw(st.sampled_from([None, *range(count)]))
  broken = {
    (v, way.base_version)
    for v, ways in edges.items()
    for way in ways
    if data.draw(st.integers(0, 4)) == 0
  }

  def prices(version):
    if version is None or version == have:
      yield 0
    for way in [] if version is None else edges[version]:
      if (version, way.base_version) not in broken:
        for price in prices(way.base_version):
          yield price + way.size

  best = min(prices(want), default=None)
  if best is None:
    with pytest.raises(ChainError, match=f"version {want}"):
      plan(edges, want, have, broken)
    return
  steps = plan(edges, want, have, broken)
  assert sum(step.delivery.size for step in steps) == best
  assert (not steps) == (have == want)
  for before, after in itertools.pairwise(steps):
    assert after.delivery.base_version == before.version
  if steps:
    assert steps[0].delivery.base_version in {None, have}
    assert steps[-1].version == want


def test_rolling_back_starts_from_a_snapshot():
  edges = {0: [delivery(None, 50)], 1: [delivery(0, 1)], 2: [delivery(1, 1)]}
  assert [step.version for step in plan(edges, 1, have=2)] == [0, 1]


def test_damage_is_gone_around():
  edges = skip_chain(9)
  first = plan(edges, 8, have=0)
  assert [step.version for step in first] == [8]
  around = plan(edges, 8, have=0, broken={(8, 0)})
  assert [step.version for step in around] == [4, 8]
