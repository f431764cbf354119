"""Writes answers as OpenAI's clients read them, and the fields beside them.

`logprobs`, OpenAI's own field, is of the model's distribution, as are its
likeliest tokens; `sampled_logprobs` is of the distribution sampled from. They
differ where temperature, top-k or top-p do something. See `api_request` for the
other fields; in a stream those of the tokens come with each token, and
`prompt_token_ids`, `prompt_routes` and `seed` with the last piece.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from composer_jax.serving.api_request import BadRequestError, Call
from composer_jax.serving.arrays import pack
from composer_jax.serving.chat import ReplyReader, ToolCall
from composer_jax.serving.pieces import Piece
from composer_jax.serving.types import Completion

Json = dict[str, Any]


class Answer:
  """Writes the objects that answer one call.

  Attributes:
    call_id: names it.
  """

  def __init__(
    self,
    call: Call,
    prompts: Sequence[Sequence[int]],
    spellings: Sequence[bytes],
    readers: Sequence[ReplyReader] = (),
  ):
    """Starts an answer.

    Args:
      call: what is answered.
      prompts: token ids of each choice's prompt.
      spellings: the bytes of each token id.
      readers: of each choice's reply; none unless it is a chat.

    Raises:
      BadRequestError: routes are asked for from beyond a prompt.
    """
    shortest = min(map(len, prompts))
    if call.prompt_routes_from and call.prompt_routes_from >= shortest:
      raise BadRequestError(
        f"prompt_routes_from={call.prompt_routes_from} is beyond a prompt of"
        f" {shortest} tokens.",
        "prompt_routes_from",
      )
    self.call_id = (
      f"{'chatcmpl' if readers else 'cmpl'}-{secrets.token_hex(12)}"
    )
    self._call = call
    self._prompts = prompts
    self._spellings = spellings
    self._readers = readers
    self._created = int(time.time())
    self._num_calls = [0] * len(prompts)
    self._begun = [False] * len(prompts)

  def response(self, done: Sequence[Piece]) -> Json:
    """The whole answer, from one piece a choice."""
    choices = [self._choice(piece, stream=False) for piece in done]
    ends = [piece.end for piece in done if piece.end]
    answer = self._object(choices, stream=False)
    answer["usage"] = self._usage(ends)
    answer["system_fingerprint"] = fingerprint(_last_version(ends))
    return answer

  def chunk(self, piece: Piece) -> Json | None:
    """A piece of a streamed answer; None if there is nothing to tell yet."""
    choice = self._choice(piece, stream=True)
    extension = self._call.returns or self._call.logprobs is not None
    if not (
      choice.get("text") or choice.get("delta") or piece.end or extension
    ):
      return None
    return self._object([choice], stream=True)

  def usage_chunk(self, ends: Sequence[Completion]) -> Json:
    """The last object of a stream that was asked for its usage."""
    return self._object([], stream=True) | {"usage": self._usage(ends)}

  def _object(self, choices: list[Json], *, stream: bool) -> Json:
    kind = "text_completion"
    if self._readers:
      kind = "chat.completion.chunk" if stream else "chat.completion"
    return {
      "id": self.call_id,
      "object": kind,
      "created": self._created,
      "model": self._call.model,
      "choices": choices,
    }

  def _choice(self, piece: Piece, *, stream: bool) -> Json:
    choice: Json = {"index": piece.choice}
    reason = piece.end.finish_reason if piece.end else None
    if self._readers:
      name = "delta" if stream else "message"
      choice[name] = self._message(piece, stream=stream)
      if self._num_calls[piece.choice] and reason == "stop":
        reason = "tool_calls"
    else:
      choice["text"] = piece.text
    choice["logprobs"] = self._logprobs(piece)
    choice["finish_reason"] = reason
    return choice | self._extension(piece)

  def _message(self, piece: Piece, *, stream: bool) -> Json:
    reader = self._readers[piece.choice]
    parts = reader.push(piece.text) + (reader.finish() if piece.end else [])
    text = "".join(part for part in parts if isinstance(part, str))
    calls = []
    for part in parts:
      if isinstance(part, ToolCall):
        number = self._num_calls[piece.choice]
        self._num_calls[piece.choice] += 1
        index = {"index": number} if stream else {}
        calls.append(index | _tool_call(part))
    message: Json = {}
    if not self._begun[piece.choice]:
      self._begun[piece.choice] = True
      message["role"] = "assistant"
    if not stream:
      message["content"] = text if text or not calls else None
    elif text:
      message["content"] = text
    if calls:
      message["tool_calls"] = calls
    return message

  def _logprobs(self, piece: Piece) -> Json | None:
    if self._call.logprobs is None:
      return None
    tokens, asked = piece.tokens, self._call.logprobs
    rows = zip(tokens.token_ids, tokens.model_logprobs, tokens.top, strict=True)
    if self._readers:
      content = [
        self._chat_token(token, logprob)
        | {"top_logprobs": [self._chat_token(*t) for t in top[:asked]]}
        for token, logprob, top in rows
      ]
      return {"content": content, "refusal": None}
    return {
      "tokens": [self._spell(token) for token in tokens.token_ids],
      "token_logprobs": tokens.model_logprobs,
      "top_logprobs": [
        {self._spell(t): logprob for t, logprob in top[:asked]}
        for top in tokens.top
      ]
      if asked
      else None,
      "text_offset": piece.offsets,
    }

  def _chat_token(self, token: int, logprob: float) -> Json:
    spelling = self._bytes(token)
    text = spelling.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(spelling)}

  def _spell(self, token: int) -> str:
    """A token as text; as its bytes, where it ends within a character."""
    spelling = self._bytes(token)
    try:
      return spelling.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

  def _bytes(self, token: int) -> bytes:
    return self._spellings[token] if token < len(self._spellings) else b""

  def _extension(self, piece: Piece) -> Json:
    wanted, tokens, end = self._call.returns, piece.tokens, piece.end
    fields: Json = {}
    if "return_token_ids" in wanted:
      fields["token_ids"] = tokens.token_ids
      fields["sampled_logprobs"] = tokens.logprobs
      if end:
        fields["prompt_token_ids"] = list(self._prompts[piece.choice])
        fields["seed"] = end.sampling.seed
    if "return_versions" in wanted:
      fields["versions"] = tokens.versions
      fields["stale_cache"] = tokens.stale_cache
    if "return_routes" in wanted:
      fields["routes"] = pack(tokens.routes)
    if "return_prompt_routes" in wanted and end:
      routes = end.prompt_routes
      if routes is not None:
        routes = pack(routes[self._call.prompt_routes_from :])
      fields["prompt_routes"] = routes
    return fields

  def _usage(self, ends: Sequence[Completion]) -> Json:
    # Each prompt counts once, whatever number of completions it has.
    prompt = sum(len(p) for p in self._prompts[:: self._call.n])
    cached = sum(end.cached_tokens for end in ends[:: self._call.n])
    completion = sum(len(end.token_ids) for end in ends)
    return {
      "prompt_tokens": prompt,
      "completion_tokens": completion,
      "total_tokens": prompt + completion,
      "prompt_tokens_details": {"cached_tokens": cached},
    }


def fingerprint(version: int | None) -> str | None:
  """Names a weight version where OpenAI names its backend."""
  return None if version is None else f"weights-{version}"


def error_object(
  message: str, kind: str, param: str | None = None, code: str | None = None
) -> Json:
  """An error as OpenAI has it."""
  error = {"message": message, "type": kind, "param": param, "code": code}
  return {"error": error}


def model_object(name: str, max_len: int, created: int) -> Json:
  """An entry of `/v1/models`."""
  return {
    "id": name,
    "object": "model",
    "created": created,
    "owned_by": "composer-jax",
    "max_model_len": max_len,
  }


def _tool_call(call: ToolCall) -> Json:
  function = {"name": call.name, "arguments": call.arguments}
  return {
    "id": f"call_{secrets.token_hex(12)}",
    "type": "function",
    "function": function,
  }


def _last_version(ends: Sequence[Completion]) -> int | None:
  return max((int(v) for end in ends for v in end.versions[-1:]), default=None)
