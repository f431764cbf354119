"""The server's chat format as an environment's harness speaks it."""

from collections.abc import Sequence
from typing import Any

from composer_jax.serving.chat import ChatFormat, Message, ToolCall
from composer_jax.serving.text import TextReader


class ChatDialect:
  """A `composer_jax.envs.harness.Dialect` made of a `ChatFormat`.

  So a policy sees in training what a client of the server makes it see.
  """

  def __init__(self, chat: ChatFormat, spellings: Sequence[bytes]):
    """Takes a format, and the bytes of each token (`Tokenizer.spellings`)."""
    self._chat = chat
    self._spellings = spellings

  def begin(
    self, system: str, prompt: str, tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """Token ids up to where the first reply begins."""
    messages = [Message("system", system), Message("user", prompt)]
    return self._chat.prompt(messages, tools)

  def extend(self, reply: Sequence[int], results: Sequence[str]) -> list[int]:
    """Token ids from a sampled reply's end to where the next one begins."""
    return self._chat.extend(reply, [Message("tool", r) for r in results])

  def parse(self, reply: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """A reply's text, and its calls: names, and arguments as JSON."""
    text = TextReader(self._spellings, self._chat.stop, self._chat.stop_ids)
    reader = self._chat.reader()
    parts = []
    for token in reply:
      parts += reader.push(text.push(token))
    parts += [*reader.push(text.finish()), *reader.finish()]
    said = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return said, [(call.name, call.arguments) for call in calls]
