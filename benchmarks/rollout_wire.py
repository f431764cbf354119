"""What went over the wire, and the trajectories that it makes.

Bookkeeping for `rollout_load` that shares no code with what it checks: bytes as
aiohttp's tracing saw them, before and after anything of ours did.
"""

import base64
import dataclasses
import json
from collections.abc import Sequence
from types import SimpleNamespace

import aiohttp
import numpy as np
from jaxtyping import Shaped

from composer_jax.rl.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A request and its answer, as JSON has them."""

  request: dict
  answer: dict


class Wire:
  """Keeps all exchanges of a client; give it as `trace_configs=[wire.trace]`.

  Attributes:
    trace: for `aiohttp.ClientSession`.
  """

  def __init__(self):
    self._bodies: list[tuple[bytes, bytes]] = []
    self.trace = aiohttp.TraceConfig()
    self.trace.on_request_start.append(self._start)
    self.trace.on_request_chunk_sent.append(self._sent)
    self.trace.on_response_chunk_received.append(self._received)

  async def _start(self, _, context: SimpleNamespace, __):
    context.sent = b""

  async def _sent(self, _, context: SimpleNamespace, params):
    context.sent += params.chunk

  async def _received(self, _, context: SimpleNamespace, params):
    if context.sent:  # Else nothing was asked but whether it is there.
      self._bodies.append((context.sent, params.chunk))

  def exchanges(self) -> list[Exchange]:
    """Those that ended with a completion."""
    both = [Exchange(*map(json.loads, bodies)) for bodies in self._bodies]
    return [exchange for exchange in both if "choices" in exchange.answer]


def differences(
  trajectory: Trajectory, exchanges: Sequence[Exchange]
) -> list[str]:
  """Where a trajectory is not what was said over the wire.

  Args:
    trajectory: of one context window, made of the exchanges.
    exchanges: in their order.
  """
  ids, found = trajectory.token_ids.tolist(), []
  size = len(ids)
  mask = np.zeros(size, bool)
  logprobs = np.zeros(size, np.float32)
  versions = np.full(size, -1)
  routes = np.zeros_like(trajectory.routes)
  routed = 0
  for turn, exchange in enumerate(exchanges):
    (choice,) = exchange.answer["choices"]
    prompt, reply = exchange.request["prompt_token_ids"], choice["token_ids"]
    start, stop = len(prompt), len(prompt) + len(reply)
    if ids[:stop] != prompt + reply:
      found.append(f"turn {turn}: token_ids")
    mask[start:stop] = True
    logprobs[start:stop] = choice["sampled_logprobs"]
    versions[start:stop] = choice["versions"]
    rows = [_array(choice[name]) for name in ("prompt_routes", "routes")]
    rows = np.concatenate(rows)
    # Every position once, one after the other; the pass over the last token was
    # not made yet.
    first = exchange.request["prompt_routes_from"]
    if (first, first + len(rows)) != (routed, stop - 1):
      found.append(f"turn {turn}: positions of routes")
      continue
    routed = stop - 1
    routes[first:routed] = rows
  for name, wanted in {
    "loss_mask": mask,
    "logprobs": logprobs,
    "versions": versions,
    "routes": routes,
    "routed": np.arange(size) < routed,
  }.items():
    if not np.array_equal(getattr(trajectory, name), wanted):
      found.append(name)
  return found


def _array(packed: dict) -> Shaped[np.ndarray, "..."]:
  data = base64.b64decode(packed["base64"])
  return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])
