"""Process 1 of a microVM: prepares the machine, then starts the agent.

A script of its own with nothing but the standard library, copied into the
initial file system as `/init`. It speaks first when the machine has booted;
the host keeps the machine in that state and starts every sandbox from a copy.
So what must differ between copies (time, random numbers) and what limits a
sandbox come afterwards, in one message.

The agent gets what bubblewrap gives it elsewhere: a PID namespace in which it
is process 1, a user that owns nothing, no way to new privileges, the filter of
system calls, and `/work`, `/tmp` and `/dev/shm` as memory of limited size.
"""

# ruff: noqa: PTH106, PTH123, PTH208
import ctypes
import fcntl
import os
import struct
import sys
import time

sys.path.insert(0, "/image")
import agent  # The image's agent.pyc.

_libc = ctypes.CDLL(None, use_errno=True)
_READ_ONLY, _NOSUID, _NODEV, _REMOUNT = 1, 2, 4, 32
_FINIT_MODULE = 313  # x86_64
_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 4, 22, 38
_FILTER = 2
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_REBOOT = 0x01234567


def main():
  """Boots, waits for the host, and ends the machine with its agent."""
  _mount("proc", "/proc", "proc")
  _mount("sys", "/sys", "sysfs")
  for name in sorted(os.listdir("/modules")):
    with open(f"/modules/{name}") as file:
      _checked(_libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0))
  # The port is what the agent's messages go through: its input and its output.
  port = _port()
  os.dup2(port, 0)
  os.dup2(port, 1)
  os.close(port)
  _checked(_libc.umount2(b"/sys", 0))
  os.rmdir("/sys")
  with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
  _mount("", "/", "", _REMOUNT | _READ_ONLY)
  agent.send({}, b"")  # Booted. The host copies the machine here.
  setup, seed = agent.receive()
  user = setup["user"]
  _differ(setup["time_s"], seed)
  for place, size in setup["sizes"].items():
    options = f"size={size},mode=755,uid={user},gid={user}"
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, options)
  os.unshare(os.CLONE_NEWPID)
  child = os.fork()
  if child:
    os.waitpid(child, 0)
    _libc.reboot(_REBOOT)  # Which QEMU takes for its end.
  _mount("proc", "/proc", "proc", _NOSUID)
  _drop(user, setup["filter"])
  agent.serve()


def _port():
  while True:
    for name in os.listdir("/sys/class/virtio-ports"):
      with open(f"/sys/class/virtio-ports/{name}/dev") as file:
        major, minor = map(int, file.read().split(":"))
      os.mknod("/dev/agent", 0o20600, os.makedev(major, minor))
      return os.open("/dev/agent", os.O_RDWR)
    time.sleep(0.001)


def _differ(time_s, seed):
  time.clock_settime(time.CLOCK_REALTIME, time_s)
  with open("/dev/urandom", "wb") as file:
    pool = struct.pack("ii", 8 * len(seed), len(seed)) + seed
    fcntl.ioctl(file, _ADD_ENTROPY, pool)
    fcntl.ioctl(file, _RESEED)


def _drop(user, program):
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)
  _prctl(_SET_DUMPABLE, 1)  # Else its own /proc is not the agent's.
  _prctl(_SET_NO_NEW_PRIVS, 1)
  lines = ctypes.create_string_buffer(program, len(program))

  class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))

  value = Program(len(program) // 8, ctypes.addressof(lines))
  _prctl(_SET_SECCOMP, _FILTER, ctypes.byref(value))


def _prctl(option, *values):
  # A variadic function: what isn't given here must be a zero of full width.
  values = [v if not isinstance(v, int) else ctypes.c_ulong(v) for v in values]
  values += [ctypes.c_ulong(0)] * (4 - len(values))
  _checked(_libc.prctl(option, *values))


def _mount(source, target, kind, flags=0, data=""):
  _checked(
    _libc.mount(
      source.encode(),
      target.encode(),
      kind.encode(),
      ctypes.c_ulong(flags),
      data.encode(),
    )
  )


def _checked(result):
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


if __name__ == "__main__":
  main()
