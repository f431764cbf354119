"""The kernels of each implementation on a GPU: numerics and bits.

What is true of one implementation alone is tested beside it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import moe_ffn
from pallas_kernels.moe.mosaic import tiles
from tests.pallas_kernels.moe import cases

pytestmark = pytest.mark.gpu

T, H, I, E, K = 700, 512, 384, 16, 4  # noqa: E741


@pytest.fixture(params=["mosaic", "mosaic alone", "triton"])
def layer(request, monkeypatch):
  name, *alone = request.param.split()
  if alone:
    monkeypatch.setattr(tiles, "gathers_in_loads", lambda *_: False)
  call = functools.partial(moe_ffn, implementation=name)
  try:  # Shapes alone, to hear whether it can run here.
    jax.eval_shape(call, *inputs()[0])
  except ValueError as reason:
    pytest.skip(str(reason))
  return call


def inputs(skewed=True, dtype=jnp.bfloat16, tokens=T):
  routing = "skewed" if skewed else "out_of_range"
  return cases.routed(routing, (tokens, H, I, E, K), dtype)


def compiled(layer):
  """A new jitted layer with its gradients: nothing is shared between two."""

  @jax.jit
  def forward_backward(arguments, dy):
    x, ids, *rest = arguments
    y, pullback = jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *rest)
    return (y, *pullback(dy))

  return forward_backward


def bits(arrays):
  return [np.asarray(a).tobytes() for a in arrays]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens,skewed", [(T, True), (T, False), (1, False)])
def test_matches_float64(layer, tokens, skewed, dtype):
  arguments, dy = inputs(skewed, dtype, tokens)
  result = compiled(layer)(arguments, dy)
  expected = cases.oracle(arguments, dy)
  bound = 1e-2 if dtype == jnp.bfloat16 else 2e-3
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < bound, name


@pytest.mark.parametrize("tokens", [100, 20])
def test_few_rows_an_expert_clamped(layer, tokens):
  arguments, dy = inputs(tokens=tokens)
  layer = functools.partial(layer, clamp=1.5)
  result = compiled(layer)(arguments, dy)
  expected, below, above, without = (
    cases.oracle(arguments, dy, clamp=limit)
    # Half of bfloat16's spacing at 1.5 to either side.
    for limit in (1.5, 1.5 - 2**-8, 1.5 + 2**-8, math.inf)
  )
  for name, a, b, low, high, c in zip(
    cases.NAMES, result, expected, below, above, without, strict=True
  ):
    # bfloat16 may round a pre-activation across the limit: its gradient goes.
    crossed = max(cases.relative_error(end, b) for end in (low, high))
    assert cases.relative_error(a, b) < 6e-3 + crossed < 0.06, name
    assert cases.relative_error(a, c) > 0.1, name


@pytest.mark.parametrize("tokens", [100, T])
def test_gradients_add_up_in_float32(layer, tokens):
  (x, ids, gates, *weights), dy = inputs(tokens=tokens)
  totals = tuple(jnp.full(w.shape, 3, jnp.float32) for w in weights)

  @jax.jit
  def backward(weights, totals):
    def call(weights, totals):
      return layer(x, ids, gates, *weights, grad_totals=totals)

    return jax.vjp(call, weights, totals)[1](dy)

  d_weights, sums = backward(weights, totals)
  expected = cases.oracle((x, ids, gates, *weights), dy)[3:]
  for zero, total, gradient in zip(d_weights, sums, expected, strict=True):
    assert not zero.any() and total.dtype == jnp.float32
    assert cases.relative_error(total - 3, gradient) < 6e-3


def test_twenty_repeats_give_the_same_bits(layer):
  arguments, dy = inputs()
  call = compiled(layer)
  first = bits(call(arguments, dy))
  for _ in range(20):
    assert bits(call(arguments, dy)) == first


def test_a_row_never_depends_on_its_neighbours(layer):
  (x, ids, gates, *weights), _ = inputs()
  call, rng, rows = jax.jit(layer), np.random.default_rng(1), set()
  for popular in range(4):
    place = int(rng.integers(T))
    others = np.where(rng.random((T, K)) < 0.7, popular, ids[::-1])
    others[place] = [5, 0, 2, 5]
    y = call(
      jnp.roll(x, popular, axis=0).at[place].set(x[0]),
      jnp.asarray(others, jnp.int32),
      gates.at[place].set(0.25),
      *weights,
    )
    rows.add(np.asarray(y[place]).tobytes())
  assert len(rows) == 1


def test_what_skipped_tokens_hold_reaches_nobody(layer):
  (x, ids, gates, *weights), dy = inputs()
  skipped = jnp.arange(T)[:, None] % 3 == 0  # The first, which padding reads.
  ids = jnp.where(skipped, -1, ids)
  results = []
  for poison in (0.0, jnp.nan):
    poisoned = [jnp.where(skipped, poison, a) for a in (x, gates, dy)]
    x_, gates_, dy_ = poisoned
    results.append(bits(compiled(layer)((x_, ids, gates_, *weights), dy_)))
  assert results[0] == results[1]


def test_checkpoint_in_a_scan_over_layers(layer):
  (x, ids, gates, *weights), dy = inputs()
  expected = compiled(layer)((x, ids, gates, *weights), dy)

  @jax.jit
  def scanned(x, *weights):
    def body(x, weights):
      return jax.checkpoint(layer)(x, ids, gates, *weights), None

    def apply(x, *weights):
      return jax.lax.scan(body, x, [w[None] for w in weights])[0]

    y, pullback = jax.vjp(apply, x, *weights)
    return (y, *pullback(dy))

  result = scanned(x, *weights)
  assert bits(result) == bits(expected[:2] + expected[3:])


def test_under_vmap(layer):
  (x, ids, gates, *weights), _ = inputs()
  halves = [a.reshape(2, -1, a.shape[1]) for a in (x, ids, gates)]
  result = jax.jit(jax.vmap(layer, (0, 0, 0, None, None)))(*halves, *weights)
  for n in (0, 1):
    expected = jax.jit(layer)(*(a[n] for a in halves), *weights)
    assert cases.relative_error(result[n], expected) < 1e-3


def test_experts_over_the_ranks_of_a_mesh(layer):
  arguments, dy = inputs()
  mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
  across = jax.shard_map(
    functools.partial(layer, axis_name="x"),
    mesh=mesh,
    in_specs=(jax.P("x"),) * 5,
    out_specs=jax.P("x"),
  )
  assert bits(compiled(across)(arguments, dy)) == bits(
    compiled(layer)(arguments, dy)
  )
