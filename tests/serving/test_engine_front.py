"""The engine in a thread, seen from event loops and other threads."""

import asyncio
import time

import pytest
from serving_helpers import case, check, engine, greedy, prompt

from composer_jax.serving import (
  AsyncEngine,
  Completion,
  OverloadedError,
  Request,
  RequestError,
  StoppedError,
  Token,
  WeightError,
)

NAME = "gqa-sigmoid"


@pytest.fixture
def front():
  with AsyncEngine(engine(NAME, max_waiting=8)) as front:
    yield front


async def until(condition):
  for _ in range(1000):
    if condition():
      return
    await asyncio.sleep(0.01)
  raise AssertionError("waited in vain")


def test_streams_beside_each_other(front):
  asked = [Request(prompt(n, n), greedy(9), stream=True) for n in range(3, 9)]

  async def read(request):
    events = [event async for event in front.generate(request)]
    assert all(isinstance(event, Token) for event in events[:-1])
    assert [e.token_id for e in events[:-1]] == events[-1].token_ids.tolist()
    return events[-1]

  async def main():
    return await asyncio.gather(*map(read, asked))

  for request, completion in zip(asked, asyncio.run(main()), strict=True):
    check(NAME, request, completion)


def test_leaving_cancels(front):
  request = Request(prompt(3), greedy(40), stream=True)

  async def main():
    stream = front.generate(request)
    async for _ in stream:
      break
    await stream.aclose()
    await until(lambda: not front.engine.busy)
    task = asyncio.create_task(front.complete(request))
    await until(lambda: front.engine.stats().running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    await until(lambda: not front.engine.busy)

  asyncio.run(main())
  stats = front.engine.stats()
  assert sum(stats.finished.values()) == stats.requests == 2
  assert stats.finished["cancelled"] >= 1
  assert stats.pages_used == 0


def test_refusals_reach_the_caller(front):
  async def main():
    with pytest.raises(RequestError, match="empty"):
      await front.complete(Request([], greedy(1)))
    tasks = [
      asyncio.create_task(front.complete(Request(prompt(20, i), greedy(28))))
      for i in range(60)
    ]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [d for d in done if isinstance(d, OverloadedError)]
    served = [d for d in done if isinstance(d, Completion)]
    assert refused
    assert len(refused) + len(served) == 60
    assert len(served) >= 8

  asyncio.run(main())
  assert front.healthy


def test_weights_and_threads(front):
  request = Request(prompt(5), greedy(6))
  before = front.submit(request).result(timeout=60)

  async def main():
    with pytest.raises(WeightError, match="lacks"):
      await front.set_weights({"params": {}}, 1)
    return await front.set_weights(case(NAME).weights[1], 1, mode="drain")

  assert asyncio.run(main()).version == 1
  after = front.submit(request).result(timeout=60)
  assert set(before.versions.tolist()) == {0}
  assert set(after.versions.tolist()) == {1}
  check(NAME, request, after)


def test_closing_ends_open_requests():
  front = AsyncEngine(engine(NAME))
  future = front.submit(Request(prompt(3), greedy(45)))
  while not front.engine.stats().running:
    time.sleep(0.001)
  front.close()
  # A process may end now: nothing runs on the device.
  assert not front.engine.busy
  with pytest.raises(StoppedError):
    future.result(timeout=5)
  assert not front.healthy
  with pytest.raises(StoppedError):
    front.submit(Request(prompt(3), greedy(4)))
  front.close()


def test_an_engine_that_was_stopped_while_idle_is_not_healthy(front):
  front.engine.stop(StoppedError("somebody did"))
  assert not front.healthy


def test_a_failing_step_is_told_to_everyone(monkeypatch):
  served = engine(NAME)
  with AsyncEngine(served) as front:

    def fail(lives):
      raise RuntimeError("the device is gone")

    monkeypatch.setattr(served._runner, "prefill", fail)
    future = front.submit(Request(prompt(3), greedy(4)))
    with pytest.raises(StoppedError, match="the device is gone"):
      future.result(timeout=60)
    deadline = time.monotonic() + 10
    while front.healthy and time.monotonic() < deadline:
      time.sleep(0.01)
    assert not front.healthy
    with pytest.raises(StoppedError, match="the device is gone"):
      front.submit(Request(prompt(3), greedy(4)))


def test_a_closed_event_loop_disturbs_nobody(front):
  async def main():
    stream = front.generate(Request(prompt(3), greedy(40), stream=True))
    await anext(stream)
    return stream

  loop = asyncio.new_event_loop()
  stream = loop.run_until_complete(main())
  loop.close()
  request = Request(prompt(4), greedy(12))
  check(NAME, request, front.submit(request).result(timeout=60))
  del stream


def test_nobody_waiting_for_a_swap_disturbs_nobody(front):
  async def main():
    busy = front.submit(Request(prompt(3), greedy(40)))
    task = asyncio.create_task(
      front.set_weights(case(NAME).weights[1], 1, mode="drain")
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return busy

  busy = asyncio.run(main())
  assert not busy.cancel()
  assert busy.result(timeout=60).finish_reason == "length"
  assert front.healthy
