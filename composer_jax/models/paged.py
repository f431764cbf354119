"""A paged cache of what attention remembers of each token.

A *pool* holds pages of `page_size` tokens for all layers; a row (a sequence)
lists the pages that hold its tokens, in order, as PagedAttention has it (Kwon
et al. 2023, arXiv:2309.06180). What a token leaves in a layer is an *entry*:
rotated key and value heads (`Gqa`), or the latent and the rotary part of the
key (`Mla`). Who gets which page is the caller's business.

This is the portable form: a row's context is gathered into one array, so a step
costs memory traffic of the longest context that it is compiled for.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from composer_jax.models.config import MlaConfig, ModelConfig

# One array for each part of an entry: `[layers, pages, page_size, ...]`.
Pool = tuple[Array, ...]


class Rows(NamedTuple):
  """Which tokens a pass is over, and where their contexts lie.

  Attributes:
    pages: of each row, in order. The unused rest of a row's list may name any
      page: what lies there is masked.
    positions: of each token in its row.
    valid: False for padding, which is not written and visits no expert.
  """

  pages: Int[Array, "B P"]
  positions: Int[Array, "B S"]
  valid: Bool[Array, "B S"]


def pool_shapes(
  config: ModelConfig, num_pages: int, page_size: int
) -> tuple[tuple[int, ...], ...]:
  """Shapes of the arrays of a pool, which are in `config.dtype`."""
  attention = config.attention
  if isinstance(attention, MlaConfig):
    parts = (attention.kv_latent,), (attention.rope_dim,)
  else:
    head = (attention.num_kv_heads, attention.head_dim)
    parts = head, head
  front = (config.num_layers, num_pages, page_size)
  return tuple((*front, *part) for part in parts)


def write(
  pool: Pool, layer: Int[Array, ""], rows: Rows, entries: tuple[Array, ...]
) -> Pool:
  """Puts the entries, `[B, S, ...]` each, where the rows' tokens belong."""
  num_pages, page_size = pool[0].shape[1:3]
  index = jnp.where(rows.valid, rows.positions // page_size, 0)
  page = jnp.take_along_axis(rows.pages, index, axis=1)
  # A page that doesn't exist: dropped.
  page = jnp.where(rows.valid, page, num_pages)
  at = (layer, page, rows.positions % page_size)
  return tuple(
    part.at[at].set(entry.astype(part.dtype), mode="drop")
    for part, entry in zip(pool, entries, strict=True)
  )


def read(pool: Pool, layer: Int[Array, ""], rows: Rows) -> tuple[Array, ...]:
  """Each row's entries in order of position, `[B, P * page_size, ...]` each.

  Zero from the end of the row on: a page may still hold what another row, or
  weights that had diverged, left there, and a masked NaN is a NaN.
  """
  length = jnp.where(rows.valid, rows.positions + 1, 0).max(axis=1)
  return tuple(_read(part, layer, rows.pages, length) for part in pool)


def _read(part, layer, pages, length):
  context = part.at[layer, pages].get(mode="promise_in_bounds")
  context = context.reshape(len(pages), -1, *part.shape[3:])
  inside = jnp.arange(context.shape[1])[None] < length[:, None]
  inside = inside.reshape(*inside.shape, *[1] * (context.ndim - 2))
  return jnp.where(inside, context, 0)


def causal_mask(rows: Rows, context: int) -> Bool[Array, "B S T"]:
  """Which of the first `context` positions each token may attend to."""
  return jnp.arange(context)[None, None] <= rows.positions[:, :, None]
