"""The objective token by token, in NumPy and float64, from the papers."""

import math

import numpy as np

from composer_jax.rl.objective import ObjectiveConfig

NORMALISE = {"ppo": "constant", "gspo": "sequences", "cispo": "tokens"}
# Surrogates and corrections don't know of each other, so not all pairs.
CONFIGS = [
  ObjectiveConfig(
    surrogate=surrogate,
    correction=correction,
    normalise=NORMALISE[surrogate],
    clip_high=3.0 if surrogate == "cispo" else None,
  )
  for surrogate, corrections in {
    "ppo": ("none", "importance", "tis", "icepop", "kpop"),
    "gspo": ("none", "icepop"),
    "cispo": ("none", "kpop"),
  }.items()
  for correction in corrections
]
BUDGET = 40.0


def name_of(config):
  return f"{config.surrogate}-{config.correction}-{config.normalise}"


def weight(prox, mu, config):
  """Of one token; log-probabilities in, the paper's default numbers inside."""
  w, p, q = math.exp(prox - mu), math.exp(prox), math.exp(mu)

  def divergence(a, b):
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

  match config.correction:
    case "none":
      return 1.0
    case "importance":
      return w
    case "tis":
      return min(w, 2.0)
    case "icepop":
      return w if 0.5 <= w <= 5.0 else 0.0
    case "kpop":
      return w if max(divergence(p, q), divergence(q, p)) <= 2.0 else 0.0


def loss(logprobs, streams, config, frozen=None):
  """The loss; `frozen` is the policy that stop-gradients hold on to."""
  frozen = logprobs if frozen is None else frozen
  mask, segments, advantages, mu, prox = (np.asarray(x) for x in streams)
  sequences = {}
  for b, n in zip(*np.nonzero(mask), strict=True):
    sequences.setdefault((b, segments[b, n]), []).append((b, n))
  total = 0.0
  for tokens in sequences.values():
    mean = sum(frozen[t] - prox[t] for t in tokens) / len(tokens)
    for t in tokens:
      a = advantages[t]
      match config.surrogate:
        case "ppo":
          r = math.exp(logprobs[t] - prox[t])
          value = min(r * a, min(max(r, 0.8), 1.28) * a)
        case "gspo":
          s = math.exp(mean) * math.exp(logprobs[t] - frozen[t])
          value = min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a)
        case "cispo":
          value = min(math.exp(frozen[t] - prox[t]), 4.0) * a * logprobs[t]
      value *= weight(prox[t], mu[t], config)
      total += value / (len(tokens) if config.normalise == "sequences" else 1)
  return -total / divisor(mask, sequences, config)


def divisor(mask, sequences, config):
  return {
    "constant": BUDGET,
    "tokens": max(mask.sum(), 1),
    "sequences": max(len(sequences), 1),
  }[config.normalise]
