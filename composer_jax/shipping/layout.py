"""How the bits of each dtype are ordered, so that differences come out small.

A chunk is compared as unsigned integers of the width of its dtype. An
order-preserving map makes neighbouring floats neighbouring integers, across
zero too: one unit in the last place becomes a difference of one, -0.0 and +0.0
stay apart, and the bits of a NaN survive.
"""

import dataclasses

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt

from composer_jax.shipping.errors import DeltaError

UNSIGNED, SIGNED, FLOAT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Layout:
  """What the codec knows of a dtype.

  Attributes:
    width: bytes an element: 1, 2, 4 or 8.
    order: how bits map to ordered integers: UNSIGNED, SIGNED (two's complement)
      or FLOAT (sign and magnitude).
    mantissa: bits below the exponent (0 unless FLOAT).
  """

  width: int
  order: int
  mantissa: int

  @property
  def unit(self) -> np.dtype:
    """The unsigned integer of this width, little-endian."""
    return np.dtype(f"<u{self.width}")


def layout_of(dtype: np.dtype) -> Layout:
  """The layout of a dtype.

  Bytes that hold several numbers, and types that use only a part of one (int4,
  float4), count as unsigned bytes; complex numbers as their parts.

  Raises:
    DeltaError: for objects, strings, structures and widths over 8 bytes.
  """
  dtype = np.dtype(dtype)
  if dtype.kind == "c":
    dtype = np.dtype(f"f{dtype.itemsize // 2}")
  width = dtype.itemsize
  if dtype.hasobject or (dtype.kind in "SUVOMm" and not _is_ml_dtype(dtype)):
    raise DeltaError(f"dtype {dtype} isn't made of plain numbers")
  if width not in (1, 2, 4, 8):
    raise DeltaError(f"dtype {dtype} is {width} bytes wide, not 1, 2, 4 or 8")
  if dtype.kind == "i":
    return Layout(width, SIGNED, 0)
  if dtype.kind == "f" or _is_ml_dtype(dtype):
    try:
      info = ml_dtypes.finfo(dtype)
    except ValueError:
      return Layout(width, UNSIGNED, 0)
    if info.bits == 8 * width and info.nexp + info.nmant + 1 == info.bits:
      return Layout(width, FLOAT, int(info.nmant))
  return Layout(width, UNSIGNED, 0)


def _is_ml_dtype(dtype: np.dtype) -> bool:
  return dtype.type.__module__.startswith("ml_dtypes")


def as_units(array: Shaped[np.ndarray, "..."]) -> UInt[np.ndarray, " N"]:
  """The array's bits as a flat array of unsigned integers; copies if strided.

  Raises:
    DeltaError: as `layout_of`, or when the array is not little-endian.
  """
  layout = layout_of(array.dtype)
  if array.dtype.byteorder == ">":
    raise DeltaError(f"dtype {array.dtype} is big-endian; convert it first")
  if not array.flags.c_contiguous:
    array = np.ascontiguousarray(array)
  return array.reshape(-1).view(layout.unit)
