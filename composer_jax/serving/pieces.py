"""An engine's events as pieces of text, each with its tokens.

A streamed completion is many pieces, one a token, and a last one that says how
it ended; one that isn't streamed is a single piece.
"""

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
from jaxtyping import UInt

from composer_jax.serving.front import AsyncEngine
from composer_jax.serving.text import TextReader
from composer_jax.serving.types import Completion, EngineError, Request, Token


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Sampled tokens of one completion, N of them; as in `Completion`."""

  token_ids: list[int]
  logprobs: list[float]
  model_logprobs: list[float]
  versions: list[int]
  stale_cache: list[bool]
  routes: UInt[np.ndarray, "N L K"]
  top: list[tuple[tuple[int, float], ...]]

  @classmethod
  def of_token(cls, token: Token) -> "Tokens":
    """A token of a stream."""
    return cls(
      [token.token_id],
      [token.logprob],
      [token.model_logprob],
      [token.version],
      [token.stale_cache],
      token.routes[None],
      [token.top],
    )

  @classmethod
  def of_completion(cls, completion: Completion, start: int = 0) -> "Tokens":
    """All tokens of a completion from the one at `start` on."""
    return cls(
      completion.token_ids[start:].tolist(),
      completion.logprobs[start:].tolist(),
      completion.model_logprobs[start:].tolist(),
      completion.versions[start:].tolist(),
      completion.stale_cache[start:].tolist(),
      completion.routes[start:],
      list(completion.top[start:])
      or [()] * (len(completion.token_ids) - start),
    )


@dataclasses.dataclass(frozen=True)
class Piece:
  """What has become known of a completion.

  Attributes:
    choice: which completion of its call.
    tokens: new ones.
    text: that has become certain.
    offsets: of each new token, the characters before it in the whole text.
    end: the completion, in its last piece.
  """

  choice: int
  tokens: Tokens
  text: str
  offsets: list[int]
  end: Completion | None = None


async def pieces(
  front: AsyncEngine, request: Request, reader: TextReader, choice: int
) -> AsyncIterator[Piece]:
  """Runs a request; leaving the loop early cancels it.

  When the reader meets a stop string, the request is cancelled in the engine;
  tokens that it sampled meanwhile are dropped, and the completion ends with the
  token that completed the string.

  Args:
    front: that runs it.
    request: with an id. If it streams there is a piece for each token,
      otherwise only the last one.
    reader: of its text.
    choice: number of the completion.

  Raises:
    EngineError: as `AsyncEngine.generate`; or the completion is an error.
  """
  num_kept = 0
  async with contextlib.aclosing(front.generate(request)) as events:
    async for event in events:
      if isinstance(event, Completion):
        break
      if reader.stopped:
        continue
      offset = reader.offset
      text = reader.push(event.token_id)
      num_kept += 1
      if reader.stopped:
        front.engine.cancel(request.request_id)
      yield Piece(choice, Tokens.of_token(event), text, [offset])
  if event.finish_reason == "error":
    raise EngineError(event.error)
  text, offsets, shown = [], [], num_kept
  for token_id in event.token_ids[shown:].tolist():
    if reader.stopped:
      break
    offsets.append(reader.offset)
    text.append(reader.push(token_id))
    num_kept += 1
  text.append(reader.finish())
  end = _cut(event, num_kept) if reader.stopped else event
  tokens = Tokens.of_completion(end, shown)
  yield Piece(choice, tokens, "".join(text), offsets, end)


async def whole(
  front: AsyncEngine, request: Request, reader: TextReader, choice: int
) -> Piece:
  """The same in a single piece."""
  text, offsets, end = [], [], None
  async with contextlib.aclosing(
    pieces(front, request, reader, choice)
  ) as parts:
    async for piece in parts:
      text.append(piece.text)
      offsets += piece.offsets
      end = piece.end
  assert end is not None
  tokens = Tokens.of_completion(end)
  return Piece(choice, tokens, "".join(text), offsets, end)


def _cut(completion: Completion, length: int) -> Completion:
  """Its first tokens, ended by a stop string."""
  return dataclasses.replace(
    completion,
    token_ids=completion.token_ids[:length],
    logprobs=completion.logprobs[:length],
    model_logprobs=completion.model_logprobs[:length],
    versions=completion.versions[:length],
    stale_cache=completion.stale_cache[:length],
    routes=completion.routes[:length],
    top=completion.top[:length],
    finish_reason="stop",
  )
