"""Clients that are slow, too many, or go away; answered, cut, never kept."""

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time

import pytest
from aiohttp import web
from serving_rig import ENGINE, NAME, call, serving, wait_until

from composer_jax.serving.server import ServerConfig

CONFIG = ServerConfig(
  port=0,
  model=NAME,
  max_body_bytes=20_000,
  max_connections=6,
  idle_timeout_s=1.0,
  read_timeout_s=0.5,
  write_timeout_s=0.5,
)
LONG = {"model": NAME, "prompt": [5], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def rig():
  with serving(ENGINE, CONFIG) as rig:
    yield rig


@pytest.fixture(autouse=True)
def starts_idle(rig):
  """No connection and no request is left of the test before."""
  wait_until(lambda: not rig.server._runner.server.connections)
  wait_until(lambda: not rig.engine.busy)


@contextlib.contextmanager
def connected(rig, receive_buffer=None):
  host, port = rig.server.url.removeprefix("http://").split(":")
  with socket.socket() as client:
    if receive_buffer:
      client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect((host, int(port)))
    yield client


def post(body, length=None):
  raw = body if isinstance(body, bytes) else json.dumps(body).encode()
  length = len(raw) if length is None else length
  return (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
    % (length, raw)
  )


def read_all(client):
  received = b""
  with contextlib.suppress(ConnectionResetError):
    while block := client.recv(65536):
      received += block
  return received


def cancelled(rig):
  return rig.engine.stats().finished.get("cancelled", 0)


def small_send_buffers(rig):
  """The kernel's, of connections to come: else it takes a whole answer."""
  (listener,) = rig.server._listener.sockets
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_is_cut(rig, stream, monkeypatch):
  """Its request ends, and so does its connection; others are served."""
  small_send_buffers(rig)
  if stream:  # Then it is cut before its last token, on any machine.
    step = rig.engine.step
    monkeypatch.setattr(
      rig.engine, "step", lambda: (time.sleep(0.005), step())[1]
    )
  # Some 100 bytes a token and more: beyond any buffer on the way.
  body = LONG | {
    "stream": stream,
    "logprobs": 5,
    "return_routes": True,
    "return_token_ids": True,
  }
  before = cancelled(rig)
  with connected(rig, receive_buffer=4096) as client:
    client.sendall(post(body))
    assert client.recv(12) == b"HTTP/1.1 200"
    began = time.monotonic()
    wait_until(lambda: not rig.server._runner.server.connections)
    # Not before its time, but soon after; generation itself takes seconds.
    assert time.monotonic() - began < 15
  wait_until(lambda: not rig.engine.busy)
  if stream:
    assert cancelled(rig) == before + 1
  text = rig.request("GET", "/metrics")[2].decode()
  assert 'route="/v1/completions",status="499"' in text


@pytest.mark.parametrize("write", ["prepare", "write_eof"])
def test_a_client_gone_before_a_write_is_no_failure(
  rig, write, monkeypatch, caplog
):
  """Its connection closes, but the handler hasn't been cancelled yet."""
  original, met = getattr(web.StreamResponse, write), []

  async def late(response, *arguments):
    if response.content_type == "text/event-stream":
      for connection in rig.server._runner.server.connections:
        connection.transport.abort()
        met.append(write)
    return await original(response, *arguments)

  monkeypatch.setattr(web.StreamResponse, write, late)
  with connected(rig) as client:
    client.sendall(post(LONG | {"stream": True, "max_tokens": 2}))
    read_all(client)
  wait_until(lambda: not rig.server._runner.server.connections)
  wait_until(lambda: not rig.engine.busy)
  assert met == [write]
  assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_client_that_reads_slowly_gets_all(rig):
  """Slower than tokens come, but never as slow as the limit."""
  body = LONG | {"stream": True, "max_tokens": 300, "return_token_ids": True}
  before = cancelled(rig)
  with connected(rig, receive_buffer=4096) as client:
    client.sendall(
      post(body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    )
    received = b""
    while block := client.recv(2000):
      received += block
      time.sleep(0.005)
  events = [
    json.loads(line.removeprefix(b"data: "))
    for line in received.splitlines()
    if line.startswith(b"data: {")
  ]
  tokens = [t for e in events for c in e["choices"] for t in c["token_ids"]]
  assert len(tokens) == 300
  assert b"data: [DONE]" in received
  assert cancelled(rig) == before


def test_a_body_that_takes_too_long_is_408(rig):
  with connected(rig) as client:
    client.sendall(post(b'{"model"', length=1000))
    began = time.monotonic()
    answer = client.recv(65536)
  assert answer.startswith(b"HTTP/1.1 408")
  assert b"took too long" in answer
  assert 0.4 < time.monotonic() - began < 10


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", post(b"", 9)[:-2]])
def test_a_connection_without_a_request_is_closed(rig, sent):
  with connected(rig) as client:
    client.sendall(sent)
    began = time.monotonic()
    assert read_all(client) == b""
  assert 0.8 < time.monotonic() - began < 10


def test_an_answered_connection_that_idles_is_closed(rig):
  with connected(rig) as client:
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    began = time.monotonic()
    assert read_all(client).startswith(b"HTTP/1.1 200")
  assert 0.8 < time.monotonic() - began < 10


@pytest.mark.parametrize("told", [True, False])
def test_a_body_too_large_is_413(rig, told):
  """Whether its length is said before or found out."""
  rest = b" " * (CONFIG.max_body_bytes + 1)
  if told:
    request = post(rest)
  else:
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    request += b"Transfer-Encoding: chunked\r\n\r\n"
    request += b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest)
  with connected(rig) as client:
    client.sendall(request)
    answer = client.recv(65536)
  assert answer.startswith(b"HTTP/1.1 413")
  assert b"larger than this server takes" in answer
  # And one that just fits is only no JSON.
  assert rig.request("POST", "/v1/completions", rest[1:])[0] == 400


def test_a_body_that_is_not_encoded_as_told_is_400(rig):
  status, body = rig.json(
    "POST", "/v1/completions", b"{}", {"Content-Encoding": "gzip"}
  )
  assert status == 400
  assert "isn't encoded as its headers say" in body["error"]["message"]


def test_too_many_prompts_are_refused_before_they_are_tokenised(
  rig, monkeypatch
):
  monkeypatch.setattr(rig.server, "_tokenizer", None)
  status, body = rig.json(
    "POST", "/v1/completions", {"model": NAME, "prompt": ["a"] * 65}
  )
  assert (status, body["error"]["param"]) == (400, "n")


def test_a_long_list_of_tools_holds_nobody_up(rig, monkeypatch):
  # Tokenising waits for the other request, which the event loop so must serve.
  begun, answered = threading.Event(), threading.Event()
  chat = rig.server._chat
  in_time = []

  class Slow:
    def __getattr__(self, name):
      return getattr(chat, name)

    def prompt(self, *arguments):
      begun.set()
      in_time.append(answered.wait(5))
      return chat.prompt(*arguments)

  monkeypatch.setattr(rig.server, "_chat", Slow())
  function = {"name": "f", "description": "long"}
  body = {
    "model": NAME,
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": function}],
    "max_tokens": 1,
  }
  path = "/v1/chat/completions"
  slow = threading.Thread(target=rig.request, args=("POST", path, body))
  slow.start()
  assert begun.wait(5)
  assert rig.request("GET", "/health")[0] == 200
  answered.set()
  slow.join()
  assert in_time == [True]


def test_one_connection_too_many_is_503(rig):
  with contextlib.ExitStack() as stack:
    for _ in range(CONFIG.max_connections):
      stack.enter_context(connected(rig))
    wait_until(
      lambda: (
        len(rig.server._runner.server.connections) == CONFIG.max_connections
      )
    )
    with connected(rig) as client:
      answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 1" in answer
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert "Too many connections" in body["error"]["message"]
  wait_until(lambda: not rig.server._runner.server.connections)
  assert rig.json("GET", "/health")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels(rig, stream):
  before = cancelled(rig)
  with connected(rig) as client:
    client.sendall(post(LONG | {"stream": stream, "n": 3}))
    wait_until(lambda: rig.engine.stats().running == 3)
  wait_until(lambda: not rig.engine.busy)
  assert cancelled(rig) == before + 3


def test_stopping_waits_for_open_requests():
  config = dataclasses.replace(CONFIG, drain_s=30.0, idle_timeout_s=60.0)
  with serving(ENGINE, config) as rig:
    answers = []
    body = LONG | {"max_tokens": 200}
    asking = threading.Thread(
      target=lambda: answers.append(rig.json("POST", "/v1/completions", body))
    )
    asking.start()
    wait_until(lambda: rig.engine.stats().running == 1)
    call(rig.loop, rig.server.stop())
    asking.join()
    ((status, answer),) = answers
    assert (status, answer["usage"]["completion_tokens"]) == (200, 200)
    with pytest.raises(OSError):
      rig.request("GET", "/health")
