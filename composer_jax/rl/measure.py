"""What an update's batch says of the policy, its sampler, and its routers."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from composer_jax.models.moe import imbalance
from composer_jax.rl import objective as objective_lib
from composer_jax.rl.batch import RlBatch, flat
from composer_jax.rl.objective import ObjectiveConfig, Streams
from composer_jax.rl.update import Facts

_policy_loss = jax.jit(objective_lib.policy_loss, static_argnums=3)


def measure(
  batch: RlBatch,
  facts: Facts,
  divide_by: float,
  objective: ObjectiveConfig,
  *,
  anchored: bool,
) -> dict[str, float]:
  """Metrics of a batch, before its update.

  Args:
    batch: what was learnt from.
    facts: of the forward passes, `[M, ...]` each, on the host.
    divide_by: see `objective.denominator`.
    objective: what is minimised.
    anchored: False if the proximal policy is the policy itself.

  Returns:
    `loss`; all of `objective.policy_loss`'s metrics; what `mismatch` says;
    `entropy` of the policy (nats a token); `trajectories`, `micro_batches`,
    `padding` (share of all places that hold none). With a reference policy
    `reference_k1` and `reference_k3`, of KL(sampler, reference) a token. For
    MoE models `z_loss` a token and layer, and `imbalance` of the worst layer.
    With a replay `replay_missing` (share of tokens without a route),
    `replay_flipped` (share of the routers that would have chosen otherwise),
    `replay_replaced` (share of the replayed experts that were too implausible).
  """
  mask, valid = batch.loss_mask, batch.segment_ids > 0
  streams = Streams(
    loss_mask=mask,
    segment_ids=batch.segment_ids,
    advantages=batch.advantages,
    sampler_logprobs=batch.sampler_logprobs,
    proximal_logprobs=batch.proximal_logprobs if anchored else facts.logprobs,
  )
  loss, scalars = _policy_loss(
    flat(facts.logprobs), Streams(*map(flat, streams)), divide_by, objective
  )
  metrics = {name: float(value) for name, value in scalars.items()} | {
    "loss": float(loss),
    **mismatch(facts.logprobs, batch),
    "entropy": float(facts.entropy[mask].mean()),
    "trajectories": float(len(batch.rewards)),
    "micro_batches": float(len(batch.tokens)),
    "padding": float(1 - valid.mean()),
  }
  if batch.reference_logprobs is not None:
    pair = batch.sampler_logprobs, batch.reference_logprobs
    pair = [jnp.asarray(logprobs[mask]) for logprobs in pair]
    metrics["reference_k1"] = float(objective_lib.k1(*pair).mean())
    metrics["reference_k3"] = float(objective_lib.k3(*pair).mean())
  if facts.load is not None:
    load = facts.load.sum(axis=0)
    metrics["z_loss"] = float(facts.z_loss.sum() / valid.sum() / len(load))
    metrics["imbalance"] = float(imbalance(jnp.asarray(load)).max())
  if facts.replay is not None:
    counts = [int(count.sum()) for count in facts.replay]
    missing, routers, flipped, replaced = counts
    metrics |= {
      "replay_missing": missing / valid.sum(),
      "replay_flipped": flipped / max(routers, 1),
      "replay_replaced": replaced / max(routers, 1) / batch.routes.shape[-1],
    }
  return metrics


def mismatch(
  logprobs: Float[np.ndarray, "M B S"], batch: RlBatch
) -> dict[str, float]:
  """`mismatch_mean`, `mismatch_p99` of |log policy - log sampler| a token."""
  apart = np.abs(logprobs - batch.sampler_logprobs)[batch.loss_mask]
  return {
    "mismatch_mean": float(apart.mean()),
    "mismatch_p99": float(np.quantile(apart, 0.99)),
  }
