"""Gets a version by the cheapest way that holds: plan, lease, download.

Damage on the way is gone around: another plan, without what was found damaged,
from what the reader has or from nothing.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable

from composer_jax.shipping import retention
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Chunk
from composer_jax.shipping.errors import ChainError, StoreError
from composer_jax.shipping.planner import plan
from composer_jax.shipping.reader import (
  BaseDamagedError,
  DamagedError,
  Payloads,
  Replica,
  fetch,
)

_log = logging.getLogger(__name__)


def acquire(
  chain: Chain,
  version: int,
  held: Replica | None,
  wants: Callable[[Chunk], bool],
  *,
  pool: concurrent.futures.Executor,
  payloads: Payloads | None = None,
  lease_s: float = 600.0,
  observe: Callable[[str, int], object] = lambda stage, size: None,
) -> Replica:
  """Gets what a reader needs of a version.

  Args:
    chain: refreshed as far as the version.
    version: its number.
    held: what the reader has of another version; not written to.
    wants: which chunks it needs.
    pool: threads that download and decode.
    payloads: what was downloaded before.
    lease_s: how long a download may stall and still be safe from retention,
      seconds; renewed while it lasts.
    observe: as of `fetch`; told "planned" and the bytes that whoever needs all
      chunks will download, too, before each way that is tried.

  Returns:
    The version, whole and checked; `held` if that is it.

  Raises:
    ChainError: if no undamaged way leads to it, with the reason.
    StoreError: if the store failed.
  """
  broken: set[tuple[int, int | None]] = set()
  damage: ChainError | None = None
  while True:
    have = held.version if held else None
    if held and have == version:
      return held
    try:
      steps = plan(chain.deliveries, version, have, broken)
    except ChainError as error:
      if damage is None:
        raise
      raise ChainError(f"{error}; {damage}") from damage
    shards = (shard for step in steps for shard in step.delivery.shards)
    observe("planned", sum(shard.size for shard in shards))
    lease = retention.lease(chain, steps, seconds=lease_s)
    if lease is None:  # Something was retired meanwhile.
      continue
    keeper = _Keeper(chain, lease, lease_s)
    try:
      return fetch(
        chain,
        steps,
        held,
        wants,
        pool=pool,
        payloads=payloads,
        keep_alive=keeper.renew,
        every_s=lease_s / 4,
        observe=observe,
      )
    except DamagedError as error:
      _log.warning("%s; trying another way", error)
      broken.add(error.place)
      damage = error
    except BaseDamagedError as error:
      _log.warning("%s; starting over", error)
      held = None
    finally:
      keeper.release()


class _Keeper:
  """Renews a lease while it is needed."""

  def __init__(self, chain, lease, seconds):
    self._store = chain.store
    self._lease = lease
    self._seconds = seconds
    self._due = time.monotonic() + seconds / 4

  def renew(self):
    if time.monotonic() >= self._due:
      self._lease = retention.renew(
        self._store, self._lease, seconds=self._seconds
      )
      self._due = time.monotonic() + self._seconds / 4

  def release(self):
    try:
      retention.release(self._store, self._lease)
    except StoreError as error:
      _log.warning("a lease stays until it expires: %s", error)
