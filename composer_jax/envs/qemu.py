"""QEMU under bubblewrap: its command line, and copies of a machine.

A machine's memory is a file. It is booted with the file mapped shared, stopped,
and its other state (300 kB) written to a second one; copies map the first
privately, so they share what they don't write to, and read the second. QEMU
calls that migration which ignores shared memory; Kata Containers make their
templates so.
"""

import json
import shutil
import socket
import time

PROCESSORS = {
  # QEMU would pass on a register of Intel's to processors that lack it.
  "kvm": ("-accel", "kvm", "-cpu", "host,arch-capabilities=off"),
  "tcg": ("-accel", "tcg,tb-size=128", "-cpu", "Nehalem"),
}
_MACHINE = "q35,memory-backend=ram,sata=off,smbus=off,usb=off,hpet=off"
_IGNORE_SHARED = {"capability": "x-ignore-shared", "state": True}


def arguments(
  accelerator: str,
  memory: int,
  memory_bytes: int,
  monitor: int,
  *,
  shared: bool = False,
) -> list[str]:
  """The command line of a machine with one port and no other device.

  Args:
    accelerator: one of `PROCESSORS`.
    memory: descriptor of the file that is its memory.
    memory_bytes: its size.
    monitor: descriptor of a socket, for `save` or `resume`.
    shared: whether it writes to that file, or to a copy of its own.

  Raises:
    FileNotFoundError: QEMU or bubblewrap is missing.
  """
  for program, package in (
    ("bwrap", "bubblewrap"),
    ("qemu-system-x86_64", "qemu-system-x86"),
  ):
    if not shutil.which(program):
      raise FileNotFoundError(
        f"There is no {program} here: install the package {package}."
      )
  jail = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--proc", "/proc"),
  ]
  for name in ("bin", "lib", "lib64"):
    jail += ["--symlink", f"usr/{name}", f"/{name}"]
  if accelerator == "kvm":
    jail += ["--dev-bind", "/dev/kvm", "/dev/kvm"]
  ram = f"memory-backend-file,id=ram,share={'on' if shared else 'off'}"
  return [
    *jail,
    *("qemu-system-x86_64", "-machine", _MACHINE, *PROCESSORS[accelerator]),
    *("-smp", "1", "-m", f"{memory_bytes >> 20}M"),
    *("-object", f"{ram},size={memory_bytes},mem-path=/proc/self/fd/{memory}"),
    *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
    *("-sandbox", "on,spawn=deny,elevateprivileges=deny"),
    *("-chardev", "stdio,id=agent,signal=off"),
    *("-device", "virtio-serial-pci,max_ports=2"),
    *("-device", "virtserialport,chardev=agent"),
    *("-chardev", f"socket,id=monitor,fd={monitor}"),
    *("-mon", "chardev=monitor,mode=control"),
  ]


def save(monitor: socket.socket, state: int) -> None:
  """Has a machine stop, write its state, and end.

  Args:
    monitor: the other end of its socket.
    state: descriptor of a file.

  Raises:
    RuntimeError: QEMU can't.
  """
  replies = monitor.makefile()

  def ask(command, *files, **arguments):
    request = _command(command, **arguments)
    socket.send_fds(monitor, [request], files)
    for line in replies:  # Events and the greeting come between.
      reply = json.loads(line)
      if "error" in reply:
        raise RuntimeError(f"QEMU: {reply['error']['desc']}")
      if "return" in reply:
        return reply["return"]
    raise RuntimeError("QEMU ended.")

  ask("qmp_capabilities")
  ask("migrate-set-capabilities", capabilities=[_IGNORE_SHARED])
  ask("getfd", state, fdname="state")
  ask("migrate", uri="fd:state")
  while (found := ask("query-migrate"))["status"] != "completed":
    if found["status"] == "failed":
      raise RuntimeError(f"QEMU: {found.get('error-desc', 'no state written')}")
    time.sleep(0.01)
  ask("quit")


def resume(monitor: socket.socket, state: int) -> None:
  """Tells a machine, perhaps before it starts, to go on from a state.

  Args:
    monitor: the other end of its socket.
    state: descriptor of the file, as the machine inherits it.
  """
  monitor.sendall(
    _command("qmp_capabilities")
    + _command("migrate-set-capabilities", capabilities=[_IGNORE_SHARED])
    + _command("migrate-incoming", uri=f"fd:{state}")
  )


def _command(name, **arguments):
  return json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n"
