"""Writing to disk so that the same value gives the same bytes, all or none."""

import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
  """A new folder that becomes `path` if the block ends well.

  If `path` has come to be in the meantime, that one stays. A process that is
  killed leaves a hidden folder behind, which nothing reads.
  """
  unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
  unfinished.mkdir()
  try:
    yield unfinished
    try:
      unfinished.rename(path)
    except OSError:
      if not path.exists():
        raise
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def write_json(path: Path, value: dict | Sequence) -> None:
  """Writes JSON that reads well and is the same for the same value."""
  text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
  path.write_text(text + "\n", encoding="utf-8")
