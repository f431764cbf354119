import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from composer_jax.training.preemption import StopSignal


def test_a_signal_stops_at_the_next_question_and_handlers_come_back(capfd):
  before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
  with StopSignal() as stop:
    assert not stop.stop_requested(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.stop_requested(2)
    assert stop.stop_requested(3)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert "SIGTERM: stopping after this step" in capfd.readouterr().err
  after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
  assert after == before


def test_the_first_ctrl_c_is_gentle_the_second_is_not():
  with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.stop_requested(1)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_caught():
  before = signal.getsignal(signal.SIGTERM)
  answers = []

  def work():
    with StopSignal() as stop:
      answers.append(stop.stop_requested(1))
      answers.append(signal.getsignal(signal.SIGTERM) is before)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert answers == [False, True]


# Saves at the agreed step, then reads it back: each process has half of `x`,
# and its own position in the data.
TWO_PROCESSES = """
  import sys, time
  import grain, jax, jax.numpy as jnp
  import numpy as np
  from composer_jax.training.checkpoint import Checkpoints
  from composer_jax.training.preemption import StopSignal

  address, index, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
  jax.distributed.initialize(address, num_processes=2, process_id=index)
  mesh = jax.make_mesh((2,), ("data",))
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  values = np.arange(8, dtype=np.float32)
  x = jax.make_array_from_callback((8,), sharding, lambda i: values[i])
  add_one = jax.jit(lambda x: x + 1)
  make_data = lambda: iter(
    grain.MapDataset.range(10_000)[index::2].to_iter_dataset()
  )
  data = make_data()
  with StopSignal() as stop, Checkpoints(folder, keep=1, every=10**6) as saved:
    for step in range(1, 3000):
      x = add_one(x).block_until_ready()
      next(data)
      if stop.stop_requested(step):
        break
      saved.save(step, {"x": x}, data, {})
      if step == 5:
        print("running", flush=True)
      time.sleep(0.01)
    saved.save(step, {"x": x}, data, {"step": step}, force=True)
    saved.wait()
    resumed = make_data()
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    found, state, meta = saved.restore({"x": shape}, resumed)
    assert meta == {"step": step}
    for shard in state["x"].addressable_shards:
      np.testing.assert_array_equal(shard.data, values[shard.index] + step)
    assert next(resumed) == next(data) == 2 * step + index
    print("stopped at", found, flush=True)
"""


def test_two_processes_stop_at_the_same_step_and_save_together(tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  errors = [tmp_path / f"errors{index}" for index in (0, 1)]
  with contextlib.ExitStack() as stack:
    processes = []
    for index in (0, 1):
      process = subprocess.Popen(
        [
          *(sys.executable, "-c", textwrap.dedent(TWO_PROCESSES)),
          *(address, str(index), str(tmp_path / "checkpoints")),
        ],
        stdout=subprocess.PIPE,
        stderr=stack.enter_context(errors[index].open("w")),
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
      )
      processes.append(stack.enter_context(process))
      stack.callback(process.kill)
    for process in processes:
      assert "running\n" in iter(process.stdout.readline, "")
    # Only one of them is told.
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.stdout.read() for process in processes]
    codes = [process.wait(timeout=100) for process in processes]
  assert codes == [0, 0], [path.read_text() for path in errors]
  first, second = (output.splitlines()[-1] for output in outputs)
  assert first == second
  assert 5 < int(first.removeprefix("stopped at ")) < 2999
