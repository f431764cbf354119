"""The learner: holds the policy, and improves it by what groups bring.

    learner = Learner(model, optimizer, config, mesh)
    if learner.restore(checkpoints) is None:
      learner.start(init_from="runs/tiny/checkpoints")
    batch = learner.admit(groups)
    metrics = learner.step(batch)
    learner.save(checkpoints, meta)

It knows no algorithm: per-token streams go in, and `objective` says what they
are worth. State, optimizer, sharding, checkpoints are mid-training's. Nothing
here samples, waits, or decides what is too stale.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Float

from composer_jax import sharding
from composer_jax.models import LanguageModel, train_flops_per_token
from composer_jax.rl import batch as batch_lib
from composer_jax.rl import objective as objective_lib
from composer_jax.rl import update
from composer_jax.rl.batch import BatchShape, RlBatch
from composer_jax.rl.measure import measure, mismatch
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig, routes_of
from composer_jax.rl.trajectory import Group, Trajectory
from composer_jax.rl.update import MicroBatch
from composer_jax.training import state as state_lib
from composer_jax.training.checkpoint import Checkpoints, restore_parts
from composer_jax.training.meter import NonFiniteLossError
from composer_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """How the learner learns.

  Attributes:
    objective: what to minimise.
    shape: of a micro-batch.
    budget: what `objective.normalise="constant"` divides by: trajectories a
      step times the most tokens that one may sample; see
      `objective.denominator`.
    anchor: whose log-probabilities the surrogate's ratio is against. "policy":
      the policy's own at the update, so that the ratio is 1: right where each
      batch gets one update. "admission": those of a forward pass when the batch
      was admitted, for several updates an admission (decoupled PPO). "sampler":
      those that the tokens were sampled with.
    balance_rate: step of the routers' selection bias; see `moe.balance`. 0
      leaves it as mid-training made it.
    replay: how the sampler's routes are replayed; None leaves experts to the
      learner's own routers.
  """

  objective: ObjectiveConfig
  shape: BatchShape
  budget: float = 0.0
  anchor: Literal["policy", "admission", "sampler"] = "policy"
  balance_rate: float = 0.0
  replay: ReplayConfig | None = None

  def __post_init__(self):
    if self.anchor not in ("policy", "admission", "sampler"):
      raise ValueError(
        f"anchor={self.anchor!r} must be one of 'policy', 'admission',"
        " 'sampler'."
      )
    if self.objective.normalise == "constant" and not self.budget > 0:
      raise ValueError(
        f"budget={self.budget} must be positive with normalise='constant':"
        " trajectories a step times the most tokens that one may sample."
      )


class Learner:
  """A policy in training. All processes make the same calls.

  Attributes:
    state: the training state; None until `start` or `restore`. A step donates
      it: don't hold on to its arrays.
    mesh: where it lives.
  """

  def __init__(
    self,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    config: LearnerConfig,
    mesh: Mesh,
  ):
    """Allocates nothing yet.

    Args:
      model: the policy's functions.
      optimizer: from `training.optimizer.make_optimizer`.
      config: how to learn.
      mesh: from `sharding.make_mesh`.

    Raises:
      ValueError: parameters or rows can't be split evenly over the mesh, or
        there are no routers to replay routes in.
    """
    if config.replay and not model.config.num_moe_layers:
      raise ValueError(
        "The model has no MoE layers whose routes could be replayed: set"
        " replay=None."
      )
    self.model, self.config, self.mesh = model, config, mesh
    self.state: TrainState | None = None
    self._optimizer = optimizer
    self._abstract = state_lib.abstract_state(model, optimizer, mesh)
    self._rows = sharding.batch_sharding(mesh, config.shape.rows)
    self._reference = None
    # Of a token, which is linear in the length; slow to find out.
    flops = [train_flops_per_token(model.config, length) for length in (0, 1)]
    self._flops = flops[0], flops[1] - flops[0]
    min_ratio = config.replay.min_ratio if config.replay else 0.0
    where = state_lib.shardings_of(self._abstract)
    everywhere = sharding.replicated(mesh)
    self._zeros = jax.jit(
      lambda: jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), model.param_shapes
      ),
      out_shardings=where.params,
    )
    self._forward = jax.jit(
      lambda params, balance_state, batch: (
        update.run(
          model, model.compute_copy(params), balance_state, batch, min_ratio
        ).logprobs
      ),
      out_shardings=everywhere,
    )
    self._backward = jax.jit(
      functools.partial(
        update.add_gradient, model, config.objective, min_ratio
      ),
      donate_argnums=2,
      out_shardings=(where.params, everywhere),
    )
    self._update = jax.jit(
      functools.partial(update.apply_gradient, optimizer, config.balance_rate),
      donate_argnums=0,
      out_shardings=(where, everywhere),
    )

  # ------------------------------------------------------------------- state

  def start(self, init_from: str | os.PathLike = "", seed: int = 0) -> None:
    """Begins at step 0, and takes what it begins with as the reference policy.

    Args:
      init_from: the checkpoint folder of a run to take the weights from.
      seed: of random weights, if there is none.

    Raises:
      CheckpointError: no checkpoint there, or one of another model.
    """
    self.state = self._first_state(init_from, seed)
    self._keep_reference(self.state)

  def restore(
    self,
    checkpoints: Checkpoints,
    init_from: str | os.PathLike = "",
    seed: int = 0,
  ) -> dict[str, Any] | None:
    """Goes on from the latest checkpoint.

    Args:
      checkpoints: of this run.
      init_from: as for `start`: the reference policy is not in the checkpoint.
      seed: as for `start`.

    Returns:
      The meta object; None if there is no checkpoint: then call `start`.

    Raises:
      CheckpointError: it can't be used.
    """
    with jax.set_mesh(self.mesh):
      restored = checkpoints.restore(self._abstract, None)
    if restored is None:
      return None
    if self.config.objective.kl_coef:
      self._keep_reference(self._first_state(init_from, seed))
    _, self.state, meta = restored
    return meta

  def save(self, checkpoints: Checkpoints, meta: dict[str, Any]) -> bool:
    """Starts to save the state; see `Checkpoints.save`."""
    return checkpoints.save(
      self.updates, self._started(), None, meta, force=True
    )

  @property
  def updates(self) -> int:
    """Updates made since step 0."""
    return int(self._started().step)

  def weights(self) -> dict[str, Any]:
    """What to publish: parameters in the compute dtype, and selection bias.

    The next step may delete these arrays: let the publisher copy.
    """
    state = self._started()
    return {
      "params": self.model.compute_copy(state.params),
      "balance": state.balance,
    }

  # ----------------------------------------------------------------- batches

  def admit(self, groups: Sequence[Group]) -> RlBatch:
    """Packs groups, and adds what the objective asks for at this version.

    Args:
      groups: for one update. For several updates an admission, admit all parts
        before the first step.

    Raises:
      ValueError: see `batch.pack` and `replay.routes_of`.
    """
    objective = self.config.objective
    routes = self.config.replay and functools.partial(
      routes_of, model=self.model.config, missing=self.config.replay.missing
    )
    batch = batch_lib.pack(
      groups,
      self.config.shape,
      ranks=self._ranks,
      cost=self._cost,
      routes=routes,
    )
    if objective.kl_coef:
      batch = batch._replace(reference_logprobs=self.reference_logprobs(batch))
    batch = batch_lib.with_advantages(batch, objective)
    match self.config.anchor:
      case "policy":
        return batch
      case "admission":
        return batch._replace(
          proximal_logprobs=self.old_logprobs(batch), updates=self.updates
        )
      case "sampler":
        return batch._replace(proximal_logprobs=batch.sampler_logprobs)

  def old_logprobs(self, batch: RlBatch) -> Float[np.ndarray, "M B S"]:
    """Log-probabilities of the targets under the weights as they are now."""
    state = self._started()
    return self._run_forward(state.params, state.balance, batch)

  def reference_logprobs(self, batch: RlBatch) -> Float[np.ndarray, "M B S"]:
    """Log-probabilities of the targets under the reference policy.

    Raises:
      ValueError: it isn't kept, since KL divergence from it costs nothing.
    """
    if self._reference is None:
      raise ValueError("The reference policy is kept only if kl_coef isn't 0.")
    return self._run_forward(*self._reference, batch)

  def step(self, batch: RlBatch) -> dict[str, float]:
    """One update by one batch.

    Args:
      batch: from `admit`.

    Returns:
      What `measure` says of the batch before the update, `grad_norm` before
      clipping, and `param_norm` after the update.

    Raises:
      NonFiniteLossError: loss, gradient or new weights aren't finite; restore
        the last checkpoint.
    """
    state = self._started()
    objective = self.config.objective
    divide_by = objective_lib.denominator(
      *map(batch_lib.flat, (batch.loss_mask, batch.segment_ids)),
      self.config.budget,
      objective,
    )
    divide_by = float(divide_by)
    # A forward pass by itself is another program than the one inside of the
    # gradient, and rounds in other places: don't compare a policy with itself.
    anchored = batch.proximal_logprobs is not None
    anchored &= batch.updates != self.updates
    with jax.set_mesh(self.mesh):
      gradient, facts = self._zeros(), []
      for micro_batch in self._micro_batches(batch):
        gradient, fact = self._backward(
          state.params,
          state.balance,
          gradient,
          micro_batch,
          divide_by,
          anchored,
        )
        facts.append(fact)
      facts = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(facts))
      load = facts.load
      if load is not None:
        load = load.sum(axis=0, dtype=load.dtype)
      self.state, norms = self._update(state, gradient, load)
    metrics = measure(batch, facts, divide_by, objective, anchored=anchored)
    metrics |= {name: float(norm) for name, norm in norms.items()}
    watched = {n: metrics[n] for n in ("loss", "grad_norm", "param_norm")}
    if not np.isfinite(list(watched.values())).all():
      self.state = None  # So that nobody saves or publishes it.
      raise NonFiniteLossError(
        f"An update gave {watched}; its state is lost: restore the last"
        " checkpoint, with a lower learning rate."
      )
    return metrics

  def mismatch_without_replay(self, batch: RlBatch) -> dict[str, float]:
    """How far the policy would be from the sampler with experts of its own.

    Args:
      batch: from `admit`.

    Returns:
      `mismatch_mean_without_replay` and `mismatch_p99_without_replay`; see
      `measure`. Nothing if no routes are replayed.
    """
    if batch.routes is None:
      return {}
    logprobs = self.old_logprobs(batch._replace(routes=None))
    return {
      f"{name}_without_replay": value
      for name, value in mismatch(logprobs, batch).items()
    }

  def flops(self, trajectories: Sequence[Trajectory]) -> float:
    """Of learning from them, forward and backward; padding isn't counted."""
    return float(sum(self._cost(len(t)) for t in trajectories))

  # ----------------------------------------------------------------- helpers

  def _cost(self, length: int) -> float:
    return length * (self._flops[0] + self._flops[1] * length)

  @property
  def _ranks(self) -> int:
    """Over how many devices a micro-batch's rows are split."""
    return int(np.prod([self.mesh.shape[a] for a in sharding.BATCH_AXES]))

  def _started(self) -> TrainState:
    if self.state is None:
      raise ValueError("The learner has no weights yet: start or restore it.")
    return self.state

  def _first_state(self, init_from, seed) -> TrainState:
    abstract = self._abstract
    with jax.set_mesh(self.mesh):
      given = None
      if init_from:
        given = restore_parts(
          init_from, {"params": abstract.params, "balance": abstract.balance}
        )
      return state_lib.init_state(
        self.model, self._optimizer, abstract, seed, given
      )

  def _keep_reference(self, state: TrainState) -> None:
    if self.config.objective.kl_coef:
      # A copy, since the next step takes the state's arrays.
      self._reference = jax.tree.map(
        jnp.copy, (self.model.compute_copy(state.params), state.balance)
      )

  def _micro_batches(self, batch: RlBatch):
    if batch.proximal_logprobs is None:  # Any numbers: they aren't looked at.
      batch = batch._replace(proximal_logprobs=batch.sampler_logprobs)
    streams = MicroBatch(*(getattr(batch, name) for name in MicroBatch._fields))
    for i in range(len(batch.tokens)):
      yield jax.tree.map(
        lambda stream, i=i: jax.make_array_from_callback(
          stream.shape[1:], self._rows, stream[i].__getitem__
        ),
        streams,
      )

  def _run_forward(self, params, balance_state, batch):
    with jax.set_mesh(self.mesh):
      logprobs = [
        self._forward(params, balance_state, micro_batch)
        for micro_batch in self._micro_batches(batch)
      ]
    logprobs = np.stack(jax.device_get(logprobs))
    return np.where(batch.loss_mask, logprobs, np.float32(0))
