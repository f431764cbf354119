"""Tokens, log-probabilities and routes are those of a plain forward pass."""

import numpy as np
import pytest
from serving_helpers import (
  CONFIGS,
  VOCAB,
  check,
  check_nothing_leaks,
  engine,
  greedy,
  prompt,
  run,
)

from composer_jax.serving import (
  Completion,
  EngineConfig,
  OverloadedError,
  Request,
  RequestError,
  SamplingParams,
  StoppedError,
)

NAMES = sorted(CONFIGS)


def requests(lengths, max_tokens, **changes):
  return [
    Request(
      prompt(n, seed=n),
      greedy(max_tokens)
      if i % 2
      else SamplingParams(max_tokens, temperature=0.8, top_p=0.9, seed=i),
      return_prompt_routes=True,
      **changes,
    )
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_all_lengths(name):
  # One token; less than, exactly and more than chunks of 6 and pages of 4; and
  # more requests than rows.
  asked = requests((1, 2, 4, 5, 6, 7, 12, 23), 9)
  served = engine(name)
  for request, completion in zip(asked, served.generate(asked), strict=True):
    assert completion.finish_reason == "length"
    assert completion.cached_tokens == 0
    assert len(completion.token_ids) == 9
    assert completion.prompt_routes.shape[0] == len(request.prompt) - 1
    check(name, request, completion)
  check_nothing_leaks(served)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_computes_its_prompt_once(name):
  served, shared = engine(name), prompt(14)
  asked = [
    Request(shared, SamplingParams(6, seed=seed), return_prompt_routes=True)
    for seed in range(4)
  ]
  completions = served.generate(asked)
  assert [c.cached_tokens for c in completions] == [0, 12, 12, 12]
  assert len({tuple(c.token_ids) for c in completions}) == 4
  for request, completion in zip(asked, completions, strict=True):
    check(name, request, completion)
  assert served.stats().cached_tokens == 36
  check_nothing_leaks(served)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_of_a_conversation_reuses_its_cache(name):
  served = engine(name)
  first = Request(prompt(9), greedy(8))
  (said,) = served.generate([first])
  # 16 of 17 tokens have passed through the model: four whole pages.
  turn = Request(
    np.concatenate([first.prompt, said.token_ids, prompt(3, 1)]),
    greedy(8),
    return_prompt_routes=True,
  )
  (completion,) = served.generate([turn])
  assert completion.cached_tokens == 16
  check(name, turn, completion)
  # Exactly whole pages: the last one is computed again, for its logits.
  again = Request(turn.prompt[:16], greedy(4), return_prompt_routes=True)
  (completion,) = served.generate([again])
  assert completion.cached_tokens == 12
  check(name, again, completion)
  check_nothing_leaks(served)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_loses_and_repeats_nothing(name):
  served = engine(name)
  asked = requests((8, 9, 10, 11), 30, stream=True)
  ids = [served.add(request) for request in asked]
  events = run(served)
  assert served.stats().preemptions > 0
  for request_id, request in zip(ids, asked, strict=True):
    *tokens, completion = events[request_id]
    assert [t.index for t in tokens] == list(range(30))
    assert [t.token_id for t in tokens] == completion.token_ids.tolist()
    np.testing.assert_array_equal(
      np.stack([t.routes for t in tokens]), completion.routes
    )
    check(name, request, completion)
  # The oldest is never the one to give way, and finishes first.
  assert next(iter(events)) == ids[0]
  check_nothing_leaks(served)


def test_several_contexts_give_the_same_within_tolerance():
  served = engine("gqa-sigmoid", contexts=(16, 48))
  asked = requests((3, 11, 30), 12)
  for request, completion in zip(asked, served.generate(asked), strict=True):
    check("gqa-sigmoid", request, completion)


def test_stop_sequences_end_with_what_was_sampled():
  name = "gqa-sigmoid"
  served = engine(name)
  (free,) = served.generate([Request(prompt(5), greedy(12))])
  ids = free.token_ids.tolist()
  stops = ((VOCAB - 1,) * 3, (ids[3], ids[4]), (ids[7],))
  expected = min(
    i + 1
    for i in range(12)
    for stop in stops
    if i + 1 >= len(stop) and tuple(ids[i + 1 - len(stop) : i + 1]) == stop
  )
  (completion,) = served.generate([Request(prompt(5), greedy(12, stop=stops))])
  assert completion.finish_reason == "stop"
  assert completion.token_ids.tolist() == ids[:expected]
  # A sequence that begins in the prompt is none.
  across = ((int(prompt(5)[-1]), ids[0]),)
  (completion,) = served.generate([Request(prompt(5), greedy(2, stop=across))])
  assert completion.finish_reason == "length"


def test_the_likeliest_tokens_are_reported_to_those_who_ask():
  name = "mla-softmax"
  served = engine(name)
  asked = [
    Request(prompt(5), SamplingParams(4, seed=1, top_logprobs=3)),
    Request(prompt(6), SamplingParams(4, seed=1)),
  ]
  with_top, without = served.generate(asked)
  assert without.top == ()
  for token, logprob, top in zip(
    with_top.token_ids, with_top.model_logprobs, with_top.top, strict=True
  ):
    values = [value for _, value in top]
    assert len(top) == 3
    assert values == sorted(values, reverse=True)
    if token in dict(top):
      assert dict(top)[token] == pytest.approx(float(logprob))
    else:
      assert logprob <= values[-1]


def test_cancelling_keeps_what_there_is_and_frees_the_rest():
  name = "gqa-sigmoid"
  served = engine(name)
  asked = requests((5, 6, 7, 8, 9), 30)
  ids = [served.add(request) for request in asked]
  for _ in range(8):
    assert not served.step()
  served.cancel(ids[0])  # runs
  served.cancel(ids[4])  # waits
  served.cancel("nobody")
  events = run(served)
  running, waiting = events[ids[0]][-1], events[ids[4]][-1]
  assert running.finish_reason == waiting.finish_reason == "cancelled"
  assert 0 < len(running.token_ids) < 30
  check(name, asked[0], running)
  assert len(waiting.token_ids) == 0
  assert waiting.routes.shape == (0, 2, 3)
  for i in (1, 2, 3):
    assert len(events[ids[i]][-1].token_ids) == 30
  assert served.stats().finished == {"length": 3, "cancelled": 2}
  check_nothing_leaks(served)


def test_cancelling_what_is_over_spares_a_later_request_of_that_name():
  served = engine("gqa-sigmoid")
  request = Request([1], greedy(2), request_id="a")
  served.cancel("a")
  (completion,) = served.generate([request])
  assert completion.finish_reason == "length"
  served.cancel("a")
  (completion,) = served.generate([request])
  assert completion.finish_reason == "length"


def test_a_full_queue_pushes_back():
  served = engine("gqa-sigmoid", max_waiting=2)
  served.add(Request(prompt(3), greedy(2)))
  served.add(Request(prompt(4), greedy(2)))
  with pytest.raises(OverloadedError, match="2 requests wait already"):
    served.add(Request(prompt(5), greedy(2)))
  assert served.stats().rejected == 1
  run(served)
  # `generate` waits for room instead.
  asked = [Request(prompt(3), greedy(2))] * 7
  assert len(served.generate(asked)) == 7


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Request([], greedy(2)), "prompt is empty"),
    (lambda: Request([1, VOCAB], greedy(2)), "Token id 50"),
    (lambda: Request([1], greedy(2, stop=((-1,),))), "Token id -1"),
    (lambda: Request([1] * 40, greedy(9)), "max_len=48: shorten"),
    (lambda: Request([1], greedy(2, top_logprobs=6)), "max_top_logprobs=5"),
    (lambda: Request([1], SamplingParams(0)), "max_tokens=0"),
    (lambda: Request([1], SamplingParams(temperature=1e39)), "temperature"),
    (lambda: Request([1], SamplingParams(top_p=0.0)), "top_p=0.0"),
    (lambda: Request([1], SamplingParams(temperature=1e-9)), "temperature"),
    (lambda: Request([1], SamplingParams(temperature=-1.0)), "temperature"),
    (lambda: Request([1], SamplingParams(seed=2**32)), "seed"),
    (lambda: Request([1], SamplingParams(stop=((),))), "stop"),
  ],
)
def test_impossible_requests_are_refused(make, message):
  served = engine("gqa-sigmoid")
  with pytest.raises(RequestError, match=message):
    served.add(make())
  assert not served.busy


def forced(instance, **fields):
  """Past the type checks, which tests have and users don't."""
  for name, value in fields.items():
    object.__setattr__(instance, name, value)
  return instance


@pytest.mark.parametrize(
  "fields",
  [{"max_tokens": 2.5}, {"top_logprobs": 1.5}, {"top_k": None}, {"seed": 1.5}],
)
def test_what_counts_must_be_an_integer(fields):
  sampling = forced(greedy(2), **fields)
  with pytest.raises(RequestError, match="must be an integer"):
    sampling.__post_init__()


@pytest.mark.parametrize("prompt", [[1.5], np.ones((1, 2), int), "ab"])
def test_token_ids_must_be_integers(prompt):
  served = engine("gqa-sigmoid")
  with pytest.raises(RequestError, match="token ids, integers"):
    served.add(forced(Request([1], greedy(2)), prompt=prompt))
  with pytest.raises(RequestError, match="token ids, integers"):
    served.add(Request([1], forced(greedy(2), stop=(5,))))
  assert not served.busy


def test_two_live_requests_need_two_names():
  served = engine("gqa-sigmoid")
  served.add(Request([1], greedy(1), request_id="a"))
  with pytest.raises(RequestError, match="'a' is taken"):
    served.add(Request([1], greedy(1), request_id="a"))
  run(served)
  assert served.add(Request([1], greedy(1), request_id="a")) == "a"
  run(served)


def test_impossible_configs_are_refused():
  with pytest.raises(ValueError, match="one request of max_len=64 needs 4"):
    EngineConfig(max_len=64, page_size=16, cache_tokens=48)
  with pytest.raises(ValueError, match="must rise"):
    EngineConfig(max_len=64, contexts=(32, 16, 64))
  with pytest.raises(ValueError, match="end with max_len=64"):
    EngineConfig(max_len=64, contexts=(16, 32))
  assert EngineConfig(max_len=2048, page_size=16).context_pages == (8, 32, 128)


def test_a_stopped_engine_says_so():
  served = engine("gqa-sigmoid")
  served.add(Request([1], greedy(1)))
  served.stop(RuntimeError("the lights went out"))
  for call in (served.step, lambda: served.add(Request([1], greedy(1)))):
    with pytest.raises(StoppedError, match="the lights went out"):
      call()


def test_times_are_measured():
  served = engine("gqa-sigmoid")
  (completion,) = served.generate([Request(prompt(3), greedy(3))])
  assert isinstance(completion, Completion)
  assert 0 <= completion.wait_s <= completion.first_token_s
  assert completion.first_token_s <= completion.total_s < 60


@pytest.mark.parametrize("name", NAMES)
def test_routes_of_a_page_whose_owner_was_cancelled_before_it_was_read(name):
  served = engine(name)
  owner = served.add(Request(prompt(4), greedy(5)))
  served.step()  # started, not read
  served.cancel(owner)
  heir = Request(prompt(5), greedy(5), return_prompt_routes=True)
  heir_id = served.add(heir)
  completion = run(served)[heir_id][-1]
  assert completion.cached_tokens == 4
  assert completion.prompt_routes.any()
  check(name, heir, completion)
