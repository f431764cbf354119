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
def _push(x, f, start, inverse, words, at):
  """Adds one symbol to a state; writes a word below `at`, used or not."""
  full = x >= f << np.uint64(32 - BITS)
  words[at - 1] = x & np.uint64(0xFFFF)
  at -= np.int64(full)
  x >>= np.uint64(16) * np.uint64(full)
  # x < 2^32 is exact as a double, and so is the quotient once truncated.
  q = np.uint64(np.int64(np.float64(np.int64(x)) * inverse))
  return (q << np.uint64(BITS)) + (x - q * f) + start, at


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
  f, c = freqs.astype(np.uint64), starts.astype(np.uint64)
  states = np.full(4, LOW, np.uint64)
  at = words.size
  whole = symbols.size // 4 * 4
  for i in range(symbols.size - 1, whole - 1, -1):
    k, s = contexts[i], symbols[i]
    states[i & 3], at = _push(
      states[i & 3], f[k, s], c[k, s], inverse[k, s], words, at
    )
  x0, x1, x2, x3 = states
  for i in range(whole - 4, -1, -4):
    k, s = contexts[i + 3], symbols[i + 3]
    x3, at = _push(x3, f[k, s], c[k, s], inverse[k, s], words, at)
    k, s = contexts[i + 2], symbols[i + 2]
    x2, at = _push(x2, f[k, s], c[k, s], inverse[k, s], words, at)
    k, s = contexts[i + 1], symbols[i + 1]
    x1, at = _push(x1, f[k, s], c[k, s], inverse[k, s], words, at)
    k, s = contexts[i], symbols[i]
    x0, at = _push(x0, f[k, s], c[k, s], inverse[k, s], words, at)
  return at, np.array([x0, x1, x2, x3])


@loop
def _lookup(freqs):
  """By context and slot: frequency less 1, slot less start, symbol: 32 bits."""
  table = np.zeros((freqs.shape[0], TOTAL), np.uint32)
  for k in range(freqs.shape[0]):
    at = 0
    for s in range(256):
      for offset in range(freqs[k, s]):
        table[k, at] = (
          (np.uint64(freqs[k, s] - 1) << np.uint64(20))
          | (np.uint64(offset) << np.uint64(8))
          | np.uint64(s)
        )
        at += 1
  return table


@loop
def _pop(x, entries, words, at):
  """Takes one symbol from a state; reads the word at `at`, used or not."""
  entry = np.uint64(entries[x & np.uint64(TOTAL - 1)])
  x = ((entry >> np.uint64(20)) + np.uint64(1)) * (x >> np.uint64(BITS))
  x += (entry >> np.uint64(8)) & np.uint64(TOTAL - 1)
  low = x < np.uint64(LOW)
  refilled = (x << np.uint64(16)) | np.uint64(words[at])
  return (
    (refilled if low else x),
    at + np.int64(low),
    np.uint8(entry & np.uint64(255)),
  )


@loop
def _decode(words, size, states, contexts, table, symbols):
  """Whether the stream ended where it should; `words` has 4 more than size."""
  x = states.astype(np.uint64)
  x0, x1, x2, x3 = x
  at = 0
  whole = contexts.size // 4 * 4
  for i in range(0, whole, 4):
    if at > size:
      return False
    x0, at, symbols[i] = _pop(x0, table[contexts[i]], words, at)
    x1, at, symbols[i + 1] = _pop(x1, table[contexts[i + 1]], words, at)
    x2, at, symbols[i + 2] = _pop(x2, table[contexts[i + 2]], words, at)
    x3, at, symbols[i + 3] = _pop(x3, table[contexts[i + 3]], words, at)
  x[:] = x0, x1, x2, x3
  for i in range(whole, contexts.size):
    if at > size:
      return False
    k = contexts[i]
    x[i & 3], at, symbols[i] = _pop(x[i & 3], table[k], words, at)
  return at == size and (x == LOW).all()


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
  # A symbol adds at most BITS bits, so never more than one word; one more is
  # written to and not used.
  words = np.empty(symbols.size + 1, np.uint16)
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
    DeltaError: if a context is K or more, or the code doesn't end as it should.
      An empty table gives some symbols or other, and mostly such an end.
  """
  if len(code) < 16 or len(code) % 2:
    raise DeltaError(f"an entropy-coded stream has {len(code)} bytes")
  if contexts.max(initial=0) >= len(tables):
    raise DeltaError("a context in use has no table of probabilities")
  states = np.frombuffer(code, "<u4", 4).astype(np.uint32)
  size = len(code) // 2 - 8
  words = np.zeros(size + 5, np.uint16)  # those beyond are read, never used
  words[:size] = np.frombuffer(code, "<u2", offset=16)
  symbols = np.empty(contexts.size, np.uint8)
  ended = _decode(words, size, states, contexts, _lookup(tables), symbols)
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
