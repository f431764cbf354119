"""Other codecs for a pair of BF16 arrays, to stand beside this project's.

Each encodes a new array against its base, both as flat uint16 bits, into a
tuple whose `bytes` are what would travel, and decodes it again. None checks
anything, but for fireworks-delta-compression (Adler-32 of the result, twice).
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from backports import zstd
from pcodec import ChunkConfig, standalone

_FIREWORKS = Path(__file__).with_name("fireworks_worker.py")


class Codec(NamedTuple):
  """Both directions: `encode(base, new)`, `decode(base, coded, out)`."""

  encode: Callable
  decode: Callable


def ordered(bits: np.ndarray) -> np.ndarray:
  """BF16 bits to integers in the order of the numbers."""
  return bits ^ np.where(bits >> 15, np.uint16(0xFFFF), np.uint16(0x8000))


def unordered(places: np.ndarray) -> np.ndarray:
  """Inverse of `ordered`."""
  return places ^ np.where(places >> 15, np.uint16(0x8000), np.uint16(0xFFFF))


def difference(base: np.ndarray, new: np.ndarray) -> np.ndarray:
  """Signed difference in units in the last place."""
  return (ordered(new) - ordered(base)).view(np.int16)


def add(base: np.ndarray, steps: np.ndarray) -> np.ndarray:
  """Inverse of `difference`."""
  return unordered(ordered(base) + steps.view(np.uint16))


def gaps_then(to_values, from_values, pack, unpack) -> Codec:
  """Gaps between changes and the values there, both through a packer."""

  def encode_pair(base, new):
    places = np.flatnonzero(base != new)
    gaps = np.diff(places, prepend=-1)
    gaps = gaps.astype(np.min_scalar_type(gaps.max(initial=0)))
    if gaps.dtype == np.uint8 and pack is pack_pcodec:
      gaps = gaps.astype(np.uint16)
    values = to_values(base[places], new[places])
    return pack(gaps), gaps.dtype, pack(values), values.dtype

  def decode_pair(base, coded, out):
    gaps, gap_type, values, value_type = coded
    places = np.cumsum(unpack(gaps, gap_type), dtype=np.int64) - 1
    out[:] = base
    out[places] = from_values(base[places], unpack(values, value_type))

  return Codec(encode_pair, decode_pair)


def pack_zstd(array):
  """Level 1, one thread."""
  return zstd.compress(array.tobytes(), 1)


def unpack_zstd(packed, dtype):
  """Inverse of `pack_zstd`."""
  return np.frombuffer(zstd.decompress(packed), dtype)


def pack_pcodec(array):
  """The default level."""
  return standalone.simple_compress(array, ChunkConfig())


def unpack_pcodec(packed, _dtype):
  """Inverse of `pack_pcodec`."""
  return standalone.simple_decompress(packed)


def dense_pcodec() -> Codec:
  """Differences of all elements through pcodec."""

  def decode_pair(base, coded, out):
    out[:] = add(base, unpack_pcodec(coded[0], None))

  return Codec(
    lambda base, new: (pack_pcodec(difference(base, new)),), decode_pair
  )


def xor_zstd() -> Codec:
  """XOR of all elements through zstd-1."""

  def decode_pair(base, coded, out):
    np.bitwise_xor(base, unpack_zstd(coded[0], np.uint16), out=out)

  return Codec(lambda base, new: (pack_zstd(base ^ new),), decode_pair)


def xor_planes() -> Codec:
  """XOR of all elements, low and high bytes apart, through zstd-1."""

  def encode_pair(base, new):
    planes = (base ^ new).view(np.uint8).reshape(-1, 2).T
    return (pack_zstd(np.ascontiguousarray(planes)),)

  def decode_pair(base, coded, out):
    planes = unpack_zstd(coded[0], np.uint8).reshape(2, -1)
    np.bitwise_xor(
      base, np.ascontiguousarray(planes.T).view(np.uint16)[:, 0], out=out
    )

  return Codec(encode_pair, decode_pair)


def patch_from() -> Codec:
  """What `zstd -3 --long=27 --patch-from` does: the base is a prefix.

  Window 2^27 bytes, which holds base and result; long-distance matching,
  without which it finds next to nothing at this size.
  """
  how = zstd.CompressionParameter
  options = {
    how.compression_level: 3,
    how.window_log: 27,
    how.enable_long_distance_matching: 1,
  }
  limit = {zstd.DecompressionParameter.window_log_max: 27}

  def prefix(base):
    return zstd.ZstdDict(base.tobytes(), is_raw=True).as_prefix

  def encode_pair(base, new):
    return (
      zstd.compress(new.tobytes(), options=options, zstd_dict=prefix(base)),
    )

  def decode_pair(base, coded, out):
    raw = zstd.decompress(coded[0], zstd_dict=prefix(base), options=limit)
    out[:] = np.frombuffer(raw, np.uint16)

  return Codec(encode_pair, decode_pair)


def xdelta3() -> Codec:
  """The program, level 9 with its Huffman coder and a source window of 64 MiB.

  Its times include starting it and files in a temporary folder.
  """
  program = [shutil.which("xdelta3"), "-f", "-B", str(2**26), "-s"]

  def run(base, data, *options):
    with tempfile.TemporaryDirectory() as folder:
      old, given, made = (Path(folder) / name for name in "abc")
      base.tofile(old)
      given.write_bytes(data)
      command = [*program, old, *options, given, made]
      subprocess.run(command, check=True, capture_output=True)
      return made.read_bytes()

  def decode_pair(base, coded, out):
    out[:] = np.frombuffer(run(base, coded[0], "-d"), np.uint16)

  return Codec(
    lambda base, new: (run(base, new.tobytes(), "-e", "-9", "-S", "djw"),),
    decode_pair,
  )


PEERS = {
  "gaps+difference zstd-1": gaps_then(difference, add, pack_zstd, unpack_zstd),
  "gaps+xor zstd-1": gaps_then(
    np.bitwise_xor, np.bitwise_xor, pack_zstd, unpack_zstd
  ),
  "gaps+overwrite zstd-1": gaps_then(
    lambda _base, new: new, lambda _base, new: new, pack_zstd, unpack_zstd
  ),
  "gaps+difference pcodec": gaps_then(
    difference, add, pack_pcodec, unpack_pcodec
  ),
  "difference pcodec": dense_pcodec(),
  "xor zstd-1": xor_zstd(),
  "xor planes zstd-1": xor_planes(),
  "zstd-3 --patch-from": patch_from(),
}
if shutil.which("xdelta3"):
  PEERS["xdelta3 -9"] = xdelta3()


def fireworks(python: str, pairs: list) -> list[dict]:
  """Runs arc_v2 and arc_v3 in an environment that has torch.

  Args:
    python: that environment's interpreter.
    pairs: base and new, uint16.

  Returns:
    `codec`, `bytes`, `encode_s`, `decode_s`, over all pairs, for each.

  Raises:
    RuntimeError: it failed, or lost something.
  """
  with tempfile.TemporaryDirectory() as folder:
    for i, (base, new) in enumerate(pairs):
      base.tofile(Path(folder) / f"{i}.base")
      new.tofile(Path(folder) / f"{i}.new")
    done = subprocess.run(
      [python, _FIREWORKS, folder, str(len(pairs))],
      capture_output=True,
      text=True,
    )
  if done.returncode:
    raise RuntimeError(f"{_FIREWORKS.name} failed: {done.stderr[-500:]}")
  return [json.loads(line) for line in done.stdout.splitlines()]


def timed(call: Callable) -> tuple[object, float]:
  """What a call returns, and its seconds."""
  start = time.perf_counter()
  result = call()
  return result, time.perf_counter() - start
