"""The benchmark of many rollouts, small, and that its books can find fault."""

import asyncio
import dataclasses

import aiohttp
import numpy as np
import pytest

from benchmarks import rollout_load
from benchmarks.rollout_wire import Wire, differences
from composer_jax.envs import harness
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.endpoints import HttpEndpoint
from composer_jax.rl.rollout import Rollouts
from composer_jax.rl.sessions import Pool, PoolConfig
from tests.rl.rollout_rig import CHAT, DIALECT, FakeSandbox, FakeServer, call


@pytest.mark.sandbox
@pytest.mark.timeout(900)  # Two processes compile: minutes, on a busy machine.
def test_every_token_ends_where_it_belongs(tmp_path):
  load = rollout_load.Load(
    sessions=4, turns=6, versions=2, checked=1, max_len=1536
  )
  row = rollout_load.measure(load, tmp_path)
  print(row)
  assert row["requests"] == load.sessions * load.turns
  for name in ("failed", "differs", "lost", "wrong"):
    assert row[name] == 0, name
  # Else nothing was shown: weights stayed the same, or any would have done.
  assert row["versions"] == 2 and row["control"] > 0.9
  assert row["checked"] > 900 and row["sampled"] > 100
  # Sessions don't ask again for what they have.
  assert row["rows_received"] < row["rows_whole"] / 4


@pytest.fixture(scope="module")
def told():
  """A trajectory, and what went over the wire for it, failures included."""
  server = FakeServer(
    "ok", "500", replies=(call("list_files"), call("oops"), "ok")
  )
  wire = Wire()

  async def play(sampler):
    toolbox = Toolbox()
    toolbox.schemas = []
    sandbox = FakeSandbox()
    return await harness.run(sampler, DIALECT, sandbox, toolbox, "Do it."), {}

  async def body():
    async with (
      server.running(),
      aiohttp.ClientSession(trace_configs=[wire.trace]) as client,
    ):
      endpoint = HttpEndpoint(client, server.url, "fake", CHAT)
      rollouts = Rollouts(Pool([endpoint], PoolConfig(rest_s=0.01)))
      return await rollouts.rollout("task", play, (1,))

  return asyncio.run(body()), wire.exchanges()


def test_what_was_said_is_what_is_kept(told):
  trajectory, exchanges = told
  assert len(exchanges) == 3
  assert differences(trajectory, exchanges) == []


@pytest.mark.parametrize(
  "field", ["token_ids", "loss_mask", "logprobs", "versions", "routes"]
)
def test_what_was_changed_is_found(told, field):
  trajectory, exchanges = told
  last = np.flatnonzero(trajectory.loss_mask)[-1]
  arrays = {
    name: getattr(trajectory, name).copy()
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "routes")
  }
  if field == "loss_mask":
    # As a trajectory would have it: the token is no longer a sampled one.
    arrays["loss_mask"][last] = False
    arrays["versions"][last], arrays["logprobs"][last] = -1, 0
  elif field == "logprobs":
    arrays[field][last] -= 1e-3
  elif field == "routes":
    arrays[field] = np.roll(arrays[field], 1, axis=0)
  else:
    arrays[field][last] += 1
  changed = dataclasses.replace(trajectory, **arrays)
  assert any(field in found for found in differences(changed, exchanges))


def test_turns_in_another_order_are_found(told):
  trajectory, (first, second, third) = told
  assert differences(trajectory, [first, third, second])
