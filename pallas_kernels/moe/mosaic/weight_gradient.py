"""Weight gradients: for each expert X^T D, a contraction over its rows.

Groups are ragged, so the number of pipeline steps comes from a table, and the
last step of a group may reach into its padding, whose rows are zero: a zero
token has a zero gradient. (To mask them here instead, by selection, took 3 % of
the time on an H200.) Each output tile has one owner, which sums in row order in
float32, and an expert without rows gets zeros.
"""

import functools

import jax
import jax.numpy as jnp
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
    x: rows grouped by expert; those between groups are zero, up to the next
      multiple of 64. A is a multiple of 64; if not of 128, the consumers split
      tiles of 64 x `columns` by columns, which 128 then divides.
    d: their gradients, zero where x is.
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
      collective_axes="wg",
    )
    def _(ring, staged):
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

        def step(_, x_tile, d_tile, accs):
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
