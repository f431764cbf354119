"""Sums over the tokens that share an id, with the same bits on every run.

`jax.ops.segment_sum` is a scatter, which GPUs do with atomic additions in an
order of chance. Here values are sorted by id and summed by a segmented scan,
whose order is fixed. Not differentiated: callers stop gradients.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sums_by_id(
  values: Float[Array, " N"], ids: Int[Array, " N"], wanted: Int[Array, " M"]
) -> Float[Array, " M"]:
  """Sums the values under each wanted id; 0 for an id that isn't there."""
  order = jnp.argsort(ids, stable=True)
  ids = ids[order]

  def add(left, right):
    # Sorted: if both end in the same id, the right part holds nothing else.
    (left_sum, left_id), (right_sum, right_id) = left, right
    same = left_id == right_id
    return right_sum + jnp.where(same, left_sum, 0), right_id

  sums, _ = jax.lax.associative_scan(add, (values[order], ids))
  last = jnp.searchsorted(ids, wanted, side="right") - 1
  found = (last >= 0) & (ids[last] == wanted)
  return jnp.where(found, sums[last], 0)


def segment_totals(
  values: Float[Array, "B N"],
  loss_mask: Bool[Array, "B N"],
  segment_ids: Int[Array, "B N"],
) -> Float[Array, "B N"]:
  """Gives each loss token the sum over the loss tokens of its segment.

  Args:
    values: what to sum.
    loss_mask: which tokens count.
    segment_ids: which sequence of its row a token belongs to.

  Returns:
    The totals, the same bits throughout a segment; 0 outside of the mask.
  """
  ids = ids_of_loss(loss_mask, segment_ids)
  values = jnp.where(loss_mask, values, 0)
  totals = jax.vmap(sums_by_id)(values, ids, ids)
  return jnp.where(loss_mask, totals, 0)


def ids_of_loss(
  loss_mask: Bool[Array, "B N"], ids: Int[Array, "B N"]
) -> Int[Array, "B N"]:
  """The ids, with the largest integer outside of the mask: sorted last."""
  return jnp.where(loss_mask, ids, jnp.iinfo(ids.dtype).max)


def count_segments(
  loss_mask: Bool[Array, "B N"], segment_ids: Int[Array, "B N"]
) -> Int[Array, ""]:
  """Counts the segments that hold a loss token."""
  outside = jnp.iinfo(segment_ids.dtype).max
  ids = jnp.sort(ids_of_loss(loss_mask, segment_ids), axis=1)
  first = jnp.pad(
    ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=1
  )
  return (first & (ids != outside)).sum()
