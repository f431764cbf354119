"""Arrays in JSON: `{"dtype": "uint8", "shape": [2, 3], "base64": "..."}`.

The elements in C order, little-endian. A route of a thousand tokens, 60 layers
and 8 experts is half a million numbers: as text it would take four times as
long on the wire, and minutes of a busy server's time.
"""

import base64
import binascii
import math
from typing import Any

import numpy as np
from jaxtyping import Num

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64", "float32")


def pack(array: Num[np.ndarray, "..."]) -> dict[str, Any]:
  """An array as an object that JSON can say."""
  little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
  return {
    "dtype": array.dtype.name,
    "shape": list(array.shape),
    "base64": base64.b64encode(little.tobytes()).decode(),
  }


def unpack(packed: dict[str, Any]) -> Num[np.ndarray, "..."]:
  """The array that `pack` was given.

  Raises:
    ValueError: it isn't one; says why.
  """
  try:
    name, shape, text = packed["dtype"], packed["shape"], packed["base64"]
  except (KeyError, TypeError):
    raise ValueError(
      "A packed array is an object with dtype, shape and base64."
    ) from None
  if name not in _DTYPES:
    raise ValueError(f"dtype {name!r} isn't one of {', '.join(_DTYPES)}.")
  dtype = np.dtype(name)
  try:
    data = base64.b64decode(text, validate=True)
    wanted = math.prod(shape) * dtype.itemsize
  except (binascii.Error, ValueError, TypeError) as error:
    raise ValueError(f"The packed array is damaged: {error}.") from error
  if any(size < 0 for size in shape) or len(data) != wanted:
    raise ValueError(f"{name}{shape} isn't {len(data)} bytes.")
  array = np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)
  return array.astype(dtype)
