"""Runs a command that dies with its parent.

    python bound.py PARENT CORES COMMAND

PARENT is its process id. CORES are the processors that the command may use, as
in 0,1, or empty: then all that the parent may.

A parent that is killed can't clean up, so its children ask the kernel to do it
(Linux's PR_SET_PDEATHSIG, which survives exec). Elsewhere they are not bound,
and only a parent that ends in order takes them along.

A script rather than a function to run between fork and exec, which isn't safe
in a process with threads. It imports nothing that is slow.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
  """Binds this process to its parent and cores, and becomes the command."""
  parent, cores, *command = sys.argv[1:]
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the kernel was asked.
    if os.getppid() != int(parent):
      sys.exit("The parent is gone.")
    if cores:
      os.sched_setaffinity(0, map(int, cores.split(",")))
  os.execvp(command[0], command)


if __name__ == "__main__":
  main()
