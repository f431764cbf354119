"""What every objective keeps to: all surrogates under all corrections."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.rl import objective
from composer_jax.rl.objective import Streams

# One shape for all: compilation is what these tests wait for.
SHAPE = (4, 16)
SEEDS = st.integers(0, 2**32 - 1)
every_objective = pytest.mark.parametrize(
  "config", oracle.CONFIGS, ids=oracle.name_of
)
# Few examples each: there are many objectives.
few = settings(deadline=None, max_examples=10)


@functools.cache
def compiled(config):
  """`(logprobs, streams) -> loss, metrics, gradient`."""

  def loss(logprobs, streams):
    divide_by = objective.denominator(
      streams.loss_mask, streams.segment_ids, oracle.BUDGET, config
    )
    return objective.policy_loss(logprobs, streams, divide_by, config)

  def both(logprobs, streams):
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
      logprobs, streams
    )
    return value, metrics, gradient

  return jax.jit(both)


def draw(seed, dtype=np.float32):
  """A policy and streams, far enough apart that every rule has work to do."""
  rng = np.random.default_rng(seed)
  policy, sampler, proximal = -rng.uniform(0.02, 5.0, (3, *SHAPE))
  # Half of the tokens are as close as they are in practice.
  close = rng.random(SHAPE) < 0.5
  policy = np.where(close, proximal + rng.normal(0, 0.1, SHAPE), policy)
  sampler = np.where(close, proximal + rng.normal(0, 0.1, SHAPE), sampler)
  policy, sampler = np.minimum(policy, -1e-3), np.minimum(sampler, -1e-3)
  streams = Streams(
    loss_mask=rng.random(SHAPE) < 0.7,
    segment_ids=np.sort(rng.integers(0, 3, SHAPE), axis=1).astype(np.int32),
    advantages=rng.normal(size=SHAPE).astype(dtype),
    sampler_logprobs=sampler.astype(dtype),
    proximal_logprobs=proximal.astype(dtype),
  )
  return policy.astype(dtype), streams


def put(logprobs, streams):
  return jnp.asarray(logprobs), Streams(*(jnp.asarray(x) for x in streams))


@every_objective
def test_value_and_gradient_against_the_oracle(config):
  with jax.enable_x64(True):
    logprobs, streams = draw(0, np.float64)
    value, metrics, gradient = compiled(config)(*put(logprobs, streams))
    assert value.dtype == gradient.dtype == np.float64
    np.testing.assert_allclose(
      value, oracle.loss(logprobs, streams, config), rtol=1e-9
    )
    # Else the case would test no rule.
    assert metrics["clipped"] > 0
    if config.correction in ("tis", "icepop", "kpop"):
      assert metrics["corrected"] > 0
    for token in np.ndindex(SHAPE):
      ends = []
      for step in (1e-6, -1e-6):
        moved = logprobs.copy()
        moved[token] += step
        ends.append(oracle.loss(moved, streams, config, frozen=logprobs))
      np.testing.assert_allclose(
        gradient[token], (ends[0] - ends[1]) / 2e-6, atol=1e-7
      )


def test_gspo_gradient_is_that_of_the_whole_sequence():
  # With one advantage a sequence and no correction, as in the paper, nothing
  # need be frozen.
  config = next(c for c in oracle.CONFIGS if c.surrogate == "gspo")
  assert config.correction == "none"
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    _, streams = draw(0, np.float64)
    advantages = np.take_along_axis(
      rng.normal(size=(SHAPE[0], 3)), streams.segment_ids, axis=1
    )
    streams = streams._replace(advantages=advantages)
    logprobs = streams.proximal_logprobs + rng.normal(0, 2e-3, SHAPE)
    _, metrics, gradient = compiled(config)(*put(logprobs, streams))
    assert 0 < float(metrics["clipped"]) < 1
    for token in np.ndindex(SHAPE):
      moved = np.stack([logprobs, logprobs])
      moved[0][token] += 1e-7
      moved[1][token] -= 1e-7
      high, low = (oracle.loss(x, streams, config) for x in moved)
      np.testing.assert_allclose(
        gradient[token], (high - low) / 2e-7, atol=1e-7
      )


@every_objective
@few
@given(SEEDS)
def test_where_all_agree_nothing_is_clipped_or_corrected(config, seed):
  logprobs, streams = draw(seed)
  agreed = streams._replace(
    sampler_logprobs=logprobs, proximal_logprobs=logprobs
  )
  value, metrics, gradient = compiled(config)(*put(logprobs, agreed))
  for name in ("ratio_mean", "ratio_p99", "ratio_max"):
    assert metrics[name] == (1.0 if agreed.loss_mask.any() else 0.0)
  for name in ("clipped", "corrected"):
    assert metrics[name] == 0
  for name in ("mismatch_k1", "mismatch_k3", "mismatch_max"):
    assert metrics[name] == 0
  # Bit for bit the gradient without a correction (two programs may add the
  # value's terms in another order), and that is A alone, but for its weight.
  plain, _, plain_gradient = compiled(
    dataclasses.replace(config, correction="none")
  )(*put(logprobs, agreed))
  np.testing.assert_allclose(value, plain, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(gradient, plain_gradient)
  divisor = {"constant": oracle.BUDGET, "tokens": agreed.loss_mask.sum()}
  if config.normalise in divisor:
    divide_by = np.float32(max(divisor[config.normalise], 1))
    wanted = np.where(agreed.loss_mask, -agreed.advantages / divide_by, 0)
    np.testing.assert_allclose(gradient, wanted, rtol=3e-7)


@few
@given(SEEDS)
def test_where_all_agree_each_rule_gives_exactly_one(seed):
  logprobs, streams = put(*draw(seed))
  for weight, hit in (
    objective.importance(logprobs, logprobs),
    objective.tis(logprobs, logprobs, 1.0),
    objective.icepop(logprobs, logprobs, 1.0, 1.0),
    objective.kpop(logprobs, logprobs, 0.0),
  ):
    assert (weight == 1).all() and not hit.any()
  advantages = streams.advantages
  result = objective.ppo_clip(logprobs - logprobs, advantages, 0.0, 0.0)
  np.testing.assert_array_equal(result.objective, advantages)
  assert (result.ratio == 1).all() and not result.clipped.any()


@every_objective
@few
@given(SEEDS)
def test_what_is_masked_changes_nothing(config, seed):
  logprobs, streams = draw(seed)
  mask = streams.loss_mask
  rng = np.random.default_rng(seed)
  garbage = rng.choice([np.nan, np.inf, -np.inf, 1e30], SHAPE)
  garbage = garbage.astype(np.float32)

  def poison(x):
    return np.where(mask, x, garbage)

  poisoned = streams._replace(
    segment_ids=np.where(mask, streams.segment_ids, rng.integers(-9, 9)),
    advantages=poison(streams.advantages),
    sampler_logprobs=poison(streams.sampler_logprobs),
    proximal_logprobs=poison(streams.proximal_logprobs),
  )
  clean = compiled(config)(*put(logprobs, streams))
  dirty = compiled(config)(*put(poison(logprobs), poisoned))
  jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  assert not np.asarray(clean[2])[~mask].any()


@every_objective
def test_nan_in_a_loss_token_is_not_masked_away(config):
  logprobs, streams = draw(0)
  token = tuple(np.argwhere(streams.loss_mask)[3])
  broken = ["policy", "advantages", "proximal_logprobs"]
  if config.correction != "none":
    broken.append("sampler_logprobs")
  for name in broken:
    inputs = {"policy": logprobs, **streams._asdict()}
    inputs[name] = inputs[name].copy()
    inputs[name][token] = np.nan
    policy = inputs.pop("policy")
    assert np.isnan(compiled(config)(*put(policy, Streams(**inputs)))[0]), name
  # Where the loss doesn't look, the metrics do.
  inputs = streams._replace(sampler_logprobs=streams.sampler_logprobs.copy())
  inputs.sampler_logprobs[token] = np.nan
  assert np.isnan(compiled(config)(*put(logprobs, inputs))[1]["mismatch_max"])


@every_objective
@few
@given(SEEDS)
def test_layout_changes_nothing(config, seed):
  """A sequence a row, against packed rows in another order."""
  rng = np.random.default_rng(seed)
  logprobs, streams = draw(seed)
  lengths = rng.integers(1, 9, 4)
  inside = np.arange(16) < lengths[:, None]
  streams = streams._replace(
    loss_mask=streams.loss_mask & inside, segment_ids=inside.astype(np.int32)
  )
  # Two rows hold two sequences each, with gaps of padding; two are empty.
  other_logprobs = np.full(SHAPE, np.nan, np.float32)
  other = Streams(
    np.zeros(SHAPE, bool),
    np.zeros(SHAPE, np.int32),
    *(np.full((3, *SHAPE), np.nan, np.float32)),
  )
  places = {}
  for position, index in enumerate(rng.permutation(4)):
    start = 8 * (position % 2) + rng.integers(0, 9 - lengths[index])
    places[index] = position // 2, slice(start, start + lengths[index])
    for target, source in zip(
      (other_logprobs, *other), (logprobs, *streams), strict=True
    ):
      target[places[index]] = source[index, : lengths[index]]
    other.segment_ids[places[index]] = position + 1
  value, metrics, gradient = compiled(config)(*put(logprobs, streams))
  value2, metrics2, gradient2 = compiled(config)(*put(other_logprobs, other))
  np.testing.assert_allclose(value2, value, rtol=1e-5, atol=1e-6)
  for name in metrics:
    np.testing.assert_allclose(
      metrics2[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
    )
  # GSPO's sums may round otherwise; all else is bit-equal.
  rtol = 1e-5 if config.surrogate == "gspo" else 0
  assert np.count_nonzero(gradient2) == np.count_nonzero(gradient)
  for index, place in places.items():
    np.testing.assert_allclose(
      gradient2[place], gradient[index, : lengths[index]], rtol=rtol
    )


PLAIN = pytest.mark.parametrize(
  "config",
  [c for c in oracle.CONFIGS if c.correction == "none"],
  ids=oracle.name_of,
)


@PLAIN
def test_micro_batches_change_nothing(config):
  logprobs, streams = put(*draw(5))
  value, _, _ = compiled(config)(logprobs, streams)
  divide_by = objective.denominator(
    streams.loss_mask, streams.segment_ids, oracle.BUDGET, config
  )
  loss = jax.jit(objective.policy_loss, static_argnames="config")
  total = 0.0
  for rows in (slice(0, 2), slice(2, 4)):
    micro_batch = jax.tree.map(lambda x, rows=rows: x[rows], streams)
    total += loss(logprobs[rows], micro_batch, divide_by, config)[0]
  np.testing.assert_allclose(total, value, rtol=1e-5)


def test_devices_change_nothing():
  # GSPO's sums are the only work across tokens.
  config = next(c for c in oracle.CONFIGS if c.surrogate == "gspo")
  mesh = jax.make_mesh(
    (4, 2), ("data", "context"), (jax.sharding.AxisType.Auto,) * 2
  )
  alone = put(*draw(5))
  spread = jax.device_put(alone, NamedSharding(mesh, P("data", "context")))
  value, metrics, gradient = compiled(config)(*alone)
  value2, metrics2, gradient2 = compiled(config)(*spread)
  np.testing.assert_allclose(value2, value, rtol=1e-5)
  np.testing.assert_allclose(gradient2, gradient, rtol=1e-5, atol=1e-8)
  for name in metrics:
    np.testing.assert_allclose(metrics2[name], metrics[name], rtol=1e-5)


@every_objective
def test_no_scatter(config):
  """GPUs scatter with atomic additions, in an order of chance."""
  assert "scatter" not in compiled(config).lower(*put(*draw(0))).as_text()


@every_objective
def test_huge_ratios_leave_the_gradient_finite(config):
  logprobs, streams = draw(0)
  far = streams._replace(
    proximal_logprobs=streams.proximal_logprobs - 200,
    sampler_logprobs=streams.sampler_logprobs - 400,
  )
  value, metrics, gradient = compiled(config)(*put(logprobs, far))
  assert np.isfinite(value) and np.isfinite(gradient).all()
  assert np.isfinite(metrics["ratio_max"])


def test_sixteen_bit_streams_are_widened():
  config = oracle.CONFIGS[0]
  logprobs, streams = put(*draw(0))
  half = jnp.bfloat16
  value, _, gradient = compiled(config)(
    logprobs.astype(half),
    streams._replace(proximal_logprobs=streams.proximal_logprobs.astype(half)),
  )
  assert value.dtype == jnp.float32 and gradient.dtype == half


def test_length_counts_by_a_constant_only_where_so_stated():
  """A sequence twice as long weighs twice, unless averaged over its length."""
  for normalise, factor in (("constant", 2.0), ("sequences", 1.0)):
    config = dataclasses.replace(oracle.CONFIGS[0], normalise=normalise)
    values = []
    for length in (3, 6):
      logprobs = jnp.full(SHAPE, -1.0)
      streams = Streams(
        loss_mask=jnp.arange(64).reshape(SHAPE) < length,
        segment_ids=jnp.ones(SHAPE, jnp.int32),
        advantages=jnp.full(SHAPE, 0.5),
        sampler_logprobs=logprobs,
        proximal_logprobs=logprobs,
      )
      values.append(compiled(config)(logprobs, streams)[0])
    np.testing.assert_allclose(values[1], factor * values[0], rtol=1e-6)


group_advantages = jax.jit(objective.group_advantages, static_argnames="kind")


@settings(deadline=None)
@given(SEEDS, st.sampled_from(["dr_grpo", "grpo"]))
def test_advantages_of_a_group(seed, kind):
  rng = np.random.default_rng(seed)
  rewards = rng.normal(rng.normal(0, 10), rng.uniform(0.1, 3), (5, 16))
  valid = rng.random((5, 16)) < 0.8
  rewards = np.where(valid, rewards, np.nan).astype(np.float32)
  advantages = np.asarray(group_advantages(rewards, valid, kind))
  np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=2e-5)
  assert not advantages[~valid].any()
  for row, keep, got in zip(rewards, valid, advantages, strict=True):
    row, got = row[keep].astype(np.float64), got[keep]
    scale = row.std() if kind == "grpo" and row.size else 1.0
    if row.size > 1:
      np.testing.assert_allclose(got, (row - row.mean()) / scale, atol=1e-4)


@settings(deadline=None)
@given(
  st.floats(-1e6, 1e6, width=32),
  st.lists(st.booleans(), min_size=16, max_size=16),
  st.sampled_from(["dr_grpo", "grpo"]),
)
def test_equal_rewards_teach_nothing(reward, valid, kind):
  advantages = group_advantages(
    np.full((5, 16), reward, np.float32), np.tile(valid, (5, 1)), kind
  )
  np.testing.assert_array_equal(advantages, 0)


LOGPROBS = st.floats(-30, -(2**-20), width=32)


@settings(deadline=None)
@given(LOGPROBS, st.one_of(st.none(), LOGPROBS))
def test_k1_is_zero_only_where_policy_equals_reference(policy, reference):
  reference = policy if reference is None else reference
  estimate = objective.k1(jnp.float32(policy), jnp.float32(reference))
  assert (estimate == 0) == (policy == reference)
  assert objective.k3(jnp.float32(policy), jnp.float32(reference)) >= 0


@jax.jit
def penalised(logprobs, reference, mask, owners):
  def rewards(logprobs):
    start = jnp.arange(4, dtype=jnp.float32)
    return objective.penalise_kl(start, logprobs, reference, mask, owners, 0.1)

  return rewards(logprobs), jax.grad(lambda x: rewards(x).sum())(logprobs)


@few
@given(SEEDS)
def test_kl_in_the_reward(seed):
  logprobs, streams = draw(seed)
  owners = np.random.default_rng(seed).integers(0, 4, SHAPE).astype(np.int32)
  mask, reference = streams.loss_mask, streams.proximal_logprobs
  garbage = np.where(mask, logprobs, np.nan).astype(np.float32)
  rewards, gradient = penalised(garbage, reference, mask, owners)
  wanted = np.arange(4.0)
  np.subtract.at(wanted, owners[mask], 0.1 * (logprobs - reference)[mask])
  np.testing.assert_allclose(rewards, wanted, rtol=1e-5, atol=1e-5)
  # In the reward, not in the loss: nothing to differentiate.
  np.testing.assert_array_equal(gradient, 0)
