"""Parts of rewards, by hand-counted outcomes; the length's cost, by Decimal."""

import asyncio
import math
import sys
from decimal import Decimal, localcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_jax.envs import lint as lint_module
from composer_jax.envs.lint import Lint, lint
from composer_jax.envs.outcome import (
  Edit,
  Failure,
  InfrastructureError,
  Outcome,
)
from composer_jax.envs.rewards import (
  LengthPenalty,
  Reward,
  RewardConfig,
  length_cost,
  score,
  summarize,
  usable,
)

OUTCOME = Outcome(
  finished=True,
  tests_passed=3,
  tests_total=4,
  calls_ok=9,
  calls_bad=1,
  thinking_tokens=1000,
  tool_call_tokens=500,
  tool_output_tokens=2000,
  final_tokens=100,
  turns=7,
  edits={
    "good.py": Edit(b"x = 1\n", b"x = 2\n"),
    "unused.py": Edit(None, b"import os\n"),
    "broken.py": Edit(b"y = 1\n", b"def f(:\n"),
    "text.txt": Edit(None, b"def f(:\n"),
    "gone.py": Edit(b"def f(:\n", None),
  },
)


def scored(outcome, weights, judge=None, **config):
  return asyncio.run(score(outcome, RewardConfig(weights, **config), judge))


def linted(edits, **kwargs):
  return asyncio.run(lint(edits, **kwargs))


class Fixed:
  """A judge that always says the same."""

  def __init__(self, grades=None, failure=None):
    self.grades, self.failure, self.asked = grades, failure, []

  async def grade(self, outcome, rubric):
    self.asked.append(dict(rubric))
    if self.failure:
      raise InfrastructureError("judge", self.failure)
    return self.grades


def test_parts_and_total_side_by_side():
  weights = {
    "tests": 1.0,
    "solved": 2.0,
    "finished": 0.5,
    "format": 0.25,
    "compiles": 4.0,
    "lint": 0.0,
    "length": 0.1,
    "style": 3.0,
  }
  judge = Fixed({"style": 0.7})
  rubric = {"style": "Does it fit in?", "tone": "Is it polite?"}
  penalty = LengthPenalty(
    k=1.0,
    q=0.5,
    thinking_tokens=0.001,
    tool_call_tokens=0.002,
    tool_output_tokens=0.0005,
    final_tokens=0.01,
    calls=0.2,
    turns=2.0,
  )
  reward = scored(OUTCOME, weights, judge, rubric=rubric, length=penalty)
  # Effort 1 + 1 + 1 + 1 + 2 + 14 = 20, of which 2 (sqrt(21) - 1).
  length = -2 * (math.sqrt(21) - 1)
  assert reward.parts == {
    "tests": 0.75,
    "solved": 0.0,
    "finished": 1.0,
    "format": 0.9,
    "compiles": pytest.approx(2 / 3),
    "lint": pytest.approx(1 / 3),
    "length": pytest.approx(length),
    "style": 0.7,
  }
  expected = 0.75 + 0.5 + 0.225 + 8 / 3 + 0.1 * length + 2.1
  assert reward.total == pytest.approx(expected)
  assert reward.failure is None
  assert reward.weighted["length"] == pytest.approx(0.1 * length)
  assert reward.weighted["lint"] == 0.0
  assert sum(reward.weighted.values()) == pytest.approx(reward.total)
  # Aspects without a weight are not paid for.
  assert judge.asked == [{"style": "Does it fit in?"}]


@pytest.mark.parametrize(
  ("fields", "part", "value"),
  [
    ({"tests_passed": 4, "tests_total": 4}, "solved", 1.0),
    ({"tests_passed": 0, "tests_total": 4}, "tests", 0.0),
    ({}, "format", 1.0),
    ({"calls_bad": 2}, "format", 0.0),
    ({}, "compiles", 1.0),
    ({}, "lint", 1.0),
    ({}, "finished", 0.0),
    ({}, "length", 0.0),
  ],
)
def test_edges_of_parts(fields, part, value):
  reward = scored(Outcome(**fields), {part: 1.0})
  assert reward.parts == {part: value}
  assert reward.total == value


def test_a_failure_is_no_reward_of_zero():
  outcome = Outcome(failure=Failure("sandbox", "gone"), tests_total=1)
  reward = scored(outcome, {"solved": 1.0})
  assert math.isnan(reward.total)
  assert reward.parts == {}
  assert reward.failure == Failure("sandbox", "gone")
  with pytest.raises(InfrastructureError, match="sandbox: gone"):
    print(reward.weighted)
  # Zero tests are a verifier's failure, zero passed ones the policy's.
  assert scored(Outcome(), {"tests": 1.0}).failure.where == "verifier"
  assert scored(Outcome(), {"solved": 1.0}).failure.where == "verifier"
  weights, rubric = {"solved": 1.0, "style": 0.1}, {"style": "?"}
  solved = Outcome(tests_passed=1, tests_total=1)
  reward = scored(solved, weights, Fixed(failure="busy"), rubric=rubric)
  assert math.isnan(reward.total)
  assert reward.failure == Failure("judge", "busy")


def test_failures_are_excluded_and_counted():
  weights = {"solved": 2.0}
  rewards = [
    Reward({"solved": 1.0}, weights),
    Reward({}, weights, Failure("judge", "a")),
    Reward({"solved": 0.0}, weights),
    Reward({}, weights, Failure("judge", "b")),
    Reward({}, weights, Failure("sandbox", "c")),
  ]
  assert usable(rewards) == ([0, 2], {"judge": 2, "sandbox": 1})
  assert summarize(rewards) == {
    "reward/count": 2.0,
    "reward/total": 1.0,
    "reward/solved": 0.5,
    "excluded/judge": 2.0,
    "excluded/sandbox": 1.0,
  }
  assert summarize(rewards[1:2]) == {"reward/count": 0.0, "excluded/judge": 1.0}
  assert summarize([]) == {"reward/count": 0.0}


@pytest.mark.parametrize(
  ("weights", "rubric", "message"),
  [
    ({"solvd": 1.0}, {}, "no part 'solvd' of a reward. Did you mean 'solved'?"),
    ({"stile": 1.0}, {"style": "?"}, "Did you mean 'style'?"),
    ({}, {}, "needs a part"),
    ({"lint": -1.0}, {}, "'lint' must be finite and at least 0"),
    ({"lint": math.nan}, {}, "'lint' must be finite"),
    ({"lint": 1.0}, {"lint": "?"}, "'lint' is a part of that name already"),
  ],
)
def test_config_refuses(weights, rubric, message):
  with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
    RewardConfig(weights, rubric=rubric)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "fields", [{"k": 0.0}, {"q": -1.0}, {"turns": math.inf}, {"calls": math.nan}]
)
def test_length_penalty_refuses(fields):
  (name,) = fields
  with pytest.raises(ValueError, match=f"^{name} of a length penalty"):
    LengthPenalty(**fields)


def test_outcome_refuses():
  with pytest.raises(ValueError, match="turns is -1"):
    Outcome(turns=-1)
  with pytest.raises(ValueError, match="tests_passed=2 is above"):
    Outcome(tests_passed=2, tests_total=1)


def test_aspects_need_a_judge():
  with pytest.raises(ValueError, match="style can't be judged without"):
    scored(OUTCOME, {"style": 1.0}, rubric={"style": "?"})


# The length's cost.

# Below 1e-300, products vanish.
EFFORT = st.one_of(st.just(0.0), st.floats(1e-290, 1e6))
K = st.floats(1e-6, 1e3)
Q = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 1.0, 2.0]))


@given(EFFORT, K, Q)
@example(1e6, 1e3, 1 + 1e-12)
@example(1e6, 1e-6, 1 - 1e-9)
@example(1e-9, 1e-6, 0.5)
def test_length_cost_is_the_reports_formula(x, k, q):
  with localcontext() as context:
    context.prec = 80
    x_, k_, q_ = Decimal(x), Decimal(k), Decimal(q)
    if q == 1:
      expected = (1 + k_ * x_).ln() / k_
    else:
      expected = ((1 + k_ * x_) ** (1 - q_) - 1) / (k_ * (1 - q_))
  assert length_cost(x, k, q) == pytest.approx(float(expected), rel=1e-11)


@given(EFFORT, EFFORT, K, Q)
def test_length_cost_is_increasing_and_concave(a, b, k, q):
  a, b = sorted((a, b))
  low, high = length_cost(a, k, q), length_cost(b, k, q)
  middle = length_cost((a + b) / 2, k, q)
  rounding = 1e-12 * high
  assert low <= middle + rounding
  assert middle <= high + rounding
  assert middle >= (low + high) / 2 - rounding
  # The first unit costs the most, a unit; the slope at b is (1 + k b)^-q.
  assert high - low <= (b - a) + rounding
  assert high - low >= (b - a) * (1 + k * b) ** -q - rounding


@given(K, Q)
def test_length_cost_is_zero_at_zero(k, q):
  assert length_cost(0.0, k, q) == 0.0


def test_length_cost_by_hand():
  assert length_cost(8.0, 1.0, 0.5) == pytest.approx(4.0)
  assert length_cost(8.0, 1.0, 0.0) == pytest.approx(8.0)
  assert length_cost(math.e - 1, 1.0, 1.0) == pytest.approx(1.0)
  assert length_cost(3.0, 1.0, 2.0) == pytest.approx(0.75)
  # Another 3,000 tokens cost 2 at first, a seventh of it after 99,000.
  late = length_cost(102.0, 1.0, 0.5) - length_cost(99.0, 1.0, 0.5)
  assert length_cost(3.0, 1.0, 0.5) == pytest.approx(2.0)
  assert late == pytest.approx(2 * (math.sqrt(103) - 10))


# Edited files.


def test_lint_counts_only_what_got_worse():
  old = b"import os\nimport re\n"
  assert linted({"a.py": Edit(old, old + b"x = 1\n")}) == Lint(1, 0, 0)
  assert linted({"a.py": Edit(old, b"import os\nx = y\n")}) == Lint(1, 0, 1)
  assert linted({"a.py": Edit(old, old + b"import ast\n")}) == Lint(1, 0, 1)
  assert linted({"a.py": Edit(b"def f(:\n", b"x = 1\n")}) == Lint(1, 0, 0)


def test_lint_can_not_be_talked_out_of():
  for text in (
    b"import os  # noqa\n",
    b"# ruff: noqa\nimport os\n",
    b"import os  # ruff: ignore[F401]\n",
    b"# ruff: file-ignore[F401]\nimport os\n",
  ):
    assert linted({"a.py": Edit(None, text)}) == Lint(1, 0, 1), text
  # What packages re-export is not unused.
  explicit = b"from a import b as b\n"
  assert linted({"p/__init__.py": Edit(None, explicit)}) == Lint(1, 0, 0)


@pytest.mark.parametrize(
  "text",
  [
    b"\xff\xfe",
    b"x = \0\n",
    b"def f():\nreturn 1\n",
    b"return 1\n",
    b"x = " + b"[" * 50_000 + b"]" * 50_000,
    b"x = " + b"-" * 50_000 + b"1",
  ],
)
def test_no_python(text):
  assert linted({"a.py": Edit(b"x = 1\n", text)}) == Lint(1, 1, 1)


def test_what_python_alone_knows():
  nonlocal_ = b"def f():\n  nonlocal x\n"
  assert linted({"a.py": Edit(None, nonlocal_)}).broken == 1
  latin = "# coding: latin-1\nx = 'é'\n".encode("latin-1")
  assert linted({"a.py": Edit(latin, latin + b"\n")}) == Lint(1, 0, 0)
  new = b"def f[T](x: T) -> T:\n  match x:\n    case _:\n      return x\n"
  assert linted({"a.py": Edit(None, new)}) == Lint(1, 0, 0)


@pytest.mark.parametrize(
  "path", ["-x.py", "build/a.py", "/etc/\udc80.py", "a.pyi"]
)
def test_names_are_no_matter(path):
  assert linted({path: Edit(None, b"x = y\n")}) == Lint(1, 0, 1)


def test_a_linter_that_fails_is_no_fault(monkeypatch):
  edits = {"a.py": Edit(None, b"x = 1\n")}
  monkeypatch.setattr(lint_module, "_ruff", lambda: "/nowhere/ruff")
  reward = scored(Outcome(edits=edits), {"lint": 1.0})
  assert reward.failure.where == "lint"
  assert "didn't start" in reward.failure.detail
  monkeypatch.undo()
  with pytest.raises(InfrastructureError, match="ruff ended with 2"):
    linted(edits, rules=("NOSUCH",))
  killed = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
  monkeypatch.setattr(lint_module, "_COMPILE", killed)
  with pytest.raises(InfrastructureError, match="Python ended with -9"):
    linted(edits)
  monkeypatch.setattr(lint_module, "_TIMEOUT_S", 0.0)
  with pytest.raises(InfrastructureError, match="took longer"):
    linted(edits)
