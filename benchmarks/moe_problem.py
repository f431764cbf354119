"""One MoE layer's arrays, and its stages, ready to be called and checked.

The inputs of a stage are random, not another kernel's results, so that each can
be measured while others are wrong. Rows that belong to no token hold NaN, or
zero where a kernel asks for that.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import xla_moe
from pallas_kernels.moe import layout, movement
from pallas_kernels.moe.mosaic import gather, tiles
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient

SAMPLES = 16
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage of the layer.

  Attributes:
    call: runs it on the GPU.
    flops: of it, without padding.
    bytes: that it must read and write.
    error: from its result to a relative error.
    defined: which rows of its result are defined, or None for all.
    chosen: the tiles, as `tiles.Tiles` without the number of SMs.
    key: of these tiles in the table.
  """

  call: Callable[[], Any]
  flops: int
  bytes: int
  error: Callable[[Any], float]
  defined: Any = None
  chosen: dict | None = None
  key: str = ""


class Problem:
  """The arrays of one layer. Those of rows are made when first asked for."""

  def __init__(self, shape, routing, tile):
    T, H, I, E, K = shape  # noqa: E741
    self.shape = shape
    self.tile = tile or tiles.tile_rows(T * K, E, I, H)
    (self.x, self.ids, self.gates, self.w_gate_up, self.w_down), self.dy = (
      xla_moe.make_inputs(shape, routing, jnp.bfloat16)
    )
    self.build = jax.jit(
      functools.partial(layout.build, num_experts=E, tile=self.tile)
    )
    self.table = self.build(self.ids)
    self.used = self.table.tile_expert, self.table.num_tiles
    self.groups = self.table.start, self.table.size, self.table.order
    self.token = self.table.token
    self.real = self.token >= 0
    self.slots = len(self.token)
    rng = np.random.default_rng(1)
    self.sample = rng.choice(np.flatnonzero(np.asarray(self.real)), SAMPLES)
    expert = np.repeat(np.asarray(self.table.tile_expert), self.tile)
    self.sample_expert = expert[self.sample]

  @functools.cached_property
  def rows(self):
    """Dispatched tokens, [slots, H]."""
    return self._poisoned(movement.take(self.x, self.token))

  @functools.cached_property
  def d_rows(self):
    """Dispatched output gradients, [slots, H]."""
    return self._poisoned(movement.take(self.dy, self.token))

  @functools.cached_property
  def pre(self):
    """Gate and up pre-activations, [slots, 2 I]."""
    return self._normal(1, 2 * self.shape[2])

  @functools.cached_property
  def d_pre(self):
    """Their gradients, [slots, 2 I]."""
    return self._normal(2, 2 * self.shape[2])

  @functools.cached_property
  def act(self):
    """Activations, [slots, I]."""
    return self._normal(3, self.shape[2])

  @functools.cached_property
  def out(self):
    """Expert outputs, [slots, H]."""
    return self._normal(4, self.shape[1])

  @functools.cached_property
  def weight(self):
    """The gate of each slot, [slots]."""
    return movement.take(self.gates.reshape(-1), self.table.slot_row)

  @property
  def flat(self):
    """Gate and up weights, [E, H, 2 I]."""
    _, H, I, E, _ = self.shape  # noqa: E741
    return self.w_gate_up.reshape(E, H, 2 * I)

  def _normal(self, seed, width):
    rows = jax.random.normal(
      jax.random.key(seed), (self.slots, width), jnp.bfloat16
    )
    return self._poisoned(rows)

  def _poisoned(self, rows):
    return _poison(rows, self.real, jnp.nan)


@jax.jit
def _poison(rows, real, padding):
  return jnp.where(real[:, None], rows, padding)


@functools.lru_cache(1)
def make(shape, routing, tile):
  """Returns the problem, kept for the jobs that follow."""
  return Problem(shape, routing, tile)


def _tables(p, _):
  T, _, _, _, K = p.shape

  def error(table):
    row, slot = np.asarray(table.slot_row), np.asarray(table.row_slot)
    wrong = row[slot.reshape(-1)] != np.arange(T * K)
    return float(wrong.mean())

  size = 4 * (4 * T * K + 2 * p.slots)
  return Stage(lambda: p.build(p.ids), 0, size, error)


def _gather(source, p, _):
  T, H, _, _, K = p.shape
  array = getattr(p, source)

  def error(rows):
    return relative(rows[p.sample], array[p.token[p.sample]])

  call = functools.partial(jax.jit(movement.take), array, p.token)
  return Stage(call, 0, 4 * T * K * H, error)


def _gather_by_copies(p, _):
  T, H, _, _, K = p.shape

  def error(rows):
    return relative(rows[p.sample], p.x[p.token[p.sample]])

  kernel = jax.jit(
    functools.partial(gather.rows, tile_rows=p.tile, num_sms=tiles.sm_count())
  )
  return Stage(
    _call(kernel, p.x, p.token, p.table.num_tiles),
    0,
    4 * T * K * H,
    error,
    p.real,
  )


def _combine(p, _):
  T, H, _, _, K = p.shape

  @jax.jit
  def combine(row_slot, out, gates):
    y = movement.combine(row_slot, out[None], out[None][:0], gates)
    return y.astype(out.dtype)

  def error(y):
    tokens = np.random.default_rng(1).integers(0, T, SAMPLES)
    rows = p.out[p.table.row_slot[tokens]].astype(jnp.float32)
    return relative(y[tokens], (p.gates[tokens][..., None] * rows).sum(1))

  call = functools.partial(combine, p.table.row_slot, p.out, p.gates)
  return Stage(call, 0, 2 * (T * K + T) * H, error)


def _gate_up(p, changes, gathers=False):
  T, H, I, E, K = p.shape  # noqa: E741

  def error(result):
    act, pre = (a[p.sample] for a in result)
    expected = product("mh,mhi->mi", p.rows[p.sample], p.flat[p.sample_expert])
    gate, up = jnp.split(pre.astype(jnp.float32), 2, axis=1)
    return max(relative(pre, expected), relative(act, jax.nn.silu(gate) * up))

  size = 2 * (T * K * (H + 3 * I) + 2 * E * H * I)
  return _kernel(
    p, changes, tiles.gate_up, (H, I), gate_up,
    (p.x, *p.used, p.w_gate_up, p.token) if gathers
    else (p.rows, *p.used, p.w_gate_up),
    gathers=gathers,
    flops=4 * T * K * H * I, bytes=size, error=error,
  )  # fmt: skip


def _down(p, changes):
  T, H, I, E, K = p.shape  # noqa: E741

  def error(out):
    expected = product("mi,mih->mh", p.act[p.sample], p.w_down[p.sample_expert])
    return relative(out[p.sample], expected)

  return _kernel(
    p, changes, tiles.matmul, (I, H),
    functools.partial(matmul, transposed=False),
    (p.act, *p.used, p.w_down),
    flops=2 * T * K * H * I,
    bytes=2 * (T * K * (H + I) + E * H * I),
    error=error,
  )  # fmt: skip


def _d_rows(p, changes, gathers=False):
  T, H, I, E, K = p.shape  # noqa: E741

  def error(result):
    d_rows, *rows = result if gathers else (result,)
    if rows and relative(rows[0][p.sample], p.x[p.token[p.sample]]):
      return float("nan")  # A copy is exact or wrong.
    d_pre, w = p.d_pre[p.sample], p.flat[p.sample_expert]
    return relative(d_rows[p.sample], product("mi,mhi->mh", d_pre, w))

  return _kernel(
    p, changes, tiles.matmul, (2 * I, H),
    functools.partial(matmul, transposed=True),
    (p.d_pre, *p.used, p.flat, *((p.x, p.token) if gathers else ())),
    gathers=gathers,
    flops=4 * T * K * H * I,
    bytes=2 * (T * K * (H + 2 * I) + 2 * E * H * I),
    error=error,
  )  # fmt: skip


def _swiglu_gradient(p, changes, gathers=False):
  T, H, I, E, K = p.shape  # noqa: E741

  def error(result):
    d_pre, act, products, *rows = result
    if rows and relative(rows[0][p.sample], p.d_rows[p.sample]):
      return float("nan")  # A copy is exact or wrong.
    w = p.w_down[p.sample_expert]
    d_act = product("mh,mih->mi", p.d_rows[p.sample], w)
    gate, up = jnp.split(p.pre[p.sample].astype(jnp.float32), 2, axis=1)
    weight = p.weight[p.sample][:, None]
    a, pullback = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    expected = jnp.concatenate(pullback(weight * d_act), axis=1)
    return max(
      relative(d_pre[p.sample], expected),
      relative(act[p.sample], weight * a),
      relative(products.sum(0)[p.sample], (d_act * a).sum(1)),
    )

  return _kernel(
    p, changes, tiles.swiglu_gradient, (H, I), swiglu_gradient,
    (p.dy, p.weight, p.pre, *p.used, p.w_down, p.token) if gathers
    else (p.d_rows, p.weight, p.pre, *p.used, p.w_down),
    gathers=gathers,
    flops=2 * T * K * H * I,
    bytes=2 * (T * K * (H + 5 * I) + E * H * I),
    error=error,
  )  # fmt: skip


def _weight_gradient(left, right, p, changes):
  T, _, _, E, K = p.shape
  x, d = (_poison(getattr(p, a), p.real, 0) for a in (left, right))
  height, width = x.shape[1], d.shape[1]

  def error(gradient):
    start, size = np.asarray(p.table.start), np.asarray(p.table.size)
    fewest = np.where(size > 0, size, size.max()).argmin()
    return max(
      relative(
        gradient[e],
        product(
          "ma,mb->ab",
          x[start[e] : start[e] + size[e]],
          d[start[e] : start[e] + size[e]],
        ),
      )
      for e in {int(size.argmax()), int(fewest)}
    )

  changes = {k: v for k, v in changes.items() if k != "rows"}
  return _kernel(
    p, changes, tiles.weight_gradient, (height, width),
    functools.partial(weight_gradient, out_dtype=x.dtype),
    (x, d, *p.groups),
    flops=2 * T * K * height * width,
    bytes=2 * (T * K * (height + width) + E * height * width),
    error=error,
  )  # fmt: skip


# How rows are gathered beside a multiplication, unless a job says otherwise.
MOVERS = {"movers": 12, "minibatch": 32}


def _kernel(
  p, changes, choose, dimensions, kernel, operands, *, gathers=False, **facts
):
  changes = {k: v for k, v in changes.items() if k != "rows"}
  if gathers:
    blocks, minibatch = (changes.pop(k, v) for k, v in MOVERS.items())
    kernel = functools.partial(kernel, movers=gather.Movers(blocks, minibatch))
  of_rows = choose is not tiles.weight_gradient
  choice = choose(*dimensions, p.tile) if of_rows else choose(*dimensions)
  choice = dataclasses.replace(choice, **changes)
  if dimensions[1] % choice.columns:
    raise ValueError(
      f"{dimensions[1]} columns are not a multiple of {choice.columns}."
    )
  chosen = choice.arguments()
  jitted = jax.jit(functools.partial(kernel, **chosen))
  del chosen["num_sms"]
  rows = p.tile if of_rows else tiles.gradient_rows(dimensions[0])
  return Stage(
    _call(jitted, *operands),
    defined=p.real if of_rows else None,
    chosen=chosen,
    # What gathers too is no guide to the tiles of a kernel that doesn't.
    key="" if gathers else tiles.key(choose.__name__, *dimensions, rows=rows),
    **facts,
  )


def _call(function, *operands):
  def call():
    with interpreted():
      return function(*operands)

  return call


def interpreted():
  """On a CPU, a context in which kernels are interpreted."""
  if jax.default_backend() == "cpu":
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
  return contextlib.nullcontext()


def product(spec, a, b):
  """An einsum in float32."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.einsum(spec, a, b, precision=HIGHEST)


def relative(result, expected):
  """||result - expected|| / ||expected||."""
  return xla_moe.relative_error([result], [expected])


def same_bits(a, b, defined=None):
  """Whether two results are equal bit for bit, where they are defined."""
  return bool(_same_bits(jax.tree.leaves(a), jax.tree.leaves(b), defined))


@jax.jit
def _same_bits(a, b, defined):
  kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

  def equal(a, b):
    a, b = (
      jax.lax.bitcast_convert_type(v, kinds[v.dtype.itemsize]) for v in (a, b)
    )
    if defined is None:
      return (a == b).all()
    axis = a.shape.index(len(defined))
    shape = [-1 if n == axis else 1 for n in range(a.ndim)]
    return ((a == b) | ~defined.reshape(shape)).all()

  return jnp.stack([equal(*pair) for pair in zip(a, b, strict=True)]).all()


STAGES = {
  "tables": _tables,
  "gather": functools.partial(_gather, "x"),
  "gate_up": _gate_up,
  "down": _down,
  "combine": _combine,
  "gather_dy": functools.partial(_gather, "dy"),
  "swiglu_gradient": _swiglu_gradient,
  "d_rows": _d_rows,
  "gather_by_copies": _gather_by_copies,
  "gather+gate_up": functools.partial(_gate_up, gathers=True),
  "gather+swiglu": functools.partial(_swiglu_gradient, gathers=True),
  "gather+d_rows": functools.partial(_d_rows, gathers=True),
  "d_w_down": functools.partial(_weight_gradient, "act", "d_rows"),
  "d_w_gate_up": functools.partial(_weight_gradient, "rows", "d_pre"),
}
