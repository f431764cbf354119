"""Lets a policy work on a task: the loop of replies and observations.

A transcript is token ids from the first to the last: the prompt, then what was
sampled, exactly as sampled, and what the harness answered. Nothing is ever
tokenised again, so the learner trains on what the sampler saw.

How conversations look in tokens is the `Dialect`'s to know (the server's own
chat format, see `composer_jax.serving.dialect`), how tokens are sampled the
`Sampler`'s; the harness knows no model.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from composer_jax.envs.sandbox import Sandbox
from composer_jax.envs.tools import Toolbox

SYSTEM = (
  "You are a programmer at work in a repository. Use the functions to look"
  " around, to change files and to run code. Call finish when the task is done."
)

StopReason = Literal["finish", "answer", "turns", "tokens", "time"]


class Sample(Protocol):
  """What the harness reads of a completion; the engine's has more.

  Attributes:
    token_ids: sampled, the stop token included.
    logprobs: of each, in the distribution sampled from.
    versions: of the weights that sampled each.
  """

  token_ids: Int[np.ndarray, " C"]
  logprobs: Float[np.ndarray, " C"]
  versions: Int[np.ndarray, " C"]


# Prompt and the most tokens to sample -> a completion (see `Sample`).
Sampler = Callable[[list[int], int], Awaitable[Any]]
# Is told what happens, as it happens: a reply's text; a call, its name and
# arguments; a result as the policy will read it.
Watch = Callable[[Literal["reply", "call", "result"], str], None]


@runtime_checkable
class Dialect(Protocol):
  """Conversations in tokens, as the server would have them."""

  def begin(
    self, system: str, prompt: str, tools: Sequence[dict[str, Any]]
  ) -> list[int]:
    """Token ids up to where the first reply begins."""

  def extend(self, reply: Sequence[int], results: Sequence[str]) -> list[int]:
    """Token ids from a sampled reply's end to where the next one begins."""

  def parse(self, reply: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """A reply's text, and its calls: names, and arguments as JSON."""


@dataclasses.dataclass(frozen=True)
class Budget:
  """What a rollout may use.

  Attributes:
    turns: replies.
    tokens: in the whole transcript.
    turn_tokens: in one reply.
    wall_s: in all; checked between replies.
    observation_chars: of one result; the middle of a longer one is left out.
  """

  turns: int = 50
  tokens: int = 32_768
  turn_tokens: int = 2_048
  wall_s: float = 900.0
  observation_chars: int = 8_000

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value <= 0:
        raise ValueError(f"{field.name}={value} must be above 0.")


@dataclasses.dataclass(frozen=True)
class Transcript:
  """All that was said, in N tokens.

  Attributes:
    token_ids: of prompt, replies and observations.
    loss_mask: True for exactly the sampled ones.
    logprobs: of the sampled tokens, in the distribution sampled from; 0
      elsewhere.
    versions: of the weights that sampled each; -1 elsewhere.
    samples: each reply's position and the sampler's own completion, with
      whatever else it carries (routes).
    stop_reason: "finish" (called), "answer" (a reply without a call), or the
      budget that was used up: "turns", "tokens", "time".
    turns: replies.
    calls: of tools.
    bad_calls: that could not be carried out, or not even read.
    final_text: of the last reply, or of its call of `finish`.
    wall_s: how long it took.
  """

  token_ids: Int[np.ndarray, " N"]
  loss_mask: Bool[np.ndarray, " N"]
  logprobs: Float[np.ndarray, " N"]
  versions: Int[np.ndarray, " N"]
  samples: tuple[tuple[int, Any], ...]
  stop_reason: StopReason
  turns: int
  calls: int
  bad_calls: int
  final_text: str
  wall_s: float


async def run(
  sampler: Sampler,
  dialect: Dialect,
  sandbox: Sandbox,
  toolbox: Toolbox,
  prompt: str,
  budget: Budget | None = None,
  watch: Watch = lambda kind, text: None,
) -> Transcript:
  """Lets a policy work on a task until it finishes or its budget is used up.

  Args:
    sampler: the policy.
    dialect: how it is spoken to.
    sandbox: where it works; as the policy left it, afterwards.
    toolbox: what it can call.
    prompt: the task.
    budget: what it may use.
    watch: shows it to somebody.

  Raises:
    SandboxError: the sandbox failed. That is not the policy's failure: run the
      task again.
    ValueError: the prompt alone is over the budget of tokens.
  """
  budget = budget or Budget()
  began = time.monotonic()
  ids = list(dialect.begin(SYSTEM, prompt, toolbox.schemas))
  if len(ids) >= budget.tokens:
    raise ValueError(
      f"The prompt has {len(ids)} tokens and the budget is {budget.tokens}:"
      " raise Budget.tokens (and the server's max_len), or leave the task out."
    )
  samples: list[tuple[int, Any]] = []
  calls = bad_calls = 0
  final_text = ""
  while True:
    if len(samples) == budget.turns:
      reason = "turns"
    elif len(ids) >= budget.tokens:
      reason = "tokens"
    elif time.monotonic() - began > budget.wall_s:
      reason = "time"
    else:
      reason = None
    if reason:
      break
    room = min(budget.turn_tokens, budget.tokens - len(ids))
    sample = await sampler(list(ids), room)
    reply = sample.token_ids.tolist()
    samples.append((len(ids), sample))
    ids += reply
    final_text, wanted = dialect.parse(reply)
    watch("reply", final_text)
    results, finished = [], False
    for name, arguments in wanted:
      calls += 1
      watch("call", f"{name} {arguments}")
      seen = await toolbox.call(sandbox, name, arguments)
      bad_calls += not seen.ok
      results.append(_shortened(seen.text, budget.observation_chars))
      watch("result", results[-1])
      if seen.finished:
        finished, final_text = True, seen.text
        break
    if finished:
      reason = "finish"
      break
    if not wanted:
      problem = _unread(final_text, len(reply) >= room)
      if problem is None:
        reason = "answer"
        break
      bad_calls += 1
      results = [problem]
      watch("result", problem)
    more = dialect.extend(reply, results)
    if len(ids) + len(more) >= budget.tokens:
      reason = "tokens"
      break
    ids += more
  return _transcript(
    ids,
    samples,
    stop_reason=reason,
    turns=len(samples),
    calls=calls,
    bad_calls=bad_calls,
    final_text=final_text,
    wall_s=time.monotonic() - began,
  )


def _unread(text: str, cut: bool) -> str | None:
  """What to say to a reply that seems to call something and doesn't."""
  if "<tool_call" not in text and "</tool_call" not in text:
    return "Error: The reply was cut off: it was too long." if cut else None
  if cut:
    return "Error: The call was cut off: the reply was too long."
  return (
    "Error: A call must be one JSON object between <tool_call> and"
    ' </tool_call>: {"name": "function\'s name", "arguments": {"argument":'
    ' "value"}}, with quotes and line breaks escaped in strings.'
  )


def _shortened(text: str, most: int) -> str:
  if len(text) <= most:
    return text
  half = most // 2
  return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


def _transcript(ids, samples, **rest) -> Transcript:
  mask = np.zeros(len(ids), bool)
  logprobs = np.zeros(len(ids), np.float32)
  versions = np.full(len(ids), -1, np.int64)
  for start, sample in samples:
    place = slice(start, start + len(sample.token_ids))
    mask[place] = True
    logprobs[place] = sample.logprobs
    versions[place] = sample.versions
  return Transcript(
    token_ids=np.array(ids, np.int32),
    loss_mask=mask,
    logprobs=logprobs,
    versions=versions,
    samples=tuple(samples),
    **rest,
  )
