"""A whole run of reinforcement learning, while its parts are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_jax.data import Tokenizer
from composer_jax.rl.journal import read

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 5


def find(run, word):
  """Processes of a run whose command has a word."""
  found = []
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      words = (folder / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
      continue
    if f"{run}" in words and word in words and "bound.py" not in words:
      found.append(int(folder.name))
  return found


def start(run, tokenizer):
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  environment.pop("JAX_NUM_CPU_DEVICES", None)
  return subprocess.Popen(
    [
      sys.executable,
      "launch/train.py",
      "--config=configs/rl_tiny.py:runlocal",
      f"--config.num_steps={STEPS}",
      f"--config.tokenizer={tokenizer}",
      f"--workdir={run}",
    ],
    cwd=REPOSITORY,
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for_step(run, process, step):
  while len(read(run / "steps.jsonl")) < step:
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.1)


@pytest.mark.sandbox
@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_each_of_its_parts(tmp_path):
  tokenizer, run = tmp_path / "tokenizer.json", tmp_path / "run"
  Tokenizer.train(["def f(x): return x"], 280).save(tokenizer)
  process = start(run, tokenizer)
  try:
    for step, word in (
      (1, "--role=learner"),
      (2, "hosts/0"),
      (3, "--role=rollouts"),
    ):
      wait_for_step(run, process, step)
      (pid,) = find(run, word)
      os.kill(pid, signal.SIGKILL)
    # Then all of it, at once and without a word.
    wait_for_step(run, process, 4)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while find(run, ""):
      assert time.monotonic() < deadline, "orphans"
      time.sleep(0.1)
    process.stderr.close()
    process = start(run, tokenizer)
    _, said = process.communicate()
    assert process.returncode == 0, said
  finally:
    process.kill()
    process.wait()
  assert find(run, "") == []

  steps = read(run / "steps.jsonl")
  assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
  groups = [group for line in steps for group in line["groups"]]
  assert len(groups) == len(set(groups)) == 2 * STEPS
  summary = json.loads((run / "summary.json").read_text())
  assert summary["hosts_bit_identical"]
  assert summary["max_staleness"] <= 1
  assert summary["held_out_tasks"] == 4
  discarded = summary["trajectories_discarded"]
  assert summary["trajectories_ordered"] == summary[
    "trajectories_trained"
  ] + sum(discarded.values())
  sights = read(run / "fleet.jsonl")
  killed = {"learner", "host-0", "worker-0"}
  assert all(max(s["restarts"][name] for s in sights) >= 1 for name in killed)
