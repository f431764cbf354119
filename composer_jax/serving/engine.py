"""The engine: requests in, tokens out, new weights in between.

One `step` is a round on the device: a chunk of some prompts, then one token for
every row that is past its prompt. It starts this round before it reads what the
last one gave, so the device doesn't wait for the host: what a row sampled stays
on the device as the next step's input, positions and pages don't depend on it,
and a row that turns out to have stopped has run one token too far, which is
dropped. Only running out of pages and a swap make the host catch up first.

Weights: `set_weights` checks and copies the new ones while the old serve, in
its caller's thread; the swap itself happens between two steps.

* `mode="in_flight"`: at the next step. Running requests go on, each token
  labelled with the version it was sampled with. `cache="recompute"`: what they
  have so far is read again with the new weights, as if preempted.
  `cache="keep"`: it stays, and their tokens have `stale_cache` set henceforth.
* `mode="drain"`: what was started finishes on the old weights; what wasn't
  waits for the new ones.

Nothing of an update that fails its checks reaches the serving weights. An
update that comes while another waits for its turn takes its place.

One device; several serve more requests as several engines.
"""

import collections
import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from numbers import Integral
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from composer_jax.models import LanguageModel
from composer_jax.serving import step as device_step
from composer_jax.serving.cache import PageCache
from composer_jax.serving.live import Live, with_seed
from composer_jax.serving.runner import Flight, Runner
from composer_jax.serving.scheduler import Scheduler
from composer_jax.serving.types import (
  Completion,
  EngineConfig,
  Event,
  FinishReason,
  OverloadedError,
  Request,
  RequestError,
  Stats,
  StoppedError,
  SwapReport,
  Token,
  WeightError,
  check_request,
)
from composer_jax.serving.weights import Weights, place, weight_shapes


class _Staged(NamedTuple):
  """Weights that wait for their swap."""

  weights: Weights
  version: int
  mode: str
  cache: str
  since: float
  future: "Future[SwapReport]"


class Engine:
  """Continuous batching over a paged cache, on one device.

  `step` and `generate` belong to one thread; the other methods to any.

  Attributes:
    model: whose weights it serves.
    config: its shape.
  """

  def __init__(
    self,
    model: LanguageModel,
    weights: Weights,
    config: EngineConfig | None = None,
    *,
    version: int = 0,
    device: jax.Device | None = None,
  ):
    """Allocates the cache and copies the weights; compiles nothing.

    Args:
      model: its functions.
      weights: as `serving_weights` makes them.
      config: the engine's shape.
      version: of these weights.
      device: where; JAX's first by default.

    Raises:
      WeightError: the weights don't fit the model.
    """
    self.model = model
    self.config = config = config or EngineConfig()
    self._device = device or jax.devices()[0]
    self._weight_shapes = weight_shapes(model)
    weights = place(weights, self._weight_shapes, self._device, version)
    self._runner = Runner(model, weights, config, version, self._device)
    self._route_shape = device_step.route_shape(model.config)
    self._route_dtype = device_step.route_dtype(model.config)
    self._cache = PageCache(
      config.num_pages, config.page_size, self._route_shape, self._route_dtype
    )
    self._scheduler = Scheduler(config, self._cache)
    self._flights: list[Flight] = []
    self._events: list[Event] = []
    self._counts: collections.Counter[str] = collections.Counter()
    self._finished: collections.Counter[str] = collections.Counter()
    self._last_pause = 0.0
    # What other threads hand over, guarded by the lock.
    self._lock = threading.Lock()
    self._open: dict[str, Live] = {}
    self._inbox: list[Live] = []
    self._cancelled: list[Live] = []
    self._staged: _Staged | None = None
    self._failure: BaseException | None = None
    self._work = threading.Event()

  # ---- Requests --------------------------------------------------------------

  def add(self, request: Request) -> str:
    """Queues a request; returns its id.

    Raises:
      RequestError: it can never be served.
      OverloadedError: the queue is full.
      StoppedError: the engine failed.
    """
    check_request(request, self.config, self.model.config.vocab_size)
    sampling = with_seed(request.sampling, secrets.randbits(32))
    with self._lock:
      self._check_alive()
      queued = len(self._inbox) + len(self._scheduler.waiting)
      if queued >= self.config.max_waiting:
        self._counts["rejected"] += 1
        raise OverloadedError(
          f"{queued} requests wait already, as many as max_waiting allows: try"
          " again later."
        )
      order = self._counts["requests"]
      request_id = request.request_id or f"request-{order}"
      if request_id in self._open:
        raise RequestError(f"request_id={request_id!r} is taken by another.")
      self._counts["requests"] += 1
      live = Live(request, request_id, sampling, order)
      self._open[request_id] = live
      self._inbox.append(live)
    self._work.set()
    return request_id

  def cancel(self, request_id: str) -> None:
    """Ends a request at the next step; ignored if there is none such."""
    with self._lock:
      # Not by its name, which a later request may have.
      if live := self._open.get(request_id):
        self._cancelled.append(live)
    self._work.set()

  @property
  def version(self) -> int:
    """Of the weights that serve."""
    return self._runner.version

  @property
  def weights(self) -> Weights:
    """Those that serve, on the device; not to be donated or deleted."""
    return self._runner.weights

  @property
  def busy(self) -> bool:
    """Whether a step has anything to do."""
    return bool(self._open or self._staged or self._flights or self._events)

  def wait(self, timeout: float) -> None:
    """Blocks until there may be work, for so many seconds at most."""
    self._work.wait(timeout)
    self._work.clear()

  def generate(self, requests: Sequence[Request]) -> list[Completion]:
    """Runs requests to their ends; completions in the requests' order.

    For an engine that nobody else uses: events of other requests are lost.
    """
    waiting = collections.deque(requests)
    completions: dict[str, Completion | None] = {}
    left = len(waiting)
    while left:
      try:
        while waiting:
          completions[self.add(waiting[0])] = None
          waiting.popleft()
      except OverloadedError:
        pass
      for event in self.step():
        if isinstance(event, Completion) and event.request_id in completions:
          completions[event.request_id] = event
          left -= 1
    return list(completions.values())

  # ---- Weights ---------------------------------------------------------------

  def set_weights(
    self,
    weights: Weights,
    version: int,
    *,
    mode: str = "in_flight",
    cache: str = "recompute",
  ) -> "Future[SwapReport]":
    """Checks and copies new weights, to be swapped in between two steps.

    Args:
      weights: a tree of arrays like that of `serving_weights`. They are copied:
        the caller may do with its own what it likes.
      version: of them. A version is immutable: the cache of one that served
        before is used again when it returns.
      mode: "in_flight" or "drain"; see the module.
      cache: "recompute" or "keep", where running requests go on.

    Returns:
      Done when the swap is; a `WeightError` if a later update took its place.

    Raises:
      WeightError: they don't fit. The old version goes on.
    """
    if mode not in ("in_flight", "drain") or cache not in ("recompute", "keep"):
      raise WeightError(
        f"mode={mode!r} must be 'in_flight' or 'drain', and cache={cache!r}"
        " 'recompute' or 'keep'."
      )
    if not isinstance(version, Integral) or not -(2**63) <= version < 2**63:
      raise WeightError(f"version={version!r:.80} must be an integer.")
    if version == self.version:
      raise WeightError(
        f"Version {version} is being served: other weights need another number."
      )
    began = time.perf_counter()
    weights = place(weights, self._weight_shapes, self._device, version)
    future: Future[SwapReport] = Future()
    # Whoever waits may go away; the swap takes place all the same.
    future.set_running_or_notify_cancel()
    with self._lock:
      self._check_alive()
      replaced = self._staged
      self._staged = _Staged(weights, version, mode, cache, began, future)
    if replaced:
      replaced.future.set_exception(
        WeightError(
          f"Version {replaced.version} was replaced by version {version} before"
          " its turn came."
        )
      )
    self._work.set()
    return future

  # ---- The loop --------------------------------------------------------------

  def warm_up(self) -> None:
    """Compiles every shape and runs each once, on nothing.

    Called by the first `step` if it wasn't before; no later one compiles.
    """
    self._runner.warm_up()

  def step(self) -> list[Event]:
    """Starts a round, reads the last one, and returns what became known.

    Raises:
      StoppedError: an earlier step failed.
    """
    self._check_alive()
    try:
      if not self._runner.is_warm:
        self.warm_up()
      self._take_orders()
      self._swap_if_due()
      prefill, decode = self._schedule()
      behind, self._flights = self._flights, []
      if prefill:
        self._flights.append(self._runner.prefill(prefill))
      if decode:
        self._flights.append(self._runner.decode(decode))
      # The device does things in order: whoever finds a page reads it later.
      for live in prefill:
        self._register(live)
      for flight in behind:
        self._read(flight)
    except BaseException as error:
      self.stop(error)
      raise
    events, self._events = self._events, []
    return events

  def stop(self, reason: BaseException) -> None:
    """Refuses everything from now on, because of `reason`."""
    with self._lock:
      self._failure = self._failure or reason
      staged, self._staged = self._staged, None
      self._open.clear()
    if staged:
      staged.future.set_exception(
        StoppedError(f"The engine stopped before the swap: {reason}")
      )
    self._work.set()

  def settle(self) -> None:
    """Drops what was started and not read, once the device is done with it.

    After `stop`. XLA aborts a process that ends under a running step.
    """
    flights, self._flights, self._events = self._flights, [], []
    for flight in flights:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(flight.output)

  @property
  def stopped(self) -> bool:
    """Whether it refuses everything, see `stop`."""
    return self._failure is not None

  def stats(self) -> Stats:
    """Counts and sizes, now."""
    running, cache, counts = self._scheduler.running, self._cache, self._counts
    return Stats(
      version=self.version,
      waiting=len(self._inbox) + len(self._scheduler.waiting),
      running=len(running),
      pages_total=cache.num_pages,
      pages_used=cache.num_pages - cache.num_available,
      pages_cached=cache.num_cached,
      requests=counts["requests"],
      rejected=counts["rejected"],
      finished=dict(self._finished),
      prompt_tokens=self._scheduler.prompt_tokens,
      cached_tokens=self._scheduler.cached_tokens,
      sampled_tokens=counts["sampled_tokens"],
      preemptions=self._scheduler.preemptions,
      evictions=cache.evictions,
      prefill_steps=self._runner.prefill_steps,
      decode_steps=self._runner.decode_steps,
      swaps=counts["swaps"],
      last_pause_s=self._last_pause,
    )

  @property
  def cache_bytes(self) -> int:
    """Device memory that the cache takes."""
    return self._runner.cache_bytes

  # ---- Inside a step ---------------------------------------------------------

  def _take_orders(self):
    with self._lock:
      arrived, self._inbox = self._inbox, []
      cancelled, self._cancelled = self._cancelled, []
      for live in arrived:
        self._scheduler.enqueue(live)
    for live in cancelled:
      if not live.finished:
        self._finish(live, "cancelled")

  def _swap_if_due(self):
    with self._lock:
      staged = self._staged
      if staged is None:
        return
      everyone = self._scheduler.running + self._scheduler.waiting
      if staged.mode == "drain" and any(live.started for live in everyone):
        return
      self._staged = None
    self._catch_up()
    began = time.perf_counter()
    previous, self._runner.version = self.version, staged.version
    self._runner.weights = staged.weights
    recomputed = self._scheduler.running if staged.cache == "recompute" else []
    for live in recomputed:
      self._scheduler.requeue(live)
    ended = time.perf_counter()
    self._last_pause = ended - began
    self._counts["swaps"] += 1
    report = SwapReport(
      version=staged.version,
      previous=previous,
      mode=staged.mode,
      recomputed=len(recomputed),
      pause_s=ended - began,
      staged_s=ended - staged.since,
    )
    logging.info("Swapped weights: %s", report)
    staged.future.set_result(report)

  def _schedule(self):
    """Who reads a chunk of its prompt now, and who samples a token."""
    draining = self._staged is not None and self._staged.mode == "drain"
    self._scheduler.admit(self._root(self.version), only_started=draining)
    for live in self._scheduler.running:
      if live.pending == 1:
        self._make_room(live)
    running = self._scheduler.running
    prefill = [live for live in running if live.pending > 1]
    decode = [live for live in running if live.pending == 1]
    return prefill[: self.config.prefill_rows], decode

  def _make_room(self, live):
    """A page for its next token, or else it waits."""
    while live.slot is not None and not self._scheduler.grow(live):
      if self._flights:
        # May end requests; and who gives way must be fully known.
        self._catch_up()
      else:
        self._scheduler.give_way()

  def _catch_up(self):
    """Reads all that was started."""
    flights, self._flights = self._flights, []
    for flight in flights:
      self._read(flight)

  def _read(self, flight):
    """Waits for a step, and hands out what it sampled."""
    output = jax.device_get(flight.output)
    for row in flight.rows:
      routes = output.routes[row.index, : row.length]
      # Of every row: others may have found pages whose owner has ended since.
      self._keep_routes(row, routes)
      # A row that stopped, or was cancelled, after this step was started.
      if row.samples and not row.live.finished:
        self._take_token(row, flight.version, output, routes[-1])

  def _take_token(self, row, version, output, routes):
    live, i, top = row.live, row.index, row.live.sampling.top_logprobs
    token = Token(
      request_id=live.request_id,
      index=live.num_sampled,
      token_id=int(output.token[i]),
      logprob=float(output.logprob[i]),
      model_logprob=float(output.model_logprob[i]),
      version=version,
      stale_cache=row.stale,
      # A copy: the rest of the step's output shall not be kept alive.
      routes=routes.copy(),
      top=tuple(
        zip(
          output.top_ids[i, :top].tolist(),
          output.top_logprobs[i, :top].tolist(),
          strict=True,
        )
      ),
    )
    if not np.isfinite(token.logprob):
      self._finish(
        live,
        "error",
        f"Version {version} gave a log-probability of {token.logprob} for"
        f" token {token.index}: its weights, or its cache, aren't finite.",
      )
      return
    if token.index == 0 and live.request.return_prompt_routes:
      live.prompt_routes = self._prompt_routes(live)
    self._counts["sampled_tokens"] += 1
    reason = live.append(token)
    if live.request.stream:
      self._events.append(token)
    if reason:
      self._finish(live, reason)
    else:
      self._register(live)

  def _keep_routes(self, row, routes):
    position = np.arange(row.start, row.start + row.length)
    page = np.array(row.pages)[position // self.config.page_size]
    self._cache.routes[page, position % self.config.page_size] = routes

  def _prompt_routes(self, live):
    routes = np.concatenate(self._cache.routes[live.pages])
    return routes[: live.prompt_len - 1]

  def _register(self, live):
    """Lets others find its whole pages, if one version computed them."""
    if not self.config.prefix_sharing:
      return
    versions = frozenset(live.cache_versions)
    if versions != {self.version} and not self.config.share_across_versions:
      return
    live.extend_keys(self._root(self.version), self.config.page_size)
    whole = min(live.computed, len(live.tokens)) // self.config.page_size
    for nth in range(live.registered, whole):
      self._cache.register(live.pages[nth], live.keys[nth], versions)
    live.registered = max(live.registered, whole)

  def _root(self, version):
    return b"any" if self.config.share_across_versions else b"%d" % version

  def _finish(self, live: Live, reason: FinishReason, error: str = ""):
    live.finished = True
    self._scheduler.drop(live)
    self._finished[reason] += 1
    with self._lock:
      self._open.pop(live.request_id, None)
    self._events.append(
      live.completion(reason, error, self._route_shape, self._route_dtype)
    )

  def _check_alive(self):
    if self._failure is not None:
      raise StoppedError(f"The engine has stopped: {self._failure!r}")
