"""The model against a float64 decoder, and what scanning must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from composer_jax.models import (
  GqaConfig,
  LanguageModel,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)

GQA = GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8)
MLA = MlaConfig(
  num_heads=3, q_latent=12, kv_latent=10, nope_dim=6, rope_dim=4, v_dim=5
)
SIGMOID = RouterConfig(
  "sigmoid",
  top_k=3,
  num_groups=4,
  top_groups=2,
  scale=2.5,
  selection_bias=True,
)


def make_config(attention=GQA, router=SIGMOID, **changes) -> ModelConfig:
  return ModelConfig(
    **{
      "vocab_size": 50,
      "width": 24,
      "num_layers": 4,
      "num_dense_layers": 2,
      "dense_dim": 20,
      "attention": attention,
      "moe": MoeConfig(
        num_experts=8, expert_dim=12, num_shared=2, router=router
      ),
      "dtype": "float32",
      "remat": "none",
    }
    | changes
  )


def init(config, seed=0):
  model = LanguageModel(config)
  params, balance = jax.jit(model.init)(jax.random.key(seed))
  # A bias that changes choices, and norms that are not all ones.
  keys = iter(jax.random.split(jax.random.key(seed + 1), 100))
  balance = jax.tree.map(
    lambda b: 0.3 * jax.random.normal(next(keys), b.shape), balance
  )
  params = jax.tree.map(
    lambda p, spec: (
      p
      if spec.is_matrix
      else p * (1 + 0.2 * jax.random.normal(next(keys), p.shape))
    ),
    params,
    model.param_specs,
  )
  return model, params, balance


CONFIGS = {
  "gqa-sigmoid-groups": make_config(),
  "gqa-qk-norm-softmax": make_config(
    attention=dataclasses.replace(GQA, qk_norm=True),
    router=RouterConfig("softmax", top_k=2),
  ),
  "mla": make_config(attention=MLA),
  "mla-direct-queries": make_config(
    attention=dataclasses.replace(MLA, q_latent=0)
  ),
  "tied-no-dense-no-shared": make_config(
    tie_embeddings=True,
    num_layers=2,
    num_dense_layers=0,
    moe=MoeConfig(8, 12, RouterConfig("softmax", top_k=2, selection_bias=True)),
  ),
  "all-dense": make_config(num_layers=2, num_dense_layers=2, moe=None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_match_a_decoder_that_sees_each_alone(name):
  config = CONFIGS[name]
  model, params, balance = init(config)
  rng = np.random.default_rng(0)
  lengths = (5, 9)
  documents = [rng.integers(0, config.vocab_size, n) for n in lengths]
  # Two documents, then padding full of nonsense.
  tokens = np.concatenate([*documents, [7, 7]])[None]
  segment_ids = np.repeat([1, 2, 0], [*lengths, 2])[None]
  positions = np.concatenate([np.arange(n) for n in (*lengths, 2)])[None]
  out = jax.jit(model.apply)(
    params,
    balance,
    *(jnp.asarray(a, jnp.int32) for a in (tokens, positions, segment_ids)),
  )
  expected, routes = [], []
  for document in documents:
    logits, ids = oracle.forward(params, balance, config, document)
    expected.append(logits)
    routes.append(ids)
  np.testing.assert_allclose(
    out.logits[0, : sum(lengths)], np.concatenate(expected), atol=2e-5
  )
  if config.moe is None:
    assert out.routing is None
    return
  ids = np.concatenate(routes, axis=1)  # [layers, tokens, K]
  got = np.asarray(out.routing.expert_ids[:, 0])
  np.testing.assert_array_equal(got[:, : sum(lengths)], ids)
  assert (got[:, sum(lengths) :] == -1).all()
  load = [np.bincount(layer.ravel(), minlength=8) for layer in ids]
  np.testing.assert_array_equal(out.routing.load, load)


def test_other_documents_and_later_tokens_change_no_bit():
  config = make_config()
  model, params, balance = init(config)
  apply = jax.jit(model.apply)
  tokens = jax.random.randint(jax.random.key(2), (1, 12), 0, 50)
  segment_ids = jnp.asarray([[1] * 6 + [2] * 6])
  positions = jnp.asarray([[*range(6), *range(6)]])
  base = apply(params, balance, tokens, positions, segment_ids).logits
  other = tokens.at[0, 6:].set((tokens[0, 6:] + 1) % 50)
  changed = apply(params, balance, other, positions, segment_ids).logits
  np.testing.assert_array_equal(base[0, :6], changed[0, :6])
  assert (base[0, 6:] != changed[0, 6:]).any()
  later = tokens.at[0, 4].set((tokens[0, 4] + 1) % 50)
  changed = apply(params, balance, later, positions, segment_ids).logits
  np.testing.assert_array_equal(base[0, :4], changed[0, :4])
  np.testing.assert_array_equal(base[0, 6:], changed[0, 6:])
  assert (base[0, 4:6] != changed[0, 4:6]).any()


def grads_of(config, params, balance, tokens):
  model = LanguageModel(config)

  def loss(params):
    out = model.apply(params, balance, tokens)
    return jnp.square(out.logits).mean() + 1e-3 * out.routing.z_loss.sum()

  return jax.jit(jax.value_and_grad(loss))(params)


def test_rematerialisation_changes_no_gradient():
  config = make_config(num_layers=2, num_dense_layers=1)
  _, params, balance = init(config)
  tokens = jax.random.randint(jax.random.key(2), (2, 8), 0, 50)
  want = grads_of(config, params, balance, tokens)
  for remat in ("dots", "full"):
    got = grads_of(
      dataclasses.replace(config, remat=remat), params, balance, tokens
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      got,
      want,
    )


def test_full_remat_recomputes_and_none_does_not():
  tokens = jnp.zeros((1, 8), jnp.int32)
  counts = {}
  for remat in ("none", "full"):
    config = make_config(remat=remat)
    _, params, balance = init(config)
    jaxpr = jax.make_jaxpr(grads_of, static_argnums=0)(
      config, params, balance, tokens
    )
    counts[remat] = str(jaxpr).count("logistic")
  assert counts["full"] > counts["none"]


def test_the_program_does_not_grow_with_depth():
  sizes = []
  for depth in (4, 40):
    config = make_config(num_layers=depth, num_dense_layers=depth // 2)
    model = LanguageModel(config)
    jaxpr = jax.make_jaxpr(model.apply)(
      model.param_shapes, model.balance_shapes, jnp.zeros((1, 4), jnp.int32)
    )
    sizes.append(str(jaxpr).count("\n"))
  assert sizes[0] == sizes[1]


def test_layers_of_a_stack_are_drawn_independently():
  _, params, _ = init(make_config())
  weights = np.asarray(params["moe"]["layers"]["moe"]["w_gate_up"])
  flat = weights.reshape(-1, *weights.shape[2:])  # [layers * experts, ...]
  correlation = np.corrcoef(flat.reshape(len(flat), -1))
  assert np.abs(correlation - np.eye(len(flat))).max() < 0.3


def test_initial_scale_follows_from_the_contracted_axes():
  config = make_config(width=256, num_layers=2, num_dense_layers=1)
  model = LanguageModel(config)
  params, _ = jax.jit(model.init)(jax.random.key(0))

  def check(spec, param):
    if spec.is_matrix:
      sizes = dict(zip(spec.axes, param.shape, strict=True))
      fan_in = np.prod([sizes[axis] for axis in spec.contract])
      ratio = np.asarray(param).std() * np.sqrt(fan_in)
      assert 0.93 < ratio < 1.07, (spec, ratio)

  jax.tree.map(check, model.param_specs, params)
