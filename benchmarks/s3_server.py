"""A real S3-compatible server, moto's, in a process of its own.

It speaks S3's protocol over HTTP and honours conditional writes, ranges and
uploads in parts; it keeps objects in memory and checks no credentials.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator


@contextlib.contextmanager
def serve() -> Iterator[str]:
  """Runs the server while the context lasts.

  Yields:
    Its address.

  Raises:
    RuntimeError: if it doesn't start.
  """
  server = subprocess.Popen(
    [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONWARNINGS": "ignore"},
  )
  log = threading.Thread(target=lambda: [None for _ in server.stderr])
  said = []
  try:
    for line in server.stderr:
      said.append(line)
      if found := re.search(r"Running on (http://\S+)", line):
        log.start()  # The log must be read, or the server would stop.
        yield found[1]
        return
    raise RuntimeError(f"moto's server didn't start: {''.join(said)}")
  finally:
    server.terminate()
    server.wait()
    if log.ident:
      log.join()
    server.stderr.close()


def environment(address: str) -> dict[str, str]:
  """What obstore reads to reach the server through `s3://bucket/prefix`."""
  return {
    "AWS_ENDPOINT_URL": address,
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
  }


def make_bucket(address: str, name: str) -> None:
  """Makes a bucket; nothing happens if there is one."""
  request = urllib.request.Request(f"{address}/{name}", method="PUT")
  urllib.request.urlopen(request).close()
