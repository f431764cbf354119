"""A tiny model behind a real server, in a thread of this process."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import threading
import time

import jax
import openai

from composer_jax.data import Tokenizer
from composer_jax.models import (
  GqaConfig,
  LanguageModel,
  ModelConfig,
  MoeConfig,
  RouterConfig,
)
from composer_jax.serving import (
  AsyncEngine,
  Engine,
  EngineConfig,
  serving_weights,
)
from composer_jax.serving.server import Server, ServerConfig

MODEL = ModelConfig(
  vocab_size=300,
  width=32,
  num_layers=2,
  num_dense_layers=1,
  dense_dim=48,
  attention=GqaConfig(num_heads=2, num_kv_heads=1, head_dim=16),
  moe=MoeConfig(
    num_experts=4,
    expert_dim=16,
    router=RouterConfig("sigmoid", top_k=2, selection_bias=True),
  ),
  dtype="float32",
)
ENGINE = EngineConfig(
  max_rows=4,
  max_len=1024,
  page_size=16,
  prefill_rows=2,
  prefill_chunk=64,
  contexts=(1024,),
  max_waiting=4,
)
NAME = "tiny"
KEY = "a secret"


@functools.cache
def tokenizer():
  return Tokenizer.train(["def f(x):\n  return x + 1\n", "the quick fox"], 280)


@functools.cache
def model():
  return LanguageModel(MODEL)


@functools.cache
def weights(seed=0):
  params, balance = model().init(jax.random.key(seed))
  # Larger than at birth: a new model's logits are all but equal.
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  return jax.block_until_ready(serving_weights(model(), params, balance))


def make_engine(config=ENGINE, version=0):
  engine = Engine(model(), weights(), config, version=version)
  engine.warm_up()
  return engine


@dataclasses.dataclass
class Rig:
  engine: Engine
  front: AsyncEngine
  server: Server
  client: openai.OpenAI
  loop: asyncio.AbstractEventLoop

  def request(self, method, path, body=None, headers=None):
    """Status, headers and body of a plain HTTP request."""
    address = self.server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=30)
    with contextlib.closing(connection):
      if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
      connection.request(method, path, body, headers or {})
      response = connection.getresponse()
      return response.status, response.headers, response.read()

  def json(self, *arguments, **keywords):
    status, _, body = self.request(*arguments, **keywords)
    return status, json.loads(body)

  def async_client(self):
    return openai.AsyncOpenAI(
      base_url=f"{self.server.url}/v1", api_key="none", max_retries=0
    )


@contextlib.contextmanager
def serving(engine_config=ENGINE, config=None, *, admin_key=KEY, version=0):
  """A running server; closed at the end, with everything in it."""
  config = config or ServerConfig(port=0, model=NAME)
  with AsyncEngine(make_engine(engine_config, version)) as front:
    server = Server(front, tokenizer(), config, admin_key=admin_key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
      call(loop, server.start())
      with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
      ) as client:
        yield Rig(front.engine, front, server, client, loop)
    finally:
      call(loop, server.stop())
      loop.call_soon_threadsafe(loop.stop)
      thread.join()
      loop.close()


def call(loop, coroutine):
  return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)


def wait_until(condition, seconds=20.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    time.sleep(0.01)
