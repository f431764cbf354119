"""Consecutive weights of real training, for benchmarks of weight deltas.

The `tiny` model is mid-trained as `configs/midtrain_tiny.py` says, with its
decay; then, from that one state and with a fresh optimizer each time, it goes
on at constant learning rates. A pair is the BF16 cast of all its parameters
(1.9M, one flat array) before and after one update.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
from jaxtyping import PyTree, UInt16

from composer_jax import sharding
from composer_jax.data import load_data, make_loader
from composer_jax.models import LanguageModel
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import make_optimizer, make_schedule
from composer_jax.training.state import abstract_state, init_state
from composer_jax.training.step import Batch, make_train_step
from launch.flags import from_config, load_config

RATES = {"train_1e-06": 1e-6, "train_1e-05": 1e-5, "train_1e-04": 1e-4}
Pairs = list[tuple[UInt16[np.ndarray, " N"], UInt16[np.ndarray, " N"]]]
_CONFIG = Path(__file__).parents[1] / "configs" / "midtrain_tiny.py"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Lengths:
  """How long to train.

  Attributes:
    variant: of the config file.
    start: updates of mid-training.
    updates: at each learning rate.
    every: a pair is kept each so many updates.
  """

  variant: str
  start: int
  updates: int
  every: int


FULL = Lengths("demo", start=300, updates=40, every=4)
QUICK = Lengths("runlocal", start=6, updates=4, every=2)


def train_pairs(folder: Path, optimizer: str, *, quick: bool) -> dict:
  """Trains, or reads what an earlier call with these arguments left.

  Args:
    folder: for the corpus and the pairs, about 120 MB.
    optimizer: "muon" or "adamw", at the constant learning rates.
    quick: a few updates of a smaller model.

  Returns:
    A list of pairs for each name in RATES, as uint16 bits.
  """
  lengths = QUICK if quick else FULL
  saved = folder / f"pairs_{optimizer}_{lengths.variant}.npz"
  if not saved.exists():
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(saved, **_train(folder, optimizer, quick))
  with np.load(saved) as arrays:
    return {name: [(base, new) for base, new in arrays[name]] for name in RATES}


@dataclasses.dataclass(frozen=True)
class Trained:
  """A mid-trained model that can go on at any learning rate.

  Attributes:
    model: its functions.
    step: (rate, state, batch) -> state and metrics.
    fresh: makes a state of what mid-training reached, with a new optimizer.
    loader: batches.
  """

  model: LanguageModel
  step: Callable
  fresh: Callable
  loader: Iterator

  def versions(self, rate: float, count: int) -> Iterator[PyTree]:
    """The float32 parameters after each of `count` updates."""
    state = self.fresh()
    for _ in range(count):
      state, metrics = self.step(rate, state, next(self.loader))
      yield state.params
    _log.info("Learning rate %g: loss %.3f", rate, float(metrics["loss"]))


def mid_train(folder: Path, optimizer: str, *, quick: bool) -> Trained:
  """Trains `tiny` from random weights, on one device.

  Args:
    folder: for the corpus.
    optimizer: "muon" or "adamw", for what comes afterwards.
    quick: a few updates of a smaller model.
  """
  lengths = QUICK if quick else FULL
  config = _load_config(lengths)
  data = load_data(config.data, folder / "data")
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  model = LanguageModel(config.model)
  with jax.set_mesh(mesh):
    step, fresh = _make_step(config, config.optimizer.name, model, data, mesh)
    loader = make_loader(
      data.train, seed=config.seed, batch_size=config.batch_size
    )
    state = fresh(None)
    rate_at = make_schedule(config.optimizer, lengths.start)
    for i in range(lengths.start):
      state, metrics = step(float(rate_at(i)), state, next(loader))
    _log.info("Mid-trained: loss %.3f", float(metrics["loss"]))
    start = {"params": state.params, "balance": state.balance}
    if optimizer != config.optimizer.name:
      step, fresh = _make_step(config, optimizer, model, data, mesh)
  return Trained(model, step, lambda: fresh(start), loader)


def _train(folder, optimizer, quick):
  lengths = QUICK if quick else FULL
  trained = mid_train(folder, optimizer, quick=quick)
  return {
    name: _pairs(trained.versions(rate, lengths.updates), lengths.every)
    for name, rate in RATES.items()
  }


def _pairs(versions, every):
  pairs = []
  base = None
  for i, params in enumerate(versions, 1):
    bits = _bits(params)
    if i % every == 0:
      pairs.append((base, bits))
    base = bits
  return np.array(pairs)


def _load_config(lengths) -> TrainConfig:
  config = load_config(f"{_CONFIG}:{lengths.variant}")
  config.num_steps = lengths.start
  config.model.attention_kernel = "xla"
  return from_config(TrainConfig, config)


def _make_step(config, name, model, data, mesh):
  """An update whose learning rate is an argument, and how states are born."""
  # Updates are proportional to the learning rate, weight decay included.
  unit = make_optimizer(
    dataclasses.replace(
      config.optimizer,
      name=name,
      learning_rate=1.0,
      schedule="constant",
      warmup_steps=0,
    ),
    model.param_specs,
    config.num_steps,
  )
  abstract = abstract_state(model, unit, mesh)

  @jax.jit
  def step(rate, state, local):
    def scaled(grads, opt_state, params):
      updates, opt_state = unit.update(grads, opt_state, params)
      return jax.tree.map(lambda u: rate * u, updates), opt_state

    optimizer = optax.GradientTransformation(unit.init, scaled)
    update = make_train_step(
      model, optimizer, config, data.tokenizer.token_bytes
    )
    return update(state, Batch(*(local[name] for name in Batch._fields)))

  def fresh(given):
    return init_state(model, unit, abstract, config.seed, given)

  def call(rate, state, local):
    return jax.block_until_ready(step(rate, state, dict(local)))

  return call, fresh


def _bits(params):
  flat = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)]
  return np.concatenate(flat).astype(ml_dtypes.bfloat16).view(np.uint16)
