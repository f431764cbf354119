"""Draws follow the distribution that they report, and a seed decides them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_helpers import (
  case,
  check,
  distribution,
  engine,
  greedy,
  plain,
  prompt,
)

from composer_jax.serving import Request, SamplingParams
from composer_jax.serving.sampling import Params, sample

LOGITS = np.array([2.0, -1.0, 0.5, 2.5, 0.0, -3.0, 1.5, 0.7], np.float32)
WAYS = [
  SamplingParams(),
  SamplingParams(temperature=0.5),
  SamplingParams(temperature=1.7, top_k=3),
  SamplingParams(top_p=0.7),
  SamplingParams(temperature=2.0, top_p=0.8, top_k=5),
  SamplingParams(top_p=1e-6),
  SamplingParams(top_k=1),
  SamplingParams(top_k=100),
  SamplingParams(temperature=0.0),
]


def params_of(ways, seeds):
  return Params(
    seed=jnp.array(seeds, jnp.uint32),
    temperature=jnp.array([w.temperature for w in ways], jnp.float32),
    top_k=jnp.array([w.top_k for w in ways], jnp.int32),
    top_p=jnp.array([w.top_p for w in ways], jnp.float32),
  )


def test_draws_follow_the_distribution_and_report_it():
  rows = 400  # of each way, beside each other
  ways = [way for way in WAYS for _ in range(rows)]
  seeds = np.arange(len(ways))
  draw = jax.jit(sample)
  counts = np.zeros((len(WAYS), len(LOGITS)))
  logits = jnp.broadcast_to(LOGITS, (len(ways), len(LOGITS)))
  for position in range(20):
    out = draw(
      logits, params_of(ways, seeds), jnp.full(len(ways), position, jnp.int32)
    )
    tokens = np.asarray(out.token).reshape(len(WAYS), rows)
    logprobs = np.asarray(out.logprob).reshape(len(WAYS), rows)
    for i, way in enumerate(WAYS):
      expected = distribution(LOGITS.astype(np.float64), way)
      counts[i] += np.bincount(tokens[i], minlength=len(LOGITS))
      np.testing.assert_allclose(
        logprobs[i], np.log(expected[tokens[i]]), atol=1e-5
      )
  for i, way in enumerate(WAYS):
    expected = distribution(LOGITS.astype(np.float64), way) * counts[i].sum()
    assert counts[i][expected == 0].sum() == 0, way
    seen, expected = counts[i][expected > 0], expected[expected > 0]
    chi2 = ((seen - expected) ** 2 / expected).sum()
    # The 99.99 % quantile for up to seven degrees of freedom is 29.9.
    assert chi2 < 29.9, (way, seen, expected)


def test_tokens_that_tie_with_the_last_kept_are_kept():
  logits = jnp.array([[1.0, 3.0, 1.0, 1.0, 0.0]])
  out = jax.jit(sample)(
    jnp.broadcast_to(logits, (100, 5)),
    params_of([SamplingParams(top_k=2)] * 100, range(100)),
    jnp.zeros(100, jnp.int32),
  )
  assert set(out.token.tolist()) == {0, 1, 2, 3}


def test_logits_that_are_not_finite_show():
  ways = [SamplingParams(temperature=0.0), SamplingParams()]
  logits = jnp.full((2, 5), jnp.nan)
  out = sample(logits, params_of(ways, [0, 0]), jnp.array([3, 3]))
  assert np.isnan(out.logprob).all()


def test_a_token_is_drawn_with_its_seed_and_position():
  name = "gqa-sigmoid"
  served = engine(name)
  request = Request(prompt(9), SamplingParams(10, temperature=1.3, seed=77))
  (completion,) = served.generate([request])
  tokens = [*request.prompt, *completion.token_ids]
  logits, _ = plain(name, 0, tokens)
  for j, token in enumerate(completion.token_ids):
    key = jax.random.fold_in(jax.random.key(77), 9 + j)
    noise = np.asarray(jax.random.gumbel(key, (50,)))
    assert (logits[8 + j] / 1.3 + noise).argmax() == token


@pytest.mark.parametrize("name", ["gqa-sigmoid", "mla-softmax"])
def test_a_seed_gives_the_same_bits_in_any_company(name):
  # Without prefix hits, which would move the borders of chunks.
  request = Request(
    prompt(11),
    SamplingParams(12, top_p=0.95, seed=5),
    return_prompt_routes=True,
  )
  alone = engine(name, prefix_sharing=False)
  (expected,) = alone.generate([request])
  rng = np.random.default_rng(1)
  for crowd in range(4):
    served = engine(name, prefix_sharing=False)
    company = [
      Request(
        prompt(int(rng.integers(1, 24)), seed=crowd * 10 + i),
        SamplingParams(
          int(rng.integers(1, 12)), temperature=float(i % 3), top_k=3 * (i % 2)
        ),
      )
      for i in range(5)
    ]
    company.insert(crowd, request)
    completion = served.generate(company)[crowd]
    assert served.stats().preemptions == 0
    for field in (
      "token_ids",
      "logprobs",
      "model_logprobs",
      "routes",
      "prompt_routes",
    ):
      np.testing.assert_array_equal(
        getattr(completion, field), getattr(expected, field), err_msg=field
      )


def test_seeds_differ_where_none_is_given_and_are_reported():
  name = "gqa-sigmoid"
  served = engine(name)
  request = Request(prompt(4), SamplingParams(8, temperature=1.5))
  first, second = served.generate([request, request])
  assert first.sampling.seed != second.sampling.seed
  assert first.token_ids.tolist() != second.token_ids.tolist()
  (again,) = served.generate([Request(prompt(4), first.sampling)])
  assert again.token_ids.tolist() == first.token_ids.tolist()
  check(name, request, first)


def test_greedy_is_certain():
  served = engine("gqa-sigmoid")
  (completion,) = served.generate([Request(prompt(4), greedy(8))])
  assert completion.logprobs.tolist() == [0.0] * 8
  assert (completion.model_logprobs < 0).all()
  assert case("gqa-sigmoid").model is served.model
