"""One engine that can be asked for tokens: in this process, or over HTTP.

Token ids go in and come out. An answer is whole or an error, and `checked`
before anybody uses it; asking again, and where, is `sessions`' business.
"""

import dataclasses
import email.utils
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, UInt

from composer_jax.rl.trajectory import Sampling
from composer_jax.serving import (
  AsyncEngine,
  EngineError,
  OverloadedError,
  Request,
  RequestError,
  SamplingParams,
)
from composer_jax.serving.arrays import unpack
from composer_jax.serving.pieces import whole
from composer_jax.serving.text import TextReader

# A full queue in this process is asked again after this long.
_LOCAL_RETRY_S = 0.05
# What a server that names no time is given.
_HTTP_RETRY_S = 1.0
# For a connection, so that a host that is gone is noticed.
_CONNECT_S = 10.0


class ServerError(Exception):
  """An engine failed to answer; the same request may succeed elsewhere."""


class BusyError(ServerError):
  """An engine has too much to do.

  Attributes:
    retry_s: how long it wants to be left alone.
  """

  def __init__(self, message: str, retry_s: float):
    super().__init__(message)
    self.retry_s = retry_s


@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
  """An engine's answer to a prompt of P tokens: C tokens.

  Attributes:
    token_ids: sampled, the stop token included.
    logprobs: of each, in the distribution sampled from.
    versions: of the weights that sampled each.
    routes: experts of the passes over positions `route_start` to P + C - 2.
    route_start: the first position whose pass is in `routes`.
    finish_reason: "stop" or "length".
  """

  token_ids: Int[np.ndarray, " C"]
  logprobs: Float[np.ndarray, " C"]
  versions: Int[np.ndarray, " C"]
  routes: UInt[np.ndarray, "R L K"]
  route_start: int
  finish_reason: str


@runtime_checkable
class Stops(Protocol):
  """What ends a reply; a `composer_jax.serving.chat.ChatFormat` is one.

  Attributes:
    stop: strings that do.
    stop_ids: tokens that do.
  """

  stop: tuple[str, ...]
  stop_ids: tuple[int, ...]


@runtime_checkable
class Endpoint(Protocol):
  """An engine.

  Attributes:
    name: for messages.
  """

  name: str

  async def sample(
    self,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    routes_from: int = 0,
  ) -> Sampled:
    """Continues a prompt; cancelling it cancels the request in the engine.

    Args:
      prompt: token ids.
      max_tokens: to sample at most.
      sampling: the distribution.
      seed: of the draws.
      routes_from: the first position of the prompt whose route is wanted.

    Raises:
      ServerError: it could not; nothing of the answer is left.
      BusyError: it is to be asked later.
      RequestError: no engine could, ever: the request is wrong.
    """


class LocalEndpoint:
  """An engine of this process."""

  def __init__(
    self,
    front: AsyncEngine,
    chat: Stops,
    spellings: Sequence[bytes],
    name: str = "the engine",
  ):
    """Wraps an engine.

    Args:
      front: the engine.
      chat: what ends a reply.
      spellings: the bytes of each token, as `Tokenizer.spellings`.
      name: for messages.
    """
    self.name = name
    self._front = front
    self._chat = chat
    self._spellings = spellings

  async def sample(
    self,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    routes_from: int = 0,
  ) -> Sampled:
    """See `Endpoint`."""
    chat = self._chat
    request = Request(
      prompt=prompt,
      sampling=SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple((token,) for token in chat.stop_ids),
        **dataclasses.asdict(sampling),
      ),
      return_prompt_routes=True,
      stream=bool(chat.stop),
      request_id=f"rollout-{secrets.token_hex(8)}",
    )
    reader = TextReader(self._spellings, chat.stop, chat.stop_ids)
    try:
      piece = await whole(self._front, request, reader, 0)
    except OverloadedError as error:
      raise BusyError(str(error), _LOCAL_RETRY_S) from error
    except RequestError:
      raise
    except EngineError as error:
      raise ServerError(str(error)) from error
    end = piece.end
    assert end is not None
    prompt_routes = end.prompt_routes
    if prompt_routes is not None:
      prompt_routes = prompt_routes[routes_from:]
    return checked(
      prompt,
      max_tokens,
      routes_from,
      token_ids=end.token_ids,
      logprobs=end.logprobs,
      versions=end.versions,
      prompt_routes=prompt_routes,
      routes=end.routes,
      finish_reason=end.finish_reason,
    )


class HttpEndpoint:
  """A server of `composer_jax.serving.server`, asked for `/v1/completions`."""

  def __init__(self, client: Any, url: str, model: str, chat: Stops):
    """Names a server.

    Args:
      client: an `aiohttp.ClientSession`, of which one serves for all servers.
        Its limit of 100 connections counts, too: `TCPConnector(limit=0)`.
      url: of the server, as `http://host:port`.
      model: its name there.
      chat: what ends a reply.
    """
    self.name = url
    self._client = client
    self._url = f"{url.rstrip('/')}/v1/completions"
    self._fixed = {
      "model": model,
      "stop": list(chat.stop),
      "stop_token_ids": list(chat.stop_ids),
      "ignore_eos": True,  # `stop_ids` has it, if it is to count.
      "return_token_ids": True,
      "return_versions": True,
      "return_routes": True,
      "return_prompt_routes": True,
    }

  async def sample(
    self,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    routes_from: int = 0,
  ) -> Sampled:
    """See `Endpoint`."""
    import aiohttp  # Of the extra `serve`; whoever has a client has it.

    body = {
      **self._fixed,
      **dataclasses.asdict(sampling),
      "prompt_token_ids": list(prompt),
      "max_tokens": max_tokens,
      "seed": seed,
      "prompt_routes_from": routes_from,
    }
    # How long an answer may take is the asker's to say.
    timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
    try:
      async with self._client.post(
        self._url, json=body, timeout=timeout
      ) as response:
        status, headers = response.status, response.headers
        answer = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError) as error:
      raise ServerError(f"{type(error).__name__}: {error}") from error
    except ValueError as error:
      answer, problem = None, f"its answer isn't JSON: {error}"
    else:
      problem = f"its answer is {str(answer)[:300]}"
    if status == 429:
      raise BusyError("429, too many requests", _retry_s(headers))
    if status >= 500 or status == 408:
      raise ServerError(f"{status}, {problem}")
    if status != 200:
      raise RequestError(f"{self.name} refused a request: {status}, {problem}")
    try:
      (choice,) = answer["choices"]
      if choice["prompt_token_ids"] != body["prompt_token_ids"]:
        raise ValueError("another prompt was answered")
      prompt_routes = choice["prompt_routes"]
      return checked(
        prompt,
        max_tokens,
        routes_from,
        token_ids=choice["token_ids"],
        logprobs=choice["sampled_logprobs"],
        versions=choice["versions"],
        prompt_routes=None if prompt_routes is None else unpack(prompt_routes),
        routes=unpack(choice["routes"]),
        finish_reason=choice["finish_reason"],
      )
    except (KeyError, TypeError, ValueError) as error:
      raise ServerError(f"its answer is damaged: {error!r}") from error


def checked(
  prompt: Sequence[int],
  max_tokens: int,
  routes_from: int = 0,
  *,
  token_ids: Any,
  logprobs: Any,
  versions: Any,
  prompt_routes: UInt[np.ndarray, "..."] | None,
  routes: UInt[np.ndarray, "..."],
  finish_reason: str | None,
) -> Sampled:
  """An answer, if it is a whole one to a request.

  Raises:
    ServerError: it isn't.
  """
  try:
    token_ids = np.asarray(token_ids, np.int32)
    logprobs = np.asarray(logprobs, np.float32)
    versions = np.asarray(versions, np.int32)
    if prompt_routes is not None:
      routes = np.concatenate([prompt_routes, routes])
  except (TypeError, ValueError, OverflowError) as error:
    raise ServerError(f"its answer is damaged: {error}") from error
  count = token_ids.size
  passes = len(prompt) - 1 + count - routes_from
  for valid, problem in (
    (finish_reason in ("stop", "length"), f"ended by {finish_reason!r}"),
    (1 <= count <= max_tokens, f"has {count} tokens of {max_tokens}"),
    (
      token_ids.shape == logprobs.shape == versions.shape == (count,),
      f"has {count} tokens, {logprobs.size} log-probabilities and"
      f" {versions.size} versions",
    ),
    (
      routes.ndim == 3 and routes.dtype.kind == "u" and len(routes) == passes,
      f"has routes {routes.dtype}{list(routes.shape)} of {passes} passes",
    ),
    (
      (token_ids >= 0).all() and (versions >= 0).all(),
      "has tokens or versions below 0",
    ),
    (np.isfinite(logprobs).all(), "has log-probabilities that aren't finite"),
  ):
    if not valid:
      raise ServerError(f"its answer {problem}")
  return Sampled(
    token_ids, logprobs, versions, routes, routes_from, str(finish_reason)
  )


def _retry_s(headers: Mapping[str, str]) -> float:
  """Seconds that a `Retry-After` asks for: a number of them, or a date."""
  text = headers.get("Retry-After", "")
  try:
    return max(0.0, float(text))
  except ValueError:
    pass
  try:
    date = email.utils.parsedate_to_datetime(text)
  except ValueError:
    return _HTTP_RETRY_S
  return max(0.0, date.timestamp() - time.time())
