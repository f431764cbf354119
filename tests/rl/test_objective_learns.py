"""The objective, whole, teaches a table of token probabilities a tiny task."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from composer_jax.rl import objective
from composer_jax.rl.objective import ObjectiveConfig, Streams

VOCAB, LENGTH, TASKS, GROUP = 4, 6, 2, 8
BATCH = TASKS * GROUP
WANTED = 2


def logprobs_of(logits, tokens):
  table = jax.nn.log_softmax(logits)  # [LENGTH, VOCAB]
  return table[jnp.arange(LENGTH), tokens]  # [BATCH, LENGTH]


@functools.partial(jax.jit, static_argnames="config")
def train(config, seed=0):
  """Reward: the share of a trajectory's tokens that are the wanted one."""
  # The sampler isn't quite the learner, and samples from weights of its own.
  mismatch = 0.2 * jax.random.normal(jax.random.key(9), (LENGTH, VOCAB))
  mask = jnp.ones((BATCH, LENGTH), bool)
  owners = jnp.broadcast_to(jnp.arange(BATCH)[:, None], mask.shape)
  segments = jnp.ones(mask.shape, jnp.int32)
  divide_by = objective.denominator(mask, segments, BATCH * LENGTH, config)

  def loss(logits, tokens, streams):
    return objective.policy_loss(
      logprobs_of(logits, tokens), streams, divide_by, config
    )

  def step(logits, key):
    tokens = jax.random.categorical(
      key, logits + mismatch, shape=(BATCH, LENGTH)
    )
    sampler = logprobs_of(logits + mismatch, tokens)
    proximal = logprobs_of(logits, tokens)
    rewards = objective.penalise_kl(
      (tokens == WANTED).mean(axis=1),
      proximal,
      jnp.full_like(proximal, -jnp.log(VOCAB)),
      mask,
      owners,
      config.kl_coef,
    )
    advantages = objective.group_advantages(
      rewards.reshape(TASKS, GROUP),
      jnp.ones((TASKS, GROUP), bool),
      config.advantages,
    ).reshape(BATCH, 1)
    streams = Streams(
      mask,
      segments,
      jnp.broadcast_to(advantages, mask.shape),
      sampler,
      proximal,
    )
    for _ in range(2):
      gradient, metrics = jax.grad(loss, has_aux=True)(logits, tokens, streams)
      # Of one length, so that one rate suits every normalisation.
      norm = jnp.sqrt((gradient**2).sum()) + 1e-9
      logits = logits - 0.2 * gradient / norm * jnp.minimum(norm / 1e-6, 1)
    return logits, metrics

  keys = jax.random.split(jax.random.key(seed), 150)
  logits, metrics = jax.lax.scan(step, jnp.zeros((LENGTH, VOCAB)), keys)
  return jax.nn.softmax(logits)[:, WANTED].mean(), metrics


@pytest.mark.parametrize(
  "config",
  [
    ObjectiveConfig(),
    ObjectiveConfig(
      advantages="grpo",
      surrogate="gspo",
      correction="icepop",
      normalise="sequences",
    ),
    ObjectiveConfig(
      surrogate="cispo",
      correction="kpop",
      normalise="tokens",
      clip_high=3.0,
    ),
  ],
  ids=lambda config: config.surrogate,
)
def test_learns(config):
  share, metrics = train(config)
  assert share > 0.9
  # The second update of a batch is away from the proximal policy.
  assert metrics["ratio_max"].max() > 1


@pytest.mark.parametrize("coef", [0.05, 0.2])
def test_kl_in_the_reward_leads_to_its_optimum(coef):
  # E[R] - coef * KL(policy, uniform) is greatest where p is exp(R / coef) over
  # its sum; a token adds 1 / LENGTH to R.
  wanted = math.exp(1 / LENGTH / coef)
  share, _ = train(ObjectiveConfig(kl_coef=coef))
  assert abs(share - wanted / (wanted + VOCAB - 1)) < 0.03
