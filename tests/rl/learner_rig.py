"""A small model with its learner, and trajectories that it might have made."""

import dataclasses
import functools

import jax
import numpy as np

from composer_jax.models import GqaConfig, LanguageModel
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.learner import Learner, LearnerConfig
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from composer_jax.sharding import MeshConfig, make_mesh
from composer_jax.training import state as state_lib
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer
from tests.training.helpers import SMALL, capture, make_params, make_state

MODEL = dataclasses.replace(
  SMALL,
  vocab_size=32,
  width=16,
  num_layers=2,
  num_dense_layers=0,
  dense_dim=0,
  attention=GqaConfig(num_heads=2, num_kv_heads=2, head_dim=8),
)
SHAPE = BatchShape(rows=4, seq_len=24)


def make_trajectory(
  rng, length=12, prompt=3, task_id="t", reward=None, **changes
) -> Trajectory:
  """A prompt, then replies and observations by chance; the last is sampled."""
  mask = np.arange(length) >= prompt
  mask &= (rng.random(length) < 0.7) | (np.arange(length) == length - 1)
  experts = MODEL.moe.num_experts
  routes = np.argsort(rng.random((length, MODEL.num_moe_layers, experts)))
  fields = {
    "token_ids": rng.integers(0, MODEL.vocab_size, length, np.int32),
    "loss_mask": mask,
    "logprobs": np.where(mask, -rng.random(length) - 3, 0).astype(np.float32),
    "versions": np.where(mask, rng.integers(0, 5, length), -1).astype(np.int32),
    "routes": routes[..., : MODEL.moe.router.top_k].astype(np.uint8),
    "sampling": Sampling(),
    "rewards": {"r": float(rng.integers(0, 2)) if reward is None else reward},
    "task_id": task_id,
    "stop_reason": "finish",
  }
  return Trajectory(**fields | changes)


def make_groups(seed=0, groups=3, size=4, longest=20) -> list[Group]:
  """Groups of trajectories of all lengths; no group's rewards are all equal."""
  rng = np.random.default_rng(seed)
  return [
    Group(
      f"task {g}",
      tuple(
        make_trajectory(
          rng,
          length=int(rng.integers(6, longest)),
          task_id=f"task {g}",
          reward=float(member == 0) + float(rng.integers(0, 2)),
        )
        for member in range(size)
      ),
    )
    for g in range(groups)
  ]


@functools.cache
def _build(optimizer, mesh_config, learning_rate, config) -> Learner:
  """A learner without weights; compiles once for all tests of a process."""
  model = LanguageModel(MODEL)
  devices = jax.devices()[: 1 if mesh_config == ONE else None]
  settings = OptimizerConfig(
    learning_rate=learning_rate, schedule="constant", warmup_steps=0
  )
  optimizer = optimizer or make_optimizer(settings, model.param_specs, 100)
  return Learner(model, optimizer, config, make_mesh(mesh_config, devices))


CAPTURE = capture()
ONE = MeshConfig()


def make_learner(
  *,
  optimizer=None,
  mesh=ONE,
  learning_rate=1e-3,
  weights=0,
  anchor="policy",
  **changes,
) -> Learner:
  """A learner of weights by chance, on one device; one at a time of a kind.

  Args:
    optimizer: AdamW by default; `CAPTURE` keeps gradients.
    mesh: the mesh's sizes.
    learning_rate: AdamW's.
    weights: another number, other weights.
    anchor: see `LearnerConfig`.
    changes: of the config.
  """
  config = LearnerConfig(
    **{"objective": ObjectiveConfig(), "shape": SHAPE, "budget": 100.0}
    | changes
  )
  learner = _build(optimizer, mesh, learning_rate, config)
  # Nothing that is compiled depends on it.
  learner.config = dataclasses.replace(config, anchor=anchor)
  model = learner.model
  state = make_state(model, learner._optimizer, make_params(model, weights))
  learner.state = jax.device_put(
    state, state_lib.shardings_of(learner._abstract)
  )
  learner._keep_reference(learner.state)
  return learner
