"""Eight emulated devices, and JAX's strict modes, for every test."""

import os

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
  if any(device.platform == "gpu" for device in jax.devices()):
    return
  skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
  for item in items:
    if "gpu" in item.keywords:
      item.add_marker(skip)
