"""Trajectories: what is refused, and what comes back from the disk."""

import copy
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.rl.trajectory import Group, Sampling, Trajectory


def make(**changes) -> Trajectory:
  """Prompt 5 6, reply 7 8, observation 9, reply 3."""
  fields = {
    "token_ids": np.array([5, 6, 7, 8, 9, 3], np.int32),
    "loss_mask": np.array([0, 0, 1, 1, 0, 1], bool),
    "logprobs": np.array([0, 0, -1, -2, 0, -0.5], np.float32),
    "versions": np.array([-1, -1, 4, 5, -1, 5], np.int32),
    "routes": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    "sampling": Sampling(0.7),
    "rewards": {"tests": 1.0, "length": -0.25},
    "task_id": "t",
    "stop_reason": "finish",
  }
  return Trajectory(**fields | changes)


def test_reward_is_the_sum_of_its_parts():
  assert make().reward == 0.75
  parts = dict(zip("abcd", (1e16, 1.0, -1e16, 1.0), strict=True))
  assert make(rewards=parts).reward == 2.0


def test_routed_are_the_tokens_before_the_last_sampled_of_each_window():
  assert make().routed.tolist() == [True] * 5 + [False]
  # Windows 5 6 7 8 | 9 3: the passes over 8 and over 3 were never made.
  assert make(segments=(0, 4)).routed.tolist() == [
    *(True, True, True, False),
    *(True, False),
  ]
  ended_by_an_observation = np.array([0, 0, 1, 0, 0, 0], bool)
  only = np.where(ended_by_an_observation, [0, 0, 4, 0, 0, 0], -1)
  trajectory = make(
    loss_mask=ended_by_an_observation,
    logprobs=np.zeros(6, np.float32),
    versions=only.astype(np.int32),
  )
  assert trajectory.routed.tolist() == [True, True, *[False] * 4]


def test_arrays_cant_be_written_to():
  ids = np.array([5, 6, 7, 8, 9, 3], np.int32)
  trajectory = make(token_ids=ids)
  with pytest.raises(ValueError, match="read-only"):
    trajectory.token_ids[0] = 1
  ids[0] = 1  # The caller's own array stays as it was made.


MISTAKES = {
  "token_ids must be a NumPy array .int32., but is ndarray int64": {
    "token_ids": np.arange(6)
  },
  "loss_mask must be .* but is list": {"loss_mask": [True] * 6},
  "logprobs has 5 rows for 6 tokens": {"logprobs": np.zeros(5, np.float32)},
  "versions must be 0 or more where": {"versions": np.full(6, 4, np.int32)},
  "-1 elsewhere": {"versions": np.array([-2, -1, 4, 5, -1, 5], np.int32)},
  "routes must be .*unsigned": {"routes": np.zeros((6, 2, 2), np.int32)},
  "routes has 5 rows": {"routes": np.zeros((5, 2, 2), np.uint8)},
  "3D": {"routes": np.zeros((6, 2), np.uint8)},
  "must be finite and at most 0": {
    "logprobs": np.array([0, 0, np.nan, -2, 0, -1], np.float32)
  },
  "at most 0, and 0 where": {
    "logprobs": np.array([-1, 0, -1, -2, 0, -1], np.float32)
  },
  "must not be below 0": {"token_ids": np.array([5, -6, 7, 8, 9, 3], np.int32)},
  r"segments=\(0, 6\) must rise": {"segments": (0, 6)},
  r"segments=\(0, 3, 3\)": {"segments": (0, 3, 3)},
  r"segments=\(1,\)": {"segments": (1,)},
  r"segments=\(\)": {"segments": ()},
  "could not be scored": {"rewards": {"tests": float("nan")}},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_does_not_fit_is_refused(message):
  # Not `make`: jaxtyping's import hook would refuse wrong arrays by itself.
  trajectory = copy.copy(make())
  for name, value in MISTAKES[message].items():
    object.__setattr__(trajectory, name, value)
  with pytest.raises(ValueError, match=message):
    trajectory.__post_init__()


def test_sampling_and_groups_are_checked():
  for changes, message in (
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
    ({"top_k": -1}, "top_k=-1"),
  ):
    with pytest.raises(ValueError, match=message):
      Sampling(**changes)
  with pytest.raises(ValueError, match="task 't' is in the group of 'other'"):
    Group("other", (make(),))


@st.composite
def trajectories(draw, task_id):
  count = draw(st.integers(1, 12))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  sampled = rng.random(count) < draw(st.sampled_from((0.0, 0.5, 1.0)))
  dtype = draw(st.sampled_from((np.uint8, np.uint16, np.uint32)))
  shape = (count, draw(st.integers(0, 2)), draw(st.integers(0, 3)))
  high = np.iinfo(dtype).max
  cuts = draw(st.sets(st.integers(1, count)))
  finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
  # Made in the test: jaxtyping's import hook draws random names.
  return {
    "token_ids": rng.integers(0, 2**31, count).astype(np.int32),
    "loss_mask": sampled,
    "logprobs": np.where(sampled, -rng.exponential(size=count), 0).astype("f4"),
    "versions": np.where(sampled, rng.integers(0, 2**31, count), -1).astype(
      "i4"
    ),
    "routes": draw(
      st.sampled_from((None, rng.integers(0, high, shape).astype(dtype)))
    ),
    "sampling": Sampling(
      draw(st.floats(0, 2)), draw(st.floats(0.1, 1)), draw(st.integers(0, 9))
    ),
    "rewards": draw(st.dictionaries(st.text(max_size=5), finite, max_size=3)),
    "task_id": task_id,
    "stop_reason": draw(st.text(max_size=5)),
    "segments": (0, *sorted(cuts - {count})),
  }


@st.composite
def groups(draw):
  task_id = draw(st.text(max_size=5))
  several = draw(st.lists(trajectories(task_id), max_size=3))
  failures = draw(st.dictionaries(st.text(max_size=5), st.integers(0, 9)))
  return task_id, several, failures


@settings(deadline=None, max_examples=50)
@given(groups())
def test_what_was_saved_is_loaded(drawn):
  task_id, several, failures = drawn
  group = Group(task_id, tuple(Trajectory(**one) for one in several), failures)
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "group.npz"
    group.save(path)
    loaded = Group.load(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
  assert (loaded.task_id, loaded.failures) == (group.task_id, group.failures)
  for one, other in zip(loaded.trajectories, group.trajectories, strict=True):
    for field in dataclasses.fields(Trajectory):
      a, b = getattr(one, field.name), getattr(other, field.name)
      if isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
      else:
        assert type(a) is type(b) and a == b, field.name


def test_other_files_are_refused(tmp_path):
  path = tmp_path / "group.npz"
  Group("t", (make(),)).save(path)
  whole = path.read_bytes()
  with pytest.raises(FileNotFoundError):
    Group.load(tmp_path / "none.npz")
  # A pickle, which must not be read.
  np.savez(path, about=np.array([make()], object))
  with pytest.raises(ValueError, match="holds no group of trajectories"):
    Group.load(path)
  np.savez(path, about=np.frombuffer(b'{"format": 2}', np.uint8))
  with pytest.raises(ValueError, match="format is 2, not 1"):
    Group.load(path)
  rng = np.random.default_rng(0)
  for _ in range(300):
    damaged = bytearray(whole)
    if rng.random() < 0.5:
      damaged = damaged[: rng.integers(len(damaged))]
    else:
      damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
    path.write_bytes(damaged)
    # Bytes of the container that say nothing may change; anything else raises
    # the one error.
    try:
      again = Group.load(path)
    except ValueError as error:
      assert "holds no group of trajectories" in str(error)
    else:
      np.testing.assert_array_equal(
        again.trajectories[0].token_ids, make().token_ids
      )
