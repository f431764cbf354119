r"""Reinforcement learning of the `tiny` model on drills, with two hosts.

    python launch/demo.py --workdir=runs/demo      # what `make demo` does
    python launch/train.py --config=configs/rl_tiny.py --workdir=runs/rl \
        --config.init_from=runs/demo/midtrain/checkpoints \
        --config.tokenizer=runs/demo/tokenizer.json

`init_from` must have been mid-trained on traces of drills, as `midtrain` does.
Variants, after a colon:

    demo      what `make demo` runs.
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


def get_config(variant: str = "") -> ConfigDict:
  """The config of a variant; see above."""
  config = ConfigDict(
    dataclasses.asdict(
      RlConfig(
        model=PRESETS["tiny"](),
        optimizer=OptimizerConfig(
          name="adamw", learning_rate=1e-3, warmup_steps=2, decay_fraction=0.0
        ),
        mesh=MeshConfig(),
        objective=ObjectiveConfig(),
        buffer=BufferConfig(groups=8, group_size=8, staleness=1),
        shape=BatchShape(rows=8, seq_len=256),
        rewards=RewardConfig({"solved": 1.0}),
        budget=Budget(turns=4, tokens=256, turn_tokens=64, wall_s=60.0),
        init_from="",
        tokenizer="",
        num_steps=40,
        dialect="drill",
        workers=1,
        max_rollouts=16,
      )
    )
  )
  match variant:
    case "" | "demo":
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
      raise ValueError(f"no variant {variant!r}: choose demo or runlocal")
  return config
