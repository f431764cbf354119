"""Makes versions of live arrays or checkpoints, in the background.

    with Publisher(store) as publisher:
      for step in ...:
        state = train_step(state)
        publisher.publish(state.params, {"step": step})

`publish` copies the arrays on their devices and returns. Behind it, shard by
shard, arrays come to the host, are cut into chunks, encoded against the
versions before and uploaded, all three at once; then one commit makes the
version. What the next deltas are made against advances only after the commit.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from jaxtyping import PyTree

from composer_jax.shipping import index as indexes
from composer_jax.shipping.acquire import acquire
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Contents, digest_of
from composer_jax.shipping.crew import Crew
from composer_jax.shipping.delta import encode
from composer_jax.shipping.errors import ChainError, StoreError
from composer_jax.shipping.loading import Loader, all_chunks
from composer_jax.shipping.manifest import Delivery, Shard
from composer_jax.shipping.packing import Packer
from composer_jax.shipping.planner import skip_distances
from composer_jax.shipping.reader import Replica
from composer_jax.shipping.source import Source, from_tree
from composer_jax.shipping.store import Store

CODEC = "CJXD 1"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PublisherConfig:
  """How versions are made.

  Attributes:
    snapshot_every: every so many versions, one that needs no base.
    longest_skip: deltas reach back up to so many versions, in powers of two.
    chunk_bytes: the largest chunk, in bytes of contents.
    object_bytes: about how large an uploaded object gets.
    encoders: threads that encode.
    uploads: objects in flight at once.
    effort: of the codec.
    compare: where changes are found. "device" keeps the newest version on its
      devices and brings only what changed to the host, by the same deltas; for
      jax arrays on the devices that held the version before.
    pending: versions that may wait while one is being made.
    when_busy: what `publish` does when no more may wait: "wait", or "skip" this
      version (with one process only; others would skip another).
    timeout_s: how long to wait for another publishing process, seconds.

  Raises:
    ValueError: if a field is none of its choices, or too small.
  """

  snapshot_every: int = 64
  longest_skip: int = 16
  chunk_bytes: int = 16 * 2**20
  object_bytes: int = 64 * 2**20
  encoders: int = os.cpu_count() or 1
  uploads: int = 8
  effort: Literal["small", "fast"] = "small"
  compare: Literal["host", "device"] = "host"
  pending: int = 1
  when_busy: Literal["wait", "skip"] = "wait"
  timeout_s: float = 600.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, choices = getattr(self, field.name), get_args(field.type)
      if choices and value not in choices:
        raise ValueError(
          f"{field.name} is {value!r}; it is one of {', '.join(choices)}"
        )
      least = 0 if field.name == "pending" else 1
      if field.type is int and value < least:
        raise ValueError(f"{field.name} is {value}; it is at least {least}")


class Publisher:
  """The one publisher of a chain; every process of a job makes one.

  Host memory, in units of the bytes that this process publishes: one for the
  newest version, one for each base of a skip delta to come (the base-2
  logarithm of `longest_skip` at most), one for the version being made; chunks
  that did not change are shared. Besides, `uploads` objects for each delivery
  of the version. Device memory: one copy of what is published for the version
  being made, and each that waits; another one, all the time, if changes are
  found there.

  Attributes:
    chain: its view of the chain.
  """

  def __init__(
    self,
    store: Store,
    config: PublisherConfig | None = None,
    *,
    observe: Callable[[str, int], object] = lambda stage, size: None,
  ):
    """Takes over the chain in a store; an earlier publisher is fenced off.

    Args:
      store: any.
      config: how versions are made.
      observe: told "encoded" and bytes of contents, "uploaded" and bytes, from
        any thread.
    """
    self.chain = Chain(store)
    self._config = config or PublisherConfig()
    self._observe = observe
    self._crew = Crew(self.chain, timeout_s=self._config.timeout_s)
    if self._crew.size > 1 and self._config.when_busy == "skip":
      raise ValueError("when_busy='skip' needs a single publishing process")
    self._held: dict[int, Replica] = {}
    self._loader = Loader(
      self._config.chunk_bytes, keeps_base=self._config.compare == "device"
    )
    self._count = itertools.count()
    self._free = threading.Semaphore(1 + self._config.pending)
    # One version at a time; the other two work for it.
    self._background = concurrent.futures.ThreadPoolExecutor(1, "publish")
    self._encoders = concurrent.futures.ThreadPoolExecutor(
      self._config.encoders, "encode"
    )
    self._uploads = concurrent.futures.ThreadPoolExecutor(
      self._config.uploads, "upload"
    )

  @property
  def epoch(self) -> int:
    """This publisher's; `chain.epoch` is a later one once it is fenced off."""
    return self._crew.epoch

  def publish(
    self,
    what: PyTree | Source,
    metadata: dict | None = None,
    *,
    copy: bool = True,
  ) -> concurrent.futures.Future[int] | None:
    """Starts to make a version.

    Args:
      what: pytree of arrays, or a `Source`.
      metadata: step, run: what JSON can say.
      copy: False if nobody will delete or donate the arrays of `what` before
        this version is made (and the next, if changes are found on devices).

    Returns:
      The version's number, once it is committed; a failure is raised there, and
      the next version is made from the same base. None if it was skipped.
    """
    if not self._free.acquire(blocking=self._config.when_busy == "wait"):
      return None
    try:
      source = what if isinstance(what, Source) else from_tree(what, copy=copy)
      return self._background.submit(self._make, source, metadata or {})
    except BaseException:
      self._free.release()
      raise

  def adopt(self, source: Source) -> bool:
    """Takes the head's contents from elsewhere instead of the store.

    Args:
      source: what was published last, from a checkpoint.

    Returns:
      Whether its bits are the head's; if not, nothing happened.
    """
    return self._background.submit(self._adopt, source).result()

  def wait(self) -> None:
    """Waits for all that was begun; failures are in the futures."""
    self._background.submit(lambda: None).result()

  def close(self) -> None:
    """Waits, then ends the threads."""
    for pool in (self._background, self._encoders, self._uploads):
      pool.shutdown()

  def __enter__(self) -> "Publisher":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _make(self, source: Source, metadata: dict) -> int:
    version = None
    try:
      number = next(self._count)
      bases = self._agree_on_bases(f"{number}-bases", source)
      result: list[Replica] = []
      mine = self._attempt(lambda: self._write(source, bases, result))
      answer = self._crew.agree(
        f"{number}-commit", mine, lambda notes: self._commit(notes, metadata)
      )
      version = answer["version"]
      self.chain.refresh()
      self._advance(version, dataclasses.replace(result[0], version=version))
      return version
    finally:
      self._loader.settle(version)
      self._free.release()

  def _agree_on_bases(self, topic, source) -> list[int | None]:
    """Bases of the version's deliveries; those that every process holds."""
    mine = self._attempt(lambda: {"held": self._usable_bases(source)})

    def decide(notes):
      common = set.intersection(*(set(note["held"]) for note in notes))
      self.chain.refresh()
      versions = sorted(self.chain.versions)
      distances = skip_distances(len(versions), self._config.longest_skip)
      bases = [versions[-distance] for distance in distances]
      bases: list[int | None] = [base for base in bases if base in common]
      if not bases or len(versions) % self._config.snapshot_every == 0:
        bases.append(None)
      return {"bases": bases}

    return self._crew.agree(topic, mine, decide)["bases"]

  def _usable_bases(self, source) -> list[int]:
    chunks = all_chunks(source, self._config.chunk_bytes)
    self.chain.refresh()
    head = self.chain.head
    if head is not None and head not in self._held:
      self._recover(head, chunks)
    return [
      version
      for version, held in self._held.items()
      if held.contents.arrays == source.arrays and held.data.keys() == chunks
    ]

  def _recover(self, head, chunks):
    """Downloads what an earlier publisher committed, to prove the base."""
    try:
      held = acquire(
        self.chain, head, None, chunks.__contains__, pool=self._uploads
      )
    except (ChainError, StoreError) as error:
      _log.warning("version %d is no base: %s", head, error)
      return
    self._held = {head: held}

  def _adopt(self, source) -> bool:
    self.chain.refresh()
    head = self.chain.head
    adopted = None
    try:
      data = dict(self._loader.load(source, {}))
      contents = Contents(
        source.arrays, {chunk: digest_of(bits) for chunk, bits in data.items()}
      )
      if head is None or contents.digest() != self.chain.versions[head].digest:
        return False
      self._held = {head: Replica(head, contents, data)}
      adopted = head
      return True
    finally:
      self._loader.settle(adopted)

  def _attempt(self, work: Callable[[], dict]) -> dict:
    """Reports a failure to the other processes, which would wait for ever."""
    try:
      return work()
    except Exception as error:
      if self._crew.size == 1:
        raise
      _log.exception("publishing failed")
      return {"error": str(error)}

  def _write(self, source, bases, result) -> dict:
    """Encodes and uploads this process's part of each delivery."""
    packers = {
      base: Packer(
        self.chain,
        object_bytes=self._config.object_bytes,
        uploads=self._config.uploads,
        pool=self._uploads,
        observe=self._observe,
      )
      for base in bases
    }
    held = [self._held[base] for base in bases if base is not None]
    digests, data = {}, {}
    for chunk, bits, digest, deltas in self._encoded(source, bases):
      for base, delta in deltas.items():
        packers[base].add(chunk, delta)
      digests[chunk] = digest
      data[chunk] = next(
        (
          old.data[chunk]
          for old in held
          if old.contents.digests[chunk] == digest
        ),
        bits,
      )
      self._observe("encoded", bits.nbytes)
    contents = Contents(source.arrays, digests)
    result.append(Replica(-1, contents, data))
    parts = [(base, *packers[base].finish(contents)) for base in bases]
    return {
      "parts": [
        {
          "index": dataclasses.asdict(index),
          "shards": [dataclasses.asdict(shard) for shard in shards],
        }
        for _, index, shards in parts
      ],
      "bases": bases,
    }

  def _encoded(self, source, bases) -> Iterator[tuple]:
    """Chunks in order, each as soon as it is encoded; a few are ahead."""
    ahead = collections.deque()
    for chunk, bits in self._loader.load(source, self._held):
      ahead.append(
        (chunk, bits, self._encoders.submit(self._encode, chunk, bits, bases))
      )
      while ahead and (
        ahead[0][2].done() or len(ahead) > 2 * self._config.encoders
      ):
        chunk, bits, job = ahead.popleft()
        yield chunk, bits, *job.result()
    for chunk, bits, job in ahead:
      yield chunk, bits, *job.result()

  def _encode(self, chunk, bits, bases) -> tuple[str, dict[int | None, bytes]]:
    digest = digest_of(bits)
    deltas = {}
    for base in bases:
      if base is None:
        deltas[base] = encode(bits, None, effort=self._config.effort)
        continue
      old = self._held[base]
      same = old.contents.digests[chunk] == digest
      deltas[base] = (
        b""
        if same
        else encode(bits, old.data[chunk], effort=self._config.effort)
      )
    return digest, deltas

  def _commit(self, notes, metadata) -> dict:
    bases = notes[0]["bases"]
    deliveries = []
    for number, base in enumerate(bases):
      parts = [note["parts"][number] for note in notes]
      deliveries.append(
        Delivery(
          base,
          "" if base is None else self.chain.versions[base].digest,
          tuple(Shard(**shard) for part in parts for shard in part["shards"]),
          tuple(Shard(**part["index"]) for part in parts),
        )
      )
    merged = indexes.merge(
      indexes.from_bytes(self.chain.store.get(shard.key))
      for shard in deliveries[0].indexes
    )
    version = self.chain.commit(
      digest=merged.contents.digest(),
      deliveries=deliveries,
      codec=CODEC,
      metadata=metadata,
    )
    return {"version": version}

  def _advance(self, version, replica):
    """Keeps what the deltas to come will be made against."""
    versions = sorted(self.chain.versions)
    ordinal = versions.index(version)
    wanted = {version}
    distance = 1
    while distance <= self._config.longest_skip:
      wanted.add(versions[ordinal // distance * distance])
      distance *= 2
    held = self._held | {version: replica}
    self._held = {v: held[v] for v in held if v in wanted}
