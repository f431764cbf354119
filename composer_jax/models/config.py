"""What a model is, in numbers. Presets of real shapes are in `presets.py`."""

import dataclasses
import typing
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class GqaConfig:
  """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

  Attributes:
    num_heads: query heads.
    num_kv_heads: key and value heads, each shared by a group of query heads.
    head_dim: width of a head.
    qk_norm: RMSNorm on each query and key head, as Qwen3 has it.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  qk_norm: bool = False

  def __post_init__(self):
    _check_at_least(1, self, "num_heads", "num_kv_heads", "head_dim")
    _check_even(self, "head_dim")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads={self.num_heads} must be a multiple of"
        f" num_kv_heads={self.num_kv_heads}."
      )


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

  Attributes:
    num_heads: heads.
    q_latent: width of the queries' latent; 0 projects them directly.
    kv_latent: width of the latent that keys and values are made from, which
      is what a serving cache holds.
    nope_dim: width of a query or key head's part without position.
    rope_dim: width of its rotary part; the key's is shared by all heads.
    v_dim: width of a value head.
  """

  num_heads: int
  q_latent: int
  kv_latent: int
  nope_dim: int
  rope_dim: int
  v_dim: int

  def __post_init__(self):
    _check_at_least(1, self, "num_heads", "kv_latent")
    _check_at_least(1, self, "nope_dim", "rope_dim", "v_dim")
    _check_at_least(0, self, "q_latent")
    _check_even(self, "rope_dim")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How a token picks its experts. See `moe.route`.

  Attributes:
    score: turns logits into scores.
    top_k: experts a token.
    num_groups: experts are split into this many groups...
    top_groups: ...and a token picks experts from this many of them only.
    scale: multiplies the renormalised gates.
    selection_bias: balance the experts' load by a bias that enters the
      selection and not the gates (Wang et al. 2024, arXiv:2408.15664).
  """

  score: Literal["softmax", "sigmoid"]
  top_k: int
  num_groups: int = 1
  top_groups: int = 1
  scale: float = 1.0
  selection_bias: bool = False

  def __post_init__(self):
    _check_choices(self)
    _check_at_least(1, self, "top_k", "num_groups", "top_groups")


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """A Mixture-of-Experts layer.

  Attributes:
    num_experts: routed experts.
    expert_dim: hidden width of an expert.
    num_shared: shared experts, of the same width, that every token visits.
    router: how tokens pick experts.
    implementation: of `pallas_kernels.moe.moe_ffn`; "" is the fastest.
  """

  num_experts: int
  expert_dim: int
  router: RouterConfig
  num_shared: int = 0
  implementation: str = ""

  def __post_init__(self):
    _check_at_least(1, self, "num_experts", "expert_dim")
    _check_at_least(0, self, "num_shared")
    router = self.router
    if self.num_experts % router.num_groups:
      raise ValueError(
        f"num_experts={self.num_experts} must be a multiple of"
        f" num_groups={router.num_groups}."
      )
    eligible = self.num_experts // router.num_groups * router.top_groups
    if router.top_groups > router.num_groups or router.top_k > eligible:
      raise ValueError(
        f"top_k={router.top_k} experts from top_groups={router.top_groups} of"
        f" num_groups={router.num_groups} groups can't be picked from"
        f" num_experts={self.num_experts}."
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer, dense layers first, then MoE layers.

  Attributes:
    vocab_size: rows of the embedding.
    width: of the residual stream.
    num_layers: of both kinds together.
    num_dense_layers: how many of them, the first ones, have a dense MLP.
    dense_dim: hidden width of a dense layer's MLP.
    attention: which kind, and its sizes.
    moe: the MoE layers; None if all layers are dense.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: the unembedding is the embedding, transposed.
    dtype: of activations and of the weights' compute copy.
    remat: what the backward pass recomputes; a key of
      `transformer.REMAT_POLICIES`.
    attention_kernel: "xla" runs anywhere and gives the same bits each time;
      "cudnn" is faster on NVIDIA GPUs, for grouped-query attention in 16 bits,
      and its backward pass promises no order of summation; "auto" is "cudnn"
      where it can run, else "xla": training picks, and a model that is left
      with "auto" takes "xla".
  """

  vocab_size: int
  width: int
  num_layers: int
  num_dense_layers: int
  dense_dim: int
  attention: GqaConfig | MlaConfig
  moe: MoeConfig | None
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  remat: Literal["none", "dots", "full"] = "full"
  attention_kernel: Literal["auto", "xla", "cudnn"] = "xla"

  def __post_init__(self):
    _check_choices(self)
    _check_at_least(1, self, "vocab_size", "width", "num_layers")
    _check_at_least(1 if self.num_dense_layers else 0, self, "dense_dim")
    if not 0 <= self.num_dense_layers <= self.num_layers:
      raise ValueError(
        f"num_dense_layers={self.num_dense_layers} must lie between 0 and"
        f" num_layers={self.num_layers}."
      )
    if self.num_moe_layers and self.moe is None:
      raise ValueError(
        f"{self.num_moe_layers} of {self.num_layers} layers are MoE layers, but"
        " moe is None: describe it, or set num_dense_layers to num_layers."
      )

  @property
  def num_moe_layers(self) -> int:
    """Layers that are not dense."""
    return self.num_layers - self.num_dense_layers


def _check_choices(config: Any) -> None:
  """Raises ValueError for a field that is none of its Literal's choices."""
  for name, hint in typing.get_type_hints(type(config)).items():
    choices, value = typing.get_args(hint), getattr(config, name)
    if typing.get_origin(hint) is Literal and value not in choices:
      listed = ", ".join(map(repr, choices))
      raise ValueError(f"{name}={value!r} must be one of {listed}.")


def _check_at_least(least: int, config: Any, *names: str) -> None:
  for name in names:
    if getattr(config, name) < least:
      raise ValueError(
        f"{name}={getattr(config, name)} must be at least {least}."
      )


def _check_even(config: Any, name: str) -> None:
  if getattr(config, name) % 2:
    raise ValueError(
      f"{name}={getattr(config, name)} must be even: rotary positions turn"
      " pairs of numbers."
    )
