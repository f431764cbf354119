"""Mid-training from a config to a trained checkpoint, section by section.

The loop is linear on purpose: copy it and change what you like. It runs the
same on one CPU, on one GPU, and as one of many processes, each of which calls
`train` with the same arguments. Running it again with the same `workdir` goes
on where the last checkpoint was taken, bit for bit.

In `workdir` it leaves:

    data/            prepared corpus and tokenizer (or `config.data_folder`)
    checkpoints/     Orbax; see `checkpoint.Checkpoints`
    metrics.jsonl    and TensorBoard's files; see `metrics.MetricWriter`
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from composer_jax import sharding
from composer_jax.data import Data, load_data, make_loader
from composer_jax.models import (
  GqaConfig,
  LanguageModel,
  ModelConfig,
  count_params,
  train_flops_per_token,
)
from composer_jax.training import state as state_lib
from composer_jax.training.checkpoint import (
  CheckpointError,
  Checkpoints,
  read_meta,
  restore_parts,
)
from composer_jax.training.config import TrainConfig
from composer_jax.training.meter import Meter
from composer_jax.training.metrics import (
  MetricWriter,
  TimeSplit,
  bits_per_byte,
  format_line,
  peak_flops,
)
from composer_jax.training.optimizer import make_optimizer, make_schedule
from composer_jax.training.preemption import StopSignal
from composer_jax.training.step import (
  Batch,
  make_eval_step,
  make_train_step,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Result:
  """What a run leaves in memory, for a notebook or a report.

  Attributes:
    model: the model's functions.
    state: after the last step.
    data: what it learned from.
    mesh: where it is.
    history: step and validation bits per byte of each evaluation.
    tokens_per_second: evaluations left out; of the process that trained last.
    finished: False if a signal stopped the run early.
  """

  model: LanguageModel
  state: state_lib.TrainState
  data: Data
  mesh: Mesh
  history: list[tuple[int, float]]
  tokens_per_second: float
  finished: bool


def train(
  config: TrainConfig,
  workdir: str | os.PathLike,
  *,
  profile: tuple[int, int] | None = None,
) -> Result:
  """Trains a model, or goes on training it.

  Args:
    config: what to do.
    workdir: where to leave it.
    profile: first and last step, counted from 1, of a window to trace with
      JAX's profiler into `workdir`.

  Raises:
    ValueError: the config doesn't fit itself, the data or the devices.
    NonFiniteLossError: loss, gradient or weights are no longer numbers.
  """
  workdir = Path(workdir).expanduser().absolute()
  if profile and profile[1] > config.num_steps:
    raise ValueError(
      f"The profiler's window {profile[0]}:{profile[1]} ends after the run's"
      f" last step, {config.num_steps}."
    )

  # ------------------------------------------------------------------- mesh
  mesh = sharding.make_mesh(config.mesh)
  batch_sharding = sharding.batch_sharding(
    mesh, config.batch_size // config.accumulate
  )
  _log.info("Mesh %s on %s", dict(mesh.shape), jax.devices()[0].device_kind)
  # On a CPU it is measured, on one device: not where the mesh is set.
  peak = peak_flops(jax.local_devices()[0]) * jax.device_count()

  # ------------------------------------------------------------------- data
  data = load_data(config.data, config.data_folder or workdir / "data")
  _check_vocabulary(config, data)
  _check_same_data(data)
  # What must not change when a run resumes, or it would go on elsewhere.
  identity = {
    "data": data.key,
    "tokenizer": data.tokenizer.digest,
    "batch_size": config.batch_size,
    "seed": config.seed,
  }
  loader = make_loader(data.train, seed=config.seed, **_part(config.batch_size))

  # ------------------------------------------------- model, optimizer, state
  model = LanguageModel(_with_attention_kernel(config.model))
  optimizer = make_optimizer(
    config.optimizer, model.param_specs, config.num_steps
  )
  schedule = make_schedule(config.optimizer, config.num_steps)
  abstract = state_lib.abstract_state(model, optimizer, mesh)
  size = count_params(config.model)
  _log.info(
    "%.1fM parameters, %.1fM active", size.total / 1e6, size.active / 1e6
  )
  with (
    jax.set_mesh(mesh),
    StopSignal() as stop,
    Checkpoints(
      workdir / "checkpoints", keep=config.keep, every=config.checkpoint_every
    ) as checkpoints,
  ):
    restored = checkpoints.restore(abstract, loader)
    if restored:
      start, state, meta = restored
      _check_identity(checkpoints.folder, meta["identity"], identity)
      _log.info("Resuming at step %d", start)
    else:
      start, meta = 0, {"history": [], "tokens": 0.0}
      state = _fresh_state(model, optimizer, abstract, config, identity)

    history = [tuple(point) for point in meta["history"]]
    if start >= config.num_steps:
      _log.info("Already trained to step %d; nothing to do", start)
      rate = meta["tokens_per_second"]
      return Result(model, state, data, mesh, history, rate, finished=True)

    # ------------------------------------------------------------ compilation
    began = time.perf_counter()
    train_step = (
      jax.jit(
        make_train_step(model, optimizer, config, data.tokenizer.token_bytes),
        donate_argnums=0,
        out_shardings=(
          state_lib.shardings_of(abstract),
          sharding.replicated(mesh),
        ),
      )
      .lower(abstract, _abstract_batch(config, batch_sharding))
      .compile()
    )
    _log.info(
      "Compiled in %.0f s; a step needs %.2f GB a device",
      time.perf_counter() - began,
      _bytes_needed(train_step) / 1e9,
    )
    evaluate = _make_evaluate(config, model, data, batch_sharding)
    _log.info("Training from step %d to %d", start, config.num_steps)

    # ------------------------------------------------------------------- loop
    flops_per_token = train_flops_per_token(config.model, config.data.seq_len)
    meter = Meter()
    finished, tracing = True, False

    with MetricWriter(
      workdir,
      jax.process_index(),
      # A run that left no checkpoint starts its log afresh, too.
      resumed_step=start if restored else -1,
    ) as writer:
      if not history and len(data.validation):
        history.append((start, evaluate(state)))
        writer.write(start, _log_validation(history))
      split = TimeSplit()
      for step in range(start, config.num_steps):
        done = step + 1
        if profile and done == profile[0]:
          jax.profiler.start_trace(workdir)
          tracing = True
        with split.phase("data"):
          local = next(loader)
          batch = _to_devices(local, batch_sharding)
        with split.phase("step"):
          state, metrics = train_step(state, batch)
          # Waits for the step before, so that two are in flight at most.
          meter.push(step, metrics, data.train, local["row"])
        last = done == config.num_steps
        stopping = stop.stop_requested(done) and not last
        if tracing and (last or stopping or done == profile[1]):
          jax.block_until_ready(state)
          jax.profiler.stop_trace()
          tracing = False
        evaluating = last or done % config.eval_every == 0
        evaluating = evaluating and len(data.validation)
        saving = last or stopping or done % config.checkpoint_every == 0
        logging_now = last or stopping or done % config.log_every == 0
        if logging_now or evaluating or saving:
          with split.phase("step"):
            meter.flush()  # only finite weights are evaluated and saved
        values = {}
        if evaluating:
          with split.phase("eval"):
            history.append((done, evaluate(state)))
            values |= _log_validation(history)
        if logging_now:
          values |= meter.pop(split, flops_per_token / peak)
          values["tokens"] = meta["tokens"] + meter.tokens
          values["learning_rate"] = float(schedule(step))
          _log.info(format_line(done, config.num_steps, values))
        if values:
          writer.write(done, values)
        if saving:  # after the log, which a resumed run takes up from here
          with split.phase("checkpoint"):
            facts = {
              "identity": identity,
              "history": history,
              "tokens": meta["tokens"] + meter.tokens,
              "tokens_per_second": meter.tokens_per_second,
            }
            checkpoints.save(done, state, loader, facts, force=True)
        if stopping:
          _log.info("Stopped at step %d; the same command resumes", done)
          finished = False
          break

  return Result(
    model=model,
    state=state,
    data=data,
    mesh=mesh,
    history=history,
    tokens_per_second=meter.tokens_per_second,
    finished=finished,
  )


def _fresh_state(
  model: LanguageModel,
  optimizer: optax.GradientTransformation,
  abstract: state_lib.TrainState,
  config: TrainConfig,
  identity: dict[str, Any],
) -> state_lib.TrainState:
  given = None
  if config.init_from:
    tokenizer = read_meta(config.init_from)["identity"]["tokenizer"]
    if tokenizer != identity["tokenizer"]:
      raise CheckpointError(
        f"the weights in {config.init_from} were trained with another"
        " tokenizer, so that their embeddings mean other text: set"
        " data.tokenizer to the tokenizer.json in that run's data folder"
      )
    # The selection bias too: it decides where tokens go.
    given = restore_parts(
      config.init_from,
      {"params": abstract.params, "balance": abstract.balance},
    )
    _log.info("Weights from %s", config.init_from)
  return state_lib.init_state(model, optimizer, abstract, config.seed, given)


def _check_identity(
  folder: os.PathLike, saved: dict[str, Any], now: dict[str, Any]
) -> None:
  """Refuses to resume a run on other data."""
  changed = [name for name, value in now.items() if saved[name] != value]
  if changed:
    raise CheckpointError(
      f"the run in {folder} can't go on as it began, since these have changed:"
      f" {', '.join(changed)} (the data also change when their sources do);"
      " set them back, or start afresh with another --workdir"
    )


def _check_same_data(data: Data) -> None:
  """Refuses to train on data that differ between processes."""
  mine = np.frombuffer(data.key.encode(), np.uint8)
  if (multihost_utils.process_allgather(mine) != mine).any():
    raise ValueError(
      "The processes of this run have different corpora: give all the same"
      " files, or one shared data_folder and sources that all of them see."
    )


def _with_attention_kernel(config: ModelConfig) -> ModelConfig:
  """Decides what `attention_kernel="auto"` is here."""
  if config.attention_kernel != "auto":
    return config
  cudnn = (
    jax.default_backend() == "gpu"
    and isinstance(config.attention, GqaConfig)
    and config.dtype == "bfloat16"
  )
  kernel = "cudnn" if cudnn else "xla"
  _log.info("Attention by %s", kernel)
  return dataclasses.replace(config, attention_kernel=kernel)


def _make_evaluate(
  config: TrainConfig,
  model: LanguageModel,
  data: Data,
  batch_sharding: jax.sharding.NamedSharding,
) -> Callable[[state_lib.TrainState], float]:
  """Makes a function from state to validation bits per byte."""
  eval_step = jax.jit(
    make_eval_step(model, data.tokenizer.token_bytes),
    out_shardings=sharding.replicated(batch_sharding.mesh),
  )

  parts = config.accumulate

  def evaluate(state: state_lib.TrainState) -> float:
    nats = num_bytes = 0.0
    batches = make_loader(
      data.validation,
      seed=0,
      shuffle=False,
      num_epochs=1,
      # As many rows as fit where a micro-batch does.
      **_part(config.batch_size // parts),
    )
    for index, local in enumerate(batches):
      if config.eval_batches and index == parts * config.eval_batches:
        break
      sums = jax.device_get(
        eval_step(state, _to_devices(local, batch_sharding))
      )
      nats += float(sums.nats)
      num_bytes += float(sums.bytes)
    return bits_per_byte(nats, num_bytes)

  return evaluate


def _part(batch_size: int) -> dict[str, int]:
  """This process's part of a global batch, as arguments of `make_loader`."""
  return {
    "batch_size": batch_size,
    "process_index": jax.process_index(),
    "process_count": jax.process_count(),
  }


def _to_devices(
  local: dict[str, np.ndarray], batch_sharding: jax.sharding.NamedSharding
) -> Batch:
  """A global batch from this process's rows of it."""
  return Batch(
    *(
      jax.make_array_from_process_local_data(batch_sharding, local[name])
      for name in Batch._fields
    )
  )


def _abstract_batch(
  config: TrainConfig, batch_sharding: jax.sharding.NamedSharding
) -> Batch:
  shape = (config.batch_size, config.data.seq_len)
  ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding)
  mask = jax.ShapeDtypeStruct(shape, bool, sharding=batch_sharding)
  return Batch(**dict.fromkeys(Batch._fields, ids) | {"loss_mask": mask})


def _bytes_needed(compiled: jax.stages.Compiled) -> int:
  """A device's memory for arguments, results and everything between."""
  memory = compiled.memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def _check_vocabulary(config: TrainConfig, data: Data) -> None:
  if data.tokenizer.vocab_size > config.model.vocab_size:
    raise ValueError(
      f"The tokenizer has {data.tokenizer.vocab_size} tokens, but"
      f" model.vocab_size={config.model.vocab_size}: raise it to at least that"
      " many."
    )


def _log_validation(history: list[tuple[int, float]]) -> dict[str, float]:
  step, value = history[-1]
  _log.info("step %d | validation %.4f bits/byte", step, value)
  return {"validation/bits_per_byte": value}
