"""One update on one device, against sums in float64 and by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  SMALL,
  TOKEN_BYTES,
  assert_rounding_apart,
  assert_same_bits,
  capture,
  make_batch,
  make_params,
  make_state,
  train_config,
)

from composer_jax.models import LanguageModel
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer
from composer_jax.training.step import make_eval_step, make_train_step

MODEL = LanguageModel(SMALL)
CONFIG = train_config(z_loss=0.1, balance_rate=0.01)


@functools.cache
def compiled_step(accumulate=1):
  """A step that keeps its gradients, and the weights as they were."""
  config = dataclasses.replace(CONFIG, accumulate=accumulate)
  return jax.jit(make_train_step(MODEL, capture(), config, TOKEN_BYTES))


@pytest.fixture(scope="module")
def state():
  return make_state(MODEL, capture(), make_params(MODEL))


def test_loss_and_bits_per_byte_are_those_of_the_logits(state):
  batch = make_batch()
  _, metrics = compiled_step()(state, batch)
  sums = jax.jit(make_eval_step(MODEL, TOKEN_BYTES))(state, batch)
  logits = jax.jit(lambda *args: MODEL.apply(*args).logits)(
    state.params,
    state.balance,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
  )
  logits = np.asarray(logits, np.float64)
  nats = num_bytes = tokens = 0
  for row, column in np.argwhere(batch.loss_mask):
    target = int(batch.targets[row, column])
    scores = logits[row, column]
    nats += np.log(np.exp(scores).sum()) - scores[target]
    num_bytes += target % 5
    tokens += 1
  assert metrics["tokens"] == sums.tokens == tokens
  assert sums.bytes == num_bytes
  np.testing.assert_allclose(sums.nats, nats, rtol=1e-6)
  np.testing.assert_allclose(metrics["loss"], nats / tokens, rtol=1e-6)
  np.testing.assert_allclose(
    metrics["bits_per_byte"], nats / np.log(2) / num_bytes, rtol=1e-6
  )
  squares = [
    np.square(np.asarray(leaf, np.float64)).sum()
    for leaf in jax.tree.leaves(state.params)
  ]
  np.testing.assert_allclose(
    metrics["param_norm"], np.sqrt(sum(squares)), rtol=1e-6
  )


def test_what_stands_in_the_padding_does_not_matter(state):
  batch = make_batch()
  padding = ~batch.loss_mask
  assert padding.mean() > 0.3
  poisoned = batch._replace(
    tokens=jnp.where(padding, 63 - batch.tokens, batch.tokens),
    targets=jnp.where(padding, 63 - batch.targets, batch.targets),
    positions=jnp.where(padding, 7, batch.positions),
  )
  assert_same_bits(
    compiled_step()(state, poisoned), compiled_step()(state, batch)
  )


def test_every_token_counts_alike_however_a_batch_is_split(state):
  batch = make_batch()
  # Micro-batches with next to no tokens beside full ones, and one with none.
  mask = batch.loss_mask.at[jnp.array([1, 5])].set(False)
  segment_ids = jnp.where(mask, batch.segment_ids, 0)
  batch = batch._replace(loss_mask=mask, segment_ids=segment_ids)
  counts = mask.sum(1).reshape(2, 4).sum(0)
  assert counts.min() == 0
  assert len(set(counts.tolist())) == 4

  whole, expected = compiled_step()(state, batch)
  split, metrics = compiled_step(accumulate=4)(state, batch)
  assert_rounding_apart(split.opt_state.grads, whole.opt_state.grads, 1e-5)
  np.testing.assert_array_equal(metrics.pop("load"), expected.pop("load"))
  assert metrics["tokens"] == expected["tokens"]
  assert_rounding_apart(metrics, expected, 1e-6)
  assert_same_bits(split.balance, whole.balance)


def test_selection_bias_moves_by_its_rate_and_evens_the_load(state):
  # One component of the residual stream is the same for all tokens, and the
  # routers turn it into a liking for the first experts.
  params = jax.tree.map(lambda x: x, state.params)
  params["embedding"] = params["embedding"].at[:, 0].set(2.0)
  router = params["moe"]["layers"]["moe"]["w_router"]
  skew = jnp.linspace(0.5, -0.5, 8)
  params["moe"]["layers"]["moe"]["w_router"] = router.at[:, 0].set(skew[None])
  skewed = dataclasses.replace(state, params=params)
  batch, imbalances = make_batch(), []
  for _ in range(60):
    before = skewed.balance["moe"]["layers"]["moe"]["bias"]
    skewed, metrics = compiled_step()(skewed, batch)
    load = np.asarray(metrics["load"])
    assert load.shape == (2, 8)
    assert (load.sum(1) == 2 * metrics["tokens"]).all()
    move = np.float32(0.01) * np.sign(load.mean(1, keepdims=True) - load)
    np.testing.assert_array_equal(
      skewed.balance["moe"]["layers"]["moe"]["bias"],
      before + move.astype(np.float32),
    )
    np.testing.assert_allclose(
      metrics["imbalance"], (load.max(1) / load.mean(1)).max(), rtol=1e-6
    )
    imbalances.append(float(metrics["imbalance"]))
  assert imbalances[0] > 3
  assert np.mean(imbalances[-5:]) < 1.6


def test_z_loss_and_its_gradient(state):
  # A router of zeros gives each of 8 experts the logit 0.
  params = jax.tree.map(lambda x: x, state.params)
  moe = params["moe"]["layers"]["moe"]
  router = moe["w_router"]
  step, batch = compiled_step(), make_batch()
  moe["w_router"] = jnp.zeros_like(router)
  _, metrics = step(dataclasses.replace(state, params=params), batch)
  np.testing.assert_allclose(metrics["z_loss"], np.log(8) ** 2, rtol=1e-6)

  # Without a target the z-loss alone is left, as a sum: num_tokens counts as 1.
  # Only the last router is moved: another one's choices would be steps in it.
  batch = batch._replace(loss_mask=jnp.zeros_like(batch.loss_mask))
  moved, _ = step(state, batch)
  grads = moved.opt_state.grads
  last = grads["moe"]["layers"]["moe"]["w_router"][1]
  assert not grads["unembedding"].any()
  direction = np.asarray(last / jnp.linalg.norm(last))

  def z_loss(distance):
    moe["w_router"] = router.at[1].add(distance * direction)
    _, metrics = step(dataclasses.replace(state, params=params), batch)
    return float(metrics["z_loss"])

  slope = CONFIG.z_loss * (z_loss(0.05) - z_loss(-0.05)) / 0.1
  np.testing.assert_allclose(slope, jnp.linalg.norm(last), rtol=1e-3)


def test_bfloat16_computes_and_float32_remembers():
  model = LanguageModel(dataclasses.replace(SMALL, dtype="bfloat16"))
  params = make_params(model)
  copy = model.compute_copy(params)
  kept = {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, leaf in jax.tree_util.tree_leaves_with_path(copy)
    if leaf.dtype == jnp.float32
  }
  assert kept == {
    "dense.layers.attention_norm.scale",
    "dense.layers.mlp_norm.scale",
    "moe.layers.attention_norm.scale",
    "moe.layers.mlp_norm.scale",
    "moe.layers.moe.w_router",
    "norm.scale",
  }
  assert {leaf.dtype for leaf in jax.tree.leaves(copy)} == {
    jnp.dtype(jnp.float32),
    jnp.dtype(jnp.bfloat16),
  }

  rate = 1e-6
  step = jax.jit(make_train_step(model, capture(rate), CONFIG, TOKEN_BYTES))
  batch = make_batch()
  state = make_state(model, capture(rate), params)
  after, metrics = step(state, batch)
  assert {
    x.dtype for x in jax.tree.leaves((after.params, after.opt_state))
  } == {jnp.dtype(jnp.float32)}
  # An update far below bfloat16's resolution is not lost.
  wanted = jax.tree.map(
    lambda p, g: p - rate * g, state.params, after.opt_state.grads
  )
  assert_rounding_apart(after.params, wanted, 1e-7)
  moved = after.params["unembedding"] != params["unembedding"]
  assert moved.mean() > 0.5
  # What bfloat16 can't hold has no part in the computation.
  rounded = jax.tree.map(lambda x: x.astype(jnp.float32), copy)
  assert (rounded["unembedding"] != params["unembedding"]).mean() > 0.9
  again, same = step(make_state(model, capture(rate), rounded), batch)
  assert same.pop("param_norm") != metrics.pop("param_norm")
  assert_same_bits(same, metrics)
  assert_same_bits(again.opt_state, after.opt_state)


@pytest.mark.parametrize(("name", "rate"), [("adamw", 1e-2), ("muon", 2e-2)])
def test_learns_a_batch_by_heart_with_the_same_bits_each_time(name, rate):
  config = OptimizerConfig(name, rate, "constant", warmup_steps=0)
  optimizer = make_optimizer(config, MODEL.param_specs, 100)
  step = jax.jit(make_train_step(MODEL, optimizer, CONFIG, TOKEN_BYTES))
  batch = make_batch()

  def learn(num_steps):
    state = make_state(MODEL, optimizer, make_params(MODEL))
    losses = []
    for _ in range(num_steps):
      state, metrics = step(state, batch)
      losses.append(float(metrics["loss"]))
    return state, losses

  _, losses = learn(30)
  # A uniform guess has log 64 = 4.16.
  assert losses[0] > 4
  assert losses[-1] < 1
  state, losses = learn(5)
  again, same = learn(5)
  assert losses == same
  assert int(state.step) == 5
  assert_same_bits(again, state)
