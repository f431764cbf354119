"""The portable MoE layer: plain XLA, for CPUs and any GPU.

Rows are grouped by expert into tiles of equal size (`routing.py`), a little
larger than the mean load. The first tile of every expert, the *head*, is one
batched matrix multiplication that reads the weights where they lie; the tiles
that busier experts still need, the *tail*, follow one by one in a loop of as
many steps as there are such tiles. Balanced routing so runs at the speed of a
dense batched multiplication, uneven routing costs what it adds, and nothing is
dropped: all rows on one expert cost about twice the balanced time.

Every row goes through multiplications of the same shape, whichever tile it is
in. Dispatch and combine are gathers, forward and backward, and the sum over k
is written out, so the result has the same bits on every run.

Saved for the backward pass: the inputs and the head's gate and up
pre-activations. The expert outputs are not: with dA' = dY W_down^T the gradient
of a gate is <dA', A>. The tail's pre-activations are computed again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import routing
from pallas_kernels.moe.movement import at_slots, combine, take


def cannot_run(**_) -> str:
  """Returns why this implementation can't run: never."""
  return ""


def tile_rows(expected_rows: int, num_experts: int) -> int:
  """Returns the rows of a tile: the mean load and two standard deviations.

  The deviation is that of uniformly random routing, sqrt(mean (1 - 1/E)), for
  which 2 % of the experts then need a second tile. Rounded up to what the
  matrix units like: whole vectors of 16 rows, or 128 where that is little.
  """
  mean = expected_rows / num_experts
  rows = mean + 2 * math.sqrt(mean * (1 - 1 / num_experts))
  unit = 128 if rows >= 1024 else 16 if rows > 8 else 8
  return max(1, math.ceil(rows / unit)) * unit


def apply(
  x: Float[Array, "T H"],
  expert_ids: Int[Array, "T K"],
  gates: Float[Array, "T K"],
  w_gate_up: Float[Array, "E H 2 I"],
  w_down: Float[Array, "E I H"],
  *,
  expected_rows: int | None = None,
  out_dtype: DTypeLike | None = None,
  clamp: float | None = None,
  grad_totals: tuple[Array, Array] | None = None,
) -> Float[Array, "T H"]:
  """The layer of `moe_ffn`, by XLA alone.

  Args:
    x: tokens.
    expert_ids: experts of each token; ids outside [0, E) contribute nothing.
    gates: weight of each expert's output, float32.
    w_gate_up: gate and up projections.
    w_down: down projections.
    expected_rows: how many of the T * K rows are likely to have an expert
      here (all, by default). It sizes the tiles: more rows only cost time.
    out_dtype: dtype of the result, x.dtype by default.
    clamp: limit of the pre-activations, or None.
    grad_totals: float32 weight gradients to add to, see `moe_ffn`, or None.

  Returns:
    The combined expert outputs, [T, H].
  """
  experts, rows = len(w_down), expected_rows or expert_ids.size
  # With fewer rows than experts, a head would read weights nobody needs.
  heads = experts if rows >= experts else 0
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  static = Static(tile_rows(rows, experts), heads, out_dtype, clamp)
  return _moe(static, x, expert_ids, gates, w_gate_up, w_down, grad_totals)


@dataclasses.dataclass(frozen=True)
class Static:
  """What is known when a layer is compiled."""

  tile: int
  heads: int
  out_dtype: Any
  clamp: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(static, *arrays):
  return _forward(static, *arrays)[0]


def _forward(static, x, expert_ids, gates, w_gate_up, w_down, totals):
  tile, heads, clamp = static.tile, static.heads, static.clamp
  table = routing.route(expert_ids, len(w_down), tile, head=heads > 0)
  tiles = table.slot_row.reshape(-1, tile)
  token = jnp.where(tiles < 0, -1, tiles // expert_ids.shape[1])

  gate_up = _gate_up(take(x, token[:heads]), w_gate_up[:heads])
  y_head = _down(_swiglu(gate_up, clamp), w_down[:heads])

  def tail_tile(i, y_tail):
    expert = table.tile_expert[i]
    gate_up = _gate_up(take(x, token[i][None]), _pick(w_gate_up, expert))
    y = _down(_swiglu(gate_up, clamp), _pick(w_down, expert))
    return lax.dynamic_update_slice_in_dim(y_tail, y, i - heads, 0)

  tail = (len(tiles) - heads, tile, x.shape[1])
  y_tail = jnp.zeros_like(x, shape=tail)
  y_tail = _tail_loop(heads, table, tail_tile, y_tail)
  y = combine(table.row_slot, y_head, y_tail, gates)
  saved = (x, gates, w_gate_up, w_down, totals, table, gate_up)
  return y.astype(static.out_dtype), saved


def _backward(static, residuals, dy):
  tile, heads, clamp = static.tile, static.heads, static.clamp
  x, gates, w_gate_up, w_down, totals, table, gate_up = residuals
  tiles = table.slot_row.reshape(-1, tile)
  token = jnp.where(tiles < 0, -1, tiles // gates.shape[1])
  dy, flat_gates = dy.astype(x.dtype), gates.reshape(-1)

  def inputs(which):
    return (
      take(x, token[which]),
      take(dy, token[which]),
      take(flat_gates, tiles[which])[..., None],
    )

  dx_head, dg_head, *d_weights = _gradients(
    *inputs(slice(heads)), gate_up, w_gate_up[:heads], w_down[:heads], clamp
  )
  if not heads:
    d_weights = [jnp.zeros_like(w, jnp.float32) for w in (w_gate_up, w_down)]

  def tail_tile(i, carry):
    expert = table.tile_expert[i]
    rows, d_rows, weight = inputs(i[None])
    up, down = _pick(w_gate_up, expert), _pick(w_down, expert)
    gate_up = _gate_up(rows, up)
    parts = _gradients(rows, d_rows, weight, gate_up, up, down, clamp)
    at_tail = functools.partial(
      lax.dynamic_update_slice_in_dim, start_index=i - heads, axis=0
    )
    dx_tail, dg_tail, d_gate_up, d_down = carry
    return (
      at_tail(dx_tail, parts[0]),
      at_tail(dg_tail, parts[1]),
      _add_at(d_gate_up, expert, parts[2]),
      _add_at(d_down, expert, parts[3]),
    )

  tail = (len(tiles) - heads, tile)
  dx_tail = jnp.zeros_like(x, shape=(*tail, x.shape[1]))
  dg_tail = jnp.zeros_like(gates, shape=tail)
  dx_tail, dg_tail, d_gate_up, d_down = _tail_loop(
    heads, table, tail_tile, (dx_tail, dg_tail, *d_weights)
  )
  d_x = combine(table.row_slot, dx_head, dx_tail).astype(x.dtype)
  d_gates = at_slots(table.row_slot, dg_head, dg_tail)
  if totals is not None:
    d_totals = (totals[0] + d_gate_up, totals[1] + d_down)
    return d_x, None, d_gates, None, None, d_totals
  d_weights = d_gate_up.astype(w_gate_up.dtype), d_down.astype(w_down.dtype)
  return d_x, None, d_gates, *d_weights, None


_moe.defvjp(_forward, _backward)


def _tail_loop(heads, table, body, carry):
  """Runs body(tile, carry) for the tiles in use after the head, in order."""
  if len(table.tile_expert) == heads:
    return carry
  return lax.fori_loop(heads, table.num_tiles, body, carry)


def _einsum(spec, a, b, dtype):
  """A matrix multiplication that accumulates in float32, rounded to dtype."""

  def widened(a, b):  # XLA:CPU lacks mixed bfloat16 and float32 products.
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b).astype(dtype)

  def native(a, b):  # Matrix units accumulate in float32 in any case.
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)

  if a.dtype == dtype == jnp.float32:
    return native(a, b)
  return lax.platform_dependent(a, b, cpu=widened, default=native)


def _gate_up(rows, w_gate_up):
  return _einsum("eth,ehgi->etgi", rows, w_gate_up, rows.dtype)


def _down(act, w_down):
  return _einsum("eti,eih->eth", act, w_down, act.dtype)


def _swiglu(gate_up, clamp):
  gate, up = _clamped(*_split(gate_up), clamp)
  return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _split(gate_up):
  gate_up = gate_up.astype(jnp.float32)
  return gate_up[..., 0, :], gate_up[..., 1, :]


def _clamped(gate, up, clamp):
  if clamp is None:
    return gate, up
  return jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)


def _gradients(rows, d_rows, weight, gate_up, w_gate_up, w_down, clamp):
  """Gradients of some tiles: of the rows, their gates and both weights.

  Args:
    rows: [tiles, tile, H], the dispatched tokens.
    d_rows: [tiles, tile, H], the tokens' output gradients, unweighted.
    weight: [tiles, tile, 1], the gates.
    gate_up: [tiles, tile, 2, I], the pre-activations.
    w_gate_up: [tiles, H, 2, I], the weights of each tile's expert.
    w_down: [tiles, I, H], likewise.
    clamp: limit of the pre-activations, or None.
  """
  free_gate, free_up = _split(gate_up)
  gate, up = _clamped(free_gate, free_up, clamp)
  sigmoid = jax.nn.sigmoid(gate)
  silu = gate * sigmoid
  act = silu * up
  d_act = _einsum("eth,eih->eti", d_rows, w_down, jnp.float32)
  d_weight = (d_act * act).sum(axis=-1)
  d_act = weight * d_act
  d_gate = d_act * up * (sigmoid + silu * (1 - sigmoid))
  d_up = d_act * silu
  if clamp is not None:
    d_gate = jnp.where(free_gate > clamp, 0, d_gate)
    d_up = jnp.where(jnp.abs(free_up) > clamp, 0, d_up)
  d_gate_up = jnp.stack([d_gate, d_up], axis=-2).astype(rows.dtype)
  act = (weight * act).astype(rows.dtype)
  return (
    _einsum("etgi,ehgi->eth", d_gate_up, w_gate_up, rows.dtype),
    d_weight,
    _einsum("eth,etgi->ehgi", rows, d_gate_up, jnp.float32),
    _einsum("eti,eth->eih", act, d_rows, jnp.float32),
  )


def _pick(weights, expert):
  return lax.dynamic_slice_in_dim(weights, expert, 1)


def _add_at(total, expert, part):
  """total[expert] += part[0], as a slice: `.at[].add` would be a scatter."""
  part = lax.dynamic_slice_in_dim(total, expert, 1) + part
  return lax.dynamic_update_slice_in_dim(total, part, expert, 0)
