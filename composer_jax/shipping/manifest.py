"""What a chain's log says, and the one way to write it as bytes.

JSON with sorted keys and no spaces, and on a second line its SHA-256, against
damage. An entry names the SHA-256 of the entry before it, so that the last one
vouches for all. Whatever doesn't read back to the very same bytes is refused,
and nothing is ever unpickled.
"""

import dataclasses
import hashlib
import json
from typing import Literal

import dacite

from composer_jax.shipping.errors import ChainError

# A manifest of a million shards has about so many bytes.
MAX_ENTRY_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Shard:
  """One object in the store.

  Attributes:
    key: where it is.
    size: its bytes.
    sha256: of them, in hexadecimal.
  """

  key: str
  size: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Delivery:
  """One way to get a version.

  Attributes:
    base_version: what to apply it to; None is a snapshot.
    base_digest: of the base's contents; "" for a snapshot.
    shards: what to download, or parts of.
    indexes: what to download first, whole; they say what is where in `shards`.
  """

  base_version: int | None
  base_digest: str
  shards: tuple[Shard, ...]
  indexes: tuple[Shard, ...] = ()

  @property
  def objects(self) -> tuple[Shard, ...]:
    """All that it consists of."""
    return self.indexes + self.shards

  @property
  def size(self) -> int:
    """Bytes to download."""
    return sum(shard.size for shard in self.objects)


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a version is, and the ways to get it.

  Attributes:
    digest: of its contents, as the publisher defines it; hexadecimal.
    deliveries: at most one for each base.
    codec: how shards are written.
    metadata: the user's: step, run, what JSON can say.
  """

  digest: str
  deliveries: tuple[Delivery, ...]
  codec: str
  metadata: dict


@dataclasses.dataclass(frozen=True)
class Retired:
  """A delivery that readers must not start to use any more."""

  version: int
  base_version: int | None


@dataclasses.dataclass(frozen=True)
class Entry:
  """One position of the log.

  Attributes:
    position: of the log; that of a version is the version's number.
    kind: what it is.
    epoch: how many takeovers there were, this one included.
    writer: who wrote it; unique.
    previous: SHA-256 of the entry before it; "" for the first.
    manifest: of a version.
    retired: of a retirement.
  """

  position: int
  kind: Literal["takeover", "version", "retirement"]
  epoch: int
  writer: str
  previous: str
  manifest: Manifest | None = None
  retired: tuple[Retired, ...] = ()


def sha256(data: bytes) -> str:
  """SHA-256 in hexadecimal."""
  return hashlib.sha256(data).hexdigest()


def to_bytes(entry: Entry) -> bytes:
  """The canonical bytes of an entry.

  Raises:
    ChainError: if metadata is not JSON, or it is too long to be read back.
  """
  try:
    data = json.dumps(
      dataclasses.asdict(entry),
      sort_keys=True,
      separators=(",", ":"),
      allow_nan=False,
    ).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise ChainError(f"metadata can't be written as JSON: {error}") from None
  data += b"\n" + sha256(data).encode()
  if len(data) > MAX_ENTRY_BYTES:
    raise ChainError(
      f"an entry of {len(data)} bytes; {MAX_ENTRY_BYTES} at most"
    )
  return data


def from_bytes(data: bytes) -> Entry:
  """Inverse of `to_bytes`.

  Raises:
    ChainError: if these aren't the canonical bytes of an entry.
  """
  if len(data) > MAX_ENTRY_BYTES:
    raise ChainError(
      f"an entry of {len(data)} bytes; {MAX_ENTRY_BYTES} at most"
    )
  try:
    config = dacite.Config(strict=True, cast=[tuple])
    text, _, digest = data.rpartition(b"\n")
    if sha256(text).encode() != digest:
      raise ChainError("the entry is damaged: its digest is another")
    entry = dacite.from_dict(Entry, json.loads(text), config)
    if to_bytes(entry) == data:
      return entry
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise ChainError(f"not an entry of a chain: {error}") from None
  except dacite.DaciteError as error:
    raise ChainError(f"not an entry of a chain: {error}") from None
  raise ChainError("not an entry of a chain: the bytes are not canonical")
