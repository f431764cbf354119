"""FORMAT.md is all that a decoder needs: another one, which follows it."""

import hashlib
import struct

import numpy as np
import pytest

from composer_jax.shipping import candidates, encode
from composer_jax.shipping.candidates import Mode
from composer_jax.shipping.layout import layout_of


class Payload:
  """Reads a payload as the specification says, one number at a time."""

  def __init__(self, data):
    self.data, self.at = data, 0

  def read(self, form):
    values = struct.unpack_from("<" + form, self.data, self.at)
    self.at += struct.calcsize("<" + form)
    return values if len(values) > 1 else values[0]

  def stream(self, contexts, plain=False):
    """A stream's numbers, or symbols; `contexts(k)` gives them for K = k."""
    sizes = self.read("IQQ")
    starts = [self.at, self.at + sizes[0], self.at + sizes[0] + sizes[1]]
    tables = []
    for _ in range(self.read("B")):
      ranges, start = [], 0
      for _ in range(self.read("H")):
        symbol, f = self.read("B"), self.read("B")
        if f >= 128:
          f = f - 128 + 128 * self.read("B")
        ranges.append((start, f, symbol))
        start += f
      assert start in (0, 4096)
      tables.append(ranges)
    assert self.at == starts[1]
    states = list(self.read("4I"))
    symbols = []
    for i, k in enumerate(contexts(len(tables))):
      slot = states[i % 4] % 4096
      start, f, symbol = next(
        r for r in tables[k] if r[0] <= slot < r[0] + r[1]
      )
      states[i % 4] = f * (states[i % 4] // 4096) + slot - start
      if states[i % 4] < 2**16:
        states[i % 4] = states[i % 4] * 2**16 + self.read("H")
      symbols.append(symbol)
    assert states == [2**16] * 4 and self.at == starts[2]
    if plain:
      assert sizes[2] == 0
      return symbols
    extra = int.from_bytes(self.data[self.at : self.at + sizes[2]], "little")
    self.at += sizes[2]
    numbers = []
    for symbol in symbols:
      number = symbol
      if symbol >= 16:
        length = (symbol - 16) // 4 + 5
        low = length - 3
        number = ((4 + symbol % 4) << low) + extra % (1 << low)
        extra >>= low
      numbers.append(number)
    assert extra == 0
    return numbers


def reference_decode(mode, data, base, layout):
  """Python integers in, Python integers out."""
  bits = 8 * layout.width
  top, every = 1 << (bits - 1), (1 << bits) - 1
  payload = Payload(data)

  def place(u):
    if layout.order == 2:
      return u ^ every if u & top else u | top
    return u ^ top if layout.order == 1 else u

  back = {place(u): u for u in range(1 << bits)}

  def context(u, lowest, k):
    shift = layout.mantissa if layout.order == 2 else bits - 5
    return max(0, min(k - 1, ((u & ~top) >> shift) - lowest))

  def value(u, z, op):
    if op == 0:
      d = -(z + 1) // 2 if z % 2 else z // 2
      return back[(place(u) + d) & every]
    return u ^ z if op == 1 else z

  if mode == Mode.PLANES:
    symbols = payload.stream(
      lambda k: np.repeat(range(k), len(base)), plain=True
    )
    planes = np.array(symbols, np.uint8).reshape(layout.width, -1)
    return [int.from_bytes(unit.tobytes(), "little") for unit in planes.T]
  op, lowest = payload.read("Bh")
  if mode == Mode.DENSE:
    numbers = payload.stream(lambda k: [context(u, lowest, k) for u in base])
    return [value(u, z, op) for u, z in zip(base, numbers, strict=True)]
  count = payload.read("Q")
  positions = []
  if mode == Mode.SPARSE:
    at = -1
    for gap in payload.stream(lambda _: [0] * count):
      at += gap + 1
      positions.append(at)
    contexts = [0] * count
  else:
    shares = payload.read("16Q")
    gaps = payload.stream(lambda _: np.repeat(range(16), shares))
    for k in range(16):
      members = [i for i, u in enumerate(base) if context(u, lowest, 16) == k]
      at, first = -1, sum(shares[:k])
      for gap in gaps[first : first + shares[k]]:
        at += gap + 1
        positions.append(members[at])
    positions.sort()
    contexts = [context(base[i], lowest, 16) for i in positions]
  result = list(base)
  numbers = payload.stream(lambda _: contexts)
  for i, z in zip(positions, numbers, strict=True):
    result[i] = value(base[i], z, op)
  assert payload.at == len(data)
  return result


def pair(dtype, size=3000):
  """The same on every machine and under every version of NumPy."""
  state, words = 1, []
  for _ in range(2 * size):
    state = state * 6364136223846793005 + 1442695040888963407 & 2**64 - 1
    words.append(state >> 40)
  words = np.array(words).reshape(2, size)
  layout = layout_of(np.dtype(dtype))
  base = (words[0] % (1 << 8 * layout.width)).astype(layout.unit)
  moved = np.where(words[1] % 5 == 0, base + words[1] // 5 % 7 - 3, base)
  return base, moved.astype(layout.unit), layout


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "float8_e5m2"])
@pytest.mark.parametrize("op", candidates.OPS)
@pytest.mark.parametrize(
  "mode, limit",
  [
    (Mode.PLANES, 1),
    (Mode.SPARSE, 1),
    (Mode.STRATA, 16),
    (Mode.DENSE, 1),
    (Mode.DENSE, 16),
  ],
)
def test_the_specification_decodes_it(dtype, op, mode, limit):
  base, new, layout = pair(dtype)
  candidate = candidates._Candidate(mode, op, limit)
  payload = candidates._write(candidate, new, base, layout, 8)
  decoded = reference_decode(
    mode, b"".join(payload.parts), base.tolist(), layout
  )
  assert decoded == new.tolist()


def test_the_bytes_have_not_changed():
  """If this fails, old deltas may not decode: raise the version instead."""
  base, new, _ = pair("float16")
  delta = encode(new.view(np.float16), base.view(np.float16))
  assert len(delta) == GOLDEN_SIZE
  assert hashlib.sha256(delta).hexdigest() == GOLDEN


GOLDEN_SIZE = 514
GOLDEN = "5ecc2caa5fb5d023d6121f854b00456445332774f8400e9f1442cad35532c7b5"
