"""The Triton kernels without a GPU: interpreted, and as machine code."""

import json
import os
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe import moe_ffn

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[3]
APART = ROOT / ".venv-compile"
# What a block can have: A100, Ada and workstation cards, Hopper.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
ALL = (
  "_gate_up", "_matmul", "_swiglu_gradient", "_matmul",
  *["_weight_gradient"] * 4,
)  # fmt: skip

needs_triton = pytest.mark.skipif(
  not list(APART.glob("lib/python*/site-packages/jax_triton")),
  reason="needs Triton apart from the rest, which `make test` installs",
)


def run(script, *arguments):
  result = subprocess.run(
    [APART / "bin/python", HERE / script, *arguments],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert result.returncode == 0, result.stderr[-3000:]
  return result.stdout.splitlines()


@needs_triton
@pytest.mark.parametrize(
  "names",
  [
    ("random", "single_expert", "out_of_range", "none_here", "one_row"),
    ("tiles_of_16", "tiles_of_128", "clamped"),
    ("totals", "poison", "padding", "mapped"),
  ],
)
def test_interpreted(names):
  assert run("interpreter.py", *names) == [f"{name} passed" for name in names]


@needs_triton
@pytest.mark.parametrize(
  "capability,tile,shape,dtype",
  [
    (80, 128, "large", "bfloat16"),
    (89, 128, "large", "bfloat16"),
    (90, 128, "large", "bfloat16"),
    (89, 64, "small", "float16"),
    (90, 16, "large", "float16"),
  ],
)
def test_compiles(capability, tile, shape, dtype):
  lines = run("compile_triton.py", str(capability), str(tile), shape, dtype)
  kernels = [json.loads(line) for line in lines]
  assert tuple(kernel["kernel"] for kernel in kernels) == ALL
  for kernel in kernels:
    assert not kernel["atomics"] and kernel["tensor_cores"], kernel
    assert kernel["async"], kernel
    assert kernel["spilled"] == 0, kernel
    assert 0 < kernel["shared"] <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize(
  "H,I,dtype,message",
  [
    (128, 128, jnp.float32, "bfloat16 or float16, not in float32"),
    (128, 72, jnp.bfloat16, "H = 128 and I = 72 are not both multiples of 64"),
    pytest.param(
      192, 64, jnp.bfloat16, "needs an NVIDIA GPU, Ampere or newer, not cpu",
      marks=pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="there is a GPU"
      ),
    ),
  ],
)  # fmt: skip
def test_says_why_triton_cannot_run(H, I, dtype, message):  # noqa: E741
  arguments = (
    jnp.zeros((2, H), dtype),
    jnp.zeros((2, 1), jnp.int32),
    jnp.zeros((2, 1), jnp.float32),
    jnp.zeros((1, H, 2, I), dtype),
    jnp.zeros((1, I, H), dtype),
  )
  with pytest.raises(ValueError, match=re.escape(message)):
    moe_ffn(*arguments, implementation="triton")
