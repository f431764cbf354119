"""Workers: claims, deliveries, cancellations, hosts that come and go."""

import asyncio
import contextlib
import json
import types
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from composer_jax.envs.outcome import Failure
from composer_jax.rl.endpoints import ServerError
from composer_jax.rl.rollout import RolloutConfig, Rollouts
from composer_jax.rl.sessions import Pool
from composer_jax.rl.spool import Spool, Ticket
from composer_jax.rl.worker import Host, Worker, at_least
from tests.rl.spool_rig import trajectory

CHAT = types.SimpleNamespace(stop=(), stop_ids=())


class ScriptedRollouts(Rollouts):
  """Ends each rollout as its task says."""

  def __init__(self, most=8):
    super().__init__(Pool([ScriptedHost(4)]), RolloutConfig(max_rollouts=most))
    self.seeds, self.running, self.peak, self.cancelled = [], 0, 0, 0

  async def rollout(self, task_id, play, seed):
    del play
    self.seeds.append(seed)
    self.running += 1
    self.peak = max(self.peak, self.running)
    try:
      await asyncio.sleep(60 if task_id == "stuck" else 0.02)
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    finally:
      self.running -= 1
    if task_id == "mistake":
      raise ValueError("the request is wrong")
    if task_id == "broken":
      return Failure("sandbox", "it is gone")
    return trajectory(task_id, seed[-1])


class ScriptedHost(Host):
  """Serves a version, for ever."""

  def __init__(self, version):
    super().__init__(None, Path("host-0"), "tiny", CHAT)
    self.version = version

  async def look(self):
    pass


def order(folder, name, *tasks, version=4):
  Spool(folder).order(Ticket(name, tasks, "train", version, 0.0, (7, 8)))


async def unplayed(sampler):
  raise AssertionError(f"{sampler} is not to be asked")


@contextlib.asynccontextmanager
async def working(folder, rollouts, hosts=None):
  worker = Worker(
    Spool(folder),
    hosts or [ScriptedHost(4)],
    rollouts,
    lambda task_id: unplayed,
    folder / "worker-0.json",
  )
  task = asyncio.create_task(worker.run())
  try:
    yield worker, task
  finally:
    task.cancel()
    await asyncio.wait([task])


async def until(condition, seconds=20.0):
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.02)


def arrived(folder):
  return {(name, i): g for name, i, g in Spool(folder).arrivals()}


def test_rollouts_and_failures_are_delivered(tmp_path):
  async def run():
    rollouts = ScriptedRollouts()
    order(tmp_path, "group-0", "a", "broken", "a")
    async with working(tmp_path, rollouts) as (worker, _):
      await until(lambda: len(arrived(tmp_path)) == 3)
      return rollouts, worker

  rollouts, worker = asyncio.run(run())
  found = arrived(tmp_path)
  assert found["group-0", 1].failures == {"sandbox": 1}
  assert found["group-0", 1].trajectories == ()
  # Each has a seed of its own, which its number makes.
  assert sorted(rollouts.seeds) == [(7, 8, 0), (7, 8, 1), (7, 8, 2)]
  assert [found["group-0", i].trajectories[0].token_ids[1] for i in (0, 2)] == [
    0,
    2,
  ]
  assert worker.solved == {"train/solved": 2, "train/failed": 1}
  said = json.loads((tmp_path / "worker-0.json").read_text())
  assert said["versions"] == {"host-0": 4}


def test_a_cleared_tickets_rollouts_are_cancelled(tmp_path):
  async def run():
    rollouts = ScriptedRollouts()
    order(tmp_path, "group-0", "stuck", "a")
    async with working(tmp_path, rollouts):
      await until(lambda: len(arrived(tmp_path)) == 1)
      Spool(tmp_path).clear(["group-0"])
      await until(lambda: rollouts.cancelled == 1)
      order(tmp_path, "group-1", "a")
      await until(lambda: ("group-1", 0) in arrived(tmp_path))

  asyncio.run(run())


def test_no_more_is_claimed_than_can_run(tmp_path):
  async def run():
    rollouts = ScriptedRollouts(most=3)
    for number in range(4):
      order(tmp_path, f"group-{number}", "a", "a")
    async with working(tmp_path, rollouts):
      await until(lambda: len(arrived(tmp_path)) == 8)
    return rollouts.peak

  # Whole tickets are claimed: one too many at most.
  assert asyncio.run(run()) <= 4


def test_a_mistake_ends_the_worker(tmp_path):
  async def run():
    order(tmp_path, "group-0", "mistake")
    async with working(tmp_path, ScriptedRollouts()) as (_, task):
      await asyncio.wait([task], timeout=10)
      return task.exception()

  error = asyncio.run(run())
  while isinstance(error, ExceptionGroup):
    (error,) = error.exceptions
  assert isinstance(error, ValueError)


def test_rollouts_wait_for_the_version_of_their_ticket(tmp_path):
  async def run():
    rollouts, behind = ScriptedRollouts(), ScriptedHost(version=3)
    order(tmp_path, "group-0", "a", version=4)
    async with working(tmp_path, rollouts, [behind]):
      await asyncio.sleep(0.5)
      assert rollouts.seeds == []
      behind.version = 4
      await until(lambda: len(arrived(tmp_path)) == 1)

  asyncio.run(run())


def test_a_cleared_ticket_waits_for_no_version(tmp_path):
  async def run():
    rollouts = ScriptedRollouts(most=1)
    order(tmp_path, "group-0", "a", version=99)
    async with working(tmp_path, rollouts):
      await asyncio.sleep(0.3)
      order(tmp_path, "group-1", "a")
      Spool(tmp_path).clear(["group-0"])
      await until(lambda: ("group-1", 0) in arrived(tmp_path))
      assert len(rollouts.seeds) == 1

  asyncio.run(run())


def test_a_host_that_is_down_is_not_waited_for(tmp_path):
  async def run():
    async with asyncio.timeout(5):
      await at_least([ScriptedHost(5), ScriptedHost(None)], 5)
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0.3):
        await at_least([ScriptedHost(None)], 0)
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0.3):
        await at_least([ScriptedHost(5), ScriptedHost(4)], 5)

  asyncio.run(run())


def test_a_host_is_found_wherever_it_comes_back(tmp_path):
  async def run():
    app = web.Application()

    async def health(request):
      del request
      return web.json_response({"version": 11})

    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = tmp_path / "host-3"
    async with aiohttp.ClientSession() as client:
      found = Host(client, address, "tiny", CHAT)
      assert found.name == "host-3"
      await found.look()
      assert found.version is None
      with pytest.raises(ServerError, match="host-3 is down"):
        found.endpoint()
      place, port = runner.addresses[0]
      address.write_text(f"http://{place}:{port}")
      await found.look()
      assert found.version == 11
      assert found.endpoint().name == f"http://{place}:{port}"
      await runner.cleanup()
      await found.look()
      assert found.version is None

  asyncio.run(run())
