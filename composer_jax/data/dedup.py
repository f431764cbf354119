"""Drops documents that repeat another: exactly, or nearly.

Runs before the split, so that validation holds no near-copy of what is trained
on. Near-duplicates are found as in Lee et al. 2021
(https://arxiv.org/abs/2107.06499): MinHash signatures propose pairs, the exact
Jaccard similarity of their 5-word shingles decides.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8, UInt64

from composer_jax.data.corpus import Document
from composer_jax.data.shingles import Shingler, runs

_WORDS = 5
_SIGNATURE = 128
# Bands of four: a pair of similarity 0.7 is proposed with probability
# 1 - (1 - 0.7^4)^32 > 0.9998, one of 0.5 with 0.87. False proposals only cost
# an exact comparison.
_BANDS = 32


def drop_duplicates(
  documents: Sequence[Document],
) -> tuple[list[Document], list[Document]]:
  """Keeps the first of each group of equal texts.

  Returns:
    The documents kept and those dropped, each in the order given.
  """
  seen, kept, dropped = set(), [], []
  for document in documents:
    (dropped if document.digest in seen else kept).append(document)
    seen.add(document.digest)
  return kept, dropped


def drop_near_duplicates(
  documents: Sequence[Document], threshold: float
) -> tuple[list[Document], list[Document]]:
  """Keeps documents less similar than `threshold` to all those kept before.

  Args:
    documents: in the order of preference.
    threshold: of the Jaccard similarity of their sets of shingles.

  Returns:
    The documents kept and those dropped, each in the order given.

  Raises:
    ImportError: rensa, in the extra `data`, is not installed.
  """
  shingler = Shingler()
  sets = [_shingles(shingler, document.text) for document in documents]
  signatures = _signatures(sets)
  kept_in_band: dict[tuple[int, bytes], list[int]] = {}
  kept, dropped = [], []
  for index, document in enumerate(documents):
    bands = list(enumerate(map(bytes, signatures[index])))
    candidates = {c for band in bands for c in kept_in_band.get(band, ())}
    if any(jaccard(sets[index], sets[c]) >= threshold for c in candidates):
      dropped.append(document)
      continue
    kept.append(document)
    for band in bands:
      kept_in_band.setdefault(band, []).append(index)
  return kept, dropped


def jaccard(a: UInt64[np.ndarray, " a"], b: UInt64[np.ndarray, " b"]) -> float:
  """|a and b| / |a or b| of two sets, each given as sorted distinct values."""
  shared = np.intersect1d(a, b, assume_unique=True).size
  return shared / (a.size + b.size - shared)


def _shingles(shingler: Shingler, text: str) -> UInt64[np.ndarray, " distinct"]:
  words = shingler.words(text)
  return runs(words, min(_WORDS, len(words)))


def _signatures(
  sets: Sequence[UInt64[np.ndarray, " _"]],
) -> UInt8[np.ndarray, "documents bands band_bytes"]:
  """MinHash signatures, as the bytes of each band."""
  try:
    import rensa
  except ImportError as error:
    raise ImportError(
      "Removing near-duplicates needs rensa: install composer-jax[data], or "
      "set near_duplicate_threshold=0."
    ) from error
  offsets = np.cumsum([0, *map(len, sets)], dtype=np.uint64)
  matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
    np.concatenate([np.empty(0, np.uint64), *sets]), offsets, _SIGNATURE, 0
  )
  rows = np.array(matrix.to_rows(), "<u4").reshape(-1, _SIGNATURE)
  return rows.view(np.uint8).reshape(-1, _BANDS, 4 * _SIGNATURE // _BANDS)
