"""Asynchronous checkpoints of a run: training state, data position, facts.

Orbax does the work; here is what a run needs of it, and errors that a user can
act on. One folder a step:

    <folder>/<step>/state   the training state, any pytree of arrays
    <folder>/<step>/data    the position of each process's data iterator
    <folder>/<step>/meta    a small JSON object

A checkpoint is for resuming a run. Weights on their way to inference hosts are
the business of shipping, and Hugging Face files that of `composer_jax.models`.
"""

import os
from typing import Any

import grain
import grain.checkpoint
import jax
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

_MAX_LISTED = 3


class CheckpointError(ValueError):
  """A checkpoint that can't be used as asked; one sentence says why."""


class Checkpoints:
  """The checkpoints of one run. All processes make the same calls.

  A context manager: leaving it waits until the last save is on disk.

  Saving returns once the state has been copied off the devices, so that its
  buffers may be donated at once; writing goes on in the background. A save that
  was cut short leaves the earlier checkpoints as they were, and its remains are
  removed when the folder is opened again.

  Attributes:
    folder: where the checkpoints are.
    every: a checkpoint is due at each multiple of this many steps.
  """

  def __init__(self, folder: str | os.PathLike, *, keep: int, every: int):
    """Opens a folder, which is made if it isn't there.

    Args:
      folder: a path, local or in a bucket ("gs://...").
      keep: how many checkpoints stay; the oldest go first.
      every: see the class.
    """
    self.folder = _absolute(folder)
    self.every = every
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        cleanup_tmp_directories=True,
      ),
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "data": grain.checkpoint.CheckpointHandler(),
        "meta": ocp.JsonCheckpointHandler(),
      },
    )

  def save(
    self,
    step: int,
    state: PyTree,
    data_iterator: grain.DatasetIterator,
    meta: dict[str, Any],
    *,
    force: bool = False,
  ) -> bool:
    """Starts to save, if a checkpoint is due and this step has none yet.

    Args:
      step: the number of updates made.
      state: a pytree of `jax.Array`.
      data_iterator: its position is saved.
      meta: what else is needed to resume; JSON.
      force: save even if no checkpoint is due.

    Returns:
      Whether a save was started.
    """
    due = force or step % self.every == 0
    if not due or step == self._manager.latest_step():
      return False
    return self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        data=grain.checkpoint.CheckpointSave(data_iterator),
        meta=ocp.args.JsonSave(meta),
      ),
      force=True,
    )

  def restore(
    self, abstract_state: PyTree, data_iterator: grain.DatasetIterator
  ) -> tuple[int, PyTree, dict[str, Any]] | None:
    """Restores the latest checkpoint, bit for bit.

    Args:
      abstract_state: a `jax.ShapeDtypeStruct` with a sharding for each array.
        Each array goes straight to its shards, however it was sharded before.
      data_iterator: moved to the saved position.

    Returns:
      The step, the state, and the meta object; None if there is no checkpoint.

    Raises:
      CheckpointError: the state's paths, shapes or dtypes differ, or another
        number of processes saved the position in the data.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    path = self.folder / str(step)
    _check(
      self._manager.item_metadata(step)["state"],
      abstract_state,
      path,
      remedy="start afresh with another --workdir, or resume with the model "
      "and optimizer config that wrote it",
    )
    suffix = f"-of-{jax.process_count()}.json"
    writers = list((path / "data").glob("process_*.json"))
    if not all(writer.name.endswith(suffix) for writer in writers):
      raise CheckpointError(
        f"the data position in {path} was saved by {len(writers)} processes, "
        f"not {jax.process_count()}: resume with as many as before"
      )
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),
        data=grain.checkpoint.CheckpointRestore(data_iterator),
        meta=ocp.args.JsonRestore(),
      ),
    )
    return step, restored["state"], restored["meta"]

  def wait(self) -> None:
    """Waits until what was saved is on disk; raises what went wrong there."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then frees the background threads."""
    self._manager.close()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


def restore_parts(
  folder: str | os.PathLike, abstract: dict[str, PyTree]
) -> dict[str, PyTree]:
  """Reads some entries of the state in the latest checkpoint of another run.

  Args:
    folder: the other run's checkpoint folder.
    abstract: a top-level entry of the state ("params", say) to its structure,
      with a `jax.ShapeDtypeStruct` with a sharding for each array.

  Returns:
    The entries, in the given shardings.

  Raises:
    CheckpointError: no checkpoint there, or other paths, shapes or dtypes.
  """
  folder = _absolute(folder)
  steps = ocp.utils.checkpoint_steps(folder) if folder.exists() else []
  if not steps:
    raise CheckpointError(f"no checkpoint in {folder}")
  path = folder / str(max(steps)) / "state"
  handler = ocp.PyTreeCheckpointHandler()
  _check(
    handler.metadata(path),
    abstract,
    path,
    remedy="use the model config that wrote it",
  )
  return handler.restore(
    path,
    args=ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
    ),
  )


def _check(metadata, abstract: PyTree, path: epath.Path, *, remedy: str):
  """Compares names, shapes and dtypes before a single array is read.

  Only the top-level entries that `abstract` has are compared.
  """
  wanted = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(abstract):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    wanted[name] = f"{leaf.dtype}{list(leaf.shape)}"
  tops = {name.partition(".")[0] for name in wanted}
  saved = {
    array.name: f"{array.dtype}{list(array.shape)}"
    for array in jax.tree.leaves(metadata.tree)
    if array.name.partition(".")[0] in tops
  }
  problems = [
    f"{name} is {saved.get(name, 'absent')} there and "
    f"{wanted.get(name, 'absent')} here"
    for name in sorted(saved.keys() | wanted.keys(), key=_weights_first)
    if saved.get(name) != wanted.get(name)
  ]
  if problems:
    listed = "; ".join(problems[:_MAX_LISTED])
    if len(problems) > _MAX_LISTED:
      listed += f"; and {len(problems) - _MAX_LISTED} more"
    raise CheckpointError(
      f"the checkpoint {path} doesn't fit this model: {listed}; {remedy}"
    )


def _weights_first(name: str) -> tuple[bool, str]:
  """Sorts the optimizer's moments, which only repeat it, after the weights."""
  return not name.startswith("params."), name


def _absolute(folder: str | os.PathLike) -> epath.Path:
  """Orbax wants absolute paths; a bucket's path already is one."""
  path = epath.Path(folder)
  return path if path.is_absolute() else path.expanduser().absolute()
