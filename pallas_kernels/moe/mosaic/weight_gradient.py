"""Weight gradients: for each expert X^T D, a contraction over its rows.

Groups are ragged, so the number of pipeline steps comes from a table, and the
last step of a group may reach into padding. There both operands are masked in
shared memory, by selection: whatever padding holds, NaN too, it adds zero. Each
output tile has one owner, which sums in row order in float32, and an expert
without rows gets zeros. Interpreted on CPUs and compiled for sm_90a in the
tests; not yet run on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine
from pallas_kernels.moe.mosaic.engine import DEPTH, FEW_ROWS, ROWS


def weight_gradient(
  x: Float[Array, "M A"],
  d: Float[Array, "M B"],
  start: Int[Array, "E"],
  size: Int[Array, "E"],
  order: Int[Array, "E"],
  total: Float[Array, "E A B"] | None = None,
  *,
  out_dtype,
  columns: int,
  stages: int,
  band: int,
  num_sms: int,
) -> Float[Array, "E A B"]:
  """x[rows of e]^T d[rows of e] for each expert e, plus total[e] if given.

  Args:
    x: rows grouped by expert, A a multiple of 64. If not of 128, the consumers
      split tiles of 64 x `columns` by columns, which 128 then divides.
    d: their gradients.
    start: the first row of each expert, a multiple of 64.
    size: rows of each expert.
    order: the experts, in the order in which to take them up.
    total: a float32 gradient to add to.
    out_dtype: dtype of the result; float32 if `total` is given.
    columns: columns of B a tile, a multiple of 64 up to 256.
    stages: TMA stages.
    band: tiles of A walked together, a power of two.
    num_sms: blocks; no result depends on it.
  """
  (_, height), width, experts = x.shape, d.shape[1], len(start)
  dtype, out_dtype = x.dtype, jnp.dtype(out_dtype)
  chunk = engine.store_columns(out_dtype)
  tile_height = FEW_ROWS if height % ROWS else ROWS
  specs = (
    engine.block((DEPTH, tile_height), lambda i: (i, 0), dtype),
    engine.block((DEPTH, columns), lambda i: (i, 0), dtype),
  )
  down, across = height // tile_height, width // columns

  def body(start_ref, size_ref, order_ref, x_ref, d_ref, *rest):
    (*total_ref, out_ref) = rest

    @functools.partial(
      pl.run_scoped,
      ring=engine.ring((x_ref, d_ref), specs=specs, stages=stages),
      staged=engine.staging(out_dtype),
      masked=plgpu.Barrier(num_arrivals=2, num_barriers=1),
      collective_axes="wg",
    )
    def _(ring, staged, masked):
      mine = engine.share(tile_height, columns)

      @plgpu.nd_loop((experts, down * across), collective_axes="sm")
      def _(info):
        nth, tile = info.index
        expert = order_ref[nth]
        row_tile, column_tile = plgpu.planar_snake(
          tile, (down, across), 0, min(band, down)
        )
        rows = size_ref[expert]
        first_row = pl.multiple_of(start_ref[expert], DEPTH)
        # Pipeline steps reach past these rows; `steps` is what bounds them.
        from_first = pl.ds(first_row, DEPTH)
        at_rows = pl.ds(row_tile * tile_height, tile_height)
        first = column_tile * columns

        def step(indices, x_tile, d_tile, accs):
          left = rows - indices[0] * DEPTH

          @pl.when(left < DEPTH)
          def _():
            _mask((x_tile, d_tile), left)
            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

          x_mine = x_tile.at[:, mine.rows].transpose((1, 0))
          plgpu.wgmma(accs[0], x_mine, d_tile.at[:, mine.columns])
          plgpu.wgmma_wait(0)
          return accs

        def context(run):
          @engine.accumulators(1, mine.width)
          def _(accs):
            run(tuple(accs))
            value = accs[0][...]

            def chunks():
              for j in range(0, mine.width, chunk):
                at = pl.ds(first + mine.first + j, chunk)
                part = value[:, j : j + chunk]
                if total_ref:
                  source = total_ref[0].at[expert].at[at_rows, at].at[mine.rows]
                  part += plgpu.load(
                    source, layout=plgpu.Layout.WGMMA, optimized=False
                  )
                yield (
                  part.astype(out_dtype),
                  out_ref.at[expert].at[at_rows, at].at[mine.rows],
                )

            engine.store(staged, chunks(), mine.width // chunk)

        engine.pipeline(
          step, context, specs=specs, steps=-(-rows // DEPTH), stages=stages
        )(
          x_ref.at[from_first, at_rows],
          d_ref.at[from_first, pl.ds(first, columns)],
          allocations=ring,
        )

      engine.finish()

  operands = (start, size, order, x, d, *([] if total is None else [total]))
  return engine.launch(
    body,
    jax.ShapeDtypeStruct((experts, height, width), out_dtype),
    *operands,
    num_sms=num_sms,
    name="moe_weight_gradient",
  )


def _mask(tiles, left):
  """Zeroes the rows of a stage from `left` on; the consumers take turns."""
  shape = (DEPTH, 64)
  row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
  parts = [
    tile.at[:, pl.ds(j, shape[1])]
    for tile in tiles
    for j in range(0, tile.shape[1], shape[1])
  ]
  for n, part in enumerate(parts):

    @pl.when(lax.axis_index("wg") == n % 2)
    def _(part=part):
      value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
      part[...] = jnp.where(row < left, value, jnp.zeros_like(value))
