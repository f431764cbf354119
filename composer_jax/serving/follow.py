"""Keeps an engine at a chain's newest version, or where it is told to stay.

A thread of its own asks the subscriber for new versions and hands them to the
engine. Whatever goes wrong with one, the version before goes on serving, the
failure is logged and counted, and the next look tries again, later and later.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import PyTree

from composer_jax.serving.engine import Engine
from composer_jax.serving.types import (
  EngineError,
  StoppedError,
  SwapReport,
  WeightError,
)
from composer_jax.shipping import ChainError, StoreError, Subscriber
from composer_jax.shipping.contents import flatten

_log = logging.getLogger(__name__)
VERBS = ("follow", "pin", "roll_back", "skip")
_LONGEST_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class FollowConfig:
  """How new versions come to serve.

  Attributes:
    interval_s: between looks at the chain, seconds.
    mode: of the swap; see `Engine.set_weights`.
    cache: what becomes of running requests' caches; see there.
  """

  interval_s: float = 5.0
  mode: Literal["in_flight", "drain"] = "in_flight"
  cache: Literal["recompute", "keep"] = "recompute"

  def __post_init__(self):
    if not 0 < self.interval_s <= threading.TIMEOUT_MAX:
      raise ValueError(
        f"interval_s={self.interval_s} must be above 0, and at most"
        f" {threading.TIMEOUT_MAX:.0f}."
      )


class Follower:
  """Moves versions from a subscriber to an engine.

  Attributes:
    failures: number of updates that failed.
    failure: what went wrong last; empty once an update went well again.
    swaps: number of versions that came to serve.
    newest: version in the chain, as last seen.
  """

  def __init__(
    self,
    subscriber: Subscriber,
    engine: Engine,
    config: FollowConfig | None = None,
    *,
    observe: Callable[[SwapReport], object] = lambda report: None,
  ):
    """Starts to follow.

    Args:
      subscriber: nobody else may use it from now on; `close` closes it.
      engine: nobody else may set its weights. Something must step it.
      config: how.
      observe: told each swap, from the follower's thread.
    """
    self.failures = 0
    self.failure = ""
    self.swaps = 0
    self.newest: int | None = None
    self._subscriber = subscriber
    self._engine = engine
    self._config = config or FollowConfig()
    self._observe = observe
    # The version that the engine refused: not to be offered again and again.
    self._refused: int | None = None
    self._orders: queue.SimpleQueue = queue.SimpleQueue()
    self._closed = self._ended = False
    self._thread = threading.Thread(
      target=self._run, name="weight-follower", daemon=True
    )
    self._thread.start()

  def order(
    self, verb: str, version: int | None = None
  ) -> "concurrent.futures.Future[dict[str, Any]]":
    """Changes what is served.

    Args:
      verb: "follow" goes for the newest version again; "pin" goes to one and
        stays; "roll_back" goes to the one that served before and stays; "skip"
        never serves one again, and is refused where no other could serve;
        "status" and "digest" change nothing.
      version: which, to pin or to skip.

    Returns:
      Done once the version that follows from it serves: the status, as `status`
      has it. A ChainError, StoreError, EngineError or ValueError if it can't
      be had; then the version before goes on serving.
    """
    future: concurrent.futures.Future[dict[str, Any]] = (
      concurrent.futures.Future()
    )
    # Whoever waits may go away; the order is obeyed all the same.
    future.set_running_or_notify_cancel()
    self._orders.put((verb, version, future))
    if self._ended:
      self._refuse_orders()
    return future

  def status(self) -> dict[str, Any]:
    """What is served and why, for people and for JSON."""
    version, current = self._engine.version, self._subscriber.current
    serves = current is not None and current.version == version
    return {
      "version": version,
      "digest": current.digest if serves else None,
      "metadata": current.metadata if serves else None,
      "pinned": self._subscriber.pinned,
      "skipped": sorted(self._subscriber.skipped),
      "newest": self.newest,
      "swaps": self.swaps,
      "failures": self.failures,
      "failure": self.failure,
    }

  def close(self) -> None:
    """Ends the thread; waits for a version that is on its way."""
    self._closed = True
    self._orders.put(None)
    self._thread.join()
    self._subscriber.close()

  def _run(self):
    try:
      self._follow()
    finally:
      self._ended = True
      self._refuse_orders()

  def _refuse_orders(self):
    with contextlib.suppress(queue.Empty):
      while True:
        if order := self._orders.get_nowait():
          *_, future = order
          future.set_exception(StoppedError("Weights are followed no more."))

  def _follow(self):
    pause = 0.0
    while not self._closed:
      order = self._next_order(pause)
      try:
        if order:
          self._obey(*order)
        else:
          self._update()
        pause = self._config.interval_s
      except StoppedError:
        return
      # Nothing may end this thread: a server that silently stays behind is
      # worse than one that complains.
      except Exception as error:
        pause = min(_LONGEST_WAIT_S, max(1.0, 2 * pause))
        self._complain(error)

  def _next_order(self, pause):
    try:
      return self._orders.get(timeout=pause) if pause else None
    except queue.Empty:
      return None

  def _obey(self, verb, version, future):
    try:
      future.set_result(self._do(verb, version))
    except Exception as error:
      future.set_exception(error)
      known = (ChainError, StoreError, EngineError, ValueError, OSError)
      if isinstance(error, StoppedError) or not isinstance(error, known):
        raise

  def _do(self, verb, version):
    match verb:
      case "follow":
        self._subscriber.unpin()
      case "pin":
        self._subscriber.pin(version)
      case "skip":
        self._check_skip(version)
        self._subscriber.skip(version)
      case "roll_back":
        self._subscriber.roll_back()
      case "digest":
        # In this thread, in which no swap can come between.
        digest = weights_digest(self._engine.weights)
        return self.status() | {"weights_digest": digest}
      case "status":
        return self.status()
      case _:
        raise ValueError(f"There is no {verb!r}: use {', '.join(VERBS)}.")
    self._refused = None
    self._update()
    return self.status()

  def _check_skip(self, version):
    """Refuses to skip what would go on serving all the same."""
    if version == self._subscriber.pinned:
      raise ValueError(
        f"version {version} is pinned: pin another first, or follow."
      )
    chain = self._subscriber.chain
    chain.refresh()
    if not chain.versions.keys() - self._subscriber.skipped - {version}:
      raise ValueError(
        f"version {version} is the last that isn't skipped: publish another"
        " first."
      )

  def _update(self):
    try:
      self._subscriber.update()
    finally:
      self.newest = self._subscriber.chain.head
    weights = self._subscriber.current
    if weights is None or weights.version in (
      self._engine.version,
      self._refused,
    ):
      self.failure = "" if self._refused is None else self.failure
      return
    try:
      report = self._engine.set_weights(
        weights.tree,
        weights.version,
        mode=self._config.mode,
        cache=self._config.cache,
      ).result()
    except WeightError:
      self._refused = weights.version
      raise
    self.swaps += 1
    self.failure, self._refused = "", None
    _log.info(
      "Version %d serves instead of %d; paused for %.1f ms",
      report.version,
      report.previous,
      1e3 * report.pause_s,
    )
    self._observe(report)

  def _complain(self, error):
    self.failures += 1
    message = f"{type(error).__name__}: {error}"
    if message != self.failure:
      self.failure = message
      known = isinstance(error, ChainError | StoreError | EngineError)
      _log.warning(
        "Version %d goes on serving, since an update failed: %s",
        self._engine.version,
        message,
        exc_info=None if known else error,
      )


def weights_digest(weights: PyTree) -> str:
  """SHA-256 over names, shapes, dtypes and bits of arrays, in hexadecimal.

  Of the bits alone, however they are sharded or shipped: a learner and its
  hosts compare themselves by it.
  """
  total = hashlib.sha256()
  for path, leaf in sorted(flatten(weights).items()):
    array = np.ascontiguousarray(np.asarray(leaf))
    total.update(f"{path}\0{array.shape}\0{array.dtype.name}\n".encode())
    total.update(array.reshape(-1).view(np.uint8))
  return total.hexdigest()


def wait_for_first(
  subscriber: Subscriber, interval_s: float, *, stop: threading.Event
) -> bool:
  """Waits until a chain has a version that can be had; False if stopped."""
  told = time.monotonic()
  while not stop.is_set():
    try:
      if subscriber.update():
        return True
      problem = "the chain has no version yet"
    except (ChainError, StoreError) as error:
      problem = str(error)
    if time.monotonic() >= told:
      _log.warning("Waiting for weights: %s", problem)
      told = time.monotonic() + _LONGEST_WAIT_S
    stop.wait(interval_s)
  return False
