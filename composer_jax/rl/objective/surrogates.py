"""What a token contributes: ratio and advantage, held near a proximal policy.

The proximal policy pi_prox is a recent one of the learner's, usually that of
the step's start; r = pi / pi_prox. Objectives are to be maximised.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from composer_jax.rl.objective.sums import segment_totals

# A factor of e^20 is as good as infinite, and stays finite with its gradient.
_MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
  """A surrogate's result.

  Attributes:
    objective: of each token, to be maximised.
    ratio: r, or GSPO's, before any clipping.
    clipped: tokens whose r the surrogate clipped.
  """

  objective: Float[Array, "B N"]
  ratio: Float[Array, "B N"]
  clipped: Bool[Array, "B N"]


def ratio(log_ratio: Float[Array, "B N"]) -> Float[Array, "B N"]:
  """exp, of logarithms in [-20, 20]; exactly 1 at 0."""
  return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def ppo_clip(
  log_ratio: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  low: float,
  high: float,
) -> Surrogate:
  """min(r A, clip(r, 1 - low, 1 + high) A).

  PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), with the two
  bounds apart as DAPO has them ("clip-higher", Yu et al. 2025,
  https://arxiv.org/abs/2503.14476). A clipped token has no gradient.

  Args:
    log_ratio: log r, differentiable.
    advantages: A.
    low: how far below 1 r may pull a token of negative advantage.
    high: how far above 1 r may push a token of positive advantage.
  """
  r = ratio(log_ratio)
  bounded = jnp.clip(r, 1 - low, 1 + high)
  # The minimum, written out: at a tie, JAX's would halve the gradient.
  clipped = bounded * advantages < r * advantages
  objective = jnp.where(clipped, stop_gradient(bounded), r) * advantages
  return Surrogate(objective, r, clipped)


def sequence_log_ratio(
  log_ratio: Float[Array, "B N"],
  loss_mask: Bool[Array, "B N"],
  segment_ids: Int[Array, "B N"],
) -> Float[Array, "B N"]:
  """GSPO's ratio: each token gets the mean log r of its sequence.

  Zheng et al. (2025), https://arxiv.org/abs/2507.18071: `ppo_clip` of
  s = (pi(y) / pi_prox(y))^(1/|y|). As their GSPO-token has it,
  sg[s] * pi_t / sg[pi_t]: summed over a sequence of one advantage, value and
  gradient are those of |y| s.

  Args:
    log_ratio: log r of the tokens, differentiable.
    loss_mask: the tokens that make up |y|.
    segment_ids: which sequence of its row a token belongs to. A trajectory in
      several context windows is several sequences.
  """
  fixed = stop_gradient(log_ratio)
  count = segment_totals(jnp.ones_like(fixed), loss_mask, segment_ids)
  total = segment_totals(fixed, loss_mask, segment_ids)
  return total / jnp.maximum(count, 1) + (log_ratio - fixed)


def cispo(
  logprobs: Float[Array, "B N"],
  log_ratio: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  low: float,
  high: float,
) -> Surrogate:
  """sg[clip(r, 1 - low, 1 + high)] * A * log pi: every token keeps a gradient.

  MiniMax (2025), https://arxiv.org/abs/2506.13585. The value means nothing, its
  gradient does.

  Args:
    logprobs: log pi, differentiable.
    log_ratio: log r.
    advantages: A.
    low: r counts as `1 - low` at least; 1 is no bound.
    high: r counts as `1 + high` at most.
  """
  r = stop_gradient(ratio(log_ratio))
  weight = jnp.clip(r, 1 - low, 1 + high)
  return Surrogate(weight * advantages * logprobs, r, weight != r)
