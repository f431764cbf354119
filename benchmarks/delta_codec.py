"""How small is a weight delta, and how fast, beside other codecs?

  python -m benchmarks.delta_codec [--quick] [--json]

Pairs of 20M BF16 elements. `noise`: normal weights, plus noise of a standard
deviation that makes about 1, 12 and 60 % of them change; the published test of
NeMo-DCR is of this kind, but its inputs are not public, so its two codecs
(gaps between changes, then new bits or XOR, zstd-1) are rebuilt here. `step`:
float32 master weights of deviation 0.02, moved by a learning rate times a
normal number, which is how large Adam's steps are; base and result are rounded
from the masters. It stands for training, it is not a recording of any.

`entropy_bytes` is the order-0 entropy of the positions of changes plus that of
the signed differences at them: what no codec can beat that sees changes alone.
`ours` does, since it reads in the base which elements will change; `ours-fast`
doesn't read it. Both also check XXH3-128 of base and result, both ways, in the
times given; no peer checks anything. Every decoded result is compared with the
truth first. One thread each; times are medians, with the peers taking turns.
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
from backports import zstd
from pcodec import ChunkConfig, standalone

from benchmarks import harness
from composer_jax.shipping import decode, encode

BF16 = np.dtype(ml_dtypes.bfloat16)
NOISE = {"noise 1%": 4.3e-5, "noise 12%": 5.1e-4, "noise 60%": 3.9e-3}
STEPS = {"step 1e-6": 1e-6, "step 1e-5": 1e-5, "step 1e-4": 1e-4}
NOT_RUN = {
  "xdelta3": "no wheel of it is published",
  "fireworks_delta_compression": "it needs torch, in an environment of its own",
}


class Codec(NamedTuple):
  """A peer: both directions on flat uint16 bits."""

  encode: Callable
  decode: Callable


def make_pair(case: str, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Base and result of a case, as BF16."""
  rng = np.random.default_rng(0)
  weights = rng.standard_normal(size, dtype=np.float32)
  step = rng.standard_normal(size, dtype=np.float32)
  if case in STEPS:
    weights *= np.float32(0.02)
    following = weights + np.float32(STEPS[case]) * step
    return weights.astype(BF16), following.astype(BF16)
  base = weights.astype(BF16)
  following = base.astype(np.float32) + np.float32(NOISE[case]) * step
  return base, following.astype(BF16)


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


def entropy_bytes(base: np.ndarray, new: np.ndarray) -> float:
  """Order-0 entropy of positions plus that of differences there, in bytes."""
  steps = difference(base, new).view(np.uint16)
  counts = np.bincount(steps, minlength=65536)
  changed = np.array([counts[0], len(steps) - counts[0]])
  return (_bits(changed) + _bits(counts[1:])) / 8


def _bits(counts):
  counts = counts[counts > 0]
  return -(counts * np.log2(counts / counts.sum())).sum()


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

  Without long-distance matching it finds next to nothing at this size.
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


def ours(effort: str) -> Codec:
  """This project's codec, on BF16."""
  return Codec(
    lambda base, new: (encode(new.view(BF16), base.view(BF16), effort=effort),),
    lambda base, coded, out: decode(
      coded[0], base.view(BF16), out=out.view(BF16)
    ),
  )


CODECS = {
  "ours": ours("small"),
  "ours-fast": ours("fast"),
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
  "xor planes zstd-1": xor_planes(),
  "zstd-3 --patch-from": patch_from(),
}


def measure(case: str, size: int) -> list[dict]:
  """Rows of one case: every codec on the same pair."""
  base, new = (array.view(np.uint16) for array in make_pair(case, size))
  coded, outs = {}, {}
  for name, codec in CODECS.items():
    coded[name] = codec.encode(base, new)
    outs[name] = np.empty_like(base)
    codec.decode(base, coded[name], outs[name])
    if not np.array_equal(outs[name], new):
      raise AssertionError(f"{name} lost something in {case}")
  names = CODECS.items()
  encode_ms = harness.median_ms(
    {name: lambda c=codec: c.encode(base, new) for name, codec in names},
    rounds=3,
  )
  decode_ms = harness.median_ms(
    {
      name: lambda n=name, c=codec: c.decode(base, coded[n], outs[n])
      for name, codec in names
    },
    rounds=3,
  )
  floor = entropy_bytes(base, new)
  sizes = {
    name: sum(len(part) for part in parts if isinstance(part, bytes))
    for name, parts in coded.items()
  }
  return [
    {
      "case": case,
      "codec": name,
      "changed": float(np.mean(base != new)),
      "bytes": sizes[name],
      "entropy_bytes": round(floor),
      "of_entropy": sizes[name] / floor,
      "of_ours": sizes[name] / sizes["ours"],
      "of_full": sizes[name] / base.nbytes,
      "encode_gb_s": base.nbytes / encode_ms[name] / 1e6,
      "decode_gb_s": base.nbytes / decode_ms[name] / 1e6,
    }
    for name in CODECS
  ]


def main() -> None:
  """Prints the table; peers that can't run here are named on stderr."""
  args = harness.arguments(__doc__.split("\n", maxsplit=1)[0])
  for package, reason in NOT_RUN.items():
    if importlib.util.find_spec(package) is None:
      print(f"{package}: not run; {reason}", file=sys.stderr)
    else:
      print(f"{package}: installed, but no adapter here", file=sys.stderr)
  size = 1_000_000 if args.quick else 20_000_000
  rows = [row for case in NOISE | STEPS for row in measure(case, size)]
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
