"""Where versions lie: a local folder, or any object store that obstore speaks.

Objects never change, so five operations are enough. Two of them write:

- `put_if_absent` never replaces anything, which is the only conditional write
  that every store has, and enough for a log that two writers can't both extend.
  It succeeds too if the object already holds the very same bytes, so that a
  writer whose answer got lost may ask again. One request: for small objects.
- `put` is for data, under a key that nobody else writes (it holds a random
  number), and so needs no condition: stores can't attach one to an upload in
  parts, or not through obstore.

How each is atomic. Folder: the bytes are written and synced in `.unfinished/`,
then linked to their name; a link fails if the name exists, and the name appears
whole or not at all. S3 and Azure: a PUT with `If-None-Match: *`; Google: one
that expects generation 0. Parts show as one object once the upload is
completed (S3, Google: CompleteMultipartUpload; Azure: Put Block List).

What a cut upload leaves is never visible. A folder's leftovers are removed by
the next writer, a day later. An upload in parts that fails is aborted; one
whose process dies stays hidden, and costs storage, until the bucket's lifecycle
rule `AbortIncompleteMultipartUpload` (S3, Google) removes it: set one. Azure
drops blocks that nobody committed after a week.

Failures. Each request to an object store, so each part too, is tried again a
few times on its own, and a download continues where it broke; after that,
`RetryingStore` repeats the operation. So finished parts are kept while a part
is retried; an upload that failed for good, or whose process died, starts anew,
since obstore can't take up one that another process began.
"""

import contextlib
import datetime
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
_UNFINISHED = ".unfinished"  # No key begins with a dot.
_LEFTOVER_S = 24 * 3600.0

# A part; S3 takes 10,000 of at least 5 MiB. Up to PARTS_AT_ONCE of them are
# under way, and in memory once more than they are.
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 8


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


class FolderStore:
  """Objects are files below a folder of a POSIX file system with hard links."""

  def __init__(self, root: str | Path):
    self._root = Path(root)
    self._swept = False

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
    unfinished = self._root / _UNFINISHED / uuid.uuid4().hex
    with _folder_errors(key):
      self._sweep()
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

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`; one write, which begins anew if it was cut."""
    if not self.put_if_absent(key, data):
      raise StoreError(f"{key} is taken, by other bytes")

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    with _folder_errors(prefix):
      found = [
        path.relative_to(self._root).as_posix()
        for path in (self._root / _checked(prefix)).rglob("*")
        if path.is_file()
      ]
    yield from sorted(found)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    with _folder_errors(key):
      (self._root / _checked(key)).unlink(missing_ok=True)

  def _sweep(self):
    """Removes what killed writers left, once."""
    if self._swept:
      return
    folder = self._root / _UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.iterdir():
      with contextlib.suppress(FileNotFoundError):  # another one swept, or done
        if leftover.stat().st_mtime < time.time() - _LEFTOVER_S:
          leftover.unlink()
    self._swept = True


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

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`; in parts where it is large."""
    try:
      with _obstore_errors(key):
        self._store.put(
          _checked(key),
          data,
          use_multipart=len(data) > PART_BYTES,
          chunk_size=max(PART_BYTES, -(-len(data) // 10_000)),
          max_concurrency=PARTS_AT_ONCE,
        )
    except StoreError as error:
      # Perhaps only the answer was lost: S3 then knows no such upload when it
      # is asked again to complete it.
      with contextlib.suppress(StoreError), _obstore_errors(key):
        if self._store.head(key)["size"] == len(data):
          return
      raise StoreError(str(error)) from error

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
  try:
    import obstore.store
  except ImportError:
    raise StoreError(
      f"{url} needs obstore: pip install 'composer-jax[ship]'"
    ) from None
  with _obstore_errors(url):
    store = obstore.store.from_url(
      url,
      client_options={
        # Options replace what the environment says of the client.
        "allow_http": any(
          os.environ.get(f"{cloud}_ALLOW_HTTP", "").lower() == "true"
          for cloud in ("AWS", "AZURE", "GOOGLE")
        ),
        "connect_timeout": "5s",
        "read_timeout": datetime.timedelta(seconds=timeout_s),
        "timeout": "1d",  # else 30 s for a whole download
      },
      retry_config={
        "max_retries": 3,
        "retry_timeout": datetime.timedelta(seconds=2 * timeout_s),
      },
    )
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
