"""An entropy coder for bytes under a context that both sides know.

Range variant of asymmetric numeral systems (Duda 2013,
https://arxiv.org/abs/1311.2540), with static tables, four interleaved states of
32 bits and 16-bit words (after Giesen 2014, https://arxiv.org/abs/1402.3392).
Each context has its own table of probabilities in units of 1/4096.
"""

import numpy as np
from jaxtyping import Int, UInt8, UInt32

from composer_jax.shipping.errors import DeltaError
from composer_jax.shipping.jit import loop

BITS = 12
TOTAL = 1 << BITS
LOW = 1 << 16  # a state stays in [LOW, 2^32)
MAX_CONTEXTS = 16


@loop
def _normalise(counts):
  """Counts `[K, 256]` to frequencies that sum to TOTAL, none lost."""
  freqs = np.zeros(counts.shape, np.uint32)
  for k in range(counts.shape[0]):
    total = counts[k].sum()
    if total == 0:
      continue
    left = TOTAL
    for s in range(256):
      if counts[k, s]:
        # Exact to well below one unit; a product of integers could overflow.
        share = int(counts[k, s] / total * TOTAL + 0.5)
        freqs[k, s] = max(1, share)
        left -= int(freqs[k, s])
    while left != 0:
      top = np.argmax(freqs[k])
      step = left if left > 0 else -1
      freqs[k, top] = np.uint32(int(freqs[k, top]) + step)
      left -= step
  return freqs


@loop
def _starts(freqs):
  starts = np.zeros(freqs.shape, np.uint32)
  for k in range(freqs.shape[0]):
    total = np.uint32(0)
    for s in range(256):
      starts[k, s] = total
      total += freqs[k, s]
  return starts


@loop
def _encode(symbols, contexts, freqs, starts, words):
  """Fills `words` from its end; returns the first used place and the states."""
  # Rounded up: x * inverse is then never below an exact quotient, and its
  # error is far below 1/TOTAL, so that truncation divides exactly.
  inverse = np.zeros(freqs.shape, np.float64)
  for k in range(freqs.shape[0]):
    for s in range(256):
      if freqs[k, s]:
        inverse[k, s] = 1.0 / freqs[k, s] * (1 + 2.3e-16)
  states = np.full(4, LOW, np.uint64)
  at = words.size
  for i in range(symbols.size - 1, -1, -1):
    s = symbols[i]
    k = contexts[i]
    f = np.uint64(freqs[k, s])
    x = states[i & 3]
    if x >= f << np.uint64(32 - BITS):
      at -= 1
      words[at] = x & np.uint64(0xFFFF)
      x >>= np.uint64(16)
    q = np.uint64(np.int64(np.float64(np.int64(x)) * inverse[k, s]))
    states[i & 3] = (
      (q << np.uint64(BITS)) + (x - q * f) + np.uint64(starts[k, s])
    )
  return at, states


@loop
def _lookup(freqs):
  table = np.zeros((freqs.shape[0], TOTAL), np.uint8)
  for k in range(freqs.shape[0]):
    at = 0
    for s in range(256):
      for _ in range(freqs[k, s]):
        table[k, at] = s
        at += 1
  return table


@loop
def _decode(words, states, contexts, freqs, starts, table, symbols):
  """Returns whether the stream ended exactly where it should."""
  at = 0
  first = freqs[:, 0].copy()
  x = states.copy()
  for i in range(contexts.size):
    k = contexts[i]
    y = x[i & 3]
    slot = np.uint32(y & np.uint32(TOTAL - 1))
    if slot < first[k]:  # "unchanged", nearly always
      symbols[i] = 0
      y = np.uint32(first[k] * (y >> np.uint32(BITS)) + slot)
    else:
      s = table[k, slot]
      symbols[i] = s
      y = np.uint32(freqs[k, s] * (y >> np.uint32(BITS)) + slot - starts[k, s])
    if y < np.uint32(LOW):
      if at >= words.size:
        return False
      y = np.uint32((y << np.uint32(16)) | np.uint32(words[at]))
      at += 1
    x[i & 3] = y
  for j in range(4):
    if x[j] != np.uint32(LOW):
      return False
  return at == words.size


def encode(
  symbols: UInt8[np.ndarray, " N"],
  contexts: UInt8[np.ndarray, " N"],
  counts: Int[np.ndarray, "K 256"],
) -> tuple[bytes, bytes]:
  """Codes symbols, each under its context.

  Args:
    symbols: what to code.
    contexts: below K, one a symbol; the decoder must have them.
    counts: how often each symbol stands in each context, exactly.

  Returns:
    The tables of probabilities, and the code: states, then words.
  """
  freqs = _normalise(counts)
  # A symbol adds at most BITS bits, so never more than one word.
  words = np.empty(symbols.size, np.uint16)
  at, states = _encode(symbols, contexts, freqs, _starts(freqs), words)
  states = states.astype("<u4").tobytes()
  return _pack_tables(freqs), states + words[at:].astype("<u2").tobytes()


def decode(
  tables: UInt32[np.ndarray, "K 256"],
  code: bytes | memoryview,
  contexts: UInt8[np.ndarray, " N"],
) -> UInt8[np.ndarray, " N"]:
  """Inverse of `encode`; all symbols' contexts are below K.

  Raises:
    DeltaError: if a context has no table, or the code doesn't end as it should.
  """
  if len(code) < 16 or len(code) % 2:
    raise DeltaError(f"an entropy-coded stream has {len(code)} bytes")
  used = np.bincount(contexts, minlength=len(tables))[: len(tables)] > 0
  if (tables.sum(axis=1)[used] != TOTAL).any():
    raise DeltaError("a context in use has no table of probabilities")
  states = np.frombuffer(code, "<u4", 4).astype(np.uint32)
  words = np.frombuffer(code, "<u2", offset=16).astype(np.uint16)
  symbols = np.empty(contexts.size, np.uint8)
  ended = _decode(
    words, states, contexts, tables, _starts(tables), _lookup(tables), symbols
  )
  if not ended:
    raise DeltaError("an entropy-coded stream doesn't end where it should")
  return symbols


def _pack_tables(freqs) -> bytes:
  """A context: how many symbols, then a symbol and its frequency each."""
  packed = bytearray([len(freqs)])
  for row in freqs:
    present = np.flatnonzero(row)
    packed += len(present).to_bytes(2, "little")
    for symbol in present:
      packed.append(int(symbol))
      # 4096 needs a thirteenth bit: two groups of seven hold fourteen.
      high, low = divmod(int(row[symbol]), 128)
      packed += bytes([low | 128, high]) if high else bytes([low])
  return bytes(packed)


def unpack_tables(
  packed: bytes | memoryview,
) -> UInt32[np.ndarray, "K 256"]:
  """Inverse of the tables' packing; they sum to TOTAL, or are empty.

  Raises:
    DeltaError: if they are anything else.
  """
  data = iter(bytes(packed))
  try:
    contexts = next(data)
    if not 1 <= contexts <= MAX_CONTEXTS:
      raise DeltaError(f"a stream has {contexts} contexts")
    freqs = np.zeros((contexts, 256), np.uint32)
    for row in freqs:
      for _ in range(next(data) + 256 * next(data)):
        symbol, freq = next(data), next(data)
        row[symbol] = freq if freq < 128 else freq - 128 + 128 * next(data)
  except StopIteration:
    raise DeltaError("a table of probabilities is cut short") from None
  sums = freqs.sum(axis=1)
  if ((sums != TOTAL) & (sums != 0)).any() or next(data, None) is not None:
    raise DeltaError("a table of probabilities doesn't add up")
  return freqs
