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
from composer_jax.shipping import Chain, Publisher, open_store
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


def by_weights(chain, ticket, number):
  """A rollout that depends on the weights it was sampled with, bit by bit."""
  digest = chain.versions[ticket.version].digest
  seed = (*ticket.seed, number, int(digest[:12], 16))
  rng = np.random.default_rng(seed)
  return rollout(rng, ticket.tasks[number], ticket.version)


@contextlib.contextmanager
def workers(folder, stop_after=10**9, roll=None):
  """Delivers what is ordered; ends the learner after so many groups."""
  over = threading.Event()
  roll = roll or (
    lambda rng, ticket, n: rollout(rng, ticket.tasks[n], ticket.version)
  )

  def work():
    spool, rng, groups = Spool(folder / "spool"), np.random.default_rng(0), 0
    while not over.wait(0.01):
      while claim := spool.claim():
        with claim:
          for number in claim.missing:
            claim.save(number, roll(rng, claim.ticket, number))
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
  # A host that was started again, and one that was down at first.
  counts = {
    "host-0": [(100, 50, 0), (200, 80, 30), (10, 5, 0)],
    "host-1": [None, (20, 10, 0), (30, 10, 10)],
  }
  cpu_s = [
    {"learner": 1, "host-0": 5},
    {"learner": 6, "host-0": 2},
    {"learner": 9, "host-0": 3, "worker-0": 4},
  ]
  names = ("sampled_tokens", "prompt_tokens", "cached_tokens")
  sights = [
    {
      "time": time.time(),
      "cpu_s": cpu_s[i],
      "hosts": {
        host: dict(zip(names, seen[i], strict=True), version=1)
        if seen[i]
        else {}
        for host, seen in counts.items()
      },
    }
    for i in range(3)
  ]
  (run / "fleet.jsonl").write_text("\n".join(map(json.dumps, sights)) + "\n")
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
  # 250 + 15 tokens of the one's lives, 30 of the other; 24 trajectories of 12
  # trained on; and training is three times the work.
  ratio = summary["training_flops"] / summary["inference_flops"]
  assert ratio == pytest.approx(3 * 24 * 12 / (250 + 15 + 30))
  assert (summary["training_cpu_s"], summary["inference_cpu_s"]) == (9, 12)
  page = (run / "report.html").read_text()
  assert page.count("<img") == len(report._PLOTS)
  assert "<script" not in page


def test_in_step_and_alone_gradient_for_gradient(config, tmp_path):
  """The loop at staleness 0 is what a loop without any of its parts does."""
  run, alone = tmp_path / "run", tmp_path / "alone"
  config = dataclasses.replace(
    config, buffer=dataclasses.replace(config.buffer, staleness=0)
  )
  tickets = {}

  def roll(rng, ticket, number):
    del rng
    tickets[ticket.name] = ticket
    chain = Chain(open_store(str(run / "chain")))
    return by_weights(chain, ticket, number)

  with workers(run, roll=roll):
    assert loop.learn(config, run)
  steps = read(run / "steps.jsonl")
  metrics = [x for x in read(run / "metrics.jsonl") if "loss" in x]

  learner = loop._make_learner(config)
  learner.start("", config.seed)
  with Publisher(open_store(str(alone)), loop._PUBLISHER) as publisher:
    version = publisher.publish(learner.weights(), {}).result()
    for step, told in zip(steps, metrics, strict=True):
      groups = []
      for number in step["groups"]:
        ticket = tickets[f"group-{number:08d}"]
        assert ticket.version == version
        members = [
          by_weights(publisher.chain, ticket, i).trajectories[0]
          for i in range(len(ticket.tasks))
        ]
        groups.append(Group(ticket.tasks[0], tuple(members)))
      taken = learner.step(learner.admit(groups))
      assert taken["grad_norm"] == told["grad_norm"] > 0
      assert taken["loss"] == told["loss"]
      version = publisher.publish(learner.weights(), {}).result()
    chain = Chain(open_store(str(run / "chain")))
    assert len(chain.versions) == config.num_steps + 1
    digests = [
      [c.versions[v].digest for v in sorted(c.versions)]
      for c in (chain, publisher.chain)
    ]
  assert digests[0] == digests[1]
  assert len(set(digests[0])) == len(digests[0])


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ({"hosts": 0}, "hosts must be at least 1"),
    ({"num_steps": 0}, "num_steps must be at least 1"),
    ({"tool_latency_s": -1.0}, "tool_latency_s must be at least 0"),
  ],
)
def test_a_config_that_cannot_work_says_why(config, wrong, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **wrong)
  budget = dataclasses.replace(config.budget, tokens=1000)
  with pytest.raises(ValueError, match=r"budget.tokens=1000 is more than"):
    dataclasses.replace(config, budget=budget)
