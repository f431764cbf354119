"""Packs deltas into objects and uploads them while more are made."""

import concurrent.futures
import threading
from collections.abc import Callable

from composer_jax.shipping import index as indexes
from composer_jax.shipping.chain import Chain
from composer_jax.shipping.contents import Chunk, Contents
from composer_jax.shipping.index import Index, Place
from composer_jax.shipping.manifest import Shard, sha256

# The first objects are so many times smaller than the largest; a later one may
# be so much smaller than what was uploaded before.
FIRST = 16
GROWTH = 4


class Packer:
  """One process's objects of one delivery.

  They grow with what was uploaded: the first goes off soon, there are few of
  them, and to write the last one takes a small part of the time.
  """

  def __init__(
    self,
    chain: Chain,
    *,
    object_bytes: int,
    uploads: int,
    pool: concurrent.futures.Executor,
    observe: Callable[[str, int], object],
  ):
    """Uploads nothing yet.

    Args:
      chain: gives keys; its store takes the objects.
      object_bytes: how large an object gets.
      uploads: objects under way at once, and in memory.
      pool: uploads.
      observe: told "uploaded" and bytes, from any thread.
    """
    self._chain = chain
    self._object_bytes = object_bytes
    self._pool = pool
    self._observe = observe
    self._free = threading.Semaphore(uploads)
    self._places: dict[Chunk, Place] = {}
    self._jobs: list[concurrent.futures.Future[Shard]] = []
    self._uploaded = 0
    self._begin()

  def add(self, chunk: Chunk, delta: bytes) -> None:
    """Adds a delta; b"" for a chunk that equals its base."""
    if not delta:
      return
    if self._size and self._size + len(delta) > self._object_bytes:
      self._upload()
    place = Place(self._key, self._size, len(delta), sha256(delta))
    self._places[chunk] = place
    self._parts.append(delta)
    self._size += len(delta)
    enough = max(self._object_bytes // FIRST, self._uploaded // GROWTH)
    if self._size >= min(enough, self._object_bytes):
      self._upload()

  def finish(self, contents: Contents) -> tuple[Shard, list[Shard]]:
    """Waits for all uploads, then uploads the index and returns them."""
    if self._size:
      self._upload()
    shards = [job.result() for job in self._jobs]
    index = indexes.to_bytes(Index(contents, self._places))
    return self._put(self._chain.new_key(), index), shards

  def _begin(self):
    self._key = self._chain.new_key()
    self._parts: list[bytes] = []
    self._size = 0

  def _upload(self):
    self._free.acquire()  # Bounds what waits in memory.
    job = self._pool.submit(self._put, self._key, b"".join(self._parts))
    job.add_done_callback(lambda _: self._free.release())
    self._jobs.append(job)
    self._uploaded += self._size
    self._begin()

  def _put(self, key, data) -> Shard:
    self._chain.store.put(key, data)
    self._observe("uploaded", len(data))
    return Shard(key, len(data), sha256(data))
