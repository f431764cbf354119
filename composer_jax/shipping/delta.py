"""The delta of a chunk: bits of an array against the bits of its base.

For whoever ships versions of weights; it knows nothing of files, versions or
models. `encode` tries every way to write a chunk that it knows, on a sample,
and takes the smallest; `decode` checks base and result by digest and fails
with a `DeltaError` on anything that `encode` didn't write. FORMAT.md beside
this file specifies the bytes.

Why it is small: an optimizer's step is about as large for a small weight as for
a large one, so how far a float moves, in units in the last place, depends on
its exponent, which the receiver knows from the base. Each exponent gets its own
probabilities, of changes and of their sizes.
"""

import dataclasses
import struct
from typing import Literal

import numpy as np
import xxhash
from jaxtyping import Shaped, UInt

from composer_jax.shipping import candidates
from composer_jax.shipping.candidates import Mode
from composer_jax.shipping.errors import DeltaError
from composer_jax.shipping.layout import Layout, as_units, layout_of

MAGIC = b"CJXD"
VERSION = 1
# Magic, version, mode, layout (width, order, mantissa), elements, digests of
# base and result, bytes of payload.
_HEADER = struct.Struct("<4sBBBBBQ16s16sQ")
HEADER_BYTES = _HEADER.size
_NO_BASE = bytes(16)
# Positions and their sums then fit 64 bits; chunks are far smaller.
MAX_ELEMENTS = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Header:
  """What a delta says about itself.

  Attributes:
    mode: how the payload is written.
    layout: width and order of the elements.
    elements: N, of base and result.
    base_digest: XXH3-128 of the base's bytes; zeros if there is none.
    digest: XXH3-128 of the result's bytes.
    payload_bytes: what follows the header.
  """

  mode: Mode
  layout: Layout
  elements: int
  base_digest: bytes
  digest: bytes
  payload_bytes: int


def encode(
  new: Shaped[np.ndarray, "..."],
  base: Shaped[np.ndarray, "..."] | None = None,
  *,
  effort: Literal["small", "fast"] = "small",
) -> bytes:
  """Writes `new` as a delta against `base`.

  Args:
    new: any dtype of 1, 2, 4 or 8 bytes (complex numbers too), little-endian.
    base: same dtype and number of elements; None writes `new` by itself.
    effort: "small" takes the smallest candidate; "fast" the smallest of those
      that don't look at the base of unchanged elements.

  Returns:
    The delta. The same arguments give the same bytes.

  Raises:
    DeltaError: if dtype or size don't fit, or over MAX_ELEMENTS.
  """
  units = as_units(new)
  layout = layout_of(new.dtype)
  digest = _digest(units)
  if units.size > MAX_ELEMENTS:
    raise DeltaError(f"{units.size} elements; cut chunks of {MAX_ELEMENTS}")
  base_digest, base_units = _NO_BASE, None
  if base is not None:
    if base.dtype != new.dtype or base.size != new.size:
      raise DeltaError(
        f"new is {new.size} elements of {new.dtype}, "
        f"its base {base.size} of {base.dtype}"
      )
    base_units = as_units(base)
    base_digest = _digest(base_units)
  if base_digest == digest and np.array_equal(base_units, units):
    mode, payload = Mode.UNCHANGED, b""
  else:
    mode, payload = candidates.smallest(units, base_units, layout, effort)
  header = _HEADER.pack(
    MAGIC,
    VERSION,
    mode,
    layout.width,
    layout.order,
    layout.mantissa,
    units.size,
    base_digest,
    digest,
    len(payload),
  )
  return header + payload


def read_header(delta: bytes | memoryview) -> Header:
  """Reads and checks the header alone.

  Raises:
    DeltaError: if this isn't a whole delta of this version.
  """
  if len(delta) < HEADER_BYTES:
    raise DeltaError(f"a delta of {len(delta)} bytes is shorter than a header")
  magic, version, mode, *layout, elements, base_digest, digest, length = (
    _HEADER.unpack_from(delta)
  )
  if magic != MAGIC:
    raise DeltaError(f"magic is {magic!r}, not {MAGIC!r}: not a delta")
  if version != VERSION:
    raise DeltaError(f"format version {version}; this code reads {VERSION}")
  if mode not in list(Mode):
    raise DeltaError(f"unknown mode {mode}")
  if len(delta) != HEADER_BYTES + length:
    raise DeltaError(
      f"a delta of {HEADER_BYTES + length} bytes is {len(delta)} long"
    )
  return Header(
    Mode(mode), Layout(*layout), elements, base_digest, digest, length
  )


def decode(
  delta: bytes | memoryview,
  base: Shaped[np.ndarray, "..."] | None = None,
  *,
  out: Shaped[np.ndarray, "..."] | None = None,
) -> Shaped[np.ndarray, "..."]:
  """Applies a delta.

  Nothing is allocated beyond a small multiple of the arrays that the caller
  has: no size in the delta is believed before it was compared with them.

  Args:
    delta: what `encode` returned.
    base: what it was encoded against; never written to. None if it was None.
    out: where the result goes: contiguous, apart from `base`; needed without a
      base. If decoding fails, its contents are undefined.

  Returns:
    `out`, or a new array like `base`.

  Raises:
    DeltaError: if the delta is damaged, `base` isn't its base (noticed before
      anything is written), or `out` doesn't fit.
  """
  header = read_header(delta)
  if out is None:
    if base is None:
      raise DeltaError("without a base, decoding needs `out`")
    out = np.empty(base.shape, base.dtype)
  elif not (out.flags.c_contiguous and out.flags.writeable):
    raise DeltaError("`out` must be contiguous and writeable")
  units = as_units(out)
  if layout_of(out.dtype) != header.layout or units.size != header.elements:
    raise DeltaError(
      f"the delta is for {header.elements} elements of {header.layout}, "
      f"`out` has {units.size} of {layout_of(out.dtype)}"
    )
  base_units = _checked_base(header, base, out)
  payload = memoryview(delta)[HEADER_BYTES:]
  candidates.apply(header.mode, payload, base_units, units, header.layout)
  if header.mode != Mode.UNCHANGED and _digest(units) != header.digest:
    raise DeltaError("the result's digest is not the one in the delta")
  return out


def _checked_base(header, base, out):
  if base is None:
    if header.base_digest != _NO_BASE:
      raise DeltaError("the delta has a base, none was given")
    return None
  if base.dtype != out.dtype or base.size != out.size:
    raise DeltaError(
      f"base is {base.size} elements of {base.dtype}, "
      f"`out` {out.size} of {out.dtype}"
    )
  if header.base_digest == _NO_BASE:
    return None
  if np.may_share_memory(base, out):
    raise DeltaError("`out` overlaps `base`; a failure would destroy the base")
  units = as_units(base)
  if _digest(units) != header.base_digest:
    raise DeltaError("this is not the base that the delta was made against")
  if header.mode == Mode.UNCHANGED and header.digest != header.base_digest:
    raise DeltaError("an unchanged chunk has two digests")
  return units


def _digest(units: UInt[np.ndarray, " N"]) -> bytes:
  return xxhash.xxh3_128_digest(units.view(np.uint8))
