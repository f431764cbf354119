"""Mixture-of-Experts layers: routers, and the layer around `moe_ffn`.

The maths of dispatch, experts and combine is `pallas_kernels.moe`; here is what
a model adds: who goes where, with what weight, and on which device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from composer_jax import sharding
from composer_jax.models import parameter
from composer_jax.models.config import ModelConfig, MoeConfig, RouterConfig
from composer_jax.models.layers import SwiGlu
from pallas_kernels.moe import moe_ffn


class SelectionBias(nnx.Variable):
  """State that balances the experts; moved by `balance`, not by gradients."""


class Replay(NamedTuple):
  """Experts that another pass chose, to be taken again.

  Replay of the sampler's routes in the trainer: Ma et al. 2025,
  arXiv:2510.11370. Only the choice is replayed: gates are computed anew, so
  that gradients reach the router.

  Attributes:
    expert_ids: of each token; -1 leaves the choice to the router.
    min_ratio: a replayed expert stays if its score is at least this part of
      the weakest score among the router's own choice; others are replaced by
      the best of that choice. 0 keeps all, 1 none that isn't the router's.
  """

  expert_ids: Int[Array, "*layers B S K"]
  min_ratio: float = 0.0


class Routing(NamedTuple):
  """What a router did, beside its output.

  Attributes:
    expert_ids: each token's experts; -1 for padding.
    load: tokens that each expert got.
    z_loss: sum over tokens of the squared log-sum-exp of the logits.
    flipped: how many of the token's replayed experts the router itself would
      not have chosen; 0 where nothing was replayed. None without a replay.
  """

  expert_ids: Int[Array, "*layers B S K"]
  load: Int[Array, "*layers E"]
  z_loss: Float[Array, "*layers"]
  flipped: Int[Array, "*layers B S"] | None = None


def route(
  logits: Float[Array, "T E"],
  bias: Float[Array, " E"] | None,
  config: RouterConfig,
  replayed: Int[Array, "T K"] | None = None,
  min_ratio: float = 0.0,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
  """Each token's experts and gates.

  Experts are picked by score plus bias, from the groups whose two best such
  sums add up highest; ties go to the lower index. Gates are the bare scores of
  the picked, renormalised to `config.scale`. With one group and the softmax
  this is Qwen3's router; with the sigmoid it is DeepSeek-V3's
  (arXiv:2412.19437, section 2.1.2).

  Args:
    logits: router outputs, float32.
    bias: the selection bias, or None.
    config: which router.
    replayed: see `Replay.expert_ids`.
    min_ratio: see `Replay.min_ratio`.

  Returns:
    Expert ids (int32) and gates (float32).
  """
  score = jax.nn.softmax if config.score == "softmax" else jax.nn.sigmoid
  scores = score(logits)
  choice = jax.lax.stop_gradient(scores)
  if bias is not None:
    choice = choice + bias[None]
  merit = choice
  if config.top_groups < config.num_groups:
    grouped = choice.reshape(len(choice), config.num_groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    groups = jax.lax.top_k(best_two, config.top_groups)[1]
    kept = jax.nn.one_hot(groups, config.num_groups, dtype=bool).any(axis=1)
    grouped = jnp.where(kept[:, :, None], grouped, -jnp.inf)
    choice = grouped.reshape(choice.shape)
  expert_ids = jax.lax.top_k(choice, config.top_k)[1]
  if replayed is not None:
    expert_ids = _replay(scores, merit, expert_ids, replayed, min_ratio)
  picked = jnp.take_along_axis(scores, expert_ids, axis=-1)
  total = picked.sum(axis=-1, keepdims=True)
  # Sigmoid scores can all round to zero.
  gates = config.scale * picked / jnp.maximum(total, 1e-20)
  return expert_ids, gates


def _replay(
  scores: Float[Array, "T E"],
  merit: Float[Array, "T E"],
  own: Int[Array, "T K"],
  replayed: Int[Array, "T K"],
  min_ratio: float,
) -> Int[Array, "T K"]:
  """The experts of another pass, but for what the router finds implausible.

  An expert stays if score >= min_ratio * (weakest own score), as in
  https://github.com/PrimeIntellect-ai/prime-rl/pull/2703. A selection bias
  shifts the choice, so there its merit, score plus bias, may fall short of the
  weakest own merit by (1 - min_ratio) * (weakest own score): the same thing
  without a bias.

  Args:
    scores: the router's.
    merit: scores plus bias.
    own: the router's choice, best first.
    replayed: see `Replay.expert_ids`; else no expert twice.
    min_ratio: see `Replay.min_ratio`.

  Returns:
    For each replayed expert itself, in its place, or the best of the router's
    own choice that isn't there yet.
  """
  keep = replayed >= 0
  if min_ratio > 0:
    asked = jnp.maximum(replayed, 0)
    weakest = own[:, -1:]
    allowed = (1 - min_ratio) * jnp.take_along_axis(scores, weakest, axis=1)
    short = jnp.take_along_axis(merit, weakest, axis=1)
    short = short - jnp.take_along_axis(merit, asked, axis=1)
    keep &= short <= allowed
  kept = jnp.where(keep, replayed, -1)
  # Of the router's choice those that aren't kept, best first: at least as many
  # as there are places to fill.
  order = jnp.argsort(_in(own, kept), axis=1, stable=True)
  spare = jnp.take_along_axis(own, order, axis=1)
  nth = jnp.cumsum(~keep, axis=1) - 1
  filled = jnp.take_along_axis(spare, jnp.maximum(nth, 0), axis=1)
  return jnp.where(keep, replayed, filled)


def _in(
  ids: Int[Array, "T K"], others: Int[Array, "T K"]
) -> Bool[Array, "T K"]:
  """Which ids are among the same token's others."""
  return (ids[:, :, None] == others[:, None, :]).any(axis=2)


def balance(
  bias: Float[Array, "L E"], load: Int[Array, "L E"], rate: float
) -> Float[Array, "L E"]:
  """One step of auxiliary-loss-free balancing.

  Experts with less than the mean load become more likely, by a fixed step
  (Wang et al. 2024, arXiv:2408.15664).

  Args:
    bias: the selection bias of each layer.
    load: tokens that each expert got in this step.
    rate: the step; DeepSeek-V3 used 0.001.
  """
  load = load.astype(jnp.float32)
  return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


def imbalance(load: Int[Array, "L E"]) -> Float[Array, " L"]:
  """The fullest expert's load over the mean; 1 is perfect balance."""
  load = load.astype(jnp.float32)
  return load.max(axis=-1) / jnp.maximum(load.mean(axis=-1), 1.0)


def _route_and_compute(
  x: Float[Array, "B S H"],
  valid: Bool[Array, "B S"],
  replayed: Int[Array, "B S K"] | None,
  w_router: Float[Array, "H E"],
  bias: Float[Array, " E"] | None,
  w_gate_up: Float[Array, "E_local H 2 I"],
  w_down: Float[Array, "E_local I H"],
  *,
  config: MoeConfig,
  min_ratio: float,
  expert_axis: str | None,
  tensor_axis: str | None,
):
  """Router and routed experts on one device's tokens; see `Moe`."""
  tokens = x.reshape(-1, x.shape[-1])
  # float32, and every product of the two exact: a difference in the fifth
  # decimal picks another expert.
  logits = jnp.dot(
    tokens.astype(jnp.float32), w_router, precision=jax.lax.Precision.HIGHEST
  )
  flipped = None
  if replayed is not None:
    replayed = replayed.reshape(len(tokens), -1).astype(jnp.int32)
    own, _ = route(logits, bias, config.router)
    flipped = ((replayed >= 0) & ~_in(replayed, own)).sum(axis=1)
    flipped = jnp.where(valid, flipped.reshape(valid.shape), 0)
  expert_ids, gates = route(logits, bias, config.router, replayed, min_ratio)
  expert_ids = jnp.where(valid.reshape(-1, 1), expert_ids, -1)
  out = moe_ffn(
    tokens,
    expert_ids,
    gates,
    w_gate_up,
    w_down,
    implementation=config.implementation or None,
    axis_name=expert_axis,
    out_dtype=jnp.float32 if tensor_axis else None,
  )
  if tensor_axis:
    out = jax.lax.psum(out, tensor_axis).astype(x.dtype)
  z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).reshape(valid.shape)
  z = jnp.where(valid, z, 0.0)
  ids = expert_ids.reshape(*x.shape[:2], -1)
  return out.reshape(x.shape), ids, z, flipped


class Moe(nnx.Module):
  """Routed experts beside shared ones.

  Where a mesh is set, tokens are routed where they are; each device of the
  `expert` axis holds a block of the experts, and one of the `tensor` axis a
  slice of each expert's hidden width.
  """

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    moe, width = config.moe, config.width
    assert moe is not None
    self.config = moe
    self.w_router = parameter.weight(
      rngs,
      {"embed": width, "router_experts": moe.num_experts},
      contract=("embed",),
      float32=True,
    )
    if moe.router.selection_bias:
      self.bias = SelectionBias(
        jnp.zeros(moe.num_experts, jnp.float32),
        spec=parameter.ParamSpec(("router_experts",)),
      )
    self.w_gate_up = parameter.weight(
      rngs,
      {
        "experts": moe.num_experts,
        "embed": width,
        "gate_up": 2,
        "mlp": moe.expert_dim,
      },
      contract=("embed",),
      batch=("experts", "gate_up"),
    )
    self.w_down = parameter.weight(
      rngs,
      {"experts": moe.num_experts, "mlp": moe.expert_dim, "embed": width},
      contract=("mlp",),
      batch=("experts",),
    )
    if moe.num_shared:
      self.shared = SwiGlu(rngs, width, moe.num_shared * moe.expert_dim)

  def __call__(
    self,
    x: Float[Array, "B S H"],
    valid: Bool[Array, "B S"],
    replay: Replay | None = None,
  ) -> tuple[Float[Array, "B S H"], Routing]:
    """Applies the layer.

    Args:
      x: the tokens.
      valid: False for padding, which visits no routed expert.
      replay: choices to take instead of the router's.
    """
    routed = functools.partial(
      _route_and_compute,
      config=self.config,
      min_ratio=replay.min_ratio if replay else 0.0,
      expert_axis=None,
      tensor_axis=None,
    )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
      routed = self._sharded(routed, mesh)
    bias = self.bias[...] if self.config.router.selection_bias else None
    out, expert_ids, z, flipped = routed(
      x,
      valid,
      replay.expert_ids if replay else None,
      self.w_router[...],
      bias,
      self.w_gate_up[...].astype(x.dtype),
      self.w_down[...].astype(x.dtype),
    )
    if self.config.num_shared:
      out = out + self.shared(x)
    # Padding's -1 is a row of zeros.
    load = jax.nn.one_hot(expert_ids, self.config.num_experts, dtype=jnp.int32)
    load = load.sum((0, 1, 2))
    return out, Routing(expert_ids, load, z.sum(), flipped)

  def _sharded(self, routed, mesh: jax.sharding.AbstractMesh):
    """`routed` on each device's own tokens and experts."""
    routed = functools.partial(
      routed,
      expert_axis="expert" if mesh.shape["expert"] > 1 else None,
      tensor_axis="tensor" if mesh.shape["tensor"] > 1 else None,
    )
    tokens = P(sharding.BATCH_AXES)
    return jax.shard_map(
      routed,
      in_specs=(
        tokens,
        tokens,
        tokens,
        P(),
        P(),
        P("expert", None, None, "tensor"),
        P("expert", "tensor"),
      ),
      out_specs=(tokens, tokens, tokens, tokens),
      # The kernels' outputs don't say over which axes they vary.
      check_vma=False,
    )
