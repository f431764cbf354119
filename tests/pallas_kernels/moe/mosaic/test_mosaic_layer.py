"""The whole Hopper layer in the GPU interpreter, against float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import layout, moe_ffn, mosaic
from pallas_kernels.moe.mosaic import tiles
from tests.pallas_kernels.moe import cases
from tests.pallas_kernels.moe.mosaic import interpreter

TILE = 128
T, H, I, E, K = 40, 128, 64, 3, 2  # noqa: E741


def inputs(routing, I=I):  # noqa: E741
  return cases.routed(routing, (T, H, I, E, K), jnp.bfloat16)


def forward_backward(arguments, dy, **options):
  x, ids, *rest = arguments
  y, pullback = jax.vjp(
    lambda x, *rest: mosaic.apply(x, ids, *rest, **options), x, *rest
  )
  return (y, *pullback(dy))


@pytest.mark.parametrize(
  "routing", ["random", "single_expert", "out_of_range", "none_here", "one_row"]
)
def test_matches_float64(routing, monkeypatch):
  monkeypatch.setattr(tiles, "sm_count", lambda: 2)
  arguments, dy = inputs(routing)
  result = interpreter.run(forward_backward, arguments, dy)
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert a.dtype == (jnp.float32 if name == "d_gates" else jnp.bfloat16)
    assert cases.relative_error(a, b) < 1e-2, name


def test_few_rows_an_expert_clamped(monkeypatch):
  monkeypatch.setattr(tiles, "sm_count", lambda: 2)
  assert tiles.tile_rows(T * K, E, 128, H) == 64
  arguments, dy = inputs("out_of_range", I=128)
  layer = functools.partial(forward_backward, clamp=1.5)
  result = interpreter.run(layer, arguments, dy)
  expected = cases.oracle(arguments, dy, clamp=1.5)
  without = cases.oracle(arguments, dy)
  for name, a, b, c in zip(cases.NAMES, result, expected, without, strict=True):
    # Rounding takes a few pre-activations across the limit.
    assert cases.relative_error(a, b) < 5e-2, name
    assert cases.relative_error(a, c) > 0.1, name


def test_gradients_add_up_in_float32(monkeypatch):
  monkeypatch.setattr(tiles, "sm_count", lambda: 2)
  (x, ids, gates, *weights), dy = inputs("random")
  totals = tuple(jnp.full(w.shape, 3, jnp.float32) for w in weights)

  def backward(weights, totals):
    def layer(weights, totals):
      return mosaic.apply(x, ids, gates, *weights, grad_totals=totals)

    return jax.vjp(layer, weights, totals)[1](dy)

  d_weights, sums = interpreter.run(backward, weights, totals)
  expected = cases.oracle((x, ids, gates, *weights), dy)[3:]
  for zero, total, gradient in zip(d_weights, sums, expected, strict=True):
    assert not zero.any() and total.dtype == jnp.float32
    assert cases.relative_error(total - 3, gradient) < 6e-3


def test_what_skipped_tokens_hold_reaches_nobody(monkeypatch):
  results = []
  for sms, poison in ((2, 0.0), (3, jnp.nan)):
    monkeypatch.setattr(tiles, "sm_count", lambda sms=sms: sms)
    (x, ids, gates, *weights), dy = inputs("random")
    skipped = jnp.arange(T)[:, None] % 3 == 0
    ids = jnp.where(skipped, -1, ids)
    x, gates, dy = (jnp.where(skipped, poison, a) for a in (x, gates, dy))
    result = interpreter.run(forward_backward, (x, ids, gates, *weights), dy)
    results.append([np.asarray(a).tobytes() for a in result])
  assert results[0] == results[1]


def test_layout_aligns_groups():
  rng = np.random.default_rng(0)
  ids = rng.integers(-1, 5, (200, 3)).astype(np.int32)
  ids[ids == 2] = 4
  table = jax.jit(layout.build, static_argnums=1)(jnp.asarray(ids), 5)
  start, size = np.asarray(table.start), np.asarray(table.size)
  assert (start % TILE == 0).all() and size[2] == 0
  assert (np.diff(size[np.asarray(table.order)]) <= 0).all()
  for e in range(5):
    rows = np.asarray(table.slot_row)[start[e] : start[e] + size[e]]
    assert (rows == np.flatnonzero(ids == e)).all()
    tile = start[e] // TILE
    used = range(tile, tile + -(-size[e] // TILE))
    assert all(table.tile_expert[t] == e for t in used)
  assert int(table.num_tiles[0]) == sum(-(-size // TILE))
  assert (np.asarray(table.row_slot) < 0).sum() == (ids < 0).sum()


def test_tiles_of_real_shapes_divide_them_and_keep_the_pipeline_deep():
  for width, inner in [
    (4096, 1024), (4096, 256), (2048, 768), (7168, 2048), (4096, 512)
  ]:  # fmt: skip
    for choice, columns in [
      (tiles.gate_up(width, inner), inner),
      (tiles.matmul(inner, width), width),
      (tiles.swiglu_gradient(width, inner), inner),
      (tiles.weight_gradient(width, 2 * inner), 2 * inner),
    ]:
      assert columns % choice.columns == 0
      assert choice.columns >= 128 and choice.stages >= 3


@pytest.mark.parametrize(
  "H,I,dtype,message",
  [
    (128, 128, jnp.float32, "bfloat16 or float16, not in float32"),
    (128, 72, jnp.bfloat16, "H = 128 and I = 72 are not both multiples of 64"),
    (192, 64, jnp.bfloat16, "H = 192 and I = 64 are not both multiples of 64"),
    pytest.param(
      128, 128, jnp.bfloat16, "needs a Hopper GPU (sm_90), not cpu",
      marks=pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="there is a GPU"
      ),
    ),
  ],
)  # fmt: skip
def test_says_why_it_cannot_run(H, I, dtype, message):  # noqa: E741
  arguments = (
    jnp.zeros((2, H), dtype),
    jnp.zeros((2, 1), jnp.int32),
    jnp.zeros((2, 1), jnp.float32),
    jnp.zeros((1, H, 2, I), dtype),
    jnp.zeros((1, I, H), dtype),
  )
  with pytest.raises(ValueError, match=re.escape(message)):
    moe_ffn(*arguments, implementation="mosaic")


def test_lowers_in_shard_map_and_vmap(monkeypatch):
  monkeypatch.setattr(mosaic, "cannot_run", lambda **_: "")
  layer = functools.partial(moe_ffn, implementation="mosaic")
  arguments, _ = inputs("random")
  mesh = jax.sharding.AbstractMesh(
    (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows, experts = jax.P("x"), jax.P("x")
  sharded = jax.shard_map(
    functools.partial(layer, axis_name="x"),
    mesh=mesh,
    in_specs=(rows, rows, rows, experts, experts),
    out_specs=rows,
  )

  def gradients(x, ids, gates, *weights):
    def loss(x, gates, *weights):
      return sharded(x, ids, gates, *weights).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2, 3))(x, gates, *weights)

  def mapped(x, ids, gates, *weights):
    halves = (a.reshape(2, -1, a.shape[1]) for a in (x, ids, gates))
    return jax.vmap(layer, (0, 0, 0, None, None))(*halves, *weights)

  x, ids, gates, *weights = arguments
  two_each = [jnp.concatenate([w, w[:1]]) for w in weights]
  for function, w in ((gradients, two_each), (mapped, weights)):
    traced = jax.jit(function).trace(x, ids, gates, *w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
