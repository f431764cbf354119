"""The model of the wire: a 1 TB model, and how well runs here agree with it.

    python -m benchmarks.ship_wire [--quick] [--json]

Rows "predicted": 1 TB in bfloat16 from 64 trainers (1 GB/s up each) to 64
readers (1.25 GB/s down each, half of the model each), bits per change as
`benchmarks.delta_codec` measured them at each density. Encoding 0.3 and
applying 0.4 GB/s a core are assumed, about what 60 % density does; sparse
deltas are faster. Rows "published": what others report; other models and
links.

Rows "measured": a snapshot and a delta through a rate-limited folder, up and
down on links of their own. `link_use`: bytes over what the link carries from
the first transfer's begin to the last one's end, pauses included.
"""

import tempfile
import threading
import time

import ml_dtypes
import numpy as np

from benchmarks.delta_codec import make_pair
from benchmarks.harness import arguments, report
from composer_jax.shipping import (
  FolderStore,
  Publisher,
  Subscriber,
  decode,
  encode,
)
from composer_jax.shipping.wire import (
  Readers,
  Service,
  Trainers,
  delta_bytes,
  predict,
  publish_s,
  receive_s,
)
from composer_jax.shipping.wrappers import Throttled, Wrapper

# Density -> bits per change: training at 1e-6, noise, step 1e-6, noise, noise.
BITS = {0.002: 10.7, 0.01: 4.37, 0.033: 6.0, 0.118: 4.32, 0.606: 4.24}
PUBLISHED = [
  ("NeMo-DCR, 120B, full", 750.0),
  ("NeMo-DCR, 120B, 3 %", 24.5),
  ("verl, 235B, full", 256.0),
  ("verl, 235B, delta", 13.0),
]


class Link(Wrapper):
  """A limited link that notes when transfers began and ended."""

  def __init__(self, store, bytes_per_s):
    super().__init__(Throttled(store, bytes_per_s))
    self._lock = threading.Lock()
    self.log = []

  def get(self, key, start=0, size=None):
    """See `Store.get`."""
    began = time.monotonic()
    data = super().get(key, start, size)
    self._note("down", began, len(data))
    return data

  def put(self, key, data):
    """See `Store.put`."""
    began = time.monotonic()
    super().put(key, data)
    self._note("up", began, len(data))

  def _note(self, way, began, size):
    with self._lock:
      self.log.append((way, began, time.monotonic(), size))

  def take(self, way):
    """Bytes and seconds of one way since the last call."""
    log, self.log = [t for t in self.log if t[0] == way], []
    begin, end = min(t[1] for t in log), max(t[2] for t in log)
    return sum(t[3] for t in log), end - begin


def main() -> None:
  """Prints all rows."""
  args = arguments(__doc__.splitlines()[0])
  rate, size = (5e6, 8_000_000) if args.quick else (20e6, 64_000_000)
  rows = [
    *_predicted(),
    *(
      {"row": "published", "what": what, "total_s": s} for what, s in PUBLISHED
    ),
  ]
  report([*rows, *_measured(rate, size)], as_json=args.json)


def _predicted():
  trainers = Trainers(
    hosts=64, upload_bytes_per_s=1e9, cores=16, encode_bytes_per_s=0.3e9
  )
  readers = Readers(
    hosts=64,
    download_bytes_per_s=1.25e9,
    cores=16,
    apply_bytes_per_s=0.4e9,
    share=0.5,
    regions=4,
  )
  service = Service(latency_s=0.05, commit_s=0.1, poll_s=1.0)
  sizes = {"full": 1e12} | {
    f"{share:.1%}": delta_bytes(1e12, changed_share=share, bits_per_change=bits)
    for share, bits in BITS.items()
  }
  for what, size in sizes.items():
    found = predict(1e12, size, trainers, readers, service)
    yield {
      "row": "predicted",
      "what": what,
      "bytes": size,
      "publish_s": found.publish_s,
      "receive_s": found.receive_s,
      "total_s": found.total_s,
      "egress_bytes": found.egress_bytes,
    }


def _measured(rate, size):
  pair = [a.view(ml_dtypes.bfloat16) for a in make_pair("noise 60%", size)]
  trees = [dict(enumerate(np.split(array, 8))) for array in pair]
  trees = [{str(k): v for k, v in tree.items()} for tree in trees]
  with tempfile.TemporaryDirectory() as folder:
    store = FolderStore(folder)
    uplink, downlink = Link(store, rate), Link(store, rate)
    with Publisher(uplink) as publisher, Subscriber(downlink) as reader:
      for what, tree, old in zip(
        ("snapshot", "delta"), trees, (None, trees[0]), strict=True
      ):
        encode_rate, apply_rate = _rates(tree["0"], old and old["0"])
        uplink.log, downlink.log = [], []
        began = time.monotonic()
        publisher.publish(tree).result()
        up_s = time.monotonic() - began
        up_bytes, up_busy = uplink.take("up")
        downlink.log = []  # Its first look was before.
        began = time.monotonic()
        weights = reader.update()
        down_s = time.monotonic() - began
        for name, array in tree.items():
          if weights.tree[name].tobytes() != array.tobytes():
            raise AssertionError(f"{name} arrived with other bits")
        down_bytes, down_busy = downlink.take("down")
        trainers = Trainers(
          hosts=1,
          upload_bytes_per_s=rate,
          cores=2,
          encode_bytes_per_s=encode_rate,
        )
        readers = Readers(
          hosts=1,
          download_bytes_per_s=rate,
          cores=2,
          apply_bytes_per_s=apply_rate,
        )
        for way, moved, busy, seconds, predicted in (
          (
            "up",
            up_bytes,
            up_busy,
            up_s,
            publish_s(2.0 * size, up_bytes, trainers, Service()),
          ),
          (
            "down",
            down_bytes,
            down_busy,
            down_s,
            receive_s(2.0 * size, down_bytes, readers, Service()),
          ),
        ):
          yield {
            "row": "measured",
            "what": f"{what} {way}",
            "bytes": moved,
            "seconds": seconds,
            "link_use": moved / busy / rate,
            "predicted_seconds": predicted,
            "predicted_over_measured": predicted / seconds,
          }


def _rates(new, old):
  """Bytes of contents a second that one thread encodes and applies."""
  new = new[:4_000_000]
  old = None if old is None else old[:4_000_000]
  out = np.empty_like(new)
  decode(encode(new, old), old, out=out)  # compiles
  began = time.monotonic()
  delta = encode(new, old)
  encoded = time.monotonic()
  decode(delta, old, out=out)
  return new.nbytes / (encoded - began), new.nbytes / (
    time.monotonic() - encoded
  )


if __name__ == "__main__":
  main()
