"""Backward through the down projection and SwiGLU, as one multiplication.

dA' = dY W_down^T, with the weights read transposed from shared memory. The
pre-activations of the tile arrive by TMA beside it, and the epilogue turns them
and dA' into the gradients of gate and up, the recomputed activation that the
weight gradient of the down projection needs, and the row sums of dA' * A, the
gradient of the gate weight (so the expert outputs are never saved). Sums over
column tiles are left apart, to be added in a fixed order. Interpreted on CPUs
and compiled for sm_90a in the tests; not yet run on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine
from pallas_kernels.moe.mosaic.engine import DEPTH, WARPGROUP_ROWS
from pallas_kernels.moe.mosaic.layout import TILE


def swiglu_gradient(
  dy: Float[Array, "M H"],
  weight: Float[Array, "M"],
  pre: Float[Array, "M II"],
  tile_expert: Int[Array, "tiles"],
  num_tiles: Int[Array, "1"],
  w_down: Float[Array, "E I H"],
  *,
  columns: int,
  stages: int,
  band: int,
  num_sms: int,
) -> tuple[Float[Array, "M II"], Float[Array, "M I"], Float[Array, "parts M"]]:
  """Gradients of gate, up and gate weights, and the weighted activation.

  Args:
    dy: rows of the output gradient, not yet times the gate weight.
    weight: float32 gate weight of each row.
    pre: gate and up pre-activations side by side.
    tile_expert: the expert of each tile.
    num_tiles: how many tiles to compute; the others stay undefined.
    w_down: weights.
    columns: columns of I a tile, 64 or 128.
    stages: TMA stages.
    band: row tiles walked together, a power of two.
    num_sms: blocks; no result depends on it.

  Returns:
    The gradients of gate and up side by side; weight * A; and, for each tile of
    columns of I, the row sums of dA' * A in float32.
  """
  (rows, width), inner = dy.shape, w_down.shape[1]
  dtype = dy.dtype
  chunk = engine.store_columns(dtype)
  specs = (
    engine.block((TILE, DEPTH), lambda i: (0, i), dtype),
    engine.block((columns, DEPTH), lambda i: (0, i), dtype),
  )
  pre_tile = plgpu.SMEM(
    (2, 2, WARPGROUP_ROWS, columns), dtype, transforms=engine.swizzled(dtype)
  )

  def body(expert_ref, count_ref, dy_ref, weight_ref, pre_ref, w_ref, *outputs):
    d_pre_ref, act_ref, d_weight_ref = outputs

    @functools.partial(
      pl.run_scoped,
      ring=engine.ring((dy_ref, w_ref.at[0]), specs=specs, stages=stages),
      staged=engine.staging(dtype),
      tiles=pre_tile,
      # Of each consumer: its gate and its up have arrived.
      arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2),
      collective_axes="wg",
    )
    def _(ring, staged, tiles, arrived):
      me, mine = lax.axis_index("wg"), engine.my_rows()

      @engine.walk(count_ref[0], inner // columns, band)
      def _(row_tile, column_tile):
        at_rows = pl.ds(row_tile * TILE, TILE)
        first = column_tile * columns

        def step(_, dy_tile, w_tile, accs):
          plgpu.wgmma(accs[0], dy_tile.at[mine], w_tile.transpose((1, 0)))
          plgpu.wgmma_wait(0)
          return accs

        def context(run):
          for side in (0, 1):
            at = pl.ds(side * inner + first, columns)
            plgpu.copy_gmem_to_smem(
              pre_ref.at[at_rows, at].at[mine],
              tiles.at[me, side],
              arrived.at[me],
            )

          @engine.accumulators(1, columns)
          def _(accs):
            run(tuple(accs))
            d_act = accs[0][...]
            plgpu.barrier_wait(arrived.at[me])
            share = plgpu.load(
              weight_ref.at[at_rows].at[mine],
              layout=plgpu.Layout.WGMMA.reduce(1),
              optimized=False,
            )
            total = []

            def chunks():
              for j in range(0, columns, chunk):
                part = pl.ds(j, chunk)
                d_gate, d_up, act, products = _epilogue(
                  tiles[me, 0, :, part],
                  tiles[me, 1, :, part],
                  d_act[:, j : j + chunk],
                  lax.broadcast_in_dim(share, (WARPGROUP_ROWS, chunk), (0,)),
                )
                total.append(products.sum(axis=1))
                for value, ref, at in (
                  (d_gate, d_pre_ref, first + j),
                  (d_up, d_pre_ref, inner + first + j),
                  (act, act_ref, first + j),
                ):
                  yield (
                    value.astype(dtype),
                    ref.at[at_rows, pl.ds(at, chunk)].at[mine],
                  )

            engine.store(staged, chunks(), 3 * columns // chunk)
            sums_ref = d_weight_ref.at[column_tile, at_rows].at[mine]
            sums_ref[...] = functools.reduce(jnp.add, total)

        engine.pipeline(
          step, context, specs=specs, steps=width // DEPTH, stages=stages
        )(
          dy_ref.at[at_rows],
          w_ref.at[expert_ref[row_tile]].at[pl.ds(first, columns)],
          allocations=ring,
        )

      engine.finish()

  out_type = [
    jax.ShapeDtypeStruct((rows, 2 * inner), dtype),
    jax.ShapeDtypeStruct((rows, inner), dtype),
    jax.ShapeDtypeStruct((inner // columns, rows), jnp.float32),
  ]
  operands = (tile_expert, num_tiles, dy, weight, pre, w_down)
  return tuple(
    engine.launch(
      body, out_type, *operands, num_sms=num_sms, name="moe_swiglu_gradient"
    )
  )


def _epilogue(gate, up, d_act, share):
  """Gradients of gate and up, share * A, and d_act * A, all float32."""
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  sigmoid = 1 / (1 + jnp.exp(-gate))
  silu = gate * sigmoid
  act = silu * up
  products = d_act * act
  d_act = share * d_act
  d_gate = d_act * up * (sigmoid + silu * (1 - sigmoid))
  return d_gate, d_act * silu, share * act, products
