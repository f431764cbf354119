"""The parts together, over a store that fails, damages and forgets.

Publishers come and go, a collector deletes, readers of every lag follow. A
reader may fail, and say so; what it holds is always right.
"""

import random
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from obstore.store import MemoryStore

from composer_jax import shipping
from composer_jax.shipping.errors import (
  ChainError,
  DeltaError,
  FencedError,
  StoreError,
)
from composer_jax.shipping.manifest import sha256
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.store import RetryingStore

SIZE = 600
SNAPSHOT_EVERY = 12


class Faulty(ObjectStore):
  """Loses requests and answers; damages some of what it stores as data."""

  def __init__(self, store, rng, counts):
    super().__init__(store)
    self._rng, self._counts = rng, counts

  def get(self, key, start=0, size=None):
    self._maybe_fail()
    return super().get(key, start, size)

  def put_if_absent(self, key, data):
    self._maybe_fail()
    created = super().put_if_absent(key, data)
    self._maybe_fail()
    return created

  def list(self, prefix):
    self._maybe_fail()
    return super().list(prefix)

  def delete(self, key):
    self._maybe_fail()
    super().delete(key)
    self._maybe_fail()

  def _maybe_fail(self):
    self._counts["operations"] += 1
    if self._rng.random() < 0.1:
      self._counts["store errors"] += 1
      raise StoreError("injected")


class Publisher:
  def __init__(self, store, truth):
    self.chain = shipping.Chain(store)
    self.chain.take_over()
    self.truth = truth

  def publish(self, weights):
    """The baseline is what the chain says was committed, not what was sent."""
    committed = sorted(self.chain.versions)
    bases = [
      committed[-distance]
      for distance in shipping.skip_distances(len(committed))
      if committed[-distance] in self.truth
    ]
    if len(committed) % SNAPSHOT_EVERY == 0 or not bases:
      bases.append(None)
    deliveries = []
    for base in bases:
      held = None if base is None else self.truth[base]
      data = shipping.encode(weights, held)
      key = self.chain.new_key()
      self.chain.store.put_if_absent(key, data)
      shard = shipping.Shard(key, len(data), sha256(data))
      digest = "" if base is None else self.chain.versions[base].digest
      deliveries.append(shipping.Delivery(base, digest, (shard,)))
    version = self.chain.commit(
      digest=sha256(weights.tobytes()), deliveries=deliveries, codec="CJXD/1"
    )
    self.truth[version] = weights


class Reader:
  def __init__(self, store):
    self.chain = shipping.Chain(store)
    self.version = None
    self.weights = np.zeros(SIZE, ml_dtypes.bfloat16)

  def follow(self, counts):
    """Goes to the head around whatever is damaged; all or nothing."""
    broken = set()
    while True:
      self.chain.refresh()
      if self.chain.head in (None, self.version):
        return
      steps = shipping.plan(
        self.chain.deliveries, self.chain.head, self.version, broken
      )
      held = shipping.lease(self.chain, steps)
      if held is None:
        counts["plans made again"] += 1
        continue
      try:
        weights = self.weights
        for step in steps:
          weights = self._apply(step, weights, broken)
      except (DeltaError, shipping.MissingObjectError):
        counts["damage noticed"] += 1
        continue
      finally:
        shipping.release(self.chain.store, held)
      self.version, self.weights = self.chain.head, weights
      counts["versions exposed"] += 1
      counts["steps"] += len(steps)
      return

  def _apply(self, step, weights, broken):
    (shard,) = step.delivery.shards
    place = (step.version, step.delivery.base_version)
    broken.add(place)  # until it proves right
    data = self.chain.store.get(shard.key)
    if sha256(data) != shard.sha256:
      raise DeltaError("not the bytes that the manifest names")
    base = None if step.delivery.base_version is None else weights
    result = shipping.decode(data, base, out=np.empty_like(weights))
    if sha256(result.tobytes()) != self.chain.versions[step.version].digest:
      raise DeltaError("not the contents that the manifest names")
    broken.remove(place)
    return result


def damage(store, rng, counts):
  """Flips a bit of an object, cuts it, or loses it."""
  keys = list(store.list("data"))
  if not keys:
    return
  key = rng.choice(keys)
  data = bytearray(store.get(key))
  store.delete(key)
  kind = rng.choice(["bit flips", "truncations", "losses"])
  counts[kind] += 1
  if kind == "bit flips":
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif kind == "truncations":
    del data[rng.randrange(len(data)) :]
  if kind != "losses":
    store.put_if_absent(key, bytes(data))


@pytest.mark.parametrize("seed", [1, 3])
def test_nothing_lost_and_nothing_wrong_exposed(seed):
  rng = random.Random(seed)
  noise = np.random.default_rng(seed)
  counts = Counter()
  sound = ObjectStore(MemoryStore())
  store = RetryingStore(
    Faulty(sound._store, rng, counts), attempts=40, sleep=lambda _: None
  )
  truth = {}
  weights = noise.standard_normal(SIZE, dtype=np.float32)
  publishers = [Publisher(store, truth)]
  readers = [Reader(store) for _ in range(3)]
  for _ in range(150):
    weights = weights + 1e-3 * noise.standard_normal(SIZE, dtype=np.float32)
    if rng.random() < 0.05:
      publishers.append(Publisher(store, truth))
      counts["takeovers"] += 1
    publisher = rng.choice(publishers[-2:])
    try:
      publisher.publish(weights.astype(ml_dtypes.bfloat16))
      counts["versions"] += 1
    except FencedError:
      counts["publishers fenced off"] += 1
    except ChainError:  # its bases went; nothing was committed
      counts["commits refused"] += 1
      publisher.chain.refresh()
    if rng.random() < 0.1:
      shipping.collect(shipping.Chain(store))
      counts["collections"] += 1
    if rng.random() < 0.1:
      damage(sound, rng, counts)
    for lag, reader in zip((1, 7, 60), readers, strict=True):
      if rng.random() < 1 / lag:
        try:
          reader.follow(counts)
        except ChainError:
          counts["readers without a way, for now"] += 1
      if reader.version is not None:
        assert reader.weights.tobytes() == truth[reader.version].tobytes()
  assert counts["operations"] > 1000 and counts["store errors"] > 100
  assert list(shipping.Chain(sound).versions) == list(truth)
  assert len(truth) == counts["versions"] > 50
  # One snapshot makes everybody well again.
  last = Publisher(store, {})
  last.publish(weights.astype(ml_dtypes.bfloat16))
  for reader in readers:
    reader.follow(counts)
    assert reader.weights.tobytes() == last.truth[reader.version].tobytes()
  print(dict(counts))
