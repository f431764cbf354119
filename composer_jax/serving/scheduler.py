"""Who runs, who waits, and who gives way when the cache is full.

First come, first served. A request is admitted when there is a row and room for
all its known tokens. A running one that needs a page which isn't there takes it
from the youngest, which goes back to the queue, in the order of its arrival,
and later computes its cache again: the oldest always gets on, and nothing
sampled is lost. The pages of its prefix stay findable until their room is
needed.

A request whose next page another one is about to compute waits for that page,
so that the rollouts of a group compute their prompt once.
"""

import bisect

from composer_jax.serving.cache import PageCache
from composer_jax.serving.live import Live
from composer_jax.serving.types import EngineConfig


class Scheduler:
  """The queue and the rows.

  Attributes:
    waiting: in order of arrival.
    preemptions: requests that gave way to an older one.
    prompt_tokens: of the requests admitted, each counted once.
    cached_tokens: of them, found in the cache.
  """

  def __init__(self, config: EngineConfig, cache: PageCache):
    self.waiting: list[Live] = []
    self.preemptions = self.prompt_tokens = self.cached_tokens = 0
    self._config = config
    self._cache = cache
    self._rows: list[Live | None] = [None] * config.max_rows

  @property
  def running(self) -> list[Live]:
    """Requests that have a row, in order of arrival."""
    running = [live for live in self._rows if live is not None]
    return sorted(running, key=lambda live: live.order)

  def enqueue(self, live: Live) -> None:
    """Lets it wait, in the order of its arrival."""
    bisect.insort(self.waiting, live, key=lambda other: other.order)

  def admit(self, root: bytes, *, only_started: bool) -> None:
    """Gives rows and pages to those who wait, as far as there is room.

    Args:
      root: of the keys of pages that they may share.
      only_started: whether only those who ran before are admitted.
    """
    size, sharing = self._config.page_size, self._config.prefix_sharing
    running = self.running
    coming = {
      key
      for live in running
      if sharing and live.pending > 1
      for key in live.keys[live.registered :]
    }
    for live in list(self.waiting):
      if None not in self._rows:
        break
      if only_started and not live.started:
        continue
      live.extend_keys(root, size)
      # At least one token must be left to compute: its logits are needed.
      keys = live.keys[: (len(live.tokens) - 1) // size] if sharing else []
      shared = self._cache.find(keys)
      if len(shared) < len(keys) and keys[len(shared)] in coming:
        continue
      needed = -(-len(live.tokens) // size) - len(shared)
      room = self._cache.num_available - self._cache.num_idle(shared)
      # A page for each who runs: admitting shall not end in preempting.
      if room < needed + len(running):
        break
      if not live.started:
        self.prompt_tokens += live.prompt_len
        self.cached_tokens += len(shared) * size
      self._cache.hold(shared)
      pages = shared + [self._allocate() for _ in range(needed)]
      slot = self._rows.index(None)
      live.admit(slot, pages, len(shared) * size)
      live.registered = len(shared)
      for page in shared:
        live.cache_versions |= self._cache.versions[page]
      self._rows[slot] = live
      self.waiting.remove(live)
      running.append(live)
      coming.update(keys[len(shared) :])

  def grow(self, live: Live) -> bool:
    """Makes sure of a page for its next token; False if there is none."""
    if live.computed < len(live.pages) * self._config.page_size:
      return True
    page = self._cache.allocate()
    if page is None:
      return False
    live.pages.append(page)
    return True

  def give_way(self) -> Live:
    """Sends the youngest running request back to the queue."""
    victim = self.running[-1]
    self.preemptions += 1
    self.requeue(victim)
    return victim

  def requeue(self, live: Live) -> None:
    """Takes row and pages from a running request, and lets it wait."""
    self.drop(live)
    self.enqueue(live)

  def drop(self, live: Live) -> None:
    """Forgets a request, and lets go of what it holds."""
    if live.slot is None:
      if live in self.waiting:
        self.waiting.remove(live)
      return
    self._rows[live.slot] = None
    self._cache.release(live.retire())

  def _allocate(self) -> int:
    page = self._cache.allocate()
    assert page is not None
    return page
