"""How small is a weight delta, and how fast, beside other codecs?

  python -m benchmarks.delta_codec [--quick] [--json] [--cache=FOLDER]
      [--optimizer=muon] [--fireworks-python=PATH] [--cases=PREFIX]

Cases, pairs of BF16 arrays:

  noise   20M normal weights, plus noise of a standard deviation that makes
          about 1, 12 and 60 % of them change. The published test of NeMo-DCR
          is of this kind, but its inputs are not public, so its two codecs
          (gaps between changes, then new bits or XOR, zstd-1) are rebuilt here.
  step    20M float32 masters of deviation 0.02, moved by a learning rate times
          a normal number; base and result are rounded from the masters. It
          stands for training, it is not a recording of any.
  train   ten updates out of forty of the `tiny` model at that learning rate,
          from one mid-trained state; see `train_deltas`. Each update is a pair
          of its own; sizes and times are sums over them.

`entropy_bytes` is the order-0 entropy of the positions of changes plus that of
the signed differences at them: what no codec can beat that sees changes alone.
`ours` does, since it reads in the base which elements will change; `ours-fast`
doesn't read it. Both also check XXH3-128 of base and result, both ways, in the
times given. Every decoded result is compared with the truth first. One thread
each, but for arc_v3; times are medians with the codecs taking turns, except of
what takes over half a second (timed once), and of arc_v2 and arc_v3, which run
in a process of their own.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import harness
from benchmarks.delta_peers import PEERS, Codec, difference, fireworks, timed
from composer_jax.shipping import decode, encode

BF16 = np.dtype(ml_dtypes.bfloat16)
_SLOW = 0.5  # seconds: what takes longer is timed once
NOISE = {"noise 1%": 4.3e-5, "noise 12%": 5.1e-4, "noise 60%": 3.9e-3}
STEPS = {"step 1e-6": 1e-6, "step 1e-5": 1e-5, "step 1e-4": 1e-4}


def make_pair(case: str, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Base and result of a synthetic case, as BF16 bits."""
  rng = np.random.default_rng(0)
  weights = rng.standard_normal(size, dtype=np.float32)
  step = rng.standard_normal(size, dtype=np.float32)
  if case in STEPS:
    weights *= np.float32(0.02)
    following = weights + np.float32(STEPS[case]) * step
    base = weights.astype(BF16)
  else:
    base = weights.astype(BF16)
    following = base.astype(np.float32) + np.float32(NOISE[case]) * step
  return base.view(np.uint16), following.astype(BF16).view(np.uint16)


def entropy_bytes(base: np.ndarray, new: np.ndarray) -> float:
  """Order-0 entropy of positions plus that of differences there, in bytes."""
  steps = difference(base, new).view(np.uint16)
  counts = np.bincount(steps, minlength=65536)
  changed = np.array([counts[0], len(steps) - counts[0]])
  return (_bits(changed) + _bits(counts[1:])) / 8


def _bits(counts):
  counts = counts[counts > 0]
  return -(counts * np.log2(counts / counts.sum())).sum()


def ours(effort: str) -> Codec:
  """This project's codec, on BF16."""
  return Codec(
    lambda base, new: (encode(new.view(BF16), base.view(BF16), effort=effort),),
    lambda base, coded, out: decode(
      coded[0], base.view(BF16), out=out.view(BF16)
    ),
  )


CODECS = {"ours": ours("small"), "ours-fast": ours("fast"), **PEERS}


def measure(case: str, pairs: list, fireworks_python: str = "") -> list[dict]:
  """Rows of one case: every codec on the same pairs."""
  sizes, seconds, calls = {}, {}, {}
  outs = [np.empty_like(base) for base, _ in pairs]
  for name, codec in CODECS.items():

    def encode_all(codec=codec):
      return [codec.encode(base, new) for base, new in pairs]

    # A codec's loops are compiled, or its pages touched, when first used.
    base, new = pairs[0]
    codec.decode(base, codec.encode(base, new), outs[0])
    coded, encode_s = timed(encode_all)

    def decode_all(codec=codec, coded=coded):
      for (base, _), parts, out in zip(pairs, coded, outs, strict=True):
        codec.decode(base, parts, out)

    for out in outs:
      out.fill(0)
    _, decode_s = timed(decode_all)
    for (_, new), out in zip(pairs, outs, strict=True):
      if not np.array_equal(out, new):
        raise AssertionError(f"{name} lost something in {case}")
    sizes[name] = sum(
      len(part) for parts in coded for part in parts if isinstance(part, bytes)
    )
    for way, call, spent in (
      ("encode", encode_all, encode_s),
      ("decode", decode_all, decode_s),
    ):
      seconds[name, way] = spent
      if spent < _SLOW:
        calls[name, way] = call
  medians = harness.median_ms(calls, rounds=3)
  seconds |= {key: ms / 1e3 for key, ms in medians.items()}
  if fireworks_python:
    for row in fireworks(fireworks_python, pairs):
      sizes[row["codec"]] = row["bytes"]
      for way in ("encode", "decode"):
        seconds[row["codec"], way] = row[f"{way}_s"]
  full = sum(base.nbytes for base, _ in pairs)
  changes = sum(int(np.count_nonzero(base != new)) for base, new in pairs)
  floor = sum(entropy_bytes(base, new) for base, new in pairs)
  return [
    {
      "case": case,
      "codec": name,
      "changed": 2 * changes / full,
      "bytes": size,
      "entropy_bytes": round(floor),
      "of_entropy": size / floor,
      "of_ours": size / sizes["ours"],
      "times_smaller": full / size,
      "bits_a_change": 8 * size / max(1, changes),
      "encode_gb_s": full / seconds[name, "encode"] / 1e9,
      "decode_gb_s": full / seconds[name, "decode"] / 1e9,
    }
    for name, size in sizes.items()
  ]


def make_cases(args) -> Iterator[tuple[str, list]]:
  """Names and pairs, one case in memory at a time."""
  size = 1_000_000 if args.quick else 20_000_000
  for case in NOISE | STEPS:
    if case.startswith(args.cases):
      yield case, [make_pair(case, size)]
  if "train".startswith(args.cases) or args.cases.startswith("train"):
    # JAX's compilations take longer than the other cases of a quick run.
    from benchmarks.train_deltas import train_pairs

    with tempfile.TemporaryDirectory() as folder:
      trained = train_pairs(
        Path(args.cache or folder), args.optimizer, quick=args.quick
      )
    for case, pairs in trained.items():
      if case.startswith(args.cases):
        yield case, pairs


def add_flags(parser) -> None:
  """Flags of this benchmark alone."""
  parser.add_argument(
    "--cache", help="folder that keeps what training left, for the next run"
  )
  parser.add_argument(
    "--optimizer",
    choices=["muon", "adamw"],
    default="muon",
    help="of the train cases; the config's own is muon",
  )
  parser.add_argument(
    "--fireworks-python",
    default="",
    help="interpreter that has fireworks-delta-compression and torch",
  )
  parser.add_argument("--cases", default="", help="those that begin so")


def main() -> None:
  """Prints the table; peers that can't run here are named on stderr."""
  args = harness.arguments(__doc__.split("\n", maxsplit=1)[0], add_flags)
  if not shutil.which("xdelta3"):
    print("xdelta3 is not on PATH: its rows are left out", file=sys.stderr)
  if not args.fireworks_python:
    print(
      "arc_v2 and arc_v3 are left out: they need --fireworks-python",
      file=sys.stderr,
    )
  rows = [
    row
    for case, pairs in make_cases(args)
    for row in measure(case, pairs, args.fireworks_python)
  ]
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
