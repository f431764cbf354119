"""Packing: every sampled token exactly once, whole sequences, even work."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.rl import batch as batch_lib
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.trajectory import Group, Sampling
from tests.rl.learner_rig import make_groups, make_trajectory


def build(seed, sizes):
  """Groups of trajectories of given lengths, some in two context windows."""
  rng = np.random.default_rng(seed)
  groups = []
  for g, members in enumerate([*sizes, [(12, 0)]]):  # At least one.
    trajectories = []
    for length, start in members:
      trajectory = make_trajectory(rng, length=length, task_id=str(g))
      if 0 < start < length and not trajectory.loss_mask[start]:
        trajectory = dataclasses.replace(trajectory, segments=(0, start))
      trajectories.append(trajectory)
    groups.append(Group(str(g), tuple(trajectories)))
  return groups


@settings(max_examples=60, deadline=None)
@given(
  st.integers(0, 2**32 - 1),
  st.lists(
    st.lists(st.tuples(st.integers(4, 20), st.integers(0, 19)), max_size=5),
    max_size=4,
  ),
  st.sampled_from([(1, 1), (2, 2), (4, 2)]),
  st.booleans(),
)
def test_every_sampled_token_is_there_once_and_sequences_are_whole(
  seed, lengths, sizes, long_rows
):
  groups = build(seed, lengths)
  rows, ranks = sizes
  shape = BatchShape(rows, 40 if long_rows else 20)
  batch = batch_lib.pack(groups, shape, ranks=ranks)
  trajectories = [t for group in groups for t in group.trajectories]
  expected = collections.Counter()
  for index, t in enumerate(trajectories):
    for place in np.flatnonzero(t.loss_mask).tolist():
      start = max(s for s in t.segments if s <= place)
      context = tuple(t.token_ids[start:place].tolist())
      expected[
        index,
        context,
        int(t.token_ids[place]),
        float(t.logprobs[place]),
        int(t.versions[place]),
      ] += 1
  found = collections.Counter()
  for m, b, s in zip(*np.nonzero(batch.loss_mask), strict=True):
    # A row read as the model reads it: by segments and positions.
    same = batch.segment_ids[m, b, : s + 1] == batch.segment_ids[m, b, s]
    positions = batch.positions[m, b, : s + 1][same]
    assert positions.tolist() == list(range(len(positions)))
    found[
      int(batch.trajectories[m, b, s]),
      tuple(batch.tokens[m, b, : s + 1][same].tolist()),
      int(batch.targets[m, b, s]),
      float(batch.sampler_logprobs[m, b, s]),
      int(batch.versions[m, b, s]),
    ] += 1
  assert found == expected
  padding = batch.segment_ids == 0
  assert not batch.loss_mask[padding].any()
  assert (batch.trajectories[padding] == -1).all()
  assert (batch.trajectories[~padding] >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.integers(1, 50), min_size=1, max_size=60),
  st.sampled_from([1, 2, 4]),
)
def test_ranks_differ_by_one_sequence_at_most(lengths, ranks):
  lengths = np.array(lengths)
  costs = lengths + 0.1 * lengths**2
  # Rows that can't fill up: nothing but the rule decides.
  shape = BatchShape(4, int(lengths.sum()))
  rows, columns, micro_batches = batch_lib.place(lengths, costs, shape, ranks)
  assert micro_batches == 1
  work = np.bincount(rows // (4 // ranks), costs, ranks)
  assert work.max() - work.min() <= costs.max() + 1e-6
  for row in range(4):
    spans = sorted(
      (int(c), int(c + n))
      for c, n in zip(columns[rows == row], lengths[rows == row], strict=True)
    )
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1]


def test_rows_are_used_well():
  rng = np.random.default_rng(0)
  lengths = rng.integers(10, 400, 500)
  shape = BatchShape(8, 1024)
  _, _, micro_batches = batch_lib.place(lengths, 1.0 * lengths, shape, 4)
  assert lengths.sum() / (micro_batches * 8 * 1024) > 0.93


def test_the_same_groups_give_the_same_batch():
  one, two = (
    batch_lib.pack(make_groups(), BatchShape(4, 32), ranks=2) for _ in range(2)
  )
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)


def test_advantages_by_hand():
  rng = np.random.default_rng(0)
  groups = [
    Group("a", tuple(make_trajectory(rng, task_id="a", reward=r) for r in a))
    for a in [(1.0, 0.0, 0.0, 3.0), (), (2.0, 4.0)]
  ]
  batch = batch_lib.pack(groups, BatchShape(2, 64))
  batch = batch_lib.with_advantages(batch, ObjectiveConfig())
  by_hand = np.array([0.0, -1.0, -1.0, 2.0, -1.0, 1.0])
  mask = batch.loss_mask
  np.testing.assert_allclose(
    batch.advantages[mask], by_hand[batch.trajectories[mask]]
  )
  assert (batch.advantages[~mask] == 0).all()


def test_kl_in_the_reward_by_hand():
  rng = np.random.default_rng(0)
  trajectories = [make_trajectory(rng, reward=0.0) for _ in range(2)]
  batch = batch_lib.pack([Group("t", tuple(trajectories))], BatchShape(2, 12))
  config = ObjectiveConfig(kl_coef=0.5)
  # The reference finds each token e times less likely.
  reference = batch.sampler_logprobs - 1
  batch = batch._replace(reference_logprobs=reference)
  batch = batch_lib.with_advantages(batch, config)
  rewards = [-0.5 * t.loss_mask.sum() for t in trajectories]
  by_hand = np.array(rewards) - np.mean(rewards)
  mask = batch.loss_mask
  np.testing.assert_allclose(
    batch.advantages[mask], by_hand[batch.trajectories[mask]], atol=1e-5
  )
  with pytest.raises(ValueError, match=r"kl_coef=0\.5 needs the reference"):
    batch_lib.with_advantages(batch._replace(reference_logprobs=None), config)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"length": 40}, "seq_len=24"),
    ({"sampling": Sampling(top_p=0.9)}, "top_p=0.9"),
    ({"sampling": Sampling(top_k=5)}, "without top_p and top_k"),
    ({"sampling": Sampling(temperature=0.0)}, "temperatures above 0"),
    ({"prompt": 0, "loss_mask": np.ones(12, bool)}, "nothing to predict it"),
  ],
)
def test_what_cant_be_learnt_from_is_refused(changes, words):
  rng = np.random.default_rng(0)
  if "loss_mask" in changes:
    changes["versions"] = np.ones(12, np.int32)
  trajectory = make_trajectory(rng, **changes)
  with pytest.raises(ValueError, match=words):
    batch_lib.pack([Group("t", (trajectory,))], BatchShape(4, 24))


def test_batches_of_nothing_and_odd_ranks_are_refused():
  with pytest.raises(ValueError, match="no sampled token"):
    batch_lib.pack([Group("t", ())], BatchShape(4, 24))
  with pytest.raises(ValueError, match="multiple of the 3 ranks"):
    batch_lib.pack(make_groups(), BatchShape(4, 24), ranks=3)
