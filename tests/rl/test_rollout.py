"""Rollouts: what the engine said, token for token, and what is no result."""

import asyncio
import collections
import dataclasses
import functools

import aiohttp
import jax
import numpy as np
import pytest

from composer_jax.envs import harness
from composer_jax.envs.harness import Budget
from composer_jax.envs.outcome import Failure, InfrastructureError
from composer_jax.envs.sandbox import SandboxError
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.endpoints import HttpEndpoint, LocalEndpoint
from composer_jax.rl.rollout import RolloutConfig, Rollouts
from composer_jax.rl.sessions import Pool, PoolConfig
from composer_jax.rl.trajectory import Sampling
from composer_jax.serving import AsyncEngine, Engine, RequestError
from composer_jax.serving.server import Server, ServerConfig
from tests.rl.rollout_rig import (
  CHAT,
  DIALECT,
  END,
  TOKENIZER,
  FakeSandbox,
  FakeServer,
  call,
  logprobs_of,
  pool_of,
  routes_of,
)
from tests.serving import serving_rig
from tests.serving.serving_helpers import log_softmax
from tests.serving.serving_rig import wait_until

REPLIES = (
  "I look. " + call("list_files"),
  "<tool_call>{'oops'}</tool_call>",
  call("finish", message="Done."),
)


def silent_toolbox():
  toolbox = Toolbox()
  toolbox.schemas = []  # The tiny model's context is short.
  return toolbox


async def passed(transcript, sandbox):
  del sandbox
  return {"passed": 1.0, "turns": -0.125 * transcript.turns}


def playing(sandboxes=None, budget=None, score=passed):
  """A `Play` in fake sandboxes, the given ones first."""
  left = list(sandboxes or ())

  async def play(sampler):
    async with left.pop(0) if left else FakeSandbox() as sandbox:
      transcript = await harness.run(
        sampler, DIALECT, sandbox, silent_toolbox(), "Do it.", budget
      )
      return transcript, await score(transcript, sandbox)

  return play


def run_rollouts(body, *servers, config=None, **pool_config):
  async def main():
    async with pool_of(*servers, **pool_config) as pool:
      rollouts = Rollouts(pool, config)
      return await body(rollouts), rollouts

  return asyncio.run(main())


def one(rollouts, seed=(1,), **options):
  return rollouts.rollout("task", playing(**options), seed)


def check_against(server, trajectory):
  """Every token, against the server's own record of what it said."""
  answers = server.answered
  last = answers[-1]
  ids = [*last["prompt_token_ids"], *last["token_ids"]]
  wanted = {
    "token_ids": ids,
    "loss_mask": np.zeros(len(ids), bool),
    "logprobs": np.zeros(len(ids)),
    "versions": np.full(len(ids), -1),
  }
  for answer in answers:
    start = len(answer["prompt_token_ids"])
    place = slice(start, start + len(answer["token_ids"]))
    assert ids[place] == answer["token_ids"]
    wanted["loss_mask"][place] = True
    wanted["logprobs"][place] = logprobs_of(answer["token_ids"])
    wanted["versions"][place] = answer["versions"]
  for name, array in wanted.items():
    np.testing.assert_array_equal(getattr(trajectory, name), array, name)
  routes = routes_of(ids)
  routes[-1] = 0  # The last token has no pass.
  np.testing.assert_array_equal(trajectory.routes, routes)
  assert trajectory.routed.tolist() == [True] * (len(ids) - 1) + [False]


def test_tokens_are_what_the_server_said():
  server = FakeServer(replies=REPLIES)
  trajectory, rollouts = run_rollouts(one, server)
  check_against(server, trajectory)
  assert (trajectory.task_id, trajectory.stop_reason) == ("task", "finish")
  assert trajectory.rewards == {"passed": 1.0, "turns": -0.375}
  assert trajectory.reward == 0.625
  assert len(set(trajectory.versions[trajectory.loss_mask].tolist())) == 3
  assert rollouts.counts == {"done": 1}
  assert trajectory.sampling == Sampling()


@pytest.mark.parametrize("trouble", ["500", "drop", "stall", "429:0.05", "cut"])
def test_troubles_of_a_server_leave_no_trace(trouble):
  calm, bad, good = (
    FakeServer(*script, replies=REPLIES)
    for script in ((), ("ok", trouble, trouble), ())
  )
  wanted, _ = run_rollouts(one, calm)
  found, _ = run_rollouts(one, bad, good, request_s=0.3)
  for name in ("token_ids", "loss_mask", "logprobs", "versions", "routes"):
    np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
  asked = [b["seed"] for b in calm.bodies]
  said = sorted(
    [*bad.answered, *good.answered], key=lambda a: len(a["prompt_token_ids"])
  )
  assert [choice["seed"] for choice in said] == asked


def test_an_observation_after_the_last_reply_has_no_routes():
  server = FakeServer(replies=REPLIES)
  budget = Budget(turns=1)
  trajectory, _ = run_rollouts(functools.partial(one, budget=budget), server)
  assert trajectory.stop_reason == "turns"
  last = np.flatnonzero(trajectory.loss_mask)[-1]
  assert last < len(trajectory) - 1
  ids = trajectory.token_ids
  np.testing.assert_array_equal(trajectory.routes[:last], routes_of(ids)[:last])
  assert not trajectory.routes[last:].any()
  assert trajectory.routed.sum() == last


def test_without_a_reply_there_is_nothing_but_a_prompt():
  budget = Budget(wall_s=1e-9)
  trajectory, _ = run_rollouts(
    functools.partial(one, budget=budget), FakeServer()
  )
  assert trajectory.stop_reason == "time"
  assert trajectory.routes is None and not trajectory.loss_mask.any()


def test_a_sandbox_that_fails_gives_no_reward():
  server = FakeServer(replies=REPLIES)

  async def body(rollouts):
    broken = [FakeSandbox(0), FakeSandbox(0)]
    failure = await one(rollouts, sandboxes=broken)
    assert all(sandbox.destroyed for sandbox in broken)
    once = [FakeSandbox(0)]
    return failure, await one(rollouts, sandboxes=once)

  (failure, trajectory), rollouts = run_rollouts(body, server)
  assert failure == Failure("sandbox", "the machine is gone")
  assert trajectory.reward == 0.625
  assert rollouts.counts == {"sandbox": 3, "done": 1}
  # Each attempt began anew and asked the same.
  first, *others = [
    b for b in server.bodies if b["prompt_token_ids"].count(END) == 2
  ]
  assert len(others) == 3 and all(other == first for other in others)


def test_what_failed_is_counted_in_its_group():
  # One seed's requests always fail.
  class Unlucky(FakeServer):
    async def _answer(self, request, body):
      doomed.add(body["seed"]) if not doomed else None
      self.script = ["500"] if body["seed"] in doomed else []
      return await super()._answer(request, body)

  doomed = set()
  server = Unlucky(replies=REPLIES)

  async def body(rollouts):
    return await rollouts.group("task", playing(), 4, (5,))

  config = RolloutConfig(attempts=1)
  group, rollouts = run_rollouts(
    body, server, config=config, attempts=2, rest_s=0.01
  )
  assert len(group.trajectories) == 3
  assert group.failures == {"server": 1}
  assert all(t.reward == 0.625 for t in group.trajectories)
  assert rollouts.counts == {"done": 3, "server": 1}
  assert len({b["seed"] for b in server.bodies}) == 1 + 3 * 3


def test_a_reward_that_machinery_fails_is_no_zero():
  async def unjudged(transcript, sandbox):
    del transcript, sandbox
    raise InfrastructureError("judge", "no grades")

  failure, rollouts = run_rollouts(
    functools.partial(one, score=unjudged), FakeServer(replies=REPLIES)
  )
  assert failure == Failure("judge", "no grades")
  assert rollouts.counts == {"judge": 2}


def test_a_rollout_that_takes_too_long_is_no_zero():
  server = FakeServer(*["stall"] * 9)
  config = RolloutConfig(rollout_s=0.2, attempts=2)
  sandboxes = [FakeSandbox(), FakeSandbox()]
  failure, rollouts = run_rollouts(
    functools.partial(one, sandboxes=sandboxes), server, config=config
  )
  assert all(sandbox.destroyed for sandbox in sandboxes)
  assert failure == Failure("time", "It took more than 0.2 s.")
  assert rollouts.counts == {"time": 2} and server.cancelled == 2


def test_mistakes_are_raised():
  async def broken(transcript, sandbox):
    del transcript, sandbox
    raise ZeroDivisionError("a bug in a reward")

  async def late(transcript, sandbox):
    del transcript, sandbox
    raise TimeoutError("of the reward's own")

  async def group(rollouts, score):
    return await rollouts.group("task", playing(score=score), 3, (1,))

  for score, error in ((broken, ZeroDivisionError), (late, TimeoutError)):
    server = FakeServer(replies=REPLIES)
    with pytest.raises(error):
      run_rollouts(functools.partial(group, score=score), server)
  with pytest.raises(RequestError, match="refused"):
    run_rollouts(functools.partial(group, score=passed), FakeServer("400"))
  with pytest.raises(ValueError, match="attempts=0 must be above 0"):
    RolloutConfig(attempts=0)


def test_so_many_rollouts_at_once():
  alive, peak = collections.Counter(), []

  async def play(sampler):
    del sampler
    alive["now"] += 1
    peak.append(alive["now"])
    await asyncio.sleep(0.01)
    alive["now"] -= 1
    raise SandboxError("none")

  async def body(rollouts):
    return await rollouts.group("task", play, 7, (1,))

  config = RolloutConfig(max_rollouts=3, attempts=1)
  group, _ = run_rollouts(body, FakeServer(), config=config)
  assert max(peak) == 3
  assert not group.trajectories and group.failures == {"sandbox": 7}


# ---- A real engine -----------------------------------------------------------


MAX_LEN = 512
ENGINE = dataclasses.replace(
  serving_rig.ENGINE, max_len=MAX_LEN, contexts=(MAX_LEN,)
)


def test_a_real_engine():
  # One test, since the engine takes its time to compile.
  with serving_rig.serving(ENGINE) as rig:
    check_tokens_in_process_and_over_http(rig)
    check_cancelling_reaches_the_engine(rig)
    check_a_full_engine_is_waited_for(rig)
    check_a_server_that_goes_away(rig)
  check_a_closed_engine_is_no_zero()


@functools.cache
def oracle():
  return jax.jit(serving_rig.model().apply)


def plain(version, ids):
  """Logits `[N, V]` and experts `[N, L, K]` of a pass without a cache."""
  weights = serving_rig.weights(version)
  padded = np.zeros((1, MAX_LEN), np.int32)
  padded[0, : len(ids)] = ids
  out = oracle()(weights["params"], weights["balance"], padded)
  experts = np.asarray(out.routing.expert_ids)[:, 0].transpose(1, 0, 2)
  return np.asarray(out.logits)[0, : len(ids)], experts[: len(ids)]


def check_against_plain(trajectory, sampling):
  sampled = np.flatnonzero(trajectory.loss_mask)
  assert sampled.size
  for version in set(trajectory.versions[sampled].tolist()):
    logits, experts = plain(version, trajectory.token_ids)
    for i in sampled[trajectory.versions[sampled] == version]:
      wanted = log_softmax(logits[i - 1].astype(float) / sampling.temperature)
      token = trajectory.token_ids[i]
      assert abs(trajectory.logprobs[i] - wanted[token]) < 1e-3, i
      np.testing.assert_array_equal(trajectory.routes[i - 1], experts[i - 1])
  first = int(trajectory.versions[sampled[0]])
  _, experts = plain(first, trajectory.token_ids)
  np.testing.assert_array_equal(
    trajectory.routes[: sampled[0]], experts[: sampled[0]]
  )


def check_tokens_in_process_and_over_http(rig):
  budget = Budget(turns=3, turn_tokens=12, tokens=MAX_LEN)
  sampling = Sampling(0.8)

  async def body():
    local = LocalEndpoint(rig.front, CHAT, TOKENIZER.spellings)
    async with aiohttp.ClientSession() as client:
      remote = HttpEndpoint(client, rig.server.url, serving_rig.NAME, CHAT)
      ended = []
      for endpoint in (local, remote):
        rollouts = Rollouts(Pool([endpoint]), RolloutConfig(sampling))
        ended.append(
          await rollouts.group("task", playing(budget=budget), 2, (3,))
        )
      before = rig.engine.stats()

      async def swapping(sampler):
        """The weights change between the first turn and the second."""
        turns = []

        async def sample(prompt, most):
          if len(turns) == 1:
            await rig.front.set_weights(serving_rig.weights(1), 1)
          turns.append(prompt)
          return await sampler(prompt, most)

        return await playing(budget=budget)(sample)

      rollouts = Rollouts(Pool([remote]), RolloutConfig(sampling))
      swapped = await rollouts.rollout("task", swapping, (3, 0))
    return ended, before, swapped

  (local, remote), stats, swapped = asyncio.run(body())
  assert stats.cached_tokens > stats.prompt_tokens / 2
  for a, b in zip(local.trajectories, remote.trajectories, strict=True):
    assert set(a.versions[a.loss_mask].tolist()) == {0}
    check_against_plain(a, sampling)
    # The same seeds of the same weights: the same rollout.
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.routes, b.routes)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
    check_against_plain(b, sampling)
    _, experts = plain(0, a.token_ids)
    np.testing.assert_array_equal(a.routes[a.routed], experts[a.routed])
  one, other = local.trajectories
  assert one.token_ids.tolist() != other.token_ids.tolist()
  versions = swapped.versions[swapped.loss_mask]
  assert set(versions.tolist()) == {0, 1} and (np.diff(versions) >= 0).all()
  check_against_plain(swapped, sampling)


def check_cancelling_reaches_the_engine(rig):
  budget = Budget(turn_tokens=200)

  def cancelled():
    return rig.engine.stats().finished.get("cancelled", 0)

  async def body():
    async with aiohttp.ClientSession() as client:
      for endpoint in (
        LocalEndpoint(rig.front, CHAT, TOKENIZER.spellings),
        HttpEndpoint(client, rig.server.url, serving_rig.NAME, CHAT),
      ):
        before = cancelled()
        rollouts = Rollouts(Pool([endpoint]))
        task = asyncio.create_task(
          rollouts.group("task", playing(budget=budget), 2, (3,))
        )
        await asyncio.to_thread(
          wait_until, lambda: rig.engine.stats().running == 2
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
          await task
        await asyncio.to_thread(
          wait_until,
          lambda n=before: cancelled() == n + 2,
        )
        assert rig.engine.stats().running == 0

  asyncio.run(body())


def check_a_full_engine_is_waited_for(rig):
  budget = Budget(turns=1, turn_tokens=4)

  async def body():
    endpoint = LocalEndpoint(rig.front, CHAT, TOKENIZER.spellings)
    pool = Pool([endpoint])
    rollouts = Rollouts(pool)
    # 4 rows and 4 waiting: most are refused at first.
    group = await rollouts.group("task", playing(budget=budget), 16, (3,))
    assert len(group.trajectories) == 16
    assert pool.counts["busy"] > 0 and pool.counts["failed"] == 0
    with pytest.raises(RequestError, match="don't fit"):
      await one(rollouts, budget=Budget(turn_tokens=2000))

  asyncio.run(body())


def check_a_server_that_goes_away(rig):
  budget = Budget(turns=3, turn_tokens=12, tokens=MAX_LEN)

  async def body():
    config = ServerConfig(port=0, model=serving_rig.NAME, drain_s=0.0)
    doomed = Server(rig.front, serving_rig.tokenizer(), config)
    await doomed.start()
    answers = []

    async def play(sampler):
      async def sample(prompt, most):
        answer = await sampler(prompt, most)
        answers.append(answer)
        if len(answers) == 3:  # Nobody has ended.
          await doomed.stop()
        return answer

      return await playing(budget=budget)(sample)

    async with aiohttp.ClientSession() as client:
      urls = (doomed.url, rig.server.url)
      pool = Pool(
        [HttpEndpoint(client, url, serving_rig.NAME, CHAT) for url in urls],
        PoolConfig(rest_s=30.0),
      )
      group = await Rollouts(pool).group("task", play, 4, (4,))
    return group, pool.counts

  group, counts = asyncio.run(body())
  assert len(group.trajectories) == 4 and not group.failures
  assert counts["moved"] == 2 and counts["requests"] == 12
  for trajectory in group.trajectories:
    check_against_plain(trajectory, Sampling())


def check_a_closed_engine_is_no_zero():
  engine = Engine(serving_rig.model(), serving_rig.weights(), ENGINE, version=0)
  front = AsyncEngine(engine)
  front.close()

  async def body():
    endpoint = LocalEndpoint(front, CHAT, TOKENIZER.spellings)
    pool = Pool([endpoint], PoolConfig(rest_s=0.01))
    return await one(Rollouts(pool), budget=Budget(turn_tokens=4))

  failure = asyncio.run(body())
  assert failure.where == "server" and "closed" in failure.detail


def test_routes_that_do_not_fit_are_refused():
  server = FakeServer(replies=REPLIES)

  async def shifted(sampler):
    async def sample(prompt, most):
      answer = await sampler(prompt, most)
      return dataclasses.replace(
        answer,
        routes=answer.routes[1:],
        route_start=answer.route_start + 1,
      )

    return await playing()(sample)

  with pytest.raises(ValueError, match="has routes of positions 1 to"):
    run_rollouts(
      lambda rollouts: rollouts.rollout("task", shifted, (1,)), server
    )
