"""Versions as Orbax checkpoints, for whoever loads those.

    <folder>/<version>   as a `CheckpointManager` writes and restores steps

Orbax writes beside its place and renames, so that a version is there whole or
not at all.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from composer_jax.shipping.subscriber import Weights

_log = logging.getLogger(__name__)


class CheckpointWriter(contextlib.AbstractContextManager):
  """Writes versions below one folder."""

  def __init__(self, folder: str | os.PathLike, *, keep: int | None = None):
    """Opens a folder; what an earlier writer left unfinished is removed.

    Args:
      folder: made if it isn't there.
      keep: how many checkpoints stay, the lowest versions going first; the one
        written last always stays. None keeps all.

    Raises:
      ValueError: if `keep` is less than 1.
    """
    import orbax.checkpoint as ocp

    if keep is not None and keep < 1:
      raise ValueError(f"keep={keep}: at least the version just written stays")
    self._folder = Path(folder).absolute()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._keep = keep
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, cleanup_tmp_directories=True
      ),
    )

  def write(self, weights: Weights) -> Path:
    """Writes a version, unless it is there.

    Args:
      weights: of a subscriber without `like`.

    Returns:
      The checkpoint's folder.

    Raises:
      ValueError: if another version of this number is there, of another chain.
    """
    import orbax.checkpoint as ocp

    version = weights.version
    place = self._folder / str(version)
    if version in self._manager.all_steps():
      there = self._manager.metadata(version).custom_metadata or {}
      if there.get("digest") != weights.digest:
        raise ValueError(
          f"{place} is there already and isn't version {version} of this chain:"
          " choose another folder"
        )
    else:
      facts = {"digest": weights.digest, "metadata": weights.metadata}
      try:
        self._manager.save(
          version,
          args=ocp.args.StandardSave(nest(weights.tree)),
          custom_metadata=facts,
          force=True,
        )
      except BaseException:
        for left in self._folder.glob(f"{version}.orbax-checkpoint-tmp*"):
          shutil.rmtree(left, ignore_errors=True)
        raise
    if self._keep:
      others = sorted(set(self._manager.all_steps()) - {version})
      for old in others[: max(0, len(others) - self._keep + 1)]:
        self._manager.delete(old)
    return place

  def __exit__(self, *exc_info) -> None:
    self._manager.close()


def nest(arrays: Mapping[str, Shaped[np.ndarray, "..."]]) -> dict:
  """Dictionaries within dictionaries, of paths as in "layers/0/kernel".

  Arrays without elements are left out, with a warning: Orbax has no place for
  them.

  Raises:
    ValueError: if a path lies below that of an array.
  """
  tree: dict = {}
  for path, array in arrays.items():
    if not array.size:
      _log.warning("%s has no elements; Orbax can't hold it", path)
      continue
    *parents, name = path.split("/")
    branch = tree
    for parent in parents:
      branch = branch.setdefault(parent, {})
      if not isinstance(branch, dict):
        raise ValueError(f"{path!r} lies below an array, and can't be a folder")
    if name in branch:
      raise ValueError(f"{path!r} is both an array and a folder")
    branch[name] = array
  return tree
