"""What goes into the engine, what comes out of it, and how it says no."""

import dataclasses
import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

FinishReason = Literal["stop", "length", "cancelled", "error"]


class EngineError(Exception):
  """Anything that the engine refuses or fails to do; one clear sentence."""


class RequestError(EngineError, ValueError):
  """The request can never be served as it is: its sender must change it."""


class OverloadedError(EngineError):
  """The waiting queue is full: the same request may succeed later."""


class WeightError(EngineError, ValueError):
  """New weights don't fit; the old version goes on serving."""


class StoppedError(EngineError):
  """The engine was closed, or its step failed; nothing more will come."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How tokens are drawn.

  Logits are divided by the temperature; of the result the `top_k` highest are
  kept, and of their renormalised distribution the fewest whose probabilities
  reach `top_p`. Tokens that tie with the last one kept are kept too.

  Attributes:
    max_tokens: to sample at most.
    temperature: 0 takes the likeliest token (the lowest id, where tied);
      otherwise from 0.001 to 1000.
    top_p: in (0, 1]; 1 keeps all.
    top_k: 0 keeps all.
    seed: in [0, 2**32). The token at position p is drawn with
      `fold_in(key(seed), p)`, so the same seed gives the same token whatever
      else is in the batch. None: the engine picks one, and reports it.
    stop: sequences of token ids; a completion ends with the first that its
      sampled tokens end with, which stays in it. Stop *strings* are the layer
      above's business: it detokenises, and cancels.
    top_logprobs: how many of the likeliest tokens to report with each token, by
      the model's own distribution; at most `EngineConfig.max_top_logprobs`.
  """

  max_tokens: int = 256
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  seed: int | None = None
  stop: tuple[tuple[int, ...], ...] = ()
  top_logprobs: int = 0

  def __post_init__(self):
    for name in ("max_tokens", "top_k", "seed", "top_logprobs"):
      value = getattr(self, name)
      if not isinstance(value, Integral) and (name, value) != ("seed", None):
        raise RequestError(f"{name}={value!r} must be an integer.")
    for name, valid, rule in (
      ("max_tokens", self.max_tokens >= 1, "at least 1"),
      (
        "temperature",
        self.temperature == 0 or 1e-3 <= self.temperature <= 1e3,
        "0, or from 0.001 to 1000",
      ),
      ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
      ("top_k", 0 <= self.top_k < 2**31, "0 (all) or more"),
      ("seed", self.seed is None or 0 <= self.seed < 2**32, "in [0, 2**32)"),
      ("stop", all(self.stop), "sequences of at least one token id"),
      ("top_logprobs", self.top_logprobs >= 0, "0 or more"),
    ):
      if not valid:
        raise RequestError(f"{name}={getattr(self, name)!r} must be {rule}.")


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue.

  Attributes:
    prompt: token ids, at least one.
    sampling: how.
    return_prompt_routes: whether the completion holds the prompt's routes.
    stream: whether each token is an event of its own, before the completion.
    request_id: unique among live requests; empty: the engine makes one.
  """

  prompt: Sequence[int] | Int[np.ndarray, " P"]
  sampling: SamplingParams = SamplingParams()
  return_prompt_routes: bool = False
  stream: bool = False
  request_id: str = ""


@dataclasses.dataclass(frozen=True)
class Token:
  """One sampled token of a streaming request.

  Attributes:
    request_id: whose.
    index: of the token in its completion.
    token_id: the token.
    logprob: in the distribution sampled from (after temperature, top-k and
      top-p), in nats; 0 where the temperature is 0.
    model_logprob: in the model's own distribution.
    version: of the weights whose pass it was sampled from.
    stale_cache: whether that pass read keys or values of other weights.
    routes: experts of that pass, by MoE layer; see `Completion.routes`.
    top: the likeliest tokens and their `model_logprob`, best first.
  """

  request_id: str
  index: int
  token_id: int
  logprob: float
  model_logprob: float
  version: int
  stale_cache: bool
  routes: UInt[np.ndarray, "L K"]
  top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
  """All of a finished request; its last event.

  C tokens were sampled after a prompt of P. The pass over the token at position
  i gives the logits of position i + 1, so C tokens come from the passes over
  positions P - 1 to P + C - 2, and the last token has no pass.
  `concatenate([prompt_routes, routes])` is row by row what a learner's pass
  over the P + C - 1 first tokens must replay.

  Attributes:
    request_id: whose.
    prompt_len: P.
    token_ids: the sampled tokens, stop sequence included.
    logprobs: in the distribution sampled from, in nats; 0 at temperature 0.
    model_logprobs: in the model's own distribution.
    versions: of the weights that each token was sampled with.
    stale_cache: True for a token whose pass read keys or values that other
      weights had computed.
    routes: experts of the pass that each token was sampled from, in the
      smallest unsigned dtype that holds them; `[C, 0, 0]` if no layer is MoE.
      Recorded once, when the token is sampled: recomputing a preempted
      request's cache doesn't touch them.
    prompt_routes: experts of the passes over prompt positions 0 to P - 2; None
      unless asked for, or where the request ended before its first token.
    finish_reason: "stop" (a stop sequence), "length" (`max_tokens`),
      "cancelled", or "error".
    sampling: as asked for, with the seed that was used.
    cached_tokens: prompt tokens whose keys and values came from the cache.
    top: of each token, the likeliest ones and their `model_logprob`, best
      first; empty unless asked for.
    error: what went wrong, where the reason is "error".
    wait_s: from `add` to the first admission; NaN if it never was admitted.
    first_token_s: from `add` to the first token; NaN without one.
    total_s: from `add` to this event.
  """

  request_id: str
  prompt_len: int
  token_ids: Int[np.ndarray, " C"]
  logprobs: Float[np.ndarray, " C"]
  model_logprobs: Float[np.ndarray, " C"]
  versions: Int[np.ndarray, " C"]
  stale_cache: Bool[np.ndarray, " C"]
  routes: UInt[np.ndarray, "C L K"]
  prompt_routes: UInt[np.ndarray, "_ L K"] | None
  finish_reason: FinishReason
  sampling: SamplingParams
  cached_tokens: int
  top: tuple[tuple[tuple[int, float], ...], ...] = ()
  error: str = ""
  wait_s: float = float("nan")
  first_token_s: float = float("nan")
  total_s: float = float("nan")


Event = Token | Completion


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The engine's shape: everything that is compiled or allocated once.

  Attributes:
    max_rows: requests that decode together.
    max_len: of a prompt and its completion together, in tokens.
    page_size: tokens a page of the cache; whole pages are shared.
    cache_tokens: size of the cache; 0: `max_rows * max_len`. With less,
      requests may be preempted and their caches computed again.
    prefill_rows: prompts that are read together...
    prefill_chunk: ...in chunks of this many tokens, between two decode steps.
    contexts: context lengths to compile for, rising, the last `max_len`; empty:
      `max_len` and its quarters down to 128. A step runs at the shortest that
      its longest row fits in, and another context may change a row's last bits:
      with `(max_len,)` a row's bits don't depend on its neighbours' lengths.
    max_waiting: requests in the queue, beyond which `add` raises
      `OverloadedError`.
    prefix_sharing: whether requests share pages of equal prefixes.
    share_across_versions: whether a request may start from pages that other
      weights computed. Its tokens then have `stale_cache` set.
    max_top_logprobs: the most `SamplingParams.top_logprobs` may ask for.
  """

  max_rows: int = 16
  max_len: int = 1024
  page_size: int = 16
  cache_tokens: int = 0
  prefill_rows: int = 4
  prefill_chunk: int = 64
  contexts: tuple[int, ...] = ()
  max_waiting: int = 256
  prefix_sharing: bool = True
  share_across_versions: bool = False
  max_top_logprobs: int = 5

  def __post_init__(self):
    for name in ("max_rows", "max_len", "page_size", "prefill_rows"):
      _require(getattr(self, name) >= 1, f"{name} must be at least 1.")
    _require(self.prefill_chunk >= 2, "prefill_chunk must be at least 2.")
    _require(self.max_waiting >= 1, "max_waiting must be at least 1.")
    _require(self.max_top_logprobs >= 0, "max_top_logprobs must be 0 or more.")
    _require(
      not self.cache_tokens or self.num_pages >= self.row_pages,
      f"cache_tokens={self.cache_tokens} holds {self.num_pages} pages of"
      f" {self.page_size}, but one request of max_len={self.max_len} needs"
      f" {self.row_pages}: enlarge it, or lower max_len.",
    )
    contexts = (0, *self.contexts, self.max_len)
    _require(
      sorted({*contexts[:-1]}) == [*contexts[:-1]]
      and (not self.contexts or contexts[-2] == self.max_len),
      f"contexts={self.contexts} must rise from above 0 and end with"
      f" max_len={self.max_len}.",
    )

  @property
  def row_pages(self) -> int:
    """Pages of one request at its longest."""
    return -(-self.max_len // self.page_size)

  @property
  def num_pages(self) -> int:
    """Pages of the whole cache."""
    if self.cache_tokens:
      return self.cache_tokens // self.page_size
    return self.max_rows * self.row_pages

  @property
  def context_pages(self) -> tuple[int, ...]:
    """`contexts` in pages, each once."""
    contexts = list(self.contexts) or [self.max_len]
    while not self.contexts and contexts[0] // 4 >= 128:
      contexts.insert(0, contexts[0] // 4)
    return tuple(sorted({-(-c // self.page_size) for c in contexts}))


@dataclasses.dataclass(frozen=True)
class SwapReport:
  """A swap of weights that took place.

  Attributes:
    version: serving now.
    previous: served before.
    mode: "drain" or "in_flight".
    recomputed: running requests whose caches are computed again.
    pause_s: from the end of the last step on the old weights to the moment
      the next could start: the time that no step ran because of the swap.
    staged_s: from `set_weights` to the swap, draining included.
  """

  version: int
  previous: int
  mode: str
  recomputed: int
  pause_s: float
  staged_s: float


@dataclasses.dataclass(frozen=True)
class Stats:
  """Counts since the engine was made, and sizes now.

  Attributes:
    version: of the weights that serve.
    waiting: requests in the queue, preempted ones included.
    running: requests that have a row.
    pages_total: of the cache.
    pages_used: pages that a running request holds.
    pages_cached: pages that nobody holds, kept for a prefix to come.
    requests: accepted.
    rejected: refused because the queue was full.
    finished: ended, by reason.
    prompt_tokens: of admitted requests.
    cached_tokens: of them, found in the cache.
    sampled_tokens: handed out.
    preemptions: requests that lost their pages to an older one.
    evictions: cached pages given to other tokens.
    prefill_steps: device steps over prompts.
    decode_steps: device steps of one token a row.
    swaps: of weights.
    last_pause_s: pause of the last swap.
  """

  version: int
  waiting: int
  running: int
  pages_total: int
  pages_used: int
  pages_cached: int
  requests: int
  rejected: int
  finished: dict[str, int]
  prompt_tokens: int
  cached_tokens: int
  sampled_tokens: int
  preemptions: int
  evictions: int
  prefill_steps: int
  decode_steps: int
  swaps: int
  last_pause_s: float


def check_request(
  request: Request, config: EngineConfig, vocab_size: int
) -> None:
  """Raises RequestError if an engine can never serve a request."""
  sampling = request.sampling
  length, most = len(request.prompt), sampling.max_tokens
  if not length:
    raise RequestError("The prompt is empty: it needs at least one token.")
  if length + most > config.max_len:
    raise RequestError(
      f"A prompt of {length} tokens and max_tokens={most} don't fit in"
      f" max_len={config.max_len}: shorten one of them."
    )
  try:
    stops = (token for stop in sampling.stop for token in stop)
    tokens = [operator.index(token) for token in (*request.prompt, *stops)]
  except TypeError:
    raise RequestError(
      "A prompt is a sequence of token ids, integers; stop is one of such"
      " sequences."
    ) from None
  for token in tokens:
    if not 0 <= token < vocab_size:
      raise RequestError(
        f"Token id {token} isn't in the vocabulary of {vocab_size}."
      )
  if sampling.top_logprobs > config.max_top_logprobs:
    raise RequestError(
      f"top_logprobs={sampling.top_logprobs} is more than this engine's"
      f" max_top_logprobs={config.max_top_logprobs}."
    )


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)
