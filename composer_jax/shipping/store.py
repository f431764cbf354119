"""Where versions lie: a local folder, or any object store that obstore speaks.

Objects never change, so five operations are enough. Two of them write:

- `put_if_absent` never replaces anything, which is the only conditional write
  that every store has, and enough for a log that two writers can't both extend.
  It succeeds too if the object already holds the very same bytes, so that a
  writer whose answer got lost may ask again. One request: for small objects.
- `put` is for data, under a key that nobody else writes (it holds a random
  number), and so needs no condition: stores can't attach one to an upload in
  parts, or not through obstore.

`folder_store` and `object_store` say how each is atomic, and what a cut upload
leaves, which is never visible.

Failures. `RetryingStore` repeats an operation that failed after an object
store's own retries of each request; finished parts are kept while a part is
retried.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from composer_jax.shipping.errors import (
  MissingObjectError,
  RangeError,
  StoreError,
)
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.object_store import open_object_store


@runtime_checkable
class Store(Protocol):
  """Immutable objects by key: segments of letters, digits, `._=-`, and `/`."""

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """An object, or a range of it; never fewer bytes than asked.

    Args:
      key: of the object.
      start: its first byte that counts.
      size: bytes to read; None means to the end.

    Raises:
      MissingObjectError: if there is no such object.
      RangeError: if the object ends before the range does.
      StoreError: if the store failed.
    """

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """Creates an object, whole and durable when this returns.

    Returns:
      Whether the object now holds `data`; False if it holds anything else.

    Raises:
      StoreError: if the store failed; the object may then exist or not.
    """

  def put(self, key: str, data: bytes) -> None:
    """Writes an object of any size, whole and durable when this returns.

    Args:
      key: that nobody else writes, nor this writer with other bytes.
      data: what it holds.

    Raises:
      StoreError: if the store failed; the object may then exist, whole, or not.
    """

  def list(self, prefix: str) -> Iterator[str]:
    """Keys below a folder, in order. `prefix` is whole segments.

    Raises:
      StoreError: if the store failed.
    """

  def delete(self, key: str) -> None:
    """Removes an object; nothing happens if there is none.

    Raises:
      StoreError: if the store failed.
    """


class RetryingStore:
  """Tries again when a store fails, after waits that double, with jitter."""

  def __init__(
    self,
    store: Store,
    *,
    attempts: int = 6,
    first_wait_s: float = 0.1,
    longest_wait_s: float = 10.0,
    sleep: Callable[[float], object] = time.sleep,
  ):
    """Wraps a store.

    Args:
      store: what to try.
      attempts: tries of one operation before its error is let through.
      first_wait_s: about how long to wait after the first failure, seconds.
      longest_wait_s: what the doubling stops at, seconds.
      sleep: for tests.
    """
    self._store = store
    self._waits = [
      min(longest_wait_s, first_wait_s * 2**i) for i in range(attempts - 1)
    ]
    self._sleep = sleep

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    return self._try(lambda: self._store.get(key, start, size))

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    return self._try(lambda: self._store.put_if_absent(key, data))

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    self._try(lambda: self._store.put(key, data))

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    yield from self._try(lambda: list(self._store.list(prefix)))

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    self._try(lambda: self._store.delete(key))

  def _try(self, operation):
    for wait in self._waits:
      try:
        return operation()
      except (MissingObjectError, RangeError):
        raise
      except StoreError:
        self._sleep(wait * random.uniform(0.5, 1.5))
    return operation()


def open_store(url: str, *, timeout_s: float = 60.0) -> Store:
  """A store by its address, with retries.

  Args:
    url: a path, or `s3://bucket/prefix`, `gs://...`, `az://...`; credentials
      come from the environment, as obstore documents.
    timeout_s: an object store that sends nothing for so long, seconds, counts
      as failed; so does one that takes longer to receive a request, which is a
      part at most. Connecting may take 5 s. Downloads may last.

  Raises:
    StoreError: if obstore is needed and missing, or refuses the address.
  """
  if "://" not in url:
    return RetryingStore(FolderStore(url))
  return RetryingStore(open_object_store(url, timeout_s=timeout_s))
