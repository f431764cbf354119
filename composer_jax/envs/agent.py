"""Runs inside a sandbox as its process 1, and does what the host asks.

A file of its own with nothing but the standard library: it is copied into the
image, and started by the path. Being process 1 of a PID namespace, no process
inside can signal it, and it can end all of them with one call; being
undumpable, none can read or change its memory or its pipes.

Messages have two lengths (4 bytes, big-endian), a header and bytes. The header
is marshalled from the host, which is trusted, and a JSON object to it. Modules
that take milliseconds to import (json, ctypes, signal, contextlib, pathlib) are
avoided, because sandboxes must start quickly. A command's processes end with
it, whatever sessions or daemons they made.
"""

# ruff: noqa: PTH103, PTH116, PTH120, PTH123, PTH208, SIM105
import _ctypes
import _signal
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time
from _json import encode_basestring_ascii

_POLL_S = 0.01
_WRITABLE = ("/work", "/tmp", "/dev/shm")


def serve():
  """Answers requests until the host closes the pipe."""
  _refuse_unless_alone()
  send({}, b"")  # Ready.
  while True:
    header, payload = receive()
    operation = header.pop("op")
    try:
      answer, data = _OPERATIONS[operation](payload, **header)
    except (OSError, ValueError) as error:
      answer, data = {"error": str(error)}, b""
    send(answer, data)


def run(stdin, *, argv, cwd, env, limits):
  """Runs a command; see `Sandbox.exec`."""
  deadline = time.monotonic() + limits["wall_s"]
  began = time.monotonic()
  output_r, output_w = os.pipe()
  stdin_r, stdin_w = os.pipe()
  # Whoever has too many files must still be able to remove them.
  max_files = {
    place: max(limits["files"], _files(place)) for place in _WRITABLE
  }
  main = os.fork()
  if not main:
    _become(argv, cwd, env, limits, stdin_r, output_w)
  os.close(output_w)
  os.close(stdin_r)
  os.set_blocking(output_r, False)
  os.set_blocking(stdin_w, False)
  output = Capped(limits["output_bytes"])
  reason, status, peak, check_at = "exited", None, 0, 0.0
  poll = select.poll()
  poll.register(output_r, select.POLLIN)
  ended = os.pidfd_open(main)
  poll.register(ended, select.POLLIN)
  while status is None:
    if stdin_w is not None:
      stdin, done = _feed(stdin_w, stdin)
      if done:
        os.close(stdin_w)
        stdin_w = None
    ready = [file for file, _ in poll.poll(1000 * _POLL_S)]
    if output_r in ready:
      chunk = os.read(output_r, 1 << 16)
      output.add(chunk)
      if not chunk:  # Closed while the command goes on.
        poll.unregister(output_r)
    status = _reap(main, status)
    if status is not None:
      break
    now = time.monotonic()
    if now < check_at:
      continue
    before = time.process_time()
    broken, used = _check(limits, max_files)
    # At most a quarter of a processor: an emulated one takes 15 ms for this.
    pause = max(_POLL_S, 3 * (time.process_time() - before))
    peak, check_at = max(peak, used), time.monotonic() + pause
    if broken or now > deadline:
      reason = broken or "timeout"
      break
  status = _end_all(main, status)
  try:
    while chunk := os.read(output_r, 1 << 16):
      output.add(chunk)
  except BlockingIOError:
    pass
  os.close(output_r)
  os.close(ended)
  if stdin_w is not None:
    os.close(stdin_w)
  answer = {
    "reason": reason,
    "exit_code": os.waitstatus_to_exitcode(status),
    "wall_s": time.monotonic() - began,
    "peak_bytes": peak,
    "omitted_bytes": output.omitted,
    "tail_bytes": len(output.tail),
  }
  return answer, bytes(output.head + output.tail)


def read(_, *, path, max_bytes):
  """Reads a regular file."""
  file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  try:
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
      raise ValueError(f"{path} is a directory.")
    # What /proc shows to this process is not for its charges.
    if not stat.S_ISREG(found.st_mode) or found.st_dev == _device("/proc"):
      raise ValueError(f"{path} is not a regular file.")
    if found.st_size > max_bytes:
      raise ValueError(
        f"{path} has {found.st_size} bytes, more than the {max_bytes} that"
        " may be read."
      )
    data = bytearray()
    while chunk := os.read(file, 1 << 20):
      data += chunk
    return {}, bytes(data)
  finally:
    os.close(file)


def write(data, *, path, mode):
  """Writes a file, and the directories above it."""
  os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
  file = os.open(path, flags, mode)
  try:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_dev not in map(
      _device, _WRITABLE
    ):
      raise ValueError(
        f"{path} is not a regular file under {', '.join(_WRITABLE)}."
      )
    os.ftruncate(file, 0)
    os.fchmod(file, mode)
    left = memoryview(data)
    while left:
      left = left[os.write(file, left) :]
    return {}, b""
  finally:
    os.close(file)


_OPERATIONS = {"exec": run, "read": read, "write": write}


class Capped:
  """The first and the last half of what may be kept."""

  def __init__(self, size):
    self.head, self.tail, self.omitted = bytearray(), bytearray(), 0
    self._half = size // 2

  def add(self, chunk):
    """Adds what came next."""
    room = self._half - len(self.head)
    self.head += chunk[:room]
    self.tail += chunk[room:]
    over = len(self.tail) - self._half
    if over > 0:
      del self.tail[:over]
      self.omitted += over


def _become(argv, cwd, env, limits, stdin, output):
  """Turns the forked child into the command; never returns."""
  try:
    os.setsid()
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 256)
    os.nice(5)  # The watchdog goes first.
    for name, value in (
      # This process counts, too.
      (resource.RLIMIT_NPROC, limits["processes"] + 1),
      (resource.RLIMIT_DATA, limits["memory_bytes"]),
      (resource.RLIMIT_FSIZE, limits["file_bytes"]),
      (resource.RLIMIT_CPU, int(limits["wall_s"]) + 1),
      (resource.RLIMIT_NOFILE, 256),
      (resource.RLIMIT_CORE, 0),
      (resource.RLIMIT_MEMLOCK, 0),
    ):
      resource.setrlimit(name, (value, value))
    os.chdir(cwd)
    os.execvpe(argv[0], argv, env)
  except BaseException as error:
    os.write(2, f"{argv[0]}: {error}\n".encode())
  os._exit(127)


def _check(limits, max_files):
  """Which limit the tree of processes breaks, if any, and its memory."""
  memory = 0
  for name in os.listdir("/proc"):
    if name.isdigit() and name != "1":
      try:
        with open(f"/proc/{name}/statm") as file:
          _, resident, shared, *_ = map(int, file.read().split())
      except OSError:  # It has ended.
        continue
      # Shared pages are files', whose sizes are limited.
      memory += (resident - shared) * resource.getpagesize()
  if memory > limits["memory_bytes"]:
    return "memory", memory
  if any(_files(place) > most for place, most in max_files.items()):
    return "files", memory
  return None, memory


def _files(place):
  use = os.statvfs(place)
  return use.f_files - use.f_ffree


def _reap(main, status):
  try:
    while (found := os.waitpid(-1, os.WNOHANG))[0]:
      if found[0] == main:
        status = found[1]
  except ChildProcessError:
    pass
  return status


def _end_all(main, status):
  """Kills every other process of the namespace, and waits until it is gone."""
  while True:
    try:
      os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
      pass
    try:
      pid, code = os.waitpid(-1, 0)
    except ChildProcessError:
      return status
    if pid == main:
      status = code


def _feed(pipe, data):
  if data:
    try:
      data = data[os.write(pipe, data[: 1 << 16]) :]
    except BlockingIOError:
      pass
    except BrokenPipeError:
      data = b""
  return data, not data


def _device(path):
  return os.stat(path).st_dev


def _refuse_unless_alone():
  """Makes sure that `kill(-1)` can only reach this namespace."""
  # The kernel's last resort takes a sandbox before the host's processes.
  with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
  if os.getpid() != 1:
    sys.exit("The agent must be process 1 of a PID namespace.")
  prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
  if _ctypes.call_function(prctl, (4, 0, 0, 0, 0)):  # PR_SET_DUMPABLE
    sys.exit("The agent could not become undumpable.")
  _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)


def receive():
  """The next request: its header and its bytes."""
  sizes = _exactly(8)
  header, payload = struct.unpack(">II", sizes)
  return marshal.loads(_exactly(header)), _exactly(payload)


def _exactly(size):
  data = bytearray()
  while len(data) < size:
    chunk = os.read(0, size - len(data))
    if not chunk:
      os._exit(0)
    data += chunk
  return bytes(data)


def send(answer, data):
  """Answers the host."""
  fields = (
    f'"{name}": {encode_basestring_ascii(v) if isinstance(v, str) else v}'
    for name, v in answer.items()
  )
  head = f"{{{', '.join(fields)}}}".encode()
  left = memoryview(struct.pack(">II", len(head), len(data)) + head + data)
  while left:
    left = left[os.write(1, left) :]


if __name__ == "__main__":
  serve()
