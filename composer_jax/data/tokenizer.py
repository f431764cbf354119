"""A byte-level BPE of our own, or any Hugging Face `tokenizer.json`.

Adds three things to the `tokenizers` library: the few control tokens that
training needs, under whatever name a vocabulary gives them; the promise that
text never turns into a control token; and the number of bytes behind each
token, which makes losses comparable across vocabularies.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int32

# Names by which vocabularies know each control token; ours comes first.
_END = (
  "<|endoftext|>",
  "<|end_of_text|>",
  "<\uff5cend\u2581of\u2581sentence\uff5c>",
  "[EOS]",
  "<eos>",
  "</s>",
)
_PAD = (
  "<|pad|>",
  "<|padding|>",
  "<pad>",
  "[PAD]",
  "<\uff5c\u2581pad\u2581\uff5c>",
)
_FIM_PREFIX = (
  "<|fim_prefix|>",
  "<fim_prefix>",
  "<\uff5cfim\u2581begin\uff5c>",
  "\u2581<PRE>",
)
_FIM_MIDDLE = (
  "<|fim_middle|>",
  "<fim_middle>",
  "<\uff5cfim\u2581end\uff5c>",
  "\u2581<MID>",
)
_FIM_SUFFIX = (
  "<|fim_suffix|>",
  "<fim_suffix>",
  "<\uff5cfim\u2581hole\uff5c>",
  "\u2581<SUF>",
)
_CONTROL = (_END, _PAD, _FIM_PREFIX, _FIM_MIDDLE, _FIM_SUFFIX)
_OURS = [names[0] for names in _CONTROL]
MIN_VOCAB_SIZE = 256 + len(_OURS)


def _byte_of_character() -> dict[str, int]:
  """The character that a byte-level BPE writes for each byte, the other way.

  As GPT-2 has it (Radford et al. 2019): a byte that is printable in Latin-1
  stands for itself, the others for the characters from U+0100 on, in order.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in printable)
  table = {chr(byte): byte for byte in printable}
  return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
  """Text to token ids and back.

  For a byte-level BPE `decode(encode_batch([s])[0]) == s` for every string s.

  Attributes:
    vocab_size: ids lie in [0, vocab_size).
    end_id: ends a document and, as the first input, starts one.
    pad_id: fills rows; the end token where a vocabulary has no padding.
    fim_prefix_id: comes before a fill-in-the-middle prefix, or None.
    fim_middle_id: comes before the middle, or None.
    fim_suffix_id: comes before the suffix, or None.
  """

  def __init__(self, tokenizer_json: str):
    """Builds a tokenizer from the text of a `tokenizer.json`.

    Raises:
      ValueError: the text is not one, or has no end token.
    """
    try:
      spec = json.loads(tokenizer_json)
      added = {token["content"]: token for token in spec["added_tokens"]}
      for names in _CONTROL:
        for name in names:
          # Some vocabularies call these ordinary, and match them in text.
          if name in added:
            added[name]["special"] = True
      backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # The library raises no more specific one.
      raise ValueError(f"Not a tokenizer.json: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    # Special tokens spelled out in a text are text.
    backend.encode_special_tokens = True
    self._backend, self._spec, self._added = backend, spec, added

    end_id = self._find(_END)
    if end_id is None:
      raise ValueError(
        "The tokenizer has no token that ends a document: its added_tokens "
        f"need one of {', '.join(_END)}."
      )
    pad_id = self._find(_PAD)
    self.end_id: int = end_id
    self.pad_id: int = end_id if pad_id is None else pad_id
    self.fim_prefix_id: int | None = self._find(_FIM_PREFIX)
    self.fim_middle_id: int | None = self._find(_FIM_MIDDLE)
    self.fim_suffix_id: int | None = self._find(_FIM_SUFFIX)
    self.vocab_size: int = 1 + max(backend.get_vocab().values())

  @classmethod
  def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Learns a byte-level BPE.

    Args:
      texts: what to learn from; the same texts give the same tokenizer.
      vocab_size: tokens wanted, control tokens included; few texts give fewer.

    Raises:
      ValueError: `vocab_size` does not hold every byte.
    """
    if vocab_size < MIN_VOCAB_SIZE:
      raise ValueError(
        f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and "
        f"{len(_OURS)} control tokens), got {vocab_size}."
      )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size,
      initial_alphabet=byte_level.alphabet(),
      special_tokens=_OURS,
      show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return cls(backend.to_str())

  @classmethod
  def load(cls, path: str | Path) -> "Tokenizer":
    """Reads a `tokenizer.json`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: as the constructor, with the path.
    """
    path = Path(path).expanduser()
    if not path.is_file():
      raise FileNotFoundError(
        f"No tokenizer at {path}: give the path of a tokenizer.json."
      )
    try:
      return cls(path.read_text(encoding="utf-8"))
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error

  def save(self, path: str | Path) -> None:
    """Writes a `tokenizer.json`."""
    Path(path).write_text(self.to_json(), encoding="utf-8")

  def to_json(self) -> str:
    """The text of a `tokenizer.json`, which the constructor takes."""
    return json.dumps(self._spec, ensure_ascii=False, indent=1)

  def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
    """Token ids of each text; no control tokens are among them."""
    encodings = self._backend.encode_batch_fast(
      list(texts), add_special_tokens=False
    )
    return [np.array(encoding.ids, np.int32) for encoding in encodings]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of the ids, control tokens spelled out.

    Bytes that are not valid UTF-8 come out as U+FFFD.
    """
    return self._backend.decode(
      np.asarray(ids, np.int64).tolist(), skip_special_tokens=False
    )

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the `tokenizer.json`, whatever its layout, in hexadecimal."""
    text = json.dumps(self._spec, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

  @functools.cached_property
  def token_bytes(self) -> Int32[np.ndarray, " V"]:
    """Bytes of UTF-8 that each token stands for; 0 for special tokens.

    As exact as `spellings`.
    """
    counts = np.array([len(spelling) for spelling in self.spellings], np.int32)
    special = [t["id"] for t in self._added.values() if t["special"]]
    counts[special] = 0
    return counts

  @functools.cached_property
  def spellings(self) -> list[bytes]:
    """The bytes of UTF-8 that each token is decoded to, by id.

    Control tokens are spelled out; an id without a token has no bytes. A token
    may end within a character, which the next ones complete.

    Exact for byte-level BPE. For others, what the token's own spelling says:
    one byte for a `<0x0A>`, a space for a `\u2581`; a normaliser that changes
    text before it is split is not seen.
    """
    byte_level = "ByteLevel" in json.dumps(self._spec.get("decoder"))
    spellings = [b""] * self.vocab_size
    for token, index in self._backend.get_vocab().items():
      if byte_level and all(char in _BYTE_OF for char in token):
        spellings[index] = bytes(_BYTE_OF[char] for char in token)
      elif byte_level or token in self._added:
        spellings[index] = token.encode()
      elif re.fullmatch("<0x[0-9A-F]{2}>", token):
        spellings[index] = bytes.fromhex(token[3:5])
      else:
        spellings[index] = token.replace("\u2581", " ").encode()
    return spellings

  def token_id(self, name: str) -> int | None:
    """The id of a control token by its name; None if there is none such."""
    token = self._added.get(name)
    return token["id"] if token and token["special"] else None

  def _find(self, names: Sequence[str]) -> int | None:
    found = [self._added[name]["id"] for name in names if name in self._added]
    return found[0] if found else None
