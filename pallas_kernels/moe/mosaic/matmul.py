"""Grouped matrix multiplication: each tile of rows with its expert's weights.

The down projection of forward, and the gradient of the rows in backward, which
multiplies by the transpose: the same weights, read transposed from shared
memory by the tensor cores, so no transposed copy of them exists.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine, gather
from pallas_kernels.moe.mosaic.engine import DEPTH


def matmul(
  x: Float[Array, "M A"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  weights: Float[Array, "E B C"],
  tokens: Float[Array, "T H"] | None = None,
  token: Int[Array, "M"] | None = None,
  *,
  movers: gather.Movers | None = None,
  transposed: bool,
  columns: int,
  stages: int,
  band: int,
  num_sms: int,
) -> Float[Array, "M D"] | tuple[Array, Array]:
  """Computes x W[expert], or x W[expert]^T if `transposed`, for rows in tiles.

  Args:
    x: rows grouped by expert, tiles of 128 or 64.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    weights: [E, A, D], or [E, D, A] if transposed.
    tokens: what to gather beside the multiplication, for another kernel.
    token: the token of each row.
    movers: who gathers them, or None.
    transposed: whether to multiply by the transpose.
    columns: columns of D a tile, a multiple of 64 up to 256; of 128 if tiles
      have 64 rows.
    stages: TMA stages.
    band: row tiles walked together, a power of two.
    num_sms: blocks; no result depends on it.

  Returns:
    The products; with movers, also tokens[token], [M, H].
  """
  rows, width = x.shape
  tile_rows = rows // len(tile_expert)
  dtype = x.dtype
  out_width = weights.shape[1 if transposed else 2]
  chunk = engine.store_columns(dtype)
  if transposed:
    w_spec = engine.block((columns, DEPTH), lambda i: (0, i), dtype)
  else:
    w_spec = engine.block((DEPTH, columns), lambda i: (i, 0), dtype)
  specs = (engine.block((tile_rows, DEPTH), lambda i: (0, i), dtype), w_spec)

  def body(expert_ref, count_ref, x_ref, w_ref, *rest):
    sources, rows_ref = (), None
    if movers:
      *sources, y_ref, rows_ref = rest
    else:
      (y_ref,) = rest
    gather.beside(
      functools.partial(compute, expert_ref, count_ref, x_ref, w_ref, y_ref),
      movers,
      sources,
      rows_ref,
      count_ref[0],
      tile_rows=tile_rows,
      wait=False,
    )

  def compute(expert_ref, count_ref, x_ref, w_ref, y_ref, _):
    @functools.partial(
      pl.run_scoped,
      ring=engine.ring((x_ref, w_ref.at[0]), specs=specs, stages=stages),
      staged=engine.staging(dtype),
      collective_axes="wg",
    )
    def _(ring, staged):
      mine = engine.share(tile_rows, columns)

      @engine.walk(
        count_ref[0],
        out_width // columns,
        band,
        gather.skipped(movers),
      )
      def _(row_tile, column_tile):
        at_rows = pl.ds(row_tile * tile_rows, tile_rows)
        first = column_tile * columns

        def step(_, x_tile, w_tile, accs):
          if transposed:
            w_mine = w_tile.at[mine.columns].transpose((1, 0))
          else:
            w_mine = w_tile.at[:, mine.columns]
          plgpu.wgmma(accs[0], x_tile.at[mine.rows], w_mine)
          plgpu.wgmma_wait(0)
          return accs

        def context(run):
          @engine.accumulators(1, mine.width)
          def _(accs):
            run(tuple(accs))
            y = accs[0][...].astype(dtype)

            def chunks():
              for j in range(0, mine.width, chunk):
                at = pl.ds(first + mine.first + j, chunk)
                yield y[:, j : j + chunk], y_ref.at[at_rows, at].at[mine.rows]

            engine.store(staged, chunks(), mine.width // chunk)

        w = w_ref.at[expert_ref[row_tile]]
        at_columns = pl.ds(first, columns)
        engine.pipeline(
          step, context, specs=specs, steps=width // DEPTH, stages=stages
        )(
          x_ref.at[at_rows],
          w.at[at_columns] if transposed else w.at[:, at_columns],
          allocations=ring,
        )

      engine.finish()

  out_type = [jax.ShapeDtypeStruct((rows, out_width), dtype)]
  arrays = ()
  if movers:
    out_type.append(gather.out_type(tokens, rows))
    arrays = gather.operands(tokens, token)
  y, *gathered = engine.launch(
    body,
    out_type,
    *(tile_expert, num_tiles, x, weights, *arrays),
    num_sms=num_sms,
    name="moe_matmul_transposed" if transposed else "moe_matmul",
  )
  return (y, gathered[0].reshape(rows, -1)) if movers else y
