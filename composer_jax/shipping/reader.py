"""Downloads the chunks that a reader wants and applies them, off to the side.

Nothing that the reader holds is written to: a chunk that changes becomes a new
array, one that doesn't is shared with the version before. Every byte is checked
against the manifest (through the index), the base of each delta before it is
applied, and each result after.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from composer_jax.shipping import index as indexes
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Chunk, Contents, digest_of
from composer_jax.shipping.delta import decode, read_header
from composer_jax.shipping.errors import (
  ChainError,
  DeltaError,
  MissingObjectError,
  RangeError,
)
from composer_jax.shipping.index import Index, Place
from composer_jax.shipping.manifest import Shard, sha256
from composer_jax.shipping.planner import Step
from composer_jax.shipping.store import Store

# Work is handed out in groups of about so many bytes to download: large enough
# that a request's latency is small beside it, small enough to share out. A
# sparse delta stands for far more bytes of contents, which are shared out too.
GROUP_BYTES = 8 * 2**20
GROUP_CONTENTS_BYTES = 128 * 2**20


class DamagedError(ChainError):
  """A delivery that can't be used; another way may lead to its version.

  Attributes:
    place: (version, base version) of the delivery.
  """

  def __init__(self, step: Step, reason: str):
    self.place = (step.version, step.delivery.base_version)
    way = (
      "the snapshot"
      if step.delivery.base_version is None
      else f"the delta from version {step.delivery.base_version}"
    )
    super().__init__(f"{way} to version {step.version}: {reason}")


class BaseDamagedError(ChainError):
  """What the reader holds is no longer what it downloaded."""


@dataclasses.dataclass(frozen=True)
class Replica:
  """What a reader holds of a version.

  Attributes:
    version: its number.
    contents: of all of the version.
    data: the chunks that it holds; never written to.
  """

  version: int
  contents: Contents
  data: Mapping[Chunk, Shaped[np.ndarray, "..."]]


class Payloads:
  """Deltas of chunks that were downloaded before; this one has none.

  `shipping.cache` has one on disk, so that an interrupted download goes on.
  """

  def get(self, digest: str) -> bytes | None:
    """The bytes with this SHA-256, if they are here."""
    return None

  def add(self, digest: str, data: bytes) -> None:
    """Keeps bytes for later."""


def read_index(store: Store, chain: Chain, step: Step) -> Index:
  """Downloads and checks what a delivery says of itself.

  Raises:
    DamagedError: if it isn't what was published.
    StoreError: if the store failed.
  """
  try:
    parts = [
      indexes.from_bytes(_checked(store.get(shard.key), shard))
      for shard in step.delivery.indexes
    ]
    merged = indexes.merge(parts)
  except (ChainError, MissingObjectError) as error:
    raise DamagedError(step, str(error)) from error
  if merged.contents.digest() != chain.versions[step.version].digest:
    raise DamagedError(step, "its index is that of another version")
  return merged


def fetch(
  chain: Chain,
  steps: Sequence[Step],
  held: Replica | None,
  wants: Callable[[Chunk], bool],
  *,
  pool: concurrent.futures.Executor,
  payloads: Payloads | None = None,
  keep_alive: Callable[[], object] = lambda: None,
  every_s: float = 60.0,
  observe: Callable[[str, int], object] = lambda stage, size: None,
) -> Replica:
  """Takes the steps of a plan.

  Args:
    chain: says what each step must give.
    steps: at least one; the first is a snapshot, or applies to `held`.
    held: what the reader has; not written to.
    wants: which chunks it needs.
    pool: downloads and decodes.
    payloads: what was downloaded before.
    keep_alive: called about `every_s` seconds meanwhile, to renew a lease.
    every_s: seconds.
    observe: told "downloaded" and bytes from the store, "applied" and bytes of
      results, from any thread.

  Returns:
    A new replica, whole and checked.

  Raises:
    DamagedError: if a delivery can't be used.
    BaseDamagedError: if `held` can't.
    StoreError: if the store failed.
  """
  store = chain.store
  payloads = payloads or Payloads()
  found = list(pool.map(lambda step: read_index(store, chain, step), steps))
  last = found[-1].contents
  work = _Work(store, steps, found, held, payloads, observe)
  groups = list(_groups(work, filter(wants, found[-1].places)))
  jobs = [pool.submit(work.run, group) for group in groups]
  data = {}
  try:
    waiting = set(jobs)
    while waiting:
      done, waiting = concurrent.futures.wait(
        waiting, every_s, concurrent.futures.FIRST_EXCEPTION
      )
      for job in done:
        data |= job.result()
      keep_alive()
  finally:
    for job in jobs:
      job.cancel()
  return Replica(steps[-1].version, last, data)


@dataclasses.dataclass(frozen=True)
class _Work:
  store: Store
  steps: Sequence[Step]
  found: Sequence[Index]
  held: Replica | None
  payloads: Payloads
  observe: Callable[[str, int], object]

  def todo(self, chunk: Chunk) -> list[tuple[int, Place]]:
    """(Step, place) of the deltas that lead to a chunk's last contents."""
    ways: list[tuple[int, Place]] = []
    digest = None
    if self.steps[0].delivery.base_version is not None:
      if chunk not in self.held.data:
        raise DamagedError(self.steps[0], f"its base has no {chunk}")
      digest = self.held.contents.digests[chunk]
      wanted = self.found[-1].contents.digests[chunk]
      if digest == wanted:
        return []
    for number, index in enumerate(self.found):
      place = index.places.get(chunk)
      if place is None:
        raise DamagedError(self.steps[number], f"it has no {chunk}")
      following = index.contents.digests[chunk]
      if place.key:
        ways.append((number, place))
      elif digest != following:
        raise DamagedError(self.steps[number], f"it lacks the bits of {chunk}")
      digest = following
    return ways

  def run(self, group: Sequence[Chunk]) -> dict[Chunk, np.ndarray]:
    """Downloads and applies some chunks."""
    todo = {chunk: self.todo(chunk) for chunk in group}
    deltas = self._download(
      [way for ways in todo.values() for way in ways],
    )
    return {
      chunk: self._apply(chunk, [(way[0], deltas[way[1]]) for way in ways])
      for chunk, ways in todo.items()
    }

  def _download(self, ways) -> dict[Place, bytes]:
    deltas = {}
    missing = []
    for way in ways:
      data = self.payloads.get(way[1].sha256)
      if data is None:
        missing.append(way)
      else:
        deltas[way[1]] = data
    for number, places in _runs(missing):
      first, last = places[0], places[-1]
      size = last.offset + last.size - first.offset
      try:
        data = self.store.get(first.key, first.offset, size)
      except (MissingObjectError, RangeError) as error:
        raise DamagedError(self.steps[number], str(error)) from error
      self.observe("downloaded", len(data))
      for place in places:
        start = place.offset - first.offset
        delta = data[start : start + place.size]
        if sha256(delta) != place.sha256:
          raise DamagedError(self.steps[number], f"{place.key} was altered")
        self.payloads.add(place.sha256, delta)
        deltas[place] = delta
    return deltas

  def _apply(self, chunk, deltas) -> np.ndarray:
    array = self.held.data.get(chunk) if self.held else None
    for number, delta in deltas:
      base_version = self.steps[number].delivery.base_version
      digests = self.found[number].contents.digests
      try:
        # `decode` sees to it that the result has the digest of the header.
        if read_header(delta).digest.hex() != digests[chunk]:
          raise DeltaError("it gives other bits")
        if base_version is None:
          spec = self.found[-1].contents.arrays[chunk.path]
          out = np.empty(chunk.box.shape, np.dtype(spec.dtype))
          array = decode(delta, None, out=out)
        else:
          array = decode(delta, array)
      except (DeltaError, TypeError) as error:
        self._blame(chunk, number, error)
    self.observe("applied", array.nbytes)
    return array

  def _blame(self, chunk, number, error):
    base = self.held and self.held.data.get(chunk)
    if base is not None and (
      digest_of(base) != self.held.contents.digests[chunk]
    ):
      raise BaseDamagedError(
        f"{chunk} of version {self.held.version} changed in memory or cache"
      ) from error
    raise DamagedError(self.steps[number], f"{chunk}: {error}") from error


def _groups(work: _Work, chunks) -> Iterator[list[Chunk]]:
  group, size, contents = [], 0, 0
  arrays = work.found[-1].contents.arrays
  for chunk in chunks:
    group.append(chunk)
    size += sum(place.size for _, place in work.todo(chunk))
    contents += chunk.box.size * np.dtype(arrays[chunk.path].dtype).itemsize
    if size >= GROUP_BYTES or contents >= GROUP_CONTENTS_BYTES:
      yield group
      group, size, contents = [], 0, 0
  if group:
    yield group


def _runs(ways) -> Iterator[tuple[int, list[Place]]]:
  """Places that lie one behind the other, to be read at once."""
  run: list[Place] = []
  for number, place in sorted(
    ways, key=lambda way: (way[0], way[1].key, way[1].offset)
  ):
    if run and (step, run[-1].key, run[-1].offset + run[-1].size) != (
      number,
      place.key,
      place.offset,
    ):
      yield step, run
      run = []
    step = number
    run.append(place)
  if run:
    yield step, run


def _checked(data: bytes, shard: Shard) -> bytes:
  if len(data) != shard.size or sha256(data) != shard.sha256:
    raise ChainError(f"{shard.key} was altered")
  return data
