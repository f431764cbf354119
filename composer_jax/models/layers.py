"""Parts that every layer is made of: norm, rotary positions, MLP, embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from composer_jax import sharding
from composer_jax.models import parameter


def einsum(equation: str, x: Array, weight: nnx.Param) -> Array:
  """A product with a weight, in the activation's dtype."""
  return jnp.einsum(equation, x, weight[...].astype(x.dtype))


class RmsNorm(nnx.Module):
  """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467).

  The mean square is computed in float32, whatever the activations are.
  """

  def __init__(self, axis: str, width: int, eps: float):
    self.scale = parameter.ones({axis: width})
    self.eps = eps

  def __call__(self, x: Float[Array, "*batch W"]) -> Float[Array, "*batch W"]:
    """Normalises the last axis."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(
      jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps
    )
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * inverse * scale).astype(x.dtype)


def rotate(
  x: Float[Array, "B S N D"], positions: Int[Array, "B S"], theta: float
) -> Float[Array, "B S N D"]:
  """Rotary positions (Su et al. 2021, arXiv:2104.09864).

  Pairs are (i, i + D/2), as Llama has them; weights trained with pairs
  (2i, 2i + 1) must be permuted on import.

  Args:
    x: queries or keys; D even.
    positions: of each token inside its own document.
    theta: base of the geometric series of frequencies.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency.reshape(
    1, 1, 1, half
  )
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)


class SwiGlu(nnx.Module):
  """A gated MLP (Shazeer 2020, arXiv:2002.05202); gate first, then up."""

  def __init__(self, rngs: nnx.Rngs, width: int, hidden: int):
    self.w_gate_up = parameter.weight(
      rngs,
      {"embed": width, "gate_up": 2, "mlp": hidden},
      contract=("embed",),
      batch=("gate_up",),
    )
    self.w_down = parameter.weight(
      rngs, {"mlp": hidden, "embed": width}, contract=("mlp",)
    )

  def __call__(self, x: Float[Array, "B S H"]) -> Float[Array, "B S H"]:
    """silu(x Wg) * (x Wu), projected down."""
    gate_up = einsum("bsh,hgi->bsgi", x, self.w_gate_up)
    hidden = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
    hidden = sharding.constrain(hidden, "batch", "sequence", "mlp")
    return einsum("bsi,ih->bsh", hidden, self.w_down)


@jax.custom_vjp
def lookup(
  table: Float[Array, "V H"], ids: Int[Array, "B S"]
) -> Float[Array, "B S H"]:
  """Rows of a table, with a gradient that is the same bits each time.

  The gradient adds the rows of equal ids. As a scatter that order is left to
  the GPU's atomics, so there it is a product with one-hot rows instead, which
  costs as much as one pass of the unembedding. XLA on the CPU scatters
  serially, in order, and keeps the scatter.
  """
  return table[ids]


def _lookup_fwd(table, ids):
  return table[ids], (ids, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_bwd(residuals, d_rows):
  ids, like = residuals
  vocab, dtype = like.shape[0], like.dtype

  def scatter(ids, d_rows):
    zeros = jnp.zeros((vocab, d_rows.shape[-1]), jnp.float32)
    d_table = zeros.at[ids].add(d_rows.astype(jnp.float32))
    # Each device adds up its own rows; the table is split afterwards.
    return sharding.constrain(d_table, None, None)

  def one_hot(ids, d_rows):
    hot = jax.nn.one_hot(ids, vocab, dtype=d_rows.dtype)
    return jnp.einsum(
      "bsv,bsh->vh", hot, d_rows, preferred_element_type=jnp.float32
    )

  d_table = jax.lax.platform_dependent(
    ids, d_rows, cpu=scatter, default=one_hot
  )
  return d_table.astype(dtype), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)
