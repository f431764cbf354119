"""One declaration a parameter: shape, logical axes, initialiser.

`weight(rngs, dict(embed=512, mlp=2048), contract=("embed",))` names every axis.
From the names follow the sharding (`composer_jax.sharding`), the initial scale
(fan-in is the product of the contracted axes) and which axes Muon treats as a
matrix (`composer_jax.training.optimizer`). Nothing about a parameter is said
anywhere else.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """What is known of a parameter beside its values.

  Attributes:
    axes: the logical name of each axis, in order.
    contract: names of the axes that a matrix product sums over.
    batch: names of the axes that index separate matrices (layers, experts).
      The axes in neither set are the product's output. A parameter with no
      contracted axis is not a matrix: norms, biases and lookup tables.
    float32: kept in float32 in the compute copy too (norms, and routers: a
      difference in the fifth decimal picks another expert).
  """

  axes: tuple[str, ...]
  contract: tuple[str, ...] = ()
  batch: tuple[str, ...] = ()
  float32: bool = False

  @property
  def is_matrix(self) -> bool:
    """Whether the parameter is a (batch of) matrix, as Muon understands it."""
    return bool(self.contract)

  def stacked(self, name: str) -> "ParamSpec":
    """The spec of the same parameter stacked along a new leading axis."""
    return dataclasses.replace(
      self, axes=(name, *self.axes), batch=(name, *self.batch)
    )


def weight(
  rngs: nnx.Rngs,
  shape: Mapping[str, int],
  *,
  contract: tuple[str, ...],
  batch: tuple[str, ...] = (),
  scale: float = 1.0,
  float32: bool = False,
) -> nnx.Param:
  """A matrix, drawn from N(0, scale^2 / fan_in) cut at two sigma.

  Args:
    rngs: the source of random bits.
    shape: axis name to size, in order.
    contract: the axes that the product sums over; their size is the fan-in.
    batch: the axes that index separate matrices.
    scale: multiplies the standard deviation.
    float32: see `ParamSpec`.

  Returns:
    A float32 parameter that carries its `ParamSpec` as `spec`.
  """
  fan_in = math.prod(shape[name] for name in contract)
  # The standard deviation of a unit normal cut at two sigma is 0.87962566.
  stddev = scale / math.sqrt(fan_in) / 0.87962566
  value = stddev * jax.random.truncated_normal(
    rngs.params(), -2.0, 2.0, tuple(shape.values()), jnp.float32
  )
  return nnx.Param(
    value, spec=ParamSpec(tuple(shape), contract, batch, float32)
  )


def table(
  rngs: nnx.Rngs, shape: Mapping[str, int], *, stddev: float
) -> nnx.Param:
  """A lookup table, drawn from N(0, stddev^2)."""
  value = stddev * jax.random.normal(
    rngs.params(), tuple(shape.values()), jnp.float32
  )
  return nnx.Param(value, spec=ParamSpec(tuple(shape)))


def ones(shape: Mapping[str, int]) -> nnx.Param:
  """The scale of a norm; kept in float32."""
  value = jnp.ones(tuple(shape.values()), jnp.float32)
  return nnx.Param(value, spec=ParamSpec(tuple(shape), float32=True))
