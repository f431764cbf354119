"""An engine that steps by itself, for servers and rollouts in its process."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable

from absl import logging

from composer_jax.serving.engine import Engine
from composer_jax.serving.types import (
  Completion,
  Event,
  Request,
  StoppedError,
  SwapReport,
  Token,
)
from composer_jax.serving.weights import Weights

# Takes a request's events, or the reason why there will be no more.
Sink = Callable[[Event | StoppedError], None]


class AsyncEngine:
  """Steps an engine in a thread of its own.

  Use from any number of event loops and threads. Close it, or use it as a
  context manager.

  Attributes:
    engine: that it steps. Its `step` and `generate` belong to the thread.
  """

  def __init__(self, engine: Engine):
    self.engine = engine
    self._sinks: dict[str, Sink] = {}
    self._lock = threading.Lock()
    self._closed = False
    self._thread = threading.Thread(
      target=self._run, name="serving-engine", daemon=True
    )
    self._thread.start()

  @property
  def healthy(self) -> bool:
    """Whether the engine still takes requests."""
    stopped = self._closed or self.engine.stopped
    return self._thread.is_alive() and not stopped

  async def generate(self, request: Request) -> AsyncIterator[Event]:
    """The request's events: tokens if it streams, then its completion.

    Leaving the loop early, or cancelling the task, cancels the request.

    Raises:
      RequestError: it can never be served.
      OverloadedError: the queue is full.
      StoppedError: the engine was closed, or failed.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event | StoppedError] = asyncio.Queue()

    def sink(event: Event | StoppedError) -> None:
      loop.call_soon_threadsafe(events.put_nowait, event)

    request_id = self._add(request, sink)
    done = False
    try:
      while not done:
        event = await events.get()
        done = not isinstance(event, Token)
        if isinstance(event, StoppedError):
          raise event
        yield event
    finally:
      if not done:
        self._forget(request_id)

  async def complete(self, request: Request) -> Completion:
    """The request's completion; raises as `generate` does."""
    async for event in self.generate(request):
      if isinstance(event, Completion):
        return event
    raise AssertionError("a request ends with its completion")

  def submit(self, request: Request) -> "concurrent.futures.Future[Completion]":
    """The same for threads; raises as `generate` does.

    To cancel it, give it a `request_id` and call `engine.cancel`.
    """
    future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
    # Not to be cancelled by itself, under the engine's thread.
    future.set_running_or_notify_cancel()

    def sink(event: Event | StoppedError) -> None:
      if isinstance(event, Completion):
        future.set_result(event)
      elif isinstance(event, StoppedError):
        future.set_exception(event)

    self._add(request, sink)
    return future

  async def set_weights(
    self,
    weights: Weights,
    version: int,
    *,
    mode: str = "in_flight",
    cache: str = "recompute",
  ) -> SwapReport:
    """Returns once they serve; see `Engine.set_weights`."""
    future = await asyncio.to_thread(
      self.engine.set_weights, weights, version, mode=mode, cache=cache
    )
    return await asyncio.wrap_future(future)

  def close(self) -> None:
    """Stops the thread; every open request raises StoppedError."""
    self._closed = True
    self.engine.stop(StoppedError("it was closed"))
    self._thread.join()

  def __enter__(self) -> "AsyncEngine":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _add(self, request, sink):
    # The thread can't deliver before the sink is known.
    with self._lock:
      request_id = self.engine.add(request)
      self._sinks[request_id] = sink
    return request_id

  def _forget(self, request_id):
    with self._lock:
      self._sinks.pop(request_id, None)
    self.engine.cancel(request_id)

  def _run(self):
    try:
      while not self._closed:
        if self.engine.busy:
          for event in self.engine.step():
            self._deliver(event)
        else:
          self.engine.wait(1.0)
      error = StoppedError("The engine was closed.")
    except StoppedError as stopped:
      error = stopped
    except Exception as failure:
      logging.exception("The engine failed.")
      error = StoppedError(f"The engine failed: {failure!r}")
    self.engine.settle()
    with self._lock:
      self._closed = True
      sinks = list(self._sinks.values())
      self._sinks.clear()
    for sink in sinks:
      _call(sink, error)

  def _deliver(self, event):
    with self._lock:
      sink = self._sinks.get(event.request_id)
      if isinstance(event, Completion):
        self._sinks.pop(event.request_id, None)
    if sink and not _call(sink, event):
      self._forget(event.request_id)


def _call(sink, event):
  """False if nobody listens any more: the event loop has been closed."""
  try:
    sink(event)
  except RuntimeError:
    return False
  return True
