"""Numerics, determinism and errors of moe_ffn, whatever implements it."""

import functools
import importlib.util
import inspect
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import api, moe_ffn, mosaic, target, triton, xla
from tests.pallas_kernels.moe import cases

PORTABLE = ("xla", "reference")


@functools.partial(jax.jit, static_argnums=0)
def forward_backward(layer, arguments, dy):
  x, ids, *rest = arguments
  y, pullback = jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *rest)
  return (y, *pullback(dy.astype(y.dtype)))


def bits(arrays):
  return [np.asarray(a).tobytes() for a in arrays]


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("implementation", PORTABLE)
def test_matches_float64(implementation, routing):
  layer = functools.partial(moe_ffn, implementation=implementation)
  arguments, dy = cases.make(routing)
  result = forward_backward(layer, arguments, dy)
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < 2e-6, name


@pytest.mark.parametrize("implementation", PORTABLE)
def test_clamp(implementation):
  layer = functools.partial(moe_ffn, implementation=implementation, clamp=0.5)
  arguments, dy = cases.make("skewed")
  result = forward_backward(layer, arguments, dy)
  expected = cases.oracle(arguments, dy, clamp=0.5)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < 2e-6, name
  assert cases.relative_error(result[0], cases.oracle(arguments, dy)[0]) > 0.1


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_add_up_in_float32(dtype, implementation):
  (x, ids, gates, *weights), dy = cases.make("skewed", dtype)
  totals = tuple(jnp.full(w.shape, 3, jnp.float32) for w in weights)

  @jax.jit
  def backward(gates, weights, totals):
    def layer(gates, weights, totals):
      return moe_ffn(
        x, ids, gates, *weights,
        implementation=implementation, grad_totals=totals,
      )  # fmt: skip

    return jax.vjp(layer, gates, weights, totals)[1](dy)

  d_gates, d_weights, sums = backward(gates, weights, totals)
  arguments = (x, ids, gates, *weights)
  expected = cases.oracle(arguments, dy)
  assert cases.relative_error(d_gates, expected[2]) < 1e-2
  bound = 2e-6 if dtype == jnp.float32 else 5e-3
  for zero, total, gradient in zip(d_weights, sums, expected[3:], strict=True):
    assert not zero.any() and total.dtype == jnp.float32
    assert cases.relative_error(total - 3, gradient) < bound


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
  arguments, dy = cases.make("skewed", dtype)
  result = forward_backward(moe_ffn, arguments, dy)
  dtypes = [dtype, dtype, jnp.float32, dtype, dtype]
  assert [a.dtype for a in result] == dtypes
  bound = 1e-2 if dtype == jnp.bfloat16 else 1e-3
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < bound, name


def test_out_dtype_keeps_the_sum_unrounded():
  arguments, _ = cases.make("skewed", jnp.bfloat16)
  y = jax.jit(functools.partial(moe_ffn, out_dtype=jnp.float32))(*arguments)
  assert y.dtype == jnp.float32
  assert (y != y.astype(jnp.bfloat16).astype(jnp.float32)).any()


@pytest.mark.parametrize("implementation", PORTABLE)
def test_skipped_tokens_are_zero_and_leak_nothing(implementation):
  layer = functools.partial(moe_ffn, implementation=implementation)
  (x, ids, gates, *weights), dy = cases.make("skewed")
  skipped = jnp.arange(len(x)) % 3 == 1
  ids = jnp.where(skipped[:, None], jnp.array([[-1, 8, 1 << 30]]), ids)
  clean = forward_backward(layer, (x, ids, gates, *weights), dy)
  x, gates, dy = (
    jnp.where(skipped[:, None], jnp.nan, a) for a in (x, gates, dy)
  )
  poisoned = forward_backward(layer, (x, ids, gates, *weights), dy)
  for a in clean[:3]:
    assert (a[skipped] == 0).all()
  assert bits(clean) == bits(poisoned)


def test_repeats_bit_for_bit():
  arguments, dy = cases.make("skewed")
  first = bits(forward_backward(moe_ffn, arguments, dy))
  for _ in range(3):
    assert bits(forward_backward(moe_ffn, arguments, dy)) == first


@pytest.mark.parametrize("T,H,I", [(96, 16, 8), (512, 192, 96)])
def test_a_row_never_depends_on_its_neighbours(T, H, I):  # noqa: E741
  rng = np.random.default_rng(0)
  E, K = 8, 3
  weights = (
    rng.normal(size=(E, H, 2, I)).astype(np.float32),
    rng.normal(size=(E, I, H)).astype(np.float32),
  )
  layer = jax.jit(moe_ffn)
  row = rng.normal(size=H).astype(np.float32)
  rows = set()
  for popular in range(E):  # The kept row is in the head, then in the tail.
    x = rng.normal(size=(T, H)).astype(np.float32)
    ids = np.where(
      rng.random((T, K)) < 0.7, popular, rng.integers(0, E, (T, K))
    )
    gates = rng.random((T, K)).astype(np.float32)
    place = rng.integers(T)
    x[place], ids[place], gates[place] = row, [5, 0, 2], 0.25
    y = layer(x, ids.astype(np.int32), gates, *weights)
    rows.add(np.asarray(y[place]).tobytes())
  assert len(rows) == 1


def test_no_scatter_forward_or_backward():
  arguments, dy = cases.make("skewed")
  program = forward_backward.lower(moe_ffn, arguments, dy).as_text()
  assert "stablehlo.while" in program  # The tail's loop is there.
  assert "stablehlo.scatter" not in program


def test_saves_only_inputs_tables_and_pre_activations():
  (x, ids, *rest), _ = cases.make("balanced")
  E, _, _, I = rest[1].shape  # noqa: E741
  tile = xla.tile_rows(ids.size, E)
  _, pullback = jax.eval_shape(
    lambda x, *rest: jax.vjp(lambda *a: moe_ffn(a[0], ids, *a[1:]), x, *rest),
    x,
    *rest,
  )
  saved = [a for a in jax.tree.leaves(pullback) if a.dtype == jnp.float32]
  allowed = [x.shape, *(a.shape for a in rest), (E, tile, 2, I)]
  assert sorted(a.shape for a in saved) == sorted(allowed)


def test_transformations():
  (x, ids, gates, *weights), dy = cases.make("out_of_range")
  expected = forward_backward(moe_ffn, (x, ids, gates, *weights), dy)

  def mapped(x, ids, gates, *weights):
    halves = (a.reshape(2, -1, a.shape[1]) for a in (x, ids, gates))
    y = jax.vmap(moe_ffn, (0, 0, 0, None, None))(*halves, *weights)
    return y.reshape(x.shape)

  def scanned(x, ids, gates, *weights):
    stacked = jax.tree.map(lambda w: w[None], weights)

    def layer(x, weights):
      return jax.checkpoint(moe_ffn)(x, ids, gates, *weights), None

    return jax.lax.scan(layer, x, stacked)[0]

  for layer in (mapped, scanned):
    result = forward_backward(layer, (x, ids, gates, *weights), dy)
    for name, a, b in zip(cases.NAMES, result, expected, strict=True):
      assert cases.relative_error(a, b) < 2e-6, (layer, name)


class Fake:
  """An implementation that can or can't run here; it returns its name."""

  def __init__(self, name, reason):
    self.name, self.reason = name, reason

  def cannot_run(self, **_):
    return self.reason

  def apply(self, *_, **__):
    return self.name


def test_takes_the_fastest_that_can_run_and_says_once_why(monkeypatch, caplog):
  reasons = {"mosaic": "it is another chip", "triton": "", "xla": ""}
  monkeypatch.setattr(api, "_load", lambda name: Fake(name, reasons[name]))
  api._say_once.cache_clear()
  with caplog.at_level(logging.INFO):
    for name in ("triton", "triton", "xla"):
      reasons["triton"] = "" if name == "triton" else "it is not installed"
      assert api._pick(None)() == name
  assert [record.getMessage() for record in caplog.records] == [
    "moe_ffn goes without 'mosaic', since it is another chip.",
    "moe_ffn goes without 'triton', since it is not installed.",
  ]
  reasons["mosaic"] = ""
  assert api._pick(None)() == "mosaic"


@pytest.mark.parametrize(
  ("kind", "capability", "mosaic_runs", "triton_runs"),
  [
    ("H200", "9.0", True, True),
    ("A100", "8.0", False, True),
    ("B200", "10.0", False, True),
    ("V100", "7.5", False, False),
    ("MI300", "gfx942", False, False),
    ("cpu", None, False, False),
  ],
)
def test_which_chips_run_which_kernels(
  kind, capability, mosaic_runs, triton_runs, monkeypatch
):
  chip = types.SimpleNamespace(device_kind=kind, platform="gpu")
  if capability:
    chip.compute_capability = capability
  monkeypatch.setattr(target, "device", lambda: chip)
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
  weights = {
    "x": jnp.zeros((2, 128), jnp.bfloat16),
    "w_gate_up": jnp.zeros((1, 128, 2, 128), jnp.bfloat16),
    "w_down": jnp.zeros((1, 128, 128), jnp.bfloat16),
  }
  assert (mosaic.cannot_run(**weights) == "") == mosaic_runs
  assert (triton.cannot_run(**weights) == "") == triton_runs


def test_the_default_device_decides():
  cpu = jax.devices("cpu")[-1]
  with jax.default_device(cpu):
    assert target.device() == cpu
  with jax.default_device("cpu"):
    assert target.device() == jax.devices("cpu")[0]
  assert target.device() == jax.devices()[0]


def test_no_tokens():
  (x, ids, gates, *weights), _ = cases.make("balanced")
  for arguments in ((x[:0], ids[:0], gates[:0]), (x, ids[:, :0], gates[:, :0])):
    y, pullback = jax.vjp(
      lambda x, ids, gates, *w: moe_ffn(x, ids, gates, *w),
      *arguments,
      *weights,
    )
    assert y.shape == arguments[0].shape and not y.any()
    assert not any(g.any() for g in pullback(y)[3:])
  totals = tuple(jnp.ones(w.shape) for w in weights)
  _, pullback = jax.vjp(
    lambda totals: moe_ffn(
      x[:0], ids[:0], gates[:0], *weights, grad_totals=totals
    ),
    totals,
  )
  assert all((a == 1).all() for a in pullback(x[:0])[0])


def test_every_expert_gets_a_tile_that_holds_the_mean():
  for rows, experts in [(1, 1), (8, 128), (512, 8), (262144, 128), (4096, 1)]:
    assert rows / experts <= xla.tile_rows(rows, experts)
  assert xla.tile_rows(4096, 1) == 4096


@pytest.mark.parametrize(
  "change,message",
  [
    ({"x": jnp.zeros((2, 3, 4))}, "x must be [T, H], not (2, 3, 4)."),
    ({"w_down": jnp.zeros((4, 24, 15))}, "(4, 16, 2, 24) and (4, 24, 15)"),
    ({"gates": jnp.zeros((64, 3))}, "not (64, 2) and (64, 3)."),
    ({"expert_ids": jnp.zeros((64, 2))}, "must be integers, not float32"),
    ({"gates": jnp.zeros((64, 2), jnp.bfloat16)}, "gates.astype(jnp.float32)"),
    ({"x": jnp.zeros((64, 16), jnp.bfloat16)}, "cast the weights"),
    ({"clamp": 0.0}, "clamp must be positive or None, not 0.0."),
    ({"grad_totals": (jnp.zeros(3), jnp.zeros(3))}, "must be like w_gate_up"),
    (
      {"implementation": "fast"},
      "choose one of mosaic, triton, xla,",
    ),
  ],
)
def test_errors_say_what_would_fix_them(change, message):
  names = ("x", "expert_ids", "gates", "w_gate_up", "w_down")
  arguments = dict(zip(names, cases.make("balanced")[0], strict=True)) | change
  # Unwrapped, because the type checker of the tests would speak first.
  with pytest.raises(ValueError, match=re.escape(message)):
    inspect.unwrap(moe_ffn)(**arguments)
