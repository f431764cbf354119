"""Routers against hand-computed choices; balancing; errors in their configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import MoeConfig, RouterConfig
from composer_jax.models.moe import balance, imbalance, route


def test_softmax_router_by_hand():
  # exp(logits) = 1, 2, 4, 1: the best two are experts 2 and 1.
  logits = jnp.log(jnp.asarray([[1.0, 2.0, 4.0, 1.0]]))
  ids, gates = route(logits, None, RouterConfig("softmax", top_k=2))
  np.testing.assert_array_equal(ids, [[2, 1]])
  np.testing.assert_allclose(gates, [[4 / 6, 2 / 6]], rtol=1e-6)


def test_bias_picks_but_does_not_weigh():
  scores = np.asarray([[0.9, 0.8, 0.3, 0.2]])
  logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
  router = RouterConfig("sigmoid", top_k=2, scale=2.5, selection_bias=True)
  bias = jnp.asarray([0.0, 0.0, 0.7, 0.0])
  ids, gates = route(logits, bias, router)
  np.testing.assert_array_equal(ids, [[2, 0]])
  np.testing.assert_allclose(
    gates, [[2.5 * 0.3 / 1.2, 2.5 * 0.9 / 1.2]], rtol=1e-5
  )


def test_groups_are_ranked_by_their_two_best():
  # Group 0 has the best single expert; groups 1 and 2 the best pairs.
  scores = np.asarray([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1, 0.7, 0.6, 0.1]])
  logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
  router = RouterConfig("sigmoid", top_k=3, num_groups=3, top_groups=2)
  ids, _ = route(logits, None, router)
  assert set(np.asarray(ids)[0]) == {6, 3, 4}


def test_ties_go_to_the_lower_index():
  ids, gates = route(jnp.zeros((1, 5)), None, RouterConfig("softmax", top_k=3))
  np.testing.assert_array_equal(ids, [[0, 1, 2]])
  np.testing.assert_allclose(gates, 1 / 3, rtol=1e-6)


def test_gates_are_finite_where_all_scores_vanish():
  router = RouterConfig("sigmoid", top_k=2)
  _, gates = route(jnp.full((1, 4), -200.0), None, router)
  assert np.isfinite(gates).all()


def test_selection_carries_no_gradient_and_gates_do():
  router = RouterConfig("sigmoid", top_k=2, selection_bias=True)
  logits = jax.random.normal(jax.random.key(0), (3, 6))

  def first_gate(logits, bias):
    return route(logits, bias, router)[1][:, 0].sum()

  d_logits, d_bias = jax.grad(first_gate, argnums=(0, 1))(
    logits, 0.1 * jnp.arange(6.0)
  )
  assert not np.asarray(d_bias).any()
  # Only the picked experts' logits matter.
  assert ((np.asarray(d_logits) != 0).sum(axis=-1) == 2).all()


def test_balance_moves_each_expert_by_a_fixed_step_towards_the_mean():
  load = jnp.asarray([[10, 2, 6, 6], [0, 0, 0, 4]])
  new = balance(jnp.zeros((2, 4)), load, 0.1)
  np.testing.assert_allclose(
    new, [[-0.1, 0.1, 0, 0], [0.1, 0.1, 0.1, -0.1]], atol=1e-7
  )
  np.testing.assert_allclose(imbalance(load), [10 / 6, 4.0], rtol=1e-6)


def test_balancing_evens_out_a_skewed_router():
  key = jax.random.key(0)
  logits = jax.random.normal(key, (512, 8)) + jnp.linspace(0, 3, 8)[None]
  router = RouterConfig("sigmoid", top_k=2, selection_bias=True)
  bias = jnp.zeros((1, 8))

  def load_of(bias):
    ids, _ = route(logits, bias[0], router)
    return jax.nn.one_hot(ids, 8, dtype=jnp.int32).sum((0, 1))[None]

  before = imbalance(load_of(bias))[0]
  bias = jax.lax.fori_loop(
    0, 400, lambda _, bias: balance(bias, load_of(bias), 0.002), bias
  )
  assert before > 2
  assert imbalance(load_of(bias))[0] < 1.15


@pytest.mark.parametrize(
  ("router", "words"),
  [
    (RouterConfig("softmax", top_k=9), "top_k=9"),
    (RouterConfig("softmax", top_k=1, num_groups=3), "num_groups=3"),
    (RouterConfig("softmax", 5, num_groups=4, top_groups=2), "top_groups=2"),
  ],
)
def test_impossible_routers_are_refused(router, words):
  with pytest.raises(ValueError, match=words):
    MoeConfig(num_experts=8, expert_dim=4, router=router)
