"""The least that a rollout can be."""

import numpy as np

from composer_jax.rl.trajectory import Sampling, Trajectory


def trajectory(task_id="a", value=0, solved=1.0):
  """One token of a prompt, and one that was sampled."""
  return Trajectory(
    token_ids=np.array([1, value], np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.array([0, -1], np.float32),
    versions=np.array([-1, 4], np.int32),
    routes=None,
    sampling=Sampling(),
    rewards={"solved": solved},
    task_id=task_id,
    stop_reason="finish",
  )
