"""The codec's loops over elements: numbers to symbols and back.

A number becomes a symbol of a byte and some extra bits: 0..15 are symbols of
their own; above, each octave has four symbols, and the bits below those that
the symbol tells are written as they are, lowest first, into 32-bit words.
"""

import numpy as np

from composer_jax.shipping.jit import loop
from composer_jax.shipping.layout import FLOAT, SIGNED

DIFFERENCE, XOR, OVERWRITE = 0, 1, 2
EXTRA_LIMIT = {1: 5, 2: 13, 4: 29, 8: 61}  # extra bits an element, by width


# Signs are as good as random: arithmetic on masks, since branches would miss.
@loop
def _ordered(bits, order, mask, top):
  if order == FLOAT:
    return bits ^ (top | (_all_if(bits & top) & mask))
  return bits ^ top if order == SIGNED else bits


@loop
def _unordered(place, order, mask, top):
  if order == FLOAT:
    return place ^ (top | (_all_if(~place & top) & mask))
  return place ^ top if order == SIGNED else place


@loop
def _all_if(bit):
  return np.uint64(0) - np.uint64(bit != 0)


@loop
def _mask(width):
  return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width)


@loop
def _bit_length(z):
  length = 0
  for step in (32, 16, 8, 4, 2, 1):
    if z >> np.uint64(step):
      z >>= np.uint64(step)
      length += step
  return length + 1


@loop
def fill_contexts(base, shift, lowest, limit, contexts):
  """Contexts of all elements of `base`, into the start of `contexts`."""
  magnitude = _mask(base.itemsize) >> np.uint64(1)
  for i in range(base.size):
    exponent = (np.uint64(base[i]) & magnitude) >> np.uint64(shift)
    contexts[i] = max(0, min(limit - 1, np.int64(exponent) - lowest))


@loop
def contexts_of(base, shift, lowest, limit):
  """Each element's context: its bits from `shift` up, but for the top one.

  Less `lowest`, cut to [0, limit).
  """
  contexts = np.empty(base.size, np.uint8)
  fill_contexts(base, shift, lowest, limit, contexts)
  return contexts


@loop
def to_symbols(base, new, contexts, limit, width, order, op, words):
  """Symbols of every element, their counts, and how many words were filled.

  `contexts` may be empty: then all are 0.
  """
  mask = _mask(width)
  top = (mask >> np.uint64(1)) + np.uint64(1)
  symbols = np.empty(new.size, np.uint8)
  counts = np.zeros((limit, 256), np.int64)
  held, bits, at = np.uint64(0), 0, 0
  for i in range(new.size):
    b, n = np.uint64(base[i]), np.uint64(new[i])
    k = contexts[i] if contexts.size else np.uint8(0)
    if op == OVERWRITE:
      z = n
    elif op == XOR:
      z = b ^ n
    else:
      d = (_ordered(n, order, mask, top) - _ordered(b, order, mask, top)) & mask
      z = ((d << np.uint64(1)) ^ _all_if(d & top)) & mask
    if z < np.uint64(16):
      s = np.uint8(z)
    else:
      length = _bit_length(z)
      extra = length - 3
      s = np.uint8(
        16 + 4 * (length - 5) + ((z >> np.uint64(extra)) & np.uint64(3))
      )
      z &= (np.uint64(1) << np.uint64(extra)) - np.uint64(1)
      while extra > 0:
        taken = min(extra, 32)
        part = z & np.uint64(0xFFFFFFFF)
        z >>= np.uint64(32)
        extra -= taken
        held |= part << np.uint64(bits)
        bits += taken
        if bits >= 32:
          words[at] = held & np.uint64(0xFFFFFFFF)
          at += 1
          held >>= np.uint64(32)
          bits -= 32
    symbols[i] = s
    counts[k, s] += 1
  if bits:
    words[at] = held & np.uint64(0xFFFFFFFF)
    at += 1
  return symbols, counts, at


@loop
def from_symbols(base, symbols, words, width, order, op, out):
  """Inverse of `to_symbols` into `out`; whether the bits were all used."""
  mask = _mask(width)
  top = (mask >> np.uint64(1)) + np.uint64(1)
  held, bits, at = np.uint64(0), 0, 0
  for i in range(symbols.size):
    s = symbols[i]
    z = np.uint64(s)
    if s >= 16:
      extra = 2 + (s - 16) // 4
      z = np.uint64(4 + (s & 3)) << np.uint64(extra)
      shift = 0
      while extra > 0:
        taken = min(extra, 32)
        if bits < taken:
          if at >= words.size:
            return False
          held |= np.uint64(words[at]) << np.uint64(bits)
          at += 1
          bits += 32
        part = held & ((np.uint64(1) << np.uint64(taken)) - np.uint64(1))
        held >>= np.uint64(taken)
        bits -= taken
        z |= part << np.uint64(shift)
        shift += 32
        extra -= taken
    z &= mask
    b = np.uint64(base[i])
    if op == XOR:
      z ^= b
    elif op == DIFFERENCE:
      d = (z >> np.uint64(1)) ^ _all_if(z & np.uint64(1))
      z = (_ordered(b, order, mask, top) + d) & mask
      z = _unordered(z, order, mask, top)
    out[i] = z
  return at == words.size and held == 0
