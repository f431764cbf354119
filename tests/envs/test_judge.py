"""The judge against a server that fails in every way one can think of."""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import deque

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from composer_jax.envs.judge import Judge, JudgeConfig
from composer_jax.envs.outcome import Edit, InfrastructureError, Outcome
from composer_jax.envs.rewards import RewardConfig, score

RUBRIC = {"style": "Does it fit in?", "tone": "Is it polite?"}
GRADES = {
  "style": {"reason": "It does.", "score": 8},
  "tone": {"reason": "Curt.", "score": 2.5},
}
EXPECTED = {"style": 0.8, "tone": 0.25}
OUTCOME = Outcome(
  task="Repair f.",
  final_text="Done.",
  tests_passed=1,
  tests_total=1,
  edits={"f.py": Edit(b"def f():\n  return 1\n", b"def f():\n  return 2\n")},
)


def completion(content):
  choice = {"index": 0, "message": {"role": "assistant", "content": content}}
  return web.json_response({"choices": [choice]})


def good(_=None):
  return completion(json.dumps(GRADES))


def status(code, **headers):
  return lambda _: web.Response(status=code, text="Not now.", headers=headers)


async def stall(_):
  await asyncio.sleep(30)


async def cut_off(request):
  response = web.StreamResponse(headers={"Content-Length": "1000"})
  await response.prepare(request)
  await response.write(b'{"choices": [')
  request.transport.close()
  return response


async def endless(request):
  response = web.StreamResponse()
  await response.prepare(request)
  with contextlib.suppress(ConnectionError):
    while True:
      await response.write(b" " * (1 << 16))
  return response


class Server:
  """Answers as the script says, then well; keeps what it was asked."""

  def __init__(self, *script):
    self.script = deque(script)
    self.requests, self.headers = [], []
    self.in_flight = self.most_in_flight = 0

  async def answer(self, request):
    self.requests.append(await request.json())
    self.headers.append(request.headers)
    self.in_flight += 1
    self.most_in_flight = max(self.in_flight, self.most_in_flight)
    try:
      made = (self.script.popleft() if self.script else good)(request)
      return await made if asyncio.iscoroutine(made) else made
    finally:
      self.in_flight -= 1


def judged(server, use, **config):
  """Lets `use` have a judge whose endpoint is the server."""

  async def body():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    async with TestServer(app) as running:
      url = str(running.make_url("/v1/"))
      settings = {"backoff_s": 0.001, "timeout_s": 5.0} | config
      async with Judge(JudgeConfig(url, "judge-1", **settings)) as judge:
        return await use(judge)

  return asyncio.run(body())


def grade(server, outcome=OUTCOME, **config):
  return judged(server, lambda judge: judge.grade(outcome, RUBRIC), **config)


def test_what_is_asked(monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", "secret")
  server = Server()
  assert grade(server, key_variable="JUDGE_KEY", max_tokens=99) == EXPECTED
  (request,) = server.requests
  assert server.headers[0]["Authorization"] == "Bearer secret"
  assert request["model"] == "judge-1"
  assert (request["temperature"], request["max_tokens"]) == (0, 99)
  system, user = request["messages"]
  assert (system["role"], user["role"]) == ("system", "user")
  for text in (
    "- style: Does it fit in?",
    "- tone: Is it polite?",
    "Repair f.",
    "-  return 1\n+  return 2",
    "Last message:\nDone.",
  ):
    assert text in user["content"]
  server = Server()
  grade(server, key_variable="NO_SUCH_KEY")
  assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
  "failing",
  [
    status(500),
    status(503),
    status(408),
    status(429),
    cut_off,
    endless,
    lambda _: web.Response(text="<html>"),
    lambda _: web.json_response([]),
    lambda _: web.json_response({"choices": []}),
    lambda _: web.Response(text="[" * 100_000),
    lambda _: completion(None),
    lambda _: completion("Good work!"),
    lambda _: completion(json.dumps({"style": 8})),
    lambda _: completion(json.dumps(GRADES | {"tone": 11})),
  ],
)
def test_passing_failures_are_tried_again(failing):
  server = Server(failing, failing)
  assert grade(server) == EXPECTED
  assert len(server.requests) == 3


def test_a_server_that_stalls():
  server = Server(stall, stall)
  began = time.monotonic()
  assert grade(server, timeout_s=0.2) == EXPECTED
  assert 0.4 <= time.monotonic() - began < 5
  server = Server(stall, stall)
  with pytest.raises(InfrastructureError, match=r"in 2 attempts.*TimeoutError"):
    grade(server, timeout_s=0.2, attempts=2)


def test_what_could_not_be_read_is_said():
  server = Server(lambda _: completion("Good work!"), status(500))
  assert grade(server) == EXPECTED
  first, second, third = (request["messages"] for request in server.requests)
  assert second[:2] == first
  assert second[2] == {"role": "assistant", "content": "Good work!"}
  assert "no JSON object" in second[3]["content"]
  assert third == second


def test_a_wait_that_the_server_asks_for_is_granted():
  server = Server(status(429, **{"Retry-After": "1"}))
  began = time.monotonic()
  assert grade(server) == EXPECTED
  assert time.monotonic() - began >= 1
  # A date is not understood, and no reason to fail.
  date = "Wed, 21 Oct 2015 07:28:00 GMT"
  assert grade(Server(status(503, **{"Retry-After": date}))) == EXPECTED


def test_waits_double_and_end():
  naps = []

  async def nap(seconds):
    if seconds:  # Others sleep for 0 seconds.
      naps.append(seconds)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("composer_jax.envs.judge.asyncio.sleep", nap)
    server = Server(*[status(429, **{"Retry-After": "9999"})])
    server.script.extend([status(500)] * 8)
    assert grade(server, attempts=10, backoff_s=1.0) == EXPECTED
  assert naps[0] == 60  # Of 9,999 asked for.
  for i, waited in enumerate(naps[1:], 1):
    assert min(2**i, 60) / 2 <= waited <= min(2**i, 60)
  assert len(naps) == 9


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(code):
  server = Server(status(code))
  with pytest.raises(InfrastructureError, match=f"status {code}: Not now"):
    grade(server)
  assert len(server.requests) == 1


def test_a_judge_that_is_down_is_no_grade_of_zero():
  async def use(judge):
    config = RewardConfig({"solved": 1.0, "style": 0.5}, rubric=RUBRIC)
    return await score(OUTCOME, config, judge)

  server = Server(*[status(500)] * 3)
  reward = judged(server, use, attempts=3)
  assert len(server.requests) == 3
  assert reward.failure.where == "judge"
  assert "status 500" in reward.failure.detail
  assert math.isnan(reward.total)
  reward = judged(Server(), use)
  assert reward.parts == {"solved": 1.0, "style": 0.8}
  assert reward.total == pytest.approx(1.4)


def test_nobody_listens():
  async def use():
    config = JudgeConfig(
      "http://127.0.0.1:9/v1", "m", attempts=2, backoff_s=0.001
    )
    async with Judge(config) as judge:
      await judge.grade(OUTCOME, RUBRIC)

  with pytest.raises(InfrastructureError, match="ClientConnectorError"):
    asyncio.run(use())


def test_grades_are_kept_on_disk(tmp_path):
  server = Server(status(500))
  cache = str(tmp_path / "a" / "b")
  assert grade(server, cache=cache) == EXPECTED
  assert len(server.requests) == 2
  # At another address, by another process: the same.
  other = Server()
  assert grade(other, cache=cache) == EXPECTED
  assert other.requests == []
  # Whatever the model is shown counts.
  later = Outcome(task="Repair f.", final_text="Done!", edits=OUTCOME.edits)
  grade(other, later, cache=cache)
  grade(other, cache=cache, max_tokens=7)
  assert len(other.requests) == 2
  assert len(list((tmp_path / "a" / "b").iterdir())) == 3


def test_failures_are_not_kept(tmp_path):
  server = Server(status(500), lambda _: completion("Good!"))
  with pytest.raises(InfrastructureError):
    grade(server, cache=str(tmp_path), attempts=2)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"\xff", b'{"style": 1}'])
def test_a_damaged_file_is_asked_for_again(tmp_path, damage, caplog):
  grade(Server(), cache=str(tmp_path))
  (path,) = tmp_path.iterdir()
  path.write_bytes(damage)
  server = Server()
  with caplog.at_level(logging.WARNING):
    assert grade(server, cache=str(tmp_path)) == EXPECTED
  assert "is damaged" in caplog.text
  assert len(server.requests) == 1
  assert json.loads(path.read_text()) == GRADES
  assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_can_not_be_written_costs_no_grade(tmp_path, caplog):
  async def use(judge):
    (tmp_path / "cache").rmdir()
    return await judge.grade(OUTCOME, RUBRIC)

  with caplog.at_level(logging.WARNING):
    grades = judged(Server(), use, cache=str(tmp_path / "cache"))
  assert grades == EXPECTED
  assert "could not be kept" in caplog.text


def test_so_many_requests_in_flight():
  async def slow(_):
    await asyncio.sleep(0.02)
    return good()

  async def use(judge):
    outcomes = [Outcome(final_text=str(i)) for i in range(12)]
    return await asyncio.gather(*(judge.grade(o, RUBRIC) for o in outcomes))

  server = Server(*[slow] * 12)
  assert judged(server, use, concurrency=3) == [EXPECTED] * 12
  assert server.most_in_flight == 3


def test_cancelling_ends_the_request():
  async def use(judge):
    task = asyncio.create_task(judge.grade(OUTCOME, RUBRIC))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await judge.grade(OUTCOME, RUBRIC)

  assert judged(Server(stall), use, concurrency=1) == EXPECTED


def test_a_judge_that_was_not_entered():
  judge = Judge(JudgeConfig("http://127.0.0.1:9/v1", "m"))
  with pytest.raises(RuntimeError, match="async with"):
    asyncio.run(judge.grade(OUTCOME, RUBRIC))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"base_url": "localhost:80"}, "must begin with http://"),
    ({"attempts": 0}, "attempts must be above 0"),
    ({"timeout_s": math.inf}, "timeout_s must be above 0"),
    ({"backoff_s": -1.0}, "backoff_s must be above 0"),
  ],
)
def test_config_refuses(fields, message):
  with pytest.raises(ValueError, match=message):
    JudgeConfig(**({"base_url": "http://x/v1", "model": "m"} | fields))
