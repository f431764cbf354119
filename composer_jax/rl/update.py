"""The learner's device programs: pure functions of weights and micro-batches.

`run` is the forward pass, `add_gradient` adds one micro-batch's gradient to
those before, `apply_gradient` makes the update. `learner` compiles them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import LanguageModel
from composer_jax.models.moe import Replay, Routing, balance
from composer_jax.rl import objective as objective_lib
from composer_jax.rl.objective import ObjectiveConfig, Streams
from composer_jax.training.optimizer import grad_norm
from composer_jax.training.state import TrainState


class MicroBatch(NamedTuple):
  """What the device needs of a micro-batch; see `batch.RlBatch`."""

  tokens: Int[Array, "B S"]
  targets: Int[Array, "B S"]
  positions: Int[Array, "B S"]
  segment_ids: Int[Array, "B S"]
  loss_mask: Bool[Array, "B S"]
  temperatures: Float[Array, "B S"]
  sampler_logprobs: Float[Array, "B S"]
  routes: Int[Array, "B S L K"] | None
  advantages: Float[Array, "B S"]
  proximal_logprobs: Float[Array, "B S"]


class Facts(NamedTuple):
  """What a forward pass says.

  Attributes:
    logprobs: of the targets, at the temperature that they were sampled at.
    entropy: of the distribution that each target is from, in nats; not
      differentiable.
    z_loss: of all routers, summed over tokens.
    load: tokens an expert and layer; None if there are none.
    replay: what became of the routes; None if none were given.
  """

  logprobs: Float[Array, "B S"]
  entropy: Float[Array, "B S"]
  z_loss: Float[Array, ""]
  load: Int[Array, "L E"] | None
  replay: "ReplayCounts | None"


class ReplayCounts(NamedTuple):
  """What became of a micro-batch's routes.

  Attributes:
    missing: tokens that had none.
    routers: routers with a route: of every other token, one a layer.
    flipped: of those, how many had chosen other experts.
    replaced: experts that were too implausible to be replayed.
  """

  missing: Int[Array, ""]
  routers: Int[Array, ""]
  flipped: Int[Array, ""]
  replaced: Int[Array, ""]


def run(
  model: LanguageModel,
  params: Any,
  balance_state: Any,
  batch: MicroBatch,
  min_ratio: float = 0.0,
) -> Facts:
  """The forward pass.

  Args:
    model: whose functions.
    params: in the compute dtype.
    balance_state: the routers' selection bias.
    batch: packed sequences.
    min_ratio: see `models.moe.Replay`.
  """
  replay = None
  if batch.routes is not None:
    replay = Replay(batch.routes.transpose(2, 0, 1, 3), min_ratio)
  out = model.apply(
    params,
    balance_state,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    replay,
  )
  # As the sampler has it, operation by operation.
  logprobs = jax.nn.log_softmax(out.logits / batch.temperatures[..., None])
  entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
  logprobs = jnp.take_along_axis(logprobs, batch.targets[..., None], axis=-1)
  routing = out.routing
  return Facts(
    logprobs=logprobs[..., 0],
    entropy=jax.lax.stop_gradient(entropy),
    z_loss=jnp.zeros(()) if routing is None else routing.z_loss.sum(),
    load=None if routing is None else routing.load,
    replay=replay and _count(replay, routing, batch.segment_ids > 0),
  )


def _count(
  replay: Replay, routing: Routing, valid: Bool[Array, "B S"]
) -> ReplayCounts:
  routed = (replay.expert_ids >= 0) & valid[None, :, :, None]
  routers = routed[..., 0]
  return ReplayCounts(
    missing=(valid & ~routers[0]).sum(),
    routers=routers.sum(),
    flipped=(routing.flipped > 0).sum(),
    replaced=(routed & (routing.expert_ids != replay.expert_ids)).sum(),
  )


def add_gradient(
  model: LanguageModel,
  objective: ObjectiveConfig,
  min_ratio: float,
  params: Any,
  balance_state: Any,
  gradient: Any,
  batch: MicroBatch,
  divide_by: Float[Array, ""],
  anchored: Bool[Array, ""],
) -> tuple[Any, Facts]:
  """Adds a micro-batch's gradient to that of those before.

  Args:
    model: whose functions.
    objective: what to minimise.
    min_ratio: see `models.moe.Replay`.
    params: the master weights.
    balance_state: the routers' selection bias.
    gradient: so far, float32.
    batch: packed sequences.
    divide_by: `objective.denominator` of the whole batch.
    anchored: False if the proximal policy is the policy itself.
  """

  def loss_fn(params):
    facts = run(model, params, balance_state, batch, min_ratio)
    streams = Streams(
      loss_mask=batch.loss_mask,
      segment_ids=batch.segment_ids,
      advantages=batch.advantages,
      sampler_logprobs=batch.sampler_logprobs,
      proximal_logprobs=jnp.where(
        anchored,
        batch.proximal_logprobs,
        jax.lax.stop_gradient(facts.logprobs),
      ),
    )
    loss, _ = objective_lib.policy_loss(
      facts.logprobs, streams, divide_by, objective
    )
    return loss, facts

  params = model.compute_copy(params)
  new, facts = jax.grad(loss_fn, has_aux=True)(params)
  total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradient, new)
  return total, facts


def apply_gradient(
  optimizer: optax.GradientTransformation,
  balance_rate: float,
  state: TrainState,
  gradient: Any,
  load: Int[Array, "L E"] | None,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
  """One update.

  Args:
    optimizer: what makes it.
    balance_rate: see `moe.balance`.
    state: before.
    gradient: of the whole batch, float32.
    load: of the whole batch.

  Returns:
    The new state; `grad_norm` before clipping, `param_norm` after the update.
  """
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  new = TrainState(
    step=state.step + 1,
    params=params,
    balance=jax.tree.map(
      lambda bias: balance(bias, load, balance_rate), state.balance
    ),
    opt_state=opt_state,
  )
  norms = {
    "grad_norm": grad_norm(opt_state),
    "param_norm": optax.tree.norm(params),
  }
  return new, norms
