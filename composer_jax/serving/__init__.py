"""Sampling from a model as experience for a learner: engine and server.

    weights = serving_weights(model, params, balance)
    engine = Engine(model, weights, EngineConfig(max_len=512), version=3)
    engine.warm_up()                          # compiles every shape there is

    engine.add(Request(prompt=[5, 7], sampling=SamplingParams(max_tokens=20)))
    while engine.busy:
      for event in engine.step():             # Token and Completion events
        ...

`Engine` is synchronous: `step` runs one round on the device, in one thread;
`add`, `cancel`, `set_weights` and `stats` may be called from any thread, and
take effect at the next step. Its methods:

* `add(request) -> request_id`; raises `RequestError` (can never be served) or
  `OverloadedError` (queue full).
* `cancel(request_id)`: the request ends with a `Completion` of what it has and
  `finish_reason="cancelled"`. An unknown or finished id is ignored.
* `step() -> list[Event]`; `busy`: whether anything waits or runs.
* `generate(requests) -> list[Completion]`: steps until all are done, in order.
* `set_weights(weights, version, mode="in_flight", cache="recompute") ->
  Future[SwapReport]`; raises `WeightError`, and the old version goes on.
* `version`, `stats() -> Stats`, `cache_bytes`, `warm_up()`.

`AsyncEngine(engine)` steps an engine in a thread of its own:

* `async for event in front.generate(request)`: `Token` events if
  `request.stream`, then the `Completion`. Leaving the loop early, or
  cancelling the task, cancels the request.
* `await front.complete(request) -> Completion`
* `await front.set_weights(weights, version, mode=..., cache=...)`
* `front.close()`: every open request raises `StoppedError`.

What a completion holds, token by token, and how routes line up with tokens, is
in `Completion`; the cache and what is shared, in `cache`; what is compiled, in
`step`; when a request runs and what a swap does, in `engine`.
"""

from composer_jax.serving.engine import Engine
from composer_jax.serving.front import AsyncEngine
from composer_jax.serving.types import (
  Completion,
  EngineConfig,
  EngineError,
  Event,
  FinishReason,
  OverloadedError,
  Request,
  RequestError,
  SamplingParams,
  Stats,
  StoppedError,
  SwapReport,
  Token,
  WeightError,
)
from composer_jax.serving.weights import Weights, serving_weights

__all__ = [
  "AsyncEngine",
  "Completion",
  "Engine",
  "EngineConfig",
  "EngineError",
  "Event",
  "FinishReason",
  "OverloadedError",
  "Request",
  "RequestError",
  "SamplingParams",
  "Stats",
  "StoppedError",
  "SwapReport",
  "Token",
  "WeightError",
  "Weights",
  "serving_weights",
]
