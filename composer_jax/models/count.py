"""Parameters and floating-point operations, from shapes alone."""

import math
from typing import NamedTuple

import jax

from composer_jax.models.config import MlaConfig, ModelConfig
from composer_jax.models.functional import LanguageModel
from composer_jax.models.parameter import ParamSpec


class ParamCount(NamedTuple):
  """Attributes: `total` parameters, and those `active` for one token."""

  total: int
  active: int


def _leaves(config: ModelConfig):
  model = LanguageModel(config)
  specs = jax.tree.leaves(
    model.param_specs, is_leaf=lambda x: isinstance(x, ParamSpec)
  )
  for spec, shape in zip(
    specs, jax.tree.leaves(model.param_shapes), strict=True
  ):
    yield spec, math.prod(shape.shape)


def _active(config: ModelConfig, spec: ParamSpec, size: int) -> int:
  """How many of a parameter's elements one token meets."""
  if "experts" in spec.axes:
    return size // config.moe.num_experts * config.moe.router.top_k
  return size


def count_params(config: ModelConfig) -> ParamCount:
  """Counts a model's parameters, embeddings included, without making it."""
  total = active = 0
  for spec, size in _leaves(config):
    total += size
    active += _active(config, spec, size)
  return ParamCount(total, active)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
  """Operations of forward and backward for one token of a full sequence.

  Six a weight that the token is multiplied with (two forward, four backward),
  and causal attention over half of the sequence on average. Looking up an
  embedding, norms, and whatever is recomputed are not counted, as in PaLM's
  model FLOPs utilisation (arXiv:2204.02311, appendix B), but for causality:
  PaLM counts the masked half too.

  Args:
    config: the model.
    seq_len: tokens a sequence; packed documents attend less far, so this is
      an upper bound.
  """
  weights = sum(
    _active(config, spec, size)
    for spec, size in _leaves(config)
    if spec.is_matrix or (config.tie_embeddings and "vocab" in spec.axes)
  )
  attention = config.attention
  if isinstance(attention, MlaConfig):
    widths = attention.nope_dim + attention.rope_dim + attention.v_dim
  else:
    widths = 2 * attention.head_dim
  scores = attention.num_heads * widths * seq_len / 2
  return 6.0 * (weights + config.num_layers * scores)
