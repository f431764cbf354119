"""On eight emulated devices all is as on one: born, updated, saved, loaded."""

import functools

import grain
import jax
import numpy as np
import pytest
from helpers import (
  SMALL,
  TOKEN_BYTES,
  assert_rounding_apart,
  assert_same_bits,
  capture,
  make_batch,
  train_config,
)

from composer_jax import sharding
from composer_jax.models import LanguageModel
from composer_jax.sharding import MeshConfig
from composer_jax.training import state as state_lib
from composer_jax.training.checkpoint import Checkpoints
from composer_jax.training.loop import train
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer
from composer_jax.training.step import make_train_step

MODEL = LanguageModel(SMALL)
# Has both kinds of state: Muon's one moment and AdamW's two.
MUON = make_optimizer(OptimizerConfig("muon"), MODEL.param_specs, 1000)
MESHES = {
  "fsdp 8": MeshConfig(fsdp=8),
  "expert 8": MeshConfig(fsdp=1, expert=8),
  "fsdp 2, expert 4": MeshConfig(fsdp=2, expert=4),
  "tensor 2, expert 4": MeshConfig(fsdp=1, tensor=2, expert=4),
  "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
}
# Of one device: layers, experts, width, gate and up, hidden.
GATE_UP_SHARDS = {
  "fsdp 8": (2, 8, 4, 2, 16),
  "expert 8": (2, 1, 32, 2, 16),
  "fsdp 2, expert 4": (2, 2, 16, 2, 16),
  "tensor 2, expert 4": (2, 2, 32, 2, 8),
  "data 2, fsdp 2, tensor 2": (2, 8, 16, 2, 8),
}
pytestmark = pytest.mark.usefixtures("quick_compilation")
on_every_mesh = pytest.mark.parametrize("name", MESHES)


def place(tree, abstract):
  return jax.tree.map(
    lambda x, a: jax.device_put(x, a.sharding), tree, abstract
  )


@functools.cache
def make_mesh(name):
  if name == "one device":
    return sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  return sharding.make_mesh(MESHES[name])


@functools.cache
def initial_state(name):
  mesh = make_mesh(name)
  abstract = state_lib.abstract_state(MODEL, MUON, mesh)
  return state_lib.init_state(MODEL, MUON, abstract, seed=3), abstract


@functools.cache
def first_update(name):
  """What one step gives, and the gradients, as NumPy arrays."""
  mesh, optimizer = make_mesh(name), capture()
  abstract = state_lib.abstract_state(MODEL, optimizer, mesh)
  born, _ = initial_state("one device")
  zeros = jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract.opt_state
  )
  state = state_lib.TrainState(born.step, born.params, born.balance, zeros)
  state = place(jax.device_get(state), abstract)
  batch = jax.device_put(make_batch(), sharding.batch_sharding(mesh, 8))
  step = jax.jit(
    make_train_step(MODEL, optimizer, train_config(z_loss=0.1), TOKEN_BYTES),
    out_shardings=(
      state_lib.shardings_of(abstract),
      sharding.replicated(mesh),
    ),
  )
  with jax.set_mesh(mesh):
    # Fetching waits: few programs may be in flight on emulated devices.
    return jax.device_get(step(state, batch))


@on_every_mesh
def test_is_born_the_same_on_every_mesh(name):
  expected, _ = initial_state("one device")
  state, abstract = initial_state(name)
  assert_same_bits(jax.device_get(state), jax.device_get(expected))
  placed = jax.tree.map(lambda x, a: x.sharding == a.sharding, state, abstract)
  assert all(jax.tree.leaves(placed))


@on_every_mesh
def test_nothing_large_is_replicated(name):
  state, _ = initial_state(name)
  sizes = dict(make_mesh(name).shape)
  everywhere = sizes["fsdp"] * sizes["expert"]
  for path, array in jax.tree_util.tree_leaves_with_path(state):
    if array.size <= 8 or "balance" in jax.tree_util.keystr(path):
      continue  # counts, norms of gradients, selection biases
    is_split_by_tensor = not {"w_router", "scale"} & {
      getattr(key, "key", None) for key in path
    }
    parts = everywhere * (sizes["tensor"] if is_split_by_tensor else 1)
    for shard in array.addressable_shards:
      assert shard.data.size * parts == array.size, jax.tree_util.keystr(path)

  def gate_ups(tree):
    return [
      {shard.data.shape for shard in array.addressable_shards}
      for path, array in jax.tree_util.tree_leaves_with_path(tree)
      if "['moe']['w_gate_up']" in jax.tree_util.keystr(path)
    ]

  assert gate_ups(state.params) == [{GATE_UP_SHARDS[name]}]
  assert gate_ups(state.opt_state) == [{GATE_UP_SHARDS[name]}]


@on_every_mesh
def test_loss_gradients_and_load_are_those_of_one_device(name):
  expected, metrics = first_update("one device")
  state, mesh_metrics = first_update(name)
  assert (metrics["load"].sum(1) == 2 * metrics["tokens"]).all()
  np.testing.assert_array_equal(mesh_metrics["load"], metrics["load"])
  assert_same_bits(state.balance, expected.balance)
  assert_rounding_apart(mesh_metrics, metrics, 1e-6)
  assert_rounding_apart(state.opt_state.grads, expected.opt_state.grads, 5e-6)


def test_a_checkpoint_of_one_mesh_opens_on_another(tmp_path):
  state, _ = initial_state("fsdp 2, expert 4")
  # Numbers that tell moments from parameters, and one place from another.
  state = jax.tree.map(
    lambda x: jax.device_put(
      np.arange(x.size, dtype=x.dtype).reshape(x.shape) + x.size, x.sharding
    ),
    state,
  )
  data = iter(grain.MapDataset.range(9).to_iter_dataset())
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    checkpoints.save(1, state, data, {})
    checkpoints.wait()
    for name in ("tensor 2, expert 4", "data 2, fsdp 2, tensor 2"):
      abstract = state_lib.abstract_state(MODEL, MUON, make_mesh(name))
      _, restored, _ = checkpoints.restore(abstract, data)
      assert_same_bits(jax.device_get(restored), jax.device_get(state))
      placed = jax.tree.map(
        lambda x, a: x.sharding == a.sharding, restored, abstract
      )
      assert all(jax.tree.leaves(placed))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"mesh": MeshConfig(fsdp=3)},
      "Mesh data=1 fsdp=3 expert=1 context=1 tensor=1 takes 3 devices, but"
      " there are 8: the product of all axes must equal that number (-1 on one"
      " axis takes the rest).",
    ),
    (
      {"mesh": MeshConfig(expert=3)},
      "Mesh data=1 fsdp=-1 expert=3 context=1 tensor=1 takes 3 devices, but"
      " there are 8: the product of the other axes must divide that number so"
      " that fsdp can take the rest.",
    ),
    (
      {"batch_size": 12},
      "Axis 'batch' of the batch has size 12, which mesh axes fsdp=8 can't"
      " split: their product, 8, must divide it.",
    ),
    (
      {"batch_size": 8, "accumulate": 2, "mesh": MeshConfig(expert=4)},
      "Axis 'batch' of the batch has size 4, which mesh axes fsdp=2 x expert=4"
      " can't split: their product, 8, must divide it.",
    ),
  ],
)
def test_sizes_that_do_not_fit_are_told_in_a_sentence(
  changes, message, tmp_path
):
  with pytest.raises(ValueError) as error:
    train(train_config(**changes), tmp_path)
  assert str(error.value) == message
  assert not list(tmp_path.iterdir())


def test_a_parameter_that_can_not_be_split_is_named():
  with pytest.raises(ValueError) as error:
    state_lib.abstract_state(
      MODEL, MUON, sharding.make_mesh(MeshConfig(fsdp=2, tensor=4))
    )
  assert str(error.value) == (
    "Axis 'kv_heads' of parameter dense.layers.attention.w_k has size 2, which"
    " mesh axes tensor=4 can't split: their product, 4, must divide it."
  )
