"""One log, one publisher at a time, and nothing goes that a reader uses."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import MemoryStore

from composer_jax.shipping import retention
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.errors import ChainError, FencedError, StoreError
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.manifest import (
  Delivery,
  Entry,
  Retired,
  Shard,
  sha256,
  to_bytes,
)
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.planner import plan
from composer_jax.shipping.store import RetryingStore


@pytest.fixture
def store():
  return ObjectStore(MemoryStore())


def publish(chain, bases, *, size=1, digest=None, metadata=None):
  """Commits a version with one object a delivery."""
  deliveries = []
  for base in bases:
    key = chain.new_key()
    data = b"x" * (1000 if base is None else size)
    assert chain.store.put_if_absent(key, data)
    base_digest = "" if base is None else chain.versions[base].digest
    shard = Shard(key, len(data), sha256(data))
    deliveries.append(Delivery(base, base_digest, (shard,)))
  digest = digest or f"{random.getrandbits(64):016x}"
  return chain.commit(
    digest=digest, deliveries=deliveries, codec="test", metadata=metadata
  )


def publisher(store):
  chain = Chain(store)
  chain.take_over()
  return chain


def test_readers_see_what_was_committed(store):
  chain = publisher(store)
  reader = Chain(store)
  assert reader.head is None
  first = publish(chain, [None], metadata={"step": 40})
  second = publish(chain, [first], metadata={"step": 40})  # resumed: same step
  reader.refresh()
  assert reader.versions == chain.versions
  assert reader.head == second > first
  assert reader.versions[first].metadata == {"step": 40}


def test_a_restart_continues_the_chain(tmp_path):
  chain = publisher(FolderStore(tmp_path))
  first = publish(chain, [None])
  again = publisher(FolderStore(tmp_path))
  assert again.head == first
  second = publish(again, [first])
  assert len(plan(again.deliveries, second)) == 2


def test_a_stalled_publisher_is_fenced_off(store):
  old = publisher(store)
  version = publish(old, [None])
  new = publisher(store)
  with pytest.raises(FencedError, match="epoch 1"):
    publish(old, [version])  # read nothing since
  publish(new, [version])
  with pytest.raises(FencedError):
    old.new_key()
  with pytest.raises(FencedError, match="take_over"):
    Chain(store).new_key()


def test_a_version_of_an_old_epoch_is_void(store):
  """What a publisher that doesn't check its fence could write at worst."""
  old = publisher(store)
  first = publish(old, [None])
  new = publisher(store)
  rogue = Chain(store)
  rogue._append(
    lambda: {"kind": "version", "epoch": 1, "manifest": old.versions[first]}
  )
  new.refresh()
  assert list(new.versions) == [first]
  assert publish(new, [first]) == max(Chain(store).versions)


def test_eight_publishers_at_once(tmp_path):
  """Each position has one entry, whoever wrote it."""

  def run(_):
    chain = Chain(FolderStore(tmp_path))
    done = fenced = 0
    for _ in range(6):
      try:
        chain.take_over()
        publish(chain, [None])
        done += 1
      except FencedError:
        fenced += 1
    return done, fenced

  with ThreadPoolExecutor(8) as pool:
    outcomes = list(pool.map(run, range(8)))
  chain = Chain(FolderStore(tmp_path))
  assert chain.epoch == 48
  assert len(chain.versions) == sum(done for done, _ in outcomes) > 0
  assert sum(done + fenced for done, fenced in outcomes) == 48


def test_lost_answers_make_no_version_twice(store):
  class Deaf(ObjectStore):
    def put_if_absent(self, key, data):
      created = super().put_if_absent(key, data)
      if rng.random() < 0.5:
        raise StoreError("no answer")
      return created

  rng = random.Random(0)
  deaf = Deaf(store._store)
  chain = publisher(RetryingStore(deaf, attempts=30, sleep=lambda _: None))
  versions = [publish(chain, [None]) for _ in range(50)]
  assert versions == list(range(1, 51)) == list(Chain(store).versions)


def test_a_wrong_base_is_never_committed(store):
  chain = publisher(store)
  first = publish(chain, [None])
  good = chain.versions[first].deliveries[0]
  for bad, message in (
    ([Delivery(99, "", good.shards)], "not in the chain"),
    ([Delivery(first, "00", good.shards)], "digest"),
    ([good, good], "two deliveries"),
    ([], "from nothing"),
  ):
    with pytest.raises(ChainError, match=message):
      chain.commit(digest="aa", deliveries=bad, codec="test")
  assert Chain(store).head == first


def test_a_damaged_log_is_refused(tmp_path):
  store = FolderStore(tmp_path)
  chain = publisher(store)
  for _ in range(3):
    publish(chain, [None])
  place = tmp_path / "log" / f"{2:012d}"
  entry = place.read_bytes()
  forged = entry.rpartition(b"\n")[0].replace(b'"size":1000', b'"size":1001')
  place.write_bytes(forged + b"\n" + sha256(forged).encode())
  with pytest.raises(ChainError, match="entry 3 of the log"):
    Chain(store)  # entry 3 names the hash of entry 2
  for damaged in (entry[:-5], entry.replace(b"1000", b"1001")):
    place.write_bytes(damaged)
    with pytest.raises(ChainError, match="entry 2 of the log"):
      Chain(store)


def test_collecting_keeps_a_way_to_the_head(store):
  chain = publisher(store)
  versions = [publish(chain, [None])]
  for i in range(1, 9):
    versions.append(publish(chain, [versions[-1]] + [None] * (i == 5)))
  reader = Chain(store)
  assert retention.collect(reader, keep=[versions[6]]) == 6
  kept = {v for v, ways in reader.deliveries.items() if ways}
  assert kept == set(versions[5:])
  for step in plan(reader.deliveries, versions[-1]):
    for shard in step.delivery.shards:
      assert sha256(store.get(shard.key)) == shard.sha256
  with pytest.raises(ChainError, match="no way leads"):
    retention.collect(reader, keep=[versions[2]])
  with pytest.raises(ChainError, match="from nothing"):
    publish(chain, [versions[2]])  # its base went meanwhile
  assert publish(chain, [versions[-1]]) == chain.head
  assert retention.collect(reader) == 0


def test_what_a_fenced_publisher_left_goes_and_the_rest_stays(store):
  old = publisher(store)
  old_key = old.new_key()
  store.put_if_absent(old_key, b"never committed")
  new = publisher(store)
  new_key = new.new_key()
  store.put_if_absent(new_key, b"about to be committed")
  assert retention.collect(Chain(store)) == 1
  assert list(store.list("data")) == [new_key]


def test_a_slow_reader_keeps_its_deltas(store):
  chain = publisher(store)
  first = publish(chain, [None])
  second = publish(chain, [first])
  reader = Chain(store)
  steps = plan(reader.deliveries, second)
  held = retention.lease(reader, steps, seconds=60.0, now=1000.0)
  publish(chain, [None])
  collector = Chain(store)
  assert retention.collect(collector, now=1050.0) == 0
  assert retention.lease(reader, steps, now=1050.0) is not None  # renewed
  retention.release(store, held)
  assert retention.collect(collector, now=1050.0) == 0
  later = 1050.0 + 600 + retention.CLOCK_SLACK_S + 1
  assert retention.collect(collector, now=later) == 2
  assert list(store.list("leases")) == []
  assert retention.lease(reader, steps, now=later) is None


def test_a_lease_renewed_under_the_collectors_eyes(store):
  """The listing names the old lease; it is gone when its turn comes."""
  chain = publisher(store)
  first = publish(chain, [None])
  reader = Chain(store)
  steps = plan(reader.deliveries, first)
  held = [retention.lease(reader, steps, now=0.0)]
  publish(chain, [None])
  chain.retire(lambda: [Retired(first, None)])

  class Renewed(ObjectStore):
    def list(self, prefix):
      found = list(super().list(prefix))
      if prefix == "leases" and len(held) == 1:
        held.append(retention.renew(store, held[0], now=1.0))
      return iter(found)

  collector = Chain(Renewed(store._store))
  assert retention.collect(collector, now=2.0) == 0
  assert store.get(steps[0].delivery.shards[0].key)
  with pytest.raises(ChainError, match="expired"):
    retention.renew(store, held[1], now=1e9)
  retention.release(store, held[1])
  assert retention.collect(collector, now=2.0) == 1


def test_an_unreadable_lease_stops_the_collector(store):
  chain = publisher(store)
  publish(chain, [None])
  publish(chain, [None])
  store.put_if_absent("leases/strange", b"?")
  with pytest.raises(ChainError, match="strange"):
    retention.collect(chain)
  assert len(list(store.list("data"))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_of_reader_and_collector(seed):
  """Every store operation of the collector is a chance for the reader."""
  rng = random.Random(seed)
  inner = ObjectStore(MemoryStore())
  chain = publisher(inner)
  first = publish(chain, [None])
  second = publish(chain, [first])
  reader = Chain(inner)
  steps = plan(reader.deliveries, second)
  publish(chain, [None])  # nobody but the reader needs first and second now
  moment = rng.randrange(12)
  held = []

  class Interrupted(ObjectStore):
    calls = 0

    def _tick(self):
      if self.calls == moment:
        held.append(retention.lease(reader, steps, now=0.0))
      self.calls += 1

    def get(self, key, start=0, size=None):
      self._tick()
      return super().get(key, start, size)

    def put_if_absent(self, key, data):
      self._tick()
      return super().put_if_absent(key, data)

    def list(self, prefix):
      self._tick()
      return super().list(prefix)

    def delete(self, key):
      self._tick()
      super().delete(key)

  collector = Chain(inner)
  collector.store = Interrupted(inner._store)
  retention.collect(collector, now=0.0)
  if held and held[0] is not None:
    for step in steps:
      for shard in step.delivery.shards:
        assert sha256(inner.get(shard.key)) == shard.sha256


def test_entries_name_their_writer(store):
  """Equal entries of two publishers would both count as written."""
  a, b = Chain(store), Chain(store)
  entry = {"position": 0, "kind": "takeover", "epoch": 1, "previous": ""}
  assert to_bytes(Entry(writer=a._writer, **entry)) != to_bytes(
    Entry(writer=b._writer, **entry)
  )


@pytest.fixture(scope="module")
def long_log():
  """A hundred entries, by position."""
  store = ObjectStore(MemoryStore())
  chain = publisher(store)
  version = publish(chain, [None])
  for _ in range(98):
    version = publish(chain, [version])
  return [store.get(key) for key in store.list("log")]


def restored(entries):
  store = ObjectStore(MemoryStore())
  for position, entry in entries:
    store.put_if_absent(f"log/{position:012d}", entry)
  return store


def test_a_late_joiner_reads_ahead(long_log):
  class Counting(ObjectStore):
    calls = now = most = 0
    lock = threading.Lock()

    def get(self, key, start=0, size=None):
      with self.lock:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
      time.sleep(0.02)
      try:
        return super().get(key, start, size)
      finally:
        with self.lock:
          self.now -= 1

  store = Counting(restored(enumerate(long_log))._store)
  chain = Chain(store)
  assert list(chain.versions) == list(range(1, 100))
  assert 30 <= store.most <= 64
  assert store.calls <= 100 + 64
  store.calls = 0
  chain.refresh()
  assert store.calls == 1


@pytest.mark.parametrize("hole", [0, 1, 2, 3, 31, 50, 99])
def test_reading_ahead_stops_at_a_hole(long_log, hole):
  """What lies behind a missing entry isn't part of the log."""
  entries = [(i, e) for i, e in enumerate(long_log) if i != hole]
  store = restored(entries)
  chain = Chain(store)
  assert chain.head == (hole - 1 if hole > 1 else None)
  store.put_if_absent(f"log/{hole:012d}", long_log[hole])
  chain.refresh()
  assert chain.head == 99


@pytest.mark.parametrize("bad", [1, 2, 3, 31, 50, 99])
def test_reading_ahead_stops_at_damage(long_log, bad):
  damaged = list(enumerate(long_log))
  damaged[bad] = (bad, damaged[bad][1][:-5])
  store = restored(damaged)
  chain = Chain(restored([]))
  chain.store = store
  for _ in range(2):
    with pytest.raises(ChainError, match=f"entry {bad} of the log"):
      chain.refresh()
    assert chain._length == bad
  store.delete(f"log/{bad:012d}")
  store.put_if_absent(f"log/{bad:012d}", long_log[bad])
  chain.refresh()
  assert chain.head == 99


@pytest.mark.parametrize("bad", [0, 1, 2, 31, 50, 99])
def test_reading_ahead_goes_on_after_an_error(long_log, bad):
  class Failing(ObjectStore):
    sick = True

    def get(self, key, start=0, size=None):
      if self.sick and key.endswith(f"{bad:012d}"):
        raise StoreError("down")
      return super().get(key, start, size)

  chain = Chain(restored([]))
  chain.store = Failing(restored(enumerate(long_log))._store)
  with pytest.raises(StoreError, match="down"):
    chain.refresh()
  assert chain._length == bad
  chain.store.sick = False
  chain.refresh()
  assert chain.head == 99
