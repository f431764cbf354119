"""Each Hopper kernel in the GPU interpreter, against NumPy in float32.

Rows that belong to no token hold NaN, and so does memory not yet written.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe import layout
from pallas_kernels.moe.mosaic import engine
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient
from tests.pallas_kernels.moe import cases
from tests.pallas_kernels.moe.mosaic import interpreter

E, H, I = 4, 128, 192  # noqa: E741
SIZES = (70, 0, 64, 150)  # Ragged, empty, a whole step, two tiles.
FEW = {"columns": 64, "stages": 2, "band": 2, "num_sms": 2}


class Rows:
  """Tables of groups of SIZES rows, one tile of which is not in use."""

  def __init__(self, tile=128):
    ids = np.repeat(np.arange(E), SIZES)[:, None].astype(np.int32)
    np.random.default_rng(0).shuffle(ids)
    self.table = layout.build(jnp.asarray(ids), E, tile)
    self.slots = len(self.table.slot_row)
    self.real = np.asarray(self.table.slot_row) >= 0
    expert = np.repeat(np.asarray(self.table.tile_expert), tile)
    self.expert = expert[self.real]
    self.used = self.table.tile_expert, self.table.num_tiles
    self.groups = self.table.start, self.table.size, self.table.order

  def normal(self, width, seed, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(self.slots, width))
    return jnp.asarray(np.where(self.real[:, None], rows, np.nan), dtype)

  def of(self, array):
    return wide(array)[self.real]


def wide(array):
  return np.asarray(array).astype(np.float32)


def weights(*shape, dtype=jnp.bfloat16):
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.normal(size=shape) * shape[1] ** -0.5, dtype)


def close(result, expected, bound=4e-3):
  assert cases.relative_error(result, expected) < bound


@pytest.mark.parametrize(
  "dtype,tile,clamp",
  [(jnp.bfloat16, 128, None), (jnp.float16, 128, 0.7), (jnp.bfloat16, 64, 0.7)],
)
def test_gate_up(dtype, tile, clamp):
  I = 256 if tile == 64 else 192  # noqa: E741
  rows, w = Rows(tile), weights(E, H, 2, I, dtype=dtype)
  x = rows.normal(H, 2, dtype)
  changes = {"columns": 128} if tile == 64 else {}
  kernel = functools.partial(gate_up, clamp=clamp, **FEW | changes)
  act, pre = interpreter.run(kernel, x, *rows.used, w)
  expected = np.einsum("mh,mhgi->mgi", rows.of(x), wide(w)[rows.expert])
  close(rows.of(pre), expected.reshape(-1, 2 * I))
  gate, up = wide(jnp.asarray(expected, dtype)).swapaxes(0, 1)
  if clamp:
    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
  close(rows.of(act), gate / (1 + np.exp(-gate)) * up, 6e-3)


@pytest.mark.parametrize("tile", [128, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(transposed, tile):
  rows, I = Rows(tile), 256  # noqa: E741
  w = weights(E, I, H) if transposed else weights(E, H, I)
  x = rows.normal(H, 3)
  changes = {"columns": 128} if tile == 64 else {}
  kernel = functools.partial(matmul, transposed=transposed, **FEW | changes)
  y = interpreter.run(kernel, x, *rows.used, w)
  spec = "mh,mih->mi" if transposed else "mh,mhi->mi"
  close(rows.of(y), np.einsum(spec, rows.of(x), wide(w)[rows.expert]))


@pytest.mark.parametrize(
  "columns,tile,clamp",
  [(64, 128, None), (192, 128, 0.7), (128, 64, None), (256, 64, 0.7)],
)
def test_swiglu_gradient(columns, tile, clamp):
  I = 256 if tile == 64 else 192  # noqa: E741
  rows, w = Rows(tile), weights(E, I, H)
  dy, pre = rows.normal(H, 4), rows.normal(2 * I, 5)
  weight = rows.normal(1, 6, jnp.float32)[:, 0]
  kernel = functools.partial(
    swiglu_gradient, clamp=clamp, **FEW | {"columns": columns}
  )
  d_pre, act, products = interpreter.run(kernel, dy, weight, pre, *rows.used, w)
  gate, up = np.split(rows.of(pre), 2, axis=1)
  limit = clamp or np.inf
  free_gate, free_up = gate <= limit, abs(up) <= limit
  gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
  sigmoid = 1 / (1 + np.exp(-gate))
  a, share = gate * sigmoid * up, rows.of(weight)[:, None]
  d_act = np.einsum("mh,mih->mi", rows.of(dy), wide(w)[rows.expert])
  d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid)) * free_gate
  d_up = d_act * gate * sigmoid * free_up
  expected = share * np.concatenate([d_gate, d_up], 1)
  close(rows.of(d_pre), expected)
  close(rows.of(act), share * a)
  parts = I // columns * (2 if tile == 64 else 1)
  assert products.shape == (parts, rows.slots)
  total = wide(products).sum(0)[rows.real]
  close(total, (d_act * a).sum(1), 1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("height", [128, 64])
def test_weight_gradient(height, accumulate):
  rows = Rows()
  x, d = rows.normal(height, 7), rows.normal(128, 8)
  used = int(rows.table.num_tiles[0]) * 128
  # Padding is zero; a tile that is not in use holds anything.
  x, d = (jnp.where(jnp.isnan(a), 0, a).at[used:].set(jnp.nan) for a in (x, d))
  total = weights(E, height, 128, dtype=jnp.float32) if accumulate else None
  kernel = functools.partial(
    weight_gradient,
    out_dtype=jnp.float32 if accumulate else jnp.bfloat16,
    **FEW | {"columns": 128},
  )
  result = interpreter.run(kernel, x, d, *rows.groups, total)
  expected = np.stack(
    [
      rows.of(x)[rows.expert == e].T @ rows.of(d)[rows.expert == e]
      for e in range(E)
    ]
  )
  if accumulate:
    expected += wide(total)
    close(result, expected, 1e-6)
  else:
    assert not result[1].any()
    close(result, expected)


def test_bits_are_those_of_any_walk_and_number_of_sms():
  # Not of any tile shape: here XLA:CPU multiplies, and its order follows it.
  rows, w = Rows(), weights(E, H, I)
  x = rows.normal(H, 3)
  results = set()
  for changes in ({}, {"num_sms": 3, "band": 1}, {"stages": 3}):
    kernel = functools.partial(matmul, transposed=False, **FEW | changes)
    y = interpreter.run(kernel, x, *rows.used, w)
    results.add(np.asarray(y)[rows.real].tobytes())
  assert len(results) == 1


def test_a_missing_wait_is_found(monkeypatch):
  rows, w = Rows(), weights(E, H, I)
  wait = plgpu.wait_smem_to_gmem
  monkeypatch.setattr(
    plgpu, "wait_smem_to_gmem", lambda n, **kwargs: wait(max(n, 1), **kwargs)
  )
  monkeypatch.setattr(engine, "finish", lambda: wait(0, wait_read_only=True))
  kernel = functools.partial(matmul, transposed=False, **FEW)
  with pytest.raises(AssertionError, match="Threads race"):
    interpreter.run(kernel, rows.normal(H, 3), *rows.used, w)
