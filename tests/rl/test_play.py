"""Whole rollouts of real tasks in real sandboxes, by a scripted policy."""

import asyncio
import itertools

import numpy as np
import pytest

from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.rewards import RewardConfig
from composer_jax.envs.tasks import micro
from composer_jax.envs.tasks.validate import build
from composer_jax.rl.play import play_task
from composer_jax.rl.rollout import Rollouts
from tests.rl.rollout_rig import DIALECT, FakeServer, call, pool_of

pytestmark = pytest.mark.sandbox


def test_tasks_are_worked_on_and_scored():
  rewards = RewardConfig({"solved": 1.0, "format": 0.5})

  async def body():
    provider = Bubblewrap(LIMITS)
    candidates = itertools.islice(micro.generate(5), 1)
    ((task,), _) = await build(provider, candidates)
    play = play_task(provider, DIALECT, task, rewards)
    writes = [
      call("write_file", path=path, content=text)
      for path, text in task.gold.items()
    ]
    scripts = {
      "solved": (*writes, call("finish")),
      "untouched": ("I will not.",),
      # A tree that nobody can archive is a result, and not a good one.
      "hidden": (
        call("run_command", command="touch x; chmod 0 x"),
        *writes,
        call("finish"),
      ),
    }
    found = {}
    for name, replies in scripts.items():
      async with pool_of(FakeServer(replies=replies)) as pool:
        rollouts = Rollouts(pool)
        found[name] = await rollouts.rollout(task.task_id, play, (1,))
    return task, found

  task, found = asyncio.run(body())
  assert found["solved"].rewards == {"solved": 1.0, "format": 0.5}
  assert found["untouched"].rewards == {"solved": 0.0, "format": 0.5}
  assert found["hidden"].rewards == {"solved": 0.0, "format": 0.5}
  assert {t.task_id for t in found.values()} == {task.task_id}
  assert found["solved"].stop_reason == "finish"
  assert np.count_nonzero(np.diff(found["solved"].loss_mask)) == 3
