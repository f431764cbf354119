"""Every Hopper kernel as machine code: registers, shared memory, no atomics."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

KERNELS = (
  "gate_up",
  "down",
  "d_rows",
  "swiglu_gradient",
  "weight_gradient",
  "weight_gradient_by_columns",
  "weight_gradient_accumulated",
)
# What a block can have on Hopper.
SHARED_BYTES = 227 * 1024
SCRIPT = pathlib.Path(__file__).with_name("compile_sm90.py")
ROOT = SCRIPT.parents[4]

pytestmark = pytest.mark.skipif(
  not importlib.util.find_spec("jax_plugins.xla_cuda13")
  or not shutil.which("ptxas"),
  reason="compiling for sm_90a needs the extra `compile`, and ptxas on PATH",
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_hopper(kernel, tmp_path):
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_TO": str(tmp_path),
  }
  run = subprocess.run(
    [sys.executable, SCRIPT, kernel, "bfloat16"],
    env=environment,
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert run.returncode == 0, run.stderr[-2000:]
  (ptx,) = (p.read_text() for p in tmp_path.glob("*.ptx"))
  (report,) = (p.read_text() for p in tmp_path.glob("*.ptxas"))
  (resources,) = (p.read_text() for p in tmp_path.glob("*.resources.txt"))

  assert "wgmma.mma_async" in ptx and ".target sm_90a" in ptx
  atomics = r"^\s*(?:@\S+\s+)?(?:cp\.reduce|(?:red|atom)\S*\.b?f\d+)"
  assert not re.search(atomics, ptx, re.MULTILINE)
  spills = re.findall(r"(\d+) bytes spill", report)
  assert spills and set(spills) == {"0"}, report
  (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
  assert int(shared) <= SHARED_BYTES
