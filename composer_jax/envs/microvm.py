"""Sandboxes with a kernel of their own: microVMs, made by QEMU.

    provider = Microvm()        # The same interface as `Bubblewrap`.

A machine has one processor, memory of a fixed size, one port to the host, and
nothing else: no disk, no network, no clock to set, no folder of the host. It is
booted once a provider, up to where it waits for its host; each sandbox is a
copy of that machine which shares its memory until it writes to it. Forks copy
files, as with any provider (`Sandbox.snapshot`), so that a snapshot taken under
one provider can be continued under another.

Inside, the agent and its commands are confined as under bubblewrap, see
`guest.py`. Outside, QEMU runs under bubblewrap, as a user that owns nothing,
with /usr and its copy of the machine; it may start no program. So code has to
break the machine's kernel, then QEMU, then the host's kernel.

What it does not protect from:

* a hole in KVM or in the processor: speculation, caches and memory rows are
  shared with whatever else the host runs. Without KVM (`accelerator="tcg"`) the
  processor is emulated, which QEMU's authors do not call a security boundary
  (https://www.qemu.org/docs/master/system/security.html); then bubblewrap is
  what holds, and programs run fifty to a hundred times slower;
* one sandbox slowing another: there is no share of a core per machine;
* memory that is promised twice: each machine may fill its own, and nothing
  keeps their sum below the host's;
* sight of the host's processor, and of the time that things take;
* sight of a kernel version and of what `initramfs.py` takes from the host's
  /usr (which is less than bubblewrap shows: no compiler, no Perl);
* guessing addresses: copies of one machine have the kernel and the agent where
  the others have them. Commands get addresses of their own.

Linux on x86-64 only.
"""

import fcntl
import os
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from composer_jax.envs import image, initramfs, qemu, seccomp
from composer_jax.envs.sandbox import Limits, Sandbox, SandboxError
from composer_jax.envs.start import UNPRIVILEGED, as_nobody, start

_BOOTED = struct.pack(">II", 2, 0) + b"{}"
# Whoever got hold of one QEMU must not change what the next one begins with.
_SEALS = (
  fcntl.F_SEAL_WRITE
  | fcntl.F_SEAL_GROW
  | fcntl.F_SEAL_SHRINK
  | fcntl.F_SEAL_SEAL
)
_BOOT_S = 180.0
# For the kernel, its tables, and Python in the agent.
_KERNEL_BYTES = 128 << 20
_COMMAND_LINE = (
  "console=ttyS0 quiet loglevel=1 panic=-1 rootfstype=ramfs"
  # The machine is the boundary, and it holds one sandbox.
  " mitigations=off"
  " LD_LIBRARY_PATH=/image/lib"  # For the first process.
)


class Microvm:
  """The provider; see the module for what it does and does not do."""

  def __init__(
    self,
    limits: Limits | None = None,
    distributions: Sequence[str] = (),
    without: Sequence[str] = (),
    *,
    accelerator: str | None = None,
    kernel_root: str | Path | None = None,
  ):
    """Boots the machine that sandboxes are copies of; takes seconds.

    Args:
      limits: of each sandbox. What counts as memory there is below what the
        machine has, so a command breaks them before the machine's kernel does.
      distributions: Python packages that code inside can import.
      without: modules of the standard library that it can't.
      accelerator: "kvm", or "tcg" to emulate the processor. By default KVM
        where the processor has what it needs, else emulation.
      kernel_root: a folder with `boot/vmlinuz-VERSION` and
        `lib/modules/VERSION`. By default the cache of images, then `/`.

    Raises:
      SandboxError: QEMU, bubblewrap, a kernel or a distribution is missing, or
        the machine doesn't boot.
      ValueError: the accelerator or this machine's system calls are not known.
    """
    self.limits = limits or Limits()
    self.accelerator = accelerator or ("kvm" if _has_kvm() else "tcg")
    if self.accelerator not in qemu.PROCESSORS:
      raise ValueError(f"accelerator={accelerator!r}: use 'kvm' or 'tcg'.")
    roots = [image.cache_folder() / "kernel", "/"]
    if kernel_root:
      roots = [kernel_root]
    self._filter = seccomp.program()
    self._groups = []
    if self.accelerator == "kvm":
      self._groups = [Path("/dev/kvm").stat().st_gid]
    quarter = self.limits.disk_bytes // 4
    self._sizes = {
      "/work": self.limits.disk_bytes,
      "/tmp": quarter,
      "/dev/shm": quarter,
    }
    self._memory = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    weakref.finalize(self, os.close, self._memory)
    self._state = os.memfd_create("state", os.MFD_ALLOW_SEALING)
    weakref.finalize(self, os.close, self._state)
    try:
      kernel, modules = initramfs.find_kernel(*map(Path, roots))
      files = initramfs.pack(image.build(distributions, without), modules)
      with _file([kernel.read_bytes()]) as kernel, _file(files) as files:
        self._boot(kernel, files)
    except (OSError, ModuleNotFoundError) as error:
      raise SandboxError(str(error)) from error
    for file in (self._memory, self._state):
      fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)

  async def create(self, snapshot: bytes = b"") -> Sandbox:
    """See `Provider.create`."""
    # Opened again, for a position of its own.
    state = os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY)
    ours, theirs = socket.socketpair()
    setup = {
      "time_s": time.time(),
      "sizes": self._sizes,
      "user": UNPRIVILEGED,
      "filter": self._filter,
    }
    try:
      qemu.resume(ours, state)
      return await start(
        [
          *self._arguments(theirs),
          *("-serial", "null", "-incoming", "defer"),
        ],
        self.limits,
        snapshot,
        setup=setup,
        payload=os.urandom(32),
        fds=(self._memory, state, theirs.fileno()),
        groups=self._groups,
      )
    finally:
      os.close(state)
      ours.close()
      theirs.close()

  def _boot(self, kernel, files):
    """Leaves the machine's memory and state in their two files."""
    # While it boots, the packed and the unpacked files lie there.
    size = files.tell()
    used = self.limits.memory_bytes + sum(self._sizes.values())
    self._memory_bytes = _round_up(_KERNEL_BYTES + size + max(used, size))
    os.ftruncate(self._memory, self._memory_bytes)
    ours, theirs = socket.socketpair()
    with _file([]) as log, ours, theirs:
      inherited = [file.fileno() for file in (kernel, files, log, theirs)]
      process = subprocess.Popen(
        as_nobody(
          [
            *self._arguments(theirs, shared=True),
            *("-kernel", _path(kernel), "-initrd", _path(files)),
            *("-append", _COMMAND_LINE, "-serial", f"file:{_path(log)}"),
          ],
          self._groups,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(self._memory, *inherited),
        cwd="/",
        env={},
      )
      theirs.close()
      watchdog = threading.Timer(_BOOT_S, process.kill)
      watchdog.start()
      try:
        if process.stdout.read(len(_BOOTED)) != _BOOTED:
          raise RuntimeError("Its agent did not start.")
        qemu.save(ours, self._state)
      except (OSError, RuntimeError) as error:
        process.kill()
        words = process.communicate()[1] + os.pread(log.fileno(), 1 << 20, 0)
        raise SandboxError(
          f"The machine does not boot. {error}"
          f" {words.decode(errors='replace').strip()[-2000:]}"
        ) from error
      finally:
        watchdog.cancel()
        process.communicate()

  def _arguments(self, monitor, shared=False):
    return qemu.arguments(
      self.accelerator,
      self._memory,
      self._memory_bytes,
      monitor.fileno(),
      shared=shared,
    )


def _file(pieces):
  """A file in memory, which whoever inherits it may open again."""
  file = os.fdopen(os.memfd_create("file"), "wb")
  file.writelines(pieces)
  file.flush()
  return file


def _path(file):
  return f"/proc/self/fd/{file.fileno()}"


def _round_up(size):
  return -(-size >> 21) << 21  # Whole large pages.


def _has_kvm() -> bool:
  """Whether KVM can be used, and by the processor's own means.

  Without them (kvm_pvm, say) it interprets the machine's kernel, more slowly
  than QEMU does.
  """
  words = Path("/proc/cpuinfo").read_text().split()
  device = Path("/dev/kvm")
  if not {"vmx", "svm"} & set(words) or not os.access(
    device, os.R_OK | os.W_OK
  ):
    return False
  # Root gives its group to QEMU, not itself.
  return os.geteuid() != 0 or device.stat().st_mode & 0o060 == 0o060
