"""The decoder: embedding, two scanned stacks of layers, unembedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from composer_jax import sharding
from composer_jax.models import paged, parameter
from composer_jax.models.attention import make_attention
from composer_jax.models.config import ModelConfig
from composer_jax.models.layers import RmsNorm, SwiGlu, einsum, lookup
from composer_jax.models.moe import Moe, Replay, Routing

# What the backward pass finds saved, by name; the rest it computes again.
REMAT_POLICIES = {
  "none": jax.checkpoint_policies.everything_saveable,
  "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
  "full": jax.checkpoint_policies.nothing_saveable,
}


class Output(NamedTuple):
  """What a forward pass gives.

  Attributes:
    logits: float32, over the vocabulary.
    routing: what the routers did, layers first; None if no layer is MoE.
  """

  logits: Float[Array, "B S V"]
  routing: Routing | None


class CachedOutput(NamedTuple):
  """What a pass over cached rows gives.

  Attributes:
    logits: float32, of one token a row.
    expert_ids: each token's experts, -1 for padding; None if no layer is MoE.
    pool: the cache, with these tokens in it.
  """

  logits: Float[Array, "B V"]
  expert_ids: Int[Array, "L B S K"] | None
  pool: paged.Pool


class Layer(nnx.Module):
  """Attention, then an MLP or experts, each on a normed residual stream."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, is_moe: bool):
    self.is_moe = is_moe
    self.attention_norm = RmsNorm("embed", config.width, config.norm_eps)
    self.attention = make_attention(rngs, config)
    self.mlp_norm = RmsNorm("embed", config.width, config.norm_eps)
    if is_moe:
      self.moe = Moe(rngs, config)
    else:
      self.mlp = SwiGlu(rngs, config.width, config.dense_dim)

  def __call__(
    self,
    x: Float[Array, "B S H"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    replay: Replay | None = None,
  ) -> tuple[Float[Array, "B S H"], Routing | None]:
    """The new residual stream, and what the router did."""
    x = x + self.attention(self.attention_norm(x), positions, segment_ids)
    return self._feed_forward(x, segment_ids, replay)

  def cached(
    self,
    x: Float[Array, "B S H"],
    rows: paged.Rows,
    pool: paged.Pool,
    layer: Int[Array, ""],
  ) -> tuple[Float[Array, "B S H"], paged.Pool, Routing | None]:
    """The same over rows in a cache, as layer number `layer` of the pool."""
    out, pool = self.attention.cached(self.attention_norm(x), rows, pool, layer)
    x, routing = self._feed_forward(x + out, rows.valid.astype(jnp.int32))
    return x, pool, routing

  def _feed_forward(self, x, segment_ids, replay=None):
    x = sharding.constrain(x, "batch", "sequence", None)
    if self.is_moe:
      out, routing = self.moe(self.mlp_norm(x), segment_ids > 0, replay)
    else:
      out, routing = self.mlp(self.mlp_norm(x)), None
    return sharding.constrain(x + out, "batch", "sequence", None), routing


class Stack(nnx.Module):
  """Layers of one kind, their parameters stacked along a leading axis.

  The forward pass scans over that axis: one layer is compiled, whatever the
  depth.
  """

  def __init__(
    self, rngs: nnx.Rngs, config: ModelConfig, depth: int, *, is_moe: bool
  ):
    def make(key):
      return Layer(nnx.Rngs(params=key), config, is_moe=is_moe)

    keys = jax.random.split(rngs.params(), depth)
    structure = nnx.graphdef(nnx.eval_shape(lambda: make(keys[0])))
    state = jax.vmap(lambda key: nnx.state(make(key)))(keys)
    for _, variable in nnx.to_flat_state(state):
      variable.set_metadata(
        spec=variable.get_metadata("spec").stacked("layers")
      )
    self.layers = nnx.merge(structure, state)
    self.policy = REMAT_POLICIES[config.remat]

  def __call__(
    self,
    x: Float[Array, "B S H"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    replay: Replay | None = None,
  ) -> tuple[Float[Array, "B S H"], Routing | None]:
    """Applies the layers in order."""
    structure, state = nnx.split(self.layers)

    def body(x, inputs):
      layer_state, expert_ids = inputs
      layer = nnx.merge(structure, layer_state)
      one = replay and replay._replace(expert_ids=expert_ids)
      return layer(x, positions, segment_ids, one)

    # Scan makes common subexpressions of the two passes impossible already.
    body = jax.checkpoint(body, policy=self.policy, prevent_cse=False)
    return jax.lax.scan(body, x, (state, replay and replay.expert_ids))

  def cached(
    self,
    x: Float[Array, "B S H"],
    rows: paged.Rows,
    pool: paged.Pool,
    first: int,
  ) -> tuple[Float[Array, "B S H"], paged.Pool, Int[Array, "L B S K"] | None]:
    """The same over rows in a cache; `first` is its first layer's number.

    The pool is carried whole, and written in place: as an input and output of
    each step of the scan it would be copied.
    """
    structure, state = nnx.split(self.layers)
    depth = len(jax.tree.leaves(state)[0])

    def body(carry, inputs):
      x, pool = carry
      layer_state, layer = inputs
      module = nnx.merge(structure, layer_state)
      x, pool, routing = module.cached(x, rows, pool, layer)
      return (x, pool), None if routing is None else routing.expert_ids

    numbers = jnp.arange(first, first + depth)
    (x, pool), expert_ids = jax.lax.scan(body, (x, pool), (state, numbers))
    return x, pool, expert_ids


class Transformer(nnx.Module):
  """A decoder-only language model; see `ModelConfig`."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    vocab = {"vocab": config.vocab_size, "embed": config.width}
    # Gives unit-variance logits where the table is the unembedding too.
    self.embedding = parameter.table(rngs, vocab, stddev=config.width**-0.5)
    if config.num_dense_layers:
      self.dense = Stack(rngs, config, config.num_dense_layers, is_moe=False)
    if config.num_moe_layers:
      self.moe = Stack(rngs, config, config.num_moe_layers, is_moe=True)
    self.norm = RmsNorm("embed", config.width, config.norm_eps)
    if not config.tie_embeddings:
      self.unembedding = parameter.weight(
        rngs,
        {"embed": config.width, "vocab": config.vocab_size},
        contract=("embed",),
      )

  def __call__(
    self,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    replay: Replay | None = None,
  ) -> Output:
    """Predicts each next token.

    Args:
      tokens: ids.
      positions: of each token in its document; counted from 0 by default.
      segment_ids: which document of its row a token belongs to, 0 for padding;
        one document a row by default.
      replay: experts to use in the MoE layers; the routers' choice by default.
    """
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segment_ids is None:
      segment_ids = jnp.ones_like(tokens)
    x = lookup(self.embedding[...], tokens).astype(self.config.dtype)
    x = sharding.constrain(x, "batch", "sequence", None)
    routing = None
    if self.config.num_dense_layers:
      x, _ = self.dense(x, positions, segment_ids)
    if self.config.num_moe_layers:
      x, routing = self.moe(x, positions, segment_ids, replay)
    return Output(self.unembed(self.norm(x)), routing)

  def cached(
    self,
    tokens: Int[Array, "B S"],
    rows: paged.Rows,
    pool: paged.Pool,
    last: Int[Array, " B"],
  ) -> CachedOutput:
    """Continues rows whose past is in a cache, and adds these tokens to it.

    Args:
      tokens: ids.
      rows: where they and their pasts lie.
      pool: the cache.
      last: of each row, which token's logits to give.
    """
    x = lookup(self.embedding[...], tokens).astype(self.config.dtype)
    expert_ids = None
    if self.config.num_dense_layers:
      x, pool, _ = self.dense.cached(x, rows, pool, 0)
    if self.config.num_moe_layers:
      x, pool, expert_ids = self.moe.cached(
        x, rows, pool, self.config.num_dense_layers
      )
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    return CachedOutput(self.unembed(self.norm(x))[:, 0], expert_ids, pool)

  def unembed(self, x: Float[Array, "B S H"]) -> Float[Array, "B S V"]:
    """Logits of normed activations."""
    if self.config.tie_embeddings:
      logits = einsum("bsh,vh->bsv", x, self.embedding)
    else:
      logits = einsum("bsh,hv->bsv", x, self.unembedding)
    logits = sharding.constrain(logits, "batch", "sequence", "vocab")
    return logits.astype(jnp.float32)
