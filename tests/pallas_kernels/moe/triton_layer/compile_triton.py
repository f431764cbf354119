"""Compiles a layer's Triton kernels.

  python compile_triton.py CAPABILITY TILE_ROWS SHAPE DTYPE

Run by test_triton_kernels.py. Needs no GPU: Triton brings LLVM and ptxas.
Prints a line of JSON a kernel: registers, spills, shared memory and the PTX
instructions that matter.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
import types

import jax
import jax.numpy as jnp
import jax_triton
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.moe import triton as implementation
from pallas_kernels.moe.triton import tiles

# H=4096 I=1024 E=128 K=8; H=192 I=64 where columns must be few.
SHAPES = {"large": (4096, 1024, 128, 8), "small": (192, 64, 4, 2)}
CODES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def main(capability, tile, shape, dtype):
  """Compiles forward and backward, with and without totals."""
  capability, tile = int(capability), int(tile)
  seen = set()

  def compile_call(*arrays, kernel, out_shape, grid, **constants):
    options = {k: constants.pop(k) for k in ("num_warps", "num_stages")}
    identity = kernel, *map(str, constants.items()), *options.values()
    if identity not in seen:
      seen.add(identity)
      print(
        json.dumps(build(kernel, (*arrays, *out_shape), constants, options))
      )
    return [jnp.zeros(o.shape, o.dtype) for o in out_shape]

  def build(kernel, arrays, constants, options):
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    for name, array in zip(kernel.arg_names, arrays, strict=False):
      code = CODES.get(str(array.dtype), "i32")
      signature[name] = f"*{code}"
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
      file.write(ptx)
      file.flush()
      report = subprocess.run(
        [
          triton.knobs.nvidia.ptxas.path,
          *("-v", f"--gpu-name=sm_{capability}{'a' * (capability == 90)}"),
          *(file.name, "-o", "/dev/null"),
        ],
        capture_output=True,
        text=True,
        check=True,
      ).stderr
    return {
      "kernel": kernel.__name__,
      "tile": [constants[k] for k in ("ROWS", "COLUMNS", "DEPTH")],
      **options,
      "shared": compiled.metadata.shared,
      "registers": int(re.search(r"Used (\d+) registers", report)[1]),
      "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
      "atomics": re.findall(r"^\s*(?:@\S+\s+)?(?:red|atom)\S*", ptx, re.M),
      "tensor_cores": sorted(set(re.findall(r"(?:wgmma\.mma|mma)\.\S+", ptx))),
      "async": "cp.async" in ptx,
    }

  jax_triton.triton_call = compile_call
  # jax-triton takes the cache away.
  triton.knobs.cache.dir = tempfile.mkdtemp()
  device = types.SimpleNamespace(compute_capability=f"{capability / 10:.1f}")
  tiles.jax = types.SimpleNamespace(devices=lambda: [device])
  tiles.tile_rows = lambda *_: tile

  H, I, E, K = SHAPES[shape]  # noqa: E741
  T = 4 * tile * E // K
  array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
  x, up, down = array((T, H)), array((E, H, 2, I)), array((E, I, H))
  gates = jax.ShapeDtypeStruct((T, K), jnp.float32)
  ids = jax.ShapeDtypeStruct((T, K), jnp.int32)

  def gradients(x, ids, gates, up, down, totals, dy):
    layer = functools.partial(implementation.apply, grad_totals=totals, clamp=7)
    y, pullback = jax.vjp(
      lambda x, gates, up, down: layer(x, ids, gates, up, down),
      *(x, gates, up, down),
    )
    return (y, *pullback(dy))

  totals = tuple(jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in (up, down))
  for total in (None, totals):
    jax.eval_shape(gradients, x, ids, gates, up, down, total, x)


if __name__ == "__main__":
  main(*sys.argv[1:])
