"""Gathering beside a multiplication: the movement, and its hand-over.

The GPU interpreter has no semaphores, and runs one block after the other.
Counters on the host stand in for semaphores: what is handed over, waited for
and computed is proven here, that a wait holds a block back is not. Races are
looked for in the movement alone.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe import layout, mosaic
from pallas_kernels.moe.mosaic import gather, tiles
from tests.pallas_kernels.moe import cases
from tests.pallas_kernels.moe.mosaic import interpreter

T, H, I, E, K = 200, 320, 128, 3, 2  # noqa: E741


def inputs():
  rng = np.random.default_rng(0)

  def normal(*shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.bfloat16)

  # The first token, which padding might be mistaken for, is nobody's.
  arguments = (
    normal(T, H).at[0].set(jnp.nan),
    jnp.asarray(rng.integers(-1, E, (T, K)), jnp.int32).at[0].set(-1),
    jnp.asarray(rng.random((T, K)), jnp.float32),
    normal(E, H, 2, I, scale=H**-0.5),
    normal(E, I, H, scale=I**-0.5),
  )
  return arguments, normal(T, H).at[0].set(jnp.nan)


@pytest.mark.parametrize("num_sms", [1, 3])
def test_rows_are_gathered_without_races(num_sms):
  (x, ids, *_), _ = inputs()
  table = layout.build(ids, E)
  token = jnp.where(table.slot_row < 0, -1, table.slot_row // K)
  kernel = functools.partial(gather.rows, tile_rows=128, num_sms=num_sms)
  rows = interpreter.run(kernel, x, token, table.num_tiles)
  real = np.flatnonzero(token >= 0)
  assert (rows[real] == x[token[real]]).all()
  used = int(table.num_tiles[0]) * 128
  assert not rows[np.flatnonzero(token[:used] < 0)].any()
  assert (
    used < len(rows) and np.isnan(np.asarray(rows, np.float32)[used:]).all()
  )


class Counters:
  """What the kernels see of semaphores, kept on the host."""

  def __init__(self, monkeypatch):
    self.values, self.changed = {}, threading.Condition()
    self.kernels, self.waited = 0, set()
    monkeypatch.setattr(pl, "get_global", self.allocate)
    monkeypatch.setattr(pl, "semaphore_signal", self.signal)
    monkeypatch.setattr(pl, "semaphore_wait", self.wait)

  def allocate(self, kind):
    (count,) = kind.shape
    self.kernels += 1
    first = 1000 * self.kernels

    class Semaphores:
      def __getitem__(self, index):
        return first + index

    semaphores = Semaphores()
    semaphores.at = semaphores
    self.values |= dict.fromkeys(range(first, first + count), 0)
    return semaphores

  def signal(self, index, amount):
    def add(index):
      with self.changed:
        self.values[int(index)] += amount
        self.changed.notify_all()

    io_callback(add, None, index)

  def wait(self, index, least, *, decrement):
    assert not decrement

    def block(index):
      with self.changed:
        self.waited.add((int(index), least))
        assert self.changed.wait_for(
          lambda: self.values[int(index)] >= least, timeout=60
        )

    io_callback(block, None, index)


def run(monkeypatch, overlap, sms):
  """y and its gradients by kernels that gather beside multiplications."""
  monkeypatch.setattr(tiles, "sm_count", lambda: sms)
  arguments, dy = inputs()
  x, ids, *rest = arguments

  def forward_backward(x, *rest):
    y, pullback = jax.vjp(
      lambda x, *rest: mosaic.apply(x, ids, *rest, overlap=overlap), x, *rest
    )
    return (y, *pullback(dy))

  try:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
      return jax.block_until_ready(jax.jit(forward_backward)(x, *rest))
  finally:
    gpu_callbacks.reset_gpu_interpret_mode_state()


def test_the_layer_has_the_bits_of_that_without_overlap(monkeypatch):
  counters = Counters(monkeypatch)
  result = run(monkeypatch, gather.Movers(blocks=1, minibatch=2), sms=3)
  assert counters.kernels == 2
  handed_over = {n for n in counters.values.items() if n[1]}
  assert {count for _, count in handed_over} == {gather.WARPGROUPS}
  assert counters.waited == handed_over and len(handed_over) == 2 * 2
  expected = run(monkeypatch, None, sms=2)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
  expected = cases.oracle(*inputs())
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < 1e-2, name
