"""A worker whose jobs succeed, fail, crash or hang: see test_supervise.py."""

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import supervise


def measure(job):
  if job["does"] == "fail":
    raise ValueError("no\nsuch\ntiles\nat all")
  if job["does"] == "crash":
    print("illegal address", file=sys.stderr, flush=True)
    os._exit(7)
  if job["does"] == "hang":
    time.sleep(60)
  yield {"ms": 1.5}
  yield {"ms": 2.5}


if __name__ == "__main__":
  supervise.work(measure)
