import contextlib
import dataclasses
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.training import checkpoint
from composer_jax.training.checkpoint import (
  CheckpointError,
  Checkpoints,
  restore_parts,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  step: jax.Array
  params: dict
  balance: dict
  opt_state: tuple
  key: jax.Array


def make_state(width: int = 4) -> State:
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**16, (8, width), np.uint16)
  params = {
    # Every pattern of bits, NaNs and subnormals among them.
    "embedding": jnp.asarray(bits.view(jnp.bfloat16)),
    "layers": {"w": jnp.asarray(rng.normal(size=(8, 2, width)), jnp.float32)},
  }
  # Its state has masked places, and named and plain tuples.
  optimizer = optax.chain(optax.clip(1.0), optax.contrib.muon(1e-3))
  return State(
    step=jnp.int32(3),
    params=params,
    balance={},
    opt_state=optimizer.init(params),
    key=jax.random.key(7),
  )


def make_data() -> grain.DatasetIterator:
  dataset = grain.MapDataset.range(100).shuffle(seed=1).repeat()
  return iter(dataset.to_iter_dataset().batch(4))


def abstract(state, sharding=None):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
    ),
    state,
  )


def raw_bits(tree) -> list[bytes]:
  """Each array's bytes: NaNs of the same bits are equal, -0 and 0 are not."""

  def data(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(leaf)
    return leaf

  return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def test_round_trip_is_bitwise_and_data_goes_on_at_the_next_batch(tmp_path):
  state, data = make_state(), make_data()
  for _ in range(3):
    next(data)
  with Checkpoints(tmp_path, keep=2, every=10) as checkpoints:
    assert checkpoints.restore(abstract(state), make_data()) is None
    assert checkpoints.save(10, state, data, {"tokens": 12})
  expected = next(data)

  resumed = make_data()
  with Checkpoints(tmp_path, keep=2, every=10) as checkpoints:
    step, restored, meta = checkpoints.restore(abstract(state), resumed)
  assert (step, meta) == (10, {"tokens": 12})
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert raw_bits(restored) == raw_bits(state)
  assert abstract(restored) == abstract(state)
  np.testing.assert_array_equal(next(resumed), expected)


def test_restores_into_other_shardings(tmp_path):
  mesh = jax.make_mesh((8,), ("data",))
  sharded = jax.NamedSharding(mesh, jax.P("data"))
  replicated = jax.NamedSharding(mesh, jax.P())
  params = jax.device_put(make_state().params, sharded)
  state = {"params": params, "step": jax.device_put(jnp.int32(1), replicated)}
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    checkpoints.save(1, state, make_data(), {})
    checkpoints.wait()
    wanted = {
      "params": abstract(params, replicated),
      "step": abstract(state["step"]),
    }
    _, restored, _ = checkpoints.restore(wanted, make_data())
  assert raw_bits(restored) == raw_bits(state)
  assert all(x.is_fully_replicated for x in jax.tree.leaves(restored))

  parts = restore_parts(tmp_path, {"params": abstract(params, sharded)})
  assert parts.keys() == {"params"}
  weights = parts["params"]
  assert raw_bits(weights) == raw_bits(params)
  assert all(x.sharding == sharded for x in jax.tree.leaves(weights))


def test_which_steps_are_saved_and_which_stay(tmp_path):
  state = {"x": jnp.zeros(3)}
  with Checkpoints(tmp_path, keep=2, every=2) as checkpoints:
    saved = [
      step
      for step in range(1, 8)
      if checkpoints.save(step, state, make_data(), {})
    ]
    assert saved == [2, 4, 6]
    assert not checkpoints.save(6, state, make_data(), {}, force=True)
    assert checkpoints.save(7, state, make_data(), {}, force=True)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]


def test_buffers_may_be_donated_right_after_a_save(tmp_path):
  values = np.arange(1 << 20, dtype=np.float32)
  overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    state = {"x": jnp.array(values)}
    wanted = abstract(state)
    checkpoints.save(1, state, make_data(), {})
    jax.block_until_ready(overwrite(state["x"]))
    checkpoints.wait()
    _, restored, _ = checkpoints.restore(wanted, make_data())
  np.testing.assert_array_equal(restored["x"], values)


def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(tmp_path):
  state = make_state()
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    checkpoints.save(1, state, make_data(), {})
    checkpoints.wait()
    wider = make_state(width=6)
    wider.params["bias"] = jnp.zeros(3)
    with pytest.raises(CheckpointError) as error:
      checkpoints.restore(abstract(wider), make_data())
    message = str(error.value)
    assert ": params.bias is absent there and float32[3] here; " in message
    assert (
      "params.embedding is bfloat16[8, 4] there and bfloat16[8, 6]" in message
    )
    assert "and 3 more; start afresh with another --workdir" in message
    assert "\n" not in message

    narrower = dataclasses.replace(state, params={"bias": jnp.zeros(3)})
    with pytest.raises(CheckpointError) as error:
      checkpoints.restore(abstract(narrower), make_data())
    message = str(error.value)
    assert "params.bias is absent there and float32[3] here" in message
    assert "params.embedding is bfloat16[8, 4] there and absent" in message

  with pytest.raises(CheckpointError, match=r"params\.embedding is bfloat16"):
    restore_parts(tmp_path, {"params": abstract(wider.params)})
  with pytest.raises(CheckpointError, match=r"no checkpoint in .*/nowhere"):
    restore_parts(tmp_path / "nowhere", {"params": abstract(state.params)})


def test_another_number_of_processes_is_refused(tmp_path):
  state = {"x": jnp.zeros(3)}
  with Checkpoints(tmp_path, keep=1, every=1) as checkpoints:
    checkpoints.save(1, state, make_data(), {})
    checkpoints.wait()
    position = tmp_path / "1" / "data" / "process_0-of-1.json"
    for index in (0, 1):
      copy = position.with_name(f"process_{index}-of-2.json")
      copy.write_text(position.read_text())
    position.unlink()
    with pytest.raises(CheckpointError, match="by 2 processes, not 1: resume"):
      checkpoints.restore(abstract(state), make_data())


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
  """Of a state with an array that is too large to lie inside an index."""
  folder = tmp_path_factory.mktemp("two_checkpoints")
  with Checkpoints(folder, keep=2, every=1) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, large_state(), make_data(), {"tokens": step})
  return folder


def large_state() -> dict:
  noise = jax.random.bits(jax.random.key(0), (1 << 16,))
  return {"params": noise, "step": jnp.int32(1)}


def remove(path):
  shutil.rmtree(path) if path.is_dir() else path.unlink()


def halve(path):
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])


def empty(path):
  if path.is_dir():
    shutil.rmtree(path)
    path.mkdir()
  else:
    path.write_bytes(b"")


def halve_largest(path):
  files = [file for file in path.rglob("*") if file.is_file()]
  halve(max(files, key=lambda file: file.stat().st_size))


# Orbax leaves event loops unfinished where a read or a write fails.
_UNFINISHED_LOOPS = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)


@_UNFINISHED_LOOPS
@pytest.mark.parametrize(
  ("damage", "name", "reason"),
  [
    (empty, "", "state/_METADATA is missing"),
    (remove, "state", "state/_METADATA is missing"),
    (halve, "state/_METADATA", "Unterminated string"),
    (empty, "state/_METADATA", "Expecting value"),
    (remove, "state/manifest.ocdbt", "state/manifest.ocdbt is missing"),
    (empty, "state/manifest.ocdbt", "DATA_LOSS: .* less than minimum length"),
    (empty, "state/d", "NOT_FOUND: "),
    (halve_largest, "state", "OUT_OF_RANGE: .* range .* is not valid"),
    (remove, "data", "data is missing"),
    (empty, "data", "data has 0 of 1 positions"),
    (halve, "data/process_0-of-1.json", "Unterminated string"),
    (remove, "meta", "meta/metadata is missing"),
    (empty, "meta/metadata", "Expecting value"),
  ],
)
def test_a_damaged_checkpoint_is_named_and_may_be_removed(
  damage, name, reason, two_checkpoints, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(two_checkpoints, folder)
  damage(folder / "2" / name)
  sentence = (
    rf"the checkpoint {folder}/2 is damaged \({reason}.*\): remove that folder"
    " to go on from the one before"
  )
  wanted = abstract(large_state())
  with Checkpoints(folder, keep=2, every=1) as checkpoints:
    with pytest.raises(CheckpointError) as error:
      checkpoints.restore(wanted, make_data())
    assert re.fullmatch(sentence, str(error.value))
    assert "tensorstore_spec" not in str(error.value)
  if not name.startswith(("data", "meta")):
    with pytest.raises(CheckpointError) as error:
      restore_parts(folder, {"params": wanted["params"]})
    assert re.fullmatch(sentence, str(error.value))

  remove(folder / "2")
  with Checkpoints(folder, keep=2, every=1) as checkpoints:
    assert checkpoints.restore(wanted, make_data())[0] == 1


def test_an_error_in_our_own_code_is_not_called_damage(
  two_checkpoints, monkeypatch
):
  def fail(*_, **__):
    raise ValueError("a bug")

  monkeypatch.setattr(checkpoint, "_check", fail)
  with pytest.raises(ValueError, match=r"^a bug$"):
    restore_parts(two_checkpoints, {})


@pytest.fixture
def small_files_only():
  """Stands for a full disk: no file may grow past 64 KiB."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@_UNFINISHED_LOOPS
@pytest.mark.parametrize("wait", ["wait", "close", "save"])
def test_a_failed_write_is_told_in_one_sentence(
  wait, tmp_path, small_files_only
):
  state, data = large_state(), make_data()
  checkpoints = Checkpoints(tmp_path, keep=2, every=1)
  checkpoints.save(1, state, data, {})
  with pytest.raises(CheckpointError) as error:
    if wait == "save":
      checkpoints.save(2, state, data, {})
      checkpoints.save(3, state, data, {})
    else:
      getattr(checkpoints, wait)()
  assert re.fullmatch(
    rf"a checkpoint in {tmp_path} could not be saved \(.*: File too large\)",
    str(error.value),
  )
  assert error.value.__cause__
  with contextlib.suppress(CheckpointError):
    checkpoints.close()


@_UNFINISHED_LOOPS
def test_a_folder_that_cannot_be_made_ends_a_save_at_once(tmp_path):
  folder = tmp_path / "run"
  with Checkpoints(folder, keep=2, every=1) as checkpoints:
    folder.rmdir()
    folder.touch()
    with pytest.raises(CheckpointError, match=rf"in {folder} could not be sav"):
      checkpoints.save(1, large_state(), make_data(), {})


def test_a_folder_lost_while_it_is_cleared_up_does_not_fail_the_close(
  tmp_path, monkeypatch
):
  def clear_up(self):
    raise NotADirectoryError(20, "Not a directory", str(tmp_path))

  checkpoints = Checkpoints(tmp_path, keep=2, every=1)
  monkeypatch.setattr(
    "orbax.checkpoint.CheckpointManager._maybe_await_cleanup_tmp_directory",
    clear_up,
  )
  checkpoints.close()


def test_a_save_cut_short_by_kill_leaves_the_previous_checkpoint(tmp_path):
  program = f"""
    import os, signal
    import grain, jax, jax.numpy as jnp
    from composer_jax.training.checkpoint import Checkpoints
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    checkpoints = Checkpoints({str(tmp_path)!r}, keep=1, every=1)
    checkpoints.save(1, {{"x": jnp.arange(5)}}, data, {{}})
    checkpoints.wait()
    large = jax.random.bits(jax.random.key(0), (1 << 25,))
    checkpoints.save(2, {{"x": large}}, data, {{}})
    os.kill(os.getpid(), signal.SIGKILL)
  """
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == -signal.SIGKILL, result.stderr
  remains = {path.name for path in tmp_path.iterdir()} - {"1"}
  assert remains, "the second save was over before the kill"

  state = {"x": jnp.arange(5)}
  with Checkpoints(tmp_path, keep=2, every=1) as checkpoints:
    step, restored, _ = checkpoints.restore(abstract(state), make_data())
    assert step == 1
    np.testing.assert_array_equal(restored["x"], state["x"])
    assert checkpoints.save(2, state, make_data(), {})
    checkpoints.wait()
    assert checkpoints.restore(abstract(state), make_data())[0] == 2
  assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
