"""What a reader keeps on its own disk, so that a restart costs seconds.

    <folder>/version-<n>/index      what the version holds (shipping.index)
    <folder>/version-<n>/contents   the bits of its chunks, one after the other
    <folder>/incoming/<sha256>      deltas downloaded and not applied yet
    <folder>/policy.json            what the reader was told to pin or skip

A version is written beside its place and renamed; it is believed only if its
digest is the chain's, and each chunk only if its digest is the version's.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from composer_jax.shipping import index as indexes
from composer_jax.shipping.contents import Chunk, digest_of
from composer_jax.shipping.errors import ChainError
from composer_jax.shipping.index import Index, Place
from composer_jax.shipping.manifest import sha256
from composer_jax.shipping.reader import Payloads, Replica

_VERSION = re.compile(r"version-(\d+)")
_UNFINISHED = ".unfinished-"
_log = logging.getLogger(__name__)


class Cache(Payloads):
  """One reader's folder; no two readers may share one."""

  def __init__(self, folder: str | os.PathLike):
    self._folder = Path(folder)
    self._incoming = self._folder / "incoming"
    self._incoming.mkdir(parents=True, exist_ok=True)
    for left in self._folder.rglob(f"{_UNFINISHED}*"):
      if left.is_dir():
        shutil.rmtree(left, ignore_errors=True)
      else:
        left.unlink()

  def get(self, digest: str) -> bytes | None:
    """See `Payloads.get`."""
    try:
      data = (self._incoming / digest).read_bytes()
    except OSError:
      return None
    return data if sha256(data) == digest else None

  def add(self, digest: str, data: bytes) -> None:
    """See `Payloads.add`; a full disk only costs a second download."""
    unfinished = self._incoming / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
      unfinished.write_bytes(data)
      unfinished.replace(self._incoming / digest)
    except OSError as error:
      _log.warning("a delta was not cached: %s", error)
      unfinished.unlink(missing_ok=True)

  def clear_payloads(self) -> None:
    """Removes deltas that are applied and saved."""
    for path in self._incoming.iterdir():
      path.unlink(missing_ok=True)

  def save(self, replica: Replica) -> None:
    """Writes a version, then removes the others.

    Raises:
      OSError: if it can't be written; what was there stays.
    """
    unfinished = self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
      places = {}
      with (unfinished / "contents").open("xb") as file:
        for chunk, array in replica.data.items():
          offset = file.tell()
          file.write(_bytes(array))
          places[chunk] = Place("contents", offset, file.tell() - offset, "")
        _sync(file)
      with (unfinished / "index").open("xb") as file:
        file.write(indexes.to_bytes(Index(replica.contents, places)))
        _sync(file)
      place = self._folder / f"version-{replica.version}"
      shutil.rmtree(place, ignore_errors=True)
      unfinished.rename(place)
    finally:
      shutil.rmtree(unfinished, ignore_errors=True)
    for version, path in self._versions().items():
      if version != replica.version:
        shutil.rmtree(path, ignore_errors=True)

  def load(
    self, digests: Mapping[int, str], wants: Callable[[Chunk], bool]
  ) -> Replica | None:
    """The newest version that is here, whole and undamaged.

    Args:
      digests: version -> digest, as the chain says.
      wants: which chunks must be there.

    Returns:
      What was saved, or None.
    """
    for version, path in sorted(self._versions().items(), reverse=True):
      try:
        return _load(version, path, digests.get(version), wants)
      except (OSError, ChainError, ValueError) as error:
        _log.warning("%s is of no use: %s", path, error)
    return None

  def read_policy(self) -> dict:
    """What `write_policy` wrote; {} at first."""
    path = self._folder / "policy.json"
    try:
      return json.loads(path.read_text())
    except FileNotFoundError:
      return {}
    except ValueError as error:
      raise ChainError(
        f"{path} can't be read ({error}); delete it, then pin and skip again"
      ) from None

  def write_policy(self, policy: dict) -> None:
    """Keeps what the reader was told."""
    unfinished = self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
    with contextlib.ExitStack() as undo:
      undo.callback(unfinished.unlink, missing_ok=True)
      with unfinished.open("x") as file:
        json.dump(policy, file)
        _sync(file)
      unfinished.replace(self._folder / "policy.json")

  def _versions(self) -> dict[int, Path]:
    return {
      int(match[1]): path
      for path in self._folder.iterdir()
      if (match := _VERSION.fullmatch(path.name))
    }


def _load(version, path, digest, wants) -> Replica:
  index = indexes.from_bytes((path / "index").read_bytes())
  index.contents.check()
  if index.contents.digest() != digest:
    raise ChainError("it is not the version of this number in the chain")
  data = {}
  with (path / "contents").open("rb") as file:
    for chunk in filter(wants, index.contents.digests):
      place = index.places[chunk]
      if not place.key:
        raise ChainError(f"{chunk} was not kept")
      file.seek(place.offset)
      dtype = np.dtype(index.contents.arrays[chunk.path].dtype)
      array = np.fromfile(file, dtype, chunk.box.size).reshape(chunk.box.shape)
      if digest_of(array) != index.contents.digests[chunk]:
        raise ChainError(f"{chunk} is damaged")
      data[chunk] = array
  return Replica(version, index.contents, data)


def _bytes(array) -> memoryview:
  return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _sync(file) -> None:
  file.flush()
  os.fsync(file.fileno())
