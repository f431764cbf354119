"""The engine's one device program, at its few compiled shapes.

A step takes B rows of S tokens: many of one token (decode), or a few of a chunk
(prefill). Either appends its tokens to the paged cache and, where a row asks,
samples the next. What was sampled last stays on the device, by slot, so that
the next step can start before the host has seen it.

Programs are compiled ahead of time, for a `Shape` each: one that isn't there
can't be compiled by accident. Within a shape a row's bits don't depend on its
neighbours (XLA's products over rows of a fixed count, `moe_ffn`'s contract, and
a gather of the row's own pages); between shapes they may, since XLA sums in
another order. The same seed so gives the same tokens in any company as long as
the row goes through the same shapes: its chunks start where they did (a prefix
hit moves them) and its context is the same size (`EngineConfig.contexts`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from composer_jax.models import LanguageModel, ModelConfig, paged
from composer_jax.serving import sampling
from composer_jax.serving.weights import weight_shapes


class Shape(NamedTuple):
  """What a program is compiled for.

  Attributes:
    rows: B.
    chunk: S, tokens a row.
    pages: P, pages of context a row.
  """

  rows: int
  chunk: int
  pages: int


class Sizes(NamedTuple):
  """What all programs of an engine share.

  Attributes:
    slots: rows that decode together.
    num_pages: of the cache.
    page_size: tokens a page.
    top_logprobs: the most that a row may ask for.
  """

  slots: int
  num_pages: int
  page_size: int
  top_logprobs: int


class Batch(NamedTuple):
  """What the host says of a step.

  Attributes:
    tokens: ids; -1 is what the row's slot sampled last.
    start: position of each row's first token.
    length: its number of tokens; 0 for a row that isn't there.
    slot: where a sampled token is kept.
    samples: whether to draw the token after the row's last one.
    pages: see `paged.Rows`.
    sampling: how.
    wants_top: whether to report the likeliest tokens.
  """

  tokens: Int[Array, "B S"]
  start: Int[Array, " B"]
  length: Int[Array, " B"]
  slot: Int[Array, " B"]
  samples: Bool[Array, " B"]
  pages: Int[Array, "B P"]
  sampling: sampling.Params
  wants_top: Bool[Array, " B"]


class Output(NamedTuple):
  """What a step tells the host.

  Attributes:
    token: drawn; any where the row doesn't sample.
    logprob: of it, in the distribution drawn from.
    model_logprob: in the model's own.
    top_ids: the likeliest tokens, best first; zeros if no row asks.
    top_logprobs: the model's, of those.
    routes: experts of every token; any for padding.
  """

  token: Int[Array, " B"]
  logprob: Float[Array, " B"]
  model_logprob: Float[Array, " B"]
  top_ids: Int[Array, "B N"]
  top_logprobs: Float[Array, "B N"]
  routes: UInt[Array, "B S L K"]


class State(NamedTuple):
  """What stays on the device from step to step; donated.

  Attributes:
    pool: the paged cache.
    last: what each slot sampled last.
  """

  pool: paged.Pool
  last: Int[Array, " slots"]


def route_shape(config: ModelConfig) -> tuple[int, int]:
  """`[moe_layers, top_k]` of a token's route."""
  if not config.num_moe_layers:
    return 0, 0
  return config.num_moe_layers, config.moe.router.top_k


def route_dtype(config: ModelConfig) -> np.dtype:
  """The smallest unsigned dtype that holds an expert's number."""
  experts = config.moe.num_experts if config.num_moe_layers else 1
  return np.min_scalar_type(experts - 1)


def empty_batch(shape: Shape, slots: int) -> Batch:
  """A batch of no rows, in NumPy, to be filled in."""
  rows = shape.rows
  return Batch(
    tokens=np.zeros((rows, shape.chunk), np.int32),
    start=np.zeros(rows, np.int32),
    length=np.zeros(rows, np.int32),
    slot=np.full(rows, slots, np.int32),
    samples=np.zeros(rows, bool),
    pages=np.zeros((rows, shape.pages), np.int32),
    sampling=sampling.Params(
      seed=np.zeros(rows, np.uint32),
      temperature=np.zeros(rows, np.float32),
      top_k=np.zeros(rows, np.int32),
      top_p=np.ones(rows, np.float32),
    ),
    wants_top=np.zeros(rows, bool),
  )


def empty_state(
  model: LanguageModel, sizes: Sizes, device: jax.Device
) -> State:
  """An empty cache, allocated on the device."""
  where = jax.sharding.SingleDeviceSharding(device)
  shapes = paged.pool_shapes(model.config, sizes.num_pages, sizes.page_size)
  pool = tuple(
    jnp.zeros(shape, model.config.dtype, device=where) for shape in shapes
  )
  return State(pool, jnp.zeros(sizes.slots, jnp.int32, device=where))


@functools.lru_cache(maxsize=256)
def compiled(
  model: LanguageModel, sizes: Sizes, shape: Shape, device: jax.Device
) -> Any:
  """The program of a shape: `(weights, state, batch) -> (state, Output)`."""
  where = jax.sharding.SingleDeviceSharding(device)

  def on_device(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  weights = weight_shapes(model)
  pool = paged.pool_shapes(model.config, sizes.num_pages, sizes.page_size)
  dtype = jnp.dtype(model.config.dtype)
  state = State(
    tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in pool),
    jax.ShapeDtypeStruct((sizes.slots,), jnp.int32),
  )
  arguments = (weights, state, empty_batch(shape, sizes.slots))
  step = functools.partial(_step, model, sizes)
  return (
    jax.jit(step, donate_argnums=1)
    .lower(*jax.tree.map(on_device, arguments))
    .compile()
  )


def _step(model, sizes, weights, state, batch):
  tokens = jnp.where(
    batch.tokens < 0,
    state.last.at[batch.slot].get(mode="clip")[:, None],
    batch.tokens,
  )
  place = jnp.arange(tokens.shape[1])[None]
  rows = paged.Rows(
    pages=batch.pages,
    positions=batch.start[:, None] + place,
    valid=place < batch.length[:, None],
  )
  out = model.apply_cached(
    weights["params"],
    weights["balance"],
    tokens,
    rows,
    state.pool,
    jnp.maximum(batch.length - 1, 0),
  )
  end = batch.start + batch.length
  drawn = sampling.sample(out.logits, batch.sampling, end)
  # A slot that doesn't exist: dropped.
  slot = jnp.where(batch.samples, batch.slot, sizes.slots)
  last = state.last.at[slot].set(drawn.token, mode="drop")
  count = min(sizes.top_logprobs, model.config.vocab_size)

  def likeliest(logprobs):
    return tuple(jax.lax.top_k(logprobs, count))

  def nothing(logprobs):
    empty = jnp.zeros((len(logprobs), count))
    return empty, empty.astype(jnp.int32)

  top_logprobs, top_ids = jax.lax.cond(
    batch.wants_top.any(), likeliest, nothing, drawn.model_logprobs
  )
  if out.expert_ids is None:
    routes = jnp.zeros((*tokens.shape, 0, 0), jnp.uint8)
  else:
    routes = out.expert_ids.transpose(1, 2, 0, 3)
    routes = routes.astype(route_dtype(model.config))
  output = Output(
    drawn.token,
    drawn.logprob,
    drawn.model_logprob,
    top_ids,
    top_logprobs,
    routes,
  )
  return State(out.pool, last), output
