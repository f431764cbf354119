"""kill -9 at every point where publisher or reader touch store or disk.

A child process counts its operations and kills itself before or after the n-th;
after each death somebody else looks at what is left, and goes on from there.
"""

import collections
import functools
import json
import multiprocessing
import os
import pathlib
import signal

import pytest
from trees import bits, history

from composer_jax.shipping.chain import Chain
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.subscriber import Subscriber

CONFIG = PublisherConfig(
  snapshot_every=3,
  longest_skip=2,
  chunk_bytes=300,
  object_bytes=1500,
  encoders=1,
  uploads=1,
)
TREES = history(5)
FOREVER = 10**9


@pytest.fixture(scope="module")
def processes():
  """Children that need not import everything anew."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["test_ship_crashes"])
  return context


class Fuse:
  """Kills this process at the n-th point, and remembers how it is called.

  Where n is a name, at the first point that is called so.
  """

  def __init__(self, n, diary):
    self.left, self.only = (0, n) if isinstance(n, str) else (n, None)
    self.diary = diary

  def point(self, name):
    if self.only in (None, name):
      self.left -= 1
    if self.left < 0:
      self.diary.write_text(name)
      os.kill(os.getpid(), signal.SIGKILL)

  def around(self, name, function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
      self.point(f"before {name}")
      result = function(*args, **kwargs)
      self.point(f"after {name}")
      return result

    return wrapped


class Mined(FolderStore):
  """A store whose every operation is such a point."""

  def __init__(self, root, fuse):
    super().__init__(root)
    self._fuse = fuse

  def get(self, key, *args, **kwargs):
    self._fuse.point(f"before reading {kind(key)}")
    return super().get(key, *args, **kwargs)

  def put_if_absent(self, key, data):
    put = self._fuse.around(f"writing {kind(key)}", super().put_if_absent)
    return put(key, data)

  def delete(self, key):
    self._fuse.around(f"deleting {kind(key)}", super().delete)(key)


def kind(key):
  return {"log": "the log", "data": "data", "leases": "a lease"}.get(
    key.split("/")[0], "a reader's note"
  )


def publish(root, n, diary):
  """Publishes what is left of TREES."""
  with Publisher(Mined(root, Fuse(n, diary)), CONFIG) as publisher:
    manifests = publisher.chain.versions.values()
    done = [manifest.metadata["number"] for manifest in manifests]
    for number in range(max(done, default=-1) + 1, len(TREES)):
      publisher.publish(TREES[number], {"number": number}).result()


def read(root, cache, n, diary, exposed):
  """Gets every other version, then the head; writes down what it exposes."""
  fuse = Fuse(n, diary)
  for name in ("rename", "replace", "write_bytes", "unlink"):
    method = getattr(pathlib.Path, name)
    setattr(pathlib.Path, name, fuse.around(f"{name} in the cache", method))
  with Subscriber(Mined(root, fuse), cache=cache, workers=1) as reader:
    for version in [*sorted(reader.chain.versions)[::2], None]:
      weights = reader.update(version)
      if weights:
        with exposed.open("a") as file:
          number = weights.metadata["number"]
          right = bits(weights.tree) == bits(TREES[number])
          file.write(json.dumps([number, right]) + "\n")
      reader._saver.submit(lambda: None).result()  # The same points each time.


def run(processes, target, *args):
  child = processes.Process(target=target, args=args)
  child.start()
  child.join(60)
  assert child.exitcode in (0, -signal.SIGKILL)
  return child.exitcode == 0


def check(root, least):
  """A new reader sees one of the versions, whole; returns which."""
  with Subscriber(FolderStore(root)) as reader:
    weights = reader.update()
    if weights is None:
      assert least < 0
      return -1
    number = weights.metadata["number"]
    assert bits(weights.tree) == bits(TREES[number])
    assert number >= least
    return number


def test_a_publisher_killed_anywhere_is_continued_by_the_next(
  processes, tmp_path
):
  points = collections.Counter()
  for n in range(0, FOREVER, 3):  # Every third: publications repeat.
    root, diary = tmp_path / str(n), tmp_path / "diary"
    if run(processes, publish, root, n, diary):
      break
    points[diary.read_text()] += 1
    seen = check(root, -1)
    if n % 4 == 0:
      with Publisher(FolderStore(root), CONFIG) as publisher:
        for number in range(seen + 1, len(TREES)):
          publisher.publish(TREES[number], {"number": number}).result()
      assert check(root, seen) == len(TREES) - 1
      numbers = [
        m.metadata["number"] for m in publisher.chain.versions.values()
      ]
      assert numbers == list(range(len(TREES)))
  print(f"\npublisher killed {points.total()} times: {dict(points)}")
  assert {"before writing the log", "after writing the log"} <= points.keys()
  assert {"before writing data", "after writing data"} <= points.keys()


def test_a_reader_killed_anywhere_exposes_nothing_wrong_and_goes_on(
  processes, tmp_path
):
  root = tmp_path / "store"
  publish(root, FOREVER, None)
  points = collections.Counter()

  def killed(n):
    cache, diary = tmp_path / f"cache-{n}", tmp_path / "diary"
    exposed = tmp_path / f"exposed-{n}"
    exposed.touch()
    if run(processes, read, root, cache, n, diary, exposed):
      return False
    points[diary.read_text()] += 1
    with Subscriber(FolderStore(root), cache=cache) as reader:
      assert bits(reader.update().tree) == bits(TREES[-1])
    lines = [json.loads(line) for line in exposed.read_text().splitlines()]
    assert all(right for _, right in lines)
    return True

  for n in range(0, FOREVER, 5):
    if not killed(n):
      break
  for rare in ("before rename in the cache", "after rename in the cache"):
    assert killed(rare)
  print(f"\nreader killed {points.total()} times: {dict(points)}")
  assert Chain(FolderStore(root)).head is not None
