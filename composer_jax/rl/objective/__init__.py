"""What the RL learner minimises, as pure functions of per-token streams.

In order of use: `penalise_kl` and `group_advantages` turn rewards of
trajectories into advantages; `policy_loss` turns a packed batch of tokens into
a loss and its metrics. The loss is

  -1/denominator * sum over loss tokens of weight * correction * surrogate

where each factor is chosen by name in `ObjectiveConfig`: the surrogate holds
the policy near a *proximal* one, the correction accounts for the sampler having
been yet another, the weight and the denominator say how much a token counts.
Nothing here knows models or meshes.
"""

from composer_jax.rl.objective.advantages import (
  group_advantages,
  k1,
  k3,
  penalise_kl,
)
from composer_jax.rl.objective.config import ObjectiveConfig
from composer_jax.rl.objective.corrections import (
  Correction,
  icepop,
  importance,
  kpop,
  tis,
)
from composer_jax.rl.objective.loss import Streams, denominator, policy_loss
from composer_jax.rl.objective.surrogates import (
  Surrogate,
  cispo,
  ppo_clip,
  sequence_log_ratio,
)

__all__ = [
  "Correction",
  "ObjectiveConfig",
  "Streams",
  "Surrogate",
  "cispo",
  "denominator",
  "group_advantages",
  "icepop",
  "importance",
  "k1",
  "k3",
  "kpop",
  "penalise_kl",
  "policy_loss",
  "ppo_clip",
  "sequence_log_ratio",
  "tis",
]
