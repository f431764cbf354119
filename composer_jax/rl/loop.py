"""The learner's process: from a config to a trained policy, section by section.

The loop is linear on purpose: copy it and change what you like. Rollout workers
and inference hosts run beside it, in processes of their own; what joins them is
the spool (`composer_jax.rl.spool`) and the chain of weights
(`composer_jax.shipping`). Whichever is killed, the same command goes on.

In `workdir` it leaves:

    chain/             all versions of the weights, as deltas, if the config
                       names no other store
    spool/             orders and rollouts that no checkpoint is done with yet
    checkpoints/       Orbax; the buffer's books are in their meta object
    metrics.jsonl      and TensorBoard's files; see `training.metrics`
    steps.jsonl        what each step was trained on, and how stale that was
    evaluations.jsonl  pass rates of held-out tasks, with transcripts
    learner.json       what it does just now
    result.json        once it is done
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from composer_jax import sharding
from composer_jax.data import Tokenizer
from composer_jax.models import LanguageModel
from composer_jax.rl import tasks as task_lib
from composer_jax.rl.buffer import Batch
from composer_jax.rl.config import RlConfig
from composer_jax.rl.journal import Journal
from composer_jax.rl.learner import Learner, LearnerConfig
from composer_jax.rl.spool import Spool
from composer_jax.rl.supply import Supply
from composer_jax.rl.worker import write_json
from composer_jax.serving.follow import weights_digest
from composer_jax.shipping import (
  Publisher,
  PublisherConfig,
  StoreError,
  open_store,
)
from composer_jax.training.checkpoint import Checkpoints
from composer_jax.training.metrics import MetricWriter, TimeSplit
from composer_jax.training.optimizer import make_optimizer
from composer_jax.training.preemption import StopSignal

_log = logging.getLogger(__name__)
_POLL_S = 0.1
# Until a store that failed is tried again.
_RETRY_S = 2.0
# Transcripts that an evaluation keeps for people to read.
_SAMPLES = 6
_PUBLISHER = PublisherConfig(encoders=1, snapshot_every=32)


def learn(config: RlConfig, workdir: str | os.PathLike) -> bool:
  """Improves a policy by what rollout workers bring.

  Args:
    config: what to do.
    workdir: where to leave it.

  Returns:
    Whether the run is done; False if a signal stopped it.

  Raises:
    ValueError: the config doesn't fit itself, the tasks or the checkpoints.
    NonFiniteLossError: loss, gradient or weights are no longer numbers.
  """
  workdir = Path(workdir).expanduser().absolute()
  workdir.mkdir(parents=True, exist_ok=True)
  store = config.store or str(workdir / "chain")
  learner = _make_learner(config)
  train_tasks, held_out = task_lib.load(config)
  with (
    StopSignal() as stop,
    Checkpoints(
      workdir / "checkpoints", keep=config.keep, every=config.checkpoint_every
    ) as checkpoints,
    Publisher(open_store(store), _PUBLISHER) as publisher,
  ):
    # ---------------------------------------------------------- state, books
    origin = config.init_from, config.seed
    meta = learner.restore(checkpoints, *origin)
    if meta is None:
      learner.start(*origin)
      _log.info("Beginning")
    else:
      _log.info("Resuming at step %d", learner.updates)
    resumed_step = -1 if meta is None else learner.updates
    meta = meta or {"supply": None, "evaluations": []}
    supply = Supply(
      Spool(workdir / "spool"),
      config.buffer,
      list(train_tasks),
      config.seed,
      meta["supply"],
    )
    with (
      MetricWriter(workdir, 0, resumed_step=resumed_step) as writer,
      Journal(workdir / "steps.jsonl", resumed_step=resumed_step) as steps,
      Journal(
        workdir / "evaluations.jsonl", resumed_step=resumed_step
      ) as exams,
    ):
      desk = _Desk(config, learner, supply, publisher, stop, workdir)
      examiner = _Examiner(
        desk, list(held_out), meta["evaluations"], exams, writer
      )

      # ------------------------------------------------------------- the loop
      if not desk.publish():
        return False
      desk.order()  # Training's rollouts go on while the first are examined.
      split = TimeSplit()
      cleared: set[str] = set()  # By the checkpoint that is being written.
      if not examiner.summaries and not examiner.examine():
        return False
      while learner.updates < config.num_steps:
        with split.phase("wait"):
          batch = desk.wait_for(desk.batch, "waiting")
        if batch is None:
          learner.save(checkpoints, examiner.meta())
          break
        desk.tell("training")
        with split.phase("train"):
          groups = list(batch.groups.values())
          admitted = learner.admit(groups)
          metrics = {}
          every = config.compare_every
          if every and learner.updates % every == 0:
            metrics = learner.mismatch_without_replay(admitted)
          metrics |= learner.step(admitted)
        with split.phase("publish"):
          desk.publish()
        supply.buffer.trained(batch)
        desk.order()  # Before anything else: workers are waiting.
        step = learner.updates
        last = step == config.num_steps
        steps.write(step, **_facts(batch, desk.version))
        seconds, shares = split.pop()
        metrics |= _facts_of_rewards(batch) | _facts_of_staleness(batch)
        metrics |= _facts_of_work(groups, learner)
        metrics["reward/pass_rate"] = supply.pop_pass_rate()
        metrics |= {f"time/{name}": share for name, share in shares.items()}
        metrics["seconds"] = seconds
        writer.write(step, metrics)
        _log.info(_line(step, config.num_steps, metrics))
        if last or (config.eval_every and step % config.eval_every == 0):
          with split.phase("evaluate"):
            if not examiner.examine():
              break
        if last or step % config.checkpoint_every == 0:
          with split.phase("checkpoint"):
            checkpoints.wait()  # So the last one is on disk,
            supply.clear(cleared)  # and what it is done with can go.
            learner.save(checkpoints, examiner.meta())
            cleared = supply.done()

      # ------------------------------------------------------------ the result
      if not examiner.finished:
        _log.info(
          "Stopped at step %d; the same command resumes", learner.updates
        )
        return False
      checkpoints.wait()
      write_json(workdir / "result.json", examiner.result())
      desk.tell("done")
  return True


def _make_learner(config: RlConfig) -> Learner:
  model = LanguageModel(
    dataclasses.replace(config.model, attention_kernel="xla")
  )
  trajectories = config.buffer.groups * config.buffer.group_size
  sampled = min(
    config.budget.tokens, config.budget.turns * config.budget.turn_tokens
  )
  return Learner(
    model,
    make_optimizer(config.optimizer, model.param_specs, config.num_steps),
    LearnerConfig(
      objective=config.objective,
      shape=config.shape,
      budget=float(trajectories * sampled),
      anchor=config.anchor,
      balance_rate=config.balance_rate,
      replay=(
        config.replay_rules
        if config.replay and config.model.num_moe_layers
        else None
      ),
    ),
    sharding.make_mesh(config.mesh),
  )


class _Desk:
  """Publishes weights, orders rollouts, and waits for them.

  Attributes:
    published: all versions of the chain up to the present one.
  """

  def __init__(self, config, learner, supply, publisher, stop, workdir):
    self.config, self.learner, self.supply = config, learner, supply
    self.workdir = workdir
    self.published: list[int] = []
    self._publisher, self._stop = publisher, stop

  @property
  def version(self) -> int | None:
    return self.published[-1] if self.published else None

  def publish(self) -> bool:
    """Makes a version of the present weights; False if stopped.

    While the store is out of reach it tries again, and hosts serve what they
    have. A version that was made though nobody said so is made once more.
    """
    about = {
      "step": self.learner.updates,
      "model": dataclasses.asdict(self.config.model),
    }
    while True:
      future = self._publisher.publish(self.learner.weights(), about)
      assert future is not None  # It waits rather than skips.
      try:
        version = future.result()
        break
      except StoreError as error:
        _log.warning("No version could be published, to be retried: %s", error)
      self.tell("publishing")
      time.sleep(_RETRY_S)
      if self._stop.stop_requested(self.learner.updates):
        return False
    versions = sorted(self._publisher.chain.versions)
    self.published = [v for v in versions if v <= version]
    return True

  def order(self) -> None:
    progress = self.learner.updates / self.config.num_steps
    self.supply.order(self.version, progress, time.time())

  def batch(self) -> Batch | None:
    return self.supply.batch(self.published, time.time())

  def wait_for(self, found: Callable[[], Any], doing: str) -> Any:
    """Takes in rollouts until something is there; None if stopped."""
    told = 0.0
    while not self._stop.stop_requested(self.learner.updates):
      self.supply.take()
      if (result := found()) is not None:
        return result
      self.order()
      if time.monotonic() - told > 1.0:
        self.tell(doing)
        told = time.monotonic()
      time.sleep(_POLL_S)
    return None

  def tell(self, doing: str) -> None:
    """Says what goes on, for whoever watches."""
    write_json(
      self.workdir / "learner.json",
      {
        "time": time.time(),
        "doing": doing,
        "step": self.learner.updates,
        "steps": self.config.num_steps,
        "version": self.version,
        "outstanding": self.supply.buffer.outstanding,
        "complete": self.supply.buffer.waiting,
        "counts": dict(self.supply.buffer.counts),
      },
    )


class _Examiner:
  """Evaluates on held-out tasks, and keeps what came out.

  Attributes:
    summaries: of all evaluations of the run.
  """

  def __init__(self, desk, tasks, summaries, journal, writer):
    self.summaries = list(summaries)
    self._desk, self._tasks = desk, tasks
    self._journal, self._writer = journal, writer
    self._tokenizer = Tokenizer.load(desk.config.tokenizer)

  def examine(self) -> bool:
    """Adds a pass rate of the present weights; False if stopped."""
    desk = self._desk
    step = desk.learner.updates
    exam = desk.supply.begin_evaluation(
      self._tasks, step, desk.version, time.time()
    )
    if desk.wait_for(lambda: exam.done or None, "evaluating") is None:
      return False
    desk.supply.end_evaluation()
    summary = exam.summary()
    self.summaries.append(summary)
    samples = [
      {
        "solved": trajectory.rewards["solved"] > 0,
        "text": self._tokenizer.decode(trajectory.token_ids),
      }
      for trajectory in exam.trajectories[:_SAMPLES]
    ]
    self._journal.write(**summary, wall_time=time.time(), samples=samples)
    self._writer.write(step, {"evaluation/pass_rate": summary["pass_rate"]})
    _log.info(
      "step %d | version %d solves %.1f %% of %d held-out tasks",
      step,
      summary["version"],
      100 * summary["pass_rate"],
      summary["tasks"],
    )
    return True

  @property
  def finished(self) -> bool:
    """Whether the weights after the last step were examined."""
    last = self.summaries[-1]["step"] if self.summaries else -1
    return last == self._desk.config.num_steps

  def meta(self) -> dict[str, Any]:
    """What a checkpoint must hold beside the learner's state."""
    return {
      "supply": self._desk.supply.state(),
      "evaluations": self.summaries,
    }

  def result(self) -> dict[str, Any]:
    """Of the whole run."""
    desk = self._desk
    buffer, weights = desk.supply.buffer, desk.learner.weights()
    return {
      "step": desk.learner.updates,
      "version": desk.version,
      "weights_digest": weights_digest(weights),
      "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
      "evaluations": self.summaries,
      "counts": dict(buffer.counts),
      "unfinished": desk.config.buffer.group_size * buffer.outstanding,
      "masked_tokens": buffer.masked_tokens,
      "store": desk.config.store,
    }


def _facts(batch: Batch, version: int) -> dict[str, Any]:
  """What the journal of steps keeps."""
  return {
    "version": version,
    "wall_time": time.time(),
    "groups": sorted(batch.groups),
    "lags": {str(lag): count for lag, count in batch.lags.items()},
  }


def _facts_of_rewards(batch: Batch) -> dict[str, float]:
  trajectories = [
    t for group in batch.groups.values() for t in group.trajectories
  ]
  count = len(trajectories)
  return {
    "reward/mean": sum(t.reward for t in trajectories) / count,
    "reward/solved": sum(t.rewards["solved"] > 0 for t in trajectories) / count,
  }


def _facts_of_work(groups, learner) -> dict[str, float]:
  trajectories = [t for group in groups for t in group.trajectories]
  return {
    "work/tokens": float(sum(map(len, trajectories))),
    "work/flops": learner.flops(trajectories),
  }


def _facts_of_staleness(batch: Batch) -> dict[str, float]:
  tokens = sum(batch.lags.values())
  total = sum(lag * count for lag, count in batch.lags.items())
  return {
    "staleness/mean": total / tokens,
    "staleness/max": float(max(batch.lags)),
  }


def _line(step: int, steps: int, metrics: dict[str, float]) -> str:
  times = ", ".join(
    f"{name.removeprefix('time/')} {100 * share:.0f}%"
    for name, share in metrics.items()
    if name.startswith("time/")
  )
  parts = (
    f"step {step}/{steps}",
    f"solved {100 * metrics['reward/pass_rate']:.0f}%",
    f"entropy {metrics['entropy']:.3f}",
    f"mismatch {metrics['mismatch_mean']:.1e}",
    f"grad {metrics['grad_norm']:.2g}",
    f"stale {metrics['staleness/mean']:.2f}",
    f"{metrics['seconds']:.1f} s: {times}",
  )
  return " | ".join(parts)
