"""Stores around a store: below a prefix, counted, or slowed down.

For measurements and for whoever shares a bucket: `Publisher` and `Subscriber`
take them as they take any store.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from composer_jax.shipping.store import Store


class Wrapper:
  """Passes every operation on."""

  def __init__(self, store: Store):
    self._store = store

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    return self._store.get(key, start, size)

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    return self._store.put_if_absent(key, data)

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    self._store.put(key, data)

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    return self._store.list(prefix)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    self._store.delete(key)


class Prefixed(Wrapper):
  """A store of its own below a folder of another."""

  def __init__(self, store: Store, prefix: str):
    """Takes a store and whole segments of a key, without the last slash."""
    super().__init__(store)
    self._prefix = f"{prefix}/"

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    return self._store.get(self._prefix + key, start, size)

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    return self._store.put_if_absent(self._prefix + key, data)

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    self._store.put(self._prefix + key, data)

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    for key in self._store.list(self._prefix + prefix):
      yield key.removeprefix(self._prefix)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    self._store.delete(self._prefix + key)


class Meter:
  """Counts one direction; for any number of threads.

  Attributes:
    bytes: transferred.
    seconds: in which at least one transfer was under way.
  """

  def __init__(self):
    self.bytes = 0
    self.seconds = 0.0
    self._active = 0
    self._since = 0.0
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def transfer(self) -> Iterator[None]:
    """Times what happens inside."""
    with self._lock:
      if not self._active:
        self._since = time.monotonic()
      self._active += 1
    try:
      yield
    finally:
      with self._lock:
        self._active -= 1
        if not self._active:
          self.seconds += time.monotonic() - self._since

  def add(self, size: int) -> None:
    """Counts bytes."""
    with self._lock:
      self.bytes += size

  @property
  def mb_per_s(self) -> float:
    """Megabytes a second while transfers lasted."""
    return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


class Counted(Wrapper):
  """Counts bytes and seconds.

  Attributes:
    down: what `get` read.
    up: what was written.
  """

  def __init__(
    self,
    store: Store,
    observe: Callable[[str, int], object] = lambda stage, size: None,
  ):
    """Wraps a store; `observe` is told "down" or "up", and bytes."""
    super().__init__(store)
    self._observe = observe
    self.down = Meter()
    self.up = Meter()

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    with self.down.transfer():
      data = self._store.get(key, start, size)
    self.down.add(len(data))
    self._observe("down", len(data))
    return data

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    with self._writing(len(data)):
      return self._store.put_if_absent(key, data)

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    with self._writing(len(data)):
      self._store.put(key, data)

  @contextlib.contextmanager
  def _writing(self, size):
    with self.up.transfer():
      yield
    self.up.add(size)
    self._observe("up", size)


class Throttled(Wrapper):
  """A link of limited bandwidth, the same both ways, shared by all threads."""

  def __init__(self, store: Store, bytes_per_s: float):
    super().__init__(store)
    self._bytes_per_s = bytes_per_s
    self._free = {"down": 0.0, "up": 0.0}
    self._lock = threading.Lock()

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    data = self._store.get(key, start, size)
    self._wait("down", len(data))
    return data

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    self._wait("up", len(data))
    return self._store.put_if_absent(key, data)

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    self._wait("up", len(data))
    self._store.put(key, data)

  def _wait(self, way, size):
    with self._lock:
      now = time.monotonic()
      free = max(now, self._free[way]) + size / self._bytes_per_s
      self._free[way] = free
    time.sleep(free - now)
