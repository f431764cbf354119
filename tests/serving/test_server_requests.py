"""What the API refuses, and in which words."""

import pytest

from composer_jax.serving.api_request import (
  BadRequestError,
  chat_call,
  completion_call,
)
from composer_jax.serving.chat import Message, ToolCall

BASE = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def test_completion_defaults_and_everything():
  call = completion_call(BASE)
  assert (call.prompts, call.n, call.max_tokens) == (("x",), 1, 16)
  assert (call.temperature, call.top_p, call.seed) == (1.0, 1.0, None)
  assert not (call.stream or call.returns or call.stop)
  call = completion_call(
    {
      "model": "m",
      "prompt": [[1, 2], "x"],
      "max_tokens": 3,
      "n": 2,
      "temperature": 0,
      "top_p": 0.5,
      "top_k": -1,
      "seed": -1,
      "stop": "a",
      "stop_token_ids": [7],
      "stream": True,
      "stream_options": {"include_usage": True},
      "return_routes": True,
      "best_of": 1,
      "user": "me",
      "logit_bias": {},
      "suffix": None,
    }
  )
  assert call.prompts == ((1, 2), "x")
  assert (call.seed, call.top_k) == (2**32 - 1, 0)
  assert (call.stop, call.stop_token_ids) == (("a",), (7,))
  assert call.stream and call.include_usage
  assert call.returns == {"return_routes"}


@pytest.mark.parametrize(
  "prompt, ids, wanted",
  [
    ("", [1, 2], ((1, 2),)),
    (None, [1, 2], ((1, 2),)),
    ([3], None, ((3,),)),
    (["a", "b"], None, ("a", "b")),
    ("", None, ("",)),
  ],
)
def test_prompts(prompt, ids, wanted):
  body = {"model": "m", "prompt": prompt, "prompt_token_ids": ids}
  assert completion_call(body).prompts == wanted


def test_chat_messages_and_tools():
  function = {"name": "f", "arguments": '{"x": 1}'}
  tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
  call = chat_call(
    {
      "model": "m",
      "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "user", "content": "b", "name": "ignored"},
        {
          "role": "assistant",
          "content": None,
          "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
      ],
      "tools": [tool],
      "max_completion_tokens": 9,
      "logprobs": True,
      "top_logprobs": 2,
    }
  )
  assert call.messages == (
    Message("system", "aa"),
    Message("user", "b"),
    Message("assistant", "", (ToolCall("f", '{"x": 1}'),)),
    Message("tool", "c"),
  )
  assert (call.tools, call.max_tokens, call.logprobs) == ((tool,), 9, 2)
  assert chat_call(CHAT | {"tools": [tool], "tool_choice": "none"}).tools == ()
  assert chat_call(CHAT).max_tokens is None
  assert chat_call(CHAT | {"logprobs": True}).logprobs == 0


@pytest.mark.parametrize(
  "change, param, message",
  [
    ({"model": None}, "model", "model is missing"),
    ({"prompt": None}, "prompt", "must be a text, a list of token ids"),
    ({"prompt": []}, "prompt", "must be a text, a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt", "list of token ids"),
    ({"prompt": [[1.5]]}, "prompt", "list of token ids"),
    ({"prompt": [True]}, "prompt", "list of token ids"),
    ({"prompt": [2**31]}, "prompt", "list of token ids"),
    ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
    ({"prompt_token_ids": [1]}, "prompt", "both given"),
    (
      {"prompt": "", "prompt_token_ids": ["a"]},
      "prompt_token_ids",
      "list of token ids",
    ),
    ({"max_tokens": 0}, "max_tokens", "an integer of at least 1"),
    ({"max_tokens": True}, "max_tokens", "an integer of at least 1"),
    ({"n": "2"}, "n", "an integer of at least 1"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": float("nan")}, "temperature", "a number"),
    ({"temperature": 10**400}, "temperature", "a number"),
    ({"seed": 2**64}, "seed", "an integer"),
    ({"n": 10**4000}, "n", "an integer of at least 1"),
    ({"stream": 1}, "stream", "true or false"),
    ({"stop": ["a", ""]}, "stop", "none of them empty"),
    ({"stop": 5}, "stop", "a string or a list"),
    ({"stop": 0}, "stop", "a string or a list"),
    ({"stream_options": 0}, "stream_options", "include_usage only"),
    ({"stream_options": {"x": 1}}, "stream_options", "include_usage only"),
    ({"best_of": 3}, "best_of", "has no best_of: leave it out, or set it to 1"),
    ({"presence_penalty": 0.5}, "presence_penalty", "set it to 0"),
    ({"prompt_routes_from": -1}, "prompt_routes_from", "of at least 0"),
    ({"prompt_routes_from": 1}, "prompt_routes_from", "return_prompt_routes"),
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
    ({"xyzzy": 1}, "xyzzy", "There is no parameter 'xyzzy'"),
  ],
)
def test_refused_completions(change, param, message):
  with pytest.raises(BadRequestError, match=message) as caught:
    completion_call(BASE | change)
  assert caught.value.param == param


MESSAGES = "messages[0]"


@pytest.mark.parametrize(
  "change, param, message",
  [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": ["hi"]}, MESSAGES, "must be an object"),
    ({"messages": [{"role": "robot"}]}, MESSAGES, "has role 'robot'"),
    ({"messages": [{"role": "user"}]}, MESSAGES, "has no content"),
    (
      {"messages": [{"role": "user", "content": 0}]},
      MESSAGES,
      "must be a text",
    ),
    (
      {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
      MESSAGES,
      "tool_calls that aren't a list",
    ),
    (
      {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
      MESSAGES,
      "aren't text",
    ),
    (
      {"messages": [{"role": "user", "content": [["text"]]}]},
      MESSAGES,
      "aren't text",
    ),
    (
      {
        "messages": [
          {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}],
          }
        ]
      },
      MESSAGES,
      "a JSON object as text",
    ),
    ({"tools": [{"name": "f"}]}, "tools", "must be a list of"),
    ({"tools": "f"}, "tools", "must be a list of"),
    ({"tools": 0}, "tools", "must be a list of"),
    ({"tool_choice": "required"}, "tool_choice", "can't force a call"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"prompt": "x"}, "prompt", "There is no parameter 'prompt'"),
    (
      {"response_format": {"type": "json_object"}},
      "response_format",
      "has no response_format",
    ),
  ],
)
def test_refused_chats(change, param, message):
  with pytest.raises(BadRequestError, match=message) as caught:
    chat_call(CHAT | change)
  assert caught.value.param == param


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_refused_bodies(body):
  with pytest.raises(BadRequestError, match="must be a JSON object"):
    completion_call(body)
