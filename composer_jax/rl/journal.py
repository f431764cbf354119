"""Lines of JSON by step, which a run that goes on from a checkpoint takes back.

Scalars go to `composer_jax.training.metrics`; this is for what has more shape:
which groups a step was trained on, how stale they were, what evaluations gave.
"""

import json
import os
from pathlib import Path
from typing import Any


class Journal:
  """A file of lines, each with a `step`. A context manager."""

  def __init__(self, path: str | os.PathLike, *, resumed_step: int):
    """Opens it, and removes the lines of later steps.

    Args:
      path: the file.
      resumed_step: the run's step now; -1 removes all.
    """
    path = Path(path)
    kept = [line for line in read(path) if line["step"] <= resumed_step]
    # Written aside, so that a crash here loses nothing.
    aside = path.with_name(f".{path.name}")
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
    aside.replace(path)
    self._file = path.open("a")

  def write(self, step: int, **values: Any) -> None:
    """Adds a line."""
    self._file.write(json.dumps({"step": step, **values}) + "\n")
    self._file.flush()

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *_) -> None:
    self._file.close()


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """All whole lines; none if there is no such file."""
  path = Path(path)
  if not path.exists():
    return []
  found = []
  for line in path.read_text().splitlines():
    try:
      found.append(json.loads(line))
    except json.JSONDecodeError:  # A crash cut the last one short.
      break
  return found
