"""A run of reinforcement learning, in numbers. `configs/rl_*.py` fill it in."""

import dataclasses
from typing import Literal

from composer_jax.envs.harness import Budget
from composer_jax.envs.rewards import RewardConfig
from composer_jax.models import ModelConfig
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.buffer import BufferConfig
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.sharding import MeshConfig
from composer_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """What `launch/train.py` does with learner, hosts and rollout workers.

  Attributes:
    model: its shape.
    optimizer: how it learns.
    mesh: how the learner is spread over devices.
    objective: what it minimises.
    buffer: what a batch is made of, and how stale it may be.
    shape: of the learner's micro-batches.
    rewards: what is rewarded; "solved" must be a part, which counts as passed.
    budget: of a rollout; its tokens are what hosts and learner hold.
    init_from: a checkpoint folder of mid-training to begin with.
    tokenizer: that run's tokenizer.json.
    num_steps: updates of the whole run.
    tasks: "drills", or a file by `launch/tasks.py`.
    train_tasks: how many, at most.
    eval_tasks: held out, at most.
    dialect: how the policy is spoken to: "hermes" is the product's, "drill" is
      for models that know `composer_jax.rl.drills`.
    store: of the weights' versions, as `shipping.open_store` takes it; empty:
      <workdir>/chain.
    temperature: of sampling, in training and evaluation.
    hosts: inference processes on this machine.
    workers: processes that run rollouts.
    max_rollouts: of a worker at a time, each with a sandbox.
    rollout_s: for one attempt at a rollout.
    eval_every: steps between evaluations; 0: before the first and after the
      last step only.
    checkpoint_every: steps between checkpoints.
    keep: how many checkpoints stay.
    balance_rate: step of the routers' selection bias; see `TrainConfig`.
    anchor: whose log-probabilities ratios are against; see `LearnerConfig`.
    replay: whether the learner takes the experts that the hosts took.
    replay_rules: how, if it does.
    compare_every: steps between looks at how far learner and hosts would be
      apart without the replay, a forward pass each; 0: none.
    tool_latency_s: that each call of a tool takes longer than it would, for
      experiments on slow tools.
    learner_cores: processors that the learner may use, by number; none: all.
    rollout_cores: the same for hosts and workers with their sandboxes.
    seed: of sampling and of the choice of tasks.
  """

  model: ModelConfig
  optimizer: OptimizerConfig
  mesh: MeshConfig
  objective: ObjectiveConfig
  buffer: BufferConfig
  shape: BatchShape
  rewards: RewardConfig
  budget: Budget
  init_from: str
  tokenizer: str
  num_steps: int
  tasks: str = "drills"
  train_tasks: int = 400
  eval_tasks: int = 100
  dialect: Literal["hermes", "drill"] = "hermes"
  store: str = ""
  temperature: float = 1.0
  hosts: int = 2
  workers: int = 1
  max_rollouts: int = 16
  rollout_s: float = 120.0
  eval_every: int = 0
  checkpoint_every: int = 1
  keep: int = 2
  balance_rate: float = 0.0
  anchor: Literal["policy", "admission", "sampler"] = "policy"
  replay: bool = True
  replay_rules: ReplayConfig = dataclasses.field(
    default_factory=lambda: ReplayConfig(missing="router")
  )
  compare_every: int = 0
  tool_latency_s: float = 0.0
  learner_cores: tuple[int, ...] = ()
  rollout_cores: tuple[int, ...] = ()
  seed: int = 0

  def __post_init__(self):
    for name, least in {
      "num_steps": 1,
      "train_tasks": 1,
      "eval_tasks": 1,
      "hosts": 1,
      "workers": 1,
      "max_rollouts": 1,
      "eval_every": 0,
      "checkpoint_every": 1,
      "keep": 1,
      "balance_rate": 0,
      "compare_every": 0,
      "tool_latency_s": 0,
      "seed": 0,
    }.items():
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} must be at least {least}, got {getattr(self, name)}."
        )
    if not self.temperature > 0:
      raise ValueError(
        f"temperature={self.temperature} must be above 0: the likeliest token"
        " alone leaves nothing to learn from."
      )
    if "solved" not in self.rewards.weights:
      raise ValueError(
        "rewards.weights needs 'solved' (with weight 0, if it is not to count):"
        " it is what the pass rate is read from."
      )
    if self.budget.tokens > self.shape.seq_len + 1:
      raise ValueError(
        f"budget.tokens={self.budget.tokens} is more than the learner's rows"
        f" hold: raise shape.seq_len={self.shape.seq_len}, or let rollouts say"
        " less."
      )
