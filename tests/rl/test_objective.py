"""Each formula of the objective against numbers worked out by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.rl import objective
from composer_jax.rl.objective import ObjectiveConfig, Streams

FLOATS = {"rtol": 1e-6, "atol": 1e-7}


def row(*values, dtype=jnp.float32):
  return jnp.asarray([values], dtype)


def log(*values):
  return jnp.log(row(*values))


def streams(proximal, sampler=None, advantages=None, mask=None, segments=None):
  shape = proximal.shape
  return Streams(
    loss_mask=jnp.ones(shape, bool) if mask is None else mask,
    segment_ids=jnp.ones(shape, jnp.int32) if segments is None else segments,
    advantages=jnp.ones(shape) if advantages is None else advantages,
    sampler_logprobs=proximal if sampler is None else sampler,
    proximal_logprobs=proximal,
  )


def loss_of(logprobs, batch, config, budget=1.0):
  divide_by = objective.denominator(
    batch.loss_mask, batch.segment_ids, budget, config
  )
  return objective.policy_loss(logprobs, batch, divide_by, config)


def test_group_advantages():
  rewards = jnp.asarray([[1.0, 0.0, 0.0, 1.0], [3.0, jnp.nan, 0.0, 0.0]])
  valid = jnp.asarray([[True] * 4, [True, False, True, True]])
  np.testing.assert_allclose(
    objective.group_advantages(rewards, valid),
    [[0.5, -0.5, -0.5, 0.5], [2.0, 0.0, -1.0, -1.0]],
    **FLOATS,
  )
  # Variances 1/4 and (4 + 1 + 1) / 3 = 2.
  np.testing.assert_allclose(
    objective.group_advantages(rewards, valid, "grpo"),
    [[1, -1, -1, 1], [2**0.5, 0, -(2**-0.5), -(2**-0.5)]],
    rtol=1e-5,
  )


def test_estimators_of_the_kl_divergence():
  policy, reference = log(0.5, 0.5), log(0.25, 1.0)
  np.testing.assert_allclose(
    objective.k1(policy, reference), [[np.log(2), -np.log(2)]], **FLOATS
  )
  np.testing.assert_allclose(
    objective.k3(policy, reference),
    [[-0.5 + np.log(2), 1 - np.log(2)]],
    **FLOATS,
  )


def test_kl_in_the_reward_is_summed_over_a_trajectory_in_several_rows():
  policy, reference = jnp.zeros((2, 3)), jnp.asarray([[-1, -2, -4], [-8, 5, 3]])
  rewards = objective.penalise_kl(
    jnp.asarray([10.0, 20.0, 30.0]),
    policy,
    reference.astype(jnp.float32),
    jnp.asarray([[True, True, True], [True, False, True]]),
    jnp.asarray([[2, 0, 2], [2, 2, 0]]),
    0.5,
  )
  # KL 2 - 3 for the first, none of the second, 1 + 4 + 8 for the third.
  np.testing.assert_allclose(rewards, [10.5, 20.0, 23.5], **FLOATS)


def test_ppo_clips_only_what_would_go_further():
  result = objective.ppo_clip(
    log(1.5, 0.5, 1.1, 1.5, 0.5), row(2.0, 2, 2, -2, -2), 0.2, 0.28
  )
  np.testing.assert_allclose(
    result.objective, [[2.56, 1.0, 2.2, -3.0, -1.6]], **FLOATS
  )
  assert result.clipped.tolist() == [[True, False, False, False, True]]


def test_ppo_gradient_is_zero_where_clipped():
  advantages = row(2.0, 2, 2, -2, -2)
  gradient = jax.grad(
    lambda x: objective.ppo_clip(x, advantages, 0.2, 0.28).objective.sum()
  )(log(1.5, 0.5, 1.1, 1.5, 0.5))
  # d(r A) = r A dlog r.
  np.testing.assert_allclose(gradient, [[0, 1.0, 2.2, -3.0, 0]], **FLOATS)


def test_ppo_gradient_is_whole_on_the_bounds():
  # Where both branches of the minimum are equal: on-policy, if 0 is allowed.
  advantages = row(2.0, -2.0)
  gradient = jax.grad(
    lambda x: objective.ppo_clip(x, advantages, 0.0, 0.0).objective.sum()
  )(row(0.0, 0.0))
  np.testing.assert_array_equal(gradient, advantages)


def test_gspo_ratio_is_the_geometric_mean_of_the_sequence():
  result = objective.sequence_log_ratio(
    log(2.0, 7.0, 8.0, 0.5, 3.0),
    row(True, False, True, True, True, dtype=bool),
    row(1, 1, 1, 2, 3, dtype=jnp.int32),
  )
  np.testing.assert_allclose(
    jnp.exp(result)[:, jnp.asarray([0, 2, 3, 4])], [[4, 4, 0.5, 3]], **FLOATS
  )


def test_cispo_clips_the_weight_and_keeps_the_gradient():
  advantages = row(1.0, -2.0, 3.0)

  def total(logprobs):
    result = objective.cispo(logprobs, log(3.0, 0.2, 1.5), advantages, 0.5, 1.0)
    return result.objective.sum(), result

  gradient, result = jax.grad(total, has_aux=True)(log(0.5, 0.1, 0.3))
  np.testing.assert_allclose(gradient, [[2.0, -1.0, 4.5]], **FLOATS)
  np.testing.assert_allclose(
    result.objective,
    [[2 * np.log(0.5), -np.log(0.1), 4.5 * np.log(0.3)]],
    **FLOATS,
  )
  assert result.clipped.tolist() == [[True, True, False]]


def test_importance():
  weight, hit = objective.importance(log(0.5, 0.1), log(0.25, 0.2))
  np.testing.assert_allclose(weight, [[2, 0.5]], **FLOATS)
  assert not hit.any()


def test_tis_truncates():
  weight, hit = objective.tis(log(0.6, 0.3, 0.01), log(0.2, 0.2, 0.1), 2.0)
  np.testing.assert_allclose(weight, [[2, 1.5, 0.1]], **FLOATS)
  assert hit.tolist() == [[True, False, False]]


def test_icepop_masks_on_both_sides():
  weight, hit = objective.icepop(
    log(0.049, 0.051, 0.49, 0.51), log(0.1, 0.1, 0.1, 0.1), 0.5, 5.0
  )
  np.testing.assert_allclose(weight, [[0, 0.51, 4.9, 0]], **FLOATS)
  assert hit.tolist() == [[True, False, False, True]]


def test_kpop_masks_in_both_directions():
  # D(.9, .1) = .8 log 9 = 1.76 both ways; D(.95, .05) = .9 log 19 = 2.65.
  weight, hit = objective.kpop(log(0.9, 0.95), log(0.1, 0.05), 2.0)
  np.testing.assert_allclose(weight, [[9, 0]], **FLOATS)
  assert hit.tolist() == [[False, True]]
  # D(.5, .01) = 1.61, D(.01, .5) = 0.64: one direction is enough.
  _, hit = objective.kpop(log(0.5, 0.01), log(0.01, 0.5), 1.0)
  assert hit.all()
  _, hit = objective.kpop(log(0.5, 0.01), log(0.01, 0.5), 1.62)
  assert not hit.any()


def test_kpop_is_wide_for_rare_tokens_and_finite_at_the_ends():
  # The ratio is 1000, and yet hardly any probability moved.
  weight, _ = objective.kpop(log(1e-3), log(1e-6), 2.0)
  np.testing.assert_allclose(weight, [[1000]], rtol=1e-4)
  # Certain, and all but certain, against each other and against doubt.
  proximal, sampler = row(0.0, 0.0, -1e-9), row(0.0, -10.0, 0.0)
  _, hit = objective.kpop(proximal, sampler, 2.0)
  assert hit.tolist() == [[False, True, False]]


def test_decoupled_ppo():
  config = ObjectiveConfig(correction="importance")
  batch = streams(log(0.5), sampler=log(0.25), advantages=row(3.0))
  loss, metrics = loss_of(log(0.75), batch, config, budget=4.0)
  # mu 1/4, pi_prox 1/2, pi 3/4: 2 * min(1.5 * 3, 1.28 * 3), over 4.
  np.testing.assert_allclose(loss, -1.92, **FLOATS)
  np.testing.assert_allclose(metrics["ratio_mean"], 1.5, **FLOATS)
  assert metrics["clipped"] == 1 and metrics["corrected"] == 0


@pytest.mark.parametrize(
  "normalise, wanted",
  [("constant", 11 / 40), ("tokens", 11 / 4), ("sequences", (2 + 5) / 2)],
)
def test_what_a_token_counts(normalise, wanted):
  # Sequences of three tokens of advantage 2, and of one of 5.
  config = ObjectiveConfig(correction="none", normalise=normalise)
  logprobs = log(0.5, 0.5, 0.5, 0.5, 0.5)
  batch = streams(
    logprobs,
    advantages=row(2.0, 2, 2, 9, 5),
    mask=row(True, True, True, False, True, dtype=bool),
    segments=row(1, 1, 1, 2, 2, dtype=jnp.int32),
  )
  loss, _ = loss_of(logprobs, batch, config, budget=40)
  np.testing.assert_allclose(loss, -wanted, **FLOATS)


def test_metrics():
  # 200 loss tokens of ratio 1, 1 + 1/200, ...; what is masked is huge.
  ratios = 1 + jnp.arange(200)[None] / 200
  proximal = jnp.full((1, 201), -1.0)
  sampler = proximal.at[0, :2].set(jnp.asarray([-0.5, -4.0]))
  mask = jnp.ones((1, 201), bool).at[0, 200].set(False)
  logprobs = proximal + jnp.pad(jnp.log(ratios), ((0, 0), (0, 1)), "maximum")
  logprobs = logprobs.at[0, 200].set(50.0)
  sampler = sampler.at[0, 200].set(-50.0)
  batch = streams(proximal, sampler, mask=mask)
  config = ObjectiveConfig(correction="icepop")
  _, metrics = loss_of(logprobs, batch, config)
  wanted = {
    "ratio_mean": 1 + 99.5 / 200,
    "ratio_p99": 1 + 197 / 200,  # two of 200 lie above it
    "ratio_max": 1 + 199 / 200,
    "clipped": 143 / 200,  # above 1.28: 57/200 to 199/200
    "corrected": 1 / 200,  # w = exp(-.5) = .61 is kept, exp(3) = 20 isn't
    "mismatch_k1": (0.5 - 3.0) / 200,
    "mismatch_k3": (np.exp(-0.5) - 0.5 + np.exp(3.0) - 4.0) / 200,
    "mismatch_max": 3.0,
    "tokens": 200,
  }
  assert metrics.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_a_batch_without_loss_tokens():
  for normalise in ("constant", "tokens", "sequences"):
    config = ObjectiveConfig(normalise=normalise)
    batch = streams(log(0.5, 0.5), mask=row(False, False, dtype=bool))
    loss, metrics = loss_of(log(0.5, 0.5), batch, config)
    assert loss == 0
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"surrogate": "cispo"}, "surrogate='cispo' needs clip_high"),
    ({"clip_low": 1.5}, r"clip_low=1.5 must lie in \[0, 1\]"),
    ({"clip_high": float("nan")}, "clip_high=nan must lie in"),
    ({"kl_coef": -1.0}, "kl_coef=-1.0 must lie in"),
    ({"correction_low": 0.5}, "correction_low=0.5 has no part in .*'tis'"),
    ({"correction_high": 0.9}, r"correction_high=0.9 must lie in \[1, inf\]"),
    (
      {"correction": "none", "correction_high": 2.0},
      "correction_high=2.0 has no part in correction='none'",
    ),
  ],
)
def test_mistakes_in_a_config(fields, message):
  with pytest.raises(ValueError, match=message) as raised:
    ObjectiveConfig(**fields)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("name", "choices"),
  [
    ("advantages", "'dr_grpo', 'grpo'"),
    ("surrogate", "'ppo', 'gspo', 'cispo'"),
    ("correction", "'none', 'importance', 'tis', 'icepop', 'kpop'"),
    ("normalise", "'constant', 'tokens', 'sequences'"),
  ],
)
def test_unknown_names_are_refused(name, choices):
  config = ObjectiveConfig()
  # Not by the constructor: in tests, jaxtyping would refuse it first.
  object.__setattr__(config, name, "other")
  message = f"{name}='other' must be one of {choices}."
  with pytest.raises(ValueError, match=re.escape(message)):
    config.__post_init__()


def test_own_numbers_replace_the_papers():
  config = ObjectiveConfig(clip_high=0.5, correction="icepop")
  assert config.clip_bounds == (0.2, 0.5) and config.correction_bounds == (
    0.5,
    5.0,
  )
  config = ObjectiveConfig(surrogate="gspo", clip_low=0.0, correction="kpop")
  assert config.clip_bounds == (0.0, 4e-4) and config.correction_bounds == (
    None,
    2.0,
  )


def test_mistakes_in_a_call():
  batch = streams(log(0.5, 0.5))
  config = ObjectiveConfig()
  one = jnp.float32(1)
  with pytest.raises(ValueError, match="loss_mask is int32, but must be bool"):
    objective.policy_loss(
      log(0.5, 0.5),
      batch._replace(loss_mask=row(1, 1, dtype=jnp.int32)),
      one,
      config,
    )
  with pytest.raises(ValueError, match=r"advantages has shape \(1, 1\)"):
    objective.policy_loss(
      log(0.5, 0.5), batch._replace(advantages=row(1.0)), one, config
    )
  with pytest.raises(ValueError, match="budget=0 must be positive"):
    objective.denominator(batch.loss_mask, batch.segment_ids, 0, config)
  with pytest.raises(ValueError, match="kind='gae' must be one of"):
    objective.group_advantages(row(1.0), row(True, dtype=bool), "gae")
