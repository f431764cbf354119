"""Agents that need no model: one that knows the answer, one that does nothing.

They go through the harness as any policy does, and show that tasks, tools and
hidden tests hold together: the first must score 1, the second 0.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from composer_jax.envs.harness import Sampler
from composer_jax.envs.tasks.types import Task

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Bytes:
  """A `Dialect` whose tokens are bytes."""

  def begin(
    self, system: str, prompt: str, tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """See `Dialect`."""
    return list(f"{system}\n{json.dumps(list(tools))}\n{prompt}\n".encode())

  def extend(self, reply: Sequence[int], results: Sequence[str]) -> list[int]:
    """See `Dialect`."""
    return list("\n".join(["", *results, ""]).encode())

  def parse(self, reply: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """See `Dialect`."""
    text = bytes(reply).decode()
    calls = []
    for body in _CALL.findall(text):
      call = json.loads(body)
      calls.append((call["name"], json.dumps(call["arguments"])))
    return _CALL.sub("", text), calls


@dataclasses.dataclass(frozen=True)
class Said:
  """A reply that no model gave."""

  token_ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray


def says(replies: Iterable[str]) -> Sampler:
  """A policy in `Bytes` that gives these replies."""
  left = iter(replies)

  async def sample(prompt, max_tokens):
    ids = np.frombuffer(next(left).encode(), np.uint8).astype(np.int32)
    if len(ids) > max_tokens:
      raise ValueError(f"A reply has {len(ids)} tokens of {max_tokens}.")
    return Said(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), int))

  return sample


def gold(task: Task) -> Sampler:
  """Looks around, writes the gold state, runs the tests and finishes."""
  replies = [_call("list_files")]
  replies += [
    _call("write_file", path=path, content=text)
    for path, text in task.gold.items()
  ]
  if task.test_command:
    replies.append(_call("run_tests"))
  return says([*replies, _call("finish", message="Done.")])


def idle(task: Task) -> Sampler:
  """Finishes at once."""
  return says([_call("finish", message="I changed nothing.")])


def _call(name: str, **arguments: str) -> str:
  body = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{body}\n</tool_call>"
