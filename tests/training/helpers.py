"""A model small enough to compile often, batches for it, and comparisons."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.data import DataConfig
from composer_jax.models import (
  GqaConfig,
  LanguageModel,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)
from composer_jax.models.parameter import ParamSpec
from composer_jax.sharding import MeshConfig
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import OptimizerConfig
from composer_jax.training.state import TrainState
from composer_jax.training.step import Batch

# One dense and two MoE layers; every axis can be split in two, and `embed` and
# `experts` in eight.
SMALL = ModelConfig(
  vocab_size=64,
  width=32,
  num_layers=3,
  num_dense_layers=1,
  dense_dim=48,
  attention=GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8),
  moe=MoeConfig(
    num_experts=8,
    expert_dim=16,
    num_shared=1,
    router=RouterConfig("sigmoid", top_k=2, selection_bias=True),
  ),
  dtype="float32",
  remat="none",
)
# What each token of the vocabulary stands for.
TOKEN_BYTES = np.arange(SMALL.vocab_size, dtype=np.int32) % 5


def train_config(**changes: Any) -> TrainConfig:
  """A config of `SMALL`, for what reads a step's knobs from one."""
  config = TrainConfig(
    model=SMALL,
    data=DataConfig(seq_len=32),
    optimizer=OptimizerConfig(warmup_steps=0, schedule="constant"),
    mesh=MeshConfig(),
    batch_size=8,
    num_steps=100,
  )
  return dataclasses.replace(config, **changes)


def make_params(model: LanguageModel, seed: int = 0) -> Any:
  """Weights of the size that `model.init` gives them, without compiling it."""
  rng = np.random.default_rng(seed)

  def draw(shape):
    return jnp.asarray(0.2 * rng.normal(size=shape.shape), shape.dtype)

  def one(spec, shape):
    is_norm = spec.float32 and not spec.is_matrix
    return jnp.ones(shape.shape) if is_norm else draw(shape)

  return jax.tree.map(
    one,
    model.param_specs,
    model.param_shapes,
    is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
  )


def make_state(
  model: LanguageModel, optimizer: optax.GradientTransformation, params: Any
) -> TrainState:
  """A state at step 0, on the default device."""
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), model.balance_shapes)
  return TrainState(jnp.int32(0), params, zeros, optimizer.init(params))


def make_batch(seed: int = 0, rows: int = 8, seq_len: int = 32) -> Batch:
  """Packed rows of random documents, two a row, then padding.

  The first row is empty, the last one full, and those between in between.
  """
  rng = np.random.default_rng(seed)
  segment_ids = np.zeros((rows, seq_len), np.int32)
  positions = np.zeros((rows, seq_len), np.int32)
  for row in range(rows):
    used = seq_len * row // (rows - 1)
    cut = used // 3
    for segment, (start, stop) in enumerate([(0, cut), (cut, used)], 1):
      segment_ids[row, start:stop] = segment
      positions[row, start:stop] = np.arange(stop - start)
  tokens, targets = rng.integers(
    0, SMALL.vocab_size, (2, rows, seq_len), np.int32
  )
  return Batch(
    *map(jnp.asarray, (tokens, targets, positions, segment_ids)),
    loss_mask=jnp.asarray(segment_ids > 0),
  )


class Captured(NamedTuple):
  """State of `capture`: the last gradients and their norm."""

  grad_norm: Any
  grads: Any


def capture(rate: float = 0.0) -> optax.GradientTransformation:
  """Gradient descent that keeps the last gradients in its state."""

  def init(params):
    return Captured(jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

  def update(grads, state, params=None):
    del state, params
    updates = jax.tree.map(lambda g: -rate * g, grads)
    return updates, Captured(optax.tree.norm(grads), grads)

  return optax.GradientTransformation(init, update)


def assert_same_bits(actual: Any, expected: Any) -> None:
  """Two trees have the same structure, dtypes, shapes and bytes."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(actual),
    jax.tree.leaves(expected),
    strict=True,
  ):
    a, b = np.asarray(a), np.asarray(b)
    name = jax.tree_util.keystr(path)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    assert a.tobytes() == b.tobytes(), name


def assert_rounding_apart(actual: Any, expected: Any, tolerance: float) -> None:
  """Each array differs by at most this fraction of its largest element."""
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(actual),
    jax.tree.leaves(expected),
    strict=True,
  ):
    a, b = np.asarray(a), np.asarray(b)
    largest = np.abs(b).max()
    assert largest > 0, f"{jax.tree_util.keystr(path)} is all zeros"
    error = np.abs(a - b).max() / largest
    assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"
