"""What a model's config refuses, and that a command line can set all of it."""

import copy
import dataclasses
import re

import pytest
from ml_collections import ConfigDict

from composer_jax.models import presets
from composer_jax.models.config import MlaConfig

MODEL = presets.tiny()
GQA, MOE, ROUTER = MODEL.attention, MODEL.moe, MODEL.moe.router
MLA = MlaConfig(
  num_heads=3, q_latent=0, kv_latent=10, nope_dim=6, rope_dim=4, v_dim=5
)


@pytest.mark.parametrize(
  ("config", "changes", "message"),
  [
    (ROUTER, {"top_k": 0}, "top_k=0 must be at least 1"),
    (ROUTER, {"num_groups": 0}, "num_groups=0 must be at least 1"),
    (MODEL, {"num_layers": 0}, "num_layers=0 must be at least 1"),
    (MODEL, {"width": -8}, "width=-8 must be at least 1"),
    (MODEL, {"dense_dim": 0}, "dense_dim=0 must be at least 1"),
    (MODEL, {"num_dense_layers": -1}, "num_dense_layers=-1 must lie between"),
    (GQA, {"head_dim": 31}, "head_dim=31 must be even"),
    (GQA, {"head_dim": 0}, "head_dim=0 must be at least 1"),
    (GQA, {"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
    (GQA, {"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
    (MLA, {"rope_dim": 3}, "rope_dim=3 must be even"),
    (MLA, {"rope_dim": 0}, "rope_dim=0 must be at least 1"),
    (MLA, {"q_latent": -1}, "q_latent=-1 must be at least 0"),
    (MOE, {"num_shared": -1}, "num_shared=-1 must be at least 0"),
    (MOE, {"expert_dim": 0}, "expert_dim=0 must be at least 1"),
  ],
)
def test_impossible_values_are_refused(config, changes, message):
  with pytest.raises(ValueError, match=message) as raised:
    dataclasses.replace(config, **changes)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("config", "name", "choices"),
  [
    (ROUTER, "score", "'softmax', 'sigmoid'"),
    (MODEL, "dtype", "'bfloat16', 'float32'"),
    (MODEL, "remat", "'none', 'dots', 'full'"),
    (MODEL, "attention_kernel", "'auto', 'xla', 'cudnn'"),
  ],
)
def test_another_choice_is_refused(config, name, choices):
  config = copy.copy(config)
  # Not by the constructor: in tests, jaxtyping would refuse it first.
  object.__setattr__(config, name, "other")
  message = f"{name}='other' must be one of {choices}."
  with pytest.raises(ValueError, match=re.escape(message)):
    config.__post_init__()


def test_a_model_without_dense_layers_needs_no_width_for_them():
  dataclasses.replace(MODEL, num_dense_layers=0, dense_dim=0)


def test_the_implementation_of_experts_can_be_set_as_a_flag_does():
  config = ConfigDict(dataclasses.asdict(MODEL))
  config.moe.implementation = "reference"
  assert config.moe.implementation == "reference"
  assert MOE.implementation == ""
