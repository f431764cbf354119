"""Finds and compacts changes where the weights are.

Most steps change few elements of a BF16 tensor: `fetch` brings only those to
the host, where `apply` writes them over the base. `find` and `compact` are its
two halves, for one device's part of an array; they communicate with no other
device.

`find` reads both arrays once and leaves a bit an element, so that all that
follows touches 1/32 of their bytes (BF16). `compact` works backwards: for each
place of the output it looks up the block, then the word, then the bit. In bytes
an element, for BF16 and a share d of changes: 4 to read, 1/8 to write, about
100 d for `compact`, most of it the sectors of 32 bytes around scattered words
and values. Prefix sums and a scatter over all elements would move about 25.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped, UInt32

from composer_jax.shipping.errors import DeltaError

_BITS = 32  # a word
_WORDS = 8  # a block: its words are one sector of a GPU's memory
_BLOCK = _BITS * _WORDS
_MAX_ELEMENTS = 2**32 - _BLOCK
_MIN_CAPACITY = 1024
_STEPS = 8  # capacities from one power of two to the next


class Marks(NamedTuple):
  """Which elements changed.

  Attributes:
    words: bit i of word j of block b is element 256 b + 32 j + i.
    counts: changes in each block.
    total: changes.
  """

  words: UInt32[Array, "blocks 8"]
  counts: UInt32[Array, " blocks"]
  total: UInt32[Array, ""]


class Changes(NamedTuple):
  """Changes in ascending order; what lies beyond `count` means nothing.

  Attributes:
    count: how many there are, also if that is more than fit.
    positions: in the flat array.
    values: the new elements there.
  """

  count: UInt32[Array, ""]
  positions: UInt32[Array, " capacity"]
  values: Shaped[Array, " capacity"]


def find(new: Shaped[Array, "..."], base: Shaped[Array, "..."]) -> Marks:
  """Compares two arrays as bits; to be jitted.

  Args:
    new: any dtype that JAX has, below 2^32 elements.
    base: same shape and dtype.

  Raises:
    DeltaError: if shapes or dtypes differ, or there are too many elements.
  """
  if new.shape != base.shape or new.dtype != base.dtype:
    raise DeltaError(
      f"new is {new.dtype}{list(new.shape)}, "
      f"its base {base.dtype}{list(base.shape)}"
    )
  if new.size > _MAX_ELEMENTS:
    raise DeltaError(f"{new.size} elements; a device's part ends at 2^32")
  changed = _differ(new, base).reshape(-1)
  changed = jnp.pad(changed, (0, -changed.size % _BLOCK))
  changed = changed.reshape(-1, _WORDS, _BITS).astype(jnp.uint32)
  places = jnp.arange(_BITS, dtype=jnp.uint32).reshape(1, 1, -1)
  words = (changed << places).sum(axis=2, dtype=jnp.uint32)
  counts = jax.lax.population_count(words).sum(axis=1, dtype=jnp.uint32)
  return Marks(words, counts, counts.sum(dtype=jnp.uint32))


def compact(
  new: Shaped[Array, "*shape"], marks: Marks, capacity: int
) -> Changes:
  """Positions and values of the changes; to be jitted.

  Args:
    new: as given to `find`.
    marks: what `find` returned.
    capacity: how many changes to have room for. Whoever reads the result must
      compare `count` with it.
  """
  flat = new.reshape(-1)
  if not flat.size:
    nothing = jnp.zeros(capacity, jnp.uint32)
    return Changes(marks.total, nothing, nothing.astype(new.dtype))
  blocks = jnp.arange(len(marks.counts), dtype=jnp.uint32)
  block = jnp.repeat(blocks, marks.counts, total_repeat_length=capacity)
  starts = jnp.cumsum(marks.counts, dtype=jnp.uint32) - marks.counts
  rank = jnp.arange(capacity, dtype=jnp.uint32) - starts[block]
  word, place = marks.words[block, 0], jnp.zeros(capacity, jnp.uint32)
  for j in range(1, _WORDS):
    before = jax.lax.population_count(word)
    further = (rank >= before) & (place == _BITS * (j - 1))
    rank = jnp.where(further, rank - before, rank)
    word = jnp.where(further, marks.words[block, j], word)
    place = jnp.where(further, jnp.uint32(_BITS * j), place)
  for half in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << half) - 1)
    before = jax.lax.population_count(low)
    further = rank >= before
    rank = jnp.where(further, rank - before, rank)
    word = jnp.where(further, word >> half, low)
    place = jnp.where(further, place + jnp.uint32(half), place)
  # Beyond the last change, whatever is there.
  positions = jnp.minimum(block * _BLOCK + place, jnp.uint32(flat.size - 1))
  return Changes(marks.total, positions, _pick(flat, positions))


_find = jax.jit(find)
_compact = jax.jit(compact, static_argnums=2)


def capacity_for(count: int) -> int:
  """Room for `count`, in one of few sizes: each is a program to compile.

  At most an eighth is left over: room costs time on the device and bytes to the
  host.
  """
  if not count:
    return 0
  step = (1 << (count - 1).bit_length()) // (2 * _STEPS)
  return max(_MIN_CAPACITY, -(-count // max(1, step)) * step)


def pays(count: int, elements: int, width: float) -> bool:
  """Whether positions and values are fewer bytes than the whole array.

  Args:
    count: changes.
    elements: of the array.
    width: bytes an element. At 2, changes pay below a third of all at most,
      since room for them is rounded up.
  """
  return capacity_for(count) * (4 + width) < elements * width


def fetch(
  new: Shaped[Array, "..."], base: Shaped[Array, "..."]
) -> Changes | None:
  """Brings the changes to the host, if they are fewer bytes than the whole.

  Args:
    new: on one device: a shard's `data`, for a sharded array.
    base: the version before, on the same device.

  Returns:
    The changes, in NumPy arrays; None if the whole array is fewer bytes, or has
    too many elements to be compared.

  Raises:
    DeltaError: if the two don't have one shape and dtype.
  """
  if new.size > _MAX_ELEMENTS:
    return None
  marks = _find(new, base)
  count = int(marks.total)
  if not pays(count, new.size, new.nbytes / max(1, new.size)):
    return None
  if not count:
    return Changes(0, np.empty(0, np.uint32), np.empty(0, new.dtype))
  return jax.device_get(_compact(new, marks, capacity_for(count)))


def part_of(changes: Changes, start: int, stop: int) -> Changes:
  """Those between two places of the flat array, on the host, counted anew."""
  positions = changes.positions[: int(changes.count)]
  ends = np.array([start, stop], positions.dtype)  # no copy by promotion
  first, last = np.searchsorted(positions, ends)
  return Changes(
    last - first,
    positions[first:last] - positions.dtype.type(start),
    changes.values[first:last],
  )


def apply(
  base: Shaped[np.ndarray, "*shape"], changes: Changes
) -> Shaped[np.ndarray, "*shape"]:
  """Writes changes into a copy of the base, on the host.

  Raises:
    DeltaError: if there were more changes than room for them.
  """
  count = int(changes.count)
  if count > len(changes.positions):
    raise DeltaError(
      f"{count} changes, room for {len(changes.positions)}: raise the capacity"
    )
  new = np.array(base, order="C")
  positions = np.asarray(changes.positions)[:count]
  new.reshape(-1)[positions] = np.asarray(changes.values)[:count]
  return new


def _differ(new, base) -> Bool[Array, "*shape"]:
  if jnp.issubdtype(new.dtype, jnp.complexfloating):
    return _differ(new.real, base.real) | _differ(new.imag, base.imag)
  return _bits(new) != _bits(base)


def _pick(flat, positions):
  # As floats, XLA may change a NaN: on CPUs it does for float8_e5m2.
  if jnp.issubdtype(flat.dtype, jnp.complexfloating):
    return jax.lax.complex(
      _pick(flat.real, positions), _pick(flat.imag, positions)
    )
  values = _bits(flat)[positions]
  if flat.dtype == jnp.bool_:
    return values
  return jax.lax.bitcast_convert_type(values, flat.dtype)


def _bits(array):
  if array.dtype == jnp.bool_:
    return array
  bits = jax.dtypes.itemsize_bits(array.dtype)
  return jax.lax.bitcast_convert_type(array, f"uint{bits}")
