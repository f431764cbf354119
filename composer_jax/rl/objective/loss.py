"""The loss of a packed batch, and what it says about the policies' distance."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from composer_jax.rl.objective.advantages import k1, k3
from composer_jax.rl.objective.config import ObjectiveConfig
from composer_jax.rl.objective.corrections import (
  Correction,
  icepop,
  importance,
  kpop,
  tis,
)
from composer_jax.rl.objective.sums import count_segments, segment_totals
from composer_jax.rl.objective.surrogates import (
  Surrogate,
  cispo,
  ppo_clip,
  sequence_log_ratio,
)


class Streams(NamedTuple):
  """What the loss needs of each token, besides the policy's log-probability.

  Outside of the mask anything may stand, NaN too.

  Attributes:
    loss_mask: the tokens that the policy sampled and learns from.
    segment_ids: which sequence of its row a token belongs to.
    advantages: of the token's trajectory.
    sampler_logprobs: in the distribution that the token was sampled from.
    proximal_logprobs: of the policy to stay near. With one update a batch it is
      the policy itself: `stop_gradient(logprobs)`.
  """

  loss_mask: Bool[Array, "B N"]
  segment_ids: Int[Array, "B N"]
  advantages: Float[Array, "B N"]
  sampler_logprobs: Float[Array, "B N"]
  proximal_logprobs: Float[Array, "B N"]


def denominator(
  loss_mask: Bool[Array, "B N"],
  segment_ids: Int[Array, "B N"],
  budget: float | int,
  config: ObjectiveConfig,
) -> Float[Array, ""]:
  """What the loss is divided by. For micro-batches, give it the whole batch.

  Args:
    loss_mask: of the whole batch.
    segment_ids: of the whole batch.
    budget: for "constant": trajectories a batch times the most tokens that one
      may have, as Dr. GRPO (https://arxiv.org/abs/2503.20783) has it; whatever
      it is, it must not depend on what was sampled.
    config: whose `normalise` decides.

  Returns:
    `budget`, or the number of loss tokens (DAPO,
    https://arxiv.org/abs/2503.14476), or of sequences that have any (GRPO,
    https://arxiv.org/abs/2402.03300).

  Raises:
    ValueError: "constant", and the budget isn't positive.
  """
  match config.normalise:
    case "tokens":
      count = loss_mask.sum()
    case "sequences":
      count = count_segments(loss_mask, segment_ids)
    case "constant":
      if not budget > 0:
        raise ValueError(
          f"budget={budget} must be positive: trajectories a batch times the"
          " most tokens that one may have."
        )
      return jnp.float32(budget)
  return jnp.maximum(count, 1).astype(jnp.float32)


def policy_loss(
  logprobs: Float[Array, "B N"],
  streams: Streams,
  divide_by: Float[Array, ""],
  config: ObjectiveConfig,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  """The loss: -1/divide_by * sum of weight * correction * surrogate.

  A token that a correction masks still counts in `divide_by`. Arithmetic is in
  float32, or float64 if that is what comes in.

  Args:
    logprobs: of the policy, differentiable.
    streams: of the same shape.
    divide_by: from `denominator`.
    config: which surrogate, correction and weight.

  Returns:
    The loss, and scalars over the loss tokens given: `ratio_mean`, `ratio_p99`
    and `ratio_max` of the surrogate's ratio, policy against proximal;
    `clipped`, the share of tokens clipped by the surrogate; `corrected`, the
    share truncated or masked by the correction; `mismatch_k1`, `mismatch_k3`
    (estimates of KL(sampler, proximal), nats a token) and `mismatch_max` (the
    largest difference of a token's two log-probabilities); `tokens`.

  Raises:
    ValueError: a stream has another shape, or the mask isn't boolean.
  """
  _check(logprobs, streams)
  mask = streams.loss_mask

  def clean(x):
    # First of all, so that what is masked can't reach a gradient as 0 * NaN.
    return jnp.where(mask, x.astype(jnp.promote_types(x.dtype, jnp.float32)), 0)

  logprobs = clean(logprobs)
  advantages, sampler, proximal = (
    stop_gradient(clean(x))
    for x in (
      streams.advantages,
      streams.sampler_logprobs,
      streams.proximal_logprobs,
    )
  )
  streams = streams._replace(
    advantages=advantages, sampler_logprobs=sampler, proximal_logprobs=proximal
  )
  surrogate = _surrogate(logprobs, streams, config)
  correction = _correction(proximal, sampler, config)
  terms = correction.weight * surrogate.objective
  if config.normalise == "sequences":
    ones = jnp.ones_like(terms)
    length = segment_totals(ones, mask, streams.segment_ids)
    terms = terms / jnp.maximum(length, 1)
  # Outside of the mask advantages, and so terms, are 0.
  loss = -terms.sum() / divide_by
  return loss, _metrics(streams, surrogate, correction)


def _surrogate(
  logprobs: Float[Array, "B N"], streams: Streams, config: ObjectiveConfig
) -> Surrogate:
  low, high = config.clip_bounds
  log_ratio = logprobs - streams.proximal_logprobs
  match config.surrogate:
    case "ppo":
      return ppo_clip(log_ratio, streams.advantages, low, high)
    case "gspo":
      log_ratio = sequence_log_ratio(
        log_ratio, streams.loss_mask, streams.segment_ids
      )
      return ppo_clip(log_ratio, streams.advantages, low, high)
    case "cispo":
      return cispo(logprobs, log_ratio, streams.advantages, low, high)


def _correction(
  proximal: Float[Array, "B N"],
  sampler: Float[Array, "B N"],
  config: ObjectiveConfig,
) -> Correction:
  low, high = config.correction_bounds
  match config.correction:
    case "none":
      ones = jnp.ones_like(proximal)
      return Correction(ones, jnp.zeros_like(ones, bool))
    case "importance":
      return importance(proximal, sampler)
    case "tis":
      return tis(proximal, sampler, high)
    case "icepop":
      return icepop(proximal, sampler, low, high)
    case "kpop":
      return kpop(proximal, sampler, high)


def _metrics(
  streams: Streams, surrogate: Surrogate, correction: Correction
) -> dict[str, Float[Array, ""]]:
  mask = streams.loss_mask
  count = mask.sum()

  def mean(x):
    return jnp.where(mask, x, 0).sum() / jnp.maximum(count, 1)

  # Ratios are positive, so the zeros of what is masked are sorted first. The
  # nearest rank, in integers: float32 can't count a batch's tokens.
  ratios = stop_gradient(jnp.where(mask, surrogate.ratio, 0)).reshape(-1)
  ranked = jnp.sort(ratios)
  sampler, proximal = streams.sampler_logprobs, streams.proximal_logprobs
  return {
    "ratio_mean": mean(stop_gradient(surrogate.ratio)),
    "ratio_p99": ranked[ranked.size - 1 - count // 100],
    "ratio_max": ranked[-1],
    "clipped": mean(surrogate.clipped),
    "corrected": mean(correction.hit),
    "mismatch_k1": mean(k1(sampler, proximal)),
    "mismatch_k3": mean(k3(sampler, proximal)),
    "mismatch_max": jnp.abs(sampler - proximal).max(),
    "tokens": count.astype(jnp.float32),
  }


def _check(logprobs: Float[Array, "B N"], streams: Streams) -> None:
  for name, stream in streams._asdict().items():
    if stream.shape != logprobs.shape:
      raise ValueError(
        f"{name} has shape {stream.shape}, but logprobs has {logprobs.shape}:"
        " streams must be token by token."
      )
  if streams.loss_mask.dtype != bool:
    raise ValueError(
      f"loss_mask is {streams.loss_mask.dtype}, but must be bool: compare it"
      " with 0."
    )
