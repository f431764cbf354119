"""The chain of versions: a log in a store, one object a position.

To append is to create the next position's object, if it is absent: of two
publishers that try, one wins, and the other reads what the winner wrote before
it tries again. A takeover is an entry of the same log. A publisher whose epoch
is over finds out there at the latest, because it can't append without having
read everything before; and readers ignore a version of an epoch that is over.
Entries are never deleted, so no position is ever free again.

A version's number is its position: versions only go up, with gaps.
"""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from composer_jax.shipping import planner
from composer_jax.shipping.errors import (
  ChainError,
  FencedError,
  MissingObjectError,
)
from composer_jax.shipping.manifest import (
  Delivery,
  Entry,
  Manifest,
  Retired,
  from_bytes,
  sha256,
  to_bytes,
)
from composer_jax.shipping.store import Store

_READS_AT_ONCE = 64


class Chain:
  """A view of a log, current as of the last `refresh`.

  Attributes:
    versions: number -> manifest, of all versions ever committed.
    deliveries: number -> the ways to get it that are not retired.
    epochs: number -> the epoch that the version was published in.
    epoch: how many takeovers the log holds.
  """

  def __init__(self, store: Store):
    self.store = store
    self.versions: dict[int, Manifest] = {}
    self.deliveries: dict[int, list[Delivery]] = {}
    self.epochs: dict[int, int] = {}
    self.retired: set[tuple[int, int | None]] = set()
    self.epoch = 0
    self._own_epoch: int | None = None
    self._writer = uuid.uuid4().hex
    self._length = 0
    self._previous = ""
    self.refresh()

  @property
  def head(self) -> int | None:
    """The newest version, if there is any."""
    return max(self.versions, default=None)

  def refresh(self) -> None:
    """Reads what was appended since: everything that was there at this call.

    Reads ahead, twice as far each time, so that a long log takes few round
    trips and an idle one a single request. The view ends at the first entry
    that is missing, whatever was found behind it: that came later.

    Raises:
      ChainError: if the log is damaged; the view then ends before it.
      StoreError: if the store failed; the view then ends before that entry.
    """

    def get(position):
      try:
        return self.store.get(_entry_key(position))
      except MissingObjectError:
        return None

    ahead = 1
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
      while True:
        positions = range(self._length, self._length + ahead)
        for data in (map if ahead == 1 else pool.map)(get, positions):
          if data is None:
            return
          self._read(data)
        ahead = min(2 * ahead, _READS_AT_ONCE)

  def _read(self, data):
    place = self._length
    try:
      entry = from_bytes(data)
    except ChainError as error:
      raise ChainError(f"entry {place} of the log: {error}") from None
    if entry.position != place or entry.previous != self._previous:
      raise ChainError(f"entry {place} of the log doesn't continue it")
    if (entry.kind == "version") != (entry.manifest is not None):
      raise ChainError(f"entry {place} of the log lacks its manifest")
    if entry.kind == "takeover":
      self.epoch += 1
    elif entry.kind == "retirement":
      for gone in entry.retired:
        self.retired.add((gone.version, gone.base_version))
        self.deliveries[gone.version] = [
          delivery
          for delivery in self.deliveries.get(gone.version, ())
          if delivery.base_version != gone.base_version
        ]
    elif entry.epoch == self.epoch:
      self.versions[place] = entry.manifest
      self.epochs[place] = entry.epoch
      self.deliveries[place] = list(entry.manifest.deliveries)
    self._previous = sha256(data)
    self._length += 1

  def take_over(self) -> int:
    """Becomes the one publisher; fences off every earlier one.

    Returns:
      The new epoch.
    """
    self._append(lambda: {"kind": "takeover", "epoch": self.epoch + 1})
    self._own_epoch = self.epoch
    return self.epoch

  def join(self, epoch: int) -> None:
    """Writes shards for the publisher of this epoch, in another process."""
    self._own_epoch = epoch
    self.refresh()

  def new_key(self) -> str:
    """A key for a shard of a version to be committed in this epoch.

    Raises:
      FencedError: if this is not the publisher.
    """
    self.check_fence()
    return f"data/{self.epoch:08d}/{uuid.uuid4().hex}"

  def commit(
    self,
    *,
    digest: str,
    deliveries: Sequence[Delivery],
    codec: str,
    metadata: dict | None = None,
  ) -> int:
    """Makes a version of shards that are all uploaded.

    Args:
      digest: of its contents, hexadecimal.
      deliveries: ways to get it, from different bases.
      codec: how the shards are written.
      metadata: what the user wants to say of it.

    Returns:
      The version's number.

    Raises:
      FencedError: if another publisher took over; nothing was committed.
      ChainError: if a base isn't what the chain says, or nobody could reach
        this version from nothing.
    """
    manifest = Manifest(digest, tuple(deliveries), codec, metadata or {})

    def entry():
      self.check_fence()
      self._check(manifest)
      return {"kind": "version", "epoch": self.epoch, "manifest": manifest}

    return self._append(entry)

  def retire(self, choose: Callable[[], Sequence[Retired]]) -> None:
    """Appends a retirement; any process may.

    Args:
      choose: called with this view current as of the position that is tried.
    """

    def entry():
      retired = tuple(choose())
      return {"kind": "retirement", "epoch": self.epoch, "retired": retired}

    self._append(entry)

  def _append(self, make) -> int:
    while True:
      self.refresh()
      position = self._length
      fields = make()
      entry = Entry(
        position=position,
        writer=self._writer,
        previous=self._previous,
        **fields,
      )
      data = to_bytes(entry)
      if self.store.put_if_absent(_entry_key(position), data):
        self._read(data)
        return position

  def check_fence(self) -> None:
    """Checks that this is the publisher, as of the last refresh.

    Raises:
      FencedError: if not.
    """
    if self._own_epoch is None:
      raise FencedError("take_over() comes before publishing")
    if self._own_epoch != self.epoch:
      raise FencedError(
        f"this publisher is of epoch {self._own_epoch}, "
        f"the chain of {self.epoch}: another one took over"
      )

  def _check(self, manifest):
    bases = [delivery.base_version for delivery in manifest.deliveries]
    if len(set(bases)) != len(bases):
      raise ChainError(f"two deliveries from one base: {bases}")
    for delivery in manifest.deliveries:
      base = delivery.base_version
      if base is None:
        continue
      if base not in self.versions:
        raise ChainError(f"base version {base} is not in the chain")
      if self.versions[base].digest != delivery.base_digest:
        raise ChainError(f"the base's digest is not that of version {base}")
    following = self.deliveries | {self._length: manifest.deliveries}
    try:
      planner.plan(following, self._length)
    except ChainError:
      raise ChainError(
        f"nobody could reach this version from nothing: its bases, {bases}, "
        "are gone; publish a snapshot"
      ) from None


def _entry_key(position: int) -> str:
  return f"log/{position:012d}"
