"""Publisher to subscriber: the same bits, whatever the shardings."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from obstore.store import MemoryStore
from trees import SHAPES, bits, history, make

from composer_jax import shipping
from composer_jax.shipping import contents
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Box, Chunk
from composer_jax.shipping.errors import ChainError, FencedError, MisfitError
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.subscriber import Subscriber

SMALL = PublisherConfig(
  snapshot_every=8, longest_skip=4, chunk_bytes=300, object_bytes=2000
)
SPECS = {
  "embed": (P("x", "y"), P("y")),
  "experts": (P("x"), P("y", None, "x")),
  "norm": (P(), P(("x", "y"))),
  "quantised": (P(None, "y"), P("x")),
}


@pytest.fixture
def store():
  return ObjectStore(MemoryStore())


def mesh():
  return jax.make_mesh(
    (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def sharded(tree, which):
  """As the trainer (0) or a server (1) spreads it."""
  return {
    name: jax.device_put(
      array, NamedSharding(mesh(), SPECS.get(name, (P(), P()))[which])
    )
    for name, array in tree.items()
  }


def like(which, names=SHAPES):
  return {
    name: jax.ShapeDtypeStruct(
      shape,
      dtype,
      sharding=NamedSharding(mesh(), SPECS.get(name, (P(), P()))[which]),
    )
    for name, (shape, dtype) in SHAPES.items()
    if name in names
  }


def assert_same(got, expected):
  assert bits(got) == bits(expected)


def test_two_readers_of_other_shardings_see_the_same_bits(store):
  whole = Subscriber(store)
  served = Subscriber(store, like=like(1))
  with Publisher(store, SMALL) as publisher, whole, served:
    for number, tree in enumerate(history(12)):
      job = publisher.publish(sharded(tree, 0), {"step": number})
      version = job.result()
      for reader in (whole, served):
        weights = reader.update()
        assert weights.version == version
        assert weights.metadata == {"step": number}
        assert reader.current is weights
        assert_same(weights.tree, tree)
      for name, array in weights.tree.items():
        assert array.sharding == like(1)[name].sharding
      assert whole.update() is None


def test_arrays_may_be_donated_as_soon_as_publish_returns(store):
  first = sharded(make(0), 0)
  expected = jax.tree.map(np.asarray, first)
  forget = jax.jit(
    lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0
  )
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    job = publisher.publish(first)
    forget(first)
    job.result()
    assert_same(reader.update().tree, expected)


def test_numpy_arrays_may_be_written_to_as_soon_as_publish_returns(store):
  tree = make(0)
  expected = {name: array.copy() for name, array in tree.items()}
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    job = publisher.publish(tree)
    for array in tree.values():
      array[...] = 0
    job.result()
    assert_same(reader.update().tree, expected)


@pytest.mark.parametrize("behind", [1, 7, 60])
def test_a_reader_some_versions_behind_takes_few_deltas(store, behind):
  config = PublisherConfig(
    snapshot_every=100, longest_skip=64, chunk_bytes=300, object_bytes=2000
  )
  trees = history(64, share=0.001)
  with Publisher(store, config) as publisher:
    jobs = [publisher.publish(tree) for tree in trees]
    versions = [job.result() for job in jobs]
  with Subscriber(store) as reader:
    assert_same(reader.update(versions[-1 - behind]).tree, trees[-1 - behind])
    steps = shipping.plan(
      reader.chain.deliveries, versions[-1], reader.current.version
    )
    assert len(steps) <= 2 * np.log2(behind) + 1
    assert_same(reader.update().tree, trees[-1])


def test_a_late_joiner_starts_at_a_snapshot(store):
  trees = history(12)
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    for tree in trees:
      publisher.publish(tree).result()
    reader.update()
    assert_same(reader.current.tree, trees[-1])


def test_a_reader_downloads_only_what_its_shards_need(store):
  sizes = {}
  tree = make(0)
  one = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
  part = {
    "experts": jax.ShapeDtypeStruct(
      *SHAPES["experts"], sharding=NamedSharding(one, P())
    )
  }

  def count(name):
    def observe(stage, size):
      if stage == "downloaded":
        sizes[name] = sizes.get(name, 0) + size

    return observe

  with (
    Publisher(store, SMALL) as publisher,
    Subscriber(store, observe=count("all")) as whole,
    Subscriber(store, like=part, observe=count("part")) as partial,
  ):
    publisher.publish(sharded(tree, 0)).result()
    whole.update()
    assert_same(partial.update().tree, {"experts": tree["experts"]})
  assert sizes["part"] < 0.6 * sizes["all"]


def test_a_new_publisher_goes_on_from_what_the_store_holds(store):
  trees = history(6)
  with Publisher(store, SMALL) as publisher:
    for tree in trees[:3]:
      last = publisher.publish(tree).result()
  with Publisher(store, SMALL) as publisher:
    version = publisher.publish(trees[3]).result()
    bases = [d.base_version for d in publisher.chain.deliveries[version]]
    assert bases == [last]
  with Subscriber(store) as reader:
    assert_same(reader.update().tree, trees[3])


def test_a_publisher_that_cannot_prove_its_base_starts_a_snapshot(store):
  trees = history(4)
  with Publisher(store, SMALL) as publisher:
    last = publisher.publish(trees[0]).result()
    [snapshot] = publisher.chain.deliveries[last]
  store.delete(snapshot.shards[0].key)
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    version = publisher.publish(trees[1]).result()
    bases = [d.base_version for d in publisher.chain.deliveries[version]]
    assert bases == [None]
    assert_same(reader.update().tree, trees[1])


def test_a_publisher_adopts_its_base_only_if_it_is_the_head(store):
  trees = history(3)
  with Publisher(store, SMALL) as publisher:
    publisher.publish(trees[0]).result()
  with Publisher(store, SMALL) as publisher:
    assert not publisher.adopt(shipping.from_tree(trees[1]))
    assert publisher.adopt(shipping.from_tree(trees[0]))


@pytest.mark.parametrize("what", ["shape", "name", "sharding"])
def test_another_structure_starts_a_snapshot(store, what):
  tree = sharded(make(0), 0)
  if what == "shape":
    other = tree | {"norm": jnp.zeros(17)}
  elif what == "name":
    other = tree | {"more": jnp.zeros(3)}
  else:
    other = sharded(make(0), 1)
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    publisher.publish(tree).result()
    version = publisher.publish(other).result()
    bases = [d.base_version for d in publisher.chain.deliveries[version]]
    assert bases == [None]
    assert_same(reader.update().tree, jax.tree.map(np.asarray, other))


def test_the_baseline_advances_only_with_the_commit(store):
  class Failing(ObjectStore):
    fails = False

    def put(self, key, data):
      if self.fails and key.startswith("data/"):
        raise shipping.StoreError("out of order")
      return super().put(key, data)

  failing = Failing(store._store)
  trees = history(3)
  with Publisher(failing, SMALL) as publisher, Subscriber(store) as reader:
    first = publisher.publish(trees[0]).result()
    reader.update()
    failing.fails = True
    with pytest.raises(shipping.StoreError):
      publisher.publish(trees[1]).result()
    assert reader.update() is None
    failing.fails = False
    version = publisher.publish(trees[2]).result()
    bases = [d.base_version for d in publisher.chain.deliveries[version]]
    assert bases == [first]
    assert_same(reader.update().tree, trees[2])


def test_a_stalled_publisher_is_fenced_off(store):
  trees = history(3)
  with Publisher(store, SMALL) as stalled, Subscriber(store) as reader:
    stalled.publish(trees[0]).result()
    with Publisher(store, SMALL) as successor:
      with pytest.raises(FencedError):
        stalled.publish(trees[1]).result()
      assert_same(reader.update().tree, trees[0])
      successor.publish(trees[2]).result()
      assert_same(reader.update().tree, trees[2])


def test_a_busy_publisher_skips_or_waits(store):
  slow = concurrent.futures.Future()

  class Slow(ObjectStore):
    def put(self, key, data):
      if key.startswith("data/"):
        slow.result()
      return super().put(key, data)

  config = PublisherConfig(when_busy="skip", pending=0)
  trees = history(2)
  with Publisher(Slow(store._store), config) as publisher:
    first = publisher.publish(trees[0])
    assert publisher.publish(trees[1]) is None
    slow.set_result(None)
    first.result()
    publisher.wait()
    assert publisher.publish(trees[1]).result() > first.result()


def test_a_version_of_another_shape_is_refused_and_the_old_one_stays(store):
  trees = history(4)
  other = trees[1] | {"norm": np.zeros(15, np.float32)}
  sizes = []
  with (
    Publisher(store, SMALL) as publisher,
    Subscriber(
      store, like=like(1), observe=lambda stage, size: sizes.append(size)
    ) as reader,
  ):
    publisher.publish(trees[0]).result()
    before = reader.update()
    misfit = publisher.publish(other).result()
    with pytest.raises(MisfitError, match=r"'norm' is .*15.*16"):
      reader.update()
    assert reader.current is before
    sizes.clear()
    with pytest.raises(MisfitError):  # Without another download.
      reader.update(misfit)
    assert not sizes
    publisher.publish(trees[2]).result()
    assert_same(reader.update().tree, trees[2])
    publisher.publish(other).result()
    publisher.publish(trees[3]).result()
    publisher.publish(other).result()
    assert_same(reader.update().tree, trees[3])  # The newest that fits.


def test_pin_roll_back_and_skip_outlive_a_restart(store, tmp_path):
  trees = history(5)
  with Publisher(store, SMALL) as publisher:
    versions = [publisher.publish(tree).result() for tree in trees[:4]]
    with Subscriber(store, cache=tmp_path) as reader:
      with pytest.raises(ChainError, match="no version was exposed before"):
        reader.roll_back()
      reader.update(versions[1])
      reader.update()
      assert reader.current.version == versions[3]
      assert_same(reader.roll_back().tree, trees[1])
      assert reader.update() is None
    with Subscriber(store, cache=tmp_path) as reader:
      assert reader.update().version == versions[1]
      reader.skip(versions[3])
      reader.unpin()
      assert_same(reader.update().tree, trees[2])
      assert reader.update() is None
      versions.append(publisher.publish(trees[4]).result())
      assert_same(reader.update().tree, trees[4])
      with pytest.raises(ChainError, match="not in the chain"):
        reader.pin(99)


def test_skipping_the_present_version_goes_back(store):
  trees = history(2)
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    publisher.publish(trees[0]).result()
    version = publisher.publish(trees[1]).result()
    reader.update()
    reader.skip(version)
    assert_same(reader.update().tree, trees[0])


def test_readers_are_listed_with_their_versions(store):
  with Publisher(store, SMALL) as publisher:
    version = publisher.publish(make(0)).result()
    with Subscriber(store, name="lisbon-1") as reader:
      assert shipping.readers(store) == []
      reader.update()
      [seen] = shipping.readers(store)
      assert (seen.name, seen.version) == ("lisbon-1", version)
    assert shipping.readers(store) == []
  with pytest.raises(ValueError, match="no reader's name"):
    Subscriber(store, name="../x")


def test_an_orbax_checkpoint_is_published_without_its_optimizer(
  store, tmp_path
):
  import orbax.checkpoint as ocp

  trees = [
    {name: array for name, array in tree.items() if array.size}
    for tree in history(2)
  ]
  with ocp.CheckpointManager(tmp_path) as manager:
    for number, tree in enumerate(trees):
      state = {"params": {"stack": [sharded(tree, 0)]}, "opt": jnp.zeros(9)}
      manager.save(
        number, args=ocp.args.Composite(state=ocp.args.StandardSave(state))
      )
  with Publisher(store, SMALL) as publisher, Subscriber(store) as reader:
    for number, tree in enumerate(trees):
      source = shipping.from_checkpoint(tmp_path / str(number), "params")
      publisher.publish(source).result()
      got = reader.update().tree
      assert_same(got, {f"stack/0/{name}": tree[name] for name in tree})


def test_what_is_no_checkpoint_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no Orbax checkpoint"):
    shipping.from_checkpoint(tmp_path)


@settings(deadline=None)
@given(st.data())
def test_chunks_cover_an_array_once(data):
  shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
  limit = data.draw(st.integers(1, 60))
  boxes = list(contents.cut(Box((0,) * len(shape), shape), 2, limit))
  painted = np.zeros(shape, int)
  for box in boxes:
    assert box.size * 2 <= max(limit, 2)
    painted[tuple(map(slice, box.start, box.stop))] += 1
  assert (painted == 1).all()
  spec = contents.ArraySpec(shape, "int16")
  digests = {Chunk("a", box): "" for box in boxes}
  contents.Contents({"a": spec}, digests).check()
  if boxes:
    digests.pop(Chunk("a", data.draw(st.sampled_from(boxes))))
    with pytest.raises(ChainError, match="don't cover"):
      contents.Contents({"a": spec}, digests).check()


def test_chunks_that_overlap_are_refused():
  spec = contents.ArraySpec((4, 2), "int16")
  boxes = [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))]
  with pytest.raises(ChainError, match="don't cover"):
    contents.Contents(
      {"a": spec}, {Chunk("a", box): "" for box in boxes}
    ).check()


def test_a_chain_without_versions_has_nothing_to_expose(store):
  Chain(store).take_over()
  with Subscriber(store) as reader:
    assert reader.update() is None
    assert reader.current is None


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("compare", "gpu", "compare is 'gpu'; it is one of host, device"),
    ("effort", "large", "it is one of small, fast"),
    ("snapshot_every", 0, "snapshot_every is 0; it is at least 1"),
    ("pending", -1, "it is at least 0"),
  ],
)
def test_a_wrong_config_is_told(field, value, message):
  config = PublisherConfig()
  object.__setattr__(config, field, value)  # past what tests check of types
  with pytest.raises(ValueError, match=message):
    config.__post_init__()
