import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_code import module

from composer_jax.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer

OURS = Tokenizer.train([module(i) for i in range(20)], 400)
CONTROL = [
  OURS.end_id,
  OURS.pad_id,
  OURS.fim_prefix_id,
  OURS.fim_middle_id,
  OURS.fim_suffix_id,
]
# Text with the spelling of control tokens in it.
TEXT = st.lists(
  st.one_of(
    st.text(max_size=20),
    st.sampled_from(["<|endoftext|>", "<|fim_middle|>", "\r\n", "\t", "def f"]),
  ),
  max_size=6,
).map("".join)


@settings(deadline=None)
@given(TEXT)
def test_round_trip_bytes_and_no_control_tokens(text):
  (ids,) = OURS.encode_batch([text])
  assert OURS.decode(ids) == text
  assert OURS.token_bytes[ids].sum() == len(text.encode())
  assert b"".join(OURS.spellings[i] for i in ids) == text.encode()
  assert not set(ids.tolist()) & set(CONTROL)


def test_control_tokens_are_distinct_and_stand_for_no_bytes():
  assert len(set(CONTROL)) == 5
  assert (OURS.token_bytes == 0).nonzero()[0].tolist() == sorted(CONTROL)
  assert OURS.decode([OURS.end_id]) == "<|endoftext|>"
  assert OURS.vocab_size == 400 == len(OURS.token_bytes)
  assert OURS.token_id("<|endoftext|>") == OURS.end_id
  assert OURS.token_id("def") is None


def test_save_and_load(tmp_path):
  OURS.save(tmp_path / "tokenizer.json")
  loaded = Tokenizer.load(tmp_path / "tokenizer.json")
  text = module(99)
  np.testing.assert_array_equal(
    loaded.encode_batch([text])[0], OURS.encode_batch([text])[0]
  )
  loaded.save(tmp_path / "again.json")
  first, second = tmp_path / "tokenizer.json", tmp_path / "again.json"
  assert first.read_bytes() == second.read_bytes()


def test_digest_is_of_the_content(tmp_path):
  path = tmp_path / "tokenizer.json"
  OURS.save(path)
  loaded = Tokenizer.load(path)
  assert loaded.digest == OURS.digest
  assert len(OURS.digest) == 64
  spec = json.loads(path.read_text("utf-8"))
  backwards = json.dumps(dict(reversed(spec.items())), indent=3)
  assert Tokenizer(backwards).digest == OURS.digest
  spec["model"]["merges"].pop()
  assert Tokenizer(json.dumps(spec)).digest != OURS.digest


def foreign(added, model=None, decoder=None) -> str:
  return json.dumps(
    {
      "version": "1.0",
      "truncation": None,
      "padding": None,
      "added_tokens": [
        {
          "id": index,
          "content": content,
          "single_word": False,
          "lstrip": False,
          "rstrip": False,
          "normalized": False,
          "special": special,
        }
        for index, content, special in added
      ],
      "normalizer": None,
      "pre_tokenizer": None,
      "post_processor": None,
      "decoder": decoder,
      "model": model
      or {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
  )


def test_foreign_control_tokens_never_come_from_text(tmp_path):
  # As some code models have it: the middle token is not marked as special.
  spec = json.loads(json.dumps(OURS._spec))
  for token in spec["added_tokens"]:
    token["special"] = "fim" not in token["content"]
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(spec), encoding="utf-8")
  plain = tokenizers.Tokenizer.from_file(str(path))
  text = "a<|fim_middle|>b"
  assert OURS.fim_middle_id in plain.encode(text).ids
  loaded = Tokenizer.load(path)
  (ids,) = loaded.encode_batch([text])
  assert loaded.fim_middle_id not in ids
  assert loaded.decode(ids) == text


def test_byte_fallback_vocabulary():
  vocab = {"<unk>": 0, "</s>": 1, "\u2581": 2, "ab": 3, "\u2581caf\u00e9": 4}
  vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
  text = foreign(
    [(1, "</s>", True)],
    {
      "type": "BPE",
      "vocab": vocab,
      "merges": [],
      "byte_fallback": True,
      "unk_token": "<unk>",
    },
    {"type": "ByteFallback"},
  )
  tokenizer = Tokenizer(text)
  assert tokenizer.token_bytes[:6].tolist() == [5, 0, 1, 2, 6, 1]
  spellings = [b"<unk>", b"</s>", b" ", b"ab", " caf\u00e9".encode(), b"\0"]
  assert tokenizer.spellings[:6] == spellings
  assert tokenizer.end_id == tokenizer.pad_id == 1
  assert tokenizer.fim_prefix_id is None
  (ids,) = tokenizer.encode_batch(["\n"])
  assert ids.tolist() == [5 + ord("\n")]


@pytest.mark.parametrize(
  "make, error, message",
  [
    (
      lambda: Tokenizer.train(["x"], MIN_VOCAB_SIZE - 1),
      ValueError,
      "vocab_size must be at least 261",
    ),
    (lambda: Tokenizer.load("/no/file"), FileNotFoundError, "No tokenizer at"),
    (lambda: Tokenizer("{}"), ValueError, "Not a tokenizer.json"),
    (
      lambda: Tokenizer(foreign([])),
      ValueError,
      "no token that ends a document",
    ),
  ],
)
def test_mistakes_are_explained(make, error, message):
  with pytest.raises(error, match=message) as raised:
    make()
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  "content, message",
  [
    (b"{", "Not a tokenizer.json: "),
    (b"\xff", "'utf-8' codec can't decode"),
    (foreign([]).encode(), "The tokenizer has no token that ends a document"),
  ],
)
def test_a_bad_file_is_named(content, message, tmp_path):
  path = tmp_path / "t.json"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
    Tokenizer.load(path)


def test_smallest_vocabulary_is_bytes():
  tokenizer = Tokenizer.train(["aaaa"], MIN_VOCAB_SIZE)
  assert len(tokenizer.encode_batch(["aaaa"])[0]) == 4
