"""Every Hopper kernel as machine code: registers, shared memory, no atomics."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

# Name, and how many times it calls a kernel.
KERNELS = (
  ("layer", 6),
  ("layer_few_rows", 6),
  # Keeps the inputs alone, at the price of gate and up once more: nothing else
  # of forward is run again.
  ("layer_checkpoint", 7),
  ("layer_overlap", 6),
  ("gather", 1),
  ("weight_gradient_by_columns", 1),
  ("weight_gradient_accumulated", 1),
)
# What a block can have on Hopper. Registers are those that it starts with, for
# three warpgroups; warpgroups that ask each other for more wait for ever.
REGISTERS = 3 * 168
SHARED_BYTES = 227 * 1024
SUFFIXES = (".ptx", ".ptxas", ".resources.txt")
SCRIPT = pathlib.Path(__file__).with_name("compile_sm90.py")
ROOT = SCRIPT.parents[4]


def _compiler():
  """Returns a Python that has JAX's CUDA plugin, and a PATH with ptxas."""
  path = os.environ["PATH"]
  apart = ROOT / ".venv-compile"
  if (apart / "installed").exists():
    (ptxas,) = apart.glob("lib/python*/site-packages/nvidia/cu13/bin/ptxas")
    return apart / "bin/python", f"{ptxas.parent}{os.pathsep}{path}"
  if importlib.util.find_spec("jax_cuda13_plugin") and shutil.which("ptxas"):
    return sys.executable, path
  return None


COMPILER = _compiler()
pytestmark = pytest.mark.skipif(
  COMPILER is None,
  reason="needs JAX's CUDA plugin, which `make test` installs",
)


@pytest.mark.parametrize("kernel,count", KERNELS)
def test_compiles_for_hopper(kernel, count, tmp_path):
  python, path = COMPILER
  environment = os.environ | {
    "PATH": path,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_TO": str(tmp_path),
  }
  run = subprocess.run(
    [python, SCRIPT, kernel, "bfloat16"],
    env=environment,
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert run.returncode == 0, run.stderr[-2000:]
  # XLA inverts the permutation of rows by a scatter of integers, without sums.
  scatters = re.findall(r"= (\w+)\[[^=\n]* scatter\(", run.stdout)
  assert set(scatters) <= {"s32"}

  assert run.stdout.count('custom_call_target="mosaic_gpu') == count
  stems = [p.with_suffix("") for p in tmp_path.glob("*.ptx")]
  assert stems
  for stem in stems:
    ptx, report, resources = (stem.with_suffix(s).read_text() for s in SUFFIXES)
    assert ("wgmma.mma_async" in ptx) == (kernel != "gather")
    # With SwiGLU, what a thread keeps for all tiles is read back once a tile.
    spilled = 16 if re.search("gate_up|swiglu", stem.name) else 0
    _check(ptx, report, resources, spilled)


def _check(ptx, report, resources, spilled):
  assert ".target sm_90a" in ptx
  atomics = r"^\s*(?:@\S+\s+)?(?:cp\.reduce|(?:red|atom)\S*\.b?f\d+)"
  assert not re.search(atomics, ptx, re.MULTILINE)
  spills = re.findall(r"(\d+) bytes spill", report)
  assert spills and max(map(int, spills)) <= spilled, report
  _check_registers(ptx)
  (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
  assert int(shared) <= SHARED_BYTES


def _check_registers(ptx):
  """The producer gives up at least what both consumers take."""
  given = re.findall(r"setmaxnreg\.dec\S* (\d+)", ptx)
  taken = re.findall(r"setmaxnreg\.inc\S* (\d+)", ptx)
  assert len(set(given)) == len(set(taken)) == ("wgmma" in ptx)
  if given:
    assert int(given[0]) + 2 * int(taken[0]) <= REGISTERS
