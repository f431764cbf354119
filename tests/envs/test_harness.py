"""Rollouts by scripted policies: what is said, counted, kept for training."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from composer_jax.data import Tokenizer
from composer_jax.envs import harness
from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.harness import Budget
from composer_jax.envs.sandbox import SandboxError
from composer_jax.envs.tools import Toolbox
from composer_jax.serving.chat import HermesFormat, Message, ToolCall
from composer_jax.serving.dialect import ChatDialect

pytestmark = pytest.mark.sandbox


def make_tokenizer():
  plain = Tokenizer.train(["def f(x):\n  return x\n"] * 3, 300)
  spec = json.loads(json.dumps(plain._spec))
  for i, name in enumerate(("<|im_start|>", "<|im_end|>")):
    token = dict(spec["added_tokens"][0])
    token |= {"id": plain.vocab_size + i, "content": name}
    spec["added_tokens"].append(token)
  return Tokenizer(json.dumps(spec))


TOKENIZER = make_tokenizer()
CHAT = HermesFormat(TOKENIZER)
DIALECT = ChatDialect(CHAT, TOKENIZER.spellings)
END = TOKENIZER.token_id("<|im_end|>")


@dataclasses.dataclass
class Scripted:
  token_ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  routes: np.ndarray


def policy(*replies):
  """Says the replies, byte by byte: no tokeniser would split text so."""
  left = iter(replies)
  prompts = []

  async def sample(prompt, max_tokens):
    prompts.append(prompt)
    ids = [TOKENIZER.spellings.index(bytes([b])) for b in next(left).encode()]
    ids = [*ids, END][:max_tokens]
    count = len(ids)
    return Scripted(
      np.array(ids, np.int32),
      -np.arange(1, count + 1, dtype=np.float32) / count,
      np.full(count, len(prompts), np.int64),
      np.zeros((count, 1, 1), np.uint8),
    )

  sample.prompts = prompts
  return sample


def call(name, **arguments):
  body = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{body}\n</tool_call>"


def rollout(
  sampler, files=(), toolbox=None, budget=None, after=None, **options
):
  async def body():
    async with await Bubblewrap(LIMITS).create() as sandbox:
      for path, text in dict(files).items():
        await sandbox.write(path, text.encode())
      transcript = await harness.run(
        *(sampler, DIALECT, sandbox, toolbox or Toolbox(), "Do it.", budget),
        **options,
      )
      return transcript, await after(sandbox) if after else None

  return asyncio.run(body())


def results(transcript):
  text = TOKENIZER.decode(transcript.token_ids)
  opened = text.split("<tool_response>\n")[1:]
  return [part.split("\n</tool_response>")[0] for part in opened]


def test_a_bug_is_found_and_repaired():
  sampler = policy(
    "I look. " + call("list_files") + call("read_file", path="f.py"),
    call("search", pattern="x . 1"),
    call("run_tests"),
    call("edit_file", path="f.py", old="x - 1", new="x + 1"),
    call("run_tests"),
    call("run_command", command="echo $((6 * 7)) >&2; exit 3"),
    call("write_file", path="new/g.py", content="y\n"),
    call("finish", message="Done."),
  )
  files = {"f.py": "def f(x):\n  return x - 1\n"}
  test = ["python", "-c", "from f import f; assert f(1) == 2"]
  transcript, fixed = rollout(
    sampler, files, Toolbox(test), after=lambda s: s.read("f.py")
  )
  assert fixed == b"def f(x):\n  return x + 1\n"
  seen = results(transcript)
  assert seen[0] == "f.py"
  assert seen[1] == "def f(x):\n  return x - 1"
  assert seen[2] == "f.py:2:  return x - 1"
  assert seen[3].startswith("Failed.\nTraceback")
  assert seen[4] == "Edited f.py."
  assert seen[5] == "Passed.\n(exit code 0)"
  assert seen[6] == "42\n(exit code 3)"
  assert seen[7] == "Wrote new/g.py."
  assert (transcript.stop_reason, transcript.final_text) == ("finish", "Done.")
  assert (transcript.turns, transcript.calls, transcript.bad_calls) == (8, 9, 0)


def test_what_was_sampled_is_what_is_trained_on():
  sampler = policy(call("list_files"), "All done.")
  transcript, _ = rollout(sampler)
  assert transcript.stop_reason == "answer"
  ids = transcript.token_ids
  covered = np.zeros(len(ids), bool)
  for turn, (start, sample) in enumerate(transcript.samples):
    place = slice(start, start + len(sample.token_ids))
    np.testing.assert_array_equal(ids[place], sample.token_ids)
    np.testing.assert_array_equal(transcript.logprobs[place], sample.logprobs)
    assert (transcript.versions[place] == turn + 1).all()
    # The sampler saw exactly what comes before, of which a prefix cache lives.
    assert sampler.prompts[turn] == ids[:start].tolist()
    assert sample.routes.shape[0] == len(sample.token_ids)
    covered[place] = True
  np.testing.assert_array_equal(transcript.loss_mask, covered)
  assert (transcript.versions[~covered] == -1).all()
  assert (transcript.logprobs[~covered] == 0).all()


def test_the_server_would_render_the_same_conversation():
  toolbox = Toolbox()
  said = "Look:\n" + call("list_files")
  reply = TOKENIZER.encode_batch([said])[0].tolist()
  begun = DIALECT.begin("S", "P", toolbox.schemas)
  messages = [
    Message("system", "S"),
    Message("user", "P"),
    Message("assistant", "Look:", (ToolCall("list_files", "{}"),)),
    Message("tool", "a.py"),
    Message("tool", "b.py"),
  ]
  wanted = CHAT.prompt(messages, toolbox.schemas)
  for ended in ([END], []):
    sampled = [*reply, *ended]
    more = DIALECT.extend(sampled, ["a.py", "b.py"])
    # "assistant\n" and the reply are tokenised apart in one, together in the
    # other, so texts are compared; between them every marker counts.
    assert TOKENIZER.decode(begun + sampled + more) == TOKENIZER.decode(wanted)
    assert (begun + sampled + more).count(END) == wanted.count(END)
  assert DIALECT.parse(reply) == ("Look:", [("list_files", "{}")])


BAD = {
  call("read_fil", path="f"): "no tool 'read_fil'. Did you mean 'read_file'",
  call("read_file"): "read_file needs 'path'",
  call("read_file", pth="f"): "no argument of read_file 'pth'. Did you mean",
  call("read_file", path=3): "'path' of read_file must be a JSON string",
  call("read_file", path="none"): "No such file",
  call("read_file", path="f", first_line=9): "which has 3",
  call("read_file", path="b"): "not a text in UTF-8",
  call("read_file", path="a\0b"): "NUL",
  call("search", pattern="("): "Unmatched",
  call("edit_file", path="f", old="", new="x"): "'old' is empty",
  call("edit_file", path="f", old="onn", new="x"): "The nearest line there is",
  call("edit_file", path="f", old="o", new="x"): "contains 'old' 2 times",
  call("write_file", path="/usr/x", content="x"): "Read-only",
  "<tool_call>{'name': 'finish'}</tool_call>": "must be one JSON object",
  "<tool_call>": "must be one JSON object",
}


def test_bad_calls_get_an_answer_that_helps():
  async def write_bytes(sandbox):
    await sandbox.write("b", b"\xff")

  async def body():
    async with await Bubblewrap(LIMITS).create() as sandbox:
      await write_bytes(sandbox)
      await sandbox.write("f", b"one\ntwo\nthree\n")
      return await harness.run(
        policy(*BAD, "I give up."), DIALECT, sandbox, Toolbox(), "Do it."
      )

  transcript = asyncio.run(body())
  seen = results(transcript)
  for reply, wanted, got in zip(BAD, BAD.values(), seen, strict=True):
    assert got.startswith("Error: "), reply
    assert wanted in got, reply
  assert transcript.bad_calls == len(BAD)


def test_budgets_end_a_rollout():
  look = call("list_files")
  for budget, reason, turns in (
    (Budget(turns=2), "turns", 2),
    (Budget(wall_s=1e-9), "time", 0),
  ):
    transcript, _ = rollout(policy(look, look, look), budget=budget)
    assert (transcript.stop_reason, transcript.turns) == (reason, turns)
  start = len(DIALECT.begin(harness.SYSTEM, "Do it.", Toolbox().schemas))
  budget = Budget(tokens=start + 20)
  transcript, _ = rollout(policy("x" * 100), budget=budget)
  assert transcript.stop_reason == "tokens"
  assert len(transcript.token_ids) == start + 20
  with pytest.raises(ValueError, match=r"raise Budget\.tokens"):
    rollout(policy(), budget=Budget(tokens=start))
  with pytest.raises(ValueError, match="turns=0 must be above 0"):
    Budget(turns=0)


def test_a_refused_call_is_an_observation():
  asked = []

  async def approve(tool, arguments):
    asked.append((tool.name, arguments, tool.reads_only))
    return None if tool.reads_only else "The user said no."

  seen = []
  sampler = policy(
    call("list_files"),
    call("write_file", path="f", content="new"),
    call("write_file", path="f"),
    "<tool_call>?</tool_call>",
    call("finish", message="ok"),
  )
  transcript, file = rollout(
    sampler,
    {"f": "old"},
    Toolbox(approve=approve),
    after=lambda s: s.read("f"),
    watch=lambda *event: seen.append(event),
  )
  assert file == b"old"
  # A call that can't be carried out is not asked about.
  assert asked == [
    ("list_files", {}, True),
    ("write_file", {"path": "f", "content": "new"}, False),
    ("finish", {"message": "ok"}, True),
  ]
  listed, refused, lacking, unread = results(transcript)
  assert (listed, refused) == ("f", "Error: The user said no.")
  assert transcript.bad_calls == 3
  replies = ["", "", "", "<tool_call>?</tool_call>", ""]
  said = [
    [("result", text)] for text in (listed, refused, lacking, unread, "ok")
  ]
  called = [
    [("call", "list_files {}")],
    [("call", 'write_file {"path": "f", "content": "new"}')],
    [("call", 'write_file {"path": "f"}')],
    [],
    [("call", 'finish {"message": "ok"}')],
  ]
  wanted = []
  for reply, calls, texts in zip(replies, called, said, strict=True):
    wanted += [("reply", reply), *calls, *texts]
  assert seen == wanted


@pytest.mark.parametrize("path", ["-delete", "!", "(", "sub", "./sub", "."])
def test_a_path_is_never_an_option_of_find(path):
  transcript, file = rollout(
    policy(call("list_files", path=path), "ok"),
    {"sub/f": "x"},
    after=lambda s: s.read("sub/f"),
  )
  assert file == b"x"
  (seen,) = results(transcript)
  if path in ("-delete", "!", "("):
    assert "No such file" in seen
  else:
    assert seen == ("sub/f" if path == "." else "f")


def test_long_results_and_replies_are_cut():
  sampler = policy(call("run_command", command="seq 9999"), "z" * 99, "ok")
  budget = Budget(turn_tokens=95, observation_chars=100)
  transcript, _ = rollout(sampler, budget=budget)
  long, cut = results(transcript)
  assert long.startswith("1\n2\n") and long.endswith("(exit code 0)")
  assert "characters]" in long and len(long) < 150
  assert "cut off" in cut
  assert (transcript.bad_calls, transcript.stop_reason) == (1, "answer")


def test_a_sandbox_that_fails_is_no_failure_of_the_policy():
  async def body():
    async with await Bubblewrap(LIMITS).create() as sandbox:
      await sandbox.destroy()
      await harness.run(
        policy(call("list_files")), DIALECT, sandbox, Toolbox(), "Do it."
      )

  with pytest.raises(SandboxError):
    asyncio.run(body())
