"""Every dtype, bit for bit, smaller than the entropy; hostile bytes refused."""

import contextlib
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.shipping import DeltaError, decode, encode, read_header
from composer_jax.shipping import candidates as candidates_lib
from composer_jax.shipping import delta as delta_lib
from composer_jax.shipping.candidates import Mode
from composer_jax.shipping.layout import as_units, layout_of

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
  "bfloat16",
  "float16",
  "float32",
  "float64",
  "float8_e4m3fn",
  "float8_e5m2",
  "float8_e8m0fnu",
  "float8_e4m3fnuz",
  "float4_e2m1fn",
  "int4",
  "uint4",
  "bool",
  *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
  "complex64",
  "complex128",
]
# Numba compiles a loop when a width is first seen.
patient = settings(deadline=None, max_examples=60)


def bits(array):
  return array.tobytes()


def noisy(rng, size, sigma, dtype=BF16):
  base = rng.standard_normal(size, dtype=np.float32).astype(dtype)
  noise = np.float32(sigma) * rng.standard_normal(size, dtype=np.float32)
  return base, (base.astype(np.float32) + noise).astype(dtype)


def order0_bytes(base, new):
  """Entropy of where it changes plus, there, of the ordered differences."""
  ordered = [as_units(x).astype(np.int64) for x in (base, new)]
  ordered = [np.where(u & 0x8000, 0xFFFF - u, u | 0x8000) for u in ordered]
  difference = ordered[1] - ordered[0]
  changed = difference != 0
  values = np.unique(difference[changed], return_counts=True)[1]
  return sum(
    counts.sum() * -(p * np.log2(p)).sum() / 8
    for counts in (np.bincount(changed), values)
    for p in [counts[counts > 0] / counts.sum()]
  )


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(deadline=None, max_examples=8)
def test_any_bits_survive(dtype, data):
  dtype = np.dtype(dtype)
  size = data.draw(st.integers(0, 300))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
  density = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))

  def anything():  # every bit pattern: NaN payloads, infinities, both zeros
    if dtype.kind == "b":
      return rng.integers(0, 2, size).astype(bool)
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype)

  base = anything()
  new = np.where(rng.random(size) < density, anything(), base)
  for effort in ("small", "fast"):
    assert bits(decode(encode(new, base, effort=effort), base)) == bits(new)
  alone = encode(new)
  assert bits(decode(alone, out=np.empty_like(new))) == bits(new)
  assert len(alone) <= new.nbytes + delta_lib.HEADER_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_and_stride(dtype):
  rng = np.random.default_rng(0)
  whole = [
    rng.integers(0, 2, (6, 8, 10), np.uint8).astype(bool).astype(dtype)
    for _ in range(2)
  ]
  cuts = {
    "scalar": np.s_[0, 0, 0],
    "empty": np.s_[:0],
    "empty inside": np.s_[:, 3:3],
    "strided": np.s_[::2, ::3, 1::2],
    "backwards": np.s_[::-1, :, ::-1],
    "column": np.s_[:, 1, 1],
    "copies": np.s_[:, None],
  }
  for name, cut in cuts.items():
    base, new = (np.asarray(array[cut]) for array in whole)
    made = decode(encode(new, base), base)
    assert made.shape == new.shape and made.dtype == new.dtype, name
    assert bits(made) == bits(new), name
  base, new = (array.T for array in whole)
  assert bits(decode(encode(new, base), base)) == bits(new)
  base, new = (np.broadcast_to(array[:1], (4, 8, 10)) for array in whole)
  assert bits(decode(encode(new, base), base)) == bits(new)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
@pytest.mark.parametrize("effort", ["small", "fast"])
def test_every_pattern_of_a_unit(dtype, effort):
  """Every NaN, both zeros, both infinities; at widths where that is feasible.

  Wider units run through all patterns of their top 16 bits.
  """
  dtype = np.dtype(dtype)
  layout = layout_of(dtype)
  patterns = np.arange(2 ** min(16, 8 * layout.width), dtype=np.uint64)
  patterns <<= np.uint64(max(0, 8 * layout.width - 16))
  base = patterns.astype(layout.unit)
  moves = {
    "sign": base ^ layout.unit.type(1 << (8 * layout.width - 1)),
    "lowest bit": base ^ layout.unit.type(1),
    "all": ~base,
    "some": np.where(patterns % 7 == 0, base + layout.unit.type(1), base),
  }
  for name, new in moves.items():
    new, old = new.view(dtype), base.view(dtype)
    delta = encode(new, old, effort=effort)
    assert read_header(delta).mode != Mode.UNCHANGED, name
    assert bits(decode(delta, old)) == bits(new), name


@given(
  steps=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50),
  op=st.sampled_from(candidates_lib.OPS),
  mode=st.sampled_from([Mode.SPARSE, Mode.STRATA, Mode.DENSE]),
  limit=st.sampled_from([1, 16]),
  lowest=st.integers(0, 255),
)
@patient
def test_every_candidate_is_lossless(steps, op, mode, limit, lowest):
  base = np.arange(0, 65536, 97, dtype=np.uint16)
  new = base.copy()
  new[: len(steps)] += np.array(steps).astype(np.uint16)
  layout = layout_of(BF16)
  limit = {Mode.SPARSE: 1, Mode.STRATA: 16, Mode.DENSE: limit}[mode]
  candidate = candidates_lib._Candidate(mode, op, limit)
  payload = candidates_lib._write(candidate, new, base, layout, lowest)
  out = np.empty_like(base)
  candidates_lib.apply(mode, b"".join(payload.parts), base, out, layout)
  assert (out == new).all()


@pytest.mark.parametrize("effort", ["small", "fast"])
@pytest.mark.parametrize("sigma", [4e-5, 1e-3, 1e-2])
def test_within_five_percent_of_the_entropy(sigma, effort):
  base, new = noisy(np.random.default_rng(0), 2_000_000, sigma)
  assert (base != new).mean() > 0.005
  delta = encode(new, base, effort=effort)
  assert len(delta) < 1.05 * order0_bytes(base, new)
  if effort == "small":  # exponents tell what will change
    assert len(delta) < 0.92 * order0_bytes(base, new)
  assert bits(decode(delta, base)) == bits(new)


def test_the_same_bytes_every_time():
  base, new = noisy(np.random.default_rng(1), 200_000, 1e-4)
  assert encode(new, base) == encode(new.copy(), base.copy())
  assert encode(new[::2], base[::2]) == encode(new[::2].copy(), base[::2])


def test_zeros_and_nans_are_bits_not_values():
  base = np.array([0.0, np.nan, 1.0], np.float32)
  new = np.array([-0.0, np.nan, 1.0], np.float32)
  new.view(np.uint32)[1] ^= 1  # another payload, still NaN
  delta = encode(new, base)
  assert read_header(delta).mode != Mode.UNCHANGED
  assert bits(decode(delta, base)) == bits(new)


def test_unchanged_is_a_header():
  base = np.full((3, 5), np.nan, BF16)
  delta = encode(base.copy(), base)
  assert len(delta) == delta_lib.HEADER_BYTES
  assert decode(delta, base).shape == (3, 5)


def test_a_hundred_updates_stay_exact():
  rng = np.random.default_rng(2)
  held, _ = noisy(rng, 5000, 0)
  truth = held.copy()
  buffers = [held, np.empty_like(held)]
  for _ in range(100):
    noise = 1e-3 * rng.standard_normal(truth.size, dtype=np.float32)
    following = (truth.astype(np.float32) + noise).astype(BF16)
    delta = encode(following, truth)
    decode(delta, buffers[0], out=buffers[1])
    buffers.reverse()
    truth = following
    assert bits(buffers[0]) == bits(truth)


def test_a_wrong_base_is_noticed_before_anything_is_written():
  base, new = noisy(np.random.default_rng(3), 1000, 1e-3)
  delta = encode(new, base)
  out = np.zeros_like(base)
  wrong = base.copy()
  wrong.view(np.uint16)[7] ^= 1
  with pytest.raises(DeltaError, match="not the base"):
    decode(delta, wrong, out=out)
  assert not out.view(np.uint16).any()
  before = base.copy()
  with pytest.raises(DeltaError, match="overlaps"):
    decode(delta, base, out=base)
  assert bits(before) == bits(base)


def test_mistakes_get_a_sentence():
  base, new = noisy(np.random.default_rng(4), 100, 1e-3)
  delta = encode(new, base)
  with pytest.raises(DeltaError, match="99 of bfloat16"):
    encode(new, base[:99])
  with pytest.raises(DeltaError, match="float16"):
    encode(new, base.view(np.float16))
  with pytest.raises(DeltaError, match="has a base, none"):
    decode(delta, out=new.copy())
  with pytest.raises(DeltaError, match="needs `out`"):
    decode(encode(new))
  with pytest.raises(DeltaError, match="for 100 elements"):
    decode(delta, base[:50])
  with pytest.raises(DeltaError, match="for 100 elements"):
    decode(delta, base.view(np.float16))
  for dtype in ("O", "U4", "M8[s]", "f16"):
    with pytest.raises(DeltaError, match="dtype"):
      encode(np.zeros(3, dtype))
  with pytest.raises(DeltaError, match="big-endian"):
    encode(np.zeros(3, ">f4"))
  with pytest.raises(DeltaError, match="version 2"):
    read_header(delta[:4] + b"\x02" + delta[5:])
  with pytest.raises(DeltaError, match="not a delta"):
    read_header(b"PK" + delta[2:])


def victims():
  rng = np.random.default_rng(5)
  for sigma in (4e-4, 1e-2):
    base, new = noisy(rng, 2000, sigma)
    for effort in ("small", "fast"):
      yield base, new, encode(new, base, effort=effort)
  base, new = noisy(rng, 120_000, 1e-4)
  yield base, new, encode(new, base)
  yield None, new, encode(new)


VICTIMS = list(victims())


def test_victims_cover_the_modes():
  modes = {read_header(delta).mode for *_, delta in VICTIMS}
  assert modes >= {Mode.PLANES, Mode.SPARSE, Mode.STRATA, Mode.DENSE}


@given(
  victim=st.sampled_from(VICTIMS),
  place=st.floats(0, 1, exclude_max=True),
  junk=st.binary(min_size=0, max_size=12),
  cut=st.integers(0, 12),
  head=st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_damage_is_refused(victim, place, junk, cut, head):
  base, new, delta = victim
  at = int(place * (200 if head else len(delta)))
  damaged = delta[:at] + junk + delta[at + cut :]
  out = np.empty_like(new)
  try:
    decode(damaged, base, out=out)
  except DeltaError:
    pass
  else:
    # A field that this mode doesn't use; what came out is right.
    assert bits(out) == bits(new)


@given(
  victim=st.sampled_from(VICTIMS),
  mode=st.sampled_from(list(Mode)),
  place=st.floats(0, 1, exclude_max=True),
  junk=st.binary(min_size=0, max_size=40),
  head=st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_hostile_payloads_never_crash(victim, mode, place, junk, head):
  """As above, but past the header: no digest stands in the way."""
  base, new, delta = victim
  payload = delta[delta_lib.HEADER_BYTES :]
  at = int(place * (150 if head else len(payload)))
  hostile = payload[:at] + junk + payload[at + len(junk) :]
  units = as_units(np.empty_like(new))
  base = None if base is None else as_units(base)
  mode = mode if head else read_header(delta).mode
  with contextlib.suppress(DeltaError):
    candidates_lib.apply(mode, hostile, base, units, layout_of(new.dtype))


def test_claimed_sizes_allocate_nothing():
  base, new = noisy(np.random.default_rng(6), 2000, 4e-4)
  delta = bytearray(encode(new, base, effort="fast"))
  header = delta_lib.HEADER_BYTES
  for at, size in ((9, 8), (header + 3, 8), (header + 11, 4), (header + 15, 8)):
    claim = bytearray(delta)
    claim[at : at + size] = struct.pack("<Q", 2**62)[-size:]
    with pytest.raises(DeltaError):
      decode(bytes(claim), base)
