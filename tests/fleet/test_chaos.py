"""A whole run of reinforcement learning, while its parts are killed.

`CHAOS_KILLS=10 pytest tests/fleet/test_chaos.py` kills each of them twice.
"""

import collections
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import s3_server
from composer_jax.data import Tokenizer
from composer_jax.rl.journal import read

REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("CHAOS_KILLS", "5"))
STEPS = KILLS + 1
# Forwards connections: a store that can be killed and keeps its objects.
FORWARDER = """
import asyncio, sys
host, here, there = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

async def pump(reader, writer):
  while data := await reader.read(1 << 16):
    writer.write(data)
    await writer.drain()
  writer.close()

async def serve(reader, writer):
  ends = await asyncio.open_connection(host, there)
  await asyncio.gather(pump(reader, ends[1]), pump(ends[0], writer))

async def main():
  server = await asyncio.start_server(serve, host, here)
  await server.serve_forever()

asyncio.run(main())
"""


class Store:
  """moto's server behind a forwarder."""

  def __init__(self, address):
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_server((host, 0)) as free:
      self._here = free.getsockname()[1]
    self._argv = [sys.executable, "-c", FORWARDER, host, str(self._here), port]
    self.address = f"http://{host}:{self._here}"
    self._process = None

  def start(self):
    self._process = subprocess.Popen(self._argv, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while True:
      with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", self._here)).close()
        return
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def kill(self):
    self._process.kill()
    self._process.wait()


@pytest.fixture
def store(monkeypatch):
  with s3_server.serve() as address:
    s3_server.make_bucket(address, "chain")
    front = Store(address)
    for name, value in s3_server.environment(front.address).items():
      monkeypatch.setenv(name, value)
    front.start()
    yield front
    front.kill()


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
  """Begins the run, or goes on with it."""
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  environment.pop("JAX_NUM_CPU_DEVICES", None)
  return subprocess.Popen(
    [
      sys.executable,
      "launch/train.py",
      "--config=configs/rl_tiny.py:runlocal",
      f"--config.num_steps={STEPS}",
      f"--config.tokenizer={tokenizer}",
      "--config.store=s3://chain/run",
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


def kill_one(run, process, word):
  while not (found := find(run, word)):  # It is being started again.
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.1)
  (pid,) = found
  os.kill(pid, signal.SIGKILL)


def kill_all(run, process):
  """Kills what started the others, and sees that they end, too."""
  process.kill()
  process.wait()
  process.stderr.close()
  deadline = time.monotonic() + 20
  while find(run, ""):
    assert time.monotonic() < deadline, "orphans"
    time.sleep(0.1)


@pytest.mark.sandbox
@pytest.mark.timeout(300 + 120 * KILLS)
def test_a_run_survives_the_death_of_each_of_its_parts(tmp_path, store):
  tokenizer, run = tmp_path / "tokenizer.json", tmp_path / "run"
  Tokenizer.train(["def f(x): return x"], 280).save(tokenizer)
  process = start(run, tokenizer)
  killed = collections.Counter()
  words = {
    "learner": "--role=learner",
    "host-0": "hosts/0",
    "worker-0": "--role=rollouts",
  }
  parts = itertools.cycle(["learner", "host-0", "worker-0", "store", "all"])
  try:
    for step, part in enumerate(itertools.islice(parts, KILLS), 1):
      wait_for_step(run, process, step)
      killed[part] += 1
      if part == "store":
        store.kill()
        time.sleep(3)
        store.start()
      elif part == "all":
        kill_all(run, process)
        process = start(run, tokenizer)
      else:
        kill_one(run, process, words[part])
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
  # A fleet that is started anew counts from 0.
  sights = read(run / "fleet.jsonl")
  for name in words.keys() & killed:
    assert max(s["restarts"][name] for s in sights) >= 1
