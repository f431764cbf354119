"""A store in a local folder; `shipping.store` says what a store is.

Bytes are written and synced in `.unfinished/`, then linked to their name: a
link fails if the name exists, and the name appears whole or not at all. What
killed writers leave is never visible, and removed by the next one, a day later.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from composer_jax.shipping.errors import MissingObjectError, StoreError
from composer_jax.shipping.keys import (
  bytes_wanted,
  check_key,
  check_range,
  check_whole,
)

_UNFINISHED = ".unfinished"  # No key begins with a dot.
_LEFTOVER_S = 24 * 3600.0


class FolderStore:
  """Objects are files below a folder of a POSIX file system with hard links."""

  def __init__(self, root: str | Path):
    self._root = Path(root)
    self._swept = False

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    check_range(start, size)
    with (
      _folder_errors(key),
      (self._root / check_key(key)).open("rb") as file,
    ):
      length = os.fstat(file.fileno()).st_size
      wanted = bytes_wanted(key, length, start, size)
      file.seek(start)
      return check_whole(key, file.read(wanted), wanted)

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    place = self._root / check_key(key)
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
        for path in (self._root / check_key(prefix)).rglob("*")
        if path.is_file()
      ]
    yield from sorted(found)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    with _folder_errors(key):
      (self._root / check_key(key)).unlink(missing_ok=True)

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
