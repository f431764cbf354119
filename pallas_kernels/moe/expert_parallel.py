"""Experts spread over the ranks of a mesh axis, by XLA collectives alone.

Every rank gathers the tokens of all ranks, computes what its own experts add to
them, and a reduce-scatter brings the sums home. Dropless whatever the routing,
on any backend; it moves every token to every rank, which is the price of having
no routing-dependent communication.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def apply(
  implementation,
  x: Float[Array, "T H"],
  expert_ids: Int[Array, "T K"],
  gates: Float[Array, "T K"],
  w_gate_up: Float[Array, "E H 2 I"],
  w_down: Float[Array, "E I H"],
  *,
  axis_name: str,
  out_dtype: DTypeLike | None = None,
) -> Float[Array, "T H"]:
  """`moe_ffn` over the ranks of `axis_name`, called inside shard_map.

  Args:
    implementation: the layer on one rank: `apply` of xla.py, for instance.
    x: this rank's tokens.
    expert_ids: global expert ids of this rank's tokens.
    gates: float32 weights of this rank's tokens.
    w_gate_up: weights of this rank's experts. Rank r holds the experts from
      r * E on, E being the number of experts a rank.
    w_down: likewise.
    axis_name: the mesh axis.
    out_dtype: dtype of the result, x.dtype by default.

  Returns:
    The combined outputs of this rank's tokens. Partial sums travel in float32.
  """
  first = lax.axis_index(axis_name) * len(w_down)
  rows = expert_ids.size  # As many as land on each rank when balanced.
  x_all, ids_all, gates_all = (
    lax.all_gather(a, axis_name, tiled=True) for a in (x, expert_ids, gates)
  )
  partial = implementation(
    x_all,
    ids_all - first,
    gates_all,
    w_gate_up,
    w_down,
    expected_rows=rows,
    out_dtype=jnp.float32,
  )
  y = lax.psum_scatter(partial, axis_name, scatter_dimension=0, tiled=True)
  return y.astype(out_dtype or x.dtype)
