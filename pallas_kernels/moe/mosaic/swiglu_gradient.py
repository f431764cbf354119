"""Backward through the down projection and SwiGLU, as one multiplication.

dA' = dY W_down^T, with the weights read transposed from shared memory. The
epilogue turns dA' and the pre-activations into the gradients of gate and up,
the recomputed activation that the weight gradient of the down projection needs,
and the row sums of dA' * A, the gradient of the gate weight (so the expert
outputs are never saved). Sums over column tiles are left apart, to be added in
a fixed order. Pre-activations arrive by TMA, the first two chunks during the
multiplication, the others two chunks ahead; gradients leave from where they
lay.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine, gather, swiglu
from pallas_kernels.moe.mosaic.engine import DEPTH, WARPGROUP_ROWS


def swiglu_gradient(
  dy: Float[Array, "rows H"],
  weight: Float[Array, "M"],
  pre: Float[Array, "M II"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  w_down: Float[Array, "E I H"],
  token: Int[Array, "M"] | None = None,
  *,
  movers: gather.Movers | None = None,
  clamp: float | None = None,
  columns: int,
  stages: int,
  band: int,
  num_sms: int,
) -> tuple[Array, ...]:
  """Gradients of gate, up and gate weights, and the weighted activation.

  Args:
    dy: rows of the output gradient, not yet times the gate weight; or that of
      the tokens, [T, H].
    weight: float32 gate weight of each row.
    pre: gate and up pre-activations side by side.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    w_down: weights.
    token: the token of each row, if dy is the tokens'.
    movers: who gathers them.
    clamp: limit of the pre-activations, see `swiglu`.
    columns: columns of I a tile, a multiple of 64 up to 256.
    stages: TMA stages.
    band: row tiles walked together, a power of two.
    num_sms: blocks; no result depends on it.

  Returns:
    The gradients of gate and up side by side, [M, 2 I]; weight * A, [M, I];
    and, for each tile of columns of I (half of one, if tiles have 64 rows), the
    row sums of dA' * A in float32, [parts, M]; with movers, also the gathered
    rows of dy, [M, H].
  """
  _, inner, width = w_down.shape
  rows = len(weight)
  dtype, tile_rows = dy.dtype, rows // len(tile_expert)
  chunk = engine.store_columns(dtype)
  specs = (
    gather.block(tile_rows, width, dtype)
    if movers
    else engine.block((tile_rows, DEPTH), lambda i: (0, i), dtype),
    engine.block((columns, DEPTH), lambda i: (0, i), dtype),
  )
  # Of each consumer: two slots of gate and up, and one for what leaves as A.
  shape = (WARPGROUP_ROWS, chunk)
  swizzle = engine.swizzled(dtype)
  pre_chunks = plgpu.SMEM((2, 2, 2, *shape), dtype, transforms=swizzle)
  act_chunk = plgpu.SMEM((2, *shape), dtype, transforms=swizzle)

  def body(expert_ref, count_ref, weight_ref, pre_ref, w_ref, *rest):
    sources = ()
    if movers:
      *sources, d_pre_ref, act_ref, d_weight_ref, dy_ref = rest
    else:
      dy_ref, d_pre_ref, act_ref, d_weight_ref = rest
    outputs = d_pre_ref, act_ref, d_weight_ref
    inputs = expert_ref, count_ref, dy_ref, weight_ref, pre_ref, w_ref
    gather.beside(
      functools.partial(compute, *inputs, *outputs),
      movers,
      sources,
      dy_ref,
      count_ref[0],
      tile_rows=tile_rows,
    )

  def compute(
    expert_ref, count_ref, dy_ref, weight_ref, pre_ref, w_ref,
    d_pre_ref, act_ref, d_weight_ref, ready,
  ):  # fmt: skip

    @functools.partial(
      pl.run_scoped,
      ring=engine.ring((dy_ref, w_ref.at[0]), specs=specs, stages=stages),
      chunks=pre_chunks,
      acts=act_chunk,
      # Of each consumer and slot: its gate and its up have arrived.
      arrived=plgpu.Barrier(num_arrivals=2, num_barriers=4),
      collective_axes="wg",
    )
    def _(ring, chunks, acts, arrived):
      me, mine = lax.axis_index("wg"), engine.share(tile_rows, columns)

      @engine.walk(count_ref[0], inner // columns, band, gather.skipped(movers))
      def _(row_tile, column_tile):
        ready(row_tile)
        at_rows = pl.ds(row_tile * tile_rows, tile_rows)
        first = column_tile * columns

        def step(_, dy_tile, w_tile, accs):
          w_mine = w_tile.at[mine.columns].transpose((1, 0))
          plgpu.wgmma(accs[0], dy_tile.at[mine.rows], w_mine)
          plgpu.wgmma_wait(0)
          return accs

        def at(ref, column):
          column += first + mine.first
          return ref.at[at_rows, pl.ds(column, chunk)].at[mine.rows]

        def fetch(j):
          slot = j // chunk % 2
          for side in (0, 1):
            plgpu.copy_gmem_to_smem(
              at(pre_ref, side * inner + j),
              chunks.at[me, slot, side],
              arrived.at[2 * me + slot],
            )

        def context(run):
          engine.finish()  # The tile before has left its slots.
          for j in range(0, min(2 * chunk, mine.width), chunk):
            fetch(j)

          @engine.accumulators(1, mine.width)
          def _(accs):
            run(tuple(accs))
            d_act = accs[0][...]
            share = plgpu.load(
              weight_ref.at[at_rows].at[mine.rows],
              layout=plgpu.Layout.WGMMA.reduce(1),
              optimized=False,
            )
            sums = []
            for j in range(0, mine.width, chunk):
              slot = j // chunk % 2
              mine_now = chunks.at[me, slot]
              plgpu.barrier_wait(arrived.at[2 * me + slot])
              engine.finish()  # The chunk before has left.
              if 0 < j < mine.width - chunk:
                fetch(j + chunk)
              d = d_act[:, j : j + chunk]
              weights = lax.broadcast_in_dim(share, shape, (0,))
              act = swiglu.activation(mine_now[0], mine_now[1], clamp)
              sums.append((d * act).sum(axis=1))
              acts[me] = (weights * act).astype(dtype)
              # Read again after a barrier: fewer registers in use at a time.
              plgpu.commit_smem()
              d_gate, d_up = swiglu.gradients(
                mine_now[0], mine_now[1], weights * d, clamp
              )
              mine_now[0] = d_gate.astype(dtype)
              mine_now[1] = d_up.astype(dtype)
              plgpu.commit_smem()
              for source, ref, column in (
                (mine_now.at[0], d_pre_ref, j),
                (mine_now.at[1], d_pre_ref, inner + j),
                (acts.at[me], act_ref, j),
              ):
                plgpu.copy_smem_to_gmem(source, at(ref, column))
            part = column_tile * (columns // mine.width)
            if mine.width < columns:
              part += me
            sums_ref = d_weight_ref.at[part, at_rows].at[mine.rows]
            sums_ref[...] = functools.reduce(jnp.add, sums)

        engine.pipeline(
          step, context, specs=specs, steps=width // DEPTH, stages=stages
        )(
          dy_ref.at[at_rows],
          w_ref.at[expert_ref[row_tile]].at[pl.ds(first, columns)],
          allocations=ring,
        )

      engine.finish()

  parts = inner // engine.share_width(tile_rows, columns)
  out_type = [
    jax.ShapeDtypeStruct((rows, 2 * inner), dtype),
    jax.ShapeDtypeStruct((rows, inner), dtype),
    jax.ShapeDtypeStruct((parts, rows), jnp.float32),
  ]
  if movers:
    out_type.append(gather.out_type(dy, rows))
    arrays = gather.operands(dy, token)
  else:
    arrays = (dy,)
  *result, last = engine.launch(
    body,
    out_type,
    *(tile_expert, num_tiles, weight, pre, w_down, *arrays),
    num_sms=num_sms,
    name="moe_gather_swiglu_gradient" if movers else "moe_swiglu_gradient",
  )
  return (*result, last.reshape(rows, -1) if movers else last)
