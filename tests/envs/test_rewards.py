"""Rewards: each part by hand, and a rollout from task to reward."""

import asyncio
import dataclasses
import itertools
import math
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.harness import Transcript
from composer_jax.envs.rewards import RewardConfig, length_penalty, parts, total
from composer_jax.envs.tasks import micro
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import Verdict, verify


def transcript(**fields):
  mask = np.zeros(50, bool)
  mask[20:30] = mask[40:45] = True
  plain = Transcript(
    token_ids=np.arange(50, dtype=np.int32),
    loss_mask=mask,
    logprobs=np.zeros(50, np.float32),
    versions=np.zeros(50, np.int64),
    samples=((20, None), (40, None)),
    stop_reason="answer",
    turns=2,
    calls=4,
    bad_calls=1,
    final_text="",
    wall_s=1.0,
  )
  return dataclasses.replace(plain, **fields)


def test_parts_by_hand():
  config = RewardConfig(
    solved=2.0,
    tests=0.5,
    bad_calls=0.4,
    length=1.0,
    length_q=0.0,  # Linear, so that x itself shows.
    sampled_token=1.0,
    observed_token=0.1,
    call=10.0,
    turn=100.0,
  )
  found = parts(transcript(), Verdict(3, 4), config)
  # 15 tokens sampled; of the others after the prompt's 20, 15 observed.
  assert found == {
    "solved": 0.0,
    "tests": 0.375,
    "bad_calls": -0.1,
    "length": pytest.approx(-(15 + 1.5 + 40 + 200)),
  }
  assert total(found) == pytest.approx(0.375 - 0.1 - 256.5)
  assert parts(transcript(), Verdict(4, 4), config)["solved"] == 2.0


def test_a_rollout_that_said_nothing_or_nothing_readable():
  silent = transcript(
    samples=(), loss_mask=np.zeros(50, bool), turns=0, calls=0, bad_calls=0
  )
  config = RewardConfig(length=1.0)
  found = parts(silent, Verdict(0, 4, "exited"), config)
  assert total(found) == 0
  garbled = transcript(calls=0, bad_calls=3)
  assert parts(garbled, Verdict(0, 1), config)["bad_calls"] == -0.1


@given(
  st.floats(0, 1e6), st.floats(1e-3, 1e3), st.floats(0, 3), st.floats(0, 1e3)
)
def test_length_penalty_grows_ever_slower(x, k, q, step):
  penalty = length_penalty(x, k, q)
  assert 0 <= penalty <= x * (1 + 1e-9) + 1e-9
  further = length_penalty(x + step, k, q) - penalty
  assert further >= -1e-6
  assert further <= length_penalty(step, k, q) * (1 + 1e-6) + 1e-6


def test_length_penalty_against_the_formula():
  for x, k, q in ((3.0, 2.0, 0.5), (7.0, 0.1, 1.5), (2.0, 1.0, 0.0)):
    wanted = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert length_penalty(x, k, q) == pytest.approx(wanted, rel=1e-12)
  near = length_penalty(5.0, 2.0, 1 + 1e-9)
  assert length_penalty(5.0, 2.0, 1.0) == pytest.approx(near, rel=1e-6)
  assert length_penalty(5.0, 2.0, 1.0) == pytest.approx(math.log(11) / 2)


def test_wrong_weights_are_named():
  with pytest.raises(ValueError, match=r"length_k=0\.0 must be above 0"):
    RewardConfig(length_k=0.0)
  with pytest.raises(
    ValueError, match=r"tests=-1\.0 must be finite, 0 or more"
  ):
    RewardConfig(tests=-1.0)


@pytest.mark.skipif(
  not shutil.which("bwrap") and "CI" not in os.environ,
  reason="needs bubblewrap",
)
def test_a_solved_task_is_worth_more_than_an_untouched_one():
  async def test():
    provider = Bubblewrap(LIMITS)
    candidates = itertools.islice(micro.generate(5), 2)
    (task, *_), _ = await build(provider, candidates)
    worth = []
    for solved in (False, True):
      async with await start(provider, task, solved) as sandbox:
        snapshot = await sandbox.snapshot()
      verdict = await verify(provider, snapshot, task.probe)
      worth.append(total(parts(transcript(), verdict, RewardConfig())))
    assert worth[1] == worth[0] + 1

  asyncio.run(test())
