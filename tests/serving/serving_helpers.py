"""Two tiny models, and what an engine must agree with: a plain forward pass."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import (
  GqaConfig,
  LanguageModel,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)
from composer_jax.serving import (
  Completion,
  Engine,
  EngineConfig,
  Request,
  SamplingParams,
  serving_weights,
)
from tests.models import oracle

VOCAB = 50
MAX_LEN = 48
# Two programs a model serve all tests: one context, and a cache that is too
# small for four long requests.
GEOMETRY = {
  "max_rows": 4,
  "max_len": MAX_LEN,
  "page_size": 4,
  "cache_tokens": 80,
  "prefill_rows": 2,
  "prefill_chunk": 6,
  "contexts": (MAX_LEN,),
}
CONFIG = EngineConfig(**GEOMETRY)


def _config(attention, router, **changes) -> ModelConfig:
  return ModelConfig(
    **{
      "vocab_size": VOCAB,
      "width": 24,
      "num_layers": 3,
      "num_dense_layers": 1,
      "dense_dim": 20,
      "attention": attention,
      "moe": MoeConfig(
        num_experts=8, expert_dim=12, num_shared=1, router=router
      ),
      "dtype": "float32",
      "remat": "none",
    }
    | changes
  )


CONFIGS = {
  "gqa-sigmoid": _config(
    GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True),
    RouterConfig("sigmoid", top_k=3, scale=2.0, selection_bias=True),
  ),
  "mla-softmax": _config(
    MlaConfig(
      num_heads=3, q_latent=12, kv_latent=10, nope_dim=6, rope_dim=4, v_dim=5
    ),
    RouterConfig("softmax", top_k=2),
    # Half as much to compile.
    num_layers=2,
    num_dense_layers=0,
  ),
}


class Case(NamedTuple):
  """A model, and weights by version."""

  model: LanguageModel
  apply: Any
  weights: dict[int, Any]


@functools.cache
def case(name: str) -> Case:
  model = LanguageModel(CONFIGS[name])
  init = jax.jit(model.init)
  weights = {}
  for version in range(4):
    params, balance = init(jax.random.key(version))
    key = jax.random.key(100 + version)
    balance = jax.tree.map(
      lambda b, key=key: 0.2 * jax.random.normal(key, b.shape), balance
    )
    # Logits far enough apart that tokens differ from version to version.
    params["unembedding"] = 3 * params["unembedding"]
    weights[version] = serving_weights(model, params, balance)
  return Case(model, jax.jit(model.apply), weights)


def engine(name: str, version: int = 0, **changes) -> Engine:
  model, _, weights = case(name)
  config = EngineConfig(**GEOMETRY | changes)
  return Engine(model, weights[version], config, version=version)


def prompt(length: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, VOCAB, length)


def greedy(max_tokens: int, **changes) -> SamplingParams:
  return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def run(engine: Engine, limit: int = 2000) -> dict[str, list]:
  """Steps until nothing is left; the events of each request."""
  events: dict[str, list] = {}
  for _ in range(limit):
    if not engine.busy:
      return events
    for event in engine.step():
      events.setdefault(event.request_id, []).append(event)
  raise AssertionError(f"no end after {limit} steps")


def plain(name: str, version: int, tokens) -> tuple[np.ndarray, np.ndarray]:
  """Logits `[S, V]` and experts `[S, L, K]` of one pass without a cache."""
  model, apply, weights = case(name)
  del model
  padded = np.zeros((1, MAX_LEN), np.int32)
  padded[0, : len(tokens)] = tokens
  out = apply(weights[version]["params"], weights[version]["balance"], padded)
  experts = np.asarray(out.routing.expert_ids)[:, 0].transpose(1, 0, 2)
  return np.asarray(out.logits, np.float64)[0, : len(tokens)], experts[
    : len(tokens)
  ]


def log_softmax(logits):
  logits = logits - logits.max()
  return logits - np.log(np.exp(logits).sum())


def distribution(logits, sampling: SamplingParams) -> np.ndarray:
  """Probabilities sampled from, in float64, one token after another."""
  if sampling.temperature == 0:
    chosen = np.zeros(len(logits))
    chosen[np.argmax(logits)] = 1
    return chosen
  p = np.exp(log_softmax(logits / sampling.temperature))
  order = sorted(range(len(p)), key=lambda i: -p[i])
  if sampling.top_k:
    order = order[: sampling.top_k]
  total, reached, kept = sum(p[i] for i in order), 0.0, []
  for i in order:
    if reached >= sampling.top_p:
      break
    kept.append(i)
    reached += p[i] / total
  out = np.zeros(len(p))
  out[kept] = p[kept]
  return out / out.sum()


def check(name: str, request: Request, completion: Completion) -> None:
  """A completion against plain passes of each of its versions.

  Tokens with a stale cache are left out: no plain pass has their logits.
  """
  P, C = completion.prompt_len, len(completion.token_ids)
  assert len(request.prompt) == P
  tokens = [*map(int, request.prompt), *map(int, completion.token_ids)]
  assert completion.routes.shape == (
    C,
    2,
    CONFIGS[name].moe.router.top_k,
  )
  assert completion.routes.dtype == np.uint8
  fresh = ~completion.stale_cache
  for version in set(completion.versions[fresh].tolist()):
    logits, experts = plain(name, version, tokens)
    for j in np.flatnonzero(fresh & (completion.versions == version)):
      row, token = logits[P + j - 1], completion.token_ids[j]
      p = distribution(row, completion.sampling)
      assert p[token] > 0, (j, token)
      np.testing.assert_allclose(
        completion.logprobs[j], np.log(p[token]), atol=3e-5
      )
      np.testing.assert_allclose(
        completion.model_logprobs[j], log_softmax(row)[token], atol=3e-5
      )
      np.testing.assert_array_equal(completion.routes[j], experts[P + j - 1])
  if completion.prompt_routes is not None and fresh[0]:
    _, experts = plain(name, int(completion.versions[0]), tokens)
    np.testing.assert_array_equal(completion.prompt_routes, experts[: P - 1])


def check_nothing_leaks(engine: Engine) -> None:
  """Every page is free, or cached for later, exactly once."""
  cache = engine._cache
  assert engine.stats().running == engine.stats().waiting == 0
  assert cache._holders == [0] * cache.num_pages
  assert sorted([*cache._free, *cache._idle]) == list(range(cache.num_pages))
  assert {*cache._page_of.values()} == {*cache._key_of} == {*cache._idle}


def mixed_forward(name: str, tokens, versions):
  """Logits where position i was computed by `versions[i]`, and kept.

  Of latent attention the latents are kept: the reader's weights expand them.
  """
  config = CONFIGS[name]
  trees = {v: case(name).weights[v] for v in set(versions)}

  def layer(tree, depth):
    if isinstance(tree, dict):
      return {key: layer(leaf, depth) for key, leaf in tree.items()}
    return np.asarray(tree[depth], np.float64)

  xs = np.stack(
    [
      np.asarray(trees[v]["params"]["embedding"], np.float64)[t]
      for t, v in zip(tokens, versions, strict=True)
    ]
  )
  for depth in range(config.num_layers):
    kind = "moe" if depth >= config.num_dense_layers else "dense"
    nth = depth - config.num_dense_layers if kind == "moe" else depth
    p = {v: layer(t["params"][kind]["layers"], nth) for v, t in trees.items()}
    normed = [
      oracle.rms_norm(x, p[v]["attention_norm"]["scale"], 1e-6)
      for x, v in zip(xs, versions, strict=True)
    ]

    def heads(i, reader, p=p, normed=normed):
      weights, reading = p[versions[i]]["attention"], p[reader]["attention"]
      expand = {k: reading[k] for k in ("w_k_b", "w_v_b") if k in reading}
      return oracle.queries_keys_values(weights | expand, config, normed[i], i)

    read_by = {v: [heads(i, v) for i in range(len(xs))] for v in trees}
    for i, v in enumerate(versions):
      q = read_by[v][i][0]
      out = np.zeros_like(xs[i])
      for n in range(len(q)):
        keys = np.stack([k[n] for _, k, _ in read_by[v][: i + 1]])
        values = np.stack([value[n] for _, _, value in read_by[v][: i + 1]])
        weights = oracle.softmax(keys @ q[n] / np.sqrt(q.shape[1]))
        out += (weights @ values) @ p[v]["attention"]["w_o"][n]
      xs[i] += out
      x = oracle.rms_norm(xs[i], p[v]["mlp_norm"]["scale"], 1e-6)
      if kind == "moe":
        bias = np.zeros(config.moe.num_experts)
        if trees[v]["balance"]:
          bias = layer(trees[v]["balance"]["moe"]["layers"], nth)["moe"]["bias"]
        xs[i] += oracle.moe(p[v]["moe"], bias, config, x)[0]
      else:
        xs[i] += oracle.swiglu(p[v]["mlp"], x)
  return np.stack(
    [
      oracle.rms_norm(
        x, np.asarray(trees[v]["params"]["norm"]["scale"], np.float64), 1e-6
      )
      @ np.asarray(trees[v]["params"]["unembedding"], np.float64)
      for x, v in zip(xs, versions, strict=True)
    ]
  )


def poison(weights):
  """Weights full of NaN."""
  return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), weights)
