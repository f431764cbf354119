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

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import routing


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
  out_dtype=None,
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

  Returns:
    The combined expert outputs, [T, H].
  """
  rows = expected_rows or expert_ids.size
  tile = tile_rows(rows, len(w_down))
  # Fewer rows than experts: the head would read weights that nobody needs.
  head = rows >= len(w_down)
  return _moe(
    tile, head, jnp.dtype(out_dtype or x.dtype), x, expert_ids, gates,
    w_gate_up, w_down,
  )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _moe(tile, head, out_dtype, *args):
  return _forward(tile, head, out_dtype, *args)[0]


def _forward(tile, head, out_dtype, x, expert_ids, gates, w_gate_up, w_down):
  experts, top_k = len(w_down), expert_ids.shape[1]
  table = routing.route(expert_ids, experts, tile, head=head)
  tiles = table.slot_row.reshape(-1, tile)
  heads = experts if head else 0

  def rows_of(tile_slots):
    return _take(x, tile_slots, divide=top_k)

  gate_up = _gate_up(rows_of(tiles[:heads]), w_gate_up[:heads])
  y_head = _down(_swiglu(gate_up), w_down[:heads])

  def tail_tile(i, y_tail):
    expert = table.tile_expert[i]
    rows = rows_of(tiles[i][None])
    y = _down(_swiglu(_gate_up(rows, _pick(w_gate_up, expert))),
              _pick(w_down, expert))  # fmt: skip
    return lax.dynamic_update_index_in_dim(y_tail, y[0], i - heads, 0)

  y_tail = _zeros((len(tiles) - heads, tile, x.shape[1]), x.dtype, like=x)
  y_tail = _tail_loop(heads, table, tail_tile, y_tail)
  y = _combine(table.row_slot, y_head, y_tail, gates)
  residuals = (x, gates, w_gate_up, w_down, table, gate_up)
  return y.astype(out_dtype), residuals


def _backward(tile, head, out_dtype, residuals, dy):
  del out_dtype
  x, gates, w_gate_up, w_down, table, gate_up = residuals
  experts, top_k = len(w_down), gates.shape[1]
  tiles = table.slot_row.reshape(-1, tile)
  heads = experts if head else 0
  dy = dy.astype(x.dtype)
  flat_gates = gates.reshape(-1)

  def backward_of(tile_slots, gate_up, w_gate_up, w_down):
    """Gradients of some tiles: d_rows, d_gates, d_w_gate_up, d_w_down."""
    rows = _take(x, tile_slots, divide=top_k)
    d_rows = _take(dy, tile_slots, divide=top_k)
    weight = _take(flat_gates, tile_slots)[..., None]
    if gate_up is None:
      gate_up = _gate_up(rows, w_gate_up)
    gate, up = _split(gate_up)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    act = silu * up
    d_act = _einsum("eth,eih->eti", d_rows, w_down, jnp.float32)
    d_gate = (d_act * act).sum(axis=-1)
    d_act = weight * d_act
    d_gate_up = jnp.stack(
      [d_act * up * (sigmoid + silu * (1 - sigmoid)), d_act * silu], axis=-2
    ).astype(x.dtype)
    act = (weight * act).astype(x.dtype)
    return (
      _einsum("etgi,ehgi->eth", d_gate_up, w_gate_up, x.dtype),
      d_gate,
      _einsum("eth,etgi->ehgi", rows, d_gate_up, jnp.float32),
      _einsum("eti,eth->eih", act, d_rows, jnp.float32),
    )

  dx_head, dg_head, dw_gate_up, dw_down = backward_of(
    tiles[:heads], gate_up, w_gate_up[:heads], w_down[:heads]
  )
  if not head:
    dw_gate_up = _zeros(w_gate_up.shape, jnp.float32, like=x)
    dw_down = _zeros(w_down.shape, jnp.float32, like=x)

  def tail_tile(i, carry):
    dx_tail, dg_tail, dw_gate_up, dw_down = carry
    expert = table.tile_expert[i]
    d_rows, d_gate, d_gate_up, d_down = backward_of(
      tiles[i][None], None, _pick(w_gate_up, expert), _pick(w_down, expert)
    )
    return (
      lax.dynamic_update_index_in_dim(dx_tail, d_rows[0], i - heads, 0),
      lax.dynamic_update_index_in_dim(dg_tail, d_gate[0], i - heads, 0),
      _add_at(dw_gate_up, expert, d_gate_up),
      _add_at(dw_down, expert, d_down),
    )

  tail = (len(tiles) - heads, tile)
  dx_tail = _zeros((*tail, x.shape[1]), x.dtype, like=x)
  dg_tail = _zeros(tail, jnp.float32, like=x)
  carry = (dx_tail, dg_tail, dw_gate_up, dw_down)
  dx_tail, dg_tail, dw_gate_up, dw_down = _tail_loop(
    heads, table, tail_tile, carry
  )
  dx = _combine(table.row_slot, dx_head, dx_tail)
  d_gates = _at_slots(table.row_slot, dg_head, dg_tail)
  return (
    dx.astype(x.dtype), None, d_gates,
    dw_gate_up.astype(w_gate_up.dtype), dw_down.astype(w_down.dtype),
  )  # fmt: skip


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


def _split(gate_up):
  gate_up = gate_up.astype(jnp.float32)
  return gate_up[..., 0, :], gate_up[..., 1, :]


def _swiglu(gate_up):
  gate, up = _split(gate_up)
  return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _take(array, index, divide=1):
  """array[index // divide], zeros where index is -1."""
  return array.at[index // divide].get(
    mode="fill", fill_value=0, wrap_negative_indices=False
  )


def _at_slots(slots, head, tail):
  """Reads slots from the head's and the tail's tiles; zeros where -1."""
  head, tail = (a.reshape(-1, *a.shape[2:]) for a in (head, tail))
  in_tail = jnp.where(slots >= len(head), slots - len(head), -1)
  in_head = jnp.where(slots < len(head), slots, -1)
  if not len(tail):
    return _take(head, in_head)
  if not len(head):
    return _take(tail, in_tail)
  is_tail = (slots >= len(head)).reshape(*slots.shape, *[1] * (head.ndim - 1))
  return jnp.where(is_tail, _take(tail, in_tail), _take(head, in_head))


def _combine(row_slot, head, tail, gates=None):
  """Sums each token's rows in k order, in float32, gates applied if given."""
  y = 0.0
  for k in range(row_slot.shape[1]):
    slots = row_slot[:, k]
    rows = _at_slots(slots, head, tail).astype(jnp.float32)
    if gates is not None:  # A gate that has no expert may be NaN.
      rows = jnp.where(slots >= 0, gates[:, k], 0.0)[:, None] * rows
    y += rows
  return y


def _pick(weights, expert):
  return lax.dynamic_slice_in_dim(weights, expert, 1)


def _add_at(total, expert, part):
  """total[expert] += part[0], as a slice: `.at[].add` would be a scatter."""
  part = lax.dynamic_slice_in_dim(total, expert, 1) + part
  return lax.dynamic_update_slice_in_dim(total, part, expert, 0)


def _zeros(shape, dtype, like):
  """Zeros that vary over the mesh axes that `like` varies over (shard_map)."""
  zeros = jnp.zeros(shape, dtype)
  varying = tuple(jax.typeof(like).manual_axis_type.varying)
  return lax.pcast(zeros, varying, to="varying") if varying else zeros
