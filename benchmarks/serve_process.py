"""`launch/serve.py` as a process of its own, for benchmarks that load it."""

import contextlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
  """Runs a server until the end of the block; gives its address.

  Raises:
    RuntimeError: it didn't start, or ended with an error; its log, on stderr,
      says why.
  """
  server = subprocess.Popen(
    [sys.executable, "launch/serve.py", "--port=0", *flags],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    text=True,
  )
  with server:
    try:
      found = re.search(r"at (http://\S+)", server.stdout.readline())
      if not found:
        raise RuntimeError("The server didn't start; its log says why.")
      yield found[1]
    finally:
      server.terminate()
      server.communicate()
  if server.returncode:
    raise RuntimeError(f"The server ended with {server.returncode}.")


def metrics(url: str) -> dict[str, float]:
  """What a server counts, but for counts by label."""
  with urllib.request.urlopen(f"{url}/metrics") as answer:
    text = answer.read().decode()
  found = re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)
  return {name: float(value) for name, value in found}
