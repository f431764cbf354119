"""Whole publishers and readers on a store that fails at random."""

import collections
import contextlib
import functools
import random
import threading

import pytest
from obstore.store import MemoryStore
from trees import bits, history

from composer_jax import shipping
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.errors import ChainError, StoreError
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.store import RetryingStore
from composer_jax.shipping.subscriber import Subscriber

CONFIG = PublisherConfig(
  snapshot_every=5, longest_skip=4, chunk_bytes=300, object_bytes=1500
)


class Stormy(ObjectStore):
  """Fails before or after the effect, or flips a bit of what is read."""

  def __init__(self, seed, share):
    super().__init__(MemoryStore())
    self._random = random.Random(seed)
    self._share = share
    self._lock = threading.Lock()
    self.counts = collections.Counter()

  def _draw(self):
    with self._lock:
      self.counts["operations"] += 1
      return self._random.random() / self._share

  def _weather(self, operation, damage=lambda result: result):
    draw = self._draw()
    if draw < 0.4:
      self.counts["failed before"] += 1
      raise StoreError("the store is away")
    result = operation()
    if draw < 0.8:
      self.counts["answers lost"] += 1
      raise StoreError("the answer timed out")
    if draw < 1:
      self.counts["damaged on the way"] += 1
      return damage(result)
    return result

  def get(self, key, *args, **kwargs):
    def flip(data):
      return bytes([data[0] ^ 1]) + data[1:] if data else data

    return self._weather(lambda: super(Stormy, self).get(key, *args), flip)

  def put_if_absent(self, key, data):
    return self._weather(lambda: super(Stormy, self).put_if_absent(key, data))

  def put(self, key, data):
    self._weather(lambda: super(Stormy, self).put(key, data))

  def list(self, prefix):
    yield from self._weather(lambda: list(super(Stormy, self).list(prefix)))

  def delete(self, key):
    self._weather(lambda: super(Stormy, self).delete(key))


def publish(publisher, tree, number):
  return publisher.publish(tree, {"number": number}).result()


def calm(store):
  """The same objects on a good day."""
  return ObjectStore(store._store)


@pytest.mark.parametrize("seed", [0, 1])
def test_in_a_storm_nothing_is_lost_and_nothing_wrong_exposed(seed, tmp_path):
  stormy = Stormy(seed, share=0.06)
  retrying = RetryingStore(stormy, attempts=3, sleep=lambda s: None)
  draw = random.Random(seed)
  trees = history(40)
  committed = {}
  counts = collections.Counter()

  def attempt(name, action):
    try:
      result = action()
    except (StoreError, ChainError):
      counts[f"{name} failed"] += 1
      return None
    counts[name] += 1
    return result

  with contextlib.ExitStack() as stack:
    publisher = None
    readers = [None, None]
    for number, tree in enumerate(trees):
      if publisher is None or draw.random() < 0.1:  # A crash, or a rival.
        publisher = attempt("takeover", lambda: Publisher(retrying, CONFIG))
        if publisher is None:
          continue
        stack.enter_context(publisher)
      version = attempt(
        "version", functools.partial(publish, publisher, tree, number)
      )
      if version is not None:
        committed[version] = number
      for which, reader in enumerate(readers):
        if reader is None or draw.random() < 0.1:
          cache = tmp_path / str(which) if which else None
          if reader:
            reader.close()
          readers[which] = attempt(
            "reader", lambda c=cache: Subscriber(retrying, cache=c)
          )
        reader = readers[which]
        if reader and draw.random() < 0.7:
          before = reader.current
          weights = attempt("update", reader.update)
          if weights:
            number = weights.metadata["number"]
            assert bits(weights.tree) == bits(trees[number])
            assert weights.version > (before.version if before else -1)
          else:
            assert reader.current is before
      if draw.random() < 0.2:
        attempt("collection", lambda: shipping.collect(Chain(retrying)))
    for reader in filter(None, readers):
      reader.close()
  print(f"\n{dict(stormy.counts)}\n{dict(counts)}")
  assert stormy.counts["operations"] > 1000
  assert counts["version"] > 20
  assert counts["update"] > 10
  # Every version that was reported is in the log, and the last one is there.
  store = calm(stormy)
  chain = Chain(store)
  for version, number in committed.items():
    assert chain.versions[version].metadata == {"number": number}
  with Subscriber(store) as reader:
    weights = reader.update()
    assert weights.version == chain.head >= max(committed)
    assert bits(weights.tree) == bits(trees[weights.metadata["number"]])


def test_pruning_takes_nothing_from_a_slow_reader():
  store = ObjectStore(MemoryStore())
  trees = history(9)
  here, go_on = threading.Event(), threading.Event()

  class Slow(ObjectStore):
    def get(self, key, *args, **kwargs):
      if key.startswith("data/") and args and args[1]:
        here.set()
        assert go_on.wait(30)
      return super().get(key, *args, **kwargs)

  with Publisher(store, CONFIG) as publisher:
    for tree in trees[:4]:
      publisher.publish(tree).result()
    with Subscriber(Slow(store._store)) as slow:
      update = threading.Thread(target=slow.update)
      update.start()
      assert here.wait(30)
      for tree in trees[4:]:
        publisher.publish(tree).result()
      deleted = shipping.collect(Chain(store))
      go_on.set()
      update.join(30)
      assert bits(slow.current.tree) == bits(trees[3])
      assert deleted > 0
      assert shipping.collect(Chain(store)) > 0  # Its lease is over.
      assert bits(slow.update().tree) == bits(trees[8])
