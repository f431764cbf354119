"""Gate and up projections with SwiGLU: one grouped multiplication, forward.

Both projections of a row share one pass over its tokens: two column slices of
the same weights, two accumulators. The epilogue rounds the pre-activations to
the storage type, which backward will read, and computes the activation from the
rounded values, so that backward recomputes it to the bit.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine, gather, swiglu
from pallas_kernels.moe.mosaic.engine import DEPTH


def gate_up(
  x: Float[Array, "rows H"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  w_gate_up: Float[Array, "E H 2 I"],
  token: Int[Array, "M"] | None = None,
  *,
  movers: gather.Movers | None = None,
  clamp: float | None = None,
  columns: int,
  stages: int,
  band: int,
  num_sms: int,
) -> tuple[Array, ...]:
  """silu(x Wg) * (x Wu) and its pre-activations, for rows in tiles.

  Args:
    x: rows grouped by expert, in tiles of 128 or 64; or tokens, [T, H].
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    w_gate_up: weights; gate at [:, :, 0], up at [:, :, 1].
    token: the token of each row, if x holds tokens.
    movers: who gathers them.
    clamp: limit of the pre-activations, see `swiglu`.
    columns: columns of I a tile, 64 or 128; 128 if tiles have 64 rows.
    stages: TMA stages.
    band: row tiles walked together, a power of two.
    num_sms: blocks; no result depends on it.

  Returns:
    The activation, [M, I], and gate and up side by side, [M, 2 I].
  """
  width, (experts, _, _, inner) = x.shape[1], w_gate_up.shape
  rows = len(x if token is None else token)
  dtype, tile_rows = x.dtype, rows // len(tile_expert)
  weights = w_gate_up.reshape(experts, width, 2 * inner)
  specs = (
    gather.block(tile_rows, width, dtype)
    if movers
    else engine.block((tile_rows, DEPTH), lambda i: (0, i), dtype),
    engine.block((DEPTH, columns), lambda i: (i, 0), dtype),
    engine.block((DEPTH, columns), lambda i: (i, 0), dtype),
  )
  chunk = engine.store_columns(dtype)

  def body(expert_ref, count_ref, w_ref, *rest):
    sources = ()
    if movers:
      *sources, act_ref, pre_ref, x_ref = rest
    else:
      x_ref, act_ref, pre_ref = rest
    refs = expert_ref, count_ref, x_ref, w_ref, act_ref, pre_ref
    gather.beside(
      functools.partial(compute, *refs),
      movers,
      sources,
      x_ref,
      count_ref[0],
      tile_rows=tile_rows,
    )

  def compute(expert_ref, count_ref, x_ref, w_ref, act_ref, pre_ref, ready):
    w0 = w_ref.at[0]

    @functools.partial(
      pl.run_scoped,
      ring=engine.ring((x_ref, w0, w0), specs=specs, stages=stages),
      staged=engine.staging(dtype),
      collective_axes="wg",
    )
    def _(ring, staged):
      mine = engine.share(tile_rows, columns)

      @engine.walk(count_ref[0], inner // columns, band, gather.skipped(movers))
      def _(row_tile, column_tile):
        ready(row_tile)
        expert = expert_ref[row_tile]
        at_rows = pl.ds(row_tile * tile_rows, tile_rows)
        first = column_tile * columns

        def step(_, x_tile, gate_tile, up_tile, accs):
          for acc, w_tile in zip(accs, (gate_tile, up_tile), strict=True):
            w_mine = w_tile.at[:, mine.columns]
            plgpu.wgmma(acc, x_tile.at[mine.rows], w_mine)
          plgpu.wgmma_wait(0)
          return accs

        def context(run):
          @engine.accumulators(2, mine.width)
          def _(accs):
            run(tuple(accs))
            gate, up = (acc[...] for acc in accs)

            def at(ref, column):
              return ref.at[at_rows, pl.ds(column, chunk)].at[mine.rows]

            def chunks():
              for j in range(0, mine.width, chunk):
                g, u = (v[:, j : j + chunk].astype(dtype) for v in (gate, up))
                column = first + mine.first + j
                yield g, at(pre_ref, column)
                yield u, at(pre_ref, inner + column)
                act = swiglu.activation(g, u, clamp)
                yield act.astype(dtype), at(act_ref, column)

            engine.store(staged, chunks(), 3 * mine.width // chunk)

        w = w_ref.at[expert]
        engine.pipeline(
          step, context, specs=specs, steps=width // DEPTH, stages=stages
        )(
          x_ref.at[at_rows],
          w.at[:, pl.ds(first, columns)],
          w.at[:, pl.ds(inner + first, columns)],
          allocations=ring,
        )

      engine.finish()

  out_type = [
    jax.ShapeDtypeStruct((rows, inner), dtype),
    jax.ShapeDtypeStruct((rows, 2 * inner), dtype),
  ]
  if movers:
    out_type.append(gather.out_type(x, rows))
    arrays = gather.operands(x, token)
  else:
    arrays = (x,)
  act, pre, *_ = engine.launch(
    body,
    out_type,
    *(tile_expert, num_tiles, weights, *arrays),
    num_sms=num_sms,
    name="moe_gather_gate_up" if movers else "moe_gate_up",
  )
  return act, pre
