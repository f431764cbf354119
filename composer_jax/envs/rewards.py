"""What a rollout was worth, in named parts.

    reward = total(parts(transcript, verdict), RewardConfig())

A sandbox that fails raises `SandboxError` before anything is scored here: a
failure of the machinery is not one of the policy, and has no reward.
"""

import dataclasses
import math
from collections.abc import Mapping

from composer_jax.envs.harness import Transcript
from composer_jax.envs.tasks.verify import Verdict


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """Weights of the parts; 0 leaves one out.

  Attributes:
    solved: 1 where every hidden line is right, else 0.
    tests: the share of hidden lines that are right. A policy can gather it
      without solving anything; use it for models too weak to solve.
    bad_calls: minus the share of calls that could not be carried out.
    length: minus the length penalty.
    length_k: k of `length_penalty`.
    length_q: q of `length_penalty`.
    sampled_token: cost of a token that was sampled, in units of x.
    observed_token: cost of a token of a tool's output.
    call: cost of a call.
    turn: cost of a reply.
  """

  solved: float = 1.0
  tests: float = 0.0
  bad_calls: float = 0.1
  length: float = 0.0
  length_k: float = 1.0
  length_q: float = 0.5
  sampled_token: float = 1e-3
  observed_token: float = 1e-4
  call: float = 0.01
  turn: float = 0.01

  def __post_init__(self):
    if self.length_k <= 0:
      raise ValueError(f"length_k={self.length_k} must be above 0.")
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not math.isfinite(value) or value < 0:
        raise ValueError(f"{field.name}={value} must be finite, 0 or more.")


def length_penalty(x: float, k: float, q: float) -> float:
  """((1 + kx)^(1-q) - 1) / (k (1-q)), and log(1 + kx) / k where q is 1.

  Its slope is 1 at x = 0 and falls as (1 + kx)^-q: the tokens that an easy task
  needs are dear, those of a long one cheap.

  Source: the length penalty published for Composer 2.

  Args:
    x: what a rollout used, 0 or more, in units of the caller's.
    k: above 0; where the slope begins to fall.
    q: 0 is linear; 1 logarithmic.
  """
  grown = math.log1p(k * x)
  if q == 1:
    return grown / k
  return math.expm1((1 - q) * grown) / (k * (1 - q))


def parts(
  transcript: Transcript, verdict: Verdict, config: RewardConfig
) -> dict[str, float]:
  """Each part of a rollout's reward, weighted; they add up to the reward.

  Args:
    transcript: of the rollout.
    verdict: of the hidden test on what it left behind.
    config: the weights.
  """
  sampled = int(transcript.loss_mask.sum())
  # Before the first reply is the prompt, which the policy didn't choose.
  first = transcript.samples[0][0] if transcript.samples else 0
  observed = len(transcript.token_ids) - first - sampled
  used = (
    config.sampled_token * sampled
    + config.observed_token * (observed if transcript.samples else 0)
    + config.call * transcript.calls
    + config.turn * transcript.turns
  )
  # A call that couldn't even be read is a bad one, but not among the calls.
  tried = max(transcript.calls, transcript.bad_calls, 1)
  penalty = length_penalty(used, config.length_k, config.length_q)
  return {
    "solved": config.solved * verdict.ok,
    "tests": config.tests * verdict.passed / max(verdict.total, 1),
    "bad_calls": -config.bad_calls * (transcript.bad_calls / tried),
    "length": -config.length * penalty,
  }


def total(rewards: Mapping[str, float]) -> float:
  """The reward: the sum of its parts."""
  return math.fsum(rewards.values())
