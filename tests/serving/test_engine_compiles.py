"""No request compiles anything."""

import jax
from serving_helpers import case, engine, greedy, prompt

from composer_jax.serving import Request, SamplingParams
from composer_jax.serving.step import compiled


def test_no_compilation_after_the_warm_up():
  compilations = []

  def listen(event, duration, **_):
    del duration
    if "compile" in event:
      compilations.append(event)

  name = "gqa-sigmoid"
  served = engine(name, contexts=(16, 48))
  served.warm_up()
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    jax.jit(lambda x: x + 1)(0)
    assert compilations  # the listener hears
    compilations.clear()
    asked = [
      Request(
        prompt(n, n % 3),
        SamplingParams(
          n, temperature=float(n % 2), top_k=n % 3, top_logprobs=n % 4
        ),
        return_prompt_routes=True,
        stream=n % 2 == 0,
      )
      for n in range(1, 24)
    ]
    served.generate(asked)
    cancelled = served.add(Request(prompt(30), greedy(9)))
    served.set_weights(case(name).weights[1], 1)
    served.step()
    served.cancel(cancelled)
    served.generate([Request(prompt(30), greedy(18))] * 5)
    assert served.stats().preemptions > 0
    assert not compilations
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def test_engines_of_one_shape_share_their_programs():
  engine("gqa-sigmoid").warm_up()
  before = compiled.cache_info()
  engine("gqa-sigmoid", max_waiting=3).warm_up()
  after = compiled.cache_info()
  assert (after.misses, after.hits) == (before.misses, before.hits + 2)
