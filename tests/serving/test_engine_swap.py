"""New weights in the middle of everything, and who sampled what."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_helpers import (
  CONFIGS,
  case,
  check,
  check_nothing_leaks,
  distribution,
  engine,
  greedy,
  log_softmax,
  mixed_forward,
  poison,
  prompt,
  run,
)

from composer_jax.serving import (
  Request,
  SamplingParams,
  StoppedError,
  WeightError,
)

NAMES = sorted(CONFIGS)


def start(served, requests, steps):
  ids = [served.add(request) for request in requests]
  events = {request_id: [] for request_id in ids}
  for _ in range(steps):
    for event in served.step():
      events[event.request_id].append(event)
  return ids, events


def finish(served, events):
  for request_id, more in run(served).items():
    events[request_id] += more
  return {request_id: found[-1] for request_id, found in events.items()}


def mixed_requests():
  return [
    Request(
      prompt(n, seed=n),
      SamplingParams(14, temperature=0.7 * (n % 2), seed=n),
      return_prompt_routes=True,
      stream=True,
    )
    # One is still reading its prompt, and one waits, at the swap.
    for n in (5, 8, 11, 32, 6)
  ]


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_with_a_recomputed_cache(name):
  served, asked = engine(name), mixed_requests()
  ids, events = start(served, asked, 7)
  future = served.set_weights(case(name).weights[1], 1)
  assert served.version == 0  # between steps only
  completions = finish(served, events)
  report = future.result(timeout=0)
  assert (report.previous, report.version, report.recomputed) == (0, 1, 4)
  assert 0 <= report.pause_s <= report.staged_s
  assert served.stats().last_pause_s == report.pause_s
  assert served.stats().swaps == 1
  labels = [completions[i].versions.tolist() for i in ids]
  assert any(set(found) == {0, 1} for found in labels)
  for request_id, request in zip(ids, asked, strict=True):
    completion = completions[request_id]
    assert completion.versions.tolist() == sorted(completion.versions)
    assert not completion.stale_cache.any()
    assert [t.index for t in events[request_id][:-1]] == list(range(14))
    check(name, request, completion)
  check_nothing_leaks(served)


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_with_a_kept_cache(name):
  served, request = engine(name), Request(prompt(7), greedy(14))
  ids, events = start(served, [request], 6)
  served.set_weights(case(name).weights[1], 1, cache="keep")
  for _ in range(4):
    events[ids[0]] += served.step()
  served.set_weights(case(name).weights[2], 2, cache="keep")
  completion = finish(served, events)[ids[0]]
  versions = completion.versions.tolist()
  assert set(versions) == {0, 1, 2}
  np.testing.assert_array_equal(
    completion.stale_cache, completion.versions != 0
  )
  # The pass that sampled token j computed position 6 + j.
  tokens = np.concatenate([request.prompt, completion.token_ids[:-1]])
  logits = mixed_forward(name, tokens, [0] * 6 + versions)[6:]
  assert logits.argmax(-1).tolist() == completion.token_ids.tolist()
  np.testing.assert_allclose(
    [
      log_softmax(r)[t]
      for r, t in zip(logits, completion.token_ids, strict=True)
    ],
    completion.model_logprobs,
    atol=5e-5,
  )
  # What it left in the cache is of three versions: nobody finds it.
  turn = Request(tokens, greedy(4))
  (after,) = served.generate([turn])
  assert after.cached_tokens == 0
  check(name, turn, after)
  check_nothing_leaks(served)


def test_draining_finishes_what_was_started():
  name = "gqa-sigmoid"
  served, asked = engine(name), mixed_requests()
  ids, events = start(served, asked, 3)
  future = served.set_weights(case(name).weights[1], 1, mode="drain")
  late = Request(prompt(9, 3), greedy(5))
  ids.append(served.add(late))
  events[ids[-1]] = []
  completions = finish(served, events)
  for request_id in ids[:4]:
    assert set(completions[request_id].versions.tolist()) == {0}
  for request_id in ids[4:]:
    assert set(completions[request_id].versions.tolist()) == {1}
  assert future.result(timeout=0).recomputed == 0
  for request_id, request in zip(ids, [*asked, late], strict=True):
    check(name, request, completions[request_id])
  check_nothing_leaks(served)


def test_draining_lets_a_preempted_request_come_back():
  name = "gqa-sigmoid"
  served = engine(name)
  asked = [Request(prompt(8 + i, i), greedy(30)) for i in range(4)]
  ids, events = start(served, asked, 4)
  served.set_weights(case(name).weights[1], 1, mode="drain")
  completions = finish(served, events)
  assert served.stats().preemptions > 0
  assert served.version == 1
  for request_id, request in zip(ids, asked, strict=True):
    assert set(completions[request_id].versions.tolist()) == {0}
    check(name, request, completions[request_id])


def test_a_prefix_belongs_to_the_weights_that_computed_it():
  name = "mla-softmax"
  served = engine(name)
  request = Request(prompt(13), greedy(4), return_prompt_routes=True)
  cached = []
  for version in (None, None, 1, None, 0):
    if version is not None:
      served.set_weights(case(name).weights[version], version)
    (completion,) = served.generate([request])
    cached.append(completion.cached_tokens)
    assert completion.versions.tolist() == [served.version] * 4
    check(name, request, completion)
  # Version 0 finds its own again.
  assert cached == [0, 12, 0, 12, 12]


def test_sharing_across_versions_is_an_option_and_is_told():
  name = "mla-softmax"
  served = engine(name, share_across_versions=True)
  request = Request(prompt(13), greedy(4))
  served.generate([request])
  served.set_weights(case(name).weights[1], 1)
  (completion,) = served.generate([request])
  assert completion.cached_tokens == 12
  assert completion.versions.tolist() == [1] * 4
  assert completion.stale_cache.all()
  # Twelve positions by version 0, and the rest by version 1.
  tokens = np.concatenate([request.prompt, completion.token_ids[:-1]])
  logits = mixed_forward(name, tokens, [0] * 12 + [1] * 4)[12:]
  assert logits.argmax(-1).tolist() == completion.token_ids.tolist()


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda w: w["params"].pop("norm"), "Version 1 lacks params.norm.scale"),
    (lambda w: w.pop("balance"), "lacks balance.moe.layers.moe.bias"),
    (lambda w: w["params"].update(extra=jnp.ones(1)), "has params.extra"),
    (
      lambda w: w["params"].update(embedding=jnp.ones((49, 24))),
      r"params.embedding as float32\[49, 24\], but .* float32\[50, 24\]",
    ),
    (
      lambda w: w["params"].update(
        embedding=w["params"]["embedding"].astype(jnp.bfloat16)
      ),
      "params.embedding as bfloat16",
    ),
    (lambda w: w["params"].update(embedding=None), "a NoneType at"),
  ],
)
def test_a_failed_update_leaves_the_old_version(damage, message):
  name = "gqa-sigmoid"
  served, request = engine(name), Request(prompt(5), greedy(12))
  (expected,) = served.generate([request])
  ids, events = start(served, [request], 4)
  weights = jax.tree.map(lambda leaf: leaf, case(name).weights[1])
  damage(weights)
  with pytest.raises(WeightError, match=message):
    served.set_weights(weights, 1)
  completion = finish(served, events)[ids[0]]
  assert served.version == 0
  assert completion.versions.tolist() == [0] * 12
  np.testing.assert_array_equal(completion.token_ids, expected.token_ids)


def test_updates_that_make_no_sense_are_refused():
  served, weights = engine("gqa-sigmoid"), case("gqa-sigmoid").weights
  with pytest.raises(WeightError, match="Version 0 is being served"):
    served.set_weights(weights[1], 0)
  with pytest.raises(WeightError, match="mode='later'"):
    served.set_weights(weights[1], 1, mode="later")
  for version in ("3", None, 1.5, 2**63):
    with pytest.raises(WeightError, match="must be an integer"):
      # Past the type checks, which tests have and users don't.
      inspect.unwrap(type(served).set_weights)(served, weights[1], version)
  (completion,) = served.generate([Request(prompt(5), greedy(2))])
  assert completion.versions.tolist() == [0, 0]


def test_the_engine_keeps_a_copy():
  # A trainer donates its arrays to its next step.
  name = "gqa-sigmoid"
  served, request = engine(name), Request(prompt(5), greedy(6))
  lent = jax.tree.map(jnp.copy, case(name).weights[1])
  served.set_weights(lent, 1)
  jax.tree.map(lambda leaf: leaf.delete(), lent)
  (completion,) = served.generate([request])
  check(name, request, completion)
  # NumPy's may be written to.
  lent = jax.tree.map(np.array, case(name).weights[2])
  served.set_weights(lent, 2)
  jax.tree.map(lambda leaf: leaf.fill(0), lent)
  (completion,) = served.generate([request])
  assert completion.versions.tolist() == [2] * 6
  check(name, request, completion)


def test_a_newer_update_takes_the_place_of_one_that_waits():
  name = "gqa-sigmoid"
  served, weights = engine(name), case(name).weights
  ids, events = start(served, [Request(prompt(5), greedy(12))], 3)
  first = served.set_weights(weights[1], 1, mode="drain")
  second = served.set_weights(weights[2], 2)
  with pytest.raises(WeightError, match="replaced by version 2"):
    first.result(timeout=0)
  completion = finish(served, events)[ids[0]]
  assert second.result(timeout=0).previous == 0
  assert set(completion.versions.tolist()) == {0, 2}
  third = served.set_weights(weights[3], 3)
  served.stop(RuntimeError("gone"))
  with pytest.raises(StoppedError, match="before the swap"):
    third.result(timeout=0)


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_weights_that_are_not_finite_spoil_no_later_request(cache):
  name = "gqa-sigmoid"
  served = engine(name)
  # Eight requests fill the cache's every page with NaN.
  served.set_weights(poison(case(name).weights[0]), 13)
  asked = [Request(prompt(20, i), greedy(4)) for i in range(8)]
  for completion in served.generate(asked):
    assert completion.finish_reason == "error"
    assert "Version 13" in completion.error
    assert len(completion.token_ids) == 0
  served.set_weights(case(name).weights[0], 0, cache=cache)
  asked = [Request(prompt(n, n), greedy(9)) for n in (3, 5, 18, 30)]
  for request, completion in zip(asked, served.generate(asked), strict=True):
    assert completion.finish_reason == "length"
    check(name, request, completion)
  check_nothing_leaks(served)


def test_probabilities_are_of_the_version_that_sampled():
  # The check of the other tests can fail: the wrong version's numbers differ.
  name = "gqa-sigmoid"
  served, request = engine(name), Request(prompt(5), SamplingParams(6, seed=1))
  (completion,) = served.generate([request])
  wrong = completion.versions + 1
  with pytest.raises(AssertionError):
    check(
      name,
      request,
      completion.__class__(**{**vars(completion), "versions": wrong}),
    )
  assert distribution(np.zeros(4), SamplingParams()).tolist() == [0.25] * 4


def next_turns(served, asked, completions):
  """Cached tokens of a next turn of each request."""
  cached = []
  for request, completion in zip(asked, completions, strict=True):
    turn = Request(
      np.concatenate([request.prompt, completion.token_ids]), greedy(4)
    )
    (after,) = served.generate([turn])
    assert not after.stale_cache.any()
    check("gqa-sigmoid", turn, after)
    cached.append(after.cached_tokens)
  return cached


def test_a_kept_cache_is_found_only_where_one_version_made_it():
  served = engine("gqa-sigmoid")
  # At the swap the first is inside its first page; the third has a row and
  # pages, but nothing in them yet.
  lengths = (2, 20, 20)
  asked = [Request(prompt(n, i), greedy(8)) for i, n in enumerate(lengths)]
  ids, events = start(served, asked, 1)
  served.set_weights(case("gqa-sigmoid").weights[1], 1, cache="keep")
  completions = finish(served, events)
  # Before their pages give way to others.
  completions = [completions[ids[i]] for i in (0, 2)]
  assert next_turns(served, asked[::2], completions) == [0, 24]


def test_a_kept_cache_stays_mixed_when_its_first_version_returns():
  served, weights = engine("gqa-sigmoid"), case("gqa-sigmoid").weights
  asked = [Request(prompt(20), greedy(8))]
  ids, events = start(served, asked, 1)
  for version in (1, 0):
    served.set_weights(weights[version], version, cache="keep")
    events[ids[0]] += served.step()
  completion = finish(served, events)[ids[0]]
  assert set(completion.versions.tolist()) == {0}
  assert completion.stale_cache.all()
  # Of its first chunk of six tokens, one whole page.
  assert next_turns(served, asked, [completion]) == [4]
