"""The learner against a policy gradient without packing, and its own rules."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from composer_jax.models import LanguageModel
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.rl.trajectory import Group, Sampling
from composer_jax.sharding import MeshConfig
from composer_jax.training.checkpoint import Checkpoints
from composer_jax.training.meter import NonFiniteLossError
from tests.rl.learner_rig import (
  CAPTURE,
  MODEL,
  make_groups,
  make_learner,
  make_trajectory,
)
from tests.training.helpers import (
  assert_rounding_apart,
  assert_same_bits,
  make_params,
  make_state,
)

PLAIN = ObjectiveConfig(correction="none")
WITH_KL = {
  "objective": ObjectiveConfig(correction="none", kl_coef=0.5),
  "balance_rate": 0.25,
}


def gradient_of(learner, groups):
  """The gradient that a step takes, and the step's metrics."""
  metrics = learner.step(learner.admit(groups))
  return jax.device_get(learner.state.opt_state.grads), metrics


def by_hand(params, balance, groups, budget):
  """Reward minus the group's mean, times log-probability; no packing."""
  model = LanguageModel(MODEL)

  def loss(params):
    total = 0.0
    for group in groups:
      mean = np.mean([t.reward for t in group.trajectories])
      for t in group.trajectories:
        padded = np.zeros(24, np.int32)
        padded[: len(t)] = t.token_ids
        logits = apply(params, padded[None])[0]
        scaled = logits[: len(t) - 1] / t.sampling.temperature
        chosen = jax.nn.log_softmax(scaled)[
          np.arange(len(t) - 1), padded[1 : len(t)]
        ]
        total += (t.reward - mean) * (chosen * t.loss_mask[1:]).sum()
    return -total / budget

  apply = jax.jit(lambda p, tokens: model.apply(p, balance, tokens).logits)
  return jax.grad(loss)(params)


def with_own_logprobs(learner, groups):
  """The groups, as if the learner itself had sampled them."""
  batch = learner.admit(groups)
  logprobs = learner.old_logprobs(batch)
  changed, first = [], 0
  for group in groups:
    trajectories = []
    for i, t in enumerate(group.trajectories, first):
      own = np.zeros(len(t), np.float32)
      own[t.loss_mask] = logprobs[(batch.trajectories == i) & batch.loss_mask]
      trajectories.append(dataclasses.replace(t, logprobs=own))
    first += len(trajectories)
    changed.append(dataclasses.replace(group, trajectories=tuple(trajectories)))
  return changed


def test_gradient_is_the_plain_policy_gradient():
  learner = make_learner(optimizer=CAPTURE, objective=PLAIN)
  groups = make_groups(groups=2, size=3)
  hot = groups[0].trajectories[0]
  hot = dataclasses.replace(hot, sampling=Sampling(temperature=0.5))
  groups[0] = Group("task 0", (hot, *groups[0].trajectories[1:]))
  params, balance = jax.device_get(
    (learner.state.params, learner.state.balance)
  )
  gradient, metrics = gradient_of(learner, groups)
  expected = jax.device_get(by_hand(params, balance, groups, 100.0))
  assert_rounding_apart(gradient, expected, 1e-5)
  assert metrics["ratio_max"] == 1


def test_own_and_fresh_logprobs_are_left_alone():
  learner = make_learner(anchor="admission")
  groups = with_own_logprobs(learner, make_groups())
  metrics = learner.step(learner.admit(groups))
  assert metrics["ratio_mean"] == metrics["ratio_max"] == 1
  assert metrics["clipped"] == metrics["corrected"] == 0
  # A forward pass by itself rounds as the one inside of the gradient, nearly.
  assert metrics["mismatch_max"] < 2e-6


def test_what_the_mismatch_would_be_without_replay():
  groups = make_groups()
  without = make_learner(objective=PLAIN)
  expected = without.step(without.admit(groups))
  assert without.mismatch_without_replay(without.admit(groups)) == {}
  learner = make_learner(objective=PLAIN, replay=ReplayConfig(min_ratio=0.0))
  batch = learner.admit(groups)
  found = learner.mismatch_without_replay(batch)
  metrics = learner.step(batch)
  for name in ("mismatch_mean", "mismatch_p99"):
    # A forward pass by itself rounds otherwise; see above.
    apart = found[f"{name}_without_replay"]
    assert apart == pytest.approx(expected[name], rel=1e-5)
    # Routes by chance do make a difference.
    assert abs(apart - metrics[name]) > 1e-4


def test_flops_of_trajectories():
  learner = make_learner()
  rng = np.random.default_rng(0)
  short, long = (make_trajectory(rng, length=n) for n in (10, 20))
  one, two = learner.flops([short]), learner.flops([long])
  # Attention looks at all that came before.
  assert two > 2 * one > 0
  assert learner.flops([short, long, short]) == 2 * one + two


def test_micro_batches_add_up():
  whole = make_learner(optimizer=CAPTURE, objective=PLAIN)
  parts = make_learner(
    optimizer=CAPTURE, objective=PLAIN, shape=BatchShape(1, 24)
  )
  groups = make_groups()
  one, metrics = gradient_of(whole, groups)
  many, metrics_many = gradient_of(parts, groups)
  assert metrics["micro_batches"] == 2
  assert metrics_many["micro_batches"] > 6
  assert_rounding_apart(many, one, 1e-5)
  for name in set(metrics) - {"micro_batches", "padding", "ratio_p99"}:
    np.testing.assert_allclose(metrics_many[name], metrics[name], rtol=1e-4)


def test_many_devices_do_what_one_does():
  mesh = MeshConfig(data=2, fsdp=1, expert=2, tensor=2)
  many = make_learner(mesh=mesh, optimizer=CAPTURE, objective=PLAIN)
  one = make_learner(optimizer=CAPTURE, objective=PLAIN)
  groups = make_groups()
  gradient, metrics = gradient_of(many, groups)
  expected, expected_metrics = gradient_of(one, groups)
  assert_rounding_apart(gradient, expected, 1e-5)
  for name in ("loss", "entropy", "imbalance", "mismatch_p99"):
    np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-4)


def test_anchors_over_two_updates_of_one_admission():
  groups = make_groups(groups=4)
  ratios = {}
  for anchor in ("policy", "admission", "sampler"):
    learner = make_learner(anchor=anchor)
    batches = [learner.admit(part) for part in (groups[:2], groups[2:])]
    ratios[anchor] = [learner.step(b)["ratio_max"] for b in batches]
  assert ratios["policy"] == [1, 1]
  # The second part's anchor is from before the first part's update.
  assert ratios["admission"][0] == 1
  assert 1 < ratios["admission"][1] < 1.5
  # The sampler of the rig has nothing to do with the policy.
  assert ratios["sampler"][0] > 1.5


def test_kl_is_free_only_where_policy_equals_reference():
  learner = make_learner(**WITH_KL)
  groups = with_own_logprobs(learner, make_groups())
  batch = learner.admit(groups)
  plain = make_learner(objective=PLAIN).admit(groups)
  np.testing.assert_array_equal(batch.advantages, plain.advantages)
  metrics = learner.step(batch)
  assert metrics["reference_k1"] == metrics["reference_k3"] == 0
  # Sampled by the new policy, while the reference is still the old one.
  again = learner.admit(with_own_logprobs(learner, groups))
  mask = batch.loss_mask
  k1 = np.bincount(
    batch.trajectories[mask],
    (again.sampler_logprobs - batch.sampler_logprobs)[mask],
  )
  assert np.abs(k1).max() > 1e-3
  rewards = (batch.rewards - 0.5 * k1).reshape(-1, 4)
  expected = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
  np.testing.assert_allclose(
    again.advantages[mask], expected[batch.trajectories[mask]], atol=1e-4
  )
  with pytest.raises(ValueError, match="kept only if kl_coef"):
    make_learner(objective=PLAIN).reference_logprobs(batch)


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path):
  learner = make_learner(**WITH_KL)
  learner.start(seed=3)
  learner.step(learner.admit(make_groups(0)))
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    assert learner.save(checkpoints, {"seen": ["a"]})
    checkpoints.wait()
    groups = make_groups(1)
    metrics = learner.step(learner.admit(groups))
    expected = jax.device_get(learner.state)
    learner.state = learner._reference = None
    assert learner.restore(checkpoints, seed=3) == {"seen": ["a"]}
  assert learner.updates == 1
  assert learner.step(learner.admit(groups)) == metrics
  assert_same_bits(jax.device_get(learner.state), expected)


def test_starts_from_a_checkpoint_of_mid_training(tmp_path):
  model = LanguageModel(MODEL)
  # Another optimizer's state, which isn't taken.
  state = make_state(model, optax.sgd(1.0), make_params(model, seed=7))
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    checkpoints.save(30, state, None, {})
  learner = make_learner()
  learner.start(init_from=tmp_path)
  assert learner.updates == 0
  assert_same_bits(
    learner.weights(), {"params": state.params, "balance": state.balance}
  )


def test_balance_moves_only_if_asked():
  for learner, rate in ((make_learner(), 0), (make_learner(**WITH_KL), 0.25)):
    learner.step(learner.admit(make_groups()))
    bias = np.abs(jax.tree.leaves(learner.state.balance)[0])
    assert bias.max() == rate


def test_a_lost_state_is_neither_saved_nor_published(tmp_path):
  learner = make_learner()
  batch = learner.admit(make_groups())
  batch.advantages[batch.loss_mask] = np.nan
  with pytest.raises(NonFiniteLossError, match="restore the last checkpoint"):
    learner.step(batch)
  with pytest.raises(ValueError, match="start or restore"):
    learner.weights()
  with (
    Checkpoints(tmp_path, keep=1, every=1) as checkpoints,
    pytest.raises(ValueError, match="start or restore"),
  ):
    learner.save(checkpoints, {})


def test_configs_that_cant_be_are_refused():
  with pytest.raises(ValueError, match=r"budget=0\.0"):
    make_learner(budget=0.0)
  with pytest.raises(ValueError, match="rows=0"):
    BatchShape(0, 4)
