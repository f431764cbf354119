"""Draws each row's next token, and says with what probability.

A row's result depends on its own logits, parameters, seed and position alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt


class Params(NamedTuple):
  """`SamplingParams` of each row, as arrays.

  Attributes:
    seed: of the row's random bits.
    temperature: 0 takes the likeliest token.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
  """

  seed: UInt[Array, " B"]
  temperature: Float[Array, " B"]
  top_k: Int[Array, " B"]
  top_p: Float[Array, " B"]


class Sampled(NamedTuple):
  """A token a row.

  Attributes:
    token: the token drawn.
    logprob: in the distribution drawn from; 0 at temperature 0.
    model_logprob: in the model's own.
    model_logprobs: of the whole vocabulary, in the model's own.
  """

  token: Int[Array, " B"]
  logprob: Float[Array, " B"]
  model_logprob: Float[Array, " B"]
  model_logprobs: Float[Array, "B V"]


def sample(
  logits: Float[Array, "B V"], params: Params, position: Int[Array, " B"]
) -> Sampled:
  """Draws a token a row.

  Args:
    logits: the model's, float32.
    params: how each row samples.
    position: of the token to be drawn, in its row. The random bits are those of
      `fold_in(key(seed), position)`.
  """
  greedy = params.temperature <= 0
  logprobs = jax.nn.log_softmax(restrict(logits, params))
  # The Gumbel-max trick: the highest of log p + g is a draw from p.
  noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
    params.seed, position, logits.shape[1]
  )
  likeliest = logits.argmax(axis=-1)
  drawn = (logprobs + noise).argmax(axis=-1)
  token = jnp.where(greedy, likeliest, drawn).astype(jnp.int32)
  model_logprobs = jax.nn.log_softmax(logits)
  model_logprob = _pick(model_logprobs, token)
  # Not 0 where the logits aren't finite: the caller must notice.
  certain = jnp.where(jnp.isfinite(model_logprob), 0.0, model_logprob)
  logprob = jnp.where(greedy, certain, _pick(logprobs, token))
  return Sampled(token, logprob, model_logprob, model_logprobs)


def restrict(
  logits: Float[Array, "B V"], params: Params
) -> Float[Array, "B V"]:
  """Logits over the temperature, -inf outside top-k, then top-p.

  The softmax of the result is the distribution sampled from. Top-p (Holtzman et
  al. 2020, arXiv:1904.09751) keeps the fewest of the k likeliest whose
  probabilities, renormalised among the k, reach `top_p`.
  """
  positive = jnp.where(params.temperature > 0, params.temperature, 1.0)
  scaled = logits / positive[:, None]
  filtered = (params.top_k > 0) | (params.top_p < 1)
  # Rows that keep all need no sort; those beside one that does keep all too,
  # whichever way this goes.
  lowest = jax.lax.cond(
    filtered.any(), _lowest_kept, _minus_infinity, scaled, params
  )
  lowest = jnp.where(filtered, lowest, -jnp.inf)[:, None]
  return jnp.where(scaled >= lowest, scaled, -jnp.inf)


def _lowest_kept(scaled, params):
  """The lowest logit that top-k and top-p keep, of each row."""
  vocab = scaled.shape[1]
  falling = -jnp.sort(-scaled, axis=-1)
  rank = jnp.arange(vocab)[None]
  top_k = jnp.where(params.top_k > 0, params.top_k, vocab)[:, None]
  among = jnp.where(rank < top_k, falling, -jnp.inf)
  probability = jax.nn.softmax(among)
  before = jnp.cumsum(probability, axis=-1) - probability
  top_p = params.top_p[:, None]
  # A sum of all may round to less or more than 1.
  kept = (rank < top_k) & ((before < top_p) | (top_p >= 1))
  last = jnp.maximum(kept.sum(axis=-1) - 1, 0)
  return _pick(falling, last)


def _minus_infinity(scaled, params):
  del params
  return jnp.full(len(scaled), -jnp.inf)


def _pick(values, index):
  return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _gumbel(seed, position, vocab):
  key = jax.random.fold_in(jax.random.key(seed), position)
  return jax.random.gumbel(key, (vocab,))
