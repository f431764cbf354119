"""Completions by plain forward passes, to look at what a model has learned.

Each new token runs the whole sequence again: fine for a page of text from a
small model. An engine with a cache, batches and routes is `serving`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.data import Tokenizer
from composer_jax.models import LanguageModel
from composer_jax.models.functional import Tree


def complete(
  model: LanguageModel,
  params: Tree,
  balance: Tree,
  tokenizer: Tokenizer,
  prompt: str,
  *,
  num_tokens: int = 100,
  temperature: float = 0.0,
  seed: int = 0,
) -> str:
  """Continues a prompt. Not inside `jax.set_mesh`: one row can't be split.

  Args:
    model: whose functions.
    params: its parameters.
    balance: its routers' selection bias.
    tokenizer: that it was trained with.
    prompt: what to continue.
    num_tokens: length of the continuation, unless the document ends first.
    temperature: of the softmax sampled from; 0 takes the likeliest token.
    seed: of the sampling.

  Returns:
    The continuation, without the prompt.
  """
  (prompt_ids,) = tokenizer.encode_batch([prompt])
  # As in training, a document starts with the token that ends the last one.
  ids = np.concatenate([[tokenizer.end_id], prompt_ids]).astype(np.int32)
  start, length = len(ids), len(ids) + num_tokens
  tokens = np.full((1, length), tokenizer.end_id, np.int32)
  tokens[0, :start] = ids
  tokens = _continue(
    model, params, balance, tokens, start, temperature, jax.random.key(seed)
  )
  new = np.asarray(tokens)[0, start:].tolist()
  if tokenizer.end_id in new:
    new = new[: new.index(tokenizer.end_id)]
  return tokenizer.decode(new)


@functools.partial(jax.jit, static_argnums=0)
def _continue(model, params, balance, tokens, start, temperature, key):
  """Fills `tokens` from `start` on, one position after another."""
  params = model.compute_copy(params)

  def append(position, tokens):
    logits = model.apply(params, balance, tokens).logits[:, position - 1]
    drawn = jax.random.categorical(
      jax.random.fold_in(key, position),
      logits / jnp.maximum(temperature, 1e-6),
    )
    token = jnp.where(temperature > 0, drawn, logits.argmax(-1))
    return tokens.at[:, position].set(token.astype(tokens.dtype))

  return jax.lax.fori_loop(start, tokens.shape[1], append, tokens)
