"""A publisher that finds changes on devices ships the very same bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from obstore.store import MemoryStore
from trees import bits

from composer_jax.shipping import source as sources
from composer_jax.shipping.errors import StoreError
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.subscriber import Subscriber

HOST = PublisherConfig(chunk_bytes=3000, object_bytes=20_000, snapshot_every=4)
DEVICE = dataclasses.replace(HOST, compare="device")
SHAPES = {
  "sharded": ((64, 1024), jnp.bfloat16, P("x")),
  "columns": ((16, 4096), jnp.float32, P(None, "x")),
  "everywhere": ((9000,), jnp.float16, P()),
  "still": ((8000,), jnp.float32, P()),
  "small": ((3,), jnp.int32, P()),
  "scalar": ((), jnp.float32, P()),
  "empty": ((0, 5), jnp.float32, P()),
}
# Room for 1,024 changes is less than one device's part of these.
LARGE = {"sharded", "columns", "everywhere", "still"}


def versions(count, share=0.01):
  """Any bits, NaN payloads among them; some elements move, "still" none."""
  rng = np.random.default_rng(0)

  def anything(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)

  tree = {
    name: anything(shape, dtype) for name, (shape, dtype, _) in SHAPES.items()
  }
  for _ in range(count):
    yield tree
    tree = {
      name: array
      if name == "still"
      else np.where(
        rng.random(array.shape) < share,
        anything(array.shape, array.dtype),
        array,
      )
      for name, array in tree.items()
    }


def placed(tree, specs=None):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  return {
    name: jax.device_put(
      array, NamedSharding(mesh, (specs or {}).get(name, SHAPES[name][2]))
    )
    for name, array in tree.items()
  }


def counted(tree, loads):
  """A source that notes which pieces come to the host whole."""

  def load(piece):
    loads.append(piece.path)
    return piece.load()

  source = sources.from_tree(tree)
  pieces = [
    dataclasses.replace(piece, load=lambda piece=piece: load(piece))
    for piece in source.pieces
  ]
  return dataclasses.replace(source, pieces=pieces)


@pytest.fixture
def store():
  return ObjectStore(MemoryStore())


def shipped(publisher):
  """All that versions are but for keys, which are random."""
  return [
    (
      number,
      manifest.digest,
      [
        (delivery.base_version, [(s.size, s.sha256) for s in delivery.shards])
        for delivery in manifest.deliveries
      ],
    )
    for number, manifest in publisher.chain.versions.items()
  ]


def test_the_same_bytes_from_changes_alone(store):
  other = ObjectStore(MemoryStore())
  with (
    Publisher(other, HOST) as on_host,
    Publisher(store, DEVICE) as on_device,
    Subscriber(store) as reader,
  ):
    for number, tree in enumerate(versions(6)):
      loads = []
      on_host.publish(placed(tree)).result()
      on_device.publish(counted(placed(tree), loads)).result()
      assert bits(reader.update().tree) == bits(tree)
      if number:
        assert LARGE.isdisjoint(loads)
      else:
        assert set(loads) == {*SHAPES}
    assert shipped(on_device) == shipped(on_host)
    assert len(on_device.chain.versions) == 6


def test_many_changes_come_whole(store):
  loads = []
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    for tree in versions(2, share=0.9):
      loads.clear()
      publisher.publish(counted(placed(tree), loads)).result()
      assert bits(reader.update().tree) == bits(tree)
  assert set(loads) == {*SHAPES} - {"still"}


def test_another_sharding_or_host_arrays_come_whole(store):
  first, second, third = versions(3)
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    for tree in (
      placed(first),
      placed(second, {"sharded": P(None, "x"), "columns": P()}),
      third,  # NumPy
      placed(first),
    ):
      publisher.publish(tree).result()
      assert bits(reader.update().tree) == bits(tree)


def test_a_version_that_fails_leaves_the_base(store):
  class Failing(ObjectStore):
    fails = False

    def put(self, key, data):
      if self.fails:
        raise StoreError("a full disk")
      super().put(key, data)

  failing = Failing(MemoryStore())
  first, second, third = versions(3)
  loads = []
  with Publisher(failing, DEVICE) as publisher, Subscriber(failing) as reader:
    publisher.publish(placed(first)).result()
    failing.fails = True
    with pytest.raises(StoreError, match="full disk"):
      publisher.publish(placed(second)).result()
    failing.fails = False
    publisher.publish(counted(placed(third), loads)).result()
    assert bits(reader.update().tree) == bits(third)
  assert loads and LARGE.isdisjoint(loads)


def test_an_adopted_version_is_a_base(store):
  first, second = versions(2)
  with Publisher(store, DEVICE) as publisher:
    publisher.publish(placed(first)).result()
  loads = []
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    assert not publisher.adopt(sources.from_tree(placed(second)))
    assert publisher.adopt(sources.from_tree(placed(first)))
    publisher.publish(counted(placed(second), loads)).result()
    assert bits(reader.update().tree) == bits(second)
  assert loads and LARGE.isdisjoint(loads)


def test_a_restart_loads_the_first_version_whole(store):
  first, second, third = versions(3)
  with Publisher(store, DEVICE) as publisher:
    publisher.publish(placed(first)).result()
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    for tree in (second, third):
      version = publisher.publish(placed(tree)).result()
      assert bits(reader.update().tree) == bits(tree)
    assert publisher.chain.deliveries[version][0].base_version is not None


@pytest.mark.parametrize("config", [HOST, DEVICE])
def test_one_version_stays_on_the_devices_at_most(store, config):
  kept = []
  with Publisher(store, config) as publisher:
    for tree in versions(3):
      source = sources.from_tree(placed(tree))
      kept.append([piece.array for piece in source.pieces])
      publisher.publish(source)
      publisher.wait()
      stay = [any(not a.is_deleted() for a in arrays) for arrays in kept]
      newest = config is DEVICE
      assert stay == [False] * (len(kept) - 1) + [newest]


def test_arrays_that_the_caller_deleted_are_no_base(store):
  first, second = versions(2)
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    mine = placed(first)
    publisher.publish(mine, copy=False).result()
    for array in mine.values():
      array.delete()
    publisher.publish(placed(second)).result()
    assert bits(reader.update().tree) == bits(second)


def test_rounded_arrays_are_not_compared_unrounded(store):
  rng = np.random.default_rng(0)
  with Publisher(store, DEVICE) as publisher, Subscriber(store) as reader:
    for _ in range(2):
      wide = {"w": jnp.asarray(rng.standard_normal(9000, np.float32))}
      publisher.publish(
        sources.cast(sources.from_tree(wide), "bfloat16")
      ).result()
      expected = {"w": np.asarray(wide["w"]).astype(jnp.bfloat16)}
      assert bits(reader.update().tree) == bits(expected)
