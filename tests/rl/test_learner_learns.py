"""A tiny model learns a tiny task from rewards, to a threshold."""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.rl.batch import BatchShape
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from tests.rl.learner_rig import make_learner

PROMPTS, GROUP, REPLY = (0, 1, 2, 3), 16, 6
STEPS = 30


def reward_of(prompt: int, reply: list[int]) -> float:
  """The share of tokens that the prompt asks for: 5 to 8."""
  return sum(token == prompt + 5 for token in reply) / len(reply)


def make_sampler(model):
  """Whole sequences, token by token, as an engine without a cache would."""

  @jax.jit
  def sample(weights, prompts, key):
    def forward(tokens):
      out = model.apply(weights["params"], weights["balance"], tokens)
      return jax.nn.log_softmax(out.logits), out.routing.expert_ids

    def draw(place, tokens):
      logprobs, _ = forward(tokens)
      noise = jax.random.fold_in(key, place)
      drawn = jax.random.categorical(noise, logprobs[:, place])
      return tokens.at[:, place + 1].set(drawn.astype(jnp.int32))

    tokens = jnp.zeros((len(prompts), REPLY + 1), jnp.int32)
    tokens = tokens.at[:, 0].set(prompts)
    tokens = jax.lax.fori_loop(0, REPLY, draw, tokens)
    logprobs, routes = forward(tokens)
    chosen = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=2)
    return tokens, chosen[..., 0], routes.transpose(1, 2, 0, 3)

  return sample


def to_trajectory(tokens, logprobs, routes, version) -> Trajectory:
  sampled = np.arange(len(tokens)) > 0
  prompt, *reply = tokens.tolist()
  return Trajectory(
    token_ids=tokens,
    loss_mask=sampled,
    logprobs=np.concatenate([[0], logprobs]).astype(np.float32),
    versions=np.where(sampled, version, -1).astype(np.int32),
    routes=routes.astype(np.uint8),
    sampling=Sampling(),
    rewards={"wanted": reward_of(prompt, reply)},
    task_id=str(prompt),
    stop_reason="finish",
  )


def test_learns_to_answer_each_prompt():
  learner = make_learner(
    learning_rate=2e-2,
    objective=ObjectiveConfig(),
    shape=BatchShape(16, 4 * REPLY),
    budget=float(len(PROMPTS) * GROUP * REPLY),
    replay=ReplayConfig(min_ratio=0.5),
  )
  sample = make_sampler(learner.model)
  prompts = np.repeat(PROMPTS, GROUP)
  rewards = []
  for step in range(STEPS):
    key = jax.random.key(step)
    answers = jax.device_get(sample(learner.weights(), prompts, key))
    members = [
      to_trajectory(*answer, version=step)
      for answer in zip(*answers, strict=True)
    ]
    rewards.append(np.mean([t.reward for t in members]))
    groups = [
      Group(str(prompt), tuple(members[i * GROUP : (i + 1) * GROUP]))
      for i, prompt in enumerate(PROMPTS)
    ]
    metrics = learner.step(learner.admit(groups))
    # The sampler is the learner: nothing to correct, nothing flips.
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["corrected"] == metrics["replay_flipped"] == 0
  assert rewards[0] < 0.15
  assert np.mean(rewards[-5:]) > 0.9
