"""The learner's process, with scripted workers in a thread beside it."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from composer_jax import sharding
from composer_jax.data import Tokenizer
from composer_jax.rl import loop, report
from composer_jax.rl.config import RlConfig
from composer_jax.rl.journal import read
from composer_jax.rl.spool import Spool
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from composer_jax.rl.worker import read_json
from composer_jax.sharding import MeshConfig
from composer_jax.shipping import Chain, open_store
from configs import rl_tiny
from launch.flags import from_config


@pytest.fixture
def config(tmp_path, monkeypatch):
  # On one of the test's eight devices: there is less to compile.
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  monkeypatch.setattr(loop.sharding, "make_mesh", lambda _: mesh)
  Tokenizer.train(["def f(x): return x"], 280).save(tmp_path / "tokenizer.json")
  plain = rl_tiny.get_config("runlocal")
  plain.tokenizer = str(tmp_path / "tokenizer.json")
  return from_config(RlConfig, plain)


def rollout(rng, task_id, version):
  """Random tokens; the reward is how many of them are even."""
  ids = rng.integers(0, 280, 12).astype(np.int32)
  sampled = np.arange(12) >= 4
  return Group(
    task_id,
    (
      Trajectory(
        token_ids=ids,
        loss_mask=sampled,
        logprobs=np.where(sampled, -5.6, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        routes=None,
        sampling=Sampling(),
        rewards={"solved": 0.0, "even": float((ids[4:] % 2 == 0).sum())},
        task_id=task_id,
        stop_reason="answer",
      ),
    ),
  )


@contextlib.contextmanager
def workers(folder, stop_after=10**9):
  """Delivers what is ordered; ends the learner after so many groups."""
  over = threading.Event()

  def work():
    spool, rng, groups = Spool(folder / "spool"), np.random.default_rng(0), 0
    while not over.wait(0.01):
      while claim := spool.claim():
        with claim:
          for number in claim.missing:
            task = claim.ticket.tasks[number]
            claim.save(number, rollout(rng, task, claim.ticket.version))
        groups += claim.ticket.purpose == "train"
        if groups == stop_after:
          os.kill(os.getpid(), signal.SIGTERM)

  thread = threading.Thread(target=work)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def test_a_run_that_is_stopped_goes_on_where_it_was(config, tmp_path):
  run = tmp_path / "run"
  config = dataclasses.replace(
    config, buffer=dataclasses.replace(config.buffer, staleness=0)
  )
  with workers(run, stop_after=5):
    assert not loop.learn(config, run)
  assert not (run / "result.json").exists()
  steps_before = read(run / "steps.jsonl")
  assert 0 < len(steps_before) < config.num_steps
  with workers(run):
    assert loop.learn(config, run)

  steps = read(run / "steps.jsonl")
  assert [line["step"] for line in steps] == [1, 2, 3, 4]
  assert steps[: len(steps_before)] == steps_before
  groups = [group for line in steps for group in line["groups"]]
  assert len(groups) == len(set(groups)) == 8
  # Strictly on policy, over the stop, too.
  assert {lag for line in steps for lag in line["lags"]} == {"0"}
  result = json.loads((run / "result.json").read_text())
  counts = result["counts"]
  assert counts["trained"] == 8 * 3
  assert counts.pop("ordered") == sum(counts.values()) + result["unfinished"]
  assert [e["step"] for e in result["evaluations"]] == [0, 4]
  # One version for each step, and for each beginning.
  chain = Chain(open_store(str(run / "chain")))
  assert len(chain.versions) == 4 + 2
  metrics = [x for x in read(run / "metrics.jsonl") if "loss" in x]
  assert [line["step"] for line in metrics] == [1, 2, 3, 4]
  assert all(np.isfinite(line["grad_norm"]) for line in metrics)

  # A run that is done has nothing to do, and can be reported on.
  assert loop.learn(config, run)
  (run / "fleet.jsonl").write_text(
    json.dumps({"time": time.time(), "hosts": {}, "cpu_s": {}}) + "\n"
  )
  digest = json.loads((run / "result.json").read_text())["weights_digest"]
  for other, identical in (("other", False), (digest, True)):
    end = {"digests": {"host-0": digest, "host-1": other}, "restarts": {}}
    (run / "fleet_end.json").write_text(json.dumps(end))
    summary = report.write(run)
    assert summary["hosts_bit_identical"] is identical
  assert report.write(run) == summary == read_json(run / "summary.json")
  assert summary["max_staleness"] == 0
  assert summary["held_out_tasks"] == 4
  assert summary["delta_bytes"] < summary["full_bytes"]
  page = (run / "report.html").read_text()
  assert page.count("<img") == len(report._PLOTS)
  assert "<script" not in page


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ({"hosts": 0}, "hosts must be at least 1"),
    ({"num_steps": 0}, "num_steps must be at least 1"),
  ],
)
def test_a_config_that_cannot_work_says_why(config, wrong, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **wrong)
  budget = dataclasses.replace(config.budget, tokens=1000)
  with pytest.raises(ValueError, match=r"budget.tokens=1000 is more than"):
    dataclasses.replace(config, budget=budget)
