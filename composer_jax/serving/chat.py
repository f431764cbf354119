"""How a conversation is written for a model, and its replies are read.

A `ChatFormat` is the one place that knows: the server and an agent's harness
both go through it, so that a policy sees in training what it sees in use.
`HermesFormat` is the default. One that renders a Hugging Face `chat_template`
would be another class of the same two methods.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from composer_jax.data import Tokenizer
from composer_jax.serving.text import possible_start


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A function that the model wants called.

  Attributes:
    name: of the function.
    arguments: a JSON object, as text.
  """

  name: str
  arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation.

  Attributes:
    role: whose; "tool" is the result of a call.
    content: its text.
    tool_calls: an assistant's, after its text.
  """

  role: Literal["system", "user", "assistant", "tool"]
  content: str = ""
  tool_calls: tuple[ToolCall, ...] = ()


# What a reply is made of, in order.
Part = str | ToolCall


@runtime_checkable
class ReplyReader(Protocol):
  """Reads one reply as it grows."""

  def push(self, text: str) -> list[Part]:
    """Adds text; returns what has become certain."""

  def finish(self) -> list[Part]:
    """Ends the reply; returns what was held back."""


@runtime_checkable
class ChatFormat(Protocol):
  """Conversations as tokens.

  Attributes:
    stop_ids: tokens that end a reply.
    stop: strings that do, where the vocabulary has no such token.
  """

  stop_ids: tuple[int, ...]
  stop: tuple[str, ...]

  def prompt(
    self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """Token ids up to where the reply begins.

    Args:
      messages: the conversation; the last one is not the assistant's.
      tools: JSON schemas of functions, as in the API.
    """

  def extend(
    self, reply: Sequence[int], messages: Sequence[Message]
  ) -> list[int]:
    """Token ids that go on from a reply to where the next one begins.

    Args:
      reply: as sampled, with the token that ended it if one did; what is
        returned comes right after it.
      messages: what is said to it, the results of its calls for instance.
    """

  def reader(self) -> ReplyReader:
    """Reads a reply to one such prompt."""


_START, _END = "<|im_start|>", "<|im_end|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TOOLS = """\
You may call functions. These are their signatures, as JSON:
<tools>
{tools}
</tools>
To call one, write a JSON object in tags, as many times as there are calls:
<tool_call>
{{"name": "function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class HermesFormat:
  """ChatML turns, and tool calls as Hermes models write them.

      <|endoftext|><|im_start|>system
      (the system message, and the tools)<|im_end|>
      <|im_start|>user
      What is the weather in Oslo?<|im_end|>
      <|im_start|>assistant
      <tool_call>
      {"name": "weather", "arguments": {"city": "Oslo"}}
      </tool_call><|im_end|>
      <|im_start|>user
      <tool_response>
      rain
      </tool_response><|im_end|>
      <|im_start|>assistant

  The markers of turns are tokens of their own if the vocabulary has them; then
  no text can forge one. Otherwise they are spelled out, and a message that
  contains one ends its turn: good enough for a model that never saw either.

  A call that isn't a JSON object with a string `name` and an object
  `arguments`, or isn't closed, is left in the text as it was written.
  """

  def __init__(self, tokenizer: Tokenizer):
    """Takes the tokenizer of the model."""
    self._tokenizer = tokenizer
    end = tokenizer.token_id(_END)
    self._markers = {
      name: tokenizer.token_id(name)
      for name in (_START, _END)
      if tokenizer.token_id(name) is not None
    }
    ends = (tokenizer.end_id,) if end is None else (tokenizer.end_id, end)
    self.stop_ids = tuple(dict.fromkeys(ends))
    self.stop = (_END,) if end is None else ()

  def prompt(
    self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """See `ChatFormat`. Each turn is tokenised alone.

    A longer conversation's prompt so begins with a shorter one's.
    """
    turns = [(message.role, _body(message)) for message in messages]
    if tools:
      listed = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
      text = _TOOLS.format(tools=listed)
      if turns and turns[0][0] == "system":
        turns[0] = ("system", f"{turns[0][1]}\n\n{text}")
      else:
        turns.insert(0, ("system", text))
    pieces = []
    for role, body in turns:
      role = "user" if role == "tool" else role
      pieces += [_START, f"{role}\n{body}", _END, "\n"]
    pieces += [_START, "assistant\n"]
    return self._encode(pieces)

  def extend(
    self, reply: Sequence[int], messages: Sequence[Message]
  ) -> list[int]:
    """See `ChatFormat`."""
    end = self._encode([_END])[1:]
    ended = tuple(reply[-len(end) :]) == tuple(end)
    close = [] if ended else end
    return [*close, *self._encode(["\n"])[1:], *self.prompt(messages, ())[1:]]

  def reader(self) -> "HermesReader":
    """See `ChatFormat`."""
    return HermesReader()

  def _encode(self, pieces):
    # As in training, a document starts with the token that ends the last one.
    ids = [self._tokenizer.end_id]
    encoded = self._tokenizer.encode_batch(pieces)
    for piece, tokens in zip(pieces, encoded, strict=True):
      marker = self._markers.get(piece)
      ids += tokens.tolist() if marker is None else [marker]
    return ids


class HermesReader:
  """Parts text and tool calls; white space around calls is dropped."""

  def __init__(self):
    self._held = ""
    self._called = False

  def push(self, text: str) -> list[Part]:
    """See `ReplyReader`."""
    self._held += text
    parts: list[Part] = []
    while (end := self._held.find(_CLOSE)) >= 0:
      start = self._held.find(_OPEN)
      if not 0 <= start < end:  # A closing tag alone is text.
        parts += self._text(self._held[: end + len(_CLOSE)])
      else:
        whole = self._held[start : end + len(_CLOSE)]
        call = _parse_call(whole[len(_OPEN) : -len(_CLOSE)])
        if call:
          parts += self._text(self._held[:start].rstrip())
          parts.append(call)
          self._called = True
        else:
          parts += self._text(self._held[:start] + whole)
      self._held = self._held[end + len(_CLOSE) :]
    sure = self._sure()
    parts += self._text(self._held[:sure])
    self._held = self._held[sure:]
    return parts

  def finish(self) -> list[Part]:
    """See `ReplyReader`."""
    rest, self._held = self._held, ""
    return self._text(rest.rstrip() if self._called else rest)

  def _sure(self) -> int:
    """How much of what is held can't be part of a call, or before one."""
    start = self._held.find(_OPEN)
    if start < 0:
      start = len(self._held) - possible_start(self._held, (_OPEN, _CLOSE))
    return len(self._held[:start].rstrip())

  def _text(self, text: str) -> list[Part]:
    if self._called:
      # Line breaks between one call and the next, or before more text.
      text = text.lstrip()
      self._called = not text
    return [text] if text else []


def _body(message: Message) -> str:
  if message.role == "tool":
    return f"<tool_response>\n{message.content}\n</tool_response>"
  calls = []
  for call in message.tool_calls:
    name = json.dumps(call.name, ensure_ascii=False)
    text = f'{{"name": {name}, "arguments": {call.arguments}}}'
    calls.append(f"{_OPEN}\n{text}\n{_CLOSE}")
  return "\n".join([message.content] * bool(message.content) + calls)


def _parse_call(text: str) -> ToolCall | None:
  try:
    call = json.loads(text, parse_constant=_refuse)
  except (ValueError, RecursionError):
    return None
  if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
    return None
  name, arguments = call["name"], call["arguments"]
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _refuse(constant: str):
  raise ValueError(f"{constant} is not JSON")
