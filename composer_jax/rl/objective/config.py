"""The objective's choices, by name, and the numbers of their papers."""

import dataclasses
import math
from typing import Literal

# (clip_low, clip_high). PPO: DAPO's clip-higher, arXiv:2503.14476. GSPO:
# arXiv:2507.18071. CISPO: arXiv:2506.13585 leaves the lower side unbounded and
# doesn't publish the upper bound.
_CLIPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, None)}

# (correction_low, correction_high); None is a bound that the rule lacks. TIS:
# open-instruct's default (allenai/open-instruct#1503). IcePop and KPop: AReaL's
# examples (areal-project/AReaL#1424); a port of KPop has 0.1 as the paper's
# value (PrimeIntellect-ai/prime-rl#3283).
_CORRECTIONS = {
  "none": (None, None),
  "importance": (None, None),
  "tis": (None, 2.0),
  "icepop": (0.5, 5.0),
  "kpop": (None, 2.0),
}


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """What to minimise, by name.

  Published objectives, as combinations:

  * Dr. GRPO: the defaults, with `correction="none"`.
  * GRPO: `advantages="grpo"`, `normalise="sequences"`.
  * DAPO: `advantages="grpo"`, `normalise="tokens"`.
  * GSPO: `advantages="grpo"`, `surrogate="gspo"`, `normalise="sequences"`.
  * CISPO: `advantages="grpo"`, `surrogate="cispo"`, `normalise="tokens"`.
  * Decoupled PPO: `surrogate="ppo"`, `correction="importance"`.
  * TIS, IcePop, KPop: a correction, on top of any surrogate.

  A paper that knows one old policy only is had by `correction="none"` and the
  sampler's log-probabilities as the proximal ones.

  Attributes:
    advantages: see `group_advantages`.
    surrogate: see `ppo_clip`, `sequence_log_ratio` (GSPO), `cispo`.
    correction: weight of a token for proximal policy against sampler; see
      `importance`, `tis`, `icepop`, `kpop`; "none" is 1 everywhere.
    normalise: what the sum over tokens is divided by: "constant" (Dr. GRPO), a
      number fixed before sampling; "tokens", loss tokens of the batch;
      "sequences", so that the mean over a sequence's tokens is averaged over
      sequences. See `denominator`.
    kl_coef: of the KL divergence from the reference in the reward; see
      `penalise_kl`.
    clip_low: a ratio below `1 - clip_low` is clipped. None: the paper's value.
    clip_high: a ratio above `1 + clip_high` is clipped. None: as above.
    correction_low: IcePop's lower bound. None: as above.
    correction_high: TIS's cap, IcePop's upper bound, KPop's threshold in nats.
      None: as above.
  """

  advantages: Literal["dr_grpo", "grpo"] = "dr_grpo"
  surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
  correction: Literal["none", "importance", "tis", "icepop", "kpop"] = "tis"
  normalise: Literal["constant", "tokens", "sequences"] = "constant"
  kl_coef: float = 0.0
  clip_low: float | None = None
  clip_high: float | None = None
  correction_low: float | None = None
  correction_high: float | None = None

  def __post_init__(self):
    for name, choices in {
      "advantages": ("dr_grpo", "grpo"),
      "surrogate": tuple(_CLIPS),
      "correction": tuple(_CORRECTIONS),
      "normalise": ("constant", "tokens", "sequences"),
    }.items():
      if getattr(self, name) not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(
          f"{name}={getattr(self, name)!r} must be one of {listed}."
        )
    if self.surrogate == "cispo" and self.clip_high is None:
      raise ValueError(
        "surrogate='cispo' needs clip_high: its paper publishes no value."
      )
    for name, published in zip(
      ("correction_low", "correction_high"),
      _CORRECTIONS[self.correction],
      strict=True,
    ):
      if getattr(self, name) is not None and published is None:
        raise ValueError(
          f"{name}={getattr(self, name)} has no part in"
          f" correction={self.correction!r}: leave it at None."
        )
    low, high = self.correction_bounds
    # A ratio of exactly 1, sampler and learner agreed, must pass untouched.
    at_least_one = self.correction in ("tis", "icepop")
    for name, value, least, most in (
      ("kl_coef", self.kl_coef, 0, math.inf),
      ("clip_low", self.clip_bounds[0], 0, 1),
      ("clip_high", self.clip_bounds[1], 0, math.inf),
      ("correction_low", low, 0, 1),
      ("correction_high", high, 1 if at_least_one else 0, math.inf),
    ):
      # Written so that NaN is refused too.
      if value is not None and not least <= value <= most:
        raise ValueError(f"{name}={value} must lie in [{least}, {most}].")

  @property
  def clip_bounds(self) -> tuple[float, float]:
    """`clip_low` and `clip_high`, the paper's where not set."""
    return _filled((self.clip_low, self.clip_high), _CLIPS[self.surrogate])

  @property
  def correction_bounds(self) -> tuple[float | None, float | None]:
    """`correction_low` and `correction_high`, the paper's where not set."""
    return _filled(
      (self.correction_low, self.correction_high), _CORRECTIONS[self.correction]
    )


def _filled(given: tuple, published: tuple) -> tuple:
  pairs = zip(given, published, strict=True)
  return tuple(p if g is None else g for g, p in pairs)
