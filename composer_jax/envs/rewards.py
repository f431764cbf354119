"""Rewards: named parts of what happened, weighted and added up.

    config = RewardConfig({"solved": 1.0, "format": 0.1, "length": 0.02})
    reward = await score(outcome, config)
    reward.total, reward.parts, reward.weighted, reward.failure

In every part more is better. A share of nothing (no call, no edit) is 1: with
advantages relative to a group, that is the same as a penalty for each bad one,
and a policy gains nothing by a harmless call or edit.

Where machinery failed there is no reward, rather than one of 0.
"""

import collections
import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from composer_jax.envs.lint import lint
from composer_jax.envs.outcome import Failure, InfrastructureError, Outcome


def length_cost(x: float, k: float, q: float) -> float:
  """Cost of effort, concave: each further unit costs (1 + k x)^-q.

  C(x) = ((1 + k x)^(1-q) - 1) / (k (1 - q)), from the Composer 2 report
  (Cursor 2026, https://arxiv.org/abs/2603.24477). A detour is felt on an easy
  task and hardly on a long one. q = 0 is linear, q = 1 (by continuity) is
  log(1 + k x) / k; beyond, the cost stays below 1 / (k (q - 1)).

  Args:
    x: effort, at least 0, in any unit; the cost has the same one.
    k: above 0; about an effort of 1/k the price begins to fall.
    q: at least 0; how fast it falls.
  """
  log = math.log1p(k * x)
  exponent = (1 - q) * log
  # expm1(t) / t is 1 at t = 0, where q = 1 or x = 0.
  return log / k * (math.expm1(exponent) / exponent if exponent else 1.0)


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
  """`length_cost` of a weighted sum of what a trajectory used.

  The report names the six terms, but no numbers: the defaults are ours. They
  count thousands of tokens, and halve the price at 3,000.

  Attributes:
    k: see `length_cost`.
    q: see `length_cost`.
    thinking_tokens: the weight of a token, as in the next three.
    tool_call_tokens: of calls.
    tool_output_tokens: of what tools answered.
    final_tokens: of the last message.
    calls: the weight of a tool call.
    turns: the weight of a reply.

  Raises:
    ValueError: a number is out of its range.
  """

  k: float = 1.0
  q: float = 0.5
  thinking_tokens: float = 1e-3
  tool_call_tokens: float = 1e-3
  tool_output_tokens: float = 1e-3
  final_tokens: float = 1e-3
  calls: float = 0.0
  turns: float = 0.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not (0 <= value < math.inf) or (field.name == "k" and value == 0):
        least = "above 0" if field.name == "k" else "at least 0"
        raise ValueError(
          f"{field.name} of a length penalty must be finite and {least}, got"
          f" {value}."
        )

  def __call__(self, outcome: Outcome) -> float:
    """The cost, at least 0."""
    effort = (
      self.thinking_tokens * outcome.thinking_tokens
      + self.tool_call_tokens * outcome.tool_call_tokens
      + self.tool_output_tokens * outcome.tool_output_tokens
      + self.final_tokens * outcome.final_tokens
      + self.calls * (outcome.calls_ok + outcome.calls_bad)
      + self.turns * outcome.turns
    )
    return length_cost(effort, self.k, self.q)


def _tests(outcome: Outcome) -> float:
  if not outcome.tests_total:
    raise InfrastructureError("verifier", "no hidden test was run")
  return outcome.tests_passed / outcome.tests_total


def _share(good: int, total: int) -> float:
  return good / total if total else 1.0


# What counts alone decide.
_COUNTED: dict[str, Callable[[Outcome], float]] = {
  "tests": _tests,
  "solved": lambda outcome: float(_tests(outcome) == 1.0),
  "finished": lambda outcome: float(outcome.finished),
  "format": lambda outcome: _share(
    outcome.calls_ok, outcome.calls_ok + outcome.calls_bad
  ),
}
_LINTED = ("compiles", "lint")
PARTS = (*_COUNTED, *_LINTED, "length")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """What is rewarded.

  Attributes:
    weights: of the parts by name, at least 0. With 0 a part is logged only.
      "tests": share of the hidden tests that passed. A policy can gather it
        without solving anything; it is for models too weak to solve.
      "solved": 1 if all did, else 0.
      "finished": 1 if the policy ended the work itself, else 0.
      "format": share of the tool calls that were well-formed.
      "compiles": share of the edited Python files that compile.
      "lint": share of them that break no rule more often than before.
      "length": minus the cost of the trajectory's length.
      Any other name is an aspect of the rubric, judged from 0 to 1.
    length: how length is counted.
    rubric: aspect -> what the judge should look at.

  Raises:
    ValueError: a part is unknown, or a weight out of range.
  """

  weights: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: {"solved": 1.0, "format": 0.1}
  )
  length: LengthPenalty = dataclasses.field(default_factory=LengthPenalty)
  rubric: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not self.weights:
      raise ValueError(
        "A reward needs a part with a weight, such as {'solved': 1.0}."
      )
    for aspect in self.rubric:
      if aspect in PARTS:
        raise ValueError(
          f"The rubric's {aspect!r} is a part of that name already: rename it."
        )
    known = (*PARTS, *self.rubric)
    for name, weight in self.weights.items():
      if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
          f"There is no part {name!r} of a reward.{hint} There are"
          f" {', '.join(known)}; the rubric adds aspects."
        )
      if not (0 <= weight < math.inf):
        raise ValueError(
          f"The weight of {name!r} must be finite and at least 0 (penalties are"
          f" negative themselves), got {weight}."
        )

  @property
  def aspects(self) -> dict[str, str]:
    """The part of the rubric that has weights."""
    return {a: text for a, text in self.rubric.items() if a in self.weights}


@dataclasses.dataclass(frozen=True)
class Reward:
  """What a trajectory is worth.

  Attributes:
    parts: each before its weight; empty after a failure.
    weights: of the parts.
    failure: of machinery; such a trajectory must not be trained on.
  """

  parts: Mapping[str, float]
  weights: Mapping[str, float]
  failure: Failure | None = None

  @property
  def weighted(self) -> dict[str, float]:
    """The parts, weighted; they add up to the total.

    Raises:
      InfrastructureError: machinery failed, so there are none.
    """
    if self.failure is not None:
      raise InfrastructureError(self.failure.where, self.failure.detail)
    return {name: self.weights[name] * x for name, x in self.parts.items()}

  @property
  def total(self) -> float:
    """The sum; NaN after a failure, so that using it can't go unnoticed."""
    failed = self.failure is not None
    return math.nan if failed else math.fsum(self.weighted.values())


@runtime_checkable
class Grader(Protocol):
  """Judges what no test can; see `composer_jax.envs.judge`."""

  async def grade(
    self, outcome: Outcome, rubric: Mapping[str, str]
  ) -> dict[str, float]:
    """Aspect -> a grade from 0 to 1.

    Raises:
      InfrastructureError: there are no grades.
    """


async def score(
  outcome: Outcome, config: RewardConfig, judge: Grader | None = None
) -> Reward:
  """What a trajectory is worth; a failure of machinery is marked, not raised.

  Args:
    outcome: what happened.
    config: what is rewarded.
    judge: of the rubric's aspects.

  Raises:
    ValueError: aspects have weights and there is no judge.
    ImportError: files are to be linted and ruff isn't installed.
  """
  if config.aspects and judge is None:
    raise ValueError(
      f"{', '.join(config.aspects)} can't be judged without a judge: pass one,"
      " or remove the weights."
    )
  if outcome.failure is not None:
    return Reward({}, config.weights, outcome.failure)
  try:
    parts = await _measured(outcome, config, judge)
  except InfrastructureError as error:
    return Reward({}, config.weights, error.failure)
  return Reward(parts, config.weights)


async def _measured(outcome, config, judge) -> dict[str, float]:
  wanted = config.weights
  found = {n: part(outcome) for n, part in _COUNTED.items() if n in wanted}
  if "length" in wanted:
    found["length"] = -config.length(outcome)
  if any(name in wanted for name in _LINTED):
    seen = await lint(outcome.edits)
    found["compiles"] = _share(seen.files - seen.broken, seen.files)
    found["lint"] = _share(seen.files - seen.worse, seen.files)
  if config.aspects:
    found |= await judge.grade(outcome, config.aspects)
  return {name: found[name] for name in wanted}


def usable(
  rewards: Sequence[Reward],
) -> tuple[list[int], collections.Counter[str]]:
  """Which trajectories may be trained on, and how many not, by what failed."""
  failures = [reward.failure for reward in rewards]
  kept = [i for i, failure in enumerate(failures) if failure is None]
  return kept, collections.Counter(f.where for f in failures if f is not None)


def summarize(rewards: Sequence[Reward]) -> dict[str, float]:
  """For a log: means of total and parts over the usable ones, and counts.

  Args:
    rewards: of one config.

  Returns:
    "reward/total" and "reward/<part>" (before weights), none if no trajectory
    is usable; "reward/count"; "excluded/<what failed>".
  """
  kept, excluded = usable(rewards)
  used = [rewards[i] for i in kept]
  summary = {"reward/count": float(len(used))}
  if used:
    summary["reward/total"] = math.fsum(r.total for r in used) / len(used)
    for name in used[0].parts:
      mean = math.fsum(r.parts[name] for r in used) / len(used)
      summary[f"reward/{name}"] = mean
  return summary | {f"excluded/{w}": float(n) for w, n in excluded.items()}
