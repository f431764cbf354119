r"""Mid-trains the `small` model (0.9B parameters, 0.2B active) on one GPU.

    python launch/train.py --config=configs/midtrain_small.py \
        --workdir=runs/small

The corpus is this Python's standard library and installed packages: name other
folders or wheels with --config.data.sources where packages come and go, since a
run can't go on with a changed corpus. 4,000 steps are 262M tokens: about 35
minutes on one H200, estimated from the short schedule. Variants, after a colon:

    minutes   500 steps: five minutes on one H200, to 1.03 validation bits per
              byte on 150 MB of packages.
    runlocal  a few steps of a shrunken model, for a test without a GPU.
"""

import dataclasses
import sysconfig

from ml_collections import ConfigDict

from composer_jax.data import DataConfig
from composer_jax.models import PRESETS
from composer_jax.sharding import MeshConfig
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import OptimizerConfig


def get_config(variant: str = "") -> ConfigDict:
  """The config of a variant; see above."""
  model = PRESETS["small"]()
  config = ConfigDict(
    dataclasses.asdict(
      TrainConfig(
        model=model,
        data=DataConfig(
          sources=("stdlib", sysconfig.get_path("purelib")),
          max_bytes=150_000_000,
          vocab_size=model.vocab_size,
          seq_len=2048,
          validation_fraction=0.01,
        ),
        optimizer=OptimizerConfig(
          name="muon", learning_rate=1e-3, warmup_steps=100, decay_fraction=0.5
        ),
        mesh=MeshConfig(),
        batch_size=32,
        num_steps=4000,
        balance_rate=0.005,
        eval_every=250,
        eval_batches=16,
        log_every=10,
        checkpoint_every=1000,
      )
    )
  )
  config.data.vocab_size = config.model.get_ref("vocab_size")
  config.model.attention_kernel = "auto"
  match variant:
    case "":
      pass
    case "minutes":
      config.update(num_steps=500, eval_every=100, checkpoint_every=500)
      config.optimizer.warmup_steps = 40
    case "runlocal":
      config.update(num_steps=4, log_every=1, eval_every=2, eval_batches=1)
      config.update(batch_size=4)
      config.optimizer.warmup_steps = 1
      config.data.update(sources=("stdlib",), max_bytes=2_000_000, seq_len=128)
      config.model.update(vocab_size=512, width=64, num_layers=2, dense_dim=128)
      config.model.moe.update(num_experts=8, expert_dim=32)
      config.model.moe.router.top_k = 2
    case _:
      raise ValueError(f"no variant {variant!r}: choose minutes or runlocal")
  return config
