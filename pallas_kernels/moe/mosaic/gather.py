"""Rows gathered by bulk copies on some blocks, while the others multiply.

Every warpgroup of a moving block is a lane: it takes every so-many-th row, and
keeps several in flight through shared memory of its own. Rows are handed over
in minibatches of row tiles, each with a counter on which the multiplying blocks
wait; moving blocks wait for nobody. So the gather costs a few SMs instead of a
pass over memory before the multiplication.

The interpreter has no counters: there, `rows` proves the movement alone, and a
model the protocol. Chosen by a private switch of the layer, `overlap`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.mosaic import engine
from pallas_kernels.moe.mosaic.engine import DEPTH

WARPGROUPS = 3
# A copy takes at most 256 elements a dimension, so a row is [pieces, 256].
_PIECE = 256
_BUFFER_BYTES = 216 * 1024
_MOST_IN_FLIGHT = 10  # Of a lane: a barrier group has 32 at most.


@dataclasses.dataclass(frozen=True)
class Movers:
  """How rows are gathered beside a multiplication.

  Attributes:
    blocks: how many blocks gather; the others multiply.
    minibatch: row tiles that are handed over at once.
  """

  blocks: int
  minibatch: int

  @property
  def lanes(self) -> int:
    """How many rows are taken up at once, each by a warpgroup."""
    return self.blocks * WARPGROUPS


def skipped(movers: Movers | None) -> int:
  """Returns how many blocks don't multiply."""
  return movers.blocks if movers else 0


def piece(width: int) -> int:
  """Returns how many elements of a row lie together in its view."""
  return next(w for w in range(_PIECE, 0, -DEPTH) if width % w == 0)


def in_pieces(rows: Float[Array, "N H"]) -> Float[Array, "N pieces piece"]:
  """Views rows as what one bulk copy takes."""
  return rows.reshape(len(rows), -1, piece(rows.shape[1]))


def out_type(tokens, num_rows: int):
  """Type of gathered rows, in pieces."""
  width = tokens.shape[1]
  shape = (num_rows, width // piece(width), piece(width))
  return jax.ShapeDtypeStruct(shape, tokens.dtype)


def block(tile_rows: int, width: int, dtype):
  """A pipeline operand [tile_rows, DEPTH] of rows in pieces."""
  steps = piece(width) // DEPTH
  return engine.block(
    (tile_rows, None, DEPTH),
    lambda i: (0, i // steps, lax.rem(i, jnp.int32(steps))),
    dtype,
  )


def operands(tokens: Float[Array, "T H"], token: Int[Array, "M"]):
  """Returns what `move` reads: token, tokens and a row of zeros, in pieces."""
  nothing = jnp.zeros((1, tokens.shape[1]), tokens.dtype)
  return token, in_pieces(tokens), in_pieces(nothing)


def beside(
  compute, movers, sources, target, num_tiles, *, tile_rows, wait=True
):
  """Runs compute(ready) on the blocks that don't gather.

  Args:
    compute: calls ready(row_tile) before it reads rows of that tile.
    movers: `Movers`, or None where nothing is to be gathered.
    sources: of `operands`.
    target: [M, pieces, piece].
    num_tiles: row tiles in use.
    tile_rows: rows a tile.
    wait: False if compute doesn't read the target.
  """
  if movers is None:
    return compute(lambda row_tile: None)
  block_id = lax.axis_index("sm")
  batches = -(-(target.shape[0] // tile_rows) // movers.minibatch)
  ready = (
    pl.get_global(plgpu.SemaphoreType.REGULAR((batches,))) if wait else None
  )

  def hand_over(batch):
    if wait:
      pl.semaphore_signal(ready.at[batch], 1)

  def until_ready(row_tile):
    if wait:
      counter = ready.at[row_tile // movers.minibatch]
      pl.semaphore_wait(counter, movers.lanes, decrement=False)

  @pl.when(block_id < movers.blocks)
  def _():
    move(
      *sources,
      target,
      num_tiles * tile_rows,
      batch_rows=movers.minibatch * tile_rows,
      lanes=movers.lanes,
      hand_over=hand_over,
    )

  @pl.when(block_id >= movers.blocks)
  def _():
    compute(until_ready)


def move(
  token, source, nothing, target, num_rows, *, batch_rows, lanes, hand_over
):
  """Copies target[i] = source[token[i]] for i < num_rows: this lane's rows.

  Args:
    token: [M]; a row with -1 gets zeros.
    source: [T, pieces, piece].
    nothing: [1, pieces, piece], zeros.
    target: [M, pieces, piece].
    num_rows: how many of the M.
    batch_rows: rows a minibatch.
    lanes: how many warpgroups share the rows.
    hand_over: called with a minibatch when this lane's rows of it have arrived.
  """
  _, *row = source.shape
  row_bytes = row[0] * row[1] * jnp.dtype(source.dtype).itemsize
  depth = min(_MOST_IN_FLIGHT, _BUFFER_BYTES // WARPGROUPS // row_bytes)

  @functools.partial(
    pl.run_scoped,
    buffers=plgpu.SMEM((WARPGROUPS, depth, *row), source.dtype),
    arrived=plgpu.Barrier(num_barriers=WARPGROUPS * depth),
    collective_axes="wg",
  )
  def _(buffers, arrived):
    me = lax.axis_index("wg")
    lane = lax.axis_index("sm") * WARPGROUPS + me

    @pl.loop(0, (num_rows + batch_rows - 1) // batch_rows)
    def _(batch):
      first = batch * batch_rows + lane
      left = jnp.minimum(batch_rows, num_rows - batch * batch_rows)
      count = (left - lane + lanes - 1) // lanes

      def wanted(i):
        at = jnp.minimum(first + i * lanes, token.shape[0] - 1)
        return token[at]

      def slot(i):
        return lax.rem(i, jnp.int32(depth))

      def fetch(i, row):
        def copy(origin):
          plgpu.copy_gmem_to_smem(
            origin,
            buffers.at[me, slot(i)],
            arrived.at[me * depth + slot(i)],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
          )

        pl.when(row >= 0)(lambda: copy(source.at[row]))
        pl.when(row < 0)(lambda: copy(nothing.at[0]))

      @pl.loop(0, jnp.minimum(count, depth))
      def _(i):
        fetch(i, wanted(i))

      def pass_on(i, upcoming):
        following = wanted(i + depth)  # Early, so that its load is hidden.
        plgpu.barrier_wait(arrived.at[me * depth + slot(i)])
        plgpu.copy_smem_to_gmem(
          buffers.at[me, slot(i)], target.at[first + i * lanes]
        )

        @pl.when((i >= 1) & (i - 1 + depth < count))
        def _():
          plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # That slot is free.
          fetch(i - 1 + depth, upcoming)

        return following

      lax.fori_loop(0, count, pass_on, wanted(0))
      plgpu.wait_smem_to_gmem(0)
      hand_over(batch)


def rows(
  tokens: Float[Array, "T H"],
  token: Int[Array, "M"],
  num_tiles: Int[Array, "1"],
  *,
  tile_rows: int,
  num_sms: int,
) -> Float[Array, "M H"]:
  """Gathers tokens[token] on all SMs, by the same copies.

  Args:
    tokens: H a multiple of 64.
    token: of each row; where -1, the row gets zeros.
    num_tiles: how many tiles of `tile_rows` to fill; the others stay undefined.
    tile_rows: rows a tile.
    num_sms: blocks; no result depends on it.
  """
  lanes = num_sms * WARPGROUPS

  def body(count_ref, *refs):
    num_rows = count_ref[0] * tile_rows
    move(
      *refs,
      num_rows,
      batch_rows=num_rows,
      lanes=lanes,
      hand_over=lambda batch: None,
    )

  gathered = engine.launch(
    body,
    out_type(tokens, len(token)),
    *(num_tiles, *operands(tokens, token)),
    num_sms=num_sms,
    name="moe_gather",
  )
  return gathered.reshape(len(token), -1)
