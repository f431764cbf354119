"""A person's folder behind the sandbox's interface."""

import asyncio
import os
import time

import pytest

from composer_jax.envs.local import LocalFolder
from composer_jax.envs.observe import changed
from composer_jax.envs.outcome import Edit
from composer_jax.envs.sandbox import FileError, Limits


def sh(folder, command, **options):
  return asyncio.run(LocalFolder(folder).exec(["sh", "-c", command], **options))


def test_commands_run_in_the_folder(tmp_path):
  result = sh(tmp_path, "pwd; echo no >&2; cat; exit 3", stdin=b"said\n")
  assert result.output == f"{tmp_path}\nno\nsaid\n".encode()
  assert (result.exit_code, result.reason, result.ok) == (3, "exited", False)
  result = sh(tmp_path, "echo $A; kill -9 $$", env={"A": "b"})
  assert (result.output, result.exit_code) == (b"b\n", -9)
  assert sh(tmp_path, "true").ok
  missing = asyncio.run(LocalFolder(tmp_path).exec(["no-such-program"]))
  assert missing.exit_code == 127 and "no-such-program" in missing.text


def test_output_is_capped_and_does_not_stop_the_command(tmp_path):
  result = sh(tmp_path, "yes | head -c 3000000; echo end", output_bytes=100)
  assert result.ok and result.omitted_bytes == 3_000_004 - 100
  assert result.text.startswith("y\n" * 25)
  assert result.text.endswith("y\nend\n")
  assert f"[{result.omitted_bytes} bytes omitted]" in result.text


def test_a_command_that_takes_too_long_ends_with_what_it_started(tmp_path):
  began = time.monotonic()
  result = sh(tmp_path, "(sleep 1; touch late) & yes", wall_s=0.3)
  assert result.reason == "timeout" and result.text.startswith("y\n")
  assert time.monotonic() - began < 5
  time.sleep(1.2)
  assert not (tmp_path / "late").exists()


def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
  began = time.monotonic()
  result = sh(tmp_path, "(sleep 1; touch late) & echo done")
  assert result.text == "done\n" and time.monotonic() - began < 0.9
  time.sleep(1.2)
  assert not (tmp_path / "late").exists()


def test_a_cancelled_command_is_killed(tmp_path):
  async def body():
    command = ["sh", "-c", "touch begun; sleep 1; touch late"]
    task = asyncio.create_task(LocalFolder(tmp_path).exec(command))
    while not (tmp_path / "begun").exists():
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
  asyncio.run(body())
  assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208
  time.sleep(1.2)
  assert not (tmp_path / "late").exists()


def test_files(tmp_path):
  folder = LocalFolder(tmp_path)

  async def body():
    await folder.write("new/a.txt", b"one")
    assert await folder.read("new/a.txt") == b"one"
    assert await folder.read(str(tmp_path / "new/a.txt")) == b"one"
    script = tmp_path / "run.sh"
    script.write_bytes(b"old")
    script.chmod(0o755)
    (tmp_path / "link").symlink_to("run.sh")
    await folder.write("link", b"new")
    assert (tmp_path / "link").is_symlink() and script.read_bytes() == b"new"
    assert script.stat().st_mode & 0o777 == 0o755
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "ring").symlink_to("ring")
    for path, message in (
      ("none", "No such file"),
      ("new", "is a directory"),
      ("pipe", "not a regular file"),
      ("ring", "ring"),
    ):
      with pytest.raises(FileError, match=message):
        await folder.read(path)
    for path in ("new", "pipe", "run.sh/x"):
      with pytest.raises(FileError):
        await folder.write(path, b"")
    with pytest.raises(FileError, match="3 bytes, more than the 2"):
      await folder.read("new/a.txt", max_bytes=2)

  asyncio.run(body())
  # No scratch file is left.
  left = {"new", "run.sh", "link", "pipe", "ring"}
  assert {path.name for path in tmp_path.iterdir()} == left


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  (tmp_path / "a").write_bytes(b"old")

  def full(*_):
    raise OSError("no space")

  monkeypatch.setattr("shutil.copymode", full)
  with pytest.raises(FileError, match="no space"):
    asyncio.run(LocalFolder(tmp_path).write("a", b"new"))
  assert [p.name for p in tmp_path.iterdir()] == ["a"]
  assert (tmp_path / "a").read_bytes() == b"old"


def test_a_snapshot_is_the_folder(tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "b").mkdir()
  one, other = LocalFolder(tmp_path / "a"), LocalFolder(tmp_path / "b")

  async def body():
    await one.write("x/y", b"z")
    await other.restore(await one.snapshot())
    return await one.snapshot(), await other.snapshot()

  before, after = asyncio.run(body())
  assert before == after
  (tmp_path / "a/x/y").write_bytes(b"new")
  edits = changed(before, asyncio.run(one.snapshot()))
  assert edits == {"x/y": Edit(b"z", b"new")}
  small = LocalFolder(tmp_path, Limits(disk_bytes=1))
  with pytest.raises(FileError, match="can't be archived"):
    asyncio.run(small.snapshot())


def test_no_folder_is_a_mistake(tmp_path):
  with pytest.raises(NotADirectoryError, match="is not a folder"):
    LocalFolder(tmp_path / "none")
