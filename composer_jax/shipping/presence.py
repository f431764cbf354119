"""Which readers there are and what they run: for people who watch a chain.

Nothing depends on it; `retention` has the leases that do.
"""

import dataclasses
import json
import re
import time

from composer_jax.shipping.errors import MissingObjectError
from composer_jax.shipping.store import Store

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*")


@dataclasses.dataclass(frozen=True)
class Reader:
  """What a reader said last.

  Attributes:
    name: unique among readers.
    version: what it exposes.
    time: when it said so, seconds since 1970.
  """

  name: str
  version: int
  time: float


def check_name(name: str) -> str:
  """Checks that a reader may be called so.

  Raises:
    ValueError: if not.
  """
  if not _NAME.fullmatch(name):
    raise ValueError(f"{name!r} is no reader's name: use letters, digits, ._=-")
  return name


def announce(store: Store, name: str, version: int, before: str | None) -> str:
  """Says what a reader runs.

  Args:
    store: of the chain.
    name: of the reader.
    version: what it exposes now.
    before: what this returned last time; it is withdrawn.

  Returns:
    The key of the note; delete it when the reader ends.
  """
  note = json.dumps({"version": version, "time": time.time()})
  key = f"readers/{name}/{time.time_ns():020d}"
  store.put_if_absent(key, note.encode())
  if before:
    store.delete(before)
  return key


def readers(store: Store) -> list[Reader]:
  """All readers that ever announced themselves and did not say goodbye."""
  newest = {key.split("/")[1]: key for key in store.list("readers")}
  found = []
  for name, key in newest.items():
    try:
      note = json.loads(store.get(key))
      found.append(Reader(name, int(note["version"]), float(note["time"])))
    except (MissingObjectError, ValueError, TypeError, KeyError):
      continue  # It announced another one meanwhile, or isn't a reader's.
  return found
