"""A folder of somebody's own as a sandbox, which it is not.

The product works here, in the folder where a person started it, with the same
tools and the same harness that a policy is trained with.

Nothing is confined. Commands run as the person, with the person's files,
network and credentials; they may use all memory and every core, and read and
write whatever the person may, in this folder or not. Only time and the output
that is kept are limited. What a command starts ends with it, unless it leaves
its process group, as a daemon does. So ask before each call that isn't known to
be harmless (`Toolbox(approve=...)`), and use it for no training.

Not for Windows; and where `find` and `grep` aren't GNU's, two tools fail.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_jax.envs.agent import Capped
from composer_jax.envs.sandbox import ExecResult, FileError, Limits, Sandbox


class LocalFolder(Sandbox):
  """The sandbox that is none; see the module.

  Attributes:
    folder: where relative paths begin; absolute itself.
    limits: of which `wall_s`, `output_bytes` and, for snapshots, `disk_bytes`
      count.
  """

  def __init__(self, folder: str | Path = ".", limits: Limits | None = None):
    """Takes a folder.

    Raises:
      NotADirectoryError: it is none.
    """
    self.folder = Path(folder).expanduser().resolve()
    if not self.folder.is_dir():
      raise NotADirectoryError(f"{folder} is not a folder.")
    self.limits = limits or Limits()

  @property
  def alive(self) -> bool:
    """Always."""
    return True

  async def ready(self) -> None:
    """It always is."""

  def place(self, path: str) -> Path:
    """Where a path leads, links followed: not always into the folder."""
    return (self.folder / path).resolve()

  async def exec(
    self,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    cwd: str = ".",
    env: Mapping[str, str] | None = None,
    wall_s: float | None = None,
    output_bytes: int | None = None,
  ) -> ExecResult:
    """See `Sandbox.exec`; `env` comes on top of the person's own."""
    limit = min(wall_s or self.limits.wall_s, self.limits.wall_s)
    output = Capped(output_bytes or self.limits.output_bytes)
    loop, began = asyncio.get_running_loop(), time.monotonic()
    # A pipe of our own: for the end of one of asyncio's we would wait as long
    # as some process in the background holds it.
    output_r, output_w = os.pipe()
    os.set_blocking(output_r, False)
    loop.add_reader(output_r, _read, output_r, output)
    try:
      with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
          *argv,
          stdin=given,
          stdout=output_w,
          stderr=output_w,
          cwd=self.folder / cwd,
          env={**os.environ, **(env or {})},
          start_new_session=True,
        )
      reason = "exited"
      try:
        async with asyncio.timeout(limit):
          await process.wait()
      except TimeoutError:
        reason = "timeout"
      finally:
        _end(process.pid)
        await process.wait()
      _read(output_r, output)
    except (OSError, ValueError) as error:
      # As a shell says of what it can't start.
      output.add(f"{argv[0]}: {error}\n".encode())
      return ExecResult(127, bytes(output.head), "exited", 0, 0.0, 0)
    finally:
      loop.remove_reader(output_r)
      os.close(output_r)
      os.close(output_w)
    note = b"\n[%d bytes omitted]\n" % output.omitted if output.omitted else b""
    return ExecResult(
      exit_code=process.returncode,
      output=bytes(output.head + note + output.tail),
      reason=reason,
      omitted_bytes=output.omitted,
      wall_s=time.monotonic() - began,
      peak_bytes=0,
    )

  async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
    """See `Sandbox.read`."""
    with self._file_errors():
      place = self.folder / path
      if place.is_dir():
        raise FileError(f"{path} is a directory.")
      _check_regular(place, path)
      size = place.stat().st_size
      if size > max_bytes:
        raise FileError(
          f"{path} has {size} bytes, more than the {max_bytes} that may be"
          " read."
        )
      return place.read_bytes()

  async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
    """See `Sandbox.write`; a file that is there keeps its mode."""
    with self._file_errors():
      place = self.folder / path
      if place.is_dir():
        raise IsADirectoryError(
          errno.EISDIR, os.strerror(errno.EISDIR), str(place)
        )
      _check_regular(place, path)
      place.parent.mkdir(parents=True, exist_ok=True)
      place = place.resolve()  # A link stays one.
      # Whatever happens meanwhile, the person has the old file or the new one.
      scratch = place.with_name(f".{place.name[:200]}.{os.getpid()}")
      flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
      try:
        with open(os.open(scratch, flags, mode), "wb") as file:  # noqa: PTH123
          file.write(data)
        if place.exists():
          shutil.copymode(place, scratch)
        scratch.replace(place)
      finally:
        scratch.unlink(missing_ok=True)

  async def destroy(self) -> None:
    """Does nothing: the folder is the person's, and nothing runs in it."""

  @contextlib.contextmanager
  def _file_errors(self):
    try:
      yield
    # A ring of links is the latter.
    except (OSError, RuntimeError) as error:
      raise FileError(str(error).replace(f"{self.folder}/", "")) from error


def _read(pipe, output):
  """Takes what a pipe holds, and no more: others may go on filling it."""
  with contextlib.suppress(BlockingIOError):
    output.add(os.read(pipe, 1 << 20))


def _end(group):
  """Kills what is left of a command's process group."""
  # macOS has no permission to signal a group of the dead.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(group, signal.SIGKILL)


def _check_regular(place, path):
  # One that isn't there is for `stat` to tell.
  if place.exists() and not place.is_file():
    raise FileError(f"{path} is not a regular file.")
