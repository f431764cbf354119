"""Changes found on devices, against NumPy on the host, bit for bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.device_diff import PEERS
from composer_jax.shipping import DeltaError, device

DTYPES = [
  "bfloat16",
  "float16",
  "float32",
  "float8_e4m3fn",
  "float8_e5m2",
  "float8_e8m0fnu",
  "float4_e2m1fn",
  "int4",
  "uint4",
  "int8",
  "uint16",
  "int32",
  "bool",
  "complex64",
]
find = jax.jit(device.find)
compact = jax.jit(device.compact, static_argnums=2)


def anything(rng, dtype, shape):
  """Any bits that a dtype can have: NaN payloads, both zeros."""
  dtype, size = np.dtype(dtype), int(np.prod(shape))
  if dtype.kind == "b":
    return rng.integers(0, 2, shape).astype(bool)
  units = np.frombuffer(rng.bytes(size * dtype.itemsize), np.uint8)
  if dtype.name in ("int4", "uint4", "float4_e2m1fn"):
    units = units & 15
  return units.view(dtype).reshape(shape)


def units(array):
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view([("", np.uint8, (array.itemsize,))])["f0"].reshape(
    -1, array.itemsize
  )


def pair(dtype, shape, density, seed=0):
  rng = np.random.default_rng(seed)
  base, other = (anything(rng, dtype, shape) for _ in range(2))
  return np.where(rng.random(shape) < density, other, base), base


def fetched(new, base, base_on_host):
  """As a publisher does it, but for a whole array."""
  changes = device.fetch(new, base)
  if changes is None:
    return np.array(new)
  # In two parts, as if in two chunks.
  flat = base_on_host.reshape(-1)
  middle = flat.size // 3
  parts = [
    device.apply(flat[start:stop], device.part_of(changes, start, stop))
    for start, stop in ((0, middle), (middle, flat.size))
  ]
  return np.concatenate(parts).reshape(base_on_host.shape)


def check(new, base, capacity):
  marks = find(jnp.asarray(new), jnp.asarray(base))
  changes = jax.device_get(compact(jnp.asarray(new), marks, capacity))
  changed = np.flatnonzero((units(new) != units(base)).any(axis=1))
  assert changes.count == marks.total == len(changed)
  assert changes.positions.shape == changes.values.shape == (capacity,)
  kept = changed[:capacity]
  np.testing.assert_array_equal(changes.positions[: len(kept)], kept)
  assert (
    changes.values[: len(kept)].tobytes() == new.reshape(-1)[kept].tobytes()
  )
  return changes


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_and_values(dtype, density):
  new, base = pair(dtype, (13, 77), density)
  changes = check(new, base, 1024)
  made = device.apply(base, changes)
  assert made.shape == new.shape and made.dtype == new.dtype
  assert made.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_fetch(dtype, density):
  new, base = pair(dtype, (48, 1000), density)
  made = fetched(jnp.asarray(new), jnp.asarray(base), base)
  assert made.dtype == new.dtype and made.shape == new.shape
  assert made.tobytes() == new.tobytes()
  assert made.flags.writeable and not np.may_share_memory(made, base)


@given(
  size=st.integers(0, 1500),
  places=st.lists(st.integers(0, 1499), max_size=40),
  run=st.tuples(st.integers(0, 1499), st.integers(0, 700)),
)
@settings(deadline=None, max_examples=40)
def test_any_places(size, places, run):
  # One shape for all, or each example would be compiled.
  base = np.zeros(1500, np.int16)
  new = base.copy()
  new[[p for p in places if p < size]] = 7
  new[run[0] : run[0] + run[1]] = -9
  check(new, base, 1024)


def test_zeros_and_nans_are_bits():
  base = np.array([0.0, np.nan, 1.0, -0.0], np.float32)
  new = np.array([-0.0, np.nan, 1.0, -0.0], np.float32)
  new.view(np.uint32)[1] ^= 1
  changes = check(new, base, 4)
  np.testing.assert_array_equal(changes.positions[:2], [0, 1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (256,), (1, 257)])
def test_small_shapes(shape):
  for density in (0.0, 1.0):
    new, base = pair("bfloat16", shape, density)
    check(new, base, 8 * max(1, new.size))
    made = fetched(jnp.asarray(new), jnp.asarray(base), base)
    assert made.shape == shape and made.tobytes() == new.tobytes()


def test_too_small_a_capacity_is_noticed():
  new, base = pair("bfloat16", (4096,), 0.5)
  changes = check(new, base, 64)
  assert changes.count > 64
  with pytest.raises(DeltaError, match="room for 64"):
    device.apply(base, changes)


def test_fetch_moves_the_lesser_bytes(monkeypatch):
  asked = []
  real = device._compact
  monkeypatch.setattr(
    device, "_compact", lambda *args: asked.append(args[2]) or real(*args)
  )
  size = 1 << 16
  base = np.zeros(size, jnp.bfloat16)
  for changes, capacity in ((5, 1024), (1025, 1152), (20480, 20480)):
    new = base.copy()
    new[:changes] = 1
    fetched(jnp.asarray(new), jnp.asarray(base), base)
    assert asked.pop() == capacity
    assert capacity * 6 < new.nbytes
  new[:20481] = 1  # 22528 places of 6 bytes would be more than the whole
  fetched(jnp.asarray(new), jnp.asarray(base), base)
  fetched(jnp.asarray(base), jnp.asarray(base), base)
  assert not asked


def test_shards_without_communication():
  mesh = jax.make_mesh(
    (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  spec = PartitionSpec("x", "y")
  new, base = pair("bfloat16", (64, 512), 0.03)
  sharded = [
    jax.device_put(array, NamedSharding(mesh, spec)) for array in (new, base)
  ]

  def local(new, base):
    return jax.tree.map(
      lambda leaf: leaf[None], device.compact(new, device.find(new, base), 1024)
    )

  ours = jax.jit(
    jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(spec, spec),
      out_specs=PartitionSpec(("x", "y")),
      check_vma=False,
    )
  )
  program = ours.lower(*sharded).compile().as_text()
  assert not re.search("all-|collective|reduce-scatter", program)
  counts, positions, values = jax.device_get(ours(*sharded))
  parts = new.reshape(4, 16, 2, 256).swapaxes(1, 2).reshape(8, -1)
  olds = base.reshape(4, 16, 2, 256).swapaxes(1, 2).reshape(8, -1)
  for i in range(8):
    changes = device.Changes(counts[i], positions[i], values[i])
    assert device.apply(olds[i], changes).tobytes() == parts[i].tobytes()
  # As a publisher does it: each shard by itself.
  for mine, old in zip(
    *(array.addressable_shards for array in sharded), strict=True
  ):
    made = fetched(mine.data, old.data, base[old.index])
    assert made.tobytes() == new[mine.index].tobytes()


def test_mistakes_get_a_sentence():
  new = jnp.zeros((4, 4), jnp.bfloat16)
  with pytest.raises(DeltaError, match="its base bfloat16"):
    device.find(new, new[:2])
  with pytest.raises(DeltaError, match="its base float16"):
    device.find(new, new.astype(jnp.float16))
  with pytest.raises(DeltaError, match="ends at 2"):
    jax.eval_shape(
      device.find, *[jax.ShapeDtypeStruct((2**16, 2**16), jnp.int8)] * 2
    )


@pytest.mark.parametrize("name", PEERS)
def test_the_benchmarks_peers_agree(name):
  new, base = pair("bfloat16", (3000,), 0.1)
  count, positions, values = jax.jit(PEERS[name], static_argnums=2)(
    jnp.asarray(new), jnp.asarray(base), 512
  )
  changed = np.flatnonzero((units(new) != units(base)).any(axis=1))
  assert count == len(changed) < 512
  np.testing.assert_array_equal(positions[: len(changed)], changed)
  assert np.asarray(values)[: len(changed)].tobytes() == new[changed].tobytes()


@given(st.integers(1, 2**32))
def test_room_is_close_and_of_few_sizes(count):
  room = device.capacity_for(count)
  assert count <= room <= max(1024, count * 9 / 8)
  assert room == 1024 or room % (1 << (room.bit_length() - 4)) == 0
