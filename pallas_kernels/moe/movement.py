"""Dispatch and combine of routed rows, as gathers in a fixed order.

A scatter-add would let the hardware choose the order of its sums. Each output
row here is read from the slots that `routing.py` gave it, k after k, so
the bits never vary, and the same code serves forward and backward: the gradient
of dispatch is a combine, that of combine a dispatch.

Slots come in two arrays of tiles, a head [heads, tile, ...] and a tail
[tails, tile, ...]; either may be empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def take(
  array: Shaped[Array, "N *rest"],
  index: Int[Array, "*slots"],
) -> Shaped[Array, "..."]:
  """Returns array[index], [*slots, *rest]; zeros where index is -1."""
  return array.at[index].get(
    mode="fill", fill_value=0, wrap_negative_indices=False
  )


def at_slots(
  slots: Int[Array, "*rows"],
  head: Shaped[Array, "heads tile *rest"],
  tail: Shaped[Array, "tails tile *rest"],
) -> Shaped[Array, "..."]:
  """Reads slots, numbered through head and then tail; zeros where -1."""
  head, tail = (a.reshape(-1, *a.shape[2:]) for a in (head, tail))
  if not len(tail):
    return take(head, slots)
  if not len(head):
    return take(tail, slots)
  in_tail = slots >= len(head)
  from_head = take(head, jnp.where(in_tail, -1, slots))
  from_tail = take(tail, jnp.where(in_tail, slots - len(head), -1))
  in_tail = in_tail.reshape(*slots.shape, *[1] * (head.ndim - 1))
  return jnp.where(in_tail, from_tail, from_head)


def combine(
  row_slot: Int[Array, "T K"],
  head: Float[Array, "heads tile H"],
  tail: Float[Array, "tails tile H"],
  gates: Float[Array, "T K"] | None = None,
) -> Float[Array, "T H"]:
  """Sums each token's rows in k order, in float32, times gates if given."""
  y = jnp.zeros((), jnp.float32)
  for k in range(row_slot.shape[1]):
    slots = row_slot[:, k]
    rows = at_slots(slots, head, tail).astype(jnp.float32)
    if gates is not None:  # A gate whose expert isn't here may be NaN.
      rows = jnp.where(slots >= 0, gates[:, k], 0.0)[:, None] * rows
    y = rows if k == 0 else y + rows
  return y
