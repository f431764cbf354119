"""Sessions against servers that fail, stall and have too much to do."""

import asyncio
import email.utils
import time

import numpy as np
import pytest

from composer_jax.rl.endpoints import ServerError, _retry_s
from composer_jax.rl.sessions import Pool, PoolConfig
from composer_jax.rl.trajectory import Sampling
from composer_jax.serving import RequestError
from tests.rl.rollout_rig import (
  CHAT,
  DAMAGES,
  FakeServer,
  logprobs_of,
  pool_of,
  routes_of,
)

PROMPT = [3, 1, 4]
SAMPLING = Sampling(0.7, 0.9, 40)


async def turns(pool, count=3, seed=(1,), prompt=PROMPT):
  """Asks turn by turn; the last prompt with its answer, and all answers."""
  ids, samples = list(prompt), []
  with pool.session(SAMPLING, seed) as sampler:
    for turn in range(count):
      sample = await sampler(list(ids), 5)
      samples.append(sample)
      ids += [*sample.token_ids.tolist(), 200 + turn]
  return ids[:-1], samples


def test_what_is_asked_and_what_is_answered():
  server = FakeServer()

  async def body():
    async with pool_of(server) as pool:
      return await turns(pool)

  ids, samples = asyncio.run(body())
  routed = 0
  for asked, sample in zip(server.bodies, samples, strict=True):
    prompt = asked["prompt_token_ids"]
    assert asked["max_tokens"] == 5
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (
      *(0.7, 0.9, 40),
    )
    assert asked["stop_token_ids"] == list(CHAT.stop_ids)
    assert asked["ignore_eos"] is True
    stop = len(prompt) + len(sample.token_ids)
    np.testing.assert_array_equal(sample.token_ids, ids[len(prompt) : stop])
    np.testing.assert_array_equal(
      sample.logprobs, logprobs_of(sample.token_ids)
    )
    np.testing.assert_array_equal(sample.versions, [7 + len(prompt)] * 5)
    # Each position's route once, and no other is asked for.
    assert sample.route_start == asked["prompt_routes_from"] == routed
    np.testing.assert_array_equal(
      sample.routes, routes_of(ids[routed : stop - 1], routed)
    )
    routed = stop - 1
  seeds = [asked["seed"] for asked in server.bodies]
  assert len(set(seeds)) == 3 and all(0 <= s < 2**32 for s in seeds)


def test_a_prompt_that_starts_anew_has_all_of_its_routes():
  server = FakeServer()

  async def body():
    async with pool_of(server) as pool:
      with pool.session(SAMPLING, (1,)) as sampler:
        await sampler([1, 2, 3, 4], 5)
        return await sampler([1, 2, 3, 4, 250, 6, 7], 5)

  sample = asyncio.run(body())
  assert sample.route_start == 0
  whole = [1, 2, 3, 4, 250, 6, 7, *sample.token_ids]
  np.testing.assert_array_equal(sample.routes, routes_of(whole[:-1]))


TROUBLES = ["500", "503", "408", "drop", "stall", "html", "cut", *DAMAGES]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failed_request_is_asked_again_elsewhere(trouble):
  bad, good, calm = FakeServer("ok", trouble), FakeServer(), FakeServer()

  async def body():
    async with pool_of(bad, good, request_s=0.3, rest_s=5.0) as pool:
      found = await turns(pool)
      assert pool.counts == {"requests": 3, "failed": 1, "moved": 1}
    async with pool_of(calm) as pool:
      return found, await turns(pool)

  (ids, samples), (wanted_ids, wanted) = asyncio.run(body())
  assert (len(bad.bodies), len(good.bodies)) == (2, 2)
  assert good.bodies[0] == bad.bodies[1]  # Whole, and with the same seed.
  # As if nothing had happened.
  assert ids == wanted_ids
  for one, other in zip(samples, wanted, strict=True):
    for name in ("token_ids", "logprobs", "versions", "routes", "route_start"):
      np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_an_unreachable_server_is_gone_around():
  good = FakeServer()

  async def body():
    gone = FakeServer()
    async with gone.running():
      pass
    async with pool_of(good) as pool:
      endpoint = pool._engines[0].endpoint
      client = endpoint._client
      dead = type(endpoint)(client, gone.url, "fake", CHAT)
      await turns(Pool([dead, endpoint], PoolConfig(rest_s=0.05)))

  asyncio.run(body())
  assert len(good.bodies) == 3


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks():
  busy, other = FakeServer("429:0.4"), FakeServer(delay_s=0.3)

  async def body():
    async with pool_of(busy, other) as pool:
      first = asyncio.create_task(turns(pool, 1, (1,)))
      await asyncio.sleep(0.15)
      second = asyncio.create_task(turns(pool, 1, (2,)))  # On the other one.
      await asyncio.sleep(0.05)
      third = turns(pool, 1, (3,))  # On the busy one, which waits already.
      await asyncio.gather(first, second, third)
      assert pool.counts["busy"] == 1
      assert pool.counts["failed"] == pool.counts["moved"] == 0

  asyncio.run(body())
  assert (len(busy.bodies), len(other.bodies)) == (3, 1)
  began, *later = busy.times
  assert all(0.4 <= at - began < 2 for at in later)


def test_a_server_that_stays_busy_has_failed():
  busy, other = FakeServer(*["429:0.1"] * 9), FakeServer("429:1e9")

  async def body():
    async with pool_of(busy, other, busy_s=0.25, attempts=3) as pool:
      with pytest.raises(ServerError, match=r"too busy.*\(attempt 3\)"):
        await turns(pool, 1)
      assert pool.counts["requests"] == 0

  began = time.monotonic()
  asyncio.run(body())
  assert time.monotonic() - began < 3
  assert len(busy.bodies) == 6 and len(other.bodies) == 1


def test_retry_after_is_seconds_or_a_date_or_missing():
  date = email.utils.formatdate(time.time() + 30, usegmt=True)
  assert _retry_s({"Retry-After": "2.5"}) == 2.5
  assert 28 < _retry_s({"Retry-After": date}) < 31
  for text, wanted in (("", 1.0), ("soon", 1.0), ("-3", 0.0), ("nan", 0.0)):
    assert _retry_s({"Retry-After": text}) == wanted


def test_sessions_stay_and_spread():
  servers = FakeServer(delay_s=0.02), FakeServer(delay_s=0.02)

  async def body():
    async with pool_of(*servers) as pool:
      # Those of the second server end early, which draws nobody there.
      counts = (6, 1, 6, 1, 6, 1)
      await asyncio.gather(
        *(turns(pool, n, (i,), [i, 9, 9]) for i, n in enumerate(counts))
      )
      assert pool.counts["moved"] == 0
      assert [engine.sessions for engine in pool._engines] == [0, 0]

  asyncio.run(body())
  homes = [{b["prompt_token_ids"][0] for b in s.bodies} for s in servers]
  assert homes == [{0, 2, 4}, {1, 3, 5}]


def test_at_most_so_many_requests_at_once():
  server = FakeServer(delay_s=0.02)

  async def body():
    async with pool_of(server, max_requests=2) as pool:
      await asyncio.gather(*(turns(pool, 2, (i,)) for i in range(5)))

  asyncio.run(body())
  assert server.peak == 2 and len(server.bodies) == 10


def test_a_cancelled_session_cancels_its_request_and_frees_its_place():
  server = FakeServer("stall")

  async def body():
    async with pool_of(server, max_requests=1) as pool:
      task = asyncio.create_task(turns(pool))
      while not server.busy:
        await asyncio.sleep(0.01)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      await turns(pool)  # There is room again.
      assert pool.counts["failed"] == 0
      assert server.cancelled == 1

  asyncio.run(body())


def test_a_server_that_failed_rests_longer_each_time():
  server = FakeServer("500", "500", "500")

  async def body():
    async with pool_of(server, rest_s=0.1) as pool:
      await turns(pool, 1)

  asyncio.run(body())
  waits = np.diff(server.times)
  assert (waits > [0.1, 0.2, 0.4]).all() and (waits < 1.5).all()


def test_a_wrong_request_is_not_asked_again():
  server = FakeServer("400")

  async def body():
    async with pool_of(server) as pool:
      with pytest.raises(
        RequestError, match=r"refused .* 400, .*no such thing"
      ):
        await turns(pool)

  asyncio.run(body())
  assert len(server.bodies) == 1


def test_mistakes_get_a_sentence():
  with pytest.raises(ValueError, match="at least one engine"):
    Pool([])
  with pytest.raises(ValueError, match="attempts=0 must be above 0"):
    PoolConfig(attempts=0)
