"""What the Hopper kernels share: launch, TMA pipeline, tile walk, tile store.

A kernel is persistent: one block an SM, in each two consumer warpgroups that
multiply and one producer warpgroup that feeds them by TMA through a ring of
stages in shared memory. While the consumers run a tile's epilogue, the producer
already fetches the next tile. Work is assigned statically, so nothing that the
hardware decides can change a result. Each kernel is interpreted on CPUs and
compiled for sm_90a in the tests; BUILD_NOTES.md says what ran on which GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Contraction length of one pipeline step: a 128-byte swizzle row of 16 bits.
DEPTH = 64
# Rows of wgmma, a consumer's. A tile has them once, or once for each consumer.
WARPGROUP_ROWS = FEW_ROWS = 64
ROWS = 2 * WARPGROUP_ROWS
# Registers of a producer thread. A consumer has 240 then, and all together just
# what a block is started with: 168 a thread. One step more, and consumers would
# wait for registers for ever.
_PRODUCER_REGISTERS = 24


def swizzled(dtype):
  """Transforms of a shared-memory tile whose rows are cut at 128 bytes."""
  columns = 128 // jnp.dtype(dtype).itemsize
  return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))


def block(shape, index_map, dtype):
  """A pipeline operand: a swizzled block of two dimensions."""
  return plgpu.BlockSpec(
    shape, index_map, transforms=swizzled(dtype), memory_space=plgpu.SMEM
  )


def launch(body, out_type, *operands, num_sms: int, name: str):
  """Runs body(*operand refs, *output refs) on `num_sms` persistent blocks."""
  result = plgpu.kernel(
    body,
    out_type=out_type,
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=3,
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    kernel_name=name,
  )(*operands)
  # Inside shard_map: what a rank computes from its own arrays is its own.
  varying = frozenset().union(*map(_varying, operands))

  def vary(a):
    axes = tuple(varying - _varying(a))
    return lax.pcast(a, axes, to="varying") if axes else a

  return jax.tree.map(vary, result)


def _varying(array):
  return jax.typeof(array).manual_axis_type.varying


def pipeline(step, context, *, specs, steps, stages: int):
  """The TMA ring that feeds both consumers, see `emit_pipeline...`."""
  return plgpu.emit_pipeline_warp_specialized(
    step,
    grid=(steps,),
    memory_registers=_PRODUCER_REGISTERS,
    in_specs=specs,
    wg_axis="wg",
    num_compute_wgs=2,
    max_concurrent_steps=stages,
    compute_context=context,
  )


def ring(refs, *, specs, stages: int):
  """Allocations of a ring of `stages` stages, to share among tiles."""

  def nothing(*_, **__):
    return None

  empty = pipeline(nothing, nothing, specs=specs, steps=stages, stages=stages)
  return empty.get_allocations(*refs)


def staging(dtype):
  """Shared memory through which tiles leave: two slots a consumer."""
  columns = store_columns(dtype)
  return plgpu.SMEM(
    (2, 2, WARPGROUP_ROWS, columns), dtype, transforms=swizzled(dtype)
  )


def store_columns(dtype) -> int:
  """Returns how many columns leave at once: 128 bytes a row."""
  return 128 // jnp.dtype(dtype).itemsize


def store(staged, chunks, count: int):
  """Sends a tile from registers to device memory, chunk after chunk.

  While a chunk leaves, the next is written beside it.

  Args:
    staged: the `staging` buffer.
    chunks: pairs of a value [64, columns], this consumer's rows, and the device
      memory of that shape where it goes. Drawn one by one.
    count: how many chunks there are, the same on every call in a kernel.
  """
  for n, (value, target) in enumerate(chunks):
    mine = staged.at[lax.axis_index("wg"), n % 2]
    # The chunk sent just before may still be read, unless it is in this slot,
    # as the last of an odd number is when the next tile comes.
    same_slot = n == 0 and count % 2
    plgpu.wait_smem_to_gmem(0 if same_slot else 1, wait_read_only=True)
    mine[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, target)


def finish():
  """Waits until all that was sent has left shared memory."""
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class Share:
  """What this consumer computes of a tile: 64 rows by `width` columns.

  Attributes:
    rows: its rows within the tile.
    first: its first column.
    width: how many columns.
  """

  rows: Any
  first: Any
  width: int

  @property
  def columns(self):
    """Its columns within the tile."""
    return pl.ds(self.first, self.width)


def share(tile_rows: int, columns: int) -> Share:
  """Splits tiles of `ROWS` rows by rows, tiles of `FEW_ROWS` by columns."""
  consumer = lax.axis_index("wg")
  if tile_rows == ROWS:
    rows = pl.ds(consumer * WARPGROUP_ROWS, WARPGROUP_ROWS)
    return Share(rows, 0, columns)
  half = columns // 2
  return Share(pl.ds(0, WARPGROUP_ROWS), consumer * half, half)


def share_width(tile_rows: int, columns: int) -> int:
  """Returns how many columns a consumer computes, see `share`."""
  return columns if tile_rows == ROWS else columns // 2


def walk(num_row_tiles, num_column_tiles: int, band: int, skip: int = 0):
  """Decorates visit(row_tile, column_tile): this block's share of a matrix.

  Bands of `band` row tiles are walked column by column, so that the blocks at
  work at one time share rows and columns in the L2 cache; the bands come in
  order. The first `skip` blocks take no part.
  """
  shape = num_row_tiles, num_column_tiles
  total = num_row_tiles * num_column_tiles

  def decorate(visit):
    def visit_nth(n):
      visit(*plgpu.planar_snake(n, shape, 0, band))

    if skip:
      mine, step = lax.axis_index("sm") - skip, lax.axis_size("sm") - skip

      @pl.loop(0, (total - mine + step - 1) // step)
      def _(n):
        visit_nth(mine + n * step)

    else:  # Fewer registers than the loop above, which makes gate/up spill.

      @plgpu.nd_loop((total,), collective_axes="sm")
      def _(info):
        visit_nth(info.index[0])

  return decorate


def accumulators(count: int, columns: int):
  """Decorates body(accs): `count` float32 accumulators of 64 rows, zero."""
  acc = plgpu.ACC((WARPGROUP_ROWS, columns), jnp.float32)
  return functools.partial(pl.run_scoped, accs=[acc] * count)
