"""A server of scripted troubles, and a dialect and sandbox for it."""

import asyncio
import contextlib
import json

import aiohttp
import numpy as np
from aiohttp import web

from composer_jax.data import Tokenizer
from composer_jax.envs.sandbox import ExecResult, Limits, Sandbox, SandboxError
from composer_jax.rl.endpoints import HttpEndpoint
from composer_jax.rl.sessions import Pool, PoolConfig
from composer_jax.serving.arrays import pack
from composer_jax.serving.chat import HermesFormat
from composer_jax.serving.dialect import ChatDialect


def _tokenizer():
  plain = Tokenizer.train(["def f(x):\n  return x\n"] * 3, 270)
  spec = json.loads(json.dumps(plain._spec))
  for i, name in enumerate(("<|im_start|>", "<|im_end|>")):
    token = dict(spec["added_tokens"][0])
    token |= {"id": plain.vocab_size + i, "content": name}
    spec["added_tokens"].append(token)
  return Tokenizer(json.dumps(spec))


TOKENIZER = _tokenizer()
CHAT = HermesFormat(TOKENIZER)
DIALECT = ChatDialect(CHAT, TOKENIZER.spellings)
END = TOKENIZER.token_id("<|im_end|>")


def spell(text: str) -> list[int]:
  """Byte by byte, as no tokeniser would split it, and the end of the turn."""
  return [*(TOKENIZER.spellings.index(bytes([b])) for b in text.encode()), END]


def _replies_in(prompt):
  """How many were said; the one that is asked for begins, too."""
  begin = CHAT._encode(["<|im_start|>", "assistant\n"])[1:]
  size = len(begin)
  starts = range(len(prompt) - size + 1)
  return sum(prompt[i : i + size] == begin for i in starts) - 1


def call(name, **arguments):
  body = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{body}\n</tool_call>"


# What the fake server says of tokens: functions of the token and its position.
def logprobs_of(ids):
  return -(np.asarray(ids, np.float32) + 1) / 1024


def routes_of(ids, start=0):
  positions = start + np.arange(len(ids))
  rows = [np.asarray(ids) % 251, positions % 251, positions // 251]
  return np.stack(rows, 1).astype(np.uint8)[:, None]


class FakeServer:
  """Does what its script says, one word a request; then answers properly.

  A proper answer is a reply by number of turns said before it, or random tokens
  that depend on prompt and seed alone. Words: "ok", "500", "503", "drop",
  "stall", "html", "cut", "429:SECONDS", "400", or the name of a damage.

  Attributes:
    bodies: of all requests.
    answered: prompt, reply and versions of each proper answer.
    cancelled: requests whose client went away.
    peak: requests at the same time.
  """

  def __init__(
    self, *script, replies=(), version=7, delay_s=0.0, max_len=1 << 16
  ):
    self.script = list(script)
    self.replies = replies
    self.version = version
    self.delay_s = delay_s
    self.max_len = max_len
    self.bodies, self.times, self.answered = [], [], []
    self.cancelled = self.peak = self.busy = 0

  @contextlib.asynccontextmanager
  async def running(self):
    app = web.Application(client_max_size=1 << 24)
    app.add_routes(
      [
        web.get("/v1/models", self._models),
        web.get("/tokenizer.json", self._tokenizer),
        web.post("/v1/completions", self._handle),
      ]
    )
    runner = web.AppRunner(
      app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    self.url = f"http://{host}:{port}"
    try:
      yield self
    finally:
      await runner.cleanup()

  async def _models(self, request):
    del request
    model = {"id": "fake", "max_model_len": self.max_len}
    return web.json_response({"data": [model]})

  async def _tokenizer(self, request):
    del request
    return web.Response(text=TOKENIZER.to_json())

  async def _handle(self, request):
    body = await request.json()
    self.bodies.append(body)
    self.times.append(asyncio.get_running_loop().time())
    self.busy += 1
    self.peak = max(self.peak, self.busy)
    try:
      await asyncio.sleep(self.delay_s)
      return await self._answer(request, body)
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    finally:
      self.busy -= 1

  async def _answer(self, request, body):
    word = self.script.pop(0) if self.script else "ok"
    choice = self._choice(body)
    if word == "ok":
      self.answered.append(choice)
    elif word.startswith("429"):
      after = word.partition(":")[2]
      headers = {"Retry-After": after} if after else {}
      return web.json_response({"error": {}}, status=429, headers=headers)
    elif word.isdigit():
      return web.json_response(
        {"error": {"message": "no such thing"}}, status=int(word)
      )
    elif word == "drop":
      request.transport.close()
    elif word == "stall":
      await asyncio.sleep(60)
    elif word == "html":
      return web.Response(text="<h1>It works</h1>")
    elif word == "cut":
      whole = json.dumps({"choices": [choice]})
      return web.Response(text=whole[: len(whole) // 2])
    else:
      DAMAGES[word](choice)
    return web.json_response({"choices": [choice]})

  def _choice(self, body):
    prompt, most = body["prompt_token_ids"], body["max_tokens"]
    if self.replies:
      ids = spell(self.replies[_replies_in(prompt)])[:most]
    else:
      rng = np.random.default_rng([body["seed"], *prompt])
      ids = rng.integers(0, 250, min(most, 5)).tolist()
    every = [*prompt, *ids]
    # The pass over the last token was never made.
    routes = routes_of(every[:-1])
    routed = body["prompt_routes_from"]
    return {
      "finish_reason": "stop",
      "prompt_token_ids": prompt,
      "token_ids": ids,
      "sampled_logprobs": logprobs_of(ids).tolist(),
      "versions": [self.version + len(prompt)] * len(ids),
      "prompt_routes": pack(routes[routed : len(prompt) - 1]),
      "routes": pack(routes[len(prompt) - 1 :]),
      "seed": body["seed"],
    }


def _set(name, change):
  def damage(choice):
    choice[name] = change(choice[name])

  return damage


DAMAGES = {
  "cancelled": _set("finish_reason", lambda _: "cancelled"),
  "no reason": _set("finish_reason", lambda _: None),
  "a logprob lost": _set("sampled_logprobs", lambda x: x[:-1]),
  "a version lost": _set("versions", lambda x: x[1:]),
  "a version below 0": _set("versions", lambda x: [-1, *x[1:]]),
  "a token below 0": _set("token_ids", lambda x: [-1, *x[1:]]),
  "NaN": _set("sampled_logprobs", lambda x: [float("nan"), *x[1:]]),
  "null": _set("sampled_logprobs", lambda x: [None, *x[1:]]),
  "nested": _set("token_ids", lambda x: [x]),
  "huge": _set("token_ids", lambda x: [1 << 40, *x[1:]]),
  "no routes": lambda choice: choice.pop("routes"),
  "no prompt routes": _set("prompt_routes", lambda _: None),
  "a route lost": _set("routes", lambda x: pack(routes_of([1] * 3))),
  "flat routes": _set("routes", lambda x: pack(np.zeros(5, np.uint8))),
  "routes below 0": _set(
    "prompt_routes", lambda x: pack(np.zeros((2, 1, 3), np.int32))
  ),
  "all routes": lambda choice: choice.__setitem__(
    "prompt_routes",
    pack(routes_of(choice["prompt_token_ids"][:-1])),
  ),
  "another prompt": _set("prompt_token_ids", lambda x: [*x, 1]),
  "nothing": lambda choice: [
    choice.__setitem__(n, [])
    for n in ("token_ids", "sampled_logprobs", "versions")
  ],
  "two choices": lambda choice: choice.clear(),
}


@contextlib.asynccontextmanager
async def pool_of(*servers, **config):
  """A pool that asks fake servers."""
  async with contextlib.AsyncExitStack() as stack:
    for server in servers:
      await stack.enter_async_context(server.running())
    client = await stack.enter_async_context(aiohttp.ClientSession())
    endpoints = [HttpEndpoint(client, s.url, "fake", CHAT) for s in servers]
    yield Pool(endpoints, PoolConfig(**{"rest_s": 0.05} | config))


class FakeSandbox(Sandbox):
  """Lists one file; fails on commands of the number that it is told."""

  def __init__(self, fail_at=None):
    self.limits = Limits()
    self.commands = 0
    self.fail_at = fail_at
    self.destroyed = False

  async def exec(self, argv, **rest):
    del argv, rest
    self.commands += 1
    if self.commands - 1 == self.fail_at:
      raise SandboxError("the machine is gone")
    return ExecResult(0, b"a.py\n", "exited", 0, 0.0, 0)

  async def destroy(self):
    self.destroyed = True
