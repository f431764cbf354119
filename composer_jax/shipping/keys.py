"""Checks that all stores make of what they are asked and what they give."""

import re

from composer_jax.shipping.errors import RangeError, StoreError

_KEY = re.compile(
  r"[A-Za-z0-9_][A-Za-z0-9._=-]*(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*"
)


def check_key(key: str) -> str:
  """Gives back a key, or a folder's.

  Raises:
    ValueError: if it isn't one.
  """
  if not _KEY.fullmatch(key):
    raise ValueError(f"{key!r} is not a key: segments of A-Z a-z 0-9 . _ = -")
  return key


def check_range(start: int, size: int | None) -> None:
  """Raises ValueError if no object could have such a range."""
  if start < 0 or (size is not None and size < 0):
    raise ValueError(f"no range: {size} bytes from {start}")


def bytes_wanted(key: str, length: int, start: int, size: int | None) -> int:
  """How many bytes a range holds, of an object of `length`.

  Raises:
    RangeError: if the object ends before the range does.
  """
  end = max(start, length) if size is None else start + size
  if end > length:
    raise RangeError(f"{key} has {length} bytes, not the {end} expected")
  return end - start


def check_whole(key: str, data: bytes, wanted: int) -> bytes:
  """Gives back what was read.

  Raises:
    StoreError: if bytes are missing.
  """
  if len(data) != wanted:
    raise StoreError(f"{key}: {len(data)} bytes came of {wanted}")
  return data
