"""What may be deleted, and leases of those who read it.

A reader first writes a lease that lists the deliveries it will use, then reads
the log, and only if none of them is retired there does it begin. A collector
first appends their retirement to the log, then reads the leases, and only then
deletes. Whichever came first, one sees the other: nothing that a reader uses
goes, whatever the delays between these steps.

Log entries stay. So do all objects of the current epoch that no version names:
a publisher may be about to commit them.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Collection, Sequence

from composer_jax.shipping import planner
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.errors import ChainError, MissingObjectError
from composer_jax.shipping.manifest import Retired
from composer_jax.shipping.planner import Step
from composer_jax.shipping.store import Store

# By how much clocks of readers and collectors may differ, seconds.
CLOCK_SLACK_S = 300.0


@dataclasses.dataclass(frozen=True)
class Lease:
  """A reader's promise to be done with `uses` by a time, or renew.

  Attributes:
    key: where it lies; `release` it.
    uses: (version, base version) of deliveries.
    expires: seconds since 1970.
  """

  key: str
  uses: tuple[tuple[int, int | None], ...]
  expires: float


def lease(
  chain: Chain,
  steps: Sequence[Step],
  *,
  seconds: float = 600.0,
  now: float | None = None,
) -> Lease | None:
  """Leases the deliveries of a plan.

  Args:
    chain: refreshed here.
    steps: of the plan.
    seconds: until the lease expires; renew it before that.
    now: seconds since 1970, for tests.

  Returns:
    The lease, or None if something of the plan was retired: make another plan.
  """
  uses = tuple((step.version, step.delivery.base_version) for step in steps)
  held = _write(chain.store, uses, seconds, now)
  chain.refresh()
  if chain.retired.intersection(uses):
    release(chain.store, held)
    return None
  return held


def renew(
  store: Store,
  held: Lease,
  *,
  seconds: float = 600.0,
  now: float | None = None,
) -> Lease:
  """Prolongs a lease that has not expired: its deliveries can't have gone.

  Args:
    store: of the chain.
    held: the lease; it ends here, once the new one is written.
    seconds: until the new one expires.
    now: seconds since 1970, for tests.

  Returns:
    The new lease.

  Raises:
    ChainError: if it expired; make another plan.
  """
  if (time.time() if now is None else now) > held.expires:
    raise ChainError("the lease expired; its deliveries may be gone")
  following = _write(store, held.uses, seconds, now)
  release(store, held)
  return following


def release(store: Store, held: Lease) -> None:
  """Ends a lease."""
  store.delete(held.key)


def collect(
  chain: Chain,
  keep: Collection[int] = (),
  *,
  now: float | None = None,
) -> int:
  """Deletes what neither the head, nor `keep`, nor a lease needs.

  For each kept version, the cheapest way from nothing stays. What fenced-off
  publishers uploaded and never committed goes too.

  Args:
    chain: refreshed here.
    keep: versions that must stay reachable.
    now: seconds since 1970, for tests.

  Returns:
    Objects deleted.

  Raises:
    ChainError: if a version of `keep` can't be reached, or a lease can't be
      read; nothing is deleted then.
  """
  now = time.time() if now is None else now
  chain.refresh()
  if _superfluous(chain, keep, now):
    chain.retire(lambda: _superfluous(chain, keep, now))
  dead = _dead(chain, chain.retired, now)
  for key in dead:
    chain.store.delete(key)
  return len(dead)


@dataclasses.dataclass(frozen=True)
class Garbage:
  """What `collect` would do now.

  Attributes:
    retired: deliveries that would no longer stand.
    committed: objects that would go, of versions; key -> bytes.
    abandoned: keys that would go, that no version names.
  """

  retired: list[Retired]
  committed: dict[str, int]
  abandoned: list[str]


def find_garbage(
  chain: Chain, keep: Collection[int] = (), *, now: float | None = None
) -> Garbage:
  """Tells what `collect` would do, and deletes nothing but expired leases.

  Args:
    chain: refreshed here.
    keep: versions that must stay reachable.
    now: seconds since 1970, for tests.

  Raises:
    ChainError: as `collect`.
  """
  now = time.time() if now is None else now
  chain.refresh()
  retired = _superfluous(chain, keep, now)
  gone = {(delivery.version, delivery.base_version) for delivery in retired}
  sizes = {
    shard.key: shard.size
    for manifest in chain.versions.values()
    for delivery in manifest.deliveries
    for shard in delivery.objects
  }
  dead = _dead(chain, chain.retired | gone, now)
  return Garbage(
    retired,
    {key: sizes[key] for key in dead if key in sizes},
    [key for key in dead if key not in sizes],
  )


def _superfluous(chain, keep, now) -> list[Retired]:
  """Deliveries that stand, and that nothing kept or leased needs."""
  kept = set(keep) | ({chain.head} if chain.head is not None else set())
  needed = _leased(chain.store, now)
  for version in kept:
    for step in planner.plan(chain.deliveries, version):
      needed.add((step.version, step.delivery.base_version))
  return [
    Retired(version, delivery.base_version)
    for version, deliveries in chain.deliveries.items()
    for delivery in deliveries
    if (version, delivery.base_version) not in needed
  ]


def _dead(chain, retired, now) -> list[str]:
  """Keys of objects that are there and that nobody may read any more."""
  spared = _leased(chain.store, now)
  named, needed = set(), set()
  for version, manifest in chain.versions.items():
    for delivery in manifest.deliveries:
      keys = {shard.key for shard in delivery.objects}
      named |= keys
      place = (version, delivery.base_version)
      if place not in retired or place in spared:
        needed |= keys
  return [
    key
    for key in chain.store.list("data")
    if (key not in named and key < f"data/{chain.epoch:08d}")
    or (key in named and key not in needed)
  ]


def _write(store, uses, seconds, now):
  expires = (time.time() if now is None else now) + seconds
  key = f"leases/{uuid.uuid4().hex}"
  text = json.dumps({"uses": uses, "expires": expires})
  store.put_if_absent(key, text.encode())
  return Lease(key, uses, expires)


def _leased(store, now):
  """Deliveries that living leases list; deletes leases long expired."""
  uses = set()
  settled = False
  while not settled:
    settled = True
    for key in list(store.list("leases")):
      try:
        text = store.get(key)
      except MissingObjectError:
        # Released, or renewed under a key that the listing may lack.
        settled = False
        continue
      listed, expires = _read(key, text)
      if expires + CLOCK_SLACK_S < now:
        store.delete(key)
      else:
        uses |= listed
  return uses


def _read(key, text):
  try:
    fields = json.loads(text)
    listed = {(version, base) for version, base in fields["uses"]}
    return listed, float(fields["expires"])
  except (ValueError, TypeError, KeyError) as error:
    raise ChainError(f"{key} can't be read; delete it by hand") from error
