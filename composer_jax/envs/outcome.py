"""What happened in a trajectory, as rewards see it.

Whoever ran the trajectory fills in an `Outcome`; no part of the machinery that
ran it is needed to score it.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Failure:
  """Machinery that failed: nothing is known about the policy.

  Attributes:
    where: a short word to count by: "sandbox", "verifier", "judge", ...
    detail: for people.
  """

  where: str
  detail: str


class InfrastructureError(Exception):
  """Machinery failed, not the policy: never score the trajectory.

  Attributes:
    failure: what failed.
  """

  def __init__(self, where: str, detail: str):
    """Takes the fields of a `Failure`."""
    super().__init__(where, detail)
    self.failure = Failure(where, detail)

  def __str__(self) -> str:
    return f"{self.failure.where}: {self.failure.detail}"


@dataclasses.dataclass(frozen=True)
class Edit:
  """A file that the policy changed; None where there is no such file.

  Attributes:
    before: its bytes when the policy began.
    after: its bytes when it ended.
  """

  before: bytes | None
  after: bytes | None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What happened in one trajectory.

  Attributes:
    task: what the policy was told.
    final_text: its last message.
    finished: whether it ended the work itself, within its budget.
    tests_passed: hidden tests that passed.
    tests_total: all of them, those that could not start included, so that a
      policy gains nothing by removing tests; 0: none were run.
    calls_ok: tool calls that were well-formed and could be carried out.
    calls_bad: all others.
    thinking_tokens: sampled ones, in any window of a compacted trajectory.
    tool_call_tokens: sampled ones.
    tool_output_tokens: what the tools answered.
    final_tokens: of the last message.
    turns: replies.
    edits: path -> a file that differs from the one that the policy was given.
    failure: of the machinery, if any; the rest then means nothing.

  Raises:
    ValueError: a count is below zero, or more tests passed than there are.
  """

  task: str = ""
  final_text: str = ""
  finished: bool = False
  tests_passed: int = 0
  tests_total: int = 0
  calls_ok: int = 0
  calls_bad: int = 0
  thinking_tokens: int = 0
  tool_call_tokens: int = 0
  tool_output_tokens: int = 0
  final_tokens: int = 0
  turns: int = 0
  edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
  failure: Failure | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 0:
        raise ValueError(f"{field.name} is {value}; a count is at least 0.")
    if self.tests_passed > self.tests_total:
      raise ValueError(
        f"tests_passed={self.tests_passed} is above"
        f" tests_total={self.tests_total}."
      )
