"""On a GPU, a training step gives the same bits each time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.data import DataConfig
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.sharding import MeshConfig, make_mesh
from composer_jax.training import state as state_lib
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer
from composer_jax.training.step import Batch, make_train_step


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_repeat_bit_for_bit(optimizer):
  config = TrainConfig(
    model=dataclasses.replace(PRESETS["small"](), num_layers=3),
    data=DataConfig(seq_len=512),
    optimizer=OptimizerConfig(name=optimizer, warmup_steps=1),
    mesh=MeshConfig(),
    batch_size=16,
    num_steps=10,
  )
  model = LanguageModel(config.model)
  update = make_optimizer(config.optimizer, model.param_specs, 10)
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  tokens = jax.random.randint(jax.random.key(0), (16, 512), 0, 16_384)
  place = jnp.broadcast_to(jnp.arange(512), tokens.shape)
  batch = Batch(
    tokens=tokens,
    targets=jnp.roll(tokens, -1, axis=1),
    positions=place % 128,
    segment_ids=1 + place // 128,
    loss_mask=jnp.ones(tokens.shape, bool),
  )
  token_bytes = np.ones(16_384, np.int32)
  step = jax.jit(make_train_step(model, update, config, token_bytes))
  with jax.set_mesh(mesh):
    abstract = state_lib.abstract_state(model, update, mesh)
    runs = []
    for _ in range(3):
      state = state_lib.init_state(model, update, abstract, 0)
      for _ in range(3):
        state, _ = step(state, batch)
      runs.append(jax.device_get(state))
  for run in runs[1:]:
    jax.tree.map(np.testing.assert_array_equal, run, runs[0])
