"""What does router replay do to the mismatch of sampler and learner?

  python -m benchmarks.router_replay [--quick] [--json] [--checkpoint=FOLDER]

The `tiny` model. An engine samples, in float32, in bfloat16, or in bfloat16
with weights rounded to float8 (E4M3); a float32 learner then looks at the same
tokens, with the same weights or some updates later. Replay: none, all routes,
or those that the learner finds plausible (`min_ratio`). A row says

  flipped       routers of the learner that would have chosen otherwise
  replaced      replayed experts that were too implausible
  mean, p99     of |log learner - log engine| a token, in nats
  kl            of the two (k3), in nats a token
  masked        tokens that IcePop masks at 0.5 to 5
  clipped       tokens that PPO clips with the engine as its old policy

In float32, with the same weights, all of it must be next to nothing: that is
the check. Without a checkpoint weights are random, and nearly all experts
nearly tie: give one of mid-training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.learner import Learner, LearnerConfig
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from composer_jax.serving import (
  Engine,
  EngineConfig,
  Request,
  SamplingParams,
  serving_weights,
)
from composer_jax.sharding import MeshConfig, make_mesh
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer

LEARNING_RATE = 3e-5
GROUP = 8
# The engine, and updates that the learner is ahead.
CASES = (("float32", 0), ("bfloat16", 0), ("float8", 0), ("bfloat16", 4))
REPLAYS = {
  "none": None,
  "all": ReplayConfig(),
  "0.5": ReplayConfig(min_ratio=0.5),
  "0.9": ReplayConfig(min_ratio=0.9),
}


def make_learner(
  replay: ReplayConfig | None, tokens: int, learning_rate: float
) -> Learner:
  """A float32 learner without weights; at rate 0 a step only looks."""
  model = LanguageModel(PRESETS["tiny"]())
  optimizer = make_optimizer(
    OptimizerConfig(
      learning_rate=learning_rate, schedule="constant", warmup_steps=0
    ),
    model.param_specs,
    100,
  )
  config = LearnerConfig(
    objective=ObjectiveConfig(correction="icepop", normalise="tokens"),
    shape=BatchShape(rows=8, seq_len=tokens),
    replay=replay,
  )
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  return Learner(model, optimizer, config, mesh)


def sample(
  learner: Learner, numbers: str, rollouts: int, tokens: int
) -> list[Group]:
  """Rollouts of an engine with the learner's weights; rewards by chance."""
  dtype = "float32" if numbers == "float32" else "bfloat16"
  config = dataclasses.replace(learner.model.config, dtype=dtype)
  model, state = LanguageModel(config), learner.state
  weights = serving_weights(model, state.params, state.balance)
  if numbers == "float8":
    weights["params"] = jax.tree.map(
      # What the compute copy keeps in float32 stays: norms and routers.
      lambda x: x if x.dtype == np.float32 else _as_float8(x),
      weights["params"],
    )
  engine = Engine(
    model,
    weights,
    EngineConfig(max_rows=16, max_len=tokens, contexts=(tokens,)),
    version=0,
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, config.vocab_size, rollouts, np.int32)
  requests = [
    Request([int(prompt)], SamplingParams(max_tokens=tokens - 1, seed=seed))
    for seed, prompt in enumerate(prompts)
  ]
  trajectories = [
    to_trajectory(prompt, completion, float(rng.integers(0, 2)))
    for prompt, completion in zip(
      prompts, engine.generate(requests), strict=True
    )
  ]
  return [
    Group("t", tuple(trajectories[first : first + GROUP]))
    for first in range(0, rollouts, GROUP)
  ]


def _as_float8(x):
  """Rounded to E4M3, whose largest number is 448, with a scale a tensor."""
  wide = x.astype(jnp.float32)
  scale = jnp.abs(wide).max() / 448
  rounded = (wide / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)
  return (rounded * scale).astype(x.dtype)


def to_trajectory(prompt, completion, reward: float) -> Trajectory:
  """A prompt of one token, and what the engine said and did."""
  no_pass = np.zeros_like(completion.routes[:1])
  return Trajectory(
    token_ids=np.append(prompt, completion.token_ids).astype(np.int32),
    loss_mask=np.append(False, np.full(len(completion.token_ids), True)),
    logprobs=np.append(0, completion.logprobs).astype(np.float32),
    versions=np.append(-1, completion.versions).astype(np.int32),
    routes=np.concatenate([completion.routes, no_pass]),
    sampling=Sampling(),
    rewards={"chance": reward},
    task_id="t",
    stop_reason="length",
  )


def look(learner: Learner, groups: list[Group]) -> dict[str, float]:
  """The columns of a row; the learner's rate must be 0."""
  batch = learner.admit(groups)
  metrics = learner.step(batch)
  old = batch._replace(proximal_logprobs=batch.sampler_logprobs)
  return {
    "flipped": metrics.get("replay_flipped"),
    "replaced": metrics.get("replay_replaced"),
    "mean": metrics["mismatch_mean"],
    "p99": metrics["mismatch_p99"],
    "kl": metrics["mismatch_k3"],
    "masked": metrics["corrected"],
    "clipped": learner.step(old)["clipped"],
  }


def add_flags(parser):
  """This benchmark's own flag."""
  parser.add_argument(
    "--checkpoint", default="", help="of a mid-training run of `tiny`"
  )


def main() -> None:
  """Prints the table."""
  args = harness.arguments(__doc__.splitlines()[0], add_flags)
  rollouts, tokens = (16, 32) if args.quick else (64, 128)
  rows = []
  learners = {
    name: make_learner(replay, tokens, 0.0) for name, replay in REPLAYS.items()
  }
  trainee = make_learner(None, tokens, LEARNING_RATE)
  for numbers, updates in CASES:
    trainee.start(init_from=args.checkpoint)
    groups = sample(trainee, numbers, rollouts, tokens)
    for _ in range(updates):
      trainee.step(trainee.admit(groups))
    for name, learner in learners.items():
      # A copy, since a step takes the state's arrays.
      learner.state = jax.tree.map(jnp.copy, trainee.state)
      row = {"engine": numbers, "updates": updates, "replay": name}
      rows.append(row | look(learner, groups))
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
