"""Rollouts: a policy works on tasks, and trajectories come out.

    rollouts = Rollouts(Pool(endpoints), RolloutConfig())
    group = await rollouts.group(task_id, play, size=16, seed=(run, step))

`play` lets a sampler work on the task once and scores what it did; see
`composer_jax.rl.play`.

What machinery fails (a sandbox, an engine, a judge, the time) is no result of
the policy: such a rollout is begun anew with the same seed, so that failing
gives no second draw, and is counted where that doesn't help. It never gets a
reward. Everything else that is raised is somebody's mistake, and is raised
here.
"""

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from jaxtyping import UInt

from composer_jax.envs import harness
from composer_jax.envs.outcome import Failure, InfrastructureError
from composer_jax.envs.sandbox import SandboxError
from composer_jax.rl.endpoints import ServerError
from composer_jax.rl.sessions import Pool
from composer_jax.rl.trajectory import Group, Sampling, Trajectory

_log = logging.getLogger(__name__)

Rewards = Mapping[str, float]
# Lets a sampler work on a task, and scores what it did: the reward's parts.
Play = Callable[
  [harness.Sampler], Awaitable[tuple[harness.Transcript, Rewards]]
]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How rollouts are run.

  Attributes:
    sampling: the distribution that they sample from.
    max_rollouts: at once; more wait. Each may hold a sandbox.
    rollout_s: for one attempt at a rollout, its scoring included.
    attempts: at a rollout that the machinery fails.
  """

  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  max_rollouts: int = 64
  rollout_s: float = 3600.0
  attempts: int = 2

  def __post_init__(self):
    for name in ("max_rollouts", "rollout_s", "attempts"):
      value = getattr(self, name)
      if value <= 0:
        raise ValueError(f"{name}={value} must be above 0.")


class Rollouts:
  """Runs rollouts, so many at a time.

  Use it within one event loop. Cancelling a task that waits for a rollout
  cancels its request in the engine, and destroys its sandbox.

  Attributes:
    counts: of attempts: "done", and those that failed by `Failure.where`:
      "sandbox", "server", "time", or what a reward needs.
  """

  def __init__(self, pool: Pool, config: RolloutConfig | None = None):
    """Takes the engines to ask."""
    self.config = config or RolloutConfig()
    self.pool = pool
    self.counts: collections.Counter[str] = collections.Counter()
    self._slots = asyncio.Semaphore(self.config.max_rollouts)

  async def group(
    self, task_id: str, play: Play, size: int, seed: Sequence[int]
  ) -> Group:
    """Several rollouts of one task, at the same time.

    Args:
      task_id: the task.
      play: works on it.
      size: rollouts; those that fail are counted in the group instead.
      seed: another one for every group.
    """
    try:
      async with asyncio.TaskGroup() as tasks:
        running = [
          tasks.create_task(self.rollout(task_id, play, (*seed, member)))
          for member in range(size)
        ]
    except* Exception as errors:
      first = errors.exceptions[0]
    else:
      ended = [task.result() for task in running]
      return Group(
        task_id,
        tuple(e for e in ended if isinstance(e, Trajectory)),
        collections.Counter(e.where for e in ended if isinstance(e, Failure)),
      )
    raise first

  async def rollout(
    self, task_id: str, play: Play, seed: Sequence[int]
  ) -> Trajectory | Failure:
    """One rollout.

    Args:
      task_id: the task.
      play: works on it.
      seed: another one for every rollout.
    """
    async with self._slots:
      for attempt in range(1, self.config.attempts + 1):
        ended = await self._attempt(task_id, play, seed)
        if isinstance(ended, Trajectory):
          self.counts["done"] += 1
          break
        self.counts[ended.where] += 1
        _log.warning("Attempt %d at %s failed: %s", attempt, task_id, ended)
    return ended

  async def _attempt(self, task_id, play, seed) -> Trajectory | Failure:
    sampling, limit = self.config.sampling, self.config.rollout_s
    try:
      async with asyncio.timeout(limit) as clock:
        with self.pool.session(sampling, seed) as sampler:
          transcript, rewards = await play(sampler)
    except InfrastructureError as error:
      return error.failure
    except SandboxError as error:
      return Failure("sandbox", str(error))
    except ServerError as error:
      return Failure("server", str(error))
    except TimeoutError:
      if not clock.expired():
        raise
      return Failure("time", f"It took more than {limit:g} s.")
    return to_trajectory(transcript, sampling, rewards, task_id)


def to_trajectory(
  transcript: harness.Transcript,
  sampling: Sampling,
  rewards: Rewards,
  task_id: str,
) -> Trajectory:
  """What a learner needs of a transcript.

  Args:
    transcript: whose samples are a `composer_jax.rl.sessions.Session`'s.
    sampling: the distribution sampled from.
    rewards: the reward's parts.
    task_id: the task.

  Raises:
    ValueError: the samples don't fit the transcript.
  """
  return Trajectory(
    token_ids=transcript.token_ids.astype(np.int32),
    loss_mask=transcript.loss_mask,
    logprobs=transcript.logprobs.astype(np.float32),
    versions=transcript.versions.astype(np.int32),
    routes=_routes(transcript),
    sampling=sampling,
    rewards={name: float(part) for name, part in rewards.items()},
    task_id=task_id,
    stop_reason=transcript.stop_reason,
  )


def _routes(
  transcript: harness.Transcript,
) -> UInt[np.ndarray, "N L K"] | None:
  """Routes by position, each as it was when the position was first read."""
  samples = transcript.samples
  if not samples:
    return None
  first = samples[0][1].routes
  tokens = len(transcript.token_ids)
  routes = np.zeros((tokens, *first.shape[1:]), first.dtype)
  known = 0
  for start, sample in samples:
    stop = start + len(sample.token_ids) - 1
    if sample.route_start != known or len(sample.routes) != stop - known:
      raise ValueError(
        f"A sample at position {start} has routes of positions"
        f" {sample.route_start} to {sample.route_start + len(sample.routes)},"
        f" not {known} to {stop}."
      )
    routes[known:stop] = sample.routes
    known = stop
  return routes
