"""A model as pure functions over nested dicts of arrays.

Training steps, optimizers, checkpoints and servers want plain pytrees: here a
`Transformer` is taken apart once, from shapes alone, into a static structure,
its parameters and its balancing state. Nothing is allocated until `init`.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from composer_jax import sharding
from composer_jax.models import paged
from composer_jax.models.config import ModelConfig
from composer_jax.models.moe import Replay
from composer_jax.models.parameter import ParamSpec
from composer_jax.models.transformer import (
  CachedOutput,
  Output,
  Transformer,
)

# Nested dicts with the module tree's names; leaves are arrays, shapes, specs.
Tree = dict[str, Any]


def _is_spec(leaf: Any) -> bool:
  return isinstance(leaf, ParamSpec)


class LanguageModel:
  """The functions of one `ModelConfig`.

  Attributes:
    config: what it was made from.
    param_specs: a `ParamSpec` for each parameter.
    param_shapes: a `jax.ShapeDtypeStruct` for each parameter.
    balance_specs: a `ParamSpec` for each layer kind's selection bias.
    balance_shapes: its shape; an empty dict if no router has a bias.
  """

  def __init__(self, config: ModelConfig):
    self.config = config
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    self._structure, params, balance = nnx.split(model, nnx.Param, ...)
    self.param_specs, self.param_shapes = _specs_and_shapes(params)
    self.balance_specs, self.balance_shapes = _specs_and_shapes(balance)

  def init(self, key: Array) -> tuple[Tree, Tree]:
    """Random parameters, float32, and a selection bias of zero."""
    model = Transformer(self.config, nnx.Rngs(params=key))
    _, params, balance = nnx.split(model, nnx.Param, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(balance)

  def apply(
    self,
    params: Tree,
    balance: Tree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    replay: Replay | None = None,
  ) -> Output:
    """The forward pass; see `Transformer.__call__`."""
    model = nnx.merge(self._structure, params, balance)
    return model(tokens, positions, segment_ids, replay)

  def apply_cached(
    self,
    params: Tree,
    balance: Tree,
    tokens: Int[Array, "B S"],
    rows: paged.Rows,
    pool: paged.Pool,
    last: Int[Array, " B"],
  ) -> CachedOutput:
    """The forward pass over a cache; see `Transformer.cached`."""
    model = nnx.merge(self._structure, params, balance)
    return model.cached(tokens, rows, pool, last)

  def compute_copy(self, params: Tree) -> Tree:
    """The parameters in the activations' dtype; routers and norms stay float32.

    Casting before the layers gather their parameters halves what they gather.
    """

    def cast(spec, param):
      return param if spec.float32 else param.astype(self.config.dtype)

    return jax.tree.map(cast, self.param_specs, params, is_leaf=_is_spec)

  def param_shardings(self, mesh: Mesh) -> Tree:
    """Where each parameter lives; see `sharding.RULES`."""
    return _shardings(mesh, self.param_specs, self.param_shapes)

  def balance_shardings(self, mesh: Mesh) -> Tree:
    """Where each selection bias lives."""
    return _shardings(mesh, self.balance_specs, self.balance_shapes)


def _specs_and_shapes(state: Any) -> tuple[Tree, Tree]:
  """Each variable's spec, and its shape, as nested dicts."""
  specs = {}
  for path, variable in nnx.to_flat_state(state):
    specs[path] = variable.get_metadata("spec")
  shapes = nnx.to_pure_dict(state)
  return nnx.traversals.unflatten_mapping(specs), shapes


def _shardings(mesh: Mesh, specs: Tree, shapes: Tree) -> Tree:
  def place(path, spec, shape):
    name = "parameter " + jax.tree_util.keystr(path, simple=True, separator=".")
    return sharding.named_sharding(mesh, spec.axes, shape.shape, name)

  return jax.tree_util.tree_map_with_path(
    place, specs, shapes, is_leaf=_is_spec
  )
