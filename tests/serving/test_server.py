"""The server as OpenAI's own client sees it, before the real engine."""

import asyncio
import dataclasses
import json

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_rig import (
  ENGINE,
  NAME,
  make_engine,
  serving,
  tokenizer,
)

from composer_jax.data import Tokenizer
from composer_jax.serving import Request, SamplingParams
from composer_jax.serving.arrays import unpack
from composer_jax.serving.chat import HermesFormat, Message

# A prefix found in the cache would move the chunks, and with them last bits.
ALONE = dataclasses.replace(ENGINE, prefix_sharing=False, max_waiting=64)
EVERYTHING = {
  "return_token_ids": True,
  "return_versions": True,
  "return_routes": True,
  "return_prompt_routes": True,
}
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def rig():
  with serving(ALONE, version=7) as rig:
    yield rig


@pytest.fixture(scope="module")
def engine():
  """The same weights, for what the server should have answered."""
  return make_engine(ALONE, version=7)


def create(rig, prompt=PROMPT, **keywords):
  keywords = {"model": NAME, "max_tokens": 12, "seed": 5} | keywords
  return rig.client.completions.create(prompt=prompt, **keywords)


def expected(engine, prompt=PROMPT, stop=(), **keywords):
  sampling = {"max_tokens": 12, "seed": 5, "stop": ((0,), *stop)} | keywords
  request = Request(prompt, SamplingParams(**sampling), True)
  return engine.generate([request])[0]


def joined(chunks):
  """The choices of a stream, put together field by field."""
  choices = {}
  for chunk in chunks:
    for choice in chunk.choices:
      whole = choices.setdefault(choice.index, {})
      for name, value in choice.model_dump(exclude_none=True).items():
        if isinstance(value, str | list) and name != "finish_reason":
          whole[name] = whole.get(name, type(value)()) + value
        elif name == "routes":
          whole.setdefault(name, []).append(unpack(value))
        elif name == "logprobs":
          logprobs = whole.setdefault(name, {})
          for key, column in value.items():
            logprobs[key] = logprobs.get(key, []) + column
        else:
          whole[name] = value
  return choices


def test_models(rig):
  (model,) = rig.client.models.list().data
  assert (model.id, model.max_model_len) == (NAME, ENGINE.max_len)
  assert rig.client.models.retrieve(NAME).id == NAME


def test_the_tokenizer_for_clients_that_speak_in_token_ids(rig):
  status, _, text = rig.request("GET", "/tokenizer.json")
  assert status == 200
  assert Tokenizer(text.decode()).digest == tokenizer().digest


@pytest.mark.parametrize(
  "sampling",
  [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 3}],
)
def test_token_in_token_out_is_the_engine_s(rig, engine, sampling):
  extra = {k: v for k, v in sampling.items() if k == "top_k"} | EVERYTHING
  plain = {k: v for k, v in sampling.items() if k != "top_k"}
  wanted = expected(engine, top_logprobs=2, **sampling)
  answer = create(rig, extra_body=extra, logprobs=2, **plain)
  (choice,) = answer.choices
  assert choice.prompt_token_ids == PROMPT
  assert choice.token_ids == wanted.token_ids.tolist()
  assert choice.sampled_logprobs == wanted.logprobs.tolist()
  assert choice.logprobs.token_logprobs == wanted.model_logprobs.tolist()
  assert choice.versions == [7] * len(wanted.token_ids)
  assert choice.stale_cache == [False] * len(wanted.token_ids)
  assert choice.seed == 5
  for name in ("routes", "prompt_routes"):
    routes, theirs = unpack(getattr(choice, name)), getattr(wanted, name)
    assert routes.dtype == theirs.dtype
    np.testing.assert_array_equal(routes, theirs)
  assert choice.text == tokenizer().decode(
    [t for t in choice.token_ids if t not in (0, *range(280, 300))]
  )
  spelled = [s.decode("utf-8", "replace") for s in tokenizer().spellings]
  for token, top, theirs in zip(
    choice.logprobs.tokens,
    choice.logprobs.top_logprobs,
    wanted.top,
    strict=True,
  ):
    assert token.startswith("bytes:") or token in [*spelled, ""]
    assert list(top.values()) == [logprob for _, logprob in theirs]
  assert answer.usage.prompt_tokens == len(PROMPT)
  assert answer.usage.completion_tokens == len(wanted.token_ids)
  assert answer.system_fingerprint == "weights-7"


@pytest.mark.parametrize("first", [1, 17, len(PROMPT) - 1])
def test_routes_of_the_rest_of_a_prompt(rig, engine, first):
  wanted = expected(engine).prompt_routes[first:]
  extra = EVERYTHING | {"prompt_routes_from": first}
  (choice,) = create(rig, extra_body=extra).choices
  np.testing.assert_array_equal(unpack(choice.prompt_routes), wanted)
  chunks = list(create(rig, extra_body=extra, stream=True))
  routes = joined(chunks)[0]["prompt_routes"]
  np.testing.assert_array_equal(unpack(routes), wanted)


def test_no_routes_from_beyond_a_prompt(rig):
  extra = EVERYTHING | {"prompt_routes_from": len(PROMPT)}
  with pytest.raises(openai.BadRequestError, match="beyond a prompt of 30"):
    create(rig, extra_body=extra)


def test_the_same_in_a_stream(rig, engine):
  wanted = expected(engine, top_logprobs=1)
  chunks = list(
    create(
      rig,
      stream=True,
      logprobs=1,
      stream_options={"include_usage": True},
      extra_body=EVERYTHING,
    )
  )
  whole = create(rig, logprobs=1, extra_body=EVERYTHING).choices[0]
  choice = joined(chunks)[0]
  assert choice["token_ids"] == wanted.token_ids.tolist()
  assert choice["sampled_logprobs"] == wanted.logprobs.tolist()
  assert choice["versions"] == wanted.versions.tolist()
  np.testing.assert_array_equal(np.concatenate(choice["routes"]), wanted.routes)
  np.testing.assert_array_equal(
    unpack(choice["prompt_routes"]), wanted.prompt_routes
  )
  assert choice["prompt_token_ids"] == PROMPT
  assert choice["text"] == whole.text
  assert choice["logprobs"] == whole.logprobs.model_dump()
  assert choice["finish_reason"] == "length"
  assert chunks[-1].choices == []
  assert chunks[-1].usage.completion_tokens == 12


def test_several_prompts_and_choices(rig, engine):
  answer = create(
    rig, [PROMPT, [9, 8, 7]], n=2, extra_body={"return_token_ids": True}
  )
  assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
  for i, choice in enumerate(answer.choices):
    prompt = [PROMPT, [9, 8, 7]][i // 2]
    wanted = expected(engine, prompt, seed=5 + i)
    assert choice.token_ids == wanted.token_ids.tolist()
  assert answer.usage.prompt_tokens == len(PROMPT) + 3
  chunks = create(rig, [PROMPT, [9, 8, 7]], n=2, stream=True)
  texts = {i: choice["text"] for i, choice in joined(chunks).items()}
  assert texts == {c.index: c.text for c in answer.choices}


def test_cached_tokens_are_the_first_choice_s_whichever_ends_first(engine):
  prompt = [31, 41, 59] * 20
  first, second = engine.generate(
    [Request(prompt, SamplingParams(100, seed=seed)) for seed in (7, 8)]
  )
  (stop, *_) = [t for t in second.token_ids if t not in first.token_ids]
  with serving() as rig:
    *_, last = rig.client.completions.create(
      model=NAME,
      prompt=prompt,
      n=2,
      seed=7,
      max_tokens=100,
      stream=True,
      stream_options={"include_usage": True},
      extra_body={"stop_token_ids": [int(stop)], "ignore_eos": True},
    )
  assert last.usage.completion_tokens < 200
  # The second choice's were 48, and it ended first.
  assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_a_text_starts_a_document(rig):
  answer = create(rig, "def f(", extra_body={"return_token_ids": True})
  (ids,) = tokenizer().encode_batch(["def f("])
  assert answer.choices[0].prompt_token_ids == [0, *ids.tolist()]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_text_and_tokens(rig, engine, stream):
  wanted = expected(engine, max_tokens=40)
  text = create(rig, max_tokens=40).choices[0].text
  stop = text[7:9]
  extra = {"return_token_ids": True, "return_prompt_routes": True}
  got = create(rig, max_tokens=40, stop=[stop], stream=stream, extra_body=extra)
  choice = joined(got)[0] if stream else got.choices[0].model_dump()
  assert choice["text"] == text[: text.index(stop)]
  assert choice["finish_reason"] == "stop"
  # Exactly the tokens up to the one that completes the stop string.
  count = len(choice["token_ids"])
  assert choice["token_ids"] == wanted.token_ids[:count].tolist()
  spelled = tokenizer().spellings + [b""] * 20
  upto = [b"".join(spelled[t] for t in wanted.token_ids[:n]) for n in range(41)]
  assert stop in upto[count].decode("utf-8", "replace")
  assert stop not in upto[count - 1].decode("utf-8", "replace")
  np.testing.assert_array_equal(
    unpack(choice["prompt_routes"]), wanted.prompt_routes
  )
  if not stream:
    assert got.usage.completion_tokens == count


def test_stop_tokens_end_it_without_text(rig, engine):
  wanted = expected(engine)
  end = int(wanted.token_ids[4])
  first = wanted.token_ids.tolist().index(end)
  extra = {"stop_token_ids": [end], "return_token_ids": True}
  (choice,) = create(rig, extra_body=extra).choices
  assert choice.token_ids == wanted.token_ids[: first + 1].tolist()
  assert choice.finish_reason == "stop"
  kept = wanted.token_ids[:first].tolist()
  assert choice.text == tokenizer().decode([t for t in kept if t < 280])


def test_chat(rig, engine):
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
  ]
  chat = HermesFormat(tokenizer())
  ids = chat.prompt(
    [Message("system", "Be brief."), Message("user", "Why?")], []
  )
  wanted = expected(engine, ids, top_logprobs=2)
  keywords = {
    "model": NAME,
    "messages": messages,
    "seed": 5,
    "max_completion_tokens": 12,
    "logprobs": True,
    "top_logprobs": 2,
    "extra_body": EVERYTHING,
  }
  answer = rig.client.chat.completions.create(**keywords)
  (choice,) = answer.choices
  assert choice.message.role == "assistant"
  assert choice.prompt_token_ids == ids
  assert choice.token_ids == wanted.token_ids.tolist()
  content = choice.logprobs.content
  assert [t.logprob for t in content] == wanted.model_logprobs.tolist()
  spelled = tokenizer().spellings + [b""] * 20
  assert [bytes(t.bytes) for t in content] == [
    spelled[t] for t in wanted.token_ids
  ]
  assert [len(t.top_logprobs) for t in content] == [2] * 12
  chunks = list(rig.client.chat.completions.create(**keywords, stream=True))
  assert chunks[0].choices[0].delta.role == "assistant"
  deltas = [chunk.choices[0].delta for chunk in chunks]
  assert "".join(d.content or "" for d in deltas) == choice.message.content
  assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_max_tokens_may_fill_its_context(rig):
  answer = rig.client.chat.completions.create(
    model=NAME,
    messages=[{"role": "user", "content": "x" * 900}],
    seed=1,
    extra_body={"ignore_eos": True},
  )
  assert answer.choices[0].finish_reason == "length"
  assert answer.usage.total_tokens == ENGINE.max_len


class Scripted:
  """A tokenizer under whose spellings given tokens are a given text."""

  def __init__(self, ids, text):
    self.end_id = tokenizer().end_id
    self.encode_batch = tokenizer().encode_batch
    self.spellings = [b""] * 300
    size = -(-len(text) // len(ids))
    for i, token in enumerate(dict.fromkeys(ids)):
      self.spellings[token] = text.encode()[i * size : (i + 1) * size]


REPLY = """\
Two calls.
<tool_call>
{"name": "add", "arguments": {"x": 1, "y": "\u00e9"}}
</tool_call>
<tool_call>{"name": "now", "arguments": {}}</tool_call>"""


def test_tool_calls(rig, engine, monkeypatch):
  """The engine's tokens, spelled so that they call tools."""
  tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
  messages = [{"role": "user", "content": "Go."}]
  ids = HermesFormat(tokenizer()).prompt([Message("user", "Go.")], tools)
  hot = {"temperature": 5.0, "seed": 1, "max_tokens": 40}
  sampled = expected(engine, ids, **hot).token_ids.tolist()
  # Up to the first that comes twice; the next one ends the reply.
  count = next(n for n in range(1, 40) if sampled[n] in sampled[:n]) - 1
  assert count >= 8
  script = Scripted(sampled[:count], REPLY)
  monkeypatch.setattr(rig.server, "_tokenizer", script)
  keywords = {"model": NAME, "messages": messages, "tools": tools} | hot
  keywords["extra_body"] = {"stop_token_ids": [sampled[count]]}
  answer = rig.client.chat.completions.create(**keywords)
  (choice,) = answer.choices
  assert choice.finish_reason == "tool_calls"
  assert choice.message.content == "Two calls."
  first, second = choice.message.tool_calls
  assert first.function.name == "add"
  assert json.loads(first.function.arguments) == {"x": 1, "y": "\u00e9"}
  assert second.function.name == "now"
  assert first.id != second.id
  chunks = list(rig.client.chat.completions.create(**keywords, stream=True))
  deltas = [chunk.choices[0].delta for chunk in chunks]
  assert "".join(d.content or "" for d in deltas) == "Two calls."
  calls = [c for d in deltas for c in d.tool_calls or []]
  assert [(c.index, c.function.name) for c in calls] == [(0, "add"), (1, "now")]
  assert chunks[-1].choices[0].finish_reason == "tool_calls"
  # And back: the calls and their results make the next prompt.
  messages += [
    choice.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": first.id, "content": "2"},
  ]
  again = rig.client.chat.completions.create(**keywords)
  assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_errors_are_openai_s(rig):
  with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
    create(rig, model="other")
  with pytest.raises(openai.BadRequestError) as caught:
    create(rig, max_tokens=ENGINE.max_len)
  assert caught.value.code == "context_length_exceeded"
  assert caught.value.param == "prompt"
  for keywords, message in (
    ({"temperature": -1}, "temperature=-1.0 must be 0, or"),
    ({"prompt": [300]}, "300 isn't in the vocabulary of 300"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"logprobs": 9}, "max_top_logprobs=5"),
    ({"n": 100}, "100 completions are more than this server gives at once"),
    ({"extra_body": {"temprature": 1}}, "Did you mean 'temperature'"),
  ):
    for stream in (False, True):
      with pytest.raises(openai.BadRequestError, match=message):
        create(rig, stream=stream, **keywords)
  status, body = rig.json("POST", "/v1/completions", b"{")
  assert (status, body["error"]["type"]) == (400, "invalid_request_error")
  assert "isn't JSON" in body["error"]["message"]
  status, body = rig.json("POST", "/v1/completions", b"[" * 100_000)
  assert status == 400
  assert rig.json("GET", "/v2")[0] == 404
  status, headers, _ = rig.request("GET", "/v1/completions")
  assert (status, headers["Allow"]) == (405, "POST")


def test_metrics_are_prometheus_s(rig):
  create(rig)
  status, headers, body = rig.request("GET", "/metrics")
  assert (status, headers["Content-Type"][:10]) == (200, "text/plain")
  samples = {
    (sample.name, *sample.labels.values()): sample.value
    for family in text_string_to_metric_families(body.decode())
    for sample in family.samples
  }
  assert samples["composer_engine_version",] == 7
  assert samples["composer_engine_sampled_tokens_total",] == (
    rig.engine.stats().sampled_tokens
  )
  assert samples["composer_http_requests_total", "/v1/completions", "200"] >= 1
  assert samples["composer_first_token_seconds_count",] >= 1


def test_health(rig):
  assert rig.json("GET", "/health") == (200, {"status": "ok", "version": 7})


def test_many_at_once_each_get_their_own(rig, engine):
  """More than there are rows, streamed and not, each as if it were alone."""
  prompts = [[20 + i] * (1 + i % 7) for i in range(24)]
  wanted = [expected(engine, prompt) for prompt in prompts]

  async def one(client, i):
    extra = {"return_token_ids": True}
    answer = await client.completions.create(
      model=NAME,
      prompt=prompts[i],
      max_tokens=12,
      seed=5,
      stream=i % 2 == 0,
      extra_body=extra,
    )
    if i % 2:
      return answer.choices[0].token_ids
    return joined([chunk async for chunk in answer])[0]["token_ids"]

  async def everyone():
    async with rig.async_client() as client:
      return await asyncio.gather(*(one(client, i) for i in range(24)))

  got = asyncio.run(everyone())
  assert got == [completion.token_ids.tolist() for completion in wanted]
