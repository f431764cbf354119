"""Models by name: two to train here, and real shapes to plan for.

Published sizes (the models' cards), multi-token-prediction layers left out:
Kimi K2.5 1,026.4B parameters and 32.9B active, DeepSeek-V3 671.0B and 37.6B,
Qwen3-30B-A3B 30.5B and 3.35B. A test counts them.
"""

from composer_jax.models.config import (
  GqaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)


def tiny() -> ModelConfig:
  """Learns code in minutes on two CPU cores."""
  return ModelConfig(
    vocab_size=2048,
    width=128,
    num_layers=4,
    num_dense_layers=1,
    dense_dim=384,
    attention=GqaConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True),
    moe=MoeConfig(
      num_experts=8,
      expert_dim=128,
      num_shared=1,
      router=RouterConfig("sigmoid", top_k=2, selection_bias=True),
    ),
    tie_embeddings=True,
    dtype="float32",
    remat="none",
  )


def small() -> ModelConfig:
  """About 0.9B parameters, 0.2B active: minutes on one H200."""
  return ModelConfig(
    vocab_size=16_384,
    width=1024,
    num_layers=12,
    num_dense_layers=1,
    dense_dim=4096,
    attention=GqaConfig(
      num_heads=16, num_kv_heads=4, head_dim=64, qk_norm=True
    ),
    moe=MoeConfig(
      num_experts=64,
      expert_dim=384,
      num_shared=1,
      router=RouterConfig("sigmoid", top_k=8, selection_bias=True),
    ),
    remat="dots",
  )


def kimi_k2_5() -> ModelConfig:
  """Kimi K2.5, which shares its shape with K2 and K2.7 Code."""
  return ModelConfig(
    vocab_size=163_840,
    width=7168,
    num_layers=61,
    num_dense_layers=1,
    dense_dim=18_432,
    attention=MlaConfig(
      num_heads=64,
      q_latent=1536,
      kv_latent=512,
      nope_dim=128,
      rope_dim=64,
      v_dim=128,
    ),
    moe=MoeConfig(
      num_experts=384,
      expert_dim=2048,
      num_shared=1,
      router=RouterConfig("sigmoid", top_k=8, scale=2.827, selection_bias=True),
    ),
    rope_theta=50_000.0,
  )


def deepseek_v3() -> ModelConfig:
  """DeepSeek-V3 and R1 (arXiv:2412.19437)."""
  return ModelConfig(
    vocab_size=129_280,
    width=7168,
    num_layers=61,
    num_dense_layers=3,
    dense_dim=18_432,
    attention=MlaConfig(
      num_heads=128,
      q_latent=1536,
      kv_latent=512,
      nope_dim=128,
      rope_dim=64,
      v_dim=128,
    ),
    moe=MoeConfig(
      num_experts=256,
      expert_dim=2048,
      num_shared=1,
      router=RouterConfig(
        "sigmoid",
        top_k=8,
        num_groups=8,
        top_groups=4,
        scale=2.5,
        selection_bias=True,
      ),
    ),
  )


def qwen3_30b_a3b() -> ModelConfig:
  """Qwen3-30B-A3B (arXiv:2505.09388)."""
  return ModelConfig(
    vocab_size=151_936,
    width=2048,
    num_layers=48,
    num_dense_layers=0,
    dense_dim=6144,
    attention=GqaConfig(
      num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True
    ),
    moe=MoeConfig(
      num_experts=128, expert_dim=768, router=RouterConfig("softmax", top_k=8)
    ),
    rope_theta=1_000_000.0,
  )


PRESETS = {
  "tiny": tiny,
  "small": small,
  "kimi_k2_5": kimi_k2_5,
  "deepseek_v3": deepseek_v3,
  "qwen3_30b_a3b": qwen3_30b_a3b,
}
