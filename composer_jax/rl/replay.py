"""Router replay: the learner takes the experts that the sampler took.

Two programs that compute the same router scores to the fifth decimal choose
different experts where two of them nearly tie, and the learner would then train
an expert that had no part in the sample. Replay forces the choice and computes
the gates anew (Ma et al. 2025, https://arxiv.org/abs/2510.11370); the maths is
`composer_jax.models.moe.Replay`. Here the routes of a trajectory are checked on
their way there: a route that isn't known is never taken for experts 0, 0, ...
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int16

from composer_jax.models import ModelConfig
from composer_jax.rl.trajectory import Trajectory

# Of a token without a route; see `models.moe.Replay`.
NO_ROUTE = -1


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """How routes are replayed.

  Attributes:
    min_ratio: how implausible an expert may be to the learner's own router; see
      `models.moe.Replay`. 0 replays all.
    missing: what becomes of a token without a route: "error", or "router": its
      experts are the learner's own choice, and it is counted.
  """

  min_ratio: float = 0.0
  missing: Literal["error", "router"] = "error"

  def __post_init__(self):
    if not 0 <= self.min_ratio <= 1:
      raise ValueError(f"min_ratio={self.min_ratio} must lie in [0, 1].")
    if self.missing not in ("error", "router"):
      raise ValueError(f"missing={self.missing!r} must be 'error' or 'router'.")


def routes_of(
  trajectory: Trajectory, model: ModelConfig, missing: str
) -> Int16[np.ndarray, "N L K"]:
  """A trajectory's routes, checked against a model.

  Args:
    trajectory: whose routes.
    model: of the learner.
    missing: see `ReplayConfig.missing`.

  Returns:
    Expert ids; `NO_ROUTE` for tokens whose pass was never made, and for those
    whose route is missing.

  Raises:
    ValueError: the routes are another model's; or, with "error", there are
      none, or some name an expert twice, as no router does: zeros, above all.
  """
  name = f"a trajectory of task {trajectory.task_id!r}"
  experts, top_k = model.moe.num_experts, model.moe.router.top_k
  wanted = len(trajectory), model.num_moe_layers, top_k
  none = np.full(wanted, NO_ROUTE, np.int16)
  if trajectory.routes is None:
    if missing == "error":
      raise ValueError(
        f"The engine recorded no routes for {name}, but they are to be"
        " replayed: let it record them, or set missing='router'."
      )
    return none
  if trajectory.routes.shape != wanted:
    raise ValueError(
      f"The routes of {name} are {trajectory.routes.shape}, but the learner's"
      f" model needs [tokens, MoE layers, top_k] = {wanted}."
    )
  routed = trajectory.routed[:, None, None]
  routes = np.where(routed, trajectory.routes.astype(np.int64), NO_ROUTE)
  if routes.max() >= experts:
    raise ValueError(
      f"The routes of {name} name expert {routes.max()}, but the learner's"
      f" model has {experts}."
    )
  ranked = np.sort(routes, axis=2)
  twice = (ranked[..., 1:] == ranked[..., :-1]).any(axis=(1, 2))
  lost = twice & trajectory.routed
  if lost.any() and missing == "error":
    raise ValueError(
      f"The routes of {name} name an expert twice at {lost.sum()} tokens, first"
      f" at {lost.argmax()}: they were lost on the way from the engine."
    )
  return np.where(lost[:, None, None], none, routes).astype(np.int16)
