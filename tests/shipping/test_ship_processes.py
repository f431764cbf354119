"""One publisher of two JAX processes, and two readers of one mesh."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from composer_jax import shipping
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.subscriber import Subscriber

# Each process publishes a half of the rows of `w` and reads a half of the
# columns of it and of `m`; `b` is on both. The second process fails to upload
# version 2; the third version is what comes after.
PROGRAM = """
  import sys
  import jax, jax.numpy as jnp
  import numpy as np
  from composer_jax import shipping

  address, index, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
  jax.distributed.initialize(address, num_processes=2, process_id=index)
  mesh = jax.make_mesh((2,), ("x",))
  spread = {"w": jax.P("x"), "b": jax.P()}
  spread = {k: jax.NamedSharding(mesh, spec) for k, spec in spread.items()}

  def version(n):
    values = {
      "w": np.arange(64, dtype=np.float32).reshape(8, 8) + n,
      "b": np.full(3, n, np.int32),
    }
    return {
      k: jax.make_array_from_callback(v.shape, spread[k], lambda i: v[i])
      for k, v in values.items()
    }

  class Failing(shipping.FolderStore):
    fails = False

    def put_if_absent(self, key, data):
      if self.fails and "/crew/" not in key:
        raise shipping.StoreError("a full disk")
      return super().put_if_absent(key, data)

  store = Failing(folder)
  config = shipping.PublisherConfig(chunk_bytes=100, timeout_s=60)
  with shipping.Publisher(store, config) as publisher:
    first = publisher.publish(version(0), {"n": 0}).result()
    store.fails = index == 1
    try:
      publisher.publish(version(1), {"n": 1}).result()
      raise SystemExit("a version without its second half was committed")
    except (shipping.ChainError, shipping.StoreError) as error:
      assert "a full disk" in str(error), error
    store.fails = False
    second = publisher.publish(version(2), {"n": 2}).result()
    bases = [d.base_version for d in publisher.chain.deliveries[second]]
    assert bases == [first], bases
    assert len(publisher.chain.deliveries[second][0].indexes) == 2

  # The one epoch ends here, and the next goes on from it.
  with shipping.Publisher(store, config) as publisher:
    third = publisher.publish(version(3), {"n": 3}).result()
    bases = [d.base_version for d in publisher.chain.deliveries[third]]
    assert bases == [second], bases

  like = {
    "w": jax.ShapeDtypeStruct(
      (8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "x"))
    ),
    "b": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=spread["b"]),
  }
  with shipping.Subscriber(store, like=like) as reader:
    weights = reader.update(third)
    for shard in weights.tree["w"].addressable_shards:
      expected = (np.arange(64.0).reshape(8, 8) + 3)[shard.index]
      np.testing.assert_array_equal(shard.data, expected)

  # What this process's columns need, and not one byte more.
  def large(seed):
    rows = np.random.default_rng(seed).standard_normal((8, 4096), np.float32)
    where = jax.NamedSharding(mesh, jax.P(None, "x"))
    return jax.make_array_from_callback(rows.shape, where, lambda i: rows[i])

  class Reading(shipping.FolderStore):
    ranges = []

    def get(self, key, start=0, size=None):
      data = super().get(key, start, size)
      if size is not None:
        self.ranges.append((key, start, len(data)))
      return data

  with shipping.Publisher(shipping.FolderStore(folder + "-m")) as publisher:
    versions = [publisher.publish({"m": large(s)}).result() for s in range(2)]
  mine = {
    "m": jax.ShapeDtypeStruct(
      (8, 4096), jnp.float32, sharding=large(0).sharding
    )
  }
  reading = Reading(folder + "-m")
  with shipping.Subscriber(reading, like=mine) as reader:
    chain = reader.chain
    for version in versions:
      reading.ranges.clear()
      weights = reader.update(version)
      [shard] = weights.tree["m"].addressable_shards
      [same] = large(versions.index(version)).addressable_shards
      assert shard.index == same.index
      np.testing.assert_array_equal(shard.data, same.data)
      way = chain.versions[version].deliveries[0]
      assert (way.base_version is None) == (version == versions[0])
      # One object holds one process's half.
      assert len(way.shards) == 2
      [(key, start, size)] = reading.ranges
      [whole] = [s.size for s in way.shards if s.key == key]
      assert (start, size) == (0, whole)
  print(key)
"""


@pytest.mark.timeout(180)
def test_two_processes_publish_one_version_together(tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  children = [
    subprocess.Popen(
      [
        sys.executable,
        "-c",
        textwrap.dedent(PROGRAM),
        address,
        str(index),
        str(tmp_path),
      ],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(2)
  ]
  read = []
  try:
    for child in children:
      out, errors = child.communicate(timeout=150)
      assert child.returncode == 0, errors
      read.append(out)
  finally:
    for child in children:
      child.kill()
  assert read[0] != read[1]  # each its own object of the last version
  with Subscriber(FolderStore(tmp_path)) as reader:
    weights = reader.update()
    assert weights.metadata == {"n": 3}
    assert (weights.tree["b"] == 3).all()
    numbers = [m.metadata["n"] for m in reader.chain.versions.values()]
    assert numbers == [0, 2, 3]
  notes = [k for k in FolderStore(tmp_path).list("data") if "crew" in k]
  assert len(notes) <= 2 * 2  # The last answer of each epoch, and no more.
  shipping.collect(reader.chain)
