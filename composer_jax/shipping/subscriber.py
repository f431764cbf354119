"""Follows a chain: gets each new version, whole, checked, and all at once.

    subscriber = Subscriber(open_store(url), like=abstract_params)
    for weights in subscriber.follow(interval_s=5):
      engine.set_weights(weights.tree, weights.version)

A reader downloads the chunks that its own sharding meets, whatever the
publisher's was. The version that it exposes changes by one assignment, after
everything was applied and checked in a second buffer; whatever goes wrong
before leaves the old one.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from composer_jax.shipping.acquire import acquire
from composer_jax.shipping.cache import Cache
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import (
  ArraySpec,
  Box,
  Chunk,
  assemble,
  box_of,
  flatten,
)
from composer_jax.shipping.errors import ChainError, MisfitError, StoreError
from composer_jax.shipping.presence import announce, check_name
from composer_jax.shipping.reader import Replica
from composer_jax.shipping.store import Store

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Weights:
  """One version, ready to use.

  Attributes:
    version: its number in the chain.
    digest: of its contents, all of them, whatever this reader holds.
    metadata: the publisher's.
    tree: like the `like` of the subscriber; without one, path -> NumPy array.
  """

  version: int
  digest: str
  metadata: dict
  tree: PyTree


@dataclasses.dataclass(frozen=True)
class _Policy:
  pinned: int | None = None
  skipped: frozenset[int] = frozenset()
  exposed: tuple[int, ...] = ()  # the last two versions, the newest last


class Subscriber:
  """A reader of a chain.

  Not for several threads at once, but for `current`. Host memory: what its
  sharding needs, twice while a version arrives (chunks that don't change are
  shared), and as much on its devices.

  Attributes:
    current: the version that is exposed; None until there is one.
    chain: its view of the chain.
    name: by which `readers` knows it.
  """

  def __init__(
    self,
    store: Store,
    *,
    like: PyTree | None = None,
    cache: str | Path | None = None,
    name: str | None = None,
    workers: int = 16,
    lease_s: float = 600.0,
    observe: Callable[[str, int], object] = lambda stage, size: None,
  ):
    """Reads the log, and the cache if there is one; exposes nothing yet.

    Args:
      store: of the chain.
      like: pytree of `jax.ShapeDtypeStruct`, each with a sharding: the arrays
        that this reader needs, a part of the published ones maybe. None: all,
        as NumPy arrays. Each process of a multi-process mesh has a subscriber;
        let one of them choose the version and all call `update(version)`.
      cache: a folder of this reader's own, to restart from.
      name: unique among readers; by default made up.
      workers: threads that download and decode.
      lease_s: how long an update may stall and still be safe from retention,
        seconds; renewed while it lasts.
      observe: told "planned" and bytes to download before each way that is
        tried, "downloaded" and bytes, "applied" and bytes of contents, from any
        thread.
    """
    self.chain = Chain(store)
    self.current: Weights | None = None
    self.name = check_name(name or uuid.uuid4().hex)
    self._like = like
    self._cache = None if cache is None else Cache(cache)
    self._lease_s = lease_s
    self._observe = observe
    self._pool = concurrent.futures.ThreadPoolExecutor(workers, "download")
    self._saver = concurrent.futures.ThreadPoolExecutor(1, "cache")
    self._saving: concurrent.futures.Future | None = None
    self._presence: str | None = None
    self._needed = None if like is None else _needed_boxes(like)
    self._policy = _Policy()
    self._held: Replica | None = None
    self._misfits: dict[int, MisfitError] = {}
    if self._cache:
      policy = self._cache.read_policy()
      self._policy = _Policy(
        policy.get("pinned"),
        frozenset(policy.get("skipped", ())),
        tuple(policy.get("exposed", ())),
      )
      digests = {v: m.digest for v, m in self.chain.versions.items()}
      self._held = self._cache.load(digests, self._wants)

  @property
  def pinned(self) -> int | None:
    """The version that `update` stays at, if it is told to."""
    return self._policy.pinned

  @property
  def skipped(self) -> frozenset[int]:
    """Versions that are never exposed."""
    return self._policy.skipped

  def update(self, version: int | None = None) -> Weights | None:
    """Gets a version and exposes it.

    Args:
      version: which; by default the one pinned, else the newest that is not
        skipped. If that one can't be had, the newest that can and is newer than
        the present one.

    Returns:
      What is exposed now, or None if that is what was exposed before.

    Raises:
      ChainError: if no undamaged way leads to it, with the reason.
      MisfitError: if its arrays don't fit `like`; it is not tried again.
      StoreError: if the store failed.
    """
    self.chain.refresh()
    wanted = self._choices() if version is None else [version]
    failure: ChainError | None = None
    for choice in wanted:
      if self.current and self.current.version == choice:
        break
      if choice not in self.chain.versions:
        raise ChainError(f"version {choice} is not in the chain")
      try:
        if choice in self._misfits:
          raise self._misfits[choice]
        return self._take(choice)
      except ChainError as error:
        if isinstance(error, MisfitError):
          self._misfits[choice] = error
        _log.warning("version %d can't be had: %s", choice, error)
        failure = failure or error
    if failure:
      raise failure
    return None

  def follow(
    self,
    interval_s: float = 5.0,
    stop: threading.Event | None = None,
  ) -> Iterator[Weights]:
    """Yields each version as it comes; a failure is logged and tried again.

    Args:
      interval_s: between looks at the log, seconds.
      stop: ends the iteration.

    Yields:
      What was exposed.
    """
    stop = stop or threading.Event()
    while not stop.is_set():
      try:
        weights = self.update()
      except (ChainError, StoreError) as error:
        _log.warning("no update: %s", error)
        weights = None
      if weights:
        yield weights
      else:
        stop.wait(interval_s)

  def pin(self, version: int) -> None:
    """Makes `update` stay at a version until `unpin`, also after a restart.

    Raises:
      ChainError: if there is no such version.
    """
    self.chain.refresh()
    if version not in self.chain.versions:
      raise ChainError(f"version {version} is not in the chain")
    self._set_policy(dataclasses.replace(self._policy, pinned=version))

  def unpin(self) -> None:
    """Makes `update` go for the newest version again."""
    self._set_policy(dataclasses.replace(self._policy, pinned=None))

  def skip(self, version: int) -> None:
    """Never exposes a version; deltas may still lead through it."""
    skipped = self._policy.skipped | {version}
    self._set_policy(dataclasses.replace(self._policy, skipped=skipped))

  def roll_back(self) -> Weights | None:
    """Pins the version that was exposed before this one, and goes there.

    With a cache, also after a restart.

    Raises:
      ChainError: if there was none, or it can't be had any more.
    """
    if len(self._policy.exposed) < 2:
      raise ChainError("no version was exposed before this one")
    self.pin(self._policy.exposed[0])
    return self.update()

  def close(self) -> None:
    """Waits for the cache, says goodbye, ends the threads."""
    self._saver.shutdown()
    self._pool.shutdown()
    if self._presence:
      try:
        self.chain.store.delete(self._presence)
      except StoreError as error:
        _log.warning("%s stays listed: %s", self.name, error)

  def __enter__(self) -> "Subscriber":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _choices(self) -> list[int]:
    if self._policy.pinned is not None:
      return [self._policy.pinned]
    present = self.current.version if self.current else -1
    newest = sorted(self.chain.versions, reverse=True)
    choices = [v for v in newest if v not in self._policy.skipped]
    return [v for v in choices if v > present or v == choices[0]]

  def _take(self, version: int) -> Weights:
    replica = acquire(
      self.chain,
      version,
      self._held,
      self._wants,
      pool=self._pool,
      payloads=self._cache,
      lease_s=self._lease_s,
      observe=self._observe,
    )
    manifest = self.chain.versions[version]
    weights = Weights(
      version, manifest.digest, manifest.metadata, self._build(replica)
    )
    self._held = replica
    self.current = weights
    self._save(replica)
    self._remember(version)
    self._announce(version)
    return weights

  def _wants(self, chunk: Chunk) -> bool:
    if self._needed is None:
      return True
    return any(chunk.box.meets(box) for box in self._needed.get(chunk.path, ()))

  def _build(self, replica: Replica) -> PyTree:
    parts: dict[str, dict[Box, np.ndarray]] = {}
    for chunk, bits in replica.data.items():
      parts.setdefault(chunk.path, {})[chunk.box] = bits
    arrays = replica.contents.arrays
    if self._like is None:
      return {
        path: assemble(spec.whole, spec.dtype, parts.get(path, {}))
        for path, spec in arrays.items()
      }
    leaves = []
    for path, leaf in flatten(self._like).items():
      spec = ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype).name)
      if arrays.get(path) != spec:
        raise MisfitError(
          f"{path!r} is {arrays.get(path, 'missing')} in version "
          f"{replica.version}, {spec} was asked for"
        )
      leaves.append(_to_devices(leaf, spec, parts.get(path, {})))
    return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

  def _save(self, replica: Replica) -> None:
    """Writes the cache in the background, unless it is still being written."""
    if self._cache and (self._saving is None or self._saving.done()):
      self._saving = self._saver.submit(self._save_now, replica)

  def _save_now(self, replica):
    try:
      self._cache.save(replica)
      self._cache.clear_payloads()
    except OSError as error:
      _log.warning("version %d was not cached: %s", replica.version, error)

  def _remember(self, version: int) -> None:
    """Notes what was exposed, for `roll_back`."""
    before = self._policy.exposed[-1:]
    if before == (version,):
      return
    policy = dataclasses.replace(self._policy, exposed=(*before, version))
    try:
      self._set_policy(policy)
    except OSError as error:
      _log.warning("version %d was not noted: %s", version, error)
      self._policy = policy

  def _set_policy(self, policy: _Policy) -> None:
    if self._cache:
      fields = {
        "pinned": policy.pinned,
        "skipped": sorted(policy.skipped),
        "exposed": policy.exposed,
      }
      self._cache.write_policy(fields)
    self._policy = policy

  def _announce(self, version: int) -> None:
    store = self.chain.store
    try:
      self._presence = announce(store, self.name, version, self._presence)
    except StoreError as error:
      _log.warning("version %d was not announced: %s", version, error)


def _needed_boxes(like: PyTree) -> Mapping[str, Collection[Box]]:
  needed = {}
  for path, leaf in flatten(like).items():
    if getattr(leaf, "sharding", None) is None:
      raise ValueError(f"{path!r} of `like` has no sharding; give it one")
    indices = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape))
    needed[path] = {box_of(i, leaf.shape) for i in indices.values()}
  return needed


def _to_devices(leaf, spec: ArraySpec, parts: Mapping[Box, np.ndarray]):
  def shard(index):
    box = box_of(index, spec.shape)
    met = {part: bits for part, bits in parts.items() if part.meets(box)}
    return assemble(box, spec.dtype, met)

  return jax.make_array_from_callback(spec.shape, leaf.sharding, shard)
