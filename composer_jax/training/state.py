"""What a training run carries from step to step, and how it is born sharded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from composer_jax import sharding
from composer_jax.models import LanguageModel
from composer_jax.training.optimizer import abstract_state as abstract_opt_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """A pytree; everything that a checkpoint must hold but the data's position.

  Attributes:
    step: updates made.
    params: the master weights, float32.
    balance: the routers' selection bias.
    opt_state: of the optimizer.
  """

  step: Any
  params: Any
  balance: Any
  opt_state: Any


def abstract_state(
  model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
  """The state's shapes and shardings; nothing is allocated.

  Args:
    model: whose parameters.
    optimizer: whose state.
    mesh: where.

  Returns:
    A `jax.ShapeDtypeStruct` with a sharding for each array.

  Raises:
    ValueError: a parameter can't be split evenly.
  """

  def place(shape, where):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

  params = jax.tree.map(place, model.param_shapes, model.param_shardings(mesh))
  return TrainState(
    step=jax.ShapeDtypeStruct(
      (), jnp.int32, sharding=sharding.replicated(mesh)
    ),
    params=params,
    balance=jax.tree.map(
      place, model.balance_shapes, model.balance_shardings(mesh)
    ),
    opt_state=abstract_opt_state(optimizer, params),
  )


def shardings_of(abstract: PyTree) -> PyTree:
  """The shardings of a tree of `jax.ShapeDtypeStruct`."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(
  model: LanguageModel,
  optimizer: optax.GradientTransformation,
  abstract: TrainState,
  seed: int,
  given: dict[str, PyTree] | None = None,
) -> TrainState:
  """A state at step 0, each array made where it lives.

  Args:
    model: whose parameters.
    optimizer: whose state.
    abstract: from `abstract_state`.
    seed: of the random weights.
    given: `params` and `balance` to start from instead.
  """

  def init(given: dict[str, PyTree] | None) -> TrainState:
    if given is None:
      params, balance = model.init(jax.random.key(seed))
    else:
      params, balance = given["params"], given["balance"]
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      balance=balance,
      opt_state=optimizer.init(params),
    )

  return jax.jit(init, out_shardings=shardings_of(abstract))(given)
