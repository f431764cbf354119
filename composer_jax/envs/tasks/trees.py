"""Repositories as tar archives, kept on this machine by their digest.

Thousands of tasks begin in the same few repositories. A task names its own by
digest, so it is the very one that the task was validated in, whatever version
of a package is installed now.
"""

import functools
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from composer_jax.envs.image import cache_folder


def pack(files: Mapping[str, bytes]) -> bytes:
  """A tar archive of path -> contents; the same files give the same bytes."""
  archive = io.BytesIO()
  with tarfile.open(
    fileobj=archive, mode="w", format=tarfile.GNU_FORMAT
  ) as tar:
    for path, content in sorted(files.items()):
      entry = tarfile.TarInfo(path)
      entry.size = len(content)
      tar.addfile(entry, io.BytesIO(content))
  return archive.getvalue()


def put(tree: bytes) -> str:
  """Keeps a tree, and returns its digest."""
  digest = hashlib.sha256(tree).hexdigest()
  target = path(digest)
  if not target.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
      file.write(tree)
    Path(temporary).rename(target)
  return digest


@functools.lru_cache(maxsize=16)
def get(digest: str) -> bytes:
  """A tree that was put.

  Raises:
    FileNotFoundError: it isn't here.
  """
  try:
    return path(digest).read_bytes()
  except FileNotFoundError:
    raise FileNotFoundError(
      f"The repository {digest[:12]} of a task is not on this machine: load the"
      " tasks from their file, with its folder of trees beside it."
    ) from None


def path(digest: str) -> Path:
  """Where a tree lies, once it was put."""
  return cache_folder() / "trees" / f"{digest}.tar"
