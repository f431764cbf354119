"""One suite for every backend, then what can go wrong on the way there."""

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from composer_jax.shipping import object_store
from composer_jax.shipping.errors import (
  MissingObjectError,
  RangeError,
  StoreError,
)
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.store import RetryingStore, open_store


@pytest.fixture(params=["folder", "obstore memory", "obstore folder", "S3"])
def store(request, tmp_path):
  return {
    "folder": lambda: FolderStore(tmp_path),
    "obstore memory": lambda: ObjectStore(MemoryStore()),
    "obstore folder": lambda: ObjectStore(LocalStore(tmp_path)),
    "S3": lambda: open_store(request.getfixturevalue("s3_url")),
  }[request.param]()


def test_objects_come_back_and_go(store):
  assert store.put_if_absent("a/b/1", b"one")
  assert store.put_if_absent("a/2", b"")
  assert store.put_if_absent("ab/3", b"three")
  assert store.get("a/b/1") == b"one"
  assert store.get("a/2") == b""
  assert list(store.list("a")) == ["a/2", "a/b/1"]
  assert list(store.list("nothing")) == []
  store.delete("a/2")
  store.delete("a/2")
  with pytest.raises(MissingObjectError, match="a/2"):
    store.get("a/2")


def test_ranges_are_whole_or_an_error(store):
  store.put_if_absent("key", b"0123456789")
  store.put_if_absent("empty", b"")
  assert store.get("key", 3) == b"3456789"
  assert store.get("key", 3, 4) == b"3456"
  assert store.get("key", 0, 10) == b"0123456789"
  assert store.get("key", 9, 1) == b"9"
  for at_the_end in [("key", 10), ("key", 10, 0), ("key", 4, 0), ("empty", 0)]:
    assert store.get(*at_the_end) == b""
  for beyond in [
    ("key", 0, 11),
    ("key", 9, 2),
    ("key", 10, 1),
    ("key", 11),
    ("key", 11, 0),
    ("key", 20, 5),
    ("empty", 0, 1),
    ("empty", 1),
  ]:
    with pytest.raises(RangeError, match=beyond[0]):
      store.get(*beyond)
  with pytest.raises(MissingObjectError):
    store.get("nothing", 3, 4)
  for bad in [("key", -1), ("key", 0, -1)]:
    with pytest.raises(ValueError, match="no range"):
      store.get(*bad)


def test_an_object_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
  """A short read is an error, worth another try."""
  store = FolderStore(tmp_path)
  store.put_if_absent("key", b"0123456789")
  sizes = os.stat_result([0, 0, 0, 0, 0, 0, 12, 0, 0, 0])
  monkeypatch.setattr(os, "fstat", lambda _: sizes)
  with pytest.raises(StoreError, match="10 bytes came of 12") as caught:
    store.get("key")
  assert not isinstance(caught.value, RangeError)


def test_nothing_is_ever_replaced(store):
  assert store.put_if_absent("key", b"first")
  assert not store.put_if_absent("key", b"second")
  assert store.put_if_absent("key", b"first")  # an answer that got lost
  assert store.get("key") == b"first"


def test_a_race_has_one_winner(store):
  for turn in range(20):
    with ThreadPoolExecutor(8) as pool:
      won = list(
        pool.map(
          lambda i, key=f"race/{turn}": store.put_if_absent(key, b"%d" % i),
          range(8),
        )
      )
    assert sum(won) == 1
    assert store.get(f"race/{turn}") == b"%d" % won.index(True)


def test_large_objects_go_in_parts(store, monkeypatch):
  monkeypatch.setattr(object_store, "PART_BYTES", 5 * 2**20)
  data = random.Random(0).randbytes(12 * 2**20 + 7)
  store.put("data/large", data)
  store.put("data/large", data)  # an answer that got lost
  store.put("data/small", b"small")
  assert store.get("data/large") == data
  assert store.get("data/large", 5 * 2**20 - 1, 2) == data[5 * 2**20 - 1 :][:2]
  assert store.get("data/small") == b"small"
  assert list(store.list("data")) == ["data/large", "data/small"]


def test_listings_are_whole_and_in_order(store):
  """More keys than a page of S3's listing holds; it ends folders late."""
  keys = [f"many/{i:05d}" for i in range(1005)] + [
    "many/1/x",
    "many/1=",
    "mann",
  ]
  with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda key: store.put(key, b""), keys))
  assert list(store.list("many")) == sorted(keys[:-1])


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", ".a", "a b"])
def test_keys_stay_inside(store, key):
  for operation in (
    lambda: store.get(key),
    lambda: store.put_if_absent(key, b""),
    lambda: store.put(key, b""),
    lambda: list(store.list(key)),
    lambda: store.delete(key),
  ):
    with pytest.raises(ValueError, match="not a key"):
      operation()


def test_a_killed_writer_leaves_nothing_to_see(tmp_path):
  """Killed between the write and the link."""
  program = (
    "import os, signal\n"
    "from composer_jax.shipping.folder_store import FolderStore\n"
    "os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    f"FolderStore({str(tmp_path)!r}).put_if_absent('a/key', b'half')\n"
  )
  assert subprocess.run([sys.executable, "-c", program]).returncode == -9
  store = FolderStore(tmp_path)
  (leftover,) = (tmp_path / ".unfinished").iterdir()
  assert list(store.list("a")) == []
  assert store.put_if_absent("a/key", b"whole")
  assert list(store.list("a")) == ["a/key"]
  assert leftover.exists()  # its writer might live
  two_days_ago = time.time() - 2 * 24 * 3600
  os.utime(leftover, (two_days_ago, two_days_ago))
  assert FolderStore(tmp_path).put_if_absent("a/other", b"")
  assert list((tmp_path / ".unfinished").iterdir()) == []


def test_a_folder_notices_two_writers_of_one_key(tmp_path):
  store = FolderStore(tmp_path)
  store.put("key", b"mine")
  with pytest.raises(StoreError, match="taken"):
    store.put("key", b"other")
  assert store.get("key") == b"mine"


class Flaky:
  """Fails at random, before an operation or after it took effect."""

  def __init__(self, store, rng):
    self._store, self._rng = store, rng
    self.failures = 0

  def get(self, key, start=0, size=None):
    return self._maybe(lambda: self._store.get(key, start, size))

  def put_if_absent(self, key, data):
    return self._maybe(lambda: self._store.put_if_absent(key, data))

  def put(self, key, data):
    return self._maybe(lambda: self._store.put(key, data))

  def list(self, prefix):
    return iter(self._maybe(lambda: list(self._store.list(prefix))))

  def delete(self, key):
    return self._maybe(lambda: self._store.delete(key))

  def _maybe(self, operation):
    fate = self._rng.random()
    if fate < 0.2:
      self._fail()
    result = operation()
    if fate > 0.8:
      self._fail()
    return result

  def _fail(self):
    self.failures += 1
    raise StoreError("the wire broke")


def test_a_thousand_operations_over_a_bad_wire():
  rng = random.Random(0)
  flaky = Flaky(ObjectStore(MemoryStore()), rng)
  waits = []
  store = RetryingStore(flaky, attempts=20, sleep=waits.append)
  truth = {}
  for i in range(1000):
    key = f"k/{rng.randrange(100)}"
    if rng.random() < 0.7:
      created = store.put_if_absent(key, b"%d" % i)
      assert created == (key not in truth)
      truth.setdefault(key, b"%d" % i)
    elif rng.random() < 0.5:
      store.delete(key)
      truth.pop(key, None)
    elif key in truth:
      assert store.get(key) == truth[key]
    else:
      with pytest.raises(MissingObjectError):
        store.get(key)
    assert list(store.list("k")) == sorted(truth)
  assert flaky.failures > 500
  assert len(waits) == flaky.failures and max(waits) <= 15


def test_patience_ends():
  class Broken(FolderStore):
    calls = 0

    def get(self, key, start=0, size=None):
      self.calls += 1
      raise StoreError("down")

  waits, broken = [], Broken(".")
  with pytest.raises(StoreError, match="down"):
    RetryingStore(broken, attempts=4, sleep=waits.append).get("k")
  assert broken.calls == 4
  assert len(waits) == 3 and waits[2] > waits[0]


def test_addresses(tmp_path):
  store = open_store(str(tmp_path / "new"))
  assert store.put_if_absent("k", b"v")
  assert (tmp_path / "new" / "k").read_bytes() == b"v"
  assert open_store("memory:///").put_if_absent("k", b"v")
  with pytest.raises(StoreError):
    open_store("nonsense://x")


def test_a_failure_is_told_in_one_sentence(tmp_path):
  nobody = S3Store(
    "bucket",
    endpoint="http://127.0.0.1:9",
    access_key_id="a",
    secret_access_key="b",
    region="nowhere",
    client_options={"allow_http": True},
    retry_config={"max_retries": 0},
  )
  store = ObjectStore(nobody)
  for ask in (
    lambda: store.get("data/x"),
    lambda: store.put_if_absent("data/x", b""),
    lambda: store.put("data/x", b""),
    lambda: list(store.list("data")),
  ):
    with pytest.raises(StoreError) as caught:
      ask()
    said = str(caught.value)
    assert said.startswith("data") and "http://127.0.0.1:9/bucket" in said
    assert said.endswith("(Connection refused)")
    assert "\n" not in said and len(said) < 200
  with pytest.raises(StoreError, match=r"Unable to recognise URL .s4://x.$"):
    open_store("s4://x")


def test_a_missing_bucket_is_no_missing_object(s3_url):
  """Or a typo would look like a chain that nobody began."""
  address = s3_url.replace("s3://", "s3://no-")
  store = object_store.open_object_store(address, timeout_s=60.0)
  for ask in (
    lambda: store.get("data/x"),
    lambda: store.put_if_absent("data/x", b""),
    lambda: store.put("data/x", b""),
    lambda: list(store.list("data")),
  ):
    with pytest.raises(StoreError, match=r"bucket does not exist\)$") as caught:
      ask()
    assert not isinstance(caught.value, MissingObjectError)
    assert "\n" not in str(caught.value)
