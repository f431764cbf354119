"""Sessions: whole rollouts that ask one of many engines, turn by turn.

    pool = Pool([HttpEndpoint(client, url, "tiny", chat) for url in urls])
    with pool.session(Sampling(temperature=0.8), seed=(7, 3)) as sampler:
      transcript = await harness.run(sampler, ...)

A session stays with its engine, whose cache holds what it said so far, until
that engine fails. Then the request is asked again, whole and with the same
seed, of another: what failed leaves nothing behind, and failing gives no second
draw. An engine that is too busy is left alone for as long as it asks, by all
sessions, which stay with it.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from composer_jax.rl.endpoints import (
  BusyError,
  Endpoint,
  Sampled,
  ServerError,
)
from composer_jax.rl.trajectory import Sampling

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
  """How engines are asked.

  Attributes:
    max_requests: to one engine at once; more wait here.
    request_s: for an answer; without one by then the engine has failed.
    busy_s: in all that a request is put off by a busy engine, which then has
      failed.
    attempts: of a request, over all engines.
    rest_s: that an engine that failed is not asked; twice as long each time
      that it fails again, up to 32 times.
  """

  max_requests: int = 64
  request_s: float = 600.0
  busy_s: float = 300.0
  attempts: int = 4
  rest_s: float = 1.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value <= 0:
        raise ValueError(f"{field.name}={value} must be above 0.")


class Pool:
  """Engines that serve one policy, though not always one version of it.

  Use it within one event loop.

  Attributes:
    counts: "requests" that were answered, "busy" answers, "failed" requests,
      and "moved" sessions.
  """

  def __init__(
    self, endpoints: Sequence[Endpoint], config: PoolConfig | None = None
  ):
    """Collects the engines."""
    if not endpoints:
      raise ValueError("A pool needs at least one engine.")
    self.config = config or PoolConfig()
    self.counts: collections.Counter[str] = collections.Counter()
    self._engines = [
      _Engine(endpoint, self.config, self.counts) for endpoint in endpoints
    ]

  @contextlib.contextmanager
  def session(
    self, sampling: Sampling, seed: Sequence[int]
  ) -> Iterator["Session"]:
    """A sampler for one rollout.

    Args:
      sampling: the distribution.
      seed: of all its requests; every rollout needs another.
    """
    session = Session(self, sampling, seed)
    try:
      yield session
    finally:
      session.leave()

  def home(self) -> "_Engine":
    """The engine with the fewest sessions of those that are up."""
    # Of those that are all down, the one that is up again first.
    now = time.monotonic()
    return min(
      self._engines, key=lambda e: (max(0.0, e.down_until - now), e.sessions)
    )


class Session:
  """A `composer_jax.envs.harness.Sampler`; see `Pool.session`."""

  def __init__(self, pool: Pool, sampling: Sampling, seed: Sequence[int]):
    """Begins one; `leave` ends it."""
    self.sampling = sampling
    self._pool = pool
    self._seed = tuple(seed)
    self._engine: _Engine | None = None
    self._turns = 0
    # The last prompt with its answer, and how many passes' routes were told.
    self._said: list[int] = []
    self._routed = 0

  async def __call__(self, prompt: list[int], max_tokens: int) -> Sampled:
    """Continues a prompt.

    The answer's routes are those of passes whose routes no answer of this
    session had yet: as long as prompts go on from one another, one row for each
    position in all, made when that position was first read.

    Raises:
      ServerError: every attempt failed.
      RequestError: the request is wrong.
    """
    # A turn's own seed: where a context window starts anew, positions repeat.
    sequence = np.random.SeedSequence((*self._seed, self._turns))
    seed = int(sequence.generate_state(1)[0])
    attempts = self._pool.config.attempts
    goes_on = prompt[: len(self._said)] == self._said
    routed = self._routed if goes_on else 0
    for attempt in range(1, attempts + 1):
      engine = self._settle()
      try:
        sampled = await engine.ask(
          prompt, max_tokens, self.sampling, seed, routed
        )
        break
      except ServerError as error:
        problem = f"{engine.endpoint.name} failed: {error}"
        _log.warning("Attempt %d of %d: %s", attempt, attempts, problem)
        if attempt == attempts:
          raise ServerError(f"{problem} (attempt {attempt})") from error
    self._turns += 1
    self._said = [*prompt, *sampled.token_ids.tolist()]
    self._routed = len(self._said) - 1
    return sampled

  def leave(self) -> None:
    """Ends the session."""
    if self._engine:
      self._engine.sessions -= 1
      self._engine = None

  def _settle(self) -> "_Engine":
    """Stays with its engine while that is up."""
    before = self._engine
    if before is None or before.down_until > time.monotonic():
      self.leave()
      self._engine = self._pool.home()
      self._engine.sessions += 1
      self._pool.counts["moved"] += before not in (None, self._engine)
    return self._engine


class _Engine:
  """An endpoint, and what is known of its state."""

  def __init__(
    self,
    endpoint: Endpoint,
    config: PoolConfig,
    counts: collections.Counter[str],
  ):
    self.endpoint = endpoint
    self.sessions = 0
    self.down_until = 0.0
    self._busy_until = 0.0
    self._failures = 0
    self._config = config
    self._counts = counts
    self._slots = asyncio.Semaphore(config.max_requests)

  async def ask(self, *request) -> Sampled:
    """One attempt at `Endpoint.sample`; raises as that, but no `BusyError`."""
    async with self._slots:
      try:
        await asyncio.sleep(self.down_until - time.monotonic())
        sampled = await self._patiently(*request)
      except ServerError:
        rest = self._config.rest_s * 2 ** min(self._failures, 5)
        # Of requests that fail together only the first is another failure.
        if self.down_until <= time.monotonic():
          self._failures += 1
          self.down_until = time.monotonic() + rest
        self._counts["failed"] += 1
        raise
    self._failures = 0
    self._counts["requests"] += 1
    return sampled

  async def _patiently(self, *request) -> Sampled:
    give_up = time.monotonic() + self._config.busy_s
    while True:
      # A slot is kept meanwhile: what waits here is not to be more later.
      while (pause := self._busy_until - time.monotonic()) > 0:
        await asyncio.sleep(pause)
      try:
        async with asyncio.timeout(self._config.request_s):
          return await self.endpoint.sample(*request)
      except TimeoutError:
        raise ServerError(
          f"no answer within {self._config.request_s:g} s"
        ) from None
      except BusyError as error:
        self._counts["busy"] += 1
        until = time.monotonic() + error.retry_s
        if until > give_up:
          raise ServerError(
            f"too busy for {self._config.busy_s:g} s: {error}"
          ) from error
        self._busy_until = max(self._busy_until, until)
