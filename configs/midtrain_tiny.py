"""Mid-trains the `tiny` model (1.9M parameters, 1.1M active) on code.

    python launch/train.py --config=configs/midtrain_tiny.py --workdir=runs/tiny

The corpus is this Python's own standard library. 2,000 steps are 8.2M tokens:
about 20 minutes on two cores, estimated from the demo. Variants, after a colon:

    demo      what `make demo-midtrain` runs: 500 steps, five minutes on two
              cores, to 1.79 validation bits per byte; a bigram model has 2.09.
    runlocal  a few steps of everything, for a quick look or a test.
"""

import dataclasses

from ml_collections import ConfigDict

from composer_jax.data import DataConfig
from composer_jax.models import PRESETS
from composer_jax.sharding import MeshConfig
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import OptimizerConfig


def get_config(variant: str = "") -> ConfigDict:
  """The config of a variant; see above."""
  model = PRESETS["tiny"]()
  config = ConfigDict(
    dataclasses.asdict(
      TrainConfig(
        model=model,
        data=DataConfig(
          vocab_size=model.vocab_size, seq_len=256, fim_fraction=0.1
        ),
        optimizer=OptimizerConfig(
          name="muon", learning_rate=5e-3, warmup_steps=50, decay_fraction=0.5
        ),
        mesh=MeshConfig(),
        batch_size=16,
        num_steps=2000,
        balance_rate=0.01,
        eval_every=200,
        log_every=20,
      )
    )
  )
  config.data.vocab_size = config.model.get_ref("vocab_size")
  match variant:
    case "" | "demo":
      if variant:
        config.update(num_steps=500, eval_every=100)
        config.data.validation_fraction = 0.03
    case "runlocal":
      config.update(num_steps=6, log_every=2, eval_every=3, eval_batches=2)
      config.update(checkpoint_every=3, batch_size=8)
      config.optimizer.update(warmup_steps=1)
      config.data.update(seq_len=64, max_bytes=400_000)
      config.model.vocab_size = 512
    case _:
      raise ValueError(f"no variant {variant!r}: choose demo or runlocal")
  return config
