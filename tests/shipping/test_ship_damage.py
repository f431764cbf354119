"""Damaged objects, bases and caches: repaired by another way, or refused."""

import numpy as np
import pytest
from obstore.store import MemoryStore
from trees import bits, history

from composer_jax import shipping
from composer_jax.shipping import index as indexes
from composer_jax.shipping.contents import ArraySpec, Box, Chunk, Contents
from composer_jax.shipping.errors import ChainError, RangeError
from composer_jax.shipping.index import Index, Place
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.subscriber import Subscriber

CONFIG = PublisherConfig(
  snapshot_every=4, longest_skip=4, chunk_bytes=300, object_bytes=1500
)


class Damaging(ObjectStore):
  """What is read of some keys is not what was written."""

  def __init__(self):
    super().__init__(MemoryStore())
    self.damaged = {}

  def get(self, key, *args, **kwargs):
    if self.damaged.get(key) == "missing":
      raise shipping.MissingObjectError(f"no object {key}")
    data = super().get(key, *args, **kwargs)
    if self.damaged.get(key) == "flip":
      middle = len(data) // 2
      flipped = data[middle] ^ 4
      return data[:middle] + bytes([flipped]) + data[middle + 1 :]
    if self.damaged.get(key) == "truncate":
      if args and args[1]:
        raise RangeError(f"{key} is shorter than that")
      return data[: len(data) // 2]
    return data


@pytest.fixture
def store():
  return Damaging()


def publish(store, trees):
  with Publisher(store, CONFIG) as publisher:
    return [
      publisher.publish(tree, {"number": number}).result()
      for number, tree in enumerate(trees)
    ]


def objects(chain, version, base, what):
  [delivery] = [d for d in chain.deliveries[version] if d.base_version == base]
  return [shard.key for shard in getattr(delivery, what)]


DAMAGE = pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
OBJECTS = pytest.mark.parametrize("what", ["indexes", "shards"])


@DAMAGE
@OBJECTS
def test_a_damaged_delta_is_gone_around(store, damage, what):
  trees = history(5)
  versions = publish(store, trees)
  with Subscriber(store) as reader:
    reader.update(versions[3])
    for key in objects(reader.chain, versions[4], versions[3], what):
      store.damaged[key] = damage
    assert bits(reader.update().tree) == bits(trees[4])


@DAMAGE
@OBJECTS
def test_damage_with_no_way_around_is_refused_and_the_old_stays(
  store, damage, what
):
  trees = history(4)
  versions = publish(store, trees)
  with Subscriber(store) as reader:
    reader.update(versions[2])
    chain = reader.chain
    keys = [
      shard.key
      for delivery in chain.deliveries[versions[3]]
      for shard in getattr(delivery, what)
    ]
    store.damaged = dict.fromkeys(keys, damage)
    before = reader.current
    with pytest.raises(ChainError, match=r"no way leads .* damaged"):
      reader.update()
    assert reader.current is before
    store.damaged.clear()
    assert bits(reader.update().tree) == bits(trees[3])


def test_the_newest_version_that_can_be_had_is_taken(store):
  trees = history(4)
  versions = publish(store, trees)
  with Subscriber(store) as reader:
    reader.update(versions[0])
    for delivery in reader.chain.deliveries[versions[3]]:
      store.damaged[delivery.indexes[0].key] = "missing"
    assert bits(reader.update().tree) == bits(trees[2])


def test_an_altered_base_is_noticed_and_replaced(store):
  trees = history(3)
  versions = publish(store, trees)
  with Subscriber(store) as reader:
    reader.update(versions[0])
    for array in reader._held.data.values():
      array.reshape(-1).view(np.uint8)[:1] ^= 1
    assert bits(reader.update().tree) == bits(trees[2])


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "other"])
@pytest.mark.parametrize("name", ["index", "contents"])
def test_a_damaged_cache_costs_a_download_and_nothing_else(
  store, tmp_path, damage, name
):
  trees = history(2)
  versions = publish(store, trees)
  with Subscriber(store, cache=tmp_path) as reader:
    reader.update(versions[0])
  [path] = tmp_path.glob(f"version-*/{name}")
  data = bytearray(path.read_bytes())
  if damage == "flip":
    data[len(data) // 2] ^= 1
  if damage == "truncate":
    del data[len(data) // 2 :]
  path.write_bytes(data)
  if damage == "missing":
    path.unlink()
  if damage == "other":  # Taken for a version that it isn't.
    path.parent.rename(tmp_path / f"version-{versions[1]}")
  with Subscriber(store, cache=tmp_path) as reader:
    assert bits(reader.update(versions[1]).tree) == bits(trees[1])


def test_a_restart_downloads_nothing_that_is_cached(store, tmp_path):
  trees = history(3)
  versions = publish(store, trees)
  sizes = []

  def observe(stage, size):
    if stage == "downloaded":
      sizes.append(size)

  with Subscriber(store, cache=tmp_path) as reader:
    reader.update()
  with Subscriber(store, cache=tmp_path, observe=observe) as reader:
    assert bits(reader.update().tree) == bits(trees[2])
    assert reader.current.version == versions[2]
  assert not sizes


def test_an_interrupted_download_goes_on(store, tmp_path, monkeypatch):
  monkeypatch.setattr("composer_jax.shipping.reader.GROUP_BYTES", 1000)
  trees = history(1)
  publish(store, trees)
  sizes = []

  def observe(stage, size):
    if stage == "downloaded":
      sizes.append(size)

  with Subscriber(store, cache=tmp_path, observe=observe, workers=1) as reader:
    keys = objects(reader.chain, reader.chain.head, None, "shards")
    assert len(keys) > 1
    store.damaged[keys[-1]] = "missing"
    with pytest.raises(ChainError):
      reader.update()
    store.damaged.clear()
  first = sum(sizes)
  sizes.clear()
  with Subscriber(store, cache=tmp_path, observe=observe) as reader:
    assert bits(reader.update().tree) == bits(trees[0])
  assert first > 0
  assert 0 < sum(sizes) < first


def test_a_damaged_log_is_refused_and_the_old_version_stays(store):
  trees = history(3)
  versions = publish(store, trees[:2])
  with Subscriber(store) as reader:
    reader.update()
    publish(store, [trees[2]])
    store.damaged[f"log/{versions[1] + 2:012d}"] = "flip"
    with pytest.raises(ChainError):
      reader.update()
    assert bits(reader.current.tree) == bits(trees[1])


def test_an_index_of_another_version_is_refused(store):
  """A signed-off manifest that points to the wrong index."""
  versions = publish(store, history(2))
  with Subscriber(store) as reader:
    step = shipping.plan(reader.chain.deliveries, versions[0])[0]
    other = shipping.Step(versions[1], step.delivery)
    with pytest.raises(ChainError, match="another version"):
      from composer_jax.shipping.reader import read_index

      read_index(store, reader.chain, other)


GOOD = Index(
  Contents(
    {"a": ArraySpec((4,), "int16")},
    {
      Chunk("a", Box((0,), (2,))): "00" * 16,
      Chunk("a", Box((2,), (2,))): "11" * 16,
    },
  ),
  {Chunk("a", Box((0,), (2,))): Place("data/x", 3, 5, "22" * 32)},
)


def test_an_index_reads_back():
  read = indexes.from_bytes(indexes.to_bytes(GOOD))
  assert read.contents == GOOD.contents
  assert read.places == GOOD.places | {
    Chunk("a", Box((2,), (2,))): indexes.NOWHERE
  }


def test_an_index_of_anything_else_is_refused():
  data = indexes.to_bytes(GOOD)
  rng = np.random.default_rng(0)
  for cut in range(len(data)):
    with pytest.raises(ChainError):
      indexes.from_bytes(data[:cut])
  import zlib

  text = zlib.decompress(data)
  refused = 0
  for _ in range(2000):
    altered = bytearray(text)
    for place in rng.integers(0, len(text), rng.integers(1, 4)):
      altered[place] = rng.integers(32, 127)
    try:
      indexes.from_bytes(zlib.compress(altered))
    except ChainError:
      refused += 1
  assert refused > 100
  for text in (b"[]", b"{}", b"[" * 10**5, b'{"arrays":0}', b"1e999"):
    with pytest.raises(ChainError):
      indexes.from_bytes(zlib.compress(text))


def test_an_index_that_would_not_fit_memory_is_refused():
  import zlib

  bomb = zlib.compress(b"0" * (indexes.MAX_INDEX_BYTES + 1))
  with pytest.raises(ChainError):
    indexes.from_bytes(bomb)
