"""Objects are few, and the first one is on its way early."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from obstore.store import MemoryStore

from composer_jax.shipping import publisher
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import ArraySpec, Box, Chunk, Contents
from composer_jax.shipping.index import from_bytes
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.packing import Packer
from composer_jax.shipping.source import from_tree


def pack(sizes, object_bytes):
  """Packs random bytes; returns what went in, the shards and the index."""
  chain = Chain(ObjectStore(MemoryStore()))
  chain.take_over()
  rng = np.random.default_rng(0)
  spec = ArraySpec((len(sizes),), "int8")
  deltas = {
    Chunk("w", Box((i,), (1,))): rng.bytes(size) for i, size in enumerate(sizes)
  }
  told = []
  with ThreadPoolExecutor(2) as pool:
    packer = Packer(
      chain,
      object_bytes=object_bytes,
      uploads=2,
      pool=pool,
      observe=lambda stage, size: told.append(size),
    )
    for chunk, delta in deltas.items():
      packer.add(chunk, delta)
    contents = Contents({"w": spec}, dict.fromkeys(deltas, "0" * 32))
    index, shards = packer.finish(contents)
  found = from_bytes(chain.store.get(index.key))
  assert sum(told) == sum(shard.size for shard in shards) + index.size
  for chunk, delta in deltas.items():
    place = found.places[chunk]
    if delta:
      assert chain.store.get(place.key, place.offset, place.size) == delta
    else:
      assert not place.key
  return shards


def test_objects_grow_to_their_limit():
  shards = pack([100] * 4000, object_bytes=16_000)
  sizes = [shard.size for shard in shards]
  assert sizes[0] == 1000 and max(sizes) == 16_000
  assert sum(sizes) == 400_000 and sizes[:-1] == sorted(sizes[:-1])
  assert len(sizes) < 50  # at the first one's size they were 400
  for number, size in enumerate(sizes):
    assert size <= max(1000, sum(sizes[:number]) / 4 + 100)


def test_a_delta_larger_than_an_object_is_one_of_its_own():
  shards = pack([10, 0, 5000, 10, 10], object_bytes=1600)
  assert [shard.size for shard in shards] == [10, 5000, 20]


def test_upload_begins_before_all_is_loaded():
  uploading = threading.Event()

  class Store(ObjectStore):
    def put(self, key, data):
      uploading.set()
      super().put(key, data)

  def wait_and_load():
    assert uploading.wait(60), "nothing was uploaded before the last array"
    return last.load()

  tree = {f"{i:02}": np.arange(i, i + 3000, dtype=np.int32) for i in range(40)}
  source = from_tree(tree)
  *others, last = source.pieces
  waiting = dataclasses.replace(last, load=wait_and_load)
  config = publisher.PublisherConfig(object_bytes=160_000, encoders=1)
  with publisher.Publisher(Store(MemoryStore()), config) as made:
    source = dataclasses.replace(source, pieces=[*others, waiting])
    made.publish(source).result()
