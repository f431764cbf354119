"""Does a chain of a training run's versions arrive, and how small is it?

The tiny model goes on training at a constant learning rate; each update is a
version, published from a mesh (fsdp 4 x tensor 2) and followed by two readers:
one with another sharding (expert 8), one that wants NumPy arrays. At every
version both readers' bits are compared with the trainer's.

    python -m benchmarks.ship_chain --json             # 200 versions a rate
    python -m benchmarks.ship_chain --store=s3         # moto's server, local
    python -m benchmarks.ship_chain --store=s3://bucket/prefix

Rows: learning_rate, versions, full_bytes (a copy in bfloat16), snapshot_bytes
and delta_bytes (means, from version n - 1 to n), full_over_delta,
delta_over_full_max, uploaded and downloaded bytes in all over those of full
copies, bit_identical (versions at which both readers were).
"""

import os

# Before JAX: the meshes have eight devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from benchmarks import s3_server
from benchmarks.harness import arguments, report
from benchmarks.train_deltas import RATES, mid_train
from composer_jax import sharding
from composer_jax.models import LanguageModel
from composer_jax.shipping import (
  Publisher,
  PublisherConfig,
  Store,
  Subscriber,
  Weights,
  open_store,
)
from composer_jax.shipping.contents import flatten


@dataclasses.dataclass
class Traffic:
  """Bytes that passed, by stage."""

  totals: dict[str, int] = dataclasses.field(default_factory=dict)
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def __call__(self, stage: str, size: int) -> None:
    """Counts; called from any thread."""
    with self.lock:
      self.totals[stage] = self.totals.get(stage, 0) + size


def _flags(parser):
  parser.add_argument("--versions", type=int, help="of each run; 200")
  parser.add_argument(
    "--store", default="folder", help="folder, s3 (moto, here) or an address"
  )
  parser.add_argument("--optimizer", default="adamw", help="adamw or muon")
  parser.add_argument("--folder", type=Path, help="where the corpus is kept")


def main() -> None:
  """Ships one run for each learning rate."""
  args = arguments(__doc__.splitlines()[0], _flags)
  count = args.versions or (12 if args.quick else 200)
  with contextlib.ExitStack() as stack:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    trained = mid_train(
      args.folder or scratch / "training", args.optimizer, quick=args.quick
    )
    rows = []
    for rate in [1e-5] if args.quick else RATES.values():
      store = open_store(_address(args.store, scratch, stack, f"{rate:g}"))
      row = {"store": args.store, "optimizer": args.optimizer}
      row |= {"learning_rate": rate}
      row |= ship(store, trained.model, trained.versions(rate, count))
      print(row, file=sys.stderr, flush=True)
      rows.append(row)
  report(rows, as_json=args.json)


def _address(kind, scratch, stack, run) -> str:
  """Where a run's chain lies; starts a server if it must."""
  if kind == "folder":
    return str(scratch / run)
  if kind != "s3":
    return f"{kind}/{run}"
  address = stack.enter_context(s3_server.serve())
  os.environ.update(s3_server.environment(address))
  s3_server.make_bucket(address, "chain")
  return f"s3://chain/{run}"


def ship(
  store: Store, model: LanguageModel, versions: Iterator[PyTree]
) -> dict:
  """Publishes and follows every version; one row of the table."""
  there = model.param_shardings(_mesh(fsdp=4, tensor=2))
  served = model.param_shardings(_mesh(expert=8))
  like = jax.tree.map(
    lambda shape, where: jax.ShapeDtypeStruct(
      shape.shape, jnp.bfloat16, sharding=where
    ),
    model.param_shapes,
    served,
  )
  # The chunks of a small model must be small for there to be many.
  config = PublisherConfig(chunk_bytes=2**18, snapshot_every=64)
  up, down = Traffic(), Traffic()
  identical = 0
  seconds = []
  with (
    Publisher(store, config, observe=up) as publisher,
    Subscriber(store, like=like, name="served", observe=down) as first,
    Subscriber(store, name="whole", observe=down) as second,
  ):
    for number, params in enumerate(versions):
      tree = jax.device_put(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), there
      )
      began = time.perf_counter()
      version = publisher.publish(tree, {"step": number}).result()
      readings = [first.update(), second.update()]
      seconds.append(time.perf_counter() - began)
      identical += all(
        reading.version == version and _same(reading, tree)
        for reading in readings
      )
    chain = publisher.chain
  full = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  deliveries = [
    (index, delivery)
    for index, version in enumerate(sorted(chain.versions))
    for delivery in chain.versions[version].deliveries
  ]
  numbers = sorted(chain.versions)
  deltas = [
    delivery.size
    for index, delivery in deliveries
    if index and delivery.base_version == numbers[index - 1]
  ]
  snapshots = [d.size for _, d in deliveries if d.base_version is None]
  count = len(numbers)
  return {
    "versions": count,
    "bit_identical": identical,
    "full_bytes": full,
    "snapshot_bytes": round(statistics.mean(snapshots)),
    "delta_bytes": round(statistics.mean(deltas)),
    "full_over_delta": full / statistics.mean(deltas),
    "delta_over_full_max": max(deltas) / full,
    "uploaded_over_full": up.totals["uploaded"] / (full * count),
    "downloaded_over_full": down.totals["downloaded"] / (2 * full * count),
    "median_s": statistics.median(seconds),
  }


def _mesh(**axes):
  return sharding.make_mesh(sharding.MeshConfig(**axes))


def _same(reading: Weights, tree: PyTree) -> bool:
  got = flatten(reading.tree)
  expected = flatten(tree)
  return got.keys() == expected.keys() and all(
    np.array_equal(_bits(got[name]), _bits(expected[name])) for name in expected
  )


def _bits(array):
  return np.asarray(array).view(np.uint16)


if __name__ == "__main__":
  main()
