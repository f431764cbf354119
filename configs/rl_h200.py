r"""Reinforcement learning of 0.4B parameters (0.2B active) on one H200.

On tasks of repair and on puzzles, which any machine can make:

    python launch/tasks.py build --from=toolz --from=more-itertools --nosuite \
        --from=boltons --from=puzzles --puzzles=40 --out=tasks.jsonl.xz
    python -m composer_jax.rl.demonstrations --tasks=tasks.jsonl.xz \
        --held_out=100 --out=demonstrations.zip

Then on the GPU, mid-training and RL, which share the card: so no process may
take all of its memory at once.

    python launch/train.py --config=configs/rl_h200.py:midtrain \
        --workdir=runs/h200/midtrain \
        --config.data.sources='("stdlib", "demonstrations.zip")'
    XLA_PYTHON_CLIENT_PREALLOCATE=false \
    python launch/train.py --config=configs/rl_h200.py --workdir=runs/h200/rl \
        --config.init_from=runs/h200/midtrain/checkpoints \
        --config.tokenizer=runs/h200/midtrain/data/data-.../tokenizer.json \
        --config.tasks=tasks.jsonl.xz

It has never run on a GPU. The variant `runlocal`, like that of `rl_tiny`, is a
few steps of a shrunken model, for a test.
"""

import dataclasses

from ml_collections import ConfigDict

from composer_jax.envs.harness import Budget
from composer_jax.envs.rewards import RewardConfig
from composer_jax.models import PRESETS
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.buffer import BufferConfig
from composer_jax.rl.config import RlConfig
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.sharding import MeshConfig
from composer_jax.training.optimizer import OptimizerConfig
from configs import midtrain_small, rl_tiny

_EXPERTS = 24
_TOKENS = 2048


def get_config(variant: str = "") -> ConfigDict:
  """The config of a variant; see above."""
  match variant:
    case "":
      return _rl()
    case "midtrain":
      return _midtrain()
    case "runlocal":
      return rl_tiny.get_config("runlocal")
  raise ValueError(f"no variant {variant!r}: choose midtrain or runlocal")


def _rl() -> ConfigDict:
  model = PRESETS["small"]()
  config = RlConfig(
    model=dataclasses.replace(
      model, moe=dataclasses.replace(model.moe, num_experts=_EXPERTS)
    ),
    optimizer=OptimizerConfig(
      name="adamw", learning_rate=2e-5, warmup_steps=2, decay_fraction=0.0
    ),
    mesh=MeshConfig(),
    objective=ObjectiveConfig(),
    buffer=BufferConfig(groups=16, group_size=8, staleness=1),
    shape=BatchShape(rows=8, seq_len=_TOKENS),
    rewards=RewardConfig({"solved": 1.0}),
    budget=Budget(turns=8, tokens=_TOKENS, turn_tokens=256, wall_s=120.0),
    init_from="",
    tokenizer="",
    num_steps=60,
    tasks="tasks.jsonl.xz",
    train_tasks=10_000,
    eval_tasks=100,
    dialect="drill",
    hosts=1,
    workers=2,
    max_rollouts=48,
    compare_every=10,
    checkpoint_every=10,
  )
  return ConfigDict(dataclasses.asdict(config))


def _midtrain() -> ConfigDict:
  config = midtrain_small.get_config()
  config.model.moe.num_experts = _EXPERTS
  config.update(num_steps=400, batch_size=32, eval_every=200, eval_batches=4)
  config.update(checkpoint_every=400)
  config.optimizer.warmup_steps = 40
  config.data.update(fim_fraction=0.0, near_duplicate_threshold=0.0)
  config.data.update(sources=("stdlib", "demonstrations.zip"))
  return config
