"""Attention inside packed sequences: grouped-query and latent.

Both kinds make queries, keys and values, and call `attend`. Called, they work
inside the documents of packed sequences; `cached` continues rows whose past
lies in a paged cache, which holds what `Gqa.keys_values` and `Mla.latents`
return.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax import sharding
from composer_jax.models import paged, parameter
from composer_jax.models.config import GqaConfig, MlaConfig, ModelConfig
from composer_jax.models.layers import RmsNorm, einsum, rotate


def document_mask(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
  """Causal inside each document: equal ids, contiguous."""
  same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
  causal = jnp.tri(segment_ids.shape[1], dtype=bool)[None]
  return same_document & causal


def attend(
  q: Float[Array, "B S N D"],
  k: Float[Array, "B T G D"],
  v: Float[Array, "B T G V"],
  mask: Bool[Array, "B S T"],
  kernel: str,
  scale: float | None = None,
) -> Float[Array, "B S N V"]:
  """Masked attention, softmax in float32.

  Args:
    q: queries; N is a multiple of G, and head n reads key head n // (N/G).
    k: keys.
    v: values.
    mask: which keys each query sees.
    kernel: "xla" or "cudnn"; see `ModelConfig.attention_kernel`.
    scale: of the scores, D**-0.5 by default.

  Raises:
    ValueError: if cuDNN is asked for and can't take these shapes.
  """
  heads, head_dim = q.shape[2:]
  groups = k.shape[2]
  if kernel == "cudnn":
    if v.shape[-1] != head_dim or q.dtype == jnp.float32:
      raise ValueError(
        f"attention_kernel='cudnn' needs 16-bit values as wide as the keys;"
        f" got {q.dtype} and widths {head_dim} and {v.shape[-1]}: use 'xla'."
      )
    return jax.nn.dot_product_attention(
      q, k, v, mask=mask[:, None], scale=scale, implementation="cudnn"
    )
  # Two choices double the speed on CPUs and cost nothing elsewhere: heads
  # before positions, and a mask that is added, which XLA computes once, where
  # a selection would be fused into every pass over the scores.
  q = q.reshape(*q.shape[:2], groups, heads // groups, head_dim)
  q = q.transpose(0, 2, 3, 1, 4)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  scores = jnp.einsum(
    "bgnsd,bgtd->bgnst", q, k, preferred_element_type=jnp.float32
  )
  scores *= head_dim**-0.5 if scale is None else scale
  scores += jnp.where(mask, 0.0, -1e30)[:, None, None]
  highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  weights = jnp.exp(scores - highest)
  total = weights.sum(axis=-1, keepdims=True)
  out = jnp.einsum(
    "bgnst,bgtv->bgnsv",
    weights.astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  out = (out / total).astype(v.dtype).transpose(0, 3, 1, 2, 4)
  return out.reshape(*out.shape[:2], heads, v.shape[-1])


class Gqa(nnx.Module):
  """Grouped-query attention; see `GqaConfig`."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    gqa, width = config.attention, config.width
    assert isinstance(gqa, GqaConfig)
    self.config = config
    kv_shape = {
      "embed": width,
      "kv_heads": gqa.num_kv_heads,
      "head_dim": gqa.head_dim,
    }
    self.w_q = parameter.weight(
      rngs,
      {"embed": width, "heads": gqa.num_heads, "head_dim": gqa.head_dim},
      contract=("embed",),
    )
    self.w_k = parameter.weight(rngs, kv_shape, contract=("embed",))
    self.w_v = parameter.weight(rngs, kv_shape, contract=("embed",))
    self.w_o = parameter.weight(
      rngs,
      {"heads": gqa.num_heads, "head_dim": gqa.head_dim, "embed": width},
      contract=("heads", "head_dim"),
    )
    if gqa.qk_norm:
      self.q_norm = RmsNorm("head_dim", gqa.head_dim, config.norm_eps)
      self.k_norm = RmsNorm("head_dim", gqa.head_dim, config.norm_eps)

  def keys_values(
    self, x: Float[Array, "B S H"], positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S G D"], Float[Array, "B S G D"]]:
    """Rotated keys, and values."""
    k = einsum("bsh,hgd->bsgd", x, self.w_k)
    v = einsum("bsh,hgd->bsgd", x, self.w_v)
    if self.config.attention.qk_norm:
      k = self.k_norm(k)
    return rotate(k, positions, self.config.rope_theta), v

  def __call__(
    self,
    x: Float[Array, "B S H"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
  ) -> Float[Array, "B S H"]:
    """Attends inside each document."""
    q = self._queries(x, positions)
    k, v = self.keys_values(x, positions)
    mask = document_mask(segment_ids)
    out = attend(q, k, v, mask, self.config.attention_kernel)
    out = sharding.constrain(out, "batch", "sequence", "heads", None)
    return einsum("bsnd,ndh->bsh", out, self.w_o)

  def cached(
    self,
    x: Float[Array, "B S H"],
    rows: paged.Rows,
    pool: paged.Pool,
    layer: Int[Array, ""],
  ) -> tuple[Float[Array, "B S H"], paged.Pool]:
    """Attends to what the cache holds, after adding these tokens to it."""
    entries = self.keys_values(x, rows.positions)
    pool = paged.write(pool, layer, rows, entries)
    k, v = paged.read(pool, layer, rows)
    mask = paged.causal_mask(rows, k.shape[1])
    out = attend(self._queries(x, rows.positions), k, v, mask, "xla")
    return einsum("bsnd,ndh->bsh", out, self.w_o), pool

  def _queries(self, x, positions):
    q = einsum("bsh,hnd->bsnd", x, self.w_q)
    if self.config.attention.qk_norm:
      q = self.q_norm(q)
    return rotate(q, positions, self.config.rope_theta)


class Mla(nnx.Module):
  """Multi-head latent attention; see `MlaConfig`.

  The checkpoint formats fuse `w_kv_a` with `w_k_rope`, and `w_k_b` with
  `w_v_b`; apart, each has one sharding, and a decoder can absorb the last two.
  """

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    mla, width = config.attention, config.width
    assert isinstance(mla, MlaConfig)
    self.config = config
    heads, head_dim = mla.num_heads, mla.nope_dim + mla.rope_dim
    q_axis, q_width = "embed", width
    if mla.q_latent:
      q_axis, q_width = "q_latent", mla.q_latent
      self.w_q_a = parameter.weight(
        rngs, {"embed": width, "q_latent": q_width}, contract=("embed",)
      )
      self.q_norm = RmsNorm("q_latent", q_width, config.norm_eps)
    self.w_q_b = parameter.weight(
      rngs,
      {q_axis: q_width, "heads": heads, "head_dim": head_dim},
      contract=(q_axis,),
    )
    self.w_kv_a = parameter.weight(
      rngs, {"embed": width, "kv_latent": mla.kv_latent}, contract=("embed",)
    )
    self.w_k_rope = parameter.weight(
      rngs, {"embed": width, "head_dim": mla.rope_dim}, contract=("embed",)
    )
    self.kv_norm = RmsNorm("kv_latent", mla.kv_latent, config.norm_eps)
    self.w_k_b = parameter.weight(
      rngs,
      {"kv_latent": mla.kv_latent, "heads": heads, "head_dim": mla.nope_dim},
      contract=("kv_latent",),
    )
    self.w_v_b = parameter.weight(
      rngs,
      {"kv_latent": mla.kv_latent, "heads": heads, "head_dim": mla.v_dim},
      contract=("kv_latent",),
    )
    self.w_o = parameter.weight(
      rngs,
      {"heads": heads, "head_dim": mla.v_dim, "embed": width},
      contract=("heads", "head_dim"),
    )

  def latents(
    self, x: Float[Array, "B S H"], positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S C"], Float[Array, "B S 1 R"]]:
    """The normalised latent, and the rotated key part that heads share."""
    latent = self.kv_norm(einsum("bsh,hc->bsc", x, self.w_kv_a))
    k_rope = einsum("bsh,hr->bsr", x, self.w_k_rope)[:, :, None]
    return latent, rotate(k_rope, positions, self.config.rope_theta)

  def __call__(
    self,
    x: Float[Array, "B S H"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
  ) -> Float[Array, "B S H"]:
    """Attends inside each document."""
    mla = self.config.attention
    q_nope, q_rope = self._queries(x, positions)
    latent, k_rope = self.latents(x, positions)
    k_nope = einsum("bsc,cnd->bsnd", latent, self.w_k_b)
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], mla.rope_dim))
    v = einsum("bsc,cnd->bsnd", latent, self.w_v_b)
    out = attend(
      jnp.concatenate([q_nope, q_rope], axis=-1),
      jnp.concatenate([k_nope, k_rope], axis=-1),
      v,
      document_mask(segment_ids),
      self.config.attention_kernel,
    )
    out = sharding.constrain(out, "batch", "sequence", "heads", None)
    return einsum("bsnd,ndh->bsh", out, self.w_o)

  def cached(
    self,
    x: Float[Array, "B S H"],
    rows: paged.Rows,
    pool: paged.Pool,
    layer: Int[Array, ""],
  ) -> tuple[Float[Array, "B S H"], paged.Pool]:
    """Attends to what the cache holds, after adding these tokens to it.

    With `w_k_b` moved to the queries and `w_v_b` to the output, all heads read
    one key and one value of the latent's width: the cache is never expanded
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). The same product in another
    order: in 16 bits the last bits differ from the trainer's. Latents that
    other weights left in the cache are read with these weights' `w_k_b` and
    `w_v_b`.
    """
    mla = self.config.attention
    latent, k_rope = self.latents(x, rows.positions)
    pool = paged.write(pool, layer, rows, (latent, k_rope[:, :, 0]))
    latent, k_rope = paged.read(pool, layer, rows)
    q_nope, q_rope = self._queries(x, rows.positions)
    q_latent = einsum("bsnd,cnd->bsnc", q_nope, self.w_k_b)
    out = attend(
      jnp.concatenate([q_latent, q_rope], axis=-1),
      jnp.concatenate([latent, k_rope], axis=-1)[:, :, None],
      latent[:, :, None],
      paged.causal_mask(rows, latent.shape[1]),
      "xla",
      scale=(mla.nope_dim + mla.rope_dim) ** -0.5,
    )
    out = einsum("bsnc,cnd->bsnd", out, self.w_v_b)
    return einsum("bsnd,ndh->bsh", out, self.w_o), pool

  def _queries(self, x, positions):
    mla = self.config.attention
    q = self.q_norm(einsum("bsh,hc->bsc", x, self.w_q_a)) if mla.q_latent else x
    q = einsum("bsc,cnd->bsnd", q, self.w_q_b)
    q_nope, q_rope = jnp.split(q, [mla.nope_dim], axis=-1)
    return q_nope, rotate(q_rope, positions, self.config.rope_theta)


def make_attention(rngs: nnx.Rngs, config: ModelConfig) -> Gqa | Mla:
  """The kind that the config describes."""
  kind = Mla if isinstance(config.attention, MlaConfig) else Gqa
  return kind(rngs, config)
