"""From files to documents: what counts as source code, hashed and split.

A document is decided on by its own bytes alone, whatever else the corpus holds:
that keeps a file on its side of the split as other files come and go. Removing
what repeats is for `dedup`, what leaks the evaluation for `decontaminate`.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence

from composer_jax.data.sources import SourceFile

# Minified or generated code, by the rule of Chen et al. 2021, section 3.1
# (https://arxiv.org/abs/2107.03374).
_MAX_LINE_LENGTH = 1000
_MAX_MEAN_LINE_LENGTH = 100


@dataclasses.dataclass(frozen=True)
class Document:
  """A file of source code.

  Attributes:
    path: the source's name and the file's path in it.
    text: the whole file.
  """

  path: str
  text: str

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the text's bytes, in hexadecimal."""
    return hashlib.sha256(self.text.encode()).hexdigest()

  @functools.cached_property
  def size(self) -> int:
    """Bytes of UTF-8."""
    return len(self.text.encode())


def content_hash(files: Iterable[SourceFile]) -> str:
  """SHA-256 over all paths and bytes, whatever their order."""
  digests = sorted(
    hashlib.sha256(
      # A name that isn't UTF-8 holds surrogates in the place of its bytes.
      hashlib.sha256(file.path.encode(errors="surrogatepass")).digest()
      + hashlib.sha256(file.content).digest()
    ).digest()
    for file in files
  )
  return hashlib.sha256(b"".join(digests)).hexdigest()


def why_skip(file: SourceFile) -> str:
  """The reason why a file is no document, or "" if it is one."""
  try:
    file.path.encode()
    text = file.content.decode()
  except UnicodeError:
    return "undecodable"
  lines = text.splitlines()
  if not text.strip():
    return "empty"
  if max(map(len, lines)) > _MAX_LINE_LENGTH or len(
    text
  ) > _MAX_MEAN_LINE_LENGTH * len(lines):
    return "long_lines"
  return ""


def take_bytes(
  documents: Sequence[Document], max_bytes: int
) -> tuple[list[Document], list[Document]]:
  """Takes documents in the order of their hashes, each if it still fits.

  Args:
    documents: to choose from.
    max_bytes: the budget; 0 is no limit.

  Returns:
    The documents taken and those left, each in the order given.
  """
  if not max_bytes:
    return list(documents), []
  spent, taken = 0, set()
  # Not by the digits that decide the split: all taken would be held out.
  by_hash = sorted(documents, key=lambda d: (d.digest[26:], d.path))
  for document in by_hash:
    if spent + document.size <= max_bytes:
      spent += document.size
      taken.add(document)
  return (
    [document for document in documents if document in taken],
    [document for document in documents if document not in taken],
  )


def is_validation(document: Document, fraction: float) -> bool:
  """Whether the document's hash puts it in the held-out share."""
  return int(document.digest[:13], 16) < fraction * 16**13
