"""A rollout worker: claims tickets, plays them on inference hosts, delivers.

Many of these run beside the learner, and know only the spool and the hosts.
Rollouts of a ticket that is cleared, since its group was closed without them,
are cancelled. Whatever kills a worker, another one, or itself once it is
started again, goes on with the rollouts that aren't delivered yet.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from composer_jax.rl.endpoints import (
  HttpEndpoint,
  Sampled,
  ServerError,
  Stops,
)
from composer_jax.rl.rollout import Play, Rollouts
from composer_jax.rl.spool import Claim, Spool
from composer_jax.rl.trajectory import Group, Sampling, Trajectory

_log = logging.getLogger(__name__)
_POLL_S = 0.2
# How long a host that serves an older version may hold up rollouts.
_LAGGARD_S = 10.0
_HEALTH_S = 5.0


class Host:
  """An inference host that may come back elsewhere: an `Endpoint`.

  Attributes:
    name: for messages.
    version: that it served when last asked; None while it is down.
  """

  def __init__(self, client: Any, address: Path, model: str, stops: Stops):
    """Names a host.

    Args:
      client: an `aiohttp.ClientSession`.
      address: a file with its URL, which isn't there while it is down.
      model: its name there.
      stops: what ends a reply.
    """
    self.name = address.stem
    self.version: int | None = None
    self._client, self._address = client, address
    self._model, self._stops = model, stops

  async def sample(
    self,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    routes_from: int = 0,
  ) -> Sampled:
    """See `Endpoint`."""
    return await self.endpoint().sample(
      prompt, max_tokens, sampling, seed, routes_from
    )

  def endpoint(self) -> HttpEndpoint:
    """Where it is now.

    Raises:
      ServerError: it is down.
    """
    try:
      url = self._address.read_text()
    except FileNotFoundError:
      raise ServerError(f"{self.name} is down") from None
    return HttpEndpoint(self._client, url, self._model, self._stops)

  async def look(self) -> None:
    """Asks which version it serves."""
    import aiohttp  # Of the extra `serve`; whoever has a client has it.

    try:
      url = self._address.read_text()
      limit = aiohttp.ClientTimeout(total=_HEALTH_S)
      async with self._client.get(f"{url}/health", timeout=limit) as response:
        response.raise_for_status()
        self.version = (await response.json())["version"]
    except (OSError, TimeoutError, aiohttp.ClientError):
      self.version = None


async def at_least(hosts: Sequence[Host], version: int) -> None:
  """Waits until a version, or a later one, is served.

  By all hosts that are up; after ten seconds one is enough. A rollout that then
  gets older weights all the same is the buffer's to refuse.
  """
  patience = time.monotonic() + _LAGGARD_S
  while True:
    served = [host.version for host in hosts if host.version is not None]
    wanted = min if time.monotonic() < patience else max
    if served and wanted(served) >= version:
      return
    await asyncio.sleep(_POLL_S / 2)


@dataclasses.dataclass
class Times:
  """Seconds of all rollouts together, and of the worker without any.

  Attributes:
    sampling: spent waiting for hosts.
    rollouts: in all.
    weights: tickets waited for a version.
    idle: the worker had no ticket.
  """

  sampling: float = 0.0
  rollouts: float = 0.0
  weights: float = 0.0
  idle: float = 0.0


class Worker:
  """Works until it is cancelled. Within one event loop.

  Attributes:
    times: where time went.
    solved: rollouts by purpose and result, as "train/solved", "train/failed" or
      "train/unsolved".
  """

  def __init__(
    self,
    spool: Spool,
    hosts: Sequence[Host],
    rollouts: Rollouts,
    play_of: Callable[[str], Play],
    status: Path,
  ):
    """Collects its tools.

    Args:
      spool: whose tickets it claims.
      hosts: that `rollouts` asks.
      rollouts: runs them.
      play_of: what a rollout of a task, by id, does.
      status: a file in which it says what it does, each second.
    """
    self.times = Times()
    self.solved: collections.Counter[str] = collections.Counter()
    self._spool, self._hosts = spool, hosts
    self._rollouts, self._play_of = rollouts, play_of
    self._status = status
    self._running = 0
    self._began = time.time()

  async def run(self) -> None:
    """Works.

    Raises:
      Exception: what is somebody's mistake, of a rollout too.
    """
    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(self._look())
      tasks.create_task(self._tell())
      most = self._rollouts.config.max_rollouts
      while True:
        # What was claimed before this process was killed is claimable again.
        while self._running < most and (claim := self._spool.claim()):
          self._running += len(claim.missing)
          tasks.create_task(self._work(claim))
        before = time.monotonic()
        await asyncio.sleep(_POLL_S)
        if not self._running:
          self.times.idle += time.monotonic() - before

  async def _work(self, claim: Claim) -> None:
    missing = claim.missing
    try:
      with claim:
        began = time.monotonic()
        served = asyncio.create_task(
          at_least(self._hosts, claim.ticket.version)
        )
        await self._while_wanted(claim, [served])
        self.times.weights += time.monotonic() - began
        if served.cancelled():
          return
        async with asyncio.TaskGroup() as tasks:
          playing = [
            tasks.create_task(self._play(claim, number)) for number in missing
          ]
          await self._while_wanted(claim, playing)
    finally:
      self._running -= len(missing)

  async def _while_wanted(self, claim: Claim, tasks: list[asyncio.Task]):
    """Waits for tasks; cancels them once nobody wants the ticket."""
    try:
      while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=_POLL_S)
        if not claim.wanted:
          break
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.wait(tasks)

  async def _play(self, claim: Claim, number: int) -> None:
    ticket = claim.ticket
    task_id = ticket.tasks[number]
    began = time.monotonic()
    seed = (*ticket.seed, number)
    play = self._timed(self._play_of(task_id))
    ended = await self._rollouts.rollout(task_id, play, seed)
    self.times.rollouts += time.monotonic() - began
    if isinstance(ended, Trajectory):
      result = Group(task_id, (ended,))
      word = "solved" if ended.rewards["solved"] > 0 else "unsolved"
    else:
      result, word = Group(task_id, (), {ended.where: 1}), "failed"
    self.solved[f"{ticket.purpose}/{word}"] += 1
    claim.save(number, result)

  def _timed(self, play: Play) -> Play:
    async def timed(sampler):
      async def sample(prompt, max_tokens):
        began = time.monotonic()
        try:
          return await sampler(prompt, max_tokens)
        finally:
          self.times.sampling += time.monotonic() - began

      return await play(sample)

    return timed

  async def _look(self):
    while True:
      await asyncio.gather(*(host.look() for host in self._hosts))
      await asyncio.sleep(_POLL_S)

  async def _tell(self):
    while True:
      write_json(
        self._status,
        {
          "time": time.time(),
          "began": self._began,
          "running": self._running,
          "attempts": dict(self._rollouts.counts),
          "requests": dict(self._rollouts.pool.counts),
          "results": dict(self.solved),
          "seconds": dataclasses.asdict(self.times),
          "versions": {host.name: host.version for host in self._hosts},
        },
      )
      await asyncio.sleep(1.0)


def write_json(path: Path, content: Any) -> None:
  """Replaces a small file at once; readers find the old one or the new one."""
  scratch = path.with_name(f".{path.name}.{os.getpid()}")
  scratch.write_text(json.dumps(content))
  scratch.replace(path)


def read_json(path: Path) -> Any | None:
  """What `write_json` wrote; None if there is no such file."""
  with contextlib.suppress(FileNotFoundError):
    return json.loads(path.read_text())
  return None
