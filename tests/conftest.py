"""Eight emulated devices, and JAX's strict modes, for every test."""

import functools
import os
import subprocess

# Most of the tests' time is compilation: LLVM's first level halves it. Read
# when a backend starts, here and in the processes that tests start.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=1"
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
  for item in items:
    for name, lacking in (("gpu", _no_gpu), ("sandbox", _no_sandbox)):
      if name in item.keywords and (reason := lacking()):
        item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def _no_gpu():
  if any(device.platform == "gpu" for device in jax.devices()):
    return ""
  return "needs an NVIDIA GPU"


@functools.cache
def _no_sandbox():
  """Returns why there can be no sandbox: no bubblewrap, or no namespaces."""
  command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
  try:
    run = subprocess.run(command, capture_output=True, text=True)
  except FileNotFoundError:
    return "needs bubblewrap"
  return f"bubblewrap can't run here: {run.stderr}" if run.returncode else ""
