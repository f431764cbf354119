"""A decoder in float64 NumPy, one token after another, written to be read.

Independent of the code under test: no batching, no stacking, no masks. Used on
models of a few dozen units.
"""

import numpy as np

from composer_jax.models import GqaConfig


def silu(x):
  return x / (1 + np.exp(-x))


def rms_norm(x, scale, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotate(x, position, theta):
  """Rotates the pairs (i, i + D/2) of one head by position * frequency."""
  half = len(x) // 2
  out = np.empty_like(x)
  for i in range(half):
    angle = position * theta ** (-i / half)
    c, s = np.cos(angle), np.sin(angle)
    out[i] = x[i] * c - x[i + half] * s
    out[i + half] = x[i + half] * c + x[i] * s
  return out


def softmax(x):
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def queries_keys_values(p, config, x, position):
  """Of one token: q [N, D], k [N, D], v [N, V], keys repeated for each head."""
  attention, theta = config.attention, config.rope_theta
  if isinstance(attention, GqaConfig):
    q = np.einsum("h,hnd->nd", x, p["w_q"])
    k = np.einsum("h,hgd->gd", x, p["w_k"])
    v = np.einsum("h,hgd->gd", x, p["w_v"])
    if attention.qk_norm:
      q = rms_norm(q, p["q_norm"]["scale"], config.norm_eps)
      k = rms_norm(k, p["k_norm"]["scale"], config.norm_eps)
    q = np.stack([rotate(head, position, theta) for head in q])
    k = np.stack([rotate(head, position, theta) for head in k])
    share = attention.num_heads // attention.num_kv_heads
    return q, k.repeat(share, 0), v.repeat(share, 0)
  if attention.q_latent:
    latent = rms_norm(x @ p["w_q_a"], p["q_norm"]["scale"], config.norm_eps)
  else:
    latent = x
  q = np.einsum("c,cnd->nd", latent, p["w_q_b"])
  split = attention.nope_dim
  q = np.stack(
    [np.concatenate([h[:split], rotate(h[split:], position, theta)]) for h in q]
  )
  latent = rms_norm(x @ p["w_kv_a"], p["kv_norm"]["scale"], config.norm_eps)
  k_rope = rotate(x @ p["w_k_rope"], position, theta)
  k = np.stack(
    [
      np.concatenate([latent @ p["w_k_b"][:, n], k_rope])
      for n in range(attention.num_heads)
    ]
  )
  v = np.einsum("c,cnd->nd", latent, p["w_v_b"])
  return q, k, v


def attend(p, config, xs):
  """Of one document [S, H], each token to itself and those before."""
  heads = [queries_keys_values(p, config, x, i) for i, x in enumerate(xs)]
  out = np.zeros_like(xs)
  for i, (q, _, _) in enumerate(heads):
    for n in range(len(q)):
      keys = np.stack([k[n] for _, k, _ in heads[: i + 1]])
      values = np.stack([v[n] for _, _, v in heads[: i + 1]])
      weights = softmax(keys @ q[n] / np.sqrt(q.shape[1]))
      out[i] += (weights @ values) @ p["w_o"][n]
  return out


def swiglu(p, x):
  gate, up = x @ p["w_gate_up"][:, 0], x @ p["w_gate_up"][:, 1]
  return (silu(gate) * up) @ p["w_down"]


def route(logits, bias, router):
  """Expert ids and gates of one token."""
  if router.score == "softmax":
    scores = softmax(logits)
  else:
    scores = 1 / (1 + np.exp(-logits))
  choice = scores + bias
  size = len(choice) // router.num_groups
  groups = choice.reshape(router.num_groups, size)
  merit = np.sort(groups, -1)[:, -2:].sum(-1)
  kept = np.argsort(-merit, kind="stable")[: router.top_groups]
  eligible = [e for e in range(len(choice)) if e // size in kept]
  ids = sorted(eligible, key=lambda e: (-choice[e], e))[: router.top_k]
  picked = scores[ids]
  return ids, router.scale * picked / picked.sum()


def moe(p, bias, config, x):
  """Of one token."""
  ids, gates = route(x @ p["w_router"], bias, config.moe.router)
  out = np.zeros_like(x)
  for e, gate in zip(ids, gates, strict=True):
    expert = {name: p[name][e] for name in ("w_gate_up", "w_down")}
    out += gate * swiglu(expert, x)
  if config.moe.num_shared:
    out += swiglu(p["shared"], x)
  return out, ids


def forward(params, balance, config, tokens):
  """Logits [S, V] of one document, and the experts of each layer and token."""

  def layer(tree, depth):
    if isinstance(tree, dict):
      return {name: layer(leaf, depth) for name, leaf in tree.items()}
    return np.asarray(tree[depth], np.float64)

  xs = np.asarray(params["embedding"], np.float64)[tokens]
  routes = []
  for depth in range(config.num_layers):
    is_moe = depth >= config.num_dense_layers
    kind = "moe" if is_moe else "dense"
    nth = depth - config.num_dense_layers if is_moe else depth
    p = layer(params[kind]["layers"], nth)
    normed = rms_norm(xs, p["attention_norm"]["scale"], config.norm_eps)
    xs = xs + attend(p["attention"], config, normed)
    normed = rms_norm(xs, p["mlp_norm"]["scale"], config.norm_eps)
    if is_moe:
      bias = np.zeros(config.moe.num_experts)
      if balance:
        bias = layer(balance["moe"]["layers"], nth)["moe"]["bias"]
      outs = [moe(p["moe"], bias, config, x) for x in normed]
      xs = xs + np.stack([out for out, _ in outs])
      routes.append([ids for _, ids in outs])
    else:
      xs = xs + np.stack([swiglu(p["mlp"], x) for x in normed])
  scale = np.asarray(params["norm"]["scale"], np.float64)
  xs = rms_norm(xs, scale, config.norm_eps)
  if config.tie_embeddings:
    return xs @ np.asarray(params["embedding"], np.float64).T, routes
  return xs @ np.asarray(params["unembedding"], np.float64), routes
