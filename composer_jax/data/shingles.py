"""Runs of n words as 64-bit hashes: how two pieces of code are compared.

A word is an identifier, a number or one punctuation mark, or for `NAMES` what
begins with a letter only. White space never counts, so re-indented or
re-wrapped code looks the same. Hashes do not depend on
the process (Python's own `hash` of a string does).
"""

import hashlib
import re

import numpy as np
from jaxtyping import UInt64

WORDS = re.compile(r"\w+|[^\w\s]")
NAMES = re.compile(r"[^\W\d]\w*")
# Knuth's MMIX multiplier: odd, so that no information is lost modulo 2^64.
_MULTIPLIER = np.uint64(6364136223846793005)


class _WordHashes(dict):
  def __missing__(self, word: str) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    self[word] = value = int.from_bytes(digest, "little")
    return value


class Shingler:
  """Hashes texts; remembers the words that it has seen.

  Attributes:
    pattern: what is a word.
  """

  def __init__(self, pattern: re.Pattern[str] = WORDS):
    self.pattern = pattern
    self._hashes = _WordHashes()

  def words(self, text: str) -> UInt64[np.ndarray, " words"]:
    """One hash a word, in order."""
    # Lone surrogates cannot occur: texts come from valid UTF-8.
    hashes = map(self._hashes.__getitem__, self.pattern.findall(text))
    return np.fromiter(hashes, np.uint64)

  def shingles(self, text: str, n: int) -> UInt64[np.ndarray, " distinct"]:
    """The sorted distinct hashes of all runs of n words.

    Args:
      text: source code.
      n: words a run.

    Returns:
      The hashes; a text of fewer than n words has none.
    """
    return runs(self.words(text), n)


def runs(
  words: UInt64[np.ndarray, " words"], n: int
) -> UInt64[np.ndarray, " distinct"]:
  """The sorted distinct hashes of all runs of n words, given the words'."""
  count = max(0, len(words) - n + 1)
  mixed = np.zeros(count, np.uint64)
  for offset in range(n):
    mixed = mixed * _MULTIPLIER + words[offset : offset + count]
  return np.unique(mixed)
