"""What is where in a delivery: the object that a reader downloads first.

JSON, compressed by zlib. Each publishing process writes one index for its own
chunks; together they list every chunk of the version with the digest of its
contents, and where its delta lies. A chunk that equals its base lies nowhere.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterable

from composer_jax.shipping.contents import ArraySpec, Box, Chunk, Contents
from composer_jax.shipping.errors import ChainError

# A trillion parameters in chunks of 16 MiB have an index of a tenth of this.
MAX_INDEX_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Place:
  """Where the delta of a chunk lies.

  Attributes:
    key: of the object; "" if there is none, because the chunk equals its base.
    offset: its first byte there.
    size: its bytes.
    sha256: of them, in hexadecimal.
  """

  key: str
  offset: int
  size: int
  sha256: str


NOWHERE = Place("", 0, 0, "")


@dataclasses.dataclass(frozen=True)
class Index:
  """The contents of a version and where the deltas to it lie.

  Attributes:
    contents: arrays and chunks.
    places: in the order in which they lie; a chunk without one lies nowhere.
  """

  contents: Contents
  places: dict[Chunk, Place]


def to_bytes(index: Index) -> bytes:
  """Writes an index; the same index gives the same bytes."""
  arrays = sorted(index.contents.arrays.items())
  number = {path: i for i, (path, _) in enumerate(arrays)}
  places = index.places | {
    chunk: NOWHERE
    for chunk in index.contents.digests
    if chunk not in index.places
  }
  keys = sorted({place.key for place in places.values()})
  key_number = {key: i for i, key in enumerate(keys)}
  chunks = [
    [
      number[chunk.path],
      chunk.box.start,
      chunk.box.shape,
      index.contents.digests[chunk],
      key_number[place.key],
      place.offset,
      place.size,
      place.sha256,
    ]
    for chunk, place in places.items()
  ]
  fields = {
    "arrays": [[path, spec.shape, spec.dtype] for path, spec in arrays],
    "objects": keys,
    "chunks": chunks,
  }
  text = json.dumps(fields, separators=(",", ":")).encode()
  if len(text) > MAX_INDEX_BYTES:
    raise ChainError(f"an index of {len(text)} bytes; use larger chunks")
  return zlib.compress(text)


def from_bytes(data: bytes) -> Index:
  """Inverse of `to_bytes`, on bytes that anyone may have written.

  Raises:
    ChainError: if they aren't an index.
  """
  try:
    stream = zlib.decompressobj()
    text = stream.decompress(data, MAX_INDEX_BYTES)
    if not stream.eof or stream.unused_data:
      raise ChainError("an index is cut short, or too long")
    fields = json.loads(text)
    arrays = {
      _text(path): ArraySpec(_numbers(shape), _text(dtype))
      for path, shape, dtype in fields["arrays"]
    }
    paths = list(arrays)
    keys = [_text(key) for key in fields["objects"]]
    digests, places = {}, {}
    for number, start, shape, digest, key, offset, size, sha in fields[
      "chunks"
    ]:
      chunk = Chunk(paths[number], Box(_numbers(start), _numbers(shape)))
      digests[chunk] = _text(digest)
      places[chunk] = Place(keys[key], *_numbers([offset, size]), _text(sha))
  except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
    raise ChainError(f"not an index: {error}") from None
  except RecursionError:
    raise ChainError("not an index: it is nested without end") from None
  return Index(Contents(arrays, digests), places)


def merge(indexes: Iterable[Index]) -> Index:
  """The indexes of all publishing processes as one, checked.

  Raises:
    ChainError: if they don't agree, or chunks don't cover the arrays.
  """
  arrays, digests, places = {}, {}, {}
  for index in indexes:
    for path, spec in index.contents.arrays.items():
      if arrays.setdefault(path, spec) != spec:
        raise ChainError(f"two processes published {path!r} in two shapes")
    if not places.keys().isdisjoint(index.places):
      raise ChainError("two processes published one chunk")
    digests |= index.contents.digests
    places |= index.places
  merged = Contents(arrays, digests)
  merged.check()
  return Index(merged, places)


def _text(value) -> str:
  if not isinstance(value, str):
    raise TypeError(f"{value!r} where a text belongs")
  return value


def _numbers(values) -> tuple[int, ...]:
  numbers = tuple(values)
  for value in numbers:
    if type(value) is not int or not 0 <= value < 2**63:
      raise TypeError(f"{value!r} where a size belongs")
  return numbers
