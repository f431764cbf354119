"""What the engine serves: a plain tree of arrays, checked before it is used."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import LanguageModel
from composer_jax.serving.types import WeightError

# {"params": ..., "balance": ...}; see `serving_weights`.
Weights = dict[str, Any]


def weight_shapes(model: LanguageModel) -> Weights:
  """A `jax.ShapeDtypeStruct` for each array that an engine must be given."""
  return {
    "params": jax.eval_shape(model.compute_copy, model.param_shapes),
    "balance": model.balance_shapes,
  }


def serving_weights(model: LanguageModel, params: Any, balance: Any) -> Weights:
  """What an engine serves of a training state: the compute copy, and the bias.

  This tree is also what should be shipped: in 16 bits most of a master weight's
  small changes round away.

  Args:
    model: whose functions.
    params: its parameters, float32 or already in the compute dtype.
    balance: its routers' selection bias.
  """
  return {"params": model.compute_copy(params), "balance": balance}


def place(
  weights: Weights, shapes: Weights, device: jax.Device, version: int
) -> Weights:
  """A copy on the device, of weights that have the right shapes.

  A copy, since a trainer donates its arrays to its next step.

  Raises:
    WeightError: an array is missing, unknown, or of another shape or dtype, or
      the device has no room for it.
  """
  given, wanted = _by_path(weights), _by_path(shapes)
  _check(given, wanted, version)
  # On the CPU, JAX would go on using the memory of a NumPy array.
  leaves = [
    np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
    for leaf in (given[path] for path in wanted)
  ]
  weights = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  where = jax.sharding.SingleDeviceSharding(device)
  try:
    copies = jax.device_put(weights, where, may_alias=False)
    return jax.block_until_ready(copies)
  except (RuntimeError, ValueError) as error:
    raise WeightError(
      f"Version {version} could not be copied to {device}: {error}"
    ) from error


def _check(given, wanted, version):
  for path in sorted(wanted.keys() - given.keys()):
    raise WeightError(
      f"Version {version} lacks {path}: its tree must be that of"
      " `serving_weights` for this model."
    )
  for path in sorted(given.keys() - wanted.keys()):
    raise WeightError(
      f"Version {version} has {path}, which this model doesn't: its tree must"
      " be that of `serving_weights` for this model."
    )
  for path, leaf in wanted.items():
    new = given[path]
    if not isinstance(new, jax.Array | np.ndarray):
      raise WeightError(
        f"Version {version} has a {type(new).__name__} at {path}: an array is"
        " needed."
      )
    if new.shape != leaf.shape or jnp.dtype(new.dtype) != leaf.dtype:
      raise WeightError(
        f"Version {version} has {path} as {new.dtype}{list(new.shape)}, but the"
        f" engine serves {leaf.dtype}{list(leaf.shape)}: was it made for"
        " another model, or not passed through `serving_weights`?"
      )


def _by_path(tree):
  # None isn't a leaf for JAX; here it is a mistake to be told.
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda leaf: leaf is None
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }
