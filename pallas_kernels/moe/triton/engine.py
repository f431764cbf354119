"""What the Triton kernels share: how they start, and how tiles are walked."""

from typing import no_type_check

import jax
import jax_triton
import triton
import triton.language as tl
from jax import lax


def launch(kernel, *arrays, out_type, grid, tiles, **constants):
  """Calls a Triton kernel on JAX arrays.

  Under vmap one call follows another; under shard_map each rank makes its own.

  Args:
    kernel: takes pointers to the arrays, then to the results, then constants.
    *arrays: inputs.
    out_type: a list of shapes and dtypes of the results.
    grid: how many blocks to start.
    tiles: a `tiles.Tiles`, whose warps and stages count here.
    **constants: of the kernel, known when it is compiled.

  Returns:
    The list of results.
  """

  @jax.custom_batching.sequential_vmap
  def call(*arrays):
    results = jax_triton.triton_call(
      *arrays,
      kernel=kernel,
      out_shape=out_type,
      grid=(grid,),
      num_warps=tiles.warps,
      num_stages=tiles.stages,
      **constants,
    )
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    axes = tuple(frozenset().union(*varying))
    return [lax.pcast(r, axes, to="varying") if axes else r for r in results]

  return call(*arrays)


@triton.jit
@no_type_check
def place(block, rows, columns: tl.constexpr, BAND: tl.constexpr):
  """The row and column of a tile; BAND rows walk the columns together.

  So blocks that run at the same time share weights and rows in the L2 cache.
  """
  first = block // (BAND * columns) * BAND
  height = tl.minimum(rows - first, BAND)
  within = block % (BAND * columns)
  return first + within % height, within // height
