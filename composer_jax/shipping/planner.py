"""Which deltas to make, and which to download."""

import dataclasses
from collections.abc import Collection, Mapping

from composer_jax.shipping.errors import ChainError
from composer_jax.shipping.manifest import Delivery


@dataclasses.dataclass(frozen=True)
class Step:
  """One delivery to download and apply, giving `version`."""

  version: int
  delivery: Delivery


def skip_distances(ordinal: int, longest: int = 64) -> list[int]:
  """How far back the deltas of the `ordinal`-th version reach.

  Every power of two that divides it: from any version to any later one, n
  versions on, at most 2 log2(n) + 1 deltas then lead, and a version has two of
  them on average.

  Args:
    ordinal: counts versions, not log positions; from 0.
    longest: no delta reaches further.

  Returns:
    Distances in versions, shortest first; none for the first version.
  """
  distances = []
  distance = 1
  while distance <= min(longest, ordinal) and ordinal % distance == 0:
    distances.append(distance)
    distance *= 2
  return distances


def plan(
  deliveries: Mapping[int, Collection[Delivery]],
  want: int,
  have: int | None = None,
  broken: Collection[tuple[int, int | None]] = (),
) -> list[Step]:
  """The cheapest way to a version, in bytes; of equals, that of fewest steps.

  Args:
    deliveries: version -> the ways to get it that still stand.
    want: the version to reach.
    have: a version that the reader holds, if any.
    broken: (version, base version) of deliveries found damaged.

  Returns:
    Steps in order; none if `have` is `want`.

  Raises:
    ChainError: if no way leads there.
  """
  if have == want:
    return []
  costs = {None: (0, 0)}
  last = {}
  if have is not None:
    costs[have] = (0, 0)
  for version in sorted(v for v in deliveries if v <= want):
    if version == have:
      continue
    for delivery in deliveries[version]:
      base = delivery.base_version
      if base not in costs or (version, base) in broken:
        continue
      size, steps = costs[base]
      cost = (size + delivery.size, steps + 1)
      if version not in costs or cost < costs[version]:
        costs[version] = cost
        last[version] = Step(version, delivery)
  if want not in last:
    start = "nothing" if have is None else f"version {have} or nothing"
    raise ChainError(
      f"no way leads from {start} to version {want}"
      f" ({len(broken)} deliveries are damaged)"
    )
  path = []
  at = want
  while at in last:
    path.append(last[at])
    at = last[at].delivery.base_version
  return path[::-1]


def reachable(
  deliveries: Mapping[int, Collection[Delivery]],
  broken: Collection[tuple[int, int | None]] = (),
) -> set[int]:
  """Versions that a reader without any can get.

  Args:
    deliveries: version -> the ways to get it that still stand.
    broken: (version, base version) of deliveries found damaged.
  """
  found: set[int] = set()
  for version in sorted(deliveries):
    if any(
      (delivery.base_version is None or delivery.base_version in found)
      and (version, delivery.base_version) not in broken
      for delivery in deliveries[version]
    ):
      found.add(version)
  return found
