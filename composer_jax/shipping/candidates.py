"""The ways to write a chunk, and the choice among them.

Sparse candidates write where the changes are and what they are; dense ones a
symbol for every element; both as differences of ordered integers, XOR or new
bits. `STRATA` counts gaps among elements whose base has the same exponent.
"""

import dataclasses
import enum
import struct

import numpy as np

from composer_jax.shipping import loops, rans, strata
from composer_jax.shipping.errors import DeltaError
from composer_jax.shipping.layout import FLOAT, Layout

OPS = (loops.DIFFERENCE, loops.XOR, loops.OVERWRITE)
_GAP = Layout(8, 0, 0)
_STREAM = struct.Struct("<IQQ")  # bytes of tables, of code, of extra bits
_VALUES = struct.Struct("<Bh")  # op, lowest exponent
_COUNT = struct.Struct("<Q")
# The choice is made on so many blocks of so many elements.
_BLOCKS, _BLOCK = 32, 2048
# Below this density of changes, dense candidates save less than 1 % over sparse
# ones and take up to three times as long; they are left to small chunks.
_DENSE_FROM = 0.15


class Mode(enum.IntEnum):
  """How a payload is written."""

  UNCHANGED = 0
  RAW = 1
  PLANES = 2
  SPARSE = 3
  STRATA = 4
  DENSE = 5


@dataclasses.dataclass(frozen=True)
class _Candidate:
  mode: Mode
  op: int = 0
  contexts: int = 1


@dataclasses.dataclass
class _Payload:
  """Parts whose size is fixed, and parts that grow with the elements."""

  fixed: int = 0
  parts: list = dataclasses.field(default_factory=list)

  def add(self, part, *, fixed=False):
    self.parts.append(part)
    self.fixed += len(part) if fixed else 0

  def add_stream(self, tables, code, words):
    extra = words.astype("<u4").tobytes()
    self.add(_STREAM.pack(len(tables), len(code), len(extra)), fixed=True)
    self.add(tables, fixed=True)
    self.add(code)
    self.add(extra)

  def bytes_at(self, scale):
    size = sum(map(len, self.parts))
    return self.fixed + (size - self.fixed) * scale


def smallest(new, base, layout: Layout, effort: str) -> tuple[Mode, bytes]:
  """The smallest candidate: exactly for small chunks, else by a sample."""
  picked = _sample(new.size)
  some_new = new if picked is None else new[picked]
  some_base = base if picked is None or base is None else base[picked]
  lowest = 0 if base is None else _lowest(some_base, layout)
  scale = new.size / max(1, some_new.size)
  best, best_size = None, np.inf
  for candidate in _worth_trying(
    some_new, some_base, effort, _DENSE_FROM if scale > 1 else 0.03
  ):
    payload = _write(candidate, some_new, some_base, layout, lowest)
    size = payload.bytes_at(scale)
    if size < best_size:
      best, best_size, kept = candidate, size, payload
  if picked is not None:
    kept = _write(best, new, base, layout, lowest)
  written = b"".join(kept.parts)
  if len(written) > new.nbytes:
    return Mode.RAW, new.tobytes()
  return best.mode, written


def _sample(size):
  """Places of a fixed set of blocks, evenly spread; None for all."""
  if size <= 2 * _BLOCKS * _BLOCK:
    return None
  starts = np.arange(_BLOCKS) * (size - _BLOCK) // (_BLOCKS - 1)
  return (starts[:, None] + np.arange(_BLOCK)).reshape(-1)


def _worth_trying(new, base, effort, dense_from):
  yield _Candidate(Mode.RAW)
  yield _Candidate(Mode.PLANES)
  if base is None:
    return
  density = np.count_nonzero(new != base) / max(1, new.size)
  for op in OPS:
    if density < 0.4:
      yield _Candidate(Mode.SPARSE, op)
      if effort == "small":
        yield _Candidate(Mode.STRATA, op, rans.MAX_CONTEXTS)
    if density > dense_from and (effort == "small" or density >= 0.4):
      yield _Candidate(Mode.DENSE, op)
      if effort == "small":
        yield _Candidate(Mode.DENSE, op, rans.MAX_CONTEXTS)


def _shift(layout: Layout) -> int:
  """Bits below those that choose an element's context."""
  return layout.mantissa if layout.order == FLOAT else 8 * layout.width - 5


def _lowest(base, layout: Layout) -> int:
  """So that the contexts end with the highest exponent that is not rare."""
  width = 8 * layout.width - 1
  magnitude = (base & layout.unit.type((1 << width) - 1)) >> _shift(layout)
  counts = np.bincount(magnitude.astype(np.int64))
  common = np.flatnonzero(counts > base.size // 4096)
  return max(0, int(common[-1]) + 1 - rans.MAX_CONTEXTS) if len(common) else 0


def _write(candidate, new, base, layout: Layout, lowest: int) -> _Payload:
  payload = _Payload()
  op, limit = candidate.op, candidate.contexts
  if candidate.mode == Mode.RAW:
    payload.add(new.tobytes())
  elif candidate.mode == Mode.PLANES:
    planes = new.view(np.uint8).reshape(-1, layout.width).T.reshape(-1)
    contexts = _plane_contexts(new.size, layout)
    counts = np.zeros((layout.width, 256), np.int64)
    for plane, row in enumerate(counts):
      part = planes[plane * new.size : (plane + 1) * new.size]
      row[:] = np.bincount(part, minlength=256)
    tables, code = rans.encode(planes, contexts, counts)
    payload.add_stream(tables, code, np.empty(0, np.uint32))
  elif candidate.mode == Mode.DENSE:
    payload.add(_VALUES.pack(op, lowest), fixed=True)
    contexts = _contexts(base, layout, lowest, limit)
    _write_numbers(payload, base, new, contexts, limit, layout, op)
  else:
    positions = strata.find_changes(base, new)
    if candidate.mode == Mode.SPARSE:
      gaps = np.diff(positions, prepend=-1).astype(np.uint64) - np.uint64(1)
      contexts = gap_contexts = np.empty(0, np.uint8)
    else:
      contexts = _contexts(base[positions], layout, lowest, limit)
      counts = np.bincount(contexts, minlength=limit)
      gap_contexts = np.repeat(np.arange(limit, dtype=np.uint8), counts)
      gaps = strata.to_gaps(
        base, new, _shift(layout), lowest, positions, contexts, counts
      )
    payload.add(_VALUES.pack(op, lowest) + _COUNT.pack(len(positions)))
    if candidate.mode == Mode.STRATA:
      payload.add(counts.astype("<u8").tobytes(), fixed=True)
    _write_numbers(
      payload, gaps, gaps, gap_contexts, limit, _GAP, loops.OVERWRITE
    )
    _write_numbers(
      payload, base[positions], new[positions], contexts, limit, layout, op
    )
  return payload


def _write_numbers(payload, base, new, contexts, limit, layout, op):
  most = new.size * loops.EXTRA_LIMIT[layout.width] // 32 + 1
  words = np.empty(most, np.uint32)
  symbols, counts, filled = loops.to_symbols(
    base, new, contexts, limit, layout.width, layout.order, op, words
  )
  if not contexts.size:
    contexts = np.zeros(new.size, np.uint8)
  payload.add_stream(*rans.encode(symbols, contexts, counts), words[:filled])


def _contexts(base, layout, lowest, limit):
  if limit == 1:
    return np.zeros(base.size, np.uint8)
  return loops.contexts_of(base, _shift(layout), lowest, limit)


def _plane_contexts(size, layout):
  return np.repeat(np.arange(layout.width, dtype=np.uint8), size)


def apply(mode: Mode, payload, base, out, layout: Layout) -> None:
  """Writes what a payload says into `out`, flat unsigned integers like `base`.

  Raises:
    DeltaError: if the payload is not what the mode asks for.
  """
  reader = _Reader(payload)
  if mode == Mode.RAW:
    if len(payload) != out.nbytes:
      raise DeltaError(f"{len(payload)} raw bytes for {out.nbytes}")
    out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
    return
  if mode == Mode.PLANES:
    symbols, _ = reader.stream(_plane_contexts(out.size, layout), layout.width)
    reader.end()
    planes = symbols.reshape(layout.width, -1).T
    out.view(np.uint8).reshape(-1, layout.width)[:] = planes
    return
  if base is None:
    raise DeltaError(f"mode {mode.name} needs a base")
  if mode == Mode.UNCHANGED:
    reader.end()
    out[:] = base
    return
  op, lowest = reader.unpack(_VALUES)
  if op not in OPS or lowest < 0:
    raise DeltaError(f"operation {op}, lowest exponent {lowest}")
  if mode == Mode.DENSE:
    limit = reader.limit()
    contexts = _contexts(base, layout, lowest, limit)
    reader.numbers(base, contexts, limit, layout, op, out)
    reader.end()
    return
  (count,) = reader.unpack(_COUNT)
  if count > out.size:
    raise DeltaError(f"{count} changes in {out.size} elements")
  if mode == Mode.SPARSE:
    contexts, limit = np.zeros(count, np.uint8), 1
    positions = _plain_positions(reader, count, out.size)
  else:
    limit = rans.MAX_CONTEXTS
    positions = _strata_positions(reader, count, base, _shift(layout), lowest)
    contexts = _contexts(base[positions], layout, lowest, limit)
  values = np.empty(count, layout.unit)
  reader.numbers(base[positions], contexts, limit, layout, op, values)
  reader.end()
  out[:] = base
  out[positions] = values


def _plain_positions(reader, count, size):
  gaps = reader.gaps(np.zeros(count, np.uint8), 1, size)
  positions = np.cumsum(gaps + np.uint64(1)).astype(np.int64) - 1
  if count and positions[-1] >= size:
    raise DeltaError("changes lie beyond the end")
  return positions


def _strata_positions(reader, count, base, shift, lowest):
  limit = rans.MAX_CONTEXTS
  counts = np.frombuffer(reader.take(8 * limit), "<u8")
  if (counts > count).any() or counts.sum() != count:
    raise DeltaError("the changes by exponent don't add up")
  contexts = np.repeat(np.arange(limit, dtype=np.uint8), counts.astype(int))
  gaps = reader.gaps(contexts, limit, base.size)
  positions = strata.to_positions(
    base, shift, lowest, gaps, counts.astype(np.int64)
  )
  if len(positions) != count:
    raise DeltaError("changes lie beyond the end")
  return positions


class _Reader:
  """Takes a payload apart; a `DeltaError` where bytes are missing or left."""

  def __init__(self, payload):
    self._left = memoryview(payload)

  def take(self, size):
    if size > len(self._left):
      raise DeltaError(f"{size} bytes wanted, {len(self._left)} left")
    part, self._left = self._left[:size], self._left[size:]
    return part

  def unpack(self, form):
    return form.unpack(self.take(form.size))

  def limit(self):
    """Contexts of the stream that comes next."""
    if len(self._left) <= _STREAM.size:
      raise DeltaError("a stream is missing")
    limit = self._left[_STREAM.size]
    if not 1 <= limit <= rans.MAX_CONTEXTS:
      raise DeltaError(f"a stream has {limit} contexts")
    return limit

  def stream(self, contexts, limit):
    tables, code, extra = self.unpack(_STREAM)
    if extra % 4:
      raise DeltaError(f"{extra} bytes of extra bits are not whole words")
    tables = rans.unpack_tables(self.take(tables))
    if len(tables) != limit:
      raise DeltaError(f"a stream has {len(tables)} contexts, not {limit}")
    symbols = rans.decode(tables, self.take(code), contexts)
    words = np.frombuffer(self.take(extra), "<u4").astype(np.uint32)
    return symbols, words

  def numbers(self, base, contexts, limit, layout, op, out):
    symbols, words = self.stream(contexts, limit)
    if not loops.from_symbols(
      base, symbols, words, layout.width, layout.order, op, out
    ):
      raise DeltaError("extra bits are missing or left over")

  def gaps(self, contexts, limit, size):
    gaps = np.empty(contexts.size, np.uint64)
    self.numbers(gaps, contexts, limit, _GAP, loops.OVERWRITE, gaps)
    if (gaps >= size).any():
      raise DeltaError("changes lie beyond the end")
    return gaps

  def end(self):
    if len(self._left):
      raise DeltaError(f"{len(self._left)} bytes are left over")
