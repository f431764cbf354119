"""The baseline that a language model must beat: the token before, counted.

Interpolated Kneser-Ney of order two (Kneser and Ney 1995, as in Chen and
Goodman 1999, https://doi.org/10.1006/csla.1999.0128, section 2.7), its lower
order interpolated with the uniform distribution so that nothing has
probability zero.
"""

import math

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

from composer_jax.data.rows import PackedRows


class KneserNeyBigram:
  """P(token | token before), from counts.

  With c(v, w) the count of w after v, N(v) the number of kinds of token after
  v, and N(w) the number of kinds before w:

    P(w | v) = max(c(v, w) - D, 0) / c(v) + D N(v) / c(v) Q(w)
    Q(w) = max(N(w) - d, 0) / n + d #{w: N(w) > 0} / n / V,  n = sum of N(w)
  """

  def __init__(
    self,
    inputs: Int32[np.ndarray, " tokens"],
    targets: Int32[np.ndarray, " tokens"],
    vocab_size: int,
  ):
    self._vocab_size = vocab_size
    kinds, counts = np.unique(self._pair(inputs, targets), return_counts=True)
    self._pairs, self._counts = kinds, counts
    before = kinds // vocab_size
    self._context = np.bincount(inputs, minlength=vocab_size)
    self._followers = np.bincount(before, minlength=vocab_size)
    self._discount = _discount(counts)

    kinds_before = np.bincount(kinds % vocab_size, minlength=vocab_size)
    present = kinds_before[kinds_before > 0]
    d = _discount(present)
    reserved = d * present.size / max(1, present.sum())
    self._lower = (
      np.maximum(kinds_before - d, 0) / max(1, present.sum())
      + (reserved if present.size else 1) / vocab_size
    )

  def probability(
    self,
    inputs: Int32[np.ndarray, " tokens"],
    targets: Int32[np.ndarray, " tokens"],
  ) -> Float64[np.ndarray, " tokens"]:
    """P(target | input) of each pair."""
    wanted = self._pair(inputs, targets)
    place = np.searchsorted(self._pairs, wanted)
    place = np.minimum(place, max(0, self._pairs.size - 1))
    count = np.zeros(wanted.size)
    if self._pairs.size:
      seen = self._pairs[place] == wanted
      count[seen] = self._counts[place[seen]]
    total = self._context[inputs]
    # Nothing is known of a context never seen: all its mass is the lower
    # order's.
    known = total > 0
    total = np.maximum(total, 1)
    kept = np.maximum(count - self._discount, 0) / total
    given = np.where(
      known, self._discount * self._followers[inputs] / total, 1.0
    )
    return kept + given * self._lower[targets]

  def _pair(
    self,
    inputs: Int32[np.ndarray, " tokens"],
    targets: Int32[np.ndarray, " tokens"],
  ) -> Int64[np.ndarray, " tokens"]:
    return inputs.astype(np.int64) * self._vocab_size + targets


def bigram_bits_per_byte(
  train_rows: PackedRows,
  validation_rows: PackedRows,
  token_bytes: Int32[np.ndarray, " V"],
  vocab_size: int,
) -> float:
  """Bits a byte of the validation targets under a bigram of the training rows.

  Args:
    train_rows: what is counted: every target with its input.
    validation_rows: what is predicted: every target, end tokens included.
    token_bytes: bytes of text behind each token.
    vocab_size: V, number of tokens.

  Returns:
    sum of -log2 P / sum of bytes: to compare with a model's total loss in nats
    over the same targets, divided by ln 2 and by their bytes.
  """
  model = KneserNeyBigram(*train_rows.pairs(), vocab_size)
  inputs, targets = validation_rows.pairs()
  nats = -np.log(model.probability(inputs, targets)).sum()
  return float(nats / math.log(2) / token_bytes[targets].sum())


def _discount(counts: Int[np.ndarray, " kinds"]) -> float:
  """n1 / (n1 + 2 n2), the estimate of Ney, Essen and Kneser 1994.

  Kept away from 0 and 1, where it would land without any singletons or pairs
  and leave nothing for what was never, or only once, seen.
  """
  once, twice = int((counts == 1).sum()), int((counts == 2).sum())
  return min(max(once / max(1, once + 2 * twice), 0.1), 0.9)
