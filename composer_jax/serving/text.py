"""From sampled tokens to the text that may be shown, token by token.

The same text comes out whether a completion is streamed or not, and wherever
its tokens end: within a character of several bytes, or within a stop string.
"""

import codecs
from collections.abc import Collection, Sequence


class TextReader:
  """Detokenises one completion as it grows.

  Text is handed out once nothing that follows can change it: what may be the
  start of a character, or of a stop string, is held back.

  A stop string ends the text at its first character. If a token completes
  several, the one that ends first counts, and of those the longest: what it
  would be if tokens were single characters.

  Attributes:
    stopped: whether a stop string has ended the text.
  """

  def __init__(
    self,
    spellings: Sequence[bytes],
    stop: Sequence[str] = (),
    silent: Collection[int] = (),
  ):
    """Starts a text.

    Args:
      spellings: the bytes of each token id, as `Tokenizer.spellings`; an id
        beyond them has none.
      stop: strings, none of them empty.
      silent: ids that stand for no text: those that end a completion.
    """
    self.stopped = False
    self._spellings = spellings
    self._stop = tuple(stop)
    self._silent = frozenset(silent)
    # Bytes that aren't UTF-8 become U+FFFD, as `Tokenizer.decode` has it.
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._held = ""
    self._shown = 0

  @property
  def offset(self) -> int:
    """Characters so far, those held back included."""
    return self._shown + len(self._held)

  def push(self, token_id: int) -> str:
    """Adds a token; returns what text has become certain."""
    if token_id in self._silent or token_id >= len(self._spellings):
      return ""
    return self._read(self._decoder.decode(self._spellings[token_id]))

  def finish(self) -> str:
    """Ends the text; returns what was held back."""
    text = self._read(self._decoder.decode(b"", final=True))
    rest, self._held = self._held, ""
    self._shown += len(rest)
    return text + rest

  def _read(self, new: str) -> str:
    if self.stopped:
      return ""
    self._held += new
    cut = _stop_start(self._held, self._stop)
    if cut is not None:
      self.stopped = True
      text, self._held = self._held[:cut], ""
    else:
      sure = len(self._held) - possible_start(self._held, self._stop)
      text, self._held = self._held[:sure], self._held[sure:]
    self._shown += len(text)
    return text


def possible_start(text: str, wanted: Sequence[str]) -> int:
  """Length of the longest end of `text` that one of `wanted` starts with.

  0 if there is none; a whole one doesn't count.
  """
  longest = max((len(w) for w in wanted), default=1) - 1
  for length in range(min(longest, len(text)), 0, -1):
    end = text[-length:]
    if any(w.startswith(end) and len(w) > length for w in wanted):
      return length
  return 0


def _stop_start(text, stop):
  """Where the stop string that counts begins; see `TextReader`."""
  found = []
  for string in stop:
    start = text.find(string)
    if start >= 0:
      found.append((start + len(string), start))
  return min(found)[1] if found else None
