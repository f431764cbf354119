r"""Reinforcement learning of the `tiny` model on drills, with two hosts.

    python launch/demo.py --workdir=runs/demo     # with mid-training before it
    python launch/train.py --config=configs/rl_tiny.py --workdir=runs/more \
        --config.init_from=runs/demo/drills/checkpoints \
        --config.tokenizer=runs/demo/tokenizer.json

`init_from` must have been mid-trained on traces of drills. Variants, after a
colon:

    midtrain  that mid-training, from a model that knows code: set init_from,
              data.tokenizer and data.sources (a file that
              `composer_jax.rl.drills.write_traces` wrote).
    runlocal  a few steps of everything from random weights, for a test; give it
              any tokenizer of at most 300 tokens.
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
from configs import midtrain_tiny


def get_config(variant: str = "") -> ConfigDict:
  """The config of a variant; see above."""
  if variant == "midtrain":
    return _midtrain()
  config = ConfigDict(
    dataclasses.asdict(
      RlConfig(
        model=PRESETS["tiny"](),
        optimizer=OptimizerConfig(
          name="adamw", learning_rate=3e-4, warmup_steps=2, decay_fraction=0.0
        ),
        mesh=MeshConfig(),
        objective=ObjectiveConfig(),
        buffer=BufferConfig(groups=6, group_size=8, staleness=1),
        shape=BatchShape(rows=8, seq_len=256),
        rewards=RewardConfig({"solved": 1.0}),
        budget=Budget(turns=4, tokens=256, turn_tokens=64, wall_s=60.0),
        init_from="",
        tokenizer="",
        num_steps=28,
        train_tasks=200,
        dialect="drill",
        workers=1,
        max_rollouts=16,
        compare_every=5,
      )
    )
  )
  match variant:
    case "":
      pass
    case "runlocal":
      config.update(num_steps=4, train_tasks=8, eval_tasks=4, max_rollouts=4)
      config.model.update(vocab_size=300, width=32, num_layers=2, dense_dim=48)
      config.model.attention.update(num_heads=2, num_kv_heads=1, head_dim=16)
      config.model.moe.update(num_experts=4, expert_dim=16)
      config.buffer.update(groups=2, group_size=3)
      config.budget.update(turns=2, turn_tokens=12)
      # So that random weights have something to be better at.
      config.rewards.weights = {"solved": 1.0, "length": 1.0}
    case _:
      raise ValueError(f"no variant {variant!r}: choose midtrain or runlocal")
  return config


def _midtrain() -> ConfigDict:
  config = midtrain_tiny.get_config()
  config.update(num_steps=360, batch_size=32, eval_every=120, log_every=20)
  config.update(eval_batches=2)
  config.optimizer.update(learning_rate=3e-3, warmup_steps=10)
  # A trace has some fifty tokens, and is like many others.
  config.data.update(seq_len=64, fim_fraction=0.0, decontaminate=False)
  config.data.update(near_duplicate_threshold=0.0)
  return config
