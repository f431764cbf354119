"""Fill in the middle: a document cut in three and put in another order.

After Bavarian et al. 2022 (https://arxiv.org/abs/2207.14255): two uniform cuts
between characters, then with equal chance one of

  PSM  <prefix> prefix <suffix> suffix <middle> middle
  SPM  <prefix> <suffix> suffix <middle> prefix middle   (their variant 2)

so that a left-to-right model learns to write the middle from both sides, and
the end token says where it joins the suffix. A document that does not fit in a
row is cut first and each piece rearranged on its own (their "context level"):
otherwise the row would hold a middle without its sides.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from composer_jax.data.tokenizer import Tokenizer

Ids = Int32[np.ndarray, " _"]

# Cutting a text inside a token makes a few tokens more.
_SLACK = 8


@dataclasses.dataclass(frozen=True)
class Sentinels:
  """The ids of the three control tokens, each written before its part."""

  prefix: int
  middle: int
  suffix: int

  @classmethod
  def of(cls, tokenizer: Tokenizer) -> "Sentinels":
    """Those of a tokenizer.

    Raises:
      ValueError: it has none.
    """
    ids = (
      tokenizer.fim_prefix_id,
      tokenizer.fim_middle_id,
      tokenizer.fim_suffix_id,
    )
    if None in ids:
      raise ValueError(
        "The tokenizer has no fill-in-the-middle tokens: set fim_fraction=0."
      )
    return cls(*ids)


def arrange(
  prefix: Ids, middle: Ids, suffix: Ids, sentinels: Sentinels, *, spm: bool
) -> Ids:
  """Joins the three parts in the order that the model reads them."""
  marks = np.array([sentinels.prefix, sentinels.suffix, sentinels.middle])
  pre, suf, mid = marks.astype(np.int32)[:, None]
  if spm:
    return np.concatenate([pre, suf, suffix, mid, prefix, middle])
  return np.concatenate([pre, prefix, suf, suffix, mid, middle])


def restore(ids: Ids, sentinels: Sentinels) -> Ids:
  """The inverse of `arrange`: prefix, middle and suffix in a row."""
  suf = int(np.flatnonzero(ids == sentinels.suffix)[0])
  mid = int(np.flatnonzero(ids == sentinels.middle)[0])
  prefix, suffix, middle = ids[1:suf], ids[suf + 1 : mid], ids[mid + 1 :]
  return np.concatenate([prefix, middle, suffix])


def rearrange(
  documents: Sequence[Ids],
  seeds: Sequence[Sequence[int]],
  tokenizer: Tokenizer,
  max_tokens: int,
) -> list[list[Ids]]:
  """Rearranges documents, in pieces of at most `max_tokens` with sentinels.

  Args:
    documents: token ids of each.
    seeds: of each document's cuts.
    tokenizer: with fill-in-the-middle tokens.
    max_tokens: longest piece, at least 12.

  Returns:
    The pieces of each document, in order.

  Raises:
    ValueError: the tokenizer has no such tokens.
  """
  sentinels = Sentinels.of(tokenizer)
  step = max_tokens - 3 - _SLACK
  parts, texts, modes = [], [], []
  for ids, seed in zip(documents, seeds, strict=True):
    rng = np.random.default_rng(seed)
    for start in range(0, len(ids), step):
      piece = ids[start : start + step]
      parts.append(_cut(piece, rng))
      texts.extend(_cut(tokenizer.decode(piece), rng))
      modes.append(bool(rng.integers(2)))
  encoded = tokenizer.encode_batch(texts)

  pieces = []
  for index, (by_token, spm) in enumerate(zip(parts, modes, strict=True)):
    by_character = encoded[3 * index : 3 * index + 3]
    whole = "\ufffd" not in "".join(texts[3 * index : 3 * index + 3])
    # A piece that begins inside a character, or grew too long, is cut between
    # tokens, which always fits.
    fits = sum(map(len, by_character)) + 3 <= max_tokens
    three = by_character if whole and fits else by_token
    pieces.append(arrange(*three, sentinels, spm=spm))
  remaining = iter(pieces)
  return [
    [next(remaining) for _ in range(0, len(ids), step)] for ids in documents
  ]


def _cut(sequence, rng: np.random.Generator) -> list:
  """Three parts, cut at two uniform places."""
  first, second = sorted(rng.integers(len(sequence) + 1, size=2).tolist())
  return [sequence[:first], sequence[first:second], sequence[second:]]
