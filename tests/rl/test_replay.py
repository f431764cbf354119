"""Replayed routes: by hand, in a near-tie, through the learner, and damaged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models import LanguageModel, MoeConfig, Replay, RouterConfig
from composer_jax.models.moe import Moe, route
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig, routes_of
from composer_jax.rl.trajectory import Group
from tests.rl.learner_rig import (
  CAPTURE,
  MODEL,
  make_groups,
  make_learner,
  make_trajectory,
)
from tests.training.helpers import assert_rounding_apart

PLAIN = ObjectiveConfig(correction="none")


def logits_of(scores):
  """What a sigmoid router must compute to give these scores."""
  scores = np.asarray([scores], np.float64)
  return jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)


# ------------------------------------------------------------------- the maths


def test_gates_of_replayed_experts_by_hand():
  router = RouterConfig("sigmoid", top_k=2, scale=2.0)
  logits = logits_of([0.9, 0.8, 0.3, 0.2])
  ids, gates = route(logits, None, router, jnp.asarray([[3, 0]]))
  np.testing.assert_array_equal(ids, [[3, 0]])
  expected = [[2 * 0.2 / 1.1, 2 * 0.9 / 1.1]]
  np.testing.assert_allclose(gates, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("replayed", "min_ratio", "expected"),
  [
    ([3, 0, 4], 0.0, [3, 0, 4]),
    # The weakest own choice is expert 2's 0.6: 0.3 is half of it.
    ([3, 0, 4], 0.49, [3, 0, 4]),
    ([3, 0, 4], 0.51, [3, 0, 1]),
    ([3, 4, 2], 0.9, [0, 1, 2]),
    ([2, 1, 0], 1.0, [2, 1, 0]),
    ([-1, -1, -1], 0.0, [0, 1, 2]),
    ([-1, -1, -1], 0.9, [0, 1, 2]),
  ],
)
def test_implausible_experts_are_replaced_by_the_best_free_one(
  replayed, min_ratio, expected
):
  router = RouterConfig("sigmoid", top_k=3)
  logits = logits_of([0.9, 0.8, 0.6, 0.5, 0.3])
  ids, _ = route(logits, None, router, jnp.asarray([replayed]), min_ratio)
  np.testing.assert_array_equal(ids, [expected])


def test_plausibility_knows_the_selection_bias():
  # Experts 2 and 3 nearly tie in score plus bias, with very unlike scores.
  router = RouterConfig("sigmoid", top_k=1, selection_bias=True)
  logits = logits_of([0.1, 0.1, 0.6, 0.1])
  bias = jnp.asarray([0.0, 0.0, 0.0, 0.49])
  for replayed, expected in ((3, 3), (0, 2)):
    ids, _ = route(logits, bias, router, jnp.asarray([[replayed]]), 0.9)
    np.testing.assert_array_equal(ids, [[expected]])


def test_in_a_near_tie_replay_trains_the_expert_that_sampled():
  # The router is the identity, so that a token's features are its logits.
  # Seven experts are clear; the eighth is 7 for the sampler, whose hidden state
  # differs in the fifth decimal, and 9 for the trainer.
  config = dataclasses.replace(
    MODEL,
    width=16,
    moe=MoeConfig(16, expert_dim=8, router=RouterConfig("sigmoid", top_k=8)),
  )
  layer = Moe(nnx.Rngs(0), config)
  layer.w_router[...] = jnp.eye(16)
  clear = np.array([2.0] * 7 + [0.5, -1, 0.5] + [-1] * 6, np.float32)
  sampler, trainer = clear.copy(), clear.copy()
  sampler[9] -= 1e-5
  trainer[7] -= 1e-5
  valid = jnp.ones((1, 1), bool)
  _, sampled = layer(jnp.asarray(sampler)[None, None], valid)
  assert set(np.asarray(sampled.expert_ids).ravel()) == {*range(8)}

  def gradients(replay):
    structure, state = nnx.split(layer)

    def loss(state):
      x = jnp.asarray(trainer)[None, None]
      out, routing = nnx.merge(structure, state)(x, valid, replay)
      return (out[0, 0] * jnp.arange(16.0)).sum(), routing

    grads, routing = jax.jit(jax.grad(loss, has_aux=True))(state)
    experts = np.abs(grads["w_down"][...]).sum((1, 2))
    router = np.abs(grads["w_router"][...]).sum(0)
    return experts, router, routing

  experts, router, _ = gradients(None)
  assert experts[9] > 0.1 and router[9] > 0.01
  assert experts[7] == 0 and router[7] == 0
  for min_ratio in (0.0, 0.9):
    experts, router, routing = gradients(Replay(sampled.expert_ids, min_ratio))
    assert experts[7] > 0.1 and router[7] > 0.01
    assert experts[9] == 0 and router[9] == 0
    np.testing.assert_array_equal(routing.flipped, [[1]])


# -------------------------------------------------------------- in the learner


def with_model_routes(groups, params, balance, model):
  """The groups, with the routes that the model itself takes, unpacked."""
  forward = jax.jit(
    lambda tokens: model.apply(params, balance, tokens).routing.expert_ids
  )

  def of(trajectory):
    tokens = np.zeros((1, 24), np.int32)
    tokens[0, : len(trajectory)] = trajectory.token_ids
    routes = np.asarray(forward(tokens))[:, 0].transpose(1, 0, 2)
    routes = routes[: len(trajectory)].astype(np.uint8)
    return dataclasses.replace(trajectory, routes=routes)

  return [
    dataclasses.replace(g, trajectories=tuple(map(of, g.trajectories)))
    for g in groups
  ]


def step(groups, **changes):
  """Gradient and metrics of a step."""
  learner = make_learner(optimizer=CAPTURE, objective=PLAIN, **changes)
  metrics = learner.step(learner.admit(groups))
  return jax.device_get(learner.state.opt_state.grads), metrics


def test_the_learners_own_routes_change_nothing_and_others_do():
  learner = make_learner(optimizer=CAPTURE, objective=PLAIN)
  params, balance = learner.state.params, learner.state.balance
  random_routes = make_groups()
  own_routes = with_model_routes(
    random_routes, params, balance, LanguageModel(MODEL)
  )
  expected, _ = step(own_routes)
  # Every token has its own route: it reaches its place in the packed rows.
  gradient, metrics = step(own_routes, replay=ReplayConfig())
  assert_rounding_apart(gradient, expected, 1e-5)
  for name in ("missing", "flipped", "replaced"):
    assert metrics[f"replay_{name}"] == 0
  gradient, metrics = step(random_routes, replay=ReplayConfig())
  assert metrics["replay_flipped"] > 0.5
  assert metrics["replay_replaced"] == 0
  apart = [
    np.abs(a - b).max() / np.abs(b).max()
    for a, b in zip(
      jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True
    )
  ]
  assert max(apart) > 0.1
  # Nothing but the router's own choice is plausible enough.
  gradient, metrics = step(random_routes, replay=ReplayConfig(min_ratio=1.0))
  assert metrics["replay_replaced"] > 0.5
  assert_rounding_apart(gradient, expected, 1e-5)


def test_anchors_are_passes_with_the_same_replay():
  groups = make_groups()

  def old_logprobs(**changes):
    learner = make_learner(anchor="admission", **changes)
    batch = learner.admit(groups)
    return batch.proximal_logprobs[batch.loss_mask]

  own = old_logprobs()
  # Nothing but the router's own choice is plausible enough.
  filtered = old_logprobs(replay=ReplayConfig(min_ratio=1.0))
  np.testing.assert_allclose(filtered, own, atol=1e-5)
  assert np.abs(old_logprobs(replay=ReplayConfig()) - own).max() > 1e-3


def test_tokens_without_a_route_are_counted_and_routed_by_the_learner():
  groups = make_groups(groups=2, size=2)
  without = Group(
    "task 0",
    tuple(dataclasses.replace(t, routes=None) for t in groups[0].trajectories),
  )
  _, metrics = step([without, groups[1]], replay=ReplayConfig(missing="router"))
  lengths = [
    sum(int(t.routed.sum()) for t in group.trajectories) for group in groups
  ]
  assert metrics["replay_missing"] == pytest.approx(lengths[0] / sum(lengths))
  _, metrics = step([without], replay=ReplayConfig(missing="router"))
  assert metrics["replay_missing"] == 1
  assert metrics["replay_flipped"] == 0
  learner = make_learner(
    optimizer=CAPTURE, objective=PLAIN, replay=ReplayConfig()
  )
  with pytest.raises(ValueError, match="recorded no routes"):
    learner.admit([without])


# --------------------------------------------------------------------- damages


def test_routes_are_kept_where_there_was_a_pass():
  trajectory = make_trajectory(np.random.default_rng(0))
  routes = routes_of(trajectory, MODEL, "error")
  np.testing.assert_array_equal(routes[:-1], trajectory.routes[:-1])
  assert (routes[-1] == -1).all()


@pytest.mark.parametrize(
  ("damage", "words"),
  [
    (lambda routes: routes[:, :1], r"needs \[tokens, MoE layers, top_k\]"),
    (lambda routes: routes[:, :, :1], r"needs \[tokens, MoE layers, top_k\]"),
    (lambda routes: routes + np.uint8(8), "name expert 15"),
    (lambda routes: np.zeros_like(routes), "an expert twice at 11 tokens"),
  ],
  ids=["a layer", "an expert", "another model", "zeros"],
)
def test_routes_that_cant_be_are_refused(damage, words):
  trajectory = make_trajectory(np.random.default_rng(0))
  routes = damage(trajectory.routes)
  trajectory = dataclasses.replace(trajectory, routes=routes)
  with pytest.raises(ValueError, match=words):
    routes_of(trajectory, MODEL, "error")


def test_lost_routes_count_as_missing_if_that_is_allowed():
  trajectory = make_trajectory(np.random.default_rng(0))
  routes = trajectory.routes.copy()
  routes[4, 1] = 0
  trajectory = dataclasses.replace(trajectory, routes=routes)
  checked = routes_of(trajectory, MODEL, "router")
  assert (checked[4] == -1).all()
  np.testing.assert_array_equal(checked[[3, 5]], routes[[3, 5]])


def test_configs_of_a_replay_that_cant_be_are_refused():
  with pytest.raises(ValueError, match=r"min_ratio=1\.5"):
    ReplayConfig(min_ratio=1.5)
