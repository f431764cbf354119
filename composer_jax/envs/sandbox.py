"""Where tasks run: an operating system of their own, that lasts a rollout.

    provider = Bubblewrap()
    async with await provider.create() as sandbox:
      await sandbox.write("hello.py", b"print('hello')")
      result = await sandbox.exec(["python", "hello.py"])
      other = await provider.create(await sandbox.snapshot())   # a fork

A provider makes sandboxes: `Bubblewrap` (in `bubblewrap.py`) out of namespaces,
`Microvm` (in `microvm.py`) as machines with a kernel of their own. Each sandbox
has one agent (`agent.py`) inside, asked over a pipe.

Whatever a command does is in its `ExecResult`. `SandboxError` is different: the
machinery failed, which says nothing about the policy and must never be scored.
"""

import asyncio
import contextlib
import dataclasses
import json
import marshal
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

WORK = "/work"
# What the host waits longer than the agent, which has the limits in hand; and
# how fast an emulated machine takes in data at least.
_GRACE_S = 15.0
_BYTES_PER_S = 2e5
# Of an answer's header. Whoever has taken over an agent sends what they like.
_HEAD_BYTES = 1 << 16
_TAR = (
  *("tar", "--format=gnu", "--sort=name", "--mtime=@0"),
  *("--owner=0", "--group=0", "--numeric-owner", "-cf", "-"),
)
_ENVIRONMENT = {
  "PATH": "/image/bin:/usr/bin:/bin",
  "LD_LIBRARY_PATH": "/image/lib",
  "HOME": "/tmp",
  "LANG": "C.UTF-8",
  "PYTHONHASHSEED": "0",
  # So that a snapshot is what was written, not what was run.
  "PYTHONDONTWRITEBYTECODE": "1",
}


class SandboxError(Exception):
  """The sandbox failed, not the code inside."""


class FileError(Exception):
  """A file can't be read or written; the message is fit for the policy."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a sandbox may use.

  Attributes:
    memory_bytes: private memory of all processes together, checked a hundred
      times a second; and of each, by the kernel.
    processes: and threads, at a time.
    disk_bytes: in `/work`. `/tmp` and `/dev/shm` get a quarter each. They are
      memory, and come on top of `memory_bytes`.
    file_bytes: of one file.
    files: in each of the three.
    wall_s: of a command.
    output_bytes: kept of a command's output, half from each end.
  """

  memory_bytes: int = 256 << 20
  processes: int = 64
  disk_bytes: int = 64 << 20
  file_bytes: int = 32 << 20
  files: int = 10_000
  wall_s: float = 30.0
  output_bytes: int = 64 << 10

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value <= 0:
        raise ValueError(f"{field.name}={value} must be above 0.")


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """What a command did.

  Attributes:
    exit_code: minus the signal where one ended it, 127 if it didn't start.
    output: standard output and error as they came, without its middle where
      there was too much.
    reason: "exited", or the limit that ended it: "timeout", "memory", "files".
      Other limits are errors that the command sees itself.
    omitted_bytes: of output.
    wall_s: how long it took.
    peak_bytes: the most private memory seen.
  """

  exit_code: int
  output: bytes
  reason: Literal["exited", "timeout", "memory", "files"]
  omitted_bytes: int
  wall_s: float
  peak_bytes: int

  @property
  def ok(self) -> bool:
    """Whether the command ended by itself, with success."""
    return self.reason == "exited" and self.exit_code == 0

  @property
  def text(self) -> str:
    """The output; bytes that aren't UTF-8 become U+FFFD."""
    return self.output.decode(errors="replace")


class Sandbox:
  """One sandbox; an asynchronous context manager that destroys it.

  Requests are answered one at a time. A request that is cancelled, or that the
  agent doesn't answer, destroys the sandbox.
  """

  def __init__(self, process: asyncio.subprocess.Process, limits: Limits):
    """Wraps an agent that was just started."""
    self._process = process
    self.limits = limits
    self._lock = asyncio.Lock()

  async def ready(
    self, setup: Mapping | None = None, payload: bytes = b""
  ) -> None:
    """Waits until the agent has started.

    Args:
      setup: what it is told first, if it waits for that.
      payload: bytes that go with it.

    Raises:
      SandboxError: it did not.
    """
    await self._ask(setup, payload)

  @property
  def alive(self) -> bool:
    """Whether requests can be answered."""
    return self._process.returncode is None

  async def exec(
    self,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    cwd: str = WORK,
    env: Mapping[str, str] | None = None,
    wall_s: float | None = None,
    output_bytes: int | None = None,
  ) -> ExecResult:
    """Runs a command until it ends or breaks a limit.

    All processes that it started end with it.

    Args:
      argv: the command and its arguments.
      stdin: what it can read.
      cwd: where it starts.
      env: variables beside the usual ones.
      wall_s: instead of the sandbox's, if shorter.
      output_bytes: instead of the sandbox's.

    Raises:
      SandboxError: the sandbox failed.
    """
    limits = dataclasses.asdict(self.limits)
    if wall_s is not None:
      limits["wall_s"] = min(wall_s, limits["wall_s"])
    if output_bytes is not None:
      limits["output_bytes"] = output_bytes
    answer, output = await self._ask(
      {
        "op": "exec",
        "argv": list(argv),
        "cwd": cwd,
        "env": _ENVIRONMENT | dict(env or {}),
        "limits": limits,
      },
      stdin,
      wall_s=limits["wall_s"],
      most=limits["output_bytes"],
    )
    if "error" in answer:
      raise SandboxError(f"A command could not be started: {answer['error']}")
    tail = answer.pop("tail_bytes")
    if omitted := answer["omitted_bytes"]:
      cut = len(output) - tail
      note = b"\n[%d bytes omitted]\n" % omitted
      output = output[:cut] + note + output[cut:]
    return ExecResult(output=output, **answer)

  async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
    """The contents of a regular file; `path` is relative to `/work`.

    Raises:
      FileError: it isn't one, or is larger than `max_bytes`.
      SandboxError: the sandbox failed.
    """
    request = {"op": "read", "path": _absolute(path), "max_bytes": max_bytes}
    return await self._ask_file(request, b"", most=max_bytes)

  async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
    """Writes a file, and the directories above it.

    Raises:
      FileError: it can't be written there, or there is no room.
      SandboxError: the sandbox failed.
    """
    request = {"op": "write", "path": _absolute(path), "mode": mode}
    await self._ask_file(request, data)

  async def snapshot(self) -> bytes:
    """All of `/work`, as a tar archive; equal trees give equal bytes.

    Raises:
      FileError: the tree can't be read, or sparse files make it too large.
      SandboxError: the sandbox failed.
    """
    most = 2 * self.limits.disk_bytes
    result = await self.exec([*_TAR, "."], output_bytes=2 * most)
    if not result.ok or result.omitted_bytes or len(result.output) > most:
      raise FileError(
        f"The working tree can't be archived ({result.reason}, exit code"
        f" {result.exit_code}, {len(result.output)} bytes of {most} allowed):"
        " it may have files that nobody may read, or sparse ones."
      )
    return result.output

  async def restore(self, snapshot: bytes) -> None:
    """Unpacks a snapshot into `/work`, which should be empty.

    Raises:
      FileError: it doesn't fit, or is none.
      SandboxError: the sandbox failed.
    """
    result = await self.exec(["tar", "-xf", "-"], stdin=snapshot)
    if not result.ok:
      raise FileError(f"The snapshot can't be unpacked: {result.text[:300]}")

  async def destroy(self) -> None:
    """Ends the sandbox with all that runs and lies in it. May be repeated."""
    if self.alive:
      with contextlib.suppress(ProcessLookupError):
        self._process.kill()
    # Its standard output ends when the last process of the namespace has.
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._process.communicate(), _GRACE_S)

  async def __aenter__(self) -> "Sandbox":
    return self

  async def __aexit__(self, *_) -> None:
    await self.destroy()

  async def _ask_file(self, request, data, most=0):
    answer, data = await self._ask(request, data, most=most)
    if "error" in answer:
      raise FileError(answer["error"])
    return data

  async def _ask(self, request, data, *, wall_s=0.0, most=0):
    # The image's Python is this one, so both marshal alike.
    head = marshal.dumps(request)
    sizes = struct.pack(">II", len(head), len(data))
    async with self._lock:
      if not self.alive:
        raise SandboxError(f"The sandbox is gone. {await self._last_words()}")
      try:
        grace_s = _GRACE_S + len(data) / _BYTES_PER_S
        async with asyncio.timeout(wall_s + grace_s):
          if request is not None:  # Its first words come unasked.
            self._process.stdin.write(sizes + head + data)
            await self._process.stdin.drain()
          read = self._process.stdout.readexactly
          head_size, data_size = struct.unpack(">II", await read(8))
          if head_size > _HEAD_BYTES or data_size > most:
            raise ValueError("more than was asked for")  # It isn't our agent.
          return json.loads(await read(head_size)), await read(data_size)
      except (OSError, EOFError, ValueError) as error:  # TimeoutError, too.
        words = await self._last_words()
        raise SandboxError(
          f"The sandbox gave no answer ({type(error).__name__}). {words}"
        ) from error
      except asyncio.CancelledError:
        # Its answer would be taken for that of the next request.
        self._process.kill()
        raise

  async def _last_words(self):
    with contextlib.suppress(ProcessLookupError):
      self._process.kill()
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_GRACE_S):
        return (await self._process.stderr.read()).decode(errors="replace")
    return ""


@runtime_checkable
class Provider(Protocol):
  """Makes sandboxes of one kind."""

  async def create(self, snapshot: bytes = b"") -> Sandbox:
    """A new sandbox; with a snapshot, a fork of the one it was taken from.

    Raises:
      SandboxError: none could be started.
      FileError: the snapshot can't be unpacked.
    """


class Pool:
  """A provider that keeps empty sandboxes ready.

  Use it as an asynchronous context manager, within one event loop.
  """

  def __init__(self, provider: Provider, size: int = 4):
    """Keeps `size` sandboxes of `provider` ready."""
    self._provider = provider
    self._size = size
    self._ready: list[asyncio.Task[Sandbox]] = []

  async def create(self, snapshot: bytes = b"") -> Sandbox:
    """See `Provider.create`; whoever takes a sandbox destroys it."""
    while self._ready:
      sandbox = await self._ready.pop(0)
      self._refill()
      if sandbox.alive:
        break
    else:
      sandbox = await self._provider.create()
    if snapshot:
      try:
        await sandbox.restore(snapshot)
      except BaseException:
        await sandbox.destroy()
        raise
    return sandbox

  def _refill(self):
    while len(self._ready) < self._size:
      self._ready.append(asyncio.create_task(self._provider.create()))

  async def __aenter__(self) -> "Pool":
    self._refill()
    return self

  async def __aexit__(self, *_) -> None:
    ready, self._ready = self._ready, []
    for sandbox in await asyncio.gather(*ready, return_exceptions=True):
      if isinstance(sandbox, Sandbox):
        await sandbox.destroy()


def _absolute(path: str) -> str:
  return path if path.startswith("/") else f"{WORK}/{path}"
