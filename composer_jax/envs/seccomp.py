"""The system calls that sandboxed code may not make.

Most of them make memory that neither a tmpfs nor a resident-set size shows, so
that no watchdog would see it; the others reach beyond the namespaces (virtual
sockets, key rings, BPF) or into other processes (ptrace).

It is a list of what is denied, so whatever the kernel adds later is allowed.
"""

import platform
import struct

# x86_64, aarch64 (include/uapi/asm-generic/unistd.h, syscall_64.tbl).
_NUMBERS = {
  "add_key": (248, 217),
  "bpf": (321, 280),
  "io_uring_setup": (425, 425),
  "kcmp": (312, 272),
  "keyctl": (250, 219),
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "mq_open": (240, 180),
  "msgget": (68, 186),
  "perf_event_open": (298, 241),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "ptrace": (101, 117),
  "request_key": (249, 218),
  "sched_setaffinity": (203, 122),
  "shmget": (29, 194),
  "userfaultfd": (323, 282),
}
_SOCKET = (41, 198)
_MMAP = (9, 222)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# AF_UNIX, AF_INET, AF_INET6: confined by the network namespace. AF_VSOCK isn't.
_FAMILIES = (1, 2, 10)
_SHARED_ANONYMOUS = 0x21

# Classic BPF (linux/bpf_common.h) on struct seccomp_data.
_LOAD, _AND, _EQUAL, _ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NR, _ARCH, _ARG0, _ARG3 = 0, 4, 16, 40
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_X32 = 0x40000000


def program(machine: str | None = None) -> bytes:
  """The filter, as `struct sock_filter[]`.

  Args:
    machine: as `platform.machine` names it; this one by default.

  Raises:
    ValueError: the system call numbers of that machine are not known here.
  """
  machine = machine or platform.machine()
  if machine not in _ARCHITECTURES:
    raise ValueError(
      f"No system call filter for {machine}: it knows"
      f" {', '.join(_ARCHITECTURES)}; add the numbers to {__name__}."
    )
  column, audit = _ARCHITECTURES[machine]
  code = [
    (_LOAD, 0, 0, _ARCH),
    (_EQUAL, 1, 0, audit),
    (_RETURN, 0, 0, _KILL),  # 32-bit code has other numbers.
    (_LOAD, 0, 0, _NR),
    (_ABOVE, 0, 1, _X32),
    (_RETURN, 0, 0, _EPERM),
  ]
  for numbers in _NUMBERS.values():
    code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
  code += [
    (_EQUAL, 0, 4, _MMAP[column]),
    (_LOAD, 0, 0, _ARG3),
    (_AND, 0, 0, _SHARED_ANONYMOUS),
    (_EQUAL, 0, 1, _SHARED_ANONYMOUS),
    (_RETURN, 0, 0, _EPERM),
    (_LOAD, 0, 0, _NR),
    (_EQUAL, 0, 5, _SOCKET[column]),
    (_LOAD, 0, 0, _ARG0),
    *((_EQUAL, 3 - i, 0, family) for i, family in enumerate(_FAMILIES)),
    (_RETURN, 0, 0, _EPERM),
    (_RETURN, 0, 0, _ALLOW),
  ]
  return b"".join(struct.pack("=HBBI", *line) for line in code)
