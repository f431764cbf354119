"""Programs that try to get out of a sandbox, or to use up its host.

`survives` runs one and says whether the sandbox held. Tests and the benchmark
run them all; do the same with a provider of your own. They are meant for small
limits (see `LIMITS`), and for providers that are thought to hold: on an
unprotected machine some of them would do what they try to.
"""

import dataclasses
from collections.abc import Callable

from composer_jax.envs.sandbox import ExecResult, Limits, Provider

LIMITS = Limits(
  memory_bytes=128 << 20,
  processes=32,
  disk_bytes=16 << 20,
  file_bytes=8 << 20,
  files=2_000,
  wall_s=3.0,
  output_bytes=16 << 10,
)


@dataclasses.dataclass(frozen=True)
class Attack:
  """A program, and what shows that it got nowhere.

  Attributes:
    source: Python.
    held: of the program's result.
    wall_s: how long it may try.
  """

  source: str
  held: Callable[[ExecResult], bool]
  wall_s: float = 2.0


def _denied(result: ExecResult) -> bool:
  return result.ok and result.text.strip() == "denied"


def _ends(reason: str) -> Callable[[ExecResult], bool]:
  return lambda result: result.reason == reason


def _try(*lines: str, before: str = "") -> str:
  """Runs each line; says "denied" if all of them raise OSError."""
  cases = "".join(
    f"try:\n  {line}\n  print({line!r})\nexcept OSError: pass\n"
    for line in lines
  )
  return f"import ctypes, mmap, os, socket\n{before}\n{cases}print('denied')"


_LIBC = """
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
  if libc.syscall(number, *arguments) < 0: raise OSError()
"""

ATTACKS = {
  "fork_bomb": Attack(
    """
import os
while True:
  try: os.fork()
  except OSError: pass
""",
    _ends("timeout"),
  ),
  "many_processes": Attack(
    """
import os, time
def count(start):
  for i in range(1000):
    try: start()
    except (OSError, RuntimeError): return i
def child():
  if not os.fork(): time.sleep(9)
assert count(child) < 32
print("denied", flush=True); os._exit(0)
""",
    _denied,
  ),
  "memory_one_process": Attack(
    "x = bytearray(1 << 30)",
    lambda r: r.exit_code == 1 and b"Memory" in r.output,
  ),
  "memory_many_processes": Attack(
    """
import os, time
for _ in range(16):
  if not os.fork():
    kept = []
    while True: kept.append(os.urandom(1 << 20))
time.sleep(10)
""",
    _ends("memory"),
  ),
  "memory_unseen": Attack(
    _try(
      "os.memfd_create('x')",
      "mmap.mmap(-1, 1 << 20)",
      "open('/dev/zero')",
      "call(29, 0, 1 << 20, 0o1600)",
      before=_LIBC,
    ),
    _denied,
  ),
  "disk_fill": Attack(
    """
import errno
block = bytes(1 << 20)
for place in ("/work", "/tmp", "/dev/shm"):
  total = 0
  try:
    for i in range(64):
      with open(f"{place}/{i}", "wb") as file:
        for _ in range(4): total += file.write(block)
  except OSError as error: assert error.errno == errno.ENOSPC
  assert total <= 16 << 20, total
print("denied")
""",
    _denied,
  ),
  "one_large_file": Attack(
    """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try: open("/work/x", "wb").truncate(1 << 40)
except OSError: print("denied")
""",
    _denied,
  ),
  "many_files": Attack(
    "for i in range(10**7): open(f'/work/{i}', 'w').close()", _ends("files")
  ),
  "read_only_places": Attack(
    _try(
      *(
        f"open('{place}', 'w')"
        for place in ("/x", "/usr/x", "/image/x", "/dev/x", "/etc/x")
      ),
      "os.mkdir('/image/lib/x')",
      "open('/image/agent.pyc', 'r+')",
    ),
    _denied,
  ),
  "endless_output": Attack(
    "while True: print('x' * 1000)",
    lambda r: r.reason == "timeout" and len(r.output) < 20_000,
    wall_s=1.0,
  ),
  "network": Attack(
    _try(
      "socket.create_connection(('192.0.2.1', 80), timeout=1)",
      "socket.create_connection(('1.1.1.1', 53), timeout=1)",
      "socket.getaddrinfo('example.org', 80)",
      "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
      "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
      "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    ),
    _denied,
  ),
  "proc": Attack(
    _try(
      "open('/proc/1/mem', 'r+b')",
      "os.listdir('/proc/1/fd')",
      "os.listdir('/proc/1/root')",
      "open('/proc/1/environ').read()",
      "open('/proc/sysrq-trigger', 'w').write('b')",
      "open('/proc/sys/kernel/core_pattern', 'w').write('|/work/x')",
      "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
    ),
    _denied,
  ),
  "devices": Attack(
    _try(
      "open('/dev/agent', 'r+b')",  # A microVM's port to its host.
      "open('/dev/console', 'w')",
      "open('/dev/kvm', 'r+b')",
      "open('/dev/mem', 'rb')",
      "open('/proc/kcore', 'rb')",
      "open('/proc/kmsg', 'rb')",
      "os.mknod('/work/memory', 0o20600, os.makedev(1, 1))",
      "call(172, 3)",  # iopl
      "call(173, 0, 16, 1)",  # ioperm
      "call(313, 0, b'', 0)",  # finit_module
      before=_LIBC,
    ),
    _denied,
  ),
  "other_processes": Attack(
    """
import os
seen = [int(n) for n in os.listdir("/proc") if n.isdigit()]
assert sorted(seen) == [1, os.getpid()], seen
print("denied")
""",
    _denied,
  ),
  "kill_the_agent": Attack(
    """
import os, signal
for number in (9, 11, 15, 19): os.kill(1, number)
print("denied")
""",
    _denied,
  ),
  "more_privileges": Attack(
    _try(
      "os.unshare(os.CLONE_NEWUSER)",
      "os.unshare(os.CLONE_NEWNS)",
      "os.setuid(0)",
      "os.chroot('/work')",
      "call(101, 16, 1, 0, 0)",  # ptrace
      "call(425, 8, 0)",  # io_uring_setup
      "call(321, 0, 0, 0)",  # bpf
      before=_LIBC,
    ),
    _denied,
  ),
  "host_files": Attack(
    _try(
      "os.listdir('/root')",
      "os.listdir('/home')",
      "open('/etc/passwd')",
      "open('/etc/shadow')",
      "os.listdir('/sys')",
      "os.listdir('/run')",
      "os.listdir('/work/../../../../var')",
    ),
    _denied,
  ),
  "daemon_outlives_its_command": Attack(
    """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(0.3); open("/work/survived", "w").close(); time.sleep(60)
""",
    lambda result: result.ok,
  ),
}
_CLEAN = """
import os, time
time.sleep(0.4)
left = [n for n in os.listdir("/proc") if n.isdigit()]
assert len(left) == 2 and not os.path.exists("/work/survived"), left
print("held")
"""


async def survives(
  provider: Provider, name: str, patience: float = 1.0
) -> bool:
  """Whether a new sandbox holds against an attack, and works afterwards.

  Args:
    provider: of the sandbox.
    name: of the attack.
    patience: how much longer it may try, where programs run slowly.
  """
  attack = ATTACKS[name]
  async with await provider.create() as sandbox:
    result = await sandbox.exec(
      ["python", "-c", attack.source], wall_s=patience * attack.wall_s
    )
    after = await sandbox.exec(["python", "-c", _CLEAN])
    return attack.held(result) and after.text.strip() == "held"
