"""The Hopper layer on a Hopper GPU: numerics and bits at sizes that matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import moe_ffn, mosaic
from pallas_kernels.moe.mosaic import tiles
from pallas_kernels.moe.mosaic.gather import Movers
from tests.pallas_kernels.moe import cases

pytestmark = pytest.mark.gpu

T, H, I, E, K = 700, 512, 384, 16, 4  # noqa: E741
LAYER = functools.partial(moe_ffn, implementation="mosaic")


def inputs(skewed=True, dtype=jnp.bfloat16, tokens=T):
  rng = np.random.default_rng(0)

  def normal(*shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), dtype)

  ids = rng.integers(-1, E, (tokens, K))
  if skewed:  # One expert gets half of the rows, some get none.
    ids = np.minimum(rng.geometric(0.5, (tokens, K)) - 1, E - 3)
  return (
    normal(tokens, H),
    jnp.asarray(ids, jnp.int32),
    jnp.asarray(rng.random((tokens, K)), jnp.float32),
    normal(E, H, 2, I, scale=H**-0.5),
    normal(E, I, H, scale=I**-0.5),
  ), normal(tokens, H)


def compiled(layer=LAYER):
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
def test_matches_float64(tokens, skewed, dtype):
  arguments, dy = inputs(skewed, dtype, tokens)
  result = compiled()(arguments, dy)
  expected = cases.oracle(arguments, dy)
  bound = 1e-2 if dtype == jnp.bfloat16 else 2e-3
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < bound, name


def test_few_rows_an_expert_clamped():
  tokens = 100
  assert tiles.tile_rows(tokens * K, E, I, H) == 64
  arguments, dy = inputs(tokens=tokens)
  layer = functools.partial(LAYER, clamp=1.5)
  result = compiled(layer)(arguments, dy)
  expected = cases.oracle(arguments, dy, clamp=1.5)
  without = cases.oracle(arguments, dy)
  for name, a, b, c in zip(cases.NAMES, result, expected, without, strict=True):
    # Rounding takes a few pre-activations across the limit.
    assert cases.relative_error(a, b) < 5e-2, name
    assert cases.relative_error(a, c) > 0.1, name


@pytest.mark.parametrize("tokens", [100, T])
def test_gradients_add_up_in_float32(tokens):
  (x, ids, gates, *weights), dy = inputs(tokens=tokens)
  totals = tuple(jnp.full(w.shape, 3, jnp.float32) for w in weights)

  @jax.jit
  def backward(weights, totals):
    def layer(weights, totals):
      return LAYER(x, ids, gates, *weights, grad_totals=totals)

    return jax.vjp(layer, weights, totals)[1](dy)

  d_weights, sums = backward(weights, totals)
  expected = cases.oracle((x, ids, gates, *weights), dy)[3:]
  for zero, total, gradient in zip(d_weights, sums, expected, strict=True):
    assert not zero.any() and total.dtype == jnp.float32
    assert cases.relative_error(total - 3, gradient) < 6e-3


@pytest.mark.parametrize("tokens", [100, T, 8 * T])
def test_gathering_beside_multiplications_changes_no_bit(tokens):
  arguments, dy = inputs(tokens=tokens)
  expected = bits(compiled()(arguments, dy))
  for movers in (Movers(12, 2), Movers(5, 32)):
    layer = functools.partial(mosaic.apply, overlap=movers)
    call = compiled(layer)
    for _ in range(5):
      assert bits(call(arguments, dy)) == expected


def test_twenty_repeats_and_other_sm_counts_give_the_same_bits(monkeypatch):
  arguments, dy = inputs()
  call = compiled()
  first = bits(call(arguments, dy))
  for _ in range(20):
    assert bits(call(arguments, dy)) == first
  for sms in (1, 17, 100):
    monkeypatch.setattr(tiles, "sm_count", lambda sms=sms: sms)
    assert bits(compiled()(arguments, dy)) == first


def test_a_row_never_depends_on_its_neighbours():
  (x, ids, gates, *weights), _ = inputs()
  layer, rng, rows = jax.jit(LAYER), np.random.default_rng(1), set()
  for popular in range(4):
    place = int(rng.integers(T))
    others = np.where(rng.random((T, K)) < 0.7, popular, ids[::-1])
    others[place] = [5, 0, 2, 5]
    y = layer(
      jnp.roll(x, popular, axis=0).at[place].set(x[0]),
      jnp.asarray(others, jnp.int32),
      gates.at[place].set(0.25),
      *weights,
    )
    rows.add(np.asarray(y[place]).tobytes())
  assert len(rows) == 1


def test_what_skipped_tokens_hold_reaches_nobody():
  (x, ids, gates, *weights), dy = inputs()
  skipped = jnp.arange(T)[:, None] % 3 == 1
  ids = jnp.where(skipped, -1, ids)
  results = []
  for poison in (0.0, jnp.nan):
    poisoned = [jnp.where(skipped, poison, a) for a in (x, gates, dy)]
    x_, gates_, dy_ = poisoned
    results.append(bits(compiled()((x_, ids, gates_, *weights), dy_)))
  assert results[0] == results[1]


def test_checkpoint_in_a_scan_over_layers():
  (x, ids, gates, *weights), dy = inputs()
  expected = compiled()((x, ids, gates, *weights), dy)

  @jax.jit
  def scanned(x, *weights):
    def layer(x, weights):
      return jax.checkpoint(LAYER)(x, ids, gates, *weights), None

    def apply(x, *weights):
      return jax.lax.scan(layer, x, [w[None] for w in weights])[0]

    y, pullback = jax.vjp(apply, x, *weights)
    return (y, *pullback(dy))

  result = scanned(x, *weights)
  assert bits(result) == bits(expected[:2] + expected[3:])
