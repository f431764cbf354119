"""Admission and the books: small cases by hand, and whole runs by chance."""

import collections
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.rl.buffer import Buffer, BufferConfig, Ids, admit, lags, room
from composer_jax.rl.trajectory import Group, Sampling, Trajectory

CONFIG = BufferConfig(groups=2, group_size=3, staleness=1, deadline_s=10.0)


def trajectory(reward=0.0, versions=(-1, 5, 5), task_id="t"):
  versions = np.array(versions, np.int32)
  sampled = versions >= 0
  return Trajectory(
    token_ids=np.arange(len(versions), dtype=np.int32),
    loss_mask=sampled,
    logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
    versions=versions,
    routes=None,
    sampling=Sampling(),
    rewards={"solved": reward},
    task_id=task_id,
    stop_reason="finish",
  )


def group_of(*trajectories, **failures):
  return Group("t", trajectories, failures)


def test_what_is_fresh_and_mixed_is_admitted_untouched():
  ones = [trajectory(r) for r in (0.0, 1.0, 0.0)]
  admitted = admit(group_of(*ones), range(6 + 1), CONFIG)
  assert admitted.trajectories == tuple(ones)
  assert not admitted.discarded
  assert admitted.masked_tokens == 0


@pytest.mark.parametrize(
  ("group", "version", "discarded"),
  [
    (group_of(trajectory(1.0), trajectory(1.0)), 5, {"equal_rewards": 2}),
    (group_of(trajectory(1.0)), 5, {"group_too_small": 1}),
    (group_of(trajectory(0.0), trajectory(1.0)), 7, {"stale": 2}),
    (
      group_of(trajectory(1.0), sandbox=2),
      5,
      {"failed/sandbox": 2, "group_too_small": 1},
    ),
    (
      group_of(trajectory(1.0), trajectory(0.0, [-1, 3, 6])),
      6,
      {"stale": 1, "group_too_small": 1},
    ),
    (
      group_of(trajectory(1.0), trajectory(0.0, [-1, -1])),
      5,
      {"unusable": 1, "group_too_small": 1},
    ),
  ],
)
def test_what_is_not_admitted_is_counted_by_reason(group, version, discarded):
  admitted = admit(group, range(version + 1), CONFIG)
  assert admitted.trajectories == ()
  assert admitted.discarded == discarded


def test_tokens_that_are_too_old_lose_their_loss_alone():
  config = BufferConfig(
    groups=1, group_size=2, max_token_lag=1, max_trajectory_lag=3
  )
  old = trajectory(1.0, [-1, 3, 4, -1, 5, 6])
  admitted = admit(group_of(old, trajectory(0.0)), range(6 + 1), config)
  assert admitted.masked_tokens == 2
  left = admitted.trajectories[0]
  assert left.versions.tolist() == [-1, -1, -1, -1, 5, 6]
  assert left.loss_mask.tolist() == [False] * 4 + [True] * 2
  assert left.logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.5]
  np.testing.assert_array_equal(left.token_ids, old.token_ids)


def test_lags_count_versions_over_gaps_in_their_numbers():
  versions = np.array([2, 3, 5, 9, 9])
  assert lags(versions, [2, 3, 5, 9]).tolist() == [3, 2, 1, 0, 0]


@pytest.mark.parametrize(
  ("staleness", "outstanding", "expected"),
  [(0, 0, 4), (0, 4, 0), (0, 5, 0), (1, 4, 4), (1, 7, 1), (4, 0, 20)],
)
def test_room(staleness, outstanding, expected):
  config = BufferConfig(groups=4, staleness=staleness)
  assert room(outstanding, config) == expected


def test_a_stuck_rollout_stalls_its_group_until_the_deadline_only():
  buffer = Buffer(BufferConfig(groups=1, group_size=3, deadline_s=10.0))
  buffer.order(0, "t", 3, now=100.0)
  buffer.add(0, 0, group_of(trajectory(0.0)))
  buffer.add(0, 2, group_of(trajectory(1.0)))
  assert buffer.draw(range(6), now=109.9) is None
  batch = buffer.draw(range(6), now=110.0)
  assert len(batch.groups[0].trajectories) == 2
  assert buffer.counts == {"ordered": 3, "trained": 2, "missed_deadline": 1}
  # What comes late is of no use, and is not counted again.
  assert not buffer.add(0, 1, group_of(trajectory(1.0)))
  assert buffer.counts.total() == 6


def test_a_group_that_waits_holds_up_no_other():
  buffer = Buffer(BufferConfig(groups=1, group_size=2))
  for group in (0, 1):
    buffer.order(group, "t", 2, now=0.0)
  for member, reward in enumerate((0.0, 1.0)):
    buffer.add(1, member, group_of(trajectory(reward)))
  assert list(buffer.draw(range(6), now=1.0).groups) == [1]


def test_there_is_room_again_when_a_version_is_published():
  buffer = Buffer(BufferConfig(groups=1, group_size=2, staleness=0))
  buffer.order(0, "t", 2, now=0.0)
  assert buffer.room == 0
  for member, reward in enumerate((0.0, 1.0)):
    buffer.add(0, member, group_of(trajectory(reward)))
  batch = buffer.draw(range(6), now=1.0)
  assert buffer.room == 0  # Nothing is begun on the weights before.
  assert batch.lags == {0: 4}
  buffer.trained(batch)
  assert buffer.room == 1


def test_discarded_groups_make_room():
  buffer = Buffer(BufferConfig(groups=1, group_size=2, staleness=0))
  buffer.order(0, "t", 2, now=0.0)
  for member in range(2):
    buffer.add(0, member, group_of(trajectory(1.0)))
  assert buffer.draw(range(6), now=1.0) is None
  assert buffer.room == 1
  assert buffer.counts["equal_rewards"] == 2


def test_ids_are_used_once():
  buffer = Buffer(CONFIG)
  buffer.order(0, "t", 2, now=0.0)
  with pytest.raises(ValueError, match="Group 0 was ordered before"):
    buffer.order(0, "t", 2, now=0.0)
  buffer.draw(range(6), now=1e9)
  with pytest.raises(ValueError, match="Group 0 was ordered before"):
    buffer.order(0, "t", 2, now=0.0)


def test_a_batch_that_no_checkpoint_knows_is_trained_on_again():
  config = BufferConfig(groups=1, group_size=2)
  buffer = Buffer(config)

  def deliver(buffer):
    for member, reward in enumerate((0.0, 1.0)):
      buffer.add(0, member, group_of(trajectory(reward)))
    return buffer.draw(range(6), now=1.0)

  buffer.order(0, "t", 2, now=0.0)
  state = json.loads(json.dumps(buffer.state()))
  assert deliver(buffer)
  again = Buffer(config, state)
  again.order(0, "t", 2, now=0.0)
  assert again.lost() == []
  assert list(deliver(again).groups) == [0]
  assert again.counts == {"ordered": 2, "trained": 2}


def test_orders_that_nobody_knows_of_are_counted_as_lost():
  buffer = Buffer(CONFIG)
  for group in range(3):
    buffer.order(group, "t", 3, now=0.0)
  again = Buffer(CONFIG, buffer.state())
  again.order(1, "t", 3, now=0.0)
  again.order(4, "t", 3, now=0.0)
  assert again.lost() == [0, 2, 3]
  assert again.counts == {"ordered": 15, "lost": 9}


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"groups": 0}, "groups=0 must be at least 1"),
    ({"group_size": 1}, "group_size=1 must be at least 2"),
    ({"min_group": 9}, "min_group=9 is above group_size=8"),
    ({"max_token_lag": 3, "max_trajectory_lag": 2}, "max_token_lag=3 must"),
    ({"deadline_s": 0.0}, "deadline_s=0.0 must be above 0"),
  ],
)
def test_a_config_that_cannot_work_says_why(wrong, message):
  with pytest.raises(ValueError, match=message):
    BufferConfig(**wrong)


@given(st.lists(st.integers(0, 30)))
def test_ids_are_a_set(numbers):
  ids, plain = Ids(), set()
  for number in numbers:
    ids.add(number)
    plain.add(number)
    assert {i for i in range(40) if i in ids} == plain
  again = Ids(**json.loads(json.dumps(ids.state())))
  assert {i for i in range(40) if i in again} == plain


@settings(max_examples=150, deadline=None)
@given(
  st.data(),
  st.integers(1, 3),
  st.integers(2, 4),
  st.integers(0, 2),
)
def test_every_rollout_ends_once_whatever_happens(
  data, groups, size, staleness
):
  """Orders, arrivals, losses, training and crashes in any order.

  The oracle keeps its own books of what the surviving history trained on.
  """
  config = BufferConfig(groups, size, staleness, deadline_s=5.0)
  buffer = Buffer(config)
  saved, trained_then = buffer.state(), []
  tickets, files, trained = {}, {}, []
  published, now = [0], 0.0
  for _ in range(data.draw(st.integers(0, 40))):
    now += data.draw(st.sampled_from([0.0, 1.0, 6.0]))
    act = data.draw(st.sampled_from(["order", "add", "train", "save", "crash"]))
    if act == "order" and buffer.room:
      tickets[buffer.next_id] = now
      buffer.order(buffer.next_id, "t", size, now)
      assert buffer.outstanding <= groups * (staleness + 1)
    elif act == "add" and tickets:
      group = data.draw(st.sampled_from(sorted(tickets)))
      member = data.draw(st.integers(0, size - 1))
      kind = data.draw(st.sampled_from(["good", "bad", "failed"]))
      result = group_of(
        *(
          []
          if kind == "failed"
          else [_made(kind, group, member, published[-1])]
        ),
        **({"sandbox": 1} if kind == "failed" else {}),
      )
      if (group, member) not in files:
        files[group, member] = result
        buffer.add(group, member, result)
    elif act == "train" and (batch := buffer.draw(published, now)):
      assert len(batch.groups) == groups
      assert max(batch.lags, default=0) <= staleness
      for group in batch.groups.values():
        assert 2 <= len(group.trajectories) <= size
        assert len({t.reward for t in group.trajectories}) > 1
        trained += [int(t.token_ids[0]) for t in group.trajectories]
      published.append(published[-1] + 1)
      buffer.trained(batch)
    elif act == "save":
      saved, trained_then = json.loads(json.dumps(buffer.state())), [*trained]
      files = {k: v for k, v in files.items() if k[0] not in buffer.settled}
      tickets = {k: v for k, v in tickets.items() if k not in buffer.settled}
    elif act == "crash":
      buffer, trained = Buffer(config, saved), [*trained_then]
      # A learner that goes on takes the chain over, and publishes anew.
      published.append(published[-1] + 2)
      for group, ordered in tickets.items():
        if group not in buffer.settled:
          buffer.order(group, "t", size, ordered)
      assert buffer.lost() == []
      for (group, member), result in files.items():
        buffer.add(group, member, result)
    counts = collections.Counter(buffer.counts)
    ordered = counts.pop("ordered", 0)
    assert ordered == size * buffer.next_id
    assert counts.total() + size * buffer.outstanding == ordered
    assert counts["trained"] == len(trained) == len(set(trained))


def _made(kind, group, member, version):
  """A trajectory whose first token says which one it is."""
  one = trajectory(float(kind == "good"), [-1, version, version])
  ids = np.array([group * 100 + member, 1, 2], np.int32)
  return Trajectory(**{**vars(one), "token_ids": ids})
