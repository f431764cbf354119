"""Sandboxes out of Linux namespaces, made by bubblewrap.

What a sandbox is: user, PID, mount, network, IPC, UTS and cgroup namespaces of
its own; the system's /usr and an image, read-only; `/work`, `/tmp` and
`/dev/shm` as memory of limited size; no network but its own loopback; no
capabilities, no further user namespaces, a list of denied system calls; rlimits
on every command, and a watchdog (the agent) on all of them together. Run by
root, it drops to a user that owns nothing.

What it does not protect from:

* a hole in the kernel, which all sandboxes share with the host. That takes a
  microVM or gVisor, which would be another provider;
* kernel memory that no process's size shows: buffers of pipes and sockets, at
  most `processes` times some 50 MB. Run the service in a cgroup with a limit;
* one sandbox slowing another: cores, caches and disks are shared. Commands are
  `nice`, no more;
* sight of the host: kernel version, processors, memory, uptime, mounts' names;
* reading what is world-readable in the host's /usr.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from composer_jax.envs import image, seccomp
from composer_jax.envs.sandbox import Limits, Sandbox, SandboxError
from composer_jax.envs.start import start

_AGENT = ("/image/bin/python", "-I", "-S", "/image/agent.pyc")
# Device files that hold no memory; /dev/zero, mapped shared, is unlimited.
_DEVICES = ("null", "full", "random", "urandom")
# Packages of the system's own Python may be what a task is about.
_HIDDEN = ("/usr/lib/python3", "/usr/local")
_LINKS = {
  "/bin": "usr/bin",
  "/sbin": "usr/sbin",
  "/lib": "usr/lib",
  "/lib64": "usr/lib64",
  "/dev/fd": "/proc/self/fd",
  "/dev/stdin": "/proc/self/fd/0",
  "/dev/stdout": "/proc/self/fd/1",
  "/dev/stderr": "/proc/self/fd/2",
}


class Bubblewrap:
  """The provider; see the module for what it does and does not do."""

  def __init__(
    self,
    limits: Limits | None = None,
    distributions: Sequence[str] = (),
    without: Sequence[str] = (),
  ):
    """Checks that sandboxes can be made, and makes their image.

    Args:
      limits: of each sandbox.
      distributions: Python packages that code inside can import.
      without: modules of the standard library that it can't.

    Raises:
      SandboxError: there is no bubblewrap here, or a distribution is missing.
      ValueError: the system calls of this machine are not known.
    """
    self.limits = limits or Limits()
    bwrap = shutil.which("bwrap")
    if not bwrap:
      raise SandboxError(
        "There is no bwrap here: install the package bubblewrap (Linux only)."
      )
    try:
      self._image = image.build(distributions, without)
    except ModuleNotFoundError as error:
      raise SandboxError(str(error)) from error
    self._filter = seccomp.program()
    self._argv = [bwrap, *_arguments(self._image, self.limits)]

  async def create(self, snapshot: bytes = b"") -> Sandbox:
    """See `Provider.create`."""
    read_end, write_end = os.pipe()
    try:
      os.write(write_end, self._filter)
      os.close(write_end)
      return await start(
        [*self._argv, "--seccomp", str(read_end), *_AGENT],
        self.limits,
        snapshot,
        fds=(read_end,),
        env={"LD_LIBRARY_PATH": "/image/lib"},
      )
    finally:
      os.close(read_end)


def _arguments(root: Path, limits: Limits) -> list[str]:
  quarter = str(limits.disk_bytes // 4)
  arguments = [
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--as-pid-1",
    "--die-with-parent",
    "--new-session",
    *("--cap-drop", "ALL"),
    *("--hostname", "sandbox"),
    *("--ro-bind", "/usr", "/usr"),
    *("--ro-bind", str(root), "/image"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--proc", "/proc"),
    *("--tmpfs", "/dev"),
  ]
  for device in _DEVICES:
    arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
  for link, target in _LINKS.items():
    arguments += ["--symlink", target, link]
  for hidden in filter(os.path.isdir, _HIDDEN):
    arguments += ["--size", "4096", "--tmpfs", hidden, "--remount-ro", hidden]
  return [
    *arguments,
    *("--size", quarter, "--tmpfs", "/dev/shm"),
    *("--size", quarter, "--tmpfs", "/tmp"),
    *("--size", str(limits.disk_bytes), "--tmpfs", "/work"),
    *("--remount-ro", "/dev"),
    *("--remount-ro", "/"),
    *("--chdir", "/work"),
  ]
