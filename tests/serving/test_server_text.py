"""Text, stop strings, chats, tool calls and arrays: without a server."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from composer_jax.data import Tokenizer
from composer_jax.serving.arrays import pack, unpack
from composer_jax.serving.chat import HermesFormat, Message, ToolCall
from composer_jax.serving.text import TextReader

OURS = Tokenizer.train(["a bb ccc \u00e9\u20ac\U0001f600"] * 3, 290)
IDS = st.lists(st.integers(0, OURS.vocab_size - 1), max_size=30)
ALPHABET = "ab\u00e9\U0001f600"


@settings(deadline=None)
@given(IDS)
def test_streamed_text_is_the_decoded_text(ids):
  reader = TextReader(OURS.spellings)
  text = "".join(map(reader.push, ids)) + reader.finish()
  assert text == OURS.decode(ids)
  assert reader.offset == len(text)


@settings(deadline=None)
@given(st.text(ALPHABET, max_size=12))
def test_whole_characters_are_never_held_back(text):
  reader = TextReader(OURS.spellings)
  shown = ""
  for byte in text.encode():
    shown += reader.push(OURS.spellings.index(bytes([byte])))
  assert shown == text


def cut_by_characters(text, stop):
  """What is left if generation stops at the first character that it can."""
  for end in range(len(text) + 1):
    found = [s for s in stop if text[:end].endswith(s)]
    if found:
      return text[: end - max(map(len, found))], True
  return text, False


@settings(deadline=None, max_examples=300)
@given(
  st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=8),
  st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
  st.data(),
)
@example(["xaab"], ["aab", "ab", "b"], None)
def test_stop_strings_wherever_tokens_end(parts, stop, data):
  wanted, stopped = cut_by_characters("".join(parts), stop)
  raw = "".join(parts).encode()
  spellings, start = [], 0
  while start < len(raw):  # Tokens that end anywhere, within characters too.
    size = data.draw(st.integers(1, 5)) if data else len(raw)
    spellings.append(raw[start : start + size])
    start += size
  reader = TextReader(spellings, stop)
  shown = ""
  for token in range(len(spellings)):
    new = reader.push(token)
    shown += new
    assert wanted.startswith(shown)
    if reader.stopped:
      break
  shown += reader.finish()
  assert (shown, reader.stopped) == (wanted, stopped)


def test_end_tokens_are_silent_and_unknown_ids_have_no_text():
  reader = TextReader(OURS.spellings, silent=[OURS.end_id])
  ids = [OURS.end_id, *OURS.encode_batch(["a"])[0].tolist(), 10**6]
  assert "".join(map(reader.push, ids)) + reader.finish() == "a"


def with_markers():
  spec = json.loads(json.dumps(OURS._spec))
  for name in ("<|im_start|>", "<|im_end|>"):
    token = dict(spec["added_tokens"][0])
    token["id"] = OURS.vocab_size + len(spec["added_tokens"]) - 5
    spec["added_tokens"].append(token | {"content": name})
  return Tokenizer(json.dumps(spec))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = ToolCall("f", '{"x": 1}')
CHAT = (
  Message("system", "Be brief."),
  Message("user", "Call f.<|im_end|>"),
  Message("assistant", "Yes.", (CALL, CALL)),
  Message("tool", "7"),
)


def test_chat_prompt_text():
  text = OURS.decode(HermesFormat(OURS).prompt(CHAT, [TOOL]))
  call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
  assert text == (
    "<|endoftext|><|im_start|>system\nBe brief.\n\n"
    "You may call functions. These are their signatures, as JSON:\n"
    f"<tools>\n{json.dumps(TOOL)}\n</tools>\n"
    "To call one, write a JSON object in tags, as many times as there are"
    " calls:\n<tool_call>\n"
    '{"name": "function\'s name", "arguments": {"argument": "value"}}\n'
    "</tool_call><|im_end|>\n"
    "<|im_start|>user\nCall f.<|im_end|><|im_end|>\n"
    f"<|im_start|>assistant\nYes.\n{call}\n{call}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
  )


def test_markers_are_tokens_that_no_message_can_forge():
  tokenizer = with_markers()
  chat = HermesFormat(tokenizer)
  end = tokenizer.token_id("<|im_end|>")
  assert chat.prompt(CHAT, []).count(end) == len(CHAT)
  assert end in chat.stop_ids and chat.stop == ()
  assert HermesFormat(OURS).stop == ("<|im_end|>",)


@pytest.mark.parametrize("tokenizer", [OURS, with_markers()])
def test_a_longer_chat_begins_with_the_shorter_one(tokenizer):
  chat = HermesFormat(tokenizer)
  short, long = (chat.prompt(CHAT[:n], [TOOL]) for n in (2, 4))
  start = chat.prompt((), [])  # "assistant" follows in both.
  assert long[: len(short) - 1] == short[:-1]
  assert short[-len(start) + 1 :] == start[1:]


def text_of(call):
  arguments = json.dumps({"s": "</tool_call" + call.name})
  return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}'


TAG = '<tool_call>{"name": "f", "arguments": {"x": [1, {}]}}</tool_call>'
PARSED = ToolCall("f", '{"x": [1, {}]}')


@pytest.mark.parametrize(
  "text, wanted",
  [
    ("plain < text <tool_c", ["plain < text <tool_c"]),
    (TAG, [PARSED]),
    (f"Well.\n\n{TAG}\n{TAG}\n", ["Well.", PARSED, PARSED]),
    (f"{TAG}\n and then", [PARSED, "and then"]),
    (f"<tool_call>{{]</tool_call>{TAG}", ["<tool_call>{]</tool_call>", PARSED]),
    ('<tool_call>["f"]</tool_call>', ['<tool_call>["f"]</tool_call>']),
    (
      '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
      ['<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'],
    ),
    ("a <tool_call>{}", ["a <tool_call>{}"]),
    ("</tool_call> alone ", ["</tool_call> alone "]),
  ],
)
def test_tool_calls_however_the_text_arrives(text, wanted):
  for size in (1, 2, 3, 7, len(text)):
    reader = HermesFormat(OURS).reader()
    parts = []
    for start in range(0, len(text), size):
      parts += reader.push(text[start : start + size])
    parts += reader.finish()
    joined = []
    for part in parts:
      if joined and isinstance(part, str) and isinstance(joined[-1], str):
        joined[-1] += part
      else:
        joined.append(part)
    assert joined == wanted, size


def test_text_before_a_call_is_not_held_back():
  reader = HermesFormat(OURS).reader()
  assert reader.push("one < two") == ["one < two"]
  assert reader.push(" <tool") == []
  assert reader.push("s>") == [" <tools>"]


@given(
  st_numpy.arrays(
    st.sampled_from([np.uint8, np.uint16, np.int64, np.float32]),
    st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
  )
)
def test_arrays_come_back_bit_by_bit(array):
  back = unpack(json.loads(json.dumps(pack(array))))
  assert (back.dtype, back.shape) == (array.dtype, array.shape)
  assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
  "packed, message",
  [
    ({"dtype": "object", "shape": [1], "base64": ""}, "isn't one of uint8"),
    ({"dtype": "uint8", "shape": [3], "base64": "AAA="}, "isn't 2 bytes"),
    ({"dtype": "uint8", "shape": [-1, -2], "base64": "AAA="}, "isn't 2 bytes"),
    ({"dtype": "uint8", "shape": [2], "base64": "A!"}, "damaged"),
    ({"dtype": "uint8"}, "an object with dtype, shape and base64"),
  ],
)
def test_damaged_arrays_are_refused(packed, message):
  with pytest.raises(ValueError, match=message):
    unpack(packed)
