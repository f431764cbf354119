"""Runs the Triton layer in Triton's interpreter: python interpreter.py CASE.

Run by test_triton_kernels.py in a process of its own, since Triton decides when
it is imported whether to interpret. JAX traces the layer as on a GPU, but each
kernel call goes to NumPy arrays on the host; what a kernel leaves unwritten is
NaN. In float16: the interpreter multiplies bfloat16's bits as integers.
"""

import functools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
from triton.runtime import interpreter

from pallas_kernels.moe import layout
from pallas_kernels.moe import triton as implementation
from pallas_kernels.moe.triton import tiles
from tests.pallas_kernels.moe import cases

T, H, I, E, K = 40, 128, 64, 3, 2  # noqa: E741
# Room round each array for reads that a mistake would take out of bounds.
FENCE = 1 << 16


class Pointer:
  """A copy of an array between NaNs, as what Triton takes for a tensor."""

  def __init__(self, array):
    self.array, itemsize = array, array.dtype.itemsize
    self.memory = np.full(array.nbytes + 2 * FENCE, 0xFF, np.uint8)
    inside = self.memory[FENCE : FENCE + array.nbytes]
    self.inside = inside.view(array.dtype).reshape(array.shape)
    self.inside[...] = array
    self.dtype = str(array.dtype)
    assert FENCE % itemsize == 0

  def data_ptr(self):
    return self.memory.ctypes.data + FENCE

  def check(self):
    assert (self.memory[:FENCE] == 0xFF).all()
    assert (self.memory[FENCE + self.array.nbytes :] == 0xFF).all()


def triton_call(
  *arrays, kernel, out_shape, grid, num_warps, num_stages, **constants
):
  """Stands in for `jax_triton.triton_call`."""
  del num_warps, num_stages

  def run(*arrays):
    results = [np.full(o.shape, np.nan, o.dtype) for o in out_shape]
    pointers = [Pointer(np.asarray(a)) for a in (*arrays, *results)]
    kernel[grid](*pointers, **constants)
    for pointer in pointers:
      pointer.check()
    return [p.inside for p in pointers[len(arrays) :]]

  return jax.pure_callback(run, out_shape, *arrays)


def inputs(routing, *, T=T, E=E, I=I):  # noqa: E741
  return cases.routed(routing, (T, H, I, E, K), jnp.float16)


@functools.partial(jax.jit, static_argnames="clamp")
def forward_backward(arguments, dy, clamp=None):
  x, ids, *rest = arguments

  def layer(x, *rest):
    return implementation.apply(x, ids, *rest, clamp=clamp)

  y, pullback = jax.vjp(layer, x, *rest)
  return (y, *pullback(dy))


def matches_float64(routing, **sizes):
  arguments, dy = inputs(routing, **sizes)
  result = forward_backward(arguments, dy)
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert a.dtype == (jnp.float32 if name == "d_gates" else jnp.float16)
    assert cases.relative_error(a, b) < 2e-3, name


def clamped():
  arguments, dy = inputs("out_of_range", I=128)
  result = forward_backward(arguments, dy, clamp=1.5)
  expected = cases.oracle(arguments, dy, clamp=1.5)
  without = cases.oracle(arguments, dy)
  for name, a, b, c in zip(cases.NAMES, result, expected, without, strict=True):
    # Rounding takes a few pre-activations across the limit.
    assert cases.relative_error(a, b) < 5e-2, name
    assert cases.relative_error(a, c) > 0.1, name


def totals():
  (x, ids, gates, *weights), dy = inputs("random")
  totals = tuple(jnp.full(w.shape, 3, jnp.float32) for w in weights)

  def layer(weights, totals):
    return implementation.apply(x, ids, gates, *weights, grad_totals=totals)

  d_weights, sums = jax.vjp(layer, weights, totals)[1](dy)
  expected = cases.oracle((x, ids, gates, *weights), dy)[3:]
  for zero, total, gradient in zip(d_weights, sums, expected, strict=True):
    assert not zero.any() and total.dtype == jnp.float32
    assert cases.relative_error(total - 3, gradient) < 2e-3


def poison():
  results = []
  for value in (0.0, jnp.nan):
    (x, ids, gates, *weights), dy = inputs("random")
    skipped = jnp.arange(T)[:, None] % 3 == 0  # The first, which padding reads.
    ids = jnp.where(skipped, -1, ids)
    x, gates, dy = (jnp.where(skipped, value, a) for a in (x, gates, dy))
    result = forward_backward((x, ids, gates, *weights), dy)
    assert not any(jnp.isnan(a).any() for a in result)
    results.append([np.asarray(a).tobytes() for a in result])
  assert results[0] == results[1]


def padding():
  (x, ids, *_, w_gate_up, _), _ = inputs("random")
  x = x.at[0].set(jnp.nan)
  ids = jnp.where(jnp.arange(T)[:, None] == 0, -1, ids)
  table = layout.build(ids, E, 32)
  results = implementation.apply_gate_up(
    *(x, table.token, table.tile_expert, table.num_tiles, w_gate_up), rows=32
  )
  used = 32 * int(table.num_tiles[0])
  empty = table.token[:used] < 0
  assert empty.any()
  for result in results:
    assert not result[:used][empty].any()
    assert jnp.isfinite(result[:used]).all()


def mapped():
  (x, ids, gates, *weights), _ = inputs("random")
  halves = [a.reshape(2, -1, a.shape[1]) for a in (x, ids, gates)]
  layer = jax.vmap(implementation.apply, (0, 0, 0, None, None))
  expected = jax.lax.map(
    lambda a: implementation.apply(*a, *weights), tuple(halves)
  )
  assert cases.relative_error(layer(*halves, *weights), expected) < 1e-3


CASES = {
  **{
    name: functools.partial(matches_float64, name)
    for name in (
      "random", "single_expert", "out_of_range", "none_here", "one_row"
    )
  },
  "tiles_of_16": functools.partial(matches_float64, "random", T=8),
  "tiles_of_128": functools.partial(matches_float64, "random", T=140),
  "clamped": clamped,
  "totals": totals,
  "poison": poison,
  "padding": padding,
  "mapped": mapped,
}  # fmt: skip


def main(*names):
  jax_triton.triton_call = triton_call
  # Torch tensors it would copy to the host and back; ours are there.
  executor = interpreter.GridExecutor
  executor._init_args_hst = lambda self, *arguments: arguments
  executor._restore_args_dev = lambda *_: None
  # NumPy no longer takes an array of one number for a number.
  patch = interpreter._patch_lang_tensor

  def patch_tensor(tensor, *rest):
    patch(tensor, *rest)
    tensor.__index__ = lambda self: self.handle.data.item()

  interpreter._patch_lang_tensor = patch_tensor
  assert tiles.tile_rows(8 * K, E) == 16 and tiles.tile_rows(140 * K, E) == 128
  for name in names or CASES:
    CASES[name]()
    print(name, "passed", flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
