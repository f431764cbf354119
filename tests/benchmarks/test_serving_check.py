"""The check of served tokens sees faults, and knows a near tie from one."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks.serving_check import TIE, Answer, Check, row_of
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.serving import serving_weights

_RANDOM = np.random.default_rng(0)
PROMPT = _RANDOM.integers(0, 2048, 20).tolist()
SAMPLED = _RANDOM.integers(0, 2048, 8).tolist()
LAYER = 1  # Of the MoE layers; it has one before and one behind.


@pytest.fixture(scope="module")
def check():
  """One for all tests, which say what was published; `weights` as version 0."""
  model = LanguageModel(PRESETS["tiny"]())
  params, balance = jax.jit(model.init)(jax.random.key(0))
  published = {0: serving_weights(model, params, balance)}
  return Check(model, published, temperature=0.8, max_len=64)


@pytest.fixture(scope="module")
def weights(check):
  return check.published[0]


def with_bias(weights, expert, by):
  (bias,), structure = jax.tree.flatten(weights["balance"])
  moved = np.array(bias)
  moved[LAYER, expert] += by
  return weights | {"balance": jax.tree.unflatten(structure, [moved])}


def answer(check, version, prompt=PROMPT, sampled=SAMPLED):
  """What a server with this version's weights says after a prompt."""
  count = len(sampled)
  empty = Answer(
    prompt,
    sampled,
    logprobs=[0.0] * count,
    versions=[version] * count,
    stale=[False] * count,
    routes=np.zeros((count, 3, 2), np.uint8),
    cached=16,
    first_s=0.0,
    total_s=0.0,
  )
  truth = check.truth(row_of([empty]), version)
  return dataclasses.replace(
    empty,
    logprobs=truth.logprob.tolist(),
    routes=truth.routes.astype(np.uint8),
  )


def told(capsys):
  return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.fixture(scope="module")
def tied(check, weights):
  """Weights that all but prefer an expert, which, and what others served.

  The others' bias for the expert is higher by next to nothing, just enough for
  the first of the tokens to visit it; it is found by halving.
  """

  def served(by):
    check.published = {0: with_bias(weights, expert, by)}
    return answer(check, 0)

  expert = 0
  visits = served(0.0).routes[:, LAYER].ravel()
  expert = int(np.bincount(visits, minlength=8).argmin())
  low, high = -1.0, 1.0
  while high - low > TIE / 4:
    middle = (low + high) / 2
    visited = (served(middle).routes[:, LAYER] == expert).any()
    low, high = (low, middle) if visited else (middle, high)
  return with_bias(weights, expert, low), expert, served(high)


def test_right_tokens_are_right(check, weights, capsys):
  check.published = {0: weights}
  first = answer(check, 0)
  second = answer(check, 0, PROMPT + SAMPLED + [5, 6], [7, 8, 9])
  assert check([[first, second], [first], []]) == {
    "checked": 19,
    "wrong": 0,
    "near_ties": 0,
    "stale": 0,
    "backwards": 0,
    "control": 0.0,
  }
  assert not told(capsys)


def test_what_differs_is_told(check, weights, capsys):
  other = jax.tree.map(lambda leaf: 1.5 * leaf, weights)
  check.published = {3: weights, 4: other, 5: weights}
  good = answer(check, 3)
  logprobs, routes = list(good.logprobs), good.routes.copy()
  logprobs[2] += 0.01
  routes[5, LAYER, 1] = (routes[5, LAYER].sum() + 1) % 8
  # The last token is labelled with the version that follows its own.
  bad = dataclasses.replace(
    good, logprobs=logprobs, routes=routes, versions=[3] * 7 + [4]
  )
  row = check([[good], [bad]])
  lines = told(capsys)
  assert (row["wrong"], row["near_ties"]) == (3, 0)
  assert [line["token"] for line in lines] == [2, 5, 7]
  for line in lines:
    assert (line["session"], line["turn"], line["tie"]) == (1, 0, None)
  assert lines[0]["logprob_off"] == pytest.approx(0.01, abs=1e-6)
  assert (lines[0]["fits"], lines[0]["experts"]) == ([], {})
  assert lines[1]["experts"] == {
    str(LAYER): [routes[5, LAYER].tolist(), good.routes[5, LAYER].tolist()]
  }
  assert lines[2]["fits"] == [3, 5]
  assert [lines[2][name] for name in ("position", "since_swap")] == [27, 0]
  assert lines[0]["since_swap"] is None


def test_near_ties_are_counted_apart(check, tied, capsys):
  tree, expert, near = tied
  check.published = {0: tree}
  row = check([[near]])
  lines = told(capsys)
  assert row["wrong"] == 0
  assert row["near_ties"] == len(lines) > 0
  for line in lines:
    layer, raised, by = line["tie"]
    assert (layer, raised) == (LAYER, expert)
    assert by <= TIE


def test_what_a_near_tie_does_not_explain_is_wrong(check, tied):
  tree, expert, near = tied
  check.published = {0: tree}
  # A tie may explain the experts, but not the log-probabilities.
  logprobs = [value + 0.01 for value in near.logprobs]
  row = check([[dataclasses.replace(near, logprobs=logprobs)]])
  assert (row["wrong"], row["near_ties"]) == (len(SAMPLED), 0)
  # The same two experts change places, but from afar.
  check.published = {0: with_bias(tree, expert, -50 * TIE)}
  row = check([[near]])
  assert row["wrong"] > 0
  assert row["near_ties"] == 0


def test_stale_and_backward_labels_are_counted(check, weights):
  check.published = dict.fromkeys(range(3), weights)
  odd = dataclasses.replace(
    answer(check, 0), versions=[1] * 4 + [0] * 4, stale=[True] + [False] * 7
  )
  row = check([[odd]])
  assert (row["wrong"], row["stale"], row["backwards"]) == (0, 1, 1)


def test_turns_must_continue_each_other(check, weights):
  check.published = {0: weights}
  first = answer(check, 0)
  with pytest.raises(ValueError, match="Turn 0"):
    row_of([first, dataclasses.replace(first, prompt=[1] * 40)])
