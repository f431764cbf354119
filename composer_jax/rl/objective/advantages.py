"""From rewards to advantages: KL in the reward, and the group as a baseline."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from composer_jax.rl.objective.sums import ids_of_loss, sums_by_id

# Keeps rewards that differ by rounding alone from becoming advantages of 1.
_STD_EPSILON = 1e-6


def group_advantages(
  rewards: Float[Array, "P G"],
  valid: Bool[Array, "P G"],
  kind: str = "dr_grpo",
) -> Float[Array, "P G"]:
  """How much better a trajectory did than the others of its task.

  Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783): R - mean(R).
  GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300):
  (R - mean(R)) / std(R), here the population's standard deviation plus 1e-6.

  Args:
    rewards: of G trajectories for each of P tasks.
    valid: which of them exist: False for a trajectory that was dropped or that
      no environment could judge. Its reward is not looked at.
    kind: which formula, "dr_grpo" or "grpo".

  Returns:
    The advantages: 0 where not valid, exactly 0 in a group of equal rewards.

  Raises:
    ValueError: unknown kind.
  """
  if kind not in ("dr_grpo", "grpo"):
    raise ValueError(f"kind={kind!r} must be one of 'dr_grpo', 'grpo'.")
  count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
  # From the least, so that equal rewards are exactly 0 before anything rounds.
  least = jnp.where(valid, rewards, jnp.inf).min(axis=1, keepdims=True)
  above = jnp.where(valid, rewards - least, 0)
  mean = above.sum(axis=1, keepdims=True) / count
  centred = jnp.where(valid, above - mean, 0)
  if kind == "dr_grpo":
    return centred
  variance = (centred**2).sum(axis=1, keepdims=True) / count
  return centred / (jnp.sqrt(variance) + _STD_EPSILON)


def k1(
  logprobs: Float[Array, "*shape"], reference: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """-log r, r = reference / policy: an unbiased sample of KL(policy, ref.).

  Schulman (2020), http://joschu.net/blog/kl-approx.html. Tokens are the
  policy's.
  """
  return logprobs - reference


def k3(
  logprobs: Float[Array, "*shape"], reference: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """(r - 1) - log r: unbiased as `k1` is, never negative, large tails.

  Schulman (2020), http://joschu.net/blog/kl-approx.html.
  """
  log_ratio = reference - logprobs
  return jnp.expm1(log_ratio) - log_ratio


def penalise_kl(
  rewards: Float[Array, " R"],
  logprobs: Float[Array, "B N"],
  reference: Float[Array, "B N"],
  loss_mask: Bool[Array, "B N"],
  trajectories: Int[Array, "B N"],
  coef: float,
) -> Float[Array, " R"]:
  """R - coef * (sum of `k1` over the trajectory's tokens).

  In the reward, since as a loss k1's expected gradient is zero, and a token's
  own term leaves out what it does to later ones: Tang and Munos (2025),
  https://arxiv.org/abs/2506.09477. No gradient flows.

  Args:
    rewards: of R trajectories.
    logprobs: of the policy that sampled, or of the learner at that version.
    reference: log-probabilities of the reference policy.
    loss_mask: the tokens that the policy sampled.
    trajectories: each token's index into `rewards`. A trajectory may lie in
      several segments and rows.
    coef: reward a nat.
  """
  total = sums_by_id(
    jnp.where(loss_mask, k1(logprobs, reference), 0).reshape(-1),
    ids_of_loss(loss_mask, trajectories).reshape(-1),
    jnp.arange(rewards.shape[0], dtype=trajectories.dtype),
  )
  return stop_gradient(rewards - coef * total)
