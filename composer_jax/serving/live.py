"""The engine's own record of one request: its tokens, pages and past."""

import dataclasses
import time
from typing import Any

import numpy as np

from composer_jax.serving.cache import page_key
from composer_jax.serving.types import (
  Completion,
  FinishReason,
  Request,
  SamplingParams,
  Token,
)


class Live:
  """A request that waits or runs.

  Two counts move ahead of what the host has seen, since the device is one step
  ahead of it: `computed` and `drawn` count what was dispatched.

  Attributes:
    request: as it came.
    request_id: its name.
    sampling: as asked for, with a seed.
    order: of arrival; a smaller number goes first.
    tokens: the prompt and what was sampled, as far as the host has seen it.
    prompt_len: of them, the prompt.
    drawn: tokens sampled, on the device at least.
    computed: leading tokens that are in the cache, or on their way.
    slot: its row in decode steps; None while it waits.
    pages: of the cache, in order.
    keys: of its whole pages.
    registered: leading pages that can be found by others, or need not be.
    cache_root: the root of its keys.
    cache_versions: weights that computed what it reads from the cache.
    started: whether it ever was admitted.
    finished: whether its completion is out.
    cached_tokens: prompt tokens found in the cache at the first admission.
    prompt_routes: see `Completion`.
  """

  def __init__(
    self,
    request: Request,
    request_id: str,
    sampling: SamplingParams,
    order: int,
  ):
    self.request = request
    self.request_id = request_id
    self.sampling = sampling
    self.order = order
    self.tokens = [int(t) for t in request.prompt]
    self.prompt_len = len(self.tokens)
    self.drawn = 0
    self.computed = 0
    self.slot: int | None = None
    self.pages: list[int] = []
    self.keys: list[bytes] = []
    self.registered = 0
    self.cache_root = b""
    self.cache_versions: set[int] = set()
    self.started = False
    self.finished = False
    self.cached_tokens = 0
    self.prompt_routes: Any = None
    self._records: list[Token] = []
    self._added = time.perf_counter()
    self._admitted = self._first = float("nan")

  @property
  def pending(self) -> int:
    """Tokens to process before the next can be sampled; 0 if none is to be."""
    if self.drawn == self.sampling.max_tokens:
      return 0
    return self.prompt_len + self.drawn - self.computed

  def extend_keys(self, root: bytes, page_size: int) -> None:
    """Makes the keys of all pages whose tokens are known."""
    if self.cache_root != root:
      self.cache_root, self.keys = root, []
    for page in range(len(self.keys), len(self.tokens) // page_size):
      parent = self.keys[-1] if self.keys else root
      start = page * page_size
      tokens = np.array(self.tokens[start : start + page_size], np.int32)
      self.keys.append(page_key(parent, tokens))

  def admit(self, slot: int, pages: list[int], cached: int) -> None:
    """Gives it a row, and pages of which the first hold `cached` tokens."""
    self.slot, self.pages, self.computed = slot, pages, cached
    if not self.started:
      self.started, self.cached_tokens = True, min(cached, self.prompt_len)
      self._admitted = time.perf_counter()

  def advance(self, length: int, samples: bool, version: int) -> None:
    """Counts its next tokens as computed by a version, and one as sampled."""
    self.computed += length
    self.drawn += samples
    self.cache_versions.add(version)

  def retire(self) -> list[int]:
    """Takes its row and cache away; returns the pages to be released."""
    pages, self.pages = self.pages, []
    self.slot, self.computed, self.registered = None, 0, 0
    self.cache_versions = set()
    return pages

  def append(self, token: Token) -> FinishReason | None:
    """Adds a sampled token; returns why the request ends, if it does."""
    if not self._records:
      self._first = time.perf_counter()
    self._records.append(token)
    self.tokens.append(token.token_id)
    for stop in self.sampling.stop:
      # Not across the end of the prompt.
      sampled = len(self._records) >= len(stop)
      if sampled and self.tokens[-len(stop) :] == list(stop):
        return "stop"
    done = len(self._records) == self.sampling.max_tokens
    return "length" if done else None

  @property
  def num_sampled(self) -> int:
    """Sampled tokens that the host has seen."""
    return len(self._records)

  def completion(
    self,
    reason: FinishReason,
    error: str,
    route_shape: tuple[int, int],
    route_dtype: np.dtype,
  ) -> Completion:
    """All that is known of it, as its last event."""
    records, now = self._records, time.perf_counter()

    def column(name, dtype):
      return np.array([getattr(r, name) for r in records], dtype)

    routes = [r.routes for r in records]
    empty = np.zeros((0, *route_shape), route_dtype)
    return Completion(
      request_id=self.request_id,
      prompt_len=self.prompt_len,
      token_ids=column("token_id", np.int32),
      logprobs=column("logprob", np.float32),
      model_logprobs=column("model_logprob", np.float32),
      versions=column("version", np.int64),
      stale_cache=column("stale_cache", bool),
      routes=np.stack(routes) if routes else empty,
      prompt_routes=self.prompt_routes,
      finish_reason=reason,
      sampling=self.sampling,
      cached_tokens=self.cached_tokens,
      top=tuple(r.top for r in records if r.top),
      error=error,
      wait_s=self._admitted - self._added,
      first_token_s=self._first - self._added,
      total_s=now - self._added,
    )


def with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
  """The same, with this seed if it has none."""
  if sampling.seed is not None:
    return sampling
  return dataclasses.replace(sampling, seed=seed)
