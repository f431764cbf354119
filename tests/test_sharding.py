"""Mesh sizes, the rules' table, and sentences for what doesn't fit."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax import sharding
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.sharding import MeshConfig, make_mesh, partition_spec

SIZES = {"data": 2, "fsdp": 4, "expert": 8, "context": 1, "tensor": 2}


def test_one_axis_takes_the_rest():
  mesh = make_mesh(MeshConfig(expert=2, tensor=2))
  assert dict(mesh.shape) == {
    "data": 1,
    "fsdp": 2,
    "expert": 2,
    "context": 1,
    "tensor": 2,
  }


@pytest.mark.parametrize(
  ("config", "words"),
  [
    (MeshConfig(context=2), "context=2"),
    (MeshConfig(data=-1, fsdp=-1), "at most one of them -1"),
    (MeshConfig(fsdp=0), "must be positive"),
    (MeshConfig(tensor=3), "takes 3 devices, but there are 8"),
    (MeshConfig(fsdp=4), "takes 4 devices, but there are 8"),
  ],
)
def test_wrong_sizes_get_a_sentence(config, words):
  with pytest.raises(ValueError, match=words):
    make_mesh(config)


def test_a_mesh_axis_is_used_once_an_array():
  expert = ("experts", "embed", "gate_up", "mlp")
  assert partition_spec(expert, (8, 32, 2, 16), SIZES) == P(
    "expert", "fsdp", None, "tensor"
  )
  dense = ("embed", "gate_up", "mlp")
  assert partition_spec(dense, (32, 2, 16), SIZES) == P(
    ("fsdp", "expert"), None, "tensor"
  )


def test_uneven_splits_name_axis_size_and_divisor():
  with pytest.raises(ValueError) as error:
    partition_spec(("embed", "mlp"), (40, 16), SIZES, "parameter mlp.w_down")
  for words in (
    "'embed'",
    "parameter mlp.w_down",
    "40",
    "fsdp=4 x expert=8",
    "32, must divide it",
  ):
    assert words in str(error.value)
  with pytest.raises(ValueError, match="the batch has size 12"):
    sharding.batch_sharding(make_mesh(MeshConfig()), 12)


def test_every_parameter_of_every_preset_has_a_rule():
  for preset in PRESETS.values():
    model = LanguageModel(preset())
    for spec in jax.tree.leaves(
      (model.param_specs, model.balance_specs),
      is_leaf=lambda x: hasattr(x, "axes"),
    ):
      assert set(spec.axes) <= set(sharding.RULES), spec


@pytest.mark.parametrize("racks", [1, 8])
def test_rack_meshes_split_a_trillion_parameters(racks):
  config = sharding.nvl72_racks(racks)
  devices = 64 * racks
  sizes = {
    "data": config.data,
    "fsdp": config.fsdp,
    "expert": config.expert,
    "context": config.context,
    "tensor": config.tensor,
  }
  mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
  assert mesh.size == devices
  model = LanguageModel(PRESETS["kimi_k2_5"]())

  def local_elements(spec, shape):
    partition = partition_spec(spec.axes, shape.shape, sizes)
    local = jax.sharding.NamedSharding(mesh, partition).shard_shape(shape.shape)
    size = 1
    for n in local:
      size *= n
    return size

  local = jax.tree.map(
    local_elements,
    model.param_specs,
    model.param_shapes,
    is_leaf=lambda x: hasattr(x, "axes"),
  )
  # Within 1 % of an even split: nothing large is replicated.
  even = 1026.408e9 / devices
  assert sum(jax.tree.leaves(local)) < 1.01 * even
