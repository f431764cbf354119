"""How fast this machine and this store ship weights: a trial with made-up ones.

A chain of its own below a throwaway prefix of the store, a publisher and some
readers, all in this process; every reader's bits are compared with the
publisher's at every version. What it wrote is deleted, however it ends.
"""

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from composer_jax.shipping.contents import ArraySpec, cut
from composer_jax.shipping.delta import decode, encode
from composer_jax.shipping.errors import ChainError
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.store import Store
from composer_jax.shipping.subscriber import Subscriber
from composer_jax.shipping.wrappers import Counted, Prefixed, Throttled

_COLUMNS = 1024
_ARRAYS = 8
_FOLDERS = ("log", "data", "leases", "readers")

Tree = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclasses.dataclass(frozen=True)
class TrialConfig:
  """What is shipped, to whom.

  Attributes:
    size_mb: of the weights, bfloat16, megabytes.
    density: share of elements that a version moves, by one unit in the last
      place.
    versions: the first is a snapshot, the others are deltas.
    readers: each downloads everything.
    bandwidth_mb_s: of the publisher's link and of each reader's, both ways,
      megabytes a second; None is whatever there is.
  """

  size_mb: float = 64.0
  density: float = 0.01
  versions: int = 5
  readers: int = 2
  bandwidth_mb_s: float | None = None

  def __post_init__(self):
    if not 0 <= self.density <= 1:
      raise ValueError(f"density is a share of 0 to 1, not {self.density}")
    if self.size_mb <= 0 or self.versions < 1 or self.readers < 1:
      raise ValueError("size, versions and readers are 1 or more")
    if self.bandwidth_mb_s is not None and self.bandwidth_mb_s <= 0:
      raise ValueError("bandwidth is more than 0; leave it out for no limit")


@dataclasses.dataclass(frozen=True)
class Shipped:
  """One version.

  Attributes:
    version: its number.
    full_bytes: of the weights.
    bytes: to download.
    publish_s: from `publish` to the commit.
    update_s: from the commit until the last reader exposed it.
  """

  version: int
  full_bytes: int
  bytes: int
  publish_s: float
  update_s: float


@dataclasses.dataclass(frozen=True)
class Rates:
  """What was measured over the whole trial.

  Attributes:
    encode_gb_s: contents by one thread, of the last delta.
    apply_gb_s: likewise, digests checked.
    upload_mb_s: while uploads lasted.
    download_mb_s: of a reader on average, while its downloads lasted.
  """

  encode_gb_s: float
  apply_gb_s: float
  upload_mb_s: float
  download_mb_s: float


def run_trial(
  store: Store, config: TrialConfig, prefix: str
) -> Iterator[Shipped | Rates]:
  """Ships versions; close the iterator to end it early.

  Args:
    store: where nothing lies below `prefix`.
    config: what to ship.
    prefix: the segments of a key.

  Yields:
    Each version, once every reader has it, then the rates.

  Raises:
    ChainError: if a reader's bits differ.
    StoreError: if the store failed.
  """
  below = Prefixed(store, prefix)

  def link() -> Counted:
    if config.bandwidth_mb_s is None:
      return Counted(below)
    return Counted(Throttled(below, config.bandwidth_mb_s * 1e6))

  uplink, downlinks = link(), [link() for _ in range(config.readers)]
  old = new = None
  try:
    with contextlib.ExitStack() as stack:
      publisher = stack.enter_context(Publisher(uplink))
      readers = [
        stack.enter_context(Subscriber(link, name=f"reader-{number}"))
        for number, link in enumerate(downlinks)
      ]
      pool = stack.enter_context(
        concurrent.futures.ThreadPoolExecutor(config.readers)
      )
      for tree in _history(config):
        old, new = new, tree
        began = time.monotonic()
        version = publisher.publish(tree).result()
        committed = time.monotonic()
        for weights in pool.map(lambda reader: reader.update(), readers):
          _compare(weights, version, tree)
        deliveries = publisher.chain.deliveries[version]
        yield Shipped(
          version,
          sum(array.nbytes for array in tree.values()),
          min(delivery.size for delivery in deliveries),
          committed - began,
          time.monotonic() - committed,
        )
    yield Rates(
      *_codec_rates(old, new),
      uplink.up.mb_per_s,
      float(np.mean([link.down.mb_per_s for link in downlinks])),
    )
  finally:
    for folder in _FOLDERS:
      for key in list(below.list(folder)):
        below.delete(key)


def _history(config: TrialConfig) -> Iterator[Tree]:
  rng = np.random.default_rng(0)
  rows = max(1, round(config.size_mb * 1e6 / (2 * _COLUMNS * _ARRAYS)))
  tree = {
    f"layers/{i}/kernel": (
      rng.standard_normal((rows, _COLUMNS), np.float32) * 0.02
    ).astype(ml_dtypes.bfloat16)
    for i in range(_ARRAYS)
  }
  yield tree
  for _ in range(config.versions - 1):
    tree = {path: _step(rng, a, config.density) for path, a in tree.items()}
    yield tree


def _step(rng, array, density):
  moves = rng.random(array.shape, np.float32) < density
  ups = rng.integers(0, 2, array.shape, np.uint16) * 2 - 1
  bits = array.view(np.uint16) + np.where(moves, ups, 0).astype(np.uint16)
  return bits.view(array.dtype)


def _compare(weights, version, tree) -> None:
  same = weights.version == version and all(
    np.array_equal(weights.tree[path].view(np.uint16), array.view(np.uint16))
    for path, array in tree.items()
  )
  if not same:
    raise ChainError(f"a reader's bits of version {version} are others")


def _codec_rates(old: Tree | None, new: Tree) -> tuple[float, float]:
  """Gigabytes a second of one thread, encoding and decoding."""
  size = encode_s = decode_s = 0.0
  for path, array in new.items():
    whole = ArraySpec(array.shape, array.dtype.name).whole
    for box in cut(whole, array.itemsize, PublisherConfig().chunk_bytes):
      chunk = array[box.within(whole)]
      base = None if old is None else old[path][box.within(whole)]
      out = np.empty_like(chunk)
      began = time.monotonic()
      delta = encode(chunk, base)
      encoded = time.monotonic()
      decode(delta, base, out=out)
      decode_s += time.monotonic() - encoded
      encode_s += encoded - began
      size += chunk.nbytes
  return size / 1e9 / encode_s, size / 1e9 / decode_s
