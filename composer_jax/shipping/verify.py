"""Checks a whole chain: downloads every delivery that stands and applies it.

For an operator who wants to know now, not when a host needs it. Host memory:
one copy of each version that a delta still to be checked starts from (chunks
that don't change are shared), and an object for each worker.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable

import numpy as np

from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Chunk
from composer_jax.shipping.delta import decode, read_header
from composer_jax.shipping.errors import (
  ChainError,
  DeltaError,
  MissingObjectError,
)
from composer_jax.shipping.index import Index, Place
from composer_jax.shipping.manifest import Shard, sha256
from composer_jax.shipping.planner import Step, reachable
from composer_jax.shipping.reader import DamagedError, Replica, read_index


@dataclasses.dataclass(frozen=True)
class Damage:
  """Something of a delivery that isn't what was published.

  Attributes:
    version: that the delivery gives.
    base_version: what it starts from; None is a snapshot.
    reason: what is wrong, and with which object.
  """

  version: int
  base_version: int | None
  reason: str


@dataclasses.dataclass(frozen=True)
class Report:
  """What `verify` found.

  Attributes:
    checked: (version, base version) of each delivery that is as published.
    damage: all that was found.
    undecoded: (version, base version) of deltas whose objects are right, but
      that could not be applied, since no undamaged way leads to their base.
    lost: versions that could be had from nothing, but for the damage.
  """

  checked: list[tuple[int, int | None]]
  damage: list[Damage]
  undecoded: list[tuple[int, int | None]]
  lost: list[int]


def ways_to(chain: Chain, version: int | None = None) -> list[Step]:
  """Deliveries that stand, by version; of one version, all that lead to it.

  Raises:
    ChainError: if there is no such version.
  """
  if version is not None and version not in chain.versions:
    raise ChainError(f"version {version} is not in the chain")
  wanted = set(chain.versions) if version is None else {version}
  steps = []
  for number in sorted(chain.versions, reverse=True):
    if number in wanted:
      for delivery in chain.deliveries[number]:
        steps.append(Step(number, delivery))
        wanted.add(delivery.base_version)
  return steps[::-1]


def verify(
  chain: Chain,
  version: int | None = None,
  *,
  workers: int = 16,
  observe: Callable[[str, int], object] = lambda stage, size: None,
) -> Report:
  """Checks every object's digest, every index, every delta and every result.

  Args:
    chain: current as of its last refresh.
    version: check only what leads to this one; by default all.
    workers: threads that download and decode.
    observe: told "downloaded" and bytes, from any thread.

  Raises:
    ChainError: if there is no such version.
    StoreError: if the store failed, which says nothing of what it holds.
  """
  steps = ways_to(chain, version)
  last_use = {step.delivery.base_version: step.version for step in steps}
  held: dict[int, Replica] = {}
  report = Report([], [], [], [])
  with concurrent.futures.ThreadPoolExecutor(workers, "verify") as pool:
    for step in steps:
      base = step.delivery.base_version
      keep = last_use.get(step.version, 0) > step.version
      check = _Check(chain, step, held.get(base), keep, observe)
      replica, damage = check.run(pool)
      report.damage.extend(damage)
      place = (step.version, base)
      if damage:
        continue
      if check.applies:
        report.checked.append(place)
        if keep:
          held.setdefault(step.version, replica)
      else:
        report.undecoded.append(place)
      held = {v: r for v, r in held.items() if last_use[v] > step.version}
  broken = {(found.version, found.base_version) for found in report.damage}
  lost = reachable(chain.deliveries) - reachable(chain.deliveries, broken)
  report.lost.extend(sorted(lost))
  return report


class _Check:
  """One delivery."""

  def __init__(self, chain, step, base, keep, observe):
    self._chain = chain
    self._step = step
    self._base = base
    self._keep = keep
    self._observe = observe
    self.applies = base is not None or step.delivery.base_version is None

  def run(self, pool) -> tuple[Replica | None, list[Damage]]:
    damage, index = [], None
    try:
      index = read_index(self._chain.store, self._chain, self._step)
      damage += self._check_index(index)
    except DamagedError as error:
      damage.append(self._damage(str(error)))
    sizes = (shard.size for shard in self._step.delivery.indexes)
    self._observe("downloaded", sum(sizes))
    inside: dict[str, list[tuple[Chunk, Place]]] = {}
    if index is not None:
      for chunk, place in index.places.items():
        inside.setdefault(place.key, []).append((chunk, place))
    data = {}
    if self._base is not None and self._keep:
      data |= {
        chunk: self._base.data.get(chunk) for chunk, _ in inside.get("", ())
      }

    def check(shard):
      return self._check_shard(shard, index, inside.get(shard.key, ()))

    for arrays, found in pool.map(check, self._step.delivery.shards):
      data |= arrays
      damage += found
    if damage or not self.applies:
      return None, damage
    return Replica(self._step.version, index.contents, data), damage

  def _damage(self, reason) -> Damage:
    return Damage(self._step.version, self._step.delivery.base_version, reason)

  def _check_index(self, index: Index) -> list[Damage]:
    """Against the manifest, and chunks that lie nowhere against the base."""
    damage = []
    named = {shard.key for shard in self._step.delivery.shards} | {""}
    for key in sorted({place.key for place in index.places.values()} - named):
      damage.append(
        self._damage(f"its index names {key}, its manifest doesn't")
      )
    for chunk, place in index.places.items():
      if place.key or not self.applies:
        continue
      before = self._base and self._base.contents.digests.get(chunk)
      if before != index.contents.digests[chunk]:
        damage.append(self._damage(f"it lacks the bits of {chunk}"))
    return damage

  def _check_shard(self, shard: Shard, index, inside):
    """An object as a whole, then each delta in it."""
    try:
      data = self._chain.store.get(shard.key)
    except MissingObjectError:
      return {}, [self._damage(f"{shard.key} is missing")]
    finally:
      self._observe("downloaded", shard.size)
    if len(data) != shard.size:
      reason = f"{shard.key} has {len(data)} bytes of {shard.size}"
      return {}, [self._damage(reason)]
    if sha256(data) != shard.sha256:
      return {}, [self._damage(f"{shard.key} was altered: its digest differs")]
    arrays, damage = {}, []
    for chunk, place in inside if self.applies else ():
      delta = data[place.offset : place.offset + place.size]
      try:
        array = self._apply(index, chunk, place, delta)
      except DeltaError as error:
        damage.append(self._damage(f"{chunk} in {shard.key}: {error}"))
      else:
        if self._keep:
          arrays[chunk] = array
    return arrays, damage

  def _apply(self, index: Index, chunk, place, delta) -> np.ndarray:
    if sha256(delta) != place.sha256:
      raise DeltaError("its index has another digest of it")
    # `decode` sees to it that the result has the digest of the header.
    if read_header(delta).digest.hex() != index.contents.digests[chunk]:
      raise DeltaError("it gives other bits than the version's")
    if self._base is None:
      dtype = np.dtype(index.contents.arrays[chunk.path].dtype)
      return decode(delta, None, out=np.empty(chunk.box.shape, dtype))
    if chunk not in self._base.data:
      raise DeltaError("its base has no such chunk")
    return decode(delta, self._base.data[chunk])
