"""Versions to ship in tests: bits of every kind, a few changed each time."""

import itertools

import ml_dtypes
import numpy as np

SHAPES = {
  "embed": ((24, 8), ml_dtypes.bfloat16),
  "experts": ((8, 4, 16), ml_dtypes.bfloat16),
  "norm": ((16,), np.float32),
  "scale": ((), np.float32),
  "flags": ((5,), bool),
  "quantised": ((8, 8), ml_dtypes.float8_e4m3fn),
  "count": ((3, 2), np.int32),
  "empty": ((0, 4), np.float32),
}


def make(seed):
  """Random bits, NaN payloads and negative zeros among them."""
  rng = np.random.default_rng(seed)
  tree = {}
  for name, (shape, dtype) in SHAPES.items():
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
      tree[name] = rng.random(shape) < 0.5
    else:
      size = int(np.prod(shape)) * dtype.itemsize
      bits = rng.integers(0, 256, size, np.uint8)
      tree[name] = bits.view(dtype).reshape(shape)
  return tree


def history(length, share=0.05):
  """Versions, each with about this share of the elements changed."""

  def step(tree, seed):
    rng = np.random.default_rng(seed)
    other = make(seed)
    return {
      name: np.where(rng.random(array.shape) < share, other[name], array)
      for name, array in tree.items()
    }

  return list(itertools.accumulate(range(1, length), step, initial=make(0)))


def bits(tree):
  """What must be equal."""
  return {
    name: (array.dtype, array.shape, np.asarray(array).tobytes())
    for name, array in tree.items()
  }
