"""Weights for tokens that another program than the learner sampled.

The sampler's probability mu differs from the proximal policy's pi_prox by other
kernels and number formats, by experts that flipped, by weights that moved on.
Each rule turns w = pi_prox / mu into a weight. Weights are constants to
differentiation, and exactly 1 where both agree. NaN is no reason to mask: it
reaches the loss.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from composer_jax.rl.objective.surrogates import ratio

# The published implementations keep probabilities this far from 0 and 1.
_MARGIN = 1e-6


class Correction(NamedTuple):
  """A rule's result.

  Attributes:
    weight: of each token.
    hit: tokens whose w the rule truncated or masked.
  """

  weight: Float[Array, "B N"]
  hit: Bool[Array, "B N"]


def importance(
  proximal: Float[Array, "B N"], sampler: Float[Array, "B N"]
) -> Correction:
  """The weight w itself. With `ppo_clip`, that is decoupled PPO.

  Hilton et al. (2022), https://arxiv.org/abs/2110.00641, and AReaL (Fu et al.
  2025), https://arxiv.org/abs/2505.24298:
  (pi_prox / mu) * min(r A, clip(r) A), r = pi / pi_prox.

  Args:
    proximal: log-probabilities of the proximal policy.
    sampler: log-probabilities of the distribution sampled from.
  """
  w = stop_gradient(ratio(proximal - sampler))
  return Correction(w, jnp.zeros_like(w, bool))


def tis(
  proximal: Float[Array, "B N"], sampler: Float[Array, "B N"], cap: float
) -> Correction:
  """min(w, cap): truncated importance sampling.

  Yao et al. (2025), https://fengyao.notion.site/off-policy-rl.

  Args:
    proximal: log-probabilities of the proximal policy.
    sampler: log-probabilities of the distribution sampled from.
    cap: the largest weight.
  """
  w = importance(proximal, sampler).weight
  return Correction(jnp.minimum(w, cap), w > cap)


def icepop(
  proximal: Float[Array, "B N"],
  sampler: Float[Array, "B N"],
  low: float,
  high: float,
) -> Correction:
  """The weight w inside [low, high], else 0.

  Ling Team (2025), https://arxiv.org/abs/2510.18855 and
  https://ringtech.notion.site/icepop.

  Args:
    proximal: log-probabilities of the proximal policy.
    sampler: log-probabilities of the distribution sampled from.
    low: the least w that is kept.
    high: the largest w that is kept.
  """
  w = importance(proximal, sampler).weight
  hit = (w < low) | (w > high)
  return Correction(jnp.where(hit, 0, w), hit)


def kpop(
  proximal: Float[Array, "B N"], sampler: Float[Array, "B N"], threshold: float
) -> Correction:
  """The weight w where neither binary divergence exceeds a threshold, else 0.

  Guo et al. (2026), https://ringtech.notion.site/kpop, and
  https://github.com/areal-project/AReaL/pull/1405. With p = pi_prox and q = mu
  of the sampled token, against all other tokens taken together:
  max(D(p, q), D(q, p)) <= threshold,
  D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

  Args:
    proximal: log-probabilities of the proximal policy.
    sampler: log-probabilities of the distribution sampled from.
    threshold: in nats.
  """
  w = importance(proximal, sampler).weight
  p, q = (
    jnp.clip(jnp.exp(x), _MARGIN, 1 - _MARGIN)
    for x in (stop_gradient(proximal), stop_gradient(sampler))
  )
  log_odds = jnp.log(p / q), jnp.log1p(-p) - jnp.log1p(-q)
  forward = p * log_odds[0] + (1 - p) * log_odds[1]
  reverse = -(q * log_odds[0] + (1 - q) * log_odds[1])
  hit = jnp.maximum(forward, reverse) > threshold
  return Correction(jnp.where(hit, 0, w), hit)
