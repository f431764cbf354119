"""A store in S3, Google or Azure, by obstore; see `shipping.store`.

A conditional write is one request: with `If-None-Match: *` for S3 and Azure,
one that expects generation 0 for Google. Data goes up in parts, which show as
one object once the upload is completed (S3, Google: CompleteMultipartUpload;
Azure: Put Block List).

An upload in parts that fails is aborted; one whose process dies stays hidden,
and costs storage, until the bucket's lifecycle rule
`AbortIncompleteMultipartUpload` (S3, Google) removes it: set one. Azure drops
blocks that nobody committed after a week.

Each request, so each part too, is tried again a few times on its own, and a
download continues where it broke. An upload that failed for good, or whose
process died, starts anew: obstore can't take up one that another process began.
"""

import contextlib
import datetime
import os
import re
from collections.abc import Iterator

from composer_jax.shipping.errors import MissingObjectError, StoreError
from composer_jax.shipping.keys import (
  bytes_wanted,
  check_key,
  check_range,
  check_whole,
)

# A part; S3 takes 10,000 of at least 5 MiB. Up to PARTS_AT_ONCE of them are
# under way, and in memory once more than they are.
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 8

# Of the server's answer, by S3 and Google; by Azure.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")


class ObjectStore:
  """Any store of obstore: S3, Google, Azure, or memory (for tests)."""

  def __init__(self, store):
    """Takes an `obstore.store.ObjectStore`."""
    self._store = store

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    from obstore.exceptions import BaseError

    check_range(start, size)
    if (start, size) == (0, None):
      options = None
    elif size is None:
      options = {"range": {"offset": start}}
    else:
      options = {"range": (start, start + size)}
    with _obstore_errors(key):
      try:
        answer = self._store.get(check_key(key), options=options)
        length = answer.meta["size"]
        data = bytes(answer.bytes())
      except BaseError:
        # Whatever reads no byte is an error to obstore: past the end, at it.
        if options is None:
          raise
        length, data = self._store.head(key)["size"], b""
        if bytes_wanted(key, length, start, size):
          raise
      return check_whole(key, data, bytes_wanted(key, length, start, size))

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    from obstore.exceptions import AlreadyExistsError

    with _obstore_errors(key):
      try:
        self._store.put(
          check_key(key), data, mode="create", use_multipart=False
        )
      except AlreadyExistsError:
        return self.get(key) == data
    return True

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`; in parts where it is large."""
    try:
      with _obstore_errors(key):
        self._store.put(
          check_key(key),
          data,
          use_multipart=len(data) > PART_BYTES,
          chunk_size=max(PART_BYTES, -(-len(data) // 10_000)),
          max_concurrency=PARTS_AT_ONCE,
        )
    except StoreError as error:
      # Perhaps only the answer was lost: S3 then knows no such upload when it
      # is asked again to complete it.
      with contextlib.suppress(StoreError), _obstore_errors(key):
        if self._store.head(key)["size"] == len(data):
          return
      raise StoreError(str(error)) from error

  def list(self, prefix: str) -> Iterator[str]:
    """See `Store.list`."""
    with _obstore_errors(prefix):
      found = [
        item["path"]
        for page in self._store.list(check_key(prefix))
        for item in page
      ]
    yield from sorted(found)

  def delete(self, key: str) -> None:
    """See `Store.delete`."""
    with (
      contextlib.suppress(MissingObjectError),  # only some stores mind
      _obstore_errors(key),
    ):
      self._store.delete(check_key(key))


def open_object_store(url: str, *, timeout_s: float) -> ObjectStore:
  """See `shipping.store.open_store`; without retries of its own."""
  try:
    import obstore.store
  except ImportError:
    raise StoreError(
      f"{url} needs obstore: pip install 'composer-jax[ship]'"
    ) from None
  with _obstore_errors(url):
    store = obstore.store.from_url(
      url,
      client_options={
        # Options replace what the environment says of the client.
        "allow_http": any(
          os.environ.get(f"{cloud}_ALLOW_HTTP", "").lower() == "true"
          for cloud in ("AWS", "AZURE", "GOOGLE")
        ),
        "connect_timeout": "5s",
        "read_timeout": datetime.timedelta(seconds=timeout_s),
        "timeout": "1d",  # else 30 s for a whole download
      },
      retry_config={
        "max_retries": 3,
        "retry_timeout": datetime.timedelta(seconds=2 * timeout_s),
      },
    )
  return ObjectStore(store)


@contextlib.contextmanager
def _obstore_errors(key):
  from obstore.exceptions import BaseError, NotFoundError

  try:
    yield
  except (BaseError, OSError) as error:
    missing = isinstance(error, FileNotFoundError | NotFoundError)
    if missing and not _NO_BUCKET.search(str(error)):
      raise MissingObjectError(f"no object {key}") from error
    raise StoreError(f"{key}: {_sentence(error)}") from error


def _sentence(error) -> str:
  """The first line of obstore's many, and what server or system said to it."""
  text, _, details = str(error).partition("\n\nDebug source")
  text, _, answer = text.partition("<?xml")
  said = re.findall("<Message>(.*?)</Message>", answer, re.DOTALL)
  said = said or re.findall(r'message: "([^"]*)"', details)
  text = re.sub("^Generic |Error performing (?=[A-Z])", "", text)
  # How long and how often it was tried.
  text = re.sub(r" in \S+s(, after .*?)? +- ", ": ", text)
  text = " ".join(text.split()).rstrip(": ")
  return f"{text} ({said[-1].rstrip('.')})" if said else text
