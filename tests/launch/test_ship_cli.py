"""`launch/ship.py` as it is run: every command, mistakes, damage, signals."""

import concurrent.futures
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from obstore.store import MemoryStore

from composer_jax import shipping
from composer_jax.shipping import density, export, publisher
from composer_jax.shipping.contents import ArraySpec
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.object_store import ObjectStore
from launch import ship
from launch.ship_terminal import InterruptedWorkError, Terminal

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = (0, 10, 20, 30)


def first_params():
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.standard_normal(shape, np.float32)

  return {
    "embed": normal(16, 8),
    "layers": {
      str(i): {"experts": {"w": normal(4, 3, 5)}, "router": normal(8, 4)}
      for i in range(3)
    },
    "scale": np.float32(2.0) * np.ones((), np.float32),
  }


def next_params(params, seed):
  """About one element in five moves, too far for bfloat16 to hide it."""
  rng = np.random.default_rng(seed)
  if isinstance(params, dict):
    return {
      name: next_params(p, seed + i)
      for i, (name, p) in enumerate(params.items())
    }
  moves = rng.random(params.shape) < 0.2
  return np.where(moves, params * 1.5, params).astype(params.dtype)


@pytest.fixture(scope="session")
def history():
  params = [first_params()]
  for seed in range(len(STEPS) - 1):
    params.append(next_params(params[-1], 100 * seed))
  return params


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, history):
  """A folder of a `CheckpointManager`: four steps of a training state."""
  folder = tmp_path_factory.mktemp("run")
  save(folder, dict(zip(STEPS, history, strict=True)))
  return folder


def save(folder, steps):
  with ocp.CheckpointManager(folder) as manager:
    for step, params in steps.items():
      state = {"params": params, "opt": np.zeros(3)}
      manager.save(
        step, args=ocp.args.Composite(state=ocp.args.StandardSave(state))
      )


@pytest.fixture
def run(capsys):
  """Calls `main`; returns the exit code, the rows or text, and stderr."""

  def call(command, *args, as_json=True):
    arguments = [command, *map(str, args), *["--json"] * as_json]
    capsys.readouterr()
    try:
      code = ship.main(arguments)
    except SystemExit as end:
      code = end.code
    out, err = capsys.readouterr()
    if as_json:
      out = [json.loads(line) for line in out.splitlines()]
    return code, out, err

  return call


@pytest.fixture
def store(tmp_path):
  return tmp_path / "store"


@pytest.fixture
def published(run, store, checkpoints):
  """A store with all four steps; the versions' numbers."""
  versions = []
  for step in STEPS:
    code, rows, err = run(
      "publish", store, checkpoints / str(step), "--item=params"
    )
    assert (code, err) == (0, "")
    versions.append(rows[0]["version"])
  return versions


def flat(params, dtype=None):
  return {
    path: np.asarray(leaf if dtype is None else leaf.astype(dtype))
    for path, leaf in shipping.contents.flatten(params).items()
  }


def assert_same(got, expected):
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    assert got[path].dtype == array.dtype
    assert got[path].tobytes() == array.tobytes(), path


def held(store, version=None):
  with shipping.Subscriber(shipping.open_store(str(store))) as reader:
    return reader.update(version).tree


def files(folder):
  return {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}


# --- publish -----------------------------------------------------------------


def test_checkpoints_become_versions(run, store, checkpoints, history):
  _, [first], _ = run(
    "publish",
    store,
    checkpoints / "0",
    "--item=params",
    "--metadata=run=a b",
    "--metadata=lr=1e-3",
  )
  assert {"step": 0, "run": "a b", "lr": 0.001}.items() <= first[
    "metadata"
  ].items()
  assert [d["base"] for d in first["deliveries"]] == [None]
  _, [second], _ = run(
    "publish", store, checkpoints / "10/state", "--item=params"
  )
  assert [d["base"] for d in second["deliveries"]] == [first["version"]]
  assert second["metadata"]["step"] == 10
  assert_same(held(store, first["version"]), flat(history[0]))
  assert_same(held(store), flat(history[1]))


def test_floats_are_rounded_and_nothing_else(run, store, tmp_path):
  params = {
    "w": np.float32([1.00390625, -0.0, np.inf, 3e-39]),
    "n": np.arange(3),
  }
  save(tmp_path / "run", {0: params})
  code, _, _ = run(
    "publish", store, tmp_path / "run/0", "--item=params", "--dtype=bfloat16"
  )
  assert code == 0
  # 1 + 2**-8 lies between two bfloat16 numbers: to the even one.
  expected = np.array([0x3F80, 0x8000, 0x7F80, 0x0021], np.uint16)
  got = held(store)
  assert got["w"].dtype == ml_dtypes.bfloat16
  assert got["w"].view(np.uint16).tolist() == expected.tolist()
  assert_same({"n": got["n"]}, {"n": params["n"]})


def test_a_base_saves_the_download_of_the_head(
  run, store, checkpoints, monkeypatch
):
  code, rows, _ = run(
    "publish", store, checkpoints / "10", "--base", checkpoints / "0"
  )
  assert code == 0
  assert [row["metadata"]["step"] for row in rows] == [0, 10]
  assert rows[1]["deliveries"][0]["base"] == rows[0]["version"]
  downloads = []
  acquire = publisher.acquire
  monkeypatch.setattr(
    publisher,
    "acquire",
    lambda *args, **kwargs: downloads.append(1) or acquire(*args, **kwargs),
  )
  _, [third], err = run(
    "publish", store, checkpoints / "20", "--base", checkpoints / "10"
  )
  assert (err, downloads) == ("", [])
  assert third["deliveries"][0]["base"] == rows[1]["version"]
  code, [fourth], err = run(
    "publish", store, checkpoints / "30", "--base", checkpoints / "0"
  )
  assert code == 0 and downloads == [1]
  assert f"is not version {third['version']}, the head" in err
  assert fourth["deliveries"][0]["base"] == third["version"]


def test_a_mistake_fences_nobody_off(run, store, published):
  before = shipping.Chain(shipping.open_store(str(store))).epoch
  assert run("publish", store, "nowhere")[0] == 2
  assert run("publish", store, "nowhere", "--metadata=x")[0] == 2
  assert shipping.Chain(shipping.open_store(str(store))).epoch == before


@pytest.mark.parametrize(
  "number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interrupted_version_leaves_nothing(
  run, store, checkpoints, published, monkeypatch, number, expected
):
  handler = signal.getsignal(number)

  class Interrupting(FolderStore):
    """A signal while the first object is being written."""

    def put_if_absent(self, key, data):
      if key.startswith("data/") and signal.getsignal(number) != handler:
        os.kill(os.getpid(), number)
        while signal.getsignal(number) != handler:  # It is being heard.
          time.sleep(0.01)
      return super().put_if_absent(key, data)

  before = files(store / "data")
  monkeypatch.setattr(shipping, "open_store", Interrupting)
  code, rows, err = run("publish", store, checkpoints / "0", "--item=params")
  assert (code, rows, err) == (expected, [], "interrupted\n")
  assert signal.getsignal(number) == handler
  assert files(store / "data") == before
  monkeypatch.undo()
  code, [row], _ = run("publish", store, checkpoints / "0", "--item=params")
  assert code == 0 and row["deliveries"][0]["base"] == published[-1]


def test_a_signal_that_nobody_raises_is_heard():
  """It is noted, not raised, wherever it comes, and no wait outlasts it."""
  terminal = Terminal(as_json=True)

  class Destroyed:
    def __del__(self):
      os.kill(os.getpid(), signal.SIGTERM)  # A raise would be ignored here.

  with terminal.heeding_signals():
    terminal.check()
    Destroyed()
    for wait in (terminal.check, lambda: terminal.sleep(600)):
      with pytest.raises(InterruptedWorkError, match="SIGTERM"):
        wait()
    assert terminal.interrupted_code == 143


def test_the_second_signal_ends_a_wait_for_what_does_not_end():
  terminal = Terminal(as_json=True)

  def twice():
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.3)

  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with terminal.heeding_signals():
      sender = threading.Thread(target=twice)
      sender.start()
      with pytest.raises(KeyboardInterrupt):
        terminal.result_of(concurrent.futures.Future())
      sender.join()
  finally:
    signal.signal(signal.SIGINT, before)


def test_a_wait_that_misses_a_signal_looks_again(monkeypatch):
  """A signal just before a lock is waited for does not end that wait."""
  terminal, job = Terminal(as_json=True), concurrent.futures.Future()
  looks = iter(range(3))

  def wait(jobs, timeout):
    assert timeout <= 1
    if next(looks) == 2:
      job.set_result("done")

  monkeypatch.setattr(concurrent.futures, "wait", wait)
  assert terminal.result_of(job) == "done"


def start(*args, **kwargs):
  """A process of its own; SIGINT ignored, as scripts start background jobs."""
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
  ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
  return subprocess.Popen(
    [*ignoring, sys.executable, "launch/ship.py", *map(str, args)],
    cwd=REPOSITORY,
    env=environment | {"PYTHONPATH": str(REPOSITORY)},
    stdout=subprocess.PIPE,
    text=True,
    **kwargs,
  )


@contextlib.contextmanager
def ending(process):
  """Kills what would outlive the test."""
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def test_watch_publishes_new_steps_and_follow_gets_them(
  store, tmp_path, history
):
  folder, written = tmp_path / "run", tmp_path / "written"
  save(folder, {0: history[0], 10: history[1]})
  watch = start(
    "publish", store, folder, "--watch", "--item=params", "--interval=0.05",
    "--json", stderr=subprocess.PIPE,
  )  # fmt: skip
  follow = start(
    "follow", store, "--interval=0.05", "--json", "--name=lisbon",
    f"--write={written}", "--keep=1", stderr=subprocess.PIPE,
  )  # fmt: skip
  with ending(watch), ending(follow):
    # It starts with the newest.
    row = json.loads(watch.stdout.readline())
    assert row["metadata"]["step"] == 10
    save(folder, {20: history[2]})
    row = json.loads(watch.stdout.readline())
    assert row["metadata"]["step"] == 20
    while json.loads(follow.stdout.readline())["version"] != row["version"]:
      pass
    backend = shipping.open_store(str(store))
    while [r.version for r in shipping.readers(backend)] != [row["version"]]:
      time.sleep(0.02)
    for process, number in ((watch, signal.SIGINT), (follow, signal.SIGTERM)):
      process.send_signal(number)
      _, err = process.communicate(timeout=60)
      assert (process.returncode, err) == (128 + number, "interrupted\n")
  assert shipping.readers(backend) == []
  assert [path.name for path in written.iterdir()] == [str(row["version"])]
  assert_same(restore(written, row["version"]), flat(history[2]))


def test_a_terminal_gets_bars_and_a_pipe_gets_results(store, checkpoints):
  arguments = ("publish", store, checkpoints / "0", "--item=params")
  ours, theirs = pty.openpty()
  with ending(start(*arguments, stderr=theirs)) as process:
    os.close(theirs)
    shown = []

    def read():
      with contextlib.suppress(OSError):  # how a closed terminal ends
        while data := os.read(ours, 4096):
          shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(timeout=60)
    reader.join()
    os.close(ours)
  assert process.returncode == 0
  assert re.match(r"version 1: .* by itself, in .* digest \w{12}\n$", out)
  text = b"".join(shown).decode()
  assert "encoded" in text and "uploaded" in text


# --- follow ------------------------------------------------------------------


def restore(folder, version):
  with ocp.CheckpointManager(folder) as manager:
    tree = manager.restore(version, args=ocp.args.StandardRestore())
  return {
    path: np.asarray(leaf)
    for path, leaf in shipping.contents.flatten(tree).items()
  }


def test_a_reader_restarts_from_its_cache(run, store, published, tmp_path):
  cache = f"--cache={tmp_path / 'cache'}"
  _, [first], _ = run("follow", store, "--once", cache)
  _, [again], _ = run("follow", store, "--once", cache)
  assert first["version"] == again["version"] == published[-1]
  assert 0 == again["downloaded"] < first["downloaded"]


def test_pins_skips_and_rolling_back_outlive_the_process(
  run, store, published, checkpoints, tmp_path
):
  def follow(*args):
    code, rows, err = run(
      "follow", store, "--once", f"--cache={tmp_path / 'cache'}", *args
    )
    assert (code, err) == (0, "")
    return rows[0]["version"]

  first, second, third, fourth = published
  assert follow(f"--pin={second}") == second
  assert follow() == second
  assert follow("--unpin") == fourth
  assert follow("--roll_back") == second
  assert follow() == second
  assert follow("--unpin") == fourth
  assert follow(f"--skip={fourth}") == third
  assert follow() == third
  assert follow(f"--version={first}") == first


def test_versions_are_written_as_checkpoints(
  run, store, published, tmp_path, history
):
  folder = tmp_path / "written"
  for number, version in enumerate(published):
    code, [row], _ = run(
      "follow", store, f"--version={version}", f"--write={folder}", "--keep=2"
    )
    assert code == 0 and row["written"] == str(folder / str(version))
    assert_same(restore(folder, version), flat(history[number]))
  assert {path.name for path in folder.iterdir()} == {
    str(version) for version in published[-2:]
  }
  # Back to an old one: it stays, although it isn't among the newest.
  run(
    "follow",
    store,
    f"--version={published[0]}",
    f"--write={folder}",
    "--keep=2",
  )
  assert {path.name for path in folder.iterdir()} == {
    str(version) for version in (published[0], published[-1])
  }


def test_another_chains_checkpoint_is_not_taken_for_ours(
  run, store, published, checkpoints, tmp_path
):
  folder = tmp_path / "written"
  args = (f"--version={published[0]}", f"--write={folder}")
  run("publish", tmp_path / "other", checkpoints / "30", "--item=params")
  assert run("follow", tmp_path / "other", *args)[0] == 0
  code, rows, err = run("follow", store, *args)
  assert (code, rows) == (2, [])
  assert "choose another folder" in err


def test_a_checkpoint_that_fails_leaves_no_remains(tmp_path, monkeypatch):
  def interrupted(*args, **kwargs):
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    raise KeyboardInterrupt

  weights = shipping.Weights(3, "d", {}, {"a/b": np.ones(2)})
  with export.CheckpointWriter(tmp_path) as writer:
    monkeypatch.setattr(ocp.CheckpointManager, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
      writer.write(weights)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are_no_tree_are_refused():
  assert export.nest({"a/b": np.ones(1), "c": np.ones(2)}).keys() == {"a", "c"}
  for paths in (("a", "a/b"), ("a/b", "a")):
    with pytest.raises(ValueError, match="a"):
      export.nest(dict.fromkeys(paths, np.ones(1)))


# --- log ---------------------------------------------------------------------


def test_the_log_lists_versions_and_readers(run, store, published):
  with shipping.Subscriber(
    shipping.open_store(str(store)), name="lisbon-1"
  ) as reader:
    reader.update(published[1])
    code, rows, _ = run("log", store)
    _, text, _ = run("log", store, as_json=False)
  assert code == 0
  versions = [row for row in rows if "state" in row]
  assert [row["version"] for row in versions] == published
  assert [row["epoch"] for row in versions] == [1, 2, 3, 4]
  assert [row["metadata"]["step"] for row in versions] == list(STEPS)
  full = versions[0]["deliveries"][0]["bytes"]
  assert versions[1]["ratio"] == full / versions[1]["deliveries"][0]["bytes"]
  [who] = [row for row in rows if "reader" in row]
  assert (who["reader"], who["behind"]) == ("lisbon-1", 2)
  assert re.search(rf"lisbon-1 +{published[1]} +2 +\d s ago", text)
  assert re.search(rf"{published[-1]}  head .* step=30", text)


def test_the_live_log_tells_what_is_new(
  run, store, published, checkpoints, monkeypatch
):
  looks = []

  def sleep(terminal, seconds):
    looks.append(seconds)
    if len(looks) == 3:
      raise KeyboardInterrupt
    if len(looks) == 1:
      with shipping.Publisher(shipping.open_store(str(store))) as publisher:
        publisher.publish(first_params()).result()

  monkeypatch.setattr(Terminal, "sleep", sleep)
  code, rows, err = run("log", store, "--live", "--interval=7")
  assert (code, err) == (130, "interrupted\n")
  assert looks == [7.0] * 3
  # The former head's row changed, too; the third look had nothing new.
  numbers = [row["version"] for row in rows]
  assert numbers == [*published, published[-1], numbers[-1]]
  assert rows[-1]["state"] == "head" and rows[-2]["state"] == "kept"


def test_the_live_view_fits_its_screen(
  run, store, published, monkeypatch, capsys
):
  monkeypatch.setenv("LINES", "10")  # as rich takes it
  monkeypatch.setattr(Terminal, "sleep", interrupt)
  with shipping.Subscriber(
    shipping.open_store(str(store)), name="lisbon-1"
  ) as reader:
    reader.update()
    code, text, _ = run("log", store, "--live", as_json=False)
  assert code == 130
  assert "the newest 3 of 4" in text and "lisbon-1" in text
  assert "step=30" in text and "step=0" not in text


def interrupt(*args):
  raise KeyboardInterrupt


# --- verify ------------------------------------------------------------------


def delivery_of(store, version):
  chain = shipping.Chain(shipping.open_store(str(store)))
  return chain.versions[version].deliveries[0]


def damage(path, how):
  data = bytearray(path.read_bytes())
  if how == "missing":
    path.unlink()
  elif how == "truncated":
    path.write_bytes(data[: len(data) // 2])
  else:
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_sound_chain_is_verified(run, store, published):
  code, [row], _ = run("verify", store)
  assert code == 0
  assert row["sound"] == row["deliveries"] == len(STEPS)
  code, [row], _ = run("verify", store, f"--version={published[1]}")
  assert code == 0 and row["deliveries"] == 2


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("what", ["indexes", "shards"])
def test_damage_is_found_and_what_it_costs(run, store, published, how, what):
  [shard] = getattr(delivery_of(store, published[2]), what)
  damage(store / shard.key, how)
  code, rows, _ = run("verify", store)
  assert code == 1
  [found] = [row for row in rows if "damaged" in row]
  assert (found["damaged"], found["base"]) == (published[2], published[1])
  assert shard.key in found["reason"]
  [after] = [row for row in rows if "not_applied" in row]
  assert (after["not_applied"], after["base"]) == (published[3], published[2])
  assert rows[-1]["lost_versions"] == published[2:]
  # What comes before is sound.
  assert run("verify", store, f"--version={published[1]}")[0] == 0
  code, text, _ = run("verify", store, as_json=False)
  assert code == 1
  assert f"damaged: the delta from version {published[1]}" in text or (
    shard.key in text
  )
  # And readers refuse it with the same exit code.
  assert run("follow", store, f"--version={published[3]}")[0] == 1


def test_a_snapshot_makes_damage_before_it_harmless(
  run, store, checkpoints, published
):
  code, [row], _ = run(
    "publish", store, checkpoints / "0", "--item=params", "--snapshot_every=4"
  )
  assert {d["base"] for d in row["deliveries"]} == {published[-1], None}
  [shard] = delivery_of(store, published[1]).shards
  damage(store / shard.key, "flipped")
  code, rows, _ = run("verify", store)
  assert code == 1
  assert rows[-1]["lost_versions"] == published[1:]
  assert run("follow", store, "--once")[1][0]["version"] == row["version"]


def test_deltas_that_give_other_bits_are_found(run, store, monkeypatch):
  """Every digest of an object is right; what the publisher encoded isn't."""
  encode = publisher.encode

  def wrong(new, base, **kwargs):
    return encode(new if base is None else base + 1, base, **kwargs)

  monkeypatch.setattr(publisher, "encode", wrong)
  tree = {"w": np.arange(8)}
  with shipping.Publisher(shipping.open_store(str(store))) as writer:
    first = writer.publish(tree).result()
    second = writer.publish({"w": np.arange(8) * 2}).result()
  code, rows, _ = run("verify", store)
  assert code == 1
  assert (rows[0]["damaged"], rows[0]["base"]) == (second, first)
  assert "other bits" in rows[0]["reason"]


def test_a_damaged_log_is_told(run, store, published):
  damage(store / "log/000000000003", "flipped")
  for command in ("log", "verify", "gc", "follow"):
    args = ["--once"] if command == "follow" else []
    code, rows, err = run(command, store, *args)
    assert (code, rows) == (1, [])
    assert err.startswith("error: entry 3 of the log: ")
    assert err.count("\n") == 1


# --- diff --------------------------------------------------------------------


def test_diff_counts_by_kind_layer_and_expert(
  run, store, published, checkpoints, history, tmp_path
):
  old, new = flat(history[0]), flat(history[1])
  moved = {path: old[path] != new[path] for path in old}
  weight = {path: len(shipping.encode(new[path], old[path])) for path in old}
  plot = tmp_path / "plot.png"
  code, rows, _ = run(
    "diff", checkpoints / "0", checkpoints / "10", "--item=params",
    f"--plot={plot}",
  )  # fmt: skip
  assert code == 0
  assert plot.read_bytes().startswith(b"\x89PNG")
  found = {(row["by"], row.get("name")): row for row in rows}

  def check(what, name, masks):
    row = found[what, name]
    assert row["changed"] == sum(int(mask.sum()) for mask in masks)
    assert row["elements"] == sum(mask.size for mask in masks)
    assert row["density"] == row["changed"] / row["elements"]

  experts = [path for path in moved if "experts" in path]
  check("kind", "layers/*/experts/w", [moved[path] for path in experts])
  check("kind", "embed", [moved["embed"]])
  assert found["kind", "embed"]["delta_bytes"] == weight["embed"]
  assert found["kind", "layers/*/experts/w"]["delta_bytes"] == sum(
    weight[path] for path in experts
  )
  for i in range(3):
    inside = [m for path, m in moved.items() if path.startswith(f"layers/{i}/")]
    check("layer", f"layers/{i}", inside)
  for expert in range(4):
    check("expert", expert, [moved[path][expert] for path in experts])
  check("total", None, moved.values())
  changed = [path for path in moved if moved[path].any()]
  assert found["total", None]["delta_bytes"] == sum(
    weight[path] for path in changed
  )
  # The same of versions in a store.
  one, two = (f"{store}@{version}" for version in published[:2])
  assert run("diff", one, two)[1] == rows
  assert (
    run("diff", one, f"{store}@head")[1][-1]["changed"] > rows[-1]["changed"]
  )
  code, text, _ = run("diff", one, two, as_json=False)
  assert code == 0 and "by expert" in text and "times less than all" in text


def test_diff_compares_bits_and_tells_what_it_cannot_compare(run, tmp_path):
  save(
    tmp_path / "run",
    {
      0: {
        "w": np.float32([0.0, np.nan, 1.0]),
        "gone": np.ones(2),
        "s": np.ones(2),
      },
      1: {
        "w": np.float32([-0.0, np.nan, 1.0]),
        "new": np.ones(2),
        "s": np.ones(3),
      },
    },
  )
  _, rows, _ = run(
    "diff", tmp_path / "run/0", tmp_path / "run/1", "--item=params"
  )
  unmatched = {row["name"] for row in rows if row["by"] == "unmatched"}
  assert unmatched == {"gone", "new", "s"}
  assert (rows[-1]["changed"], rows[-1]["elements"]) == (1, 3)


def test_stacked_layers_and_experts_are_told_by_their_axes():
  """The shapes of this project's own models: layers lie along an axis."""
  shapes = {
    "dense/layers/mlp/w_down": (1, 384, 128),
    "embedding": (2048, 128),
    "moe/layers/attention/w_q": (3, 128, 8, 32),
    "moe/layers/attention/w_o": (3, 8, 32, 128),
    "moe/layers/moe/shared/w_gate_up": (3, 128, 2, 128),
    "moe/layers/moe/w_gate_up": (3, 8, 128, 2, 128),
    "moe/layers/moe/w_router": (3, 128, 8),
    "model/layers_7/experts/5/kernel": (4, 4),
  }
  roles = density.classify(
    {path: ArraySpec(shape, "float32") for path, shape in shapes.items()}
  )
  with_experts = [
    p for p, role in roles.items() if role.expert_axis is not None
  ]
  assert with_experts == ["moe/layers/moe/w_gate_up"]
  stack = roles["moe/layers/moe/w_gate_up"]
  assert (stack.layer, stack.layer_axis, stack.expert_axis) == (
    "moe/layers", 0, 1,
  )  # fmt: skip
  assert roles["embedding"].layer is None
  numbered = roles["model/layers_7/experts/5/kernel"]
  assert (numbered.layer, numbered.expert) == ("model/layers_7", 5)
  assert numbered.kind == "model/layers_*/experts/*/kernel"


def test_stacked_changes_are_counted_where_they_are():
  path = "moe/layers/moe/w_up"
  old = np.zeros((3, 4, 5, 6), np.float32)
  new = old.copy()
  new[1, 2, :, 3] = 1.0
  new[2, 0, 0, 0] = 1.0
  base, following = (shipping.from_tree({path: a}) for a in (old, new))
  roles = density.classify(following.arrays)
  for chunk_bytes in (2**20, 64):  # as one, and in many pieces
    found = density.compare(base, following, roles, chunk_bytes=chunk_bytes)
    layers = {k: count.changed for k, count in found.by("layer").items()}
    assert layers == {f"moe/layers/{i}": n for i, n in enumerate((0, 5, 1))}
    experts = {k: count.changed for k, count in found.by("expert").items()}
    assert experts == {0: 1, 1: 0, 2: 5, 3: 0}


# --- gc ----------------------------------------------------------------------


def test_gc_deletes_what_it_announced(run, store, checkpoints, published):
  _, [snapshot], _ = run(
    "publish", store, checkpoints / "0", "--item=params", "--snapshot_every=4"
  )
  before = files(store / "data")
  keep = f"--keep={published[0]}"
  code, [plan], _ = run("gc", store, "--keep_last=1", keep, "--dry_run")
  assert code == 0 and files(store / "data") == before
  _, [done], _ = run("gc", store, "--keep_last=1", keep)
  gone = before - files(store / "data")
  assert len(gone) == plan["objects"] == done["objects"] > 0
  assert plan["bytes"] == done["bytes"]
  assert done["kept"] == [published[0], snapshot["version"]]
  _, rows, _ = run("log", store)
  assert [row["state"] for row in rows] == [
    "kept", "retired", "retired", "retired", "head",
  ]  # fmt: skip
  assert run("verify", store)[0] == 0
  assert run("follow", store, f"--version={published[2]}")[0] == 1
  # Versions that are out of reach already don't stand in the way.
  assert run("gc", store, "--keep_last=5")[1][0]["objects"] == 0
  assert run("gc", store, f"--keep={published[2]}")[0] == 1


# --- bench, object stores ----------------------------------------------------


def test_bench_measures_and_cleans_up(run, store, published):
  before = set(store.rglob("*"))
  code, rows, _ = run(
    "bench", store, "--size_mb=0.5", "--density=0.02", "--versions=3",
    "--readers=2", "--bandwidth=20",
  )  # fmt: skip
  assert code == 0
  assert [row["version"] for row in rows[:-1]] == [1, 2, 3]
  snapshot, *deltas, rates = rows
  assert all(10 * row["bytes"] < snapshot["bytes"] for row in deltas)
  assert 0 < rates["upload_mb_s"] <= 20 and 0 < rates["download_mb_s"] <= 20
  assert rates["encode_gb_s"] > 0 and rates["apply_gb_s"] > 0
  assert set(store.rglob("*")) == before


def test_bench_notices_other_bits_and_cleans_up(run, store, monkeypatch):
  update = shipping.Subscriber.update

  def altered(self, *args):
    weights = update(self, *args)
    weights.tree["layers/0/kernel"][0, 0] += 1
    return weights

  monkeypatch.setattr(shipping.Subscriber, "update", altered)
  code, rows, err = run("bench", store, "--size_mb=0.1")
  assert (code, rows) == (1, []) and "bits of version 1 are others" in err
  assert files(store) == set()


def test_all_of_it_over_an_object_store(
  run, checkpoints, history, tmp_path, monkeypatch
):
  backend = ObjectStore(MemoryStore())
  monkeypatch.setattr(shipping, "open_store", lambda url: backend)
  url = "s3://bucket/run"
  for step in STEPS[:3]:
    args = (checkpoints / str(step), "--item=params", "--dtype=bfloat16")
    assert run("publish", url, *args)[0] == 0
  assert run("verify", url)[0] == 0
  folder = tmp_path / "written"
  _, [row], _ = run("follow", url, "--once", f"--write={folder}")
  assert_same(restore(folder, row["version"]), flat(history[2], jnp.bfloat16))
  assert run("log", url)[1][-1]["state"] == "head"
  assert run("diff", f"{url}@1", f"{url}@head")[0] == 0
  assert run("gc", url, "--keep_last=1")[1][0]["kept"] == [row["version"]]
  before = list(backend.list("data"))
  assert run("bench", url, "--size_mb=0.1", "--versions=2")[0] == 0
  assert list(backend.list("data")) == before
  assert run("publish", url, folder / str(row["version"]))[0] == 0
  _, rows, _ = run("diff", f"{url}@{row['version']}", f"{url}@head")
  assert rows[-1]["changed"] == 0


# --- mistakes ----------------------------------------------------------------

MISTAKES = {
  "no command": ([], "required: COMMAND"),
  "no such command": (["ship"], "invalid choice: 'ship'"),
  "no store": (["log"], "required: store"),
  "no number": (["follow", "S", "--pin=x"], "invalid int value: 'x'"),
  "two policies": (["follow", "S", "--pin=1", "--unpin"], "not allowed with"),
  "no cache": (["follow", "S", "--roll_back"], "need --cache"),
  "keep nothing": (["follow", "S", "--write=W", "--keep=0"], "keep=0"),
  "keep what": (["follow", "S", "--keep=3"], "--keep goes with --write"),
  "bad name": (["follow", "S", "--name=a/b"], "no reader's name"),
  "no checkpoint": (["publish", "S", "nowhere"], "no Orbax checkpoint"),
  "all steps": (["publish", "S", "RUN"], "holds the checkpoints of 4 steps"),
  "no item": (["publish", "S", "RUN/0", "--item=x"], "no array below 'x'"),
  "no pair": (["publish", "S", "RUN/0", "--metadata=x"], "takes name=value"),
  "no float": (["publish", "S", "RUN/0", "--dtype=int8"], "is no float"),
  "no picture": (
    ["diff", "RUN/0", "RUN/10", "--plot=x.docx"],
    "no kind of picture",
  ),
  "keep none": (["gc", "S", "--keep_last=0"], "'0' is no number"),
  "snapshots": (
    ["publish", "S", "RUN/0", "--snapshot_every=0"],
    "'0' is no number",
  ),
  "no pattern": (
    ["diff", "RUN/0", "RUN/10", "--expert_paths=("],
    "'(' is no pattern",
  ),
  "density": (["bench", "S", "--density=2"], "share of 0 to 1"),
  "bandwidth": (["bench", "S", "--bandwidth=0"], "more than 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(
  run, name, checkpoints, capsys, tmp_path, monkeypatch
):
  arguments, message = MISTAKES[name]
  monkeypatch.chdir(tmp_path)
  arguments = [
    argument.replace("RUN", str(checkpoints)) for argument in arguments
  ]
  with pytest.raises(SystemExit) as end:
    ship.main(arguments)
  err = capsys.readouterr().err
  assert end.value.code == 2
  assert err.startswith("error: ") and err.count("\n") == 1
  assert message in err
  assert not (tmp_path / "S").exists()


def test_problems_of_the_store_have_another_exit_code(
  run, store, published, tmp_path, monkeypatch
):
  cases = [
    (["log", tmp_path / "empty"], "there is no chain in"),
    (["verify", tmp_path / "empty"], "there is no chain in"),
    (["gc", tmp_path / "empty"], "there is no chain in"),
    (["follow", tmp_path / "empty", "--once"], "holds no version yet"),
    (["follow", store, "--version=99"], "version 99 is not in the chain"),
    (["verify", store, "--version=99"], "version 99 is not in the chain"),
    (["diff", f"{store}@99", f"{store}@1"], "version 99 is not in the chain"),
  ]
  for arguments, message in cases:
    code, rows, err = run(*arguments)
    assert (code, rows) == (1, []), arguments
    assert message in err and err.count("\n") == 1

  (tmp_path / "file").touch()
  monkeypatch.setattr(shipping, "open_store", FolderStore)  # does not retry
  code, _, err = run("verify", tmp_path / "file")
  assert code == 1 and "Not a directory" in err


def test_following_goes_on_after_a_failure(
  run, store, published, monkeypatch, capsys
):
  failures = iter([shipping.StoreError("out of order")] * 2)
  update = shipping.Subscriber.update

  def sometimes(self, *args):
    if error := next(failures, None):
      raise error
    return update(self, *args)

  def sleep(terminal, seconds):
    sleeps.append(seconds)
    if len(sleeps) == 3:
      raise KeyboardInterrupt

  sleeps = []
  monkeypatch.setattr(shipping.Subscriber, "update", sometimes)
  monkeypatch.setattr(Terminal, "sleep", sleep)
  code, [row], err = run("follow", store)
  assert (code, row["version"]) == (130, published[-1])
  assert err == "no update: out of order\ninterrupted\n"  # not twice


def test_a_missing_matplotlib_is_told_before_the_work(
  run, checkpoints, monkeypatch
):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  code, _, err = run(
    "diff", checkpoints / "0", checkpoints / "10", "--plot=p.png"
  )
  assert code == 2 and "composer-jax[demo]" in err


def test_help_states_the_exit_codes(capsys):
  for arguments in (["--help"], ["verify", "--help"]):
    with pytest.raises(SystemExit) as end:
      ship.main(arguments)
    assert end.value.code == 0
    assert "damage was found" in capsys.readouterr().out
