"""Where versions lie: a local folder, or any object store that obstore speaks.

Four operations, of which one writes: `put_if_absent` never replaces anything,
which is the only conditional write that every store has, and enough for a log
that two writers can't both extend. It succeeds too if the object already holds
the very same bytes, so that a writer whose answer got lost may ask again.

How each is atomic. Folder: the bytes are written and synced beside their
place, then linked there; a link fails if the name exists, and the name appears
whole or not at all. S3 and Azure: a PUT with `If-None-Match: *`; Google: one
that expects generation 0. An object is written in one request, so it must be
smaller than the store's limit (5 GB on S3).
"""

import contextlib
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from composer_jax.shipping.errors import (
  MissingObjectError,
  RangeError,
  StoreError,
)

_KEY = re.compile(
  r"[A-Za-z0-9_][A-Za-z0-9._=-]*(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*"
)
_UNFINISHED = ".unfinished-"


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


class FolderStore:
  """Objects are files below a folder of a POSIX file system with hard links."""

  def __init__(self, root: str | Path):
    self._root = Path(root)

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    _check_range(start, size)
    with (
      _folder_errors(key),
      (self._root / _checked(key)).open("rb") as file,
    ):
      length = os.fstat(file.fileno()).st_size
      wanted = _wanted(key, length, start, size)
      file.seek(start)
      return _whole(key, file.read(wanted), wanted)

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    place = self._root / _checked(key)
    unfinished = place.with_name(_UNFINISHED + uuid.uuid4().hex)
    with _folder_errors(key):
      place.parent.mkdir(parents=True, exist_ok=True)
      try:
        with unfinished.open("xb") as file:
          file.write(data)
          file.flush()
          os.fsync(file.fileno())
        try:
          os.link(unfinished, place)
        except FileExistsError:
          return place.read_bytes() == data
        _sync_folder(place.parent)
        return True
      finally:
        unfinished.unlink(missing_ok=True)

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`; what a killed writer left behind is not listed."""
    with _folder_errors(prefix):
      found = [
        path.relative_to(self._root).as_posix()
        for path in (self._root / _checked(prefix)).rglob("*")
        if not path.name.startswith(_UNFINISHED) and path.is_file()
      ]
    yield from sorted(found)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    with _folder_errors(key):
      (self._root / _checked(key)).unlink(missing_ok=True)


class ObjectStore:
  """Any store of obstore: S3, Google, Azure, or memory (for tests)."""

  def __init__(self, store):
    """Takes an `obstore.store.ObjectStore`."""
    self._store = store

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    from obstore.exceptions import BaseError

    _check_range(start, size)
    if (start, size) == (0, None):
      options = None
    elif size is None:
      options = {"range": {"offset": start}}
    else:
      options = {"range": (start, start + size)}
    with _obstore_errors(key):
      try:
        answer = self._store.get(_checked(key), options=options)
        length = answer.meta["size"]
        data = bytes(answer.bytes())
      except BaseError:
        # Whatever reads no byte is an error to obstore: past the end, at it.
        if options is None:
          raise
        length, data = self._store.head(key)["size"], b""
        if _wanted(key, length, start, size):
          raise
      return _whole(key, data, _wanted(key, length, start, size))

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    from obstore.exceptions import AlreadyExistsError

    with _obstore_errors(key):
      try:
        self._store.put(_checked(key), data, mode="create", use_multipart=False)
      except AlreadyExistsError:
        return self.get(key) == data
    return True

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    with _obstore_errors(prefix):
      found = [
        item["path"]
        for page in self._store.list(_checked(prefix))
        for item in page
      ]
    yield from sorted(found)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    with (
      contextlib.suppress(MissingObjectError),  # only some stores mind
      _obstore_errors(key),
    ):
      self._store.delete(_checked(key))


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


def open_store(url: str) -> Store:
  """A store by its address, with retries.

  Args:
    url: a path, or `s3://bucket/prefix`, `gs://...`, `az://...`; credentials
      come from the environment, as obstore documents.

  Raises:
    StoreError: if obstore is needed and missing, or refuses the address.
  """
  if "://" not in url:
    return RetryingStore(FolderStore(url))
  try:
    import obstore.store
  except ImportError:
    raise StoreError(
      f"{url} needs obstore: pip install 'composer-jax[ship]'"
    ) from None
  with _obstore_errors(url):
    # Retries are counted in one place.
    store = obstore.store.from_url(url, retry_config={"max_retries": 0})
  return RetryingStore(ObjectStore(store))


def _checked(key):
  if not _KEY.fullmatch(key):
    raise ValueError(f"{key!r} is not a key: segments of A-Z a-z 0-9 . _ = -")
  return key


def _check_range(start, size):
  if start < 0 or (size is not None and size < 0):
    raise ValueError(f"no range: {size} bytes from {start}")


def _wanted(key, length, start, size):
  """How many bytes a range holds, of an object of `length`."""
  end = max(start, length) if size is None else start + size
  if end > length:
    raise RangeError(f"{key} has {length} bytes, not the {end} expected")
  return end - start


def _whole(key, data, wanted):
  if len(data) != wanted:
    raise StoreError(f"{key}: {len(data)} bytes came of {wanted}")
  return data


def _sync_folder(folder):
  """Makes names in a folder durable."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def _folder_errors(key):
  try:
    yield
  except FileNotFoundError as error:
    raise MissingObjectError(f"no object {key}") from error
  except OSError as error:
    raise StoreError(f"{key}: {error}") from error


@contextlib.contextmanager
def _obstore_errors(key):
  from obstore.exceptions import BaseError, NotFoundError

  try:
    yield
  except (FileNotFoundError, NotFoundError) as error:
    raise MissingObjectError(f"no object {key}") from error
  except (BaseError, OSError) as error:
    raise StoreError(f"{key}: {error}") from error
