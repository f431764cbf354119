"""A mid-training run, in numbers. `configs/*.py` fill it in."""

import dataclasses

from composer_jax.data.config import DataConfig
from composer_jax.models import ModelConfig
from composer_jax.sharding import MeshConfig
from composer_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """What `loop.train` does.

  Attributes:
    model: its shape.
    data: what it learns from; also sets the sequence length.
    optimizer: how it learns.
    mesh: how it is spread over devices.
    batch_size: sequences a step, over all devices and micro-batches.
    num_steps: updates of the whole run.
    accumulate: micro-batches a step; their gradients are added up.
    z_loss: weight of the routers' z-loss (Zoph et al. 2022, arXiv:2202.08906).
    balance_rate: step of the routers' selection bias; see `moe.balance`.
    seed: of the initial weights and of the order of the data.
    init_from: a checkpoint folder of another run to take the weights from.
    eval_batches: batches of `batch_size` sequences an evaluation; 0 is all of
      the validation rows.
    log_every: steps between log lines.
    eval_every: steps between evaluations; the last step is always evaluated.
    checkpoint_every: steps between checkpoints; the last step always has one.
    keep: how many checkpoints stay.
    data_folder: where prepared data is cached; `<workdir>/data` if empty.
  """

  model: ModelConfig
  data: DataConfig
  optimizer: OptimizerConfig
  mesh: MeshConfig
  batch_size: int
  num_steps: int
  accumulate: int = 1
  z_loss: float = 1e-4
  balance_rate: float = 1e-3
  seed: int = 0
  init_from: str = ""
  log_every: int = 10
  eval_every: int = 500
  eval_batches: int = 0
  checkpoint_every: int = 500
  keep: int = 2
  data_folder: str = ""

  def __post_init__(self):
    for name, least in {
      "batch_size": 1,
      "num_steps": 1,
      "accumulate": 1,
      "z_loss": 0,
      "balance_rate": 0,
      "seed": 0,
      "log_every": 1,
      "eval_every": 1,
      "eval_batches": 0,
      "checkpoint_every": 1,
      "keep": 1,
    }.items():
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} must be at least {least}, got {getattr(self, name)}."
        )
    if self.batch_size % self.accumulate:
      raise ValueError(
        f"batch_size={self.batch_size} must be a multiple of"
        f" accumulate={self.accumulate}."
      )
