"""An engine behind HTTP, as OpenAI's clients expect it.

    server = Server(front, tokenizer, ServerConfig(port=0))
    await server.start()                # server.url
    ...
    await server.stop()

    GET  /v1/models
    GET  /tokenizer.json          for clients that speak in token ids
    POST /v1/completions, /v1/chat/completions   see `api_request`
    GET  /health      200 while it serves, else 503
    GET  /metrics     for Prometheus
    GET, POST /admin/...          which weights are served: see `admin`

What is refused is refused before it costs memory: connections beyond a number,
bodies beyond a size, requests beyond the engine's queue (429: try again). A
client that goes away, or doesn't read what it asked for, ends its requests.

Not for the open internet: completions need no key, and there is no TLS. Put a
proxy before it there.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from composer_jax.data import Tokenizer
from composer_jax.serving.admin import Admin
from composer_jax.serving.api_request import (
  BadRequestError,
  Call,
  chat_call,
  completion_call,
)
from composer_jax.serving.api_response import Answer, model_object
from composer_jax.serving.chat import ChatFormat, HermesFormat
from composer_jax.serving.follow import Follower
from composer_jax.serving.front import AsyncEngine
from composer_jax.serving.http_io import HttpError, as_http_error, read_json
from composer_jax.serving.metrics import Metrics
from composer_jax.serving.pieces import Piece, pieces, whole
from composer_jax.serving.text import TextReader
from composer_jax.serving.types import (
  EngineError,
  Request,
  SamplingParams,
)


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Where a server listens, and its limits.

  Attributes:
    host: address; by default of this machine alone.
    port: 0 takes a free one.
    model: the name that clients ask for.
    max_body_bytes: of a request.
    max_connections: open at once; one more is answered 503 and closed.
    max_choices: completions of one call: its prompts times `n`.
    idle_timeout_s: for a request's headers to arrive, from the connection's
      beginning or the end of its last answer; then it is closed.
    read_timeout_s: for a request's body to arrive.
    write_timeout_s: for a client to take what it is sent, before its request
      is cancelled. Until then the tokens of a stream wait: as many as the
      request may have, at most.
    drain_s: for open requests to end, when the server is stopped.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  model: str = "composer-jax"
  max_body_bytes: int = 4 * 2**20
  max_connections: int = 1024
  max_choices: int = 64
  idle_timeout_s: float = 75.0
  read_timeout_s: float = 30.0
  write_timeout_s: float = 30.0
  drain_s: float = 10.0

  def __post_init__(self):
    for name, least in {
      "port": 0,
      "max_body_bytes": 1024,
      "max_connections": 1,
      "max_choices": 1,
      "idle_timeout_s": 0.001,
      "read_timeout_s": 0.001,
      "write_timeout_s": 0.001,
      "drain_s": 0,
    }.items():
      if not getattr(self, name) >= least:
        raise ValueError(
          f"{name}={getattr(self, name)} must be at least {least}."
        )
    if self.port > 65_535:
      raise ValueError(f"port={self.port} must be at most 65535.")


class Server:
  """Serves one engine on one event loop.

  Attributes:
    config: its limits.
    metrics: what it counts.
    url: where it listens, once started.
    follower: moves new weights to the engine; None if nothing does.
  """

  def __init__(
    self,
    front: AsyncEngine,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    *,
    chat_format: ChatFormat | None = None,
    admin_key: str = "",
  ):
    """Makes a server that doesn't listen yet.

    Args:
      front: the engine; whoever made it closes it, after the server.
      tokenizer: of the model.
      config: where and how much.
      chat_format: of conversations; `HermesFormat` by default.
      admin_key: what `/admin` wants as `Authorization: Bearer KEY`; empty:
        there is no `/admin`.
    """
    self.config = config or ServerConfig()
    self.metrics = Metrics(front.engine.stats)
    self.url = ""
    self.follower: Follower | None = None
    self._front = front
    self._tokenizer = tokenizer
    self._chat = chat_format or HermesFormat(tokenizer)
    self._admin = Admin(
      lambda: self.follower, admin_key, self.config.read_timeout_s
    )
    self._started = int(time.time())
    self._listener: asyncio.Server | None = None
    self._runner = web.AppRunner(
      self._app(),
      handler_cancellation=True,
      access_log=None,
      shutdown_timeout=self.config.drain_s,
      keepalive_timeout=self.config.idle_timeout_s,
    )

  async def start(self) -> None:
    """Listens.

    Raises:
      OSError: the address can't be had.
    """
    await self._runner.setup()
    server = self._runner.server
    assert server is not None

    def protocol() -> asyncio.Protocol:
      if len(server.connections) >= self.config.max_connections:
        return _Refusal()
      return server()

    loop = asyncio.get_running_loop()
    self._listener = await loop.create_server(
      protocol, self.config.host, self.config.port
    )
    port = self._listener.sockets[0].getsockname()[1]
    host = self.config.host
    self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

  async def stop(self) -> None:
    """Listens no more; lets open requests end for `drain_s`, then cancels."""
    if self._listener:
      self._listener.close()
    await self._runner.cleanup()

  # ---- Routes ----------------------------------------------------------------

  def _app(self) -> web.Application:
    @web.middleware  # Marks what it is given, which a method can't bear.
    async def answer_errors(request, handler):
      return await self._answer_errors(request, handler)

    app = web.Application(
      client_max_size=self.config.max_body_bytes, middlewares=[answer_errors]
    )
    app.add_routes(
      [
        web.get("/v1/models", self._models),
        web.get("/v1/models/{model}", self._model),
        web.get("/tokenizer.json", self._tokenizer_json),
        web.post("/v1/completions", self._completions),
        web.post("/v1/chat/completions", self._chat_completions),
        web.get("/health", self._health),
        web.get("/metrics", self._metrics),
        *self._admin.routes(),
      ]
    )
    return app

  async def _answer_errors(
    self,
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
  ) -> web.StreamResponse:
    """Turns exceptions into answers, and counts."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource else "other"
    status = 499  # As nginx has it: the client went away.
    try:
      response = await handler(request)
      status = response.status
    except Exception as error:
      failure = as_http_error(error)
      status = failure.status
      response = web.json_response(
        failure.body, status=status, headers=failure.headers
      )
    finally:
      self.metrics.requests.labels(route, status).inc()
    return response

  async def _models(self, request: web.Request) -> web.Response:
    del request
    return web.json_response({"object": "list", "data": [self._model_object()]})

  async def _model(self, request: web.Request) -> web.Response:
    self._check_model(request.match_info["model"])
    return web.json_response(self._model_object())

  def _model_object(self) -> dict[str, Any]:
    max_len = self._front.engine.config.max_len
    return model_object(self.config.model, max_len, self._started)

  async def _tokenizer_json(self, request: web.Request) -> web.Response:
    del request
    # Beside the event loop: a large vocabulary takes its time.
    text = await asyncio.to_thread(self._tokenizer.to_json)
    return web.Response(text=text, content_type="application/json")

  async def _health(self, request: web.Request) -> web.Response:
    del request
    healthy = self._front.healthy
    report = {
      "status": "ok" if healthy else "stopped",
      "version": self._front.engine.version,
    }
    if self.follower:
      status = self.follower.status()
      report |= {name: status[name] for name in ("newest", "failure", "pinned")}
    return web.json_response(report, status=200 if healthy else 503)

  async def _metrics(self, request: web.Request) -> web.Response:
    del request
    return web.Response(
      body=self.metrics.exposition(),
      headers={"Content-Type": CONTENT_TYPE_LATEST},
    )

  # ---- Completions -----------------------------------------------------------

  async def _completions(self, request: web.Request) -> web.StreamResponse:
    call = completion_call(await read_json(request, self.config.read_timeout_s))
    self._check_call(call)
    ids = await asyncio.to_thread(self._prompt_ids, call.prompts)
    return await self._answer(request, call, ids, chat=False)

  async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
    call = chat_call(await read_json(request, self.config.read_timeout_s))
    self._check_call(call)
    # Beside the event loop: it may be much to tokenise.
    ids = await asyncio.to_thread(self._chat.prompt, call.messages, call.tools)
    return await self._answer(request, call, [ids], chat=True)

  def _prompt_ids(
    self, prompts: Sequence[str | tuple[int, ...]]
  ) -> list[list[int]]:
    """A text starts as a document does in training; ids stay as they are."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(self._tokenizer.encode_batch(texts))
    return [
      [self._tokenizer.end_id, *next(encoded).tolist()]
      if isinstance(prompt, str)
      else list(prompt)
      for prompt in prompts
    ]

  async def _answer(
    self,
    request: web.Request,
    call: Call,
    prompts: list[list[int]],
    *,
    chat: bool,
  ) -> web.StreamResponse:
    prompts = [ids for ids in prompts for _ in range(call.n)]
    replies = [self._chat.reader() for _ in prompts] if chat else []
    answer = Answer(call, prompts, self._tokenizer.spellings, replies)
    stop_ids = self._stop_ids(call, chat)
    stop = call.stop + (self._chat.stop if chat else ())
    jobs = []
    for choice, ids in enumerate(prompts):
      engine_request = Request(
        prompt=ids,
        sampling=self._sampling(call, choice, len(ids), stop_ids),
        return_prompt_routes="return_prompt_routes" in call.returns,
        stream=call.stream or bool(stop),
        request_id=f"{answer.call_id}-{choice}",
      )
      reader = TextReader(self._tokenizer.spellings, stop, stop_ids)
      jobs.append((self._front, engine_request, reader, choice))
    if call.stream:
      return await self._stream(request, call, answer, jobs)
    done = await _all_of([whole(*job) for job in jobs])
    for piece in done:
      self.metrics.completion(piece.end)
    response = web.json_response(answer.response(done))
    async with self._writing(request):
      await response.prepare(request)
      await response.write_eof()
    return response

  def _check_call(self, call: Call) -> None:
    """Refuses what the server's own limits do, before it costs anything."""
    self._check_model(call.model)
    num_choices = max(1, len(call.prompts)) * call.n
    if num_choices > self.config.max_choices:
      raise BadRequestError(
        f"{num_choices} completions are more than this server gives at once,"
        f" {self.config.max_choices}: ask for fewer.",
        "n",
      )

  def _stop_ids(self, call: Call, chat: bool) -> tuple[int, ...]:
    ends = self._chat.stop_ids if chat else (self._tokenizer.end_id,)
    return call.stop_token_ids + (() if call.ignore_eos else ends)

  def _sampling(
    self, call: Call, choice: int, length: int, stop_ids: tuple[int, ...]
  ) -> SamplingParams:
    max_len = self._front.engine.config.max_len
    room = max_len - length
    max_tokens = room if call.max_tokens is None else call.max_tokens
    if room < 1 or max_tokens > room:
      raise BadRequestError(
        f"The prompt has {length} tokens and {max(1, max_tokens)} are to be"
        f" sampled, but there is room for {max_len} in all: shorten one of"
        " them.",
        "messages" if not call.prompts else "prompt",
        "context_length_exceeded",
      )
    seed = call.seed
    return SamplingParams(
      max_tokens=max_tokens,
      temperature=call.temperature,
      top_p=call.top_p,
      top_k=call.top_k,
      seed=None if seed is None else (seed + choice) % 2**32,
      stop=tuple((token_id,) for token_id in stop_ids),
      top_logprobs=call.logprobs or 0,
    )

  async def _stream(
    self, request: web.Request, call: Call, answer: Answer, jobs: list
  ) -> web.StreamResponse:
    """Sends pieces as they come; the status waits for the first of them."""
    response = web.StreamResponse(
      headers={
        "Content-Type": "text/event-stream",
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
      }
    )
    ends = {}
    async with contextlib.aclosing(_merged(jobs)) as parts:
      try:
        async for piece in parts:
          if not response.prepared:
            async with self._writing(request):
              await response.prepare(request)
          if piece.end:
            ends[piece.choice] = piece.end
            self.metrics.completion(piece.end)
          chunk = answer.chunk(piece)
          if chunk:
            await self._send(request, response, json.dumps(chunk))
        if call.include_usage:
          usage = answer.usage_chunk([ends[i] for i in sorted(ends)])
          await self._send(request, response, json.dumps(usage))
        await self._send(request, response, "[DONE]")
      except EngineError as error:
        if not response.prepared:
          raise
        body = json.dumps(as_http_error(error).body)
        await self._send(request, response, body)
    async with self._writing(request):
      await response.write_eof()
    return response

  async def _send(
    self, request: web.Request, response: web.StreamResponse, data: str
  ) -> None:
    async with self._writing(request):
      await response.write(b"data: %b\n\n" % data.encode())

  @contextlib.asynccontextmanager
  async def _writing(self, request: web.Request) -> AsyncIterator[None]:
    """Gives up on a client that doesn't read, or has gone away."""
    try:
      async with asyncio.timeout(self.config.write_timeout_s):
        yield
    except (TimeoutError, ConnectionError):
      if request.transport:
        request.transport.abort()
      # As if it had gone away; there is nobody to tell.
      raise asyncio.CancelledError from None

  def _check_model(self, name: str) -> None:
    if name != self.config.model:
      raise HttpError(
        404,
        f"There is no model {name!r:.80}: this server has"
        f" {self.config.model!r}.",
        param="model",
        code="model_not_found",
      )


class _Refusal(asyncio.Protocol):
  """Answers a connection that is one too many, and closes it."""

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    error = HttpError(503, "Too many connections: try again later.")
    body = json.dumps(error.body).encode()
    assert isinstance(transport, asyncio.Transport)
    transport.write(
      b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
      b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
      % (len(body), body)
    )
    transport.close()


async def _all_of(coroutines: list) -> list[Piece]:
  """Runs them at once; if one fails, the others are cancelled."""
  try:
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(coroutine) for coroutine in coroutines]
  except* EngineError as errors:
    first = errors.exceptions[0]
  else:
    return [task.result() for task in tasks]
  raise first


async def _merged(jobs: list) -> AsyncIterator[Piece]:
  """The pieces of several completions, in the order in which they come.

  One at a time of each: a reader that is slow holds them up.
  """
  async with contextlib.AsyncExitStack() as stack:
    streams = [
      await stack.enter_async_context(contextlib.aclosing(pieces(*job)))
      for job in jobs
    ]
    if len(streams) == 1:
      async for piece in streams[0]:
        yield piece
      return
    tasks = {asyncio.ensure_future(anext(s)): s for s in streams}
    stack.push_async_callback(_cancel, tasks)
    while tasks:
      done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
      for task in done:
        stream = tasks.pop(task)
        try:
          piece = task.result()
        except StopAsyncIteration:
          continue
        tasks[asyncio.ensure_future(anext(stream))] = stream
        yield piece


async def _cancel(tasks: dict) -> None:
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
