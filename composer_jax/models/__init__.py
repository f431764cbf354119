"""Flax NNX decoders: dense or Mixture-of-Experts, grouped or latent attention.

`Transformer(config, rngs)` is the model, `ModelConfig` its shape, and
`PRESETS` shapes by name. `LanguageModel` is the same model as pure functions
over plain pytrees, for training steps, checkpoints and servers.
"""

from composer_jax.models.config import (
  GqaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)
from composer_jax.models.count import count_params, train_flops_per_token
from composer_jax.models.functional import LanguageModel
from composer_jax.models.moe import Replay
from composer_jax.models.presets import PRESETS
from composer_jax.models.transformer import Output, Transformer

__all__ = [
  "PRESETS",
  "GqaConfig",
  "LanguageModel",
  "MlaConfig",
  "ModelConfig",
  "MoeConfig",
  "Output",
  "Replay",
  "RouterConfig",
  "Transformer",
  "count_params",
  "train_flops_per_token",
]
