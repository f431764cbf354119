"""In whatever order things happen, tokens are right and nothing leaks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_helpers import (
  CONFIGS,
  case,
  check,
  check_nothing_leaks,
  engine,
  prompt,
  run,
)

from composer_jax.serving import (
  Completion,
  OverloadedError,
  Request,
  SamplingParams,
)

# Few stems, so that prefixes are shared often.
STEMS = [prompt(24, seed) for seed in range(2)]

ADD = st.tuples(
  st.just("add"),
  st.integers(0, 1),  # stem
  st.integers(1, 24),  # how much of it
  st.integers(0, 2),  # tokens of its own
  st.integers(1, 20),  # max_tokens
  st.sampled_from([0.0, 0.0, 0.9]),  # temperature
)
STEP = st.tuples(st.just("step"), st.integers(1, 8))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 20))
SWAP = st.tuples(
  st.just("swap"),
  st.integers(0, 3),
  st.sampled_from(["in_flight", "drain"]),
  st.sampled_from(["recompute", "recompute", "keep"]),
)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@settings(
  max_examples=100,
  deadline=None,
  derandomize=True,
  suppress_health_check=[HealthCheck.too_slow],
)
@given(
  actions=st.lists(
    st.one_of(ADD, ADD, ADD, STEP, STEP, CANCEL, SWAP), min_size=3, max_size=40
  )
)
def test_any_order_of_events(name, actions):
  served = engine(name, max_waiting=12)
  asked, events, kept = {}, {}, False

  def note(found):
    for event in found:
      events[event.request_id].append(event)

  for action, *details in actions:
    if action == "add":
      stem, length, own, max_tokens, temperature = details
      request = Request(
        np.concatenate([STEMS[stem][:length], prompt(own, len(asked))]),
        SamplingParams(max_tokens, temperature=temperature, seed=len(asked)),
        return_prompt_routes=True,
        stream=True,
      )
      try:
        request_id = served.add(request)
      except OverloadedError:
        assert served.stats().waiting == 12
      else:
        asked[request_id], events[request_id] = request, []
    elif action == "step":
      for _ in range(details[0]):
        note(served.step())
    elif action == "cancel":
      served.cancel(f"request-{details[0]}")
    elif details[0] != served.version:
      version, mode, cache = details
      kept |= cache == "keep"
      served.set_weights(
        case(name).weights[version], version, mode=mode, cache=cache
      )
  for request_id, more in run(served).items():
    events[request_id] += more

  for request_id, request in asked.items():
    *tokens, completion = events[request_id]
    assert isinstance(completion, Completion)
    assert [t.index for t in tokens] == list(range(len(tokens)))
    assert [t.token_id for t in tokens] == completion.token_ids.tolist()
    assert [t.version for t in tokens] == completion.versions.tolist()
    assert kept or not completion.stale_cache.any()
    if completion.finish_reason == "length":
      assert len(tokens) == request.sampling.max_tokens
    else:
      assert completion.finish_reason == "cancelled"
    check(name, request, completion)
  check_nothing_leaks(served)
