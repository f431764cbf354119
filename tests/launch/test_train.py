"""`launch/train.py` as it is run: processes, signals, crashes, mistakes."""

import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from composer_jax.data import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 60
# `runlocal`, smaller still; a line a step.
OVERRIDES = {
  "model.width": 32,
  "model.num_layers": 2,
  "model.dense_dim": 48,
  "model.attention.num_heads": 2,
  "model.attention.num_kv_heads": 1,
  "model.attention.head_dim": 16,
  "model.moe.expert_dim": 16,
  "optimizer.name": "adamw",
  "optimizer.learning_rate": 1e-3,
  "data.seq_len": 32,
  "data.max_bytes": 200_000,
  "num_steps": NUM_STEPS,
  "log_every": 1,
  "eval_every": 25,
  "eval_batches": 1,
  "checkpoint_every": 1000,
}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """Compiled programs, for runs that are started several times.

  The undisturbed run compiles its own, and so is compared with another
  compilation.
  """
  return {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }


def start(workdir, data_folder, *arguments, env=None, **overrides):
  """Starts a run; its output goes to a file beside the workdir."""
  overrides = OVERRIDES | {"data_folder": data_folder} | overrides
  environment = os.environ | (env or {})
  # One device a process, as on a machine of its own.
  environment.pop("JAX_NUM_CPU_DEVICES", None)
  with Path(f"{workdir}.log").open("ab") as log:
    return subprocess.Popen(
      [
        sys.executable,
        "launch/train.py",
        "--config=configs/midtrain_tiny.py:runlocal",
        f"--workdir={workdir}",
        *arguments,
        *(f"--config.{key}={value}" for key, value in overrides.items()),
      ],
      cwd=REPOSITORY,
      env=environment,
      stdout=log,
      stderr=log,
    )


def finish(process, timeout=120):
  """Waits; kills what would outlive the test."""
  try:
    return process.wait(timeout)
  finally:
    with contextlib.suppress(ProcessLookupError):
      process.kill()
    process.wait()


def run(workdir, *args, **kwargs):
  return finish(start(workdir, *args, **kwargs))


def log_of(workdir):
  return Path(f"{workdir}.log").read_text()


def metrics_of(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def wait_for_step(process, workdir, step):
  """Until the run's log has a line of a step."""
  path = workdir / "metrics.jsonl"
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline:
    assert process.poll() is None, log_of(workdir)
    text = path.read_text() if path.exists() else ""
    if any(f'{{"step": {step},' in line for line in text.splitlines()):
      return
    time.sleep(0.002)
  raise AssertionError(log_of(workdir))


def steps_in(workdir):
  return sorted(
    int(path.name)
    for path in (workdir / "checkpoints").iterdir()
    if path.name.isdigit()
  )


def state_of(workdir, step):
  """Each array of a checkpoint, by name."""
  path = workdir / "checkpoints" / str(step) / "state"
  handler = ocp.PyTreeCheckpointHandler()
  tree = handler.metadata(path).tree
  restored = handler.restore(
    path,
    args=ocp.args.PyTreeRestore(
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
      )
    ),
  )
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored)
  }


def assert_same_end(workdir, reference):
  """Weights, optimizer, bias, data position and log are equal to the bit."""
  state, wanted = (state_of(x, NUM_STEPS) for x in (workdir, reference))
  assert state.keys() == wanted.keys()
  for part in (".params", ".opt_state", ".balance", ".step"):
    assert any(part.strip(".") in name for name in state), part
  for name, array in wanted.items():
    assert array.dtype == state[name].dtype
    assert array.tobytes() == state[name].tobytes(), name
  positions = [
    (x / f"checkpoints/{NUM_STEPS}/data/process_0-of-1.json").read_text()
    for x in (workdir, reference)
  ]
  assert positions[0] == positions[1]

  def facts(folder):
    """What doesn't depend on the clock."""
    return [
      {
        name: value
        for name, value in line.items()
        if not re.search("time|second|mfu", name)
      }
      for line in metrics_of(folder)
    ]

  lines = facts(workdir)
  assert lines == facts(reference)
  assert [line["step"] for line in lines] == [*range(NUM_STEPS + 1)]
  evaluated = [
    line["step"] for line in lines if "validation/bits_per_byte" in line
  ]
  assert evaluated == [0, 25, 50, NUM_STEPS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, data_folder):
  """A run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("reference") / "run"
  assert run(workdir, data_folder) == 0, log_of(workdir)
  return workdir


def test_numbers_of_the_reference_are_finite(reference):
  lines = metrics_of(reference)
  assert all(math.isfinite(value) for line in lines for value in line.values())


def test_a_run_stopped_by_sigterm_goes_on_bit_for_bit(
  reference, data_folder, cache, tmp_path
):
  workdir = tmp_path / "run"
  process = start(workdir, data_folder, env=cache)
  wait_for_step(process, workdir, 5)
  process.send_signal(signal.SIGTERM)
  assert finish(process) == 0, log_of(workdir)
  (stopped,) = steps_in(workdir)
  assert 5 <= stopped < NUM_STEPS
  assert f"Stopped at step {stopped}; the same command" in log_of(workdir)

  assert run(workdir, data_folder, env=cache) == 0, log_of(workdir)
  assert f"Resuming at step {stopped}\n" in log_of(workdir)
  assert_same_end(workdir, reference)


def test_a_killed_run_goes_on_bit_for_bit(
  reference, data_folder, cache, tmp_path
):
  workdir, options = tmp_path / "run", {"env": cache, "checkpoint_every": 7}
  # Before the first checkpoint, then between two, or while one is written.
  for last_step in (random.randint(0, 6), random.randint(20, 45)):
    process = start(workdir, data_folder, **options)
    wait_for_step(process, workdir, last_step)
    time.sleep(random.uniform(0, 0.02))
    process.kill()
    assert finish(process) == -signal.SIGKILL, log_of(workdir)
  assert run(workdir, data_folder, **options) == 0, log_of(workdir)
  resumed = re.findall(r"Resuming at step (\d+)\n", log_of(workdir))
  assert 1 <= len(resumed) <= 2
  assert int(resumed[-1]) % 7 == 0
  assert_same_end(workdir, reference)


def test_two_processes_learn_what_one_does(reference, data_folder, tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  processes = [
    start(
      tmp_path / "run",
      data_folder,
      f"--coordinator=127.0.0.1:{port}",
      "--num_processes=2",
      f"--process_id={index}",
      **{"mesh.fsdp": 2},
    )
    for index in range(2)
  ]
  codes = [finish(process) for process in processes]
  assert codes == [0, 0], log_of(tmp_path / "run")
  assert "'fsdp': 2," in log_of(tmp_path / "run")

  def losses(workdir):
    return {x["step"]: x["loss"] for x in metrics_of(workdir) if "loss" in x}

  two, one = losses(tmp_path / "run"), losses(reference)
  assert list(two) == list(one) == list(range(1, NUM_STEPS + 1))
  for step in range(1, 21):
    np.testing.assert_allclose(two[step], one[step], atol=1e-5, rtol=0)
  # They have learned something by then.
  assert one[20] < one[1] - 0.01


def test_weights_that_are_no_numbers_are_never_saved(data_folder, tmp_path):
  workdir = tmp_path / "run"
  code = run(
    workdir,
    data_folder,
    **{"optimizer.learning_rate": 1e15, "checkpoint_every": 1},
  )
  assert code == 2, log_of(workdir)
  log = log_of(workdir)
  assert "Traceback" not in log
  (line,) = re.findall("error: .*", log)
  assert log.endswith(line + "\n")
  step = re.match(
    r"error: Step (\d+) gave loss \S+, gradient norm \S+ and parameter norm"
    r" \S+; its batch came from \S+\.py.* Nothing of it was saved: "
    r"lower optimizer\.learning_rate, or look at those files,",
    line,
  )
  assert step, line
  for saved in steps_in(workdir):
    assert saved < int(step[1])
    for name, array in state_of(workdir, saved).items():
      assert np.isfinite(array).all(), name


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"optimizer.lerning_rate": 1},
      "config has no key 'optimizer.lerning_rate'; did you mean"
      " 'optimizer.learning_rate'?",
    ),
    (
      {"model.vocab_size": 128, "data.tokenizer": "{tokenizer}"},
      "The tokenizer has 261 tokens, but model.vocab_size=128: raise it to at"
      " least that many.",
    ),
  ],
)
def test_a_mistake_is_one_line(changes, message, tmp_path):
  tokenizer = tmp_path / "tokenizer.json"
  Tokenizer.train([], 261).save(tokenizer)
  changes = {
    key: str(value).format(tokenizer=tokenizer)
    for key, value in changes.items()
  }
  code = run(tmp_path / "run", tmp_path / "data", **changes)
  log = log_of(tmp_path / "run")
  assert code == 2, log
  assert log.splitlines()[-1] == f"error: {message}"
  assert "Traceback" not in log


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--num_processes=2"], "go with --coordinator=HOST:PORT"),
    (["--coordinator=localhost:1"], "needs --num_processes and --process_id"),
    (["--coordinator=auto"], "found no cluster manager"),
    (["--config.init_from=/nowhere"], "error: no checkpoint in /nowhere"),
  ],
)
def test_what_cannot_start_says_so_and_no_more(
  arguments, message, data_folder, tmp_path
):
  workdir = tmp_path / "run"
  assert run(workdir, data_folder, *arguments) == 2
  assert message in log_of(workdir)
  assert "Traceback" not in log_of(workdir)


def test_configs_leave_the_devices_alone():
  """Else no process of several could join the others afterwards."""
  program = """
from pathlib import Path
from jax._src import xla_bridge
from launch.flags import load_config
for path in Path("configs").glob("[!_]*.py"):
  load_config(str(path))
  assert not xla_bridge.backends_are_initialized(), path
"""
  subprocess.run(
    [sys.executable, "-c", program],
    cwd=REPOSITORY,
    env=os.environ | {"PYTHONPATH": "."},
    check=True,
    timeout=120,
  )
