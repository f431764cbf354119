"""Asynchronous checkpoints of a run: training state, data position, facts.

Orbax does the work; here is what a run needs of it, and errors that a user can
act on. One folder a step:

    <folder>/<step>/state   the training state, any pytree of arrays
    <folder>/<step>/data    the position of each process's data iterator, if any
    <folder>/<step>/meta    a small JSON object

A checkpoint is for resuming a run. Weights on their way to inference hosts are
the business of shipping, and Hugging Face files that of `composer_jax.models`.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import grain
import grain.checkpoint
import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jaxtyping import PyTree

_MAX_LISTED = 3
# What must be there of a state, and how TensorStore's messages begin when what
# is there can't be read. Others ("UNAVAILABLE", "PERMISSION_DENIED") may pass.
_STATE_FILES = ("_METADATA", "manifest.ocdbt")
_UNREADABLE = (
  "DATA_LOSS",
  "FAILED_PRECONDITION",
  "NOT_FOUND",
  "OUT_OF_RANGE",
  "Error opening",
  "Error reading",
)


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
      folder: a path.
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
        # In the background, a folder that can't be made would leave the main
        # thread waiting for it forever.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
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
    data_iterator: grain.DatasetIterator | None,
    meta: dict[str, Any],
    *,
    force: bool = False,
  ) -> bool:
    """Starts to save, if a checkpoint is due and this step has none yet.

    Args:
      step: the number of updates made.
      state: a pytree of `jax.Array`.
      data_iterator: its position is saved. None: the run has none.
      meta: what else is needed to resume; JSON.
      force: save even if no checkpoint is due.

    Returns:
      Whether a save was started.

    Raises:
      CheckpointError: this save, or the one before, couldn't be written.
    """
    due = force or step % self.every == 0
    if not due or step == self._manager.latest_step():
      return False
    items = {
      "state": ocp.args.StandardSave(state),
      "meta": ocp.args.JsonSave(meta),
    }
    if data_iterator is not None:
      items["data"] = grain.checkpoint.CheckpointSave(data_iterator)
    with self._writing():
      return self._manager.save(
        step, args=ocp.args.Composite(**items), force=True
      )

  def restore(
    self, abstract_state: PyTree, data_iterator: grain.DatasetIterator | None
  ) -> tuple[int, PyTree, dict[str, Any]] | None:
    """Restores the latest checkpoint, bit for bit.

    Args:
      abstract_state: a `jax.ShapeDtypeStruct` with a sharding for each array.
        Each array goes straight to its shards, however it was sharded before.
      data_iterator: moved to the saved position. None: the run has none.

    Returns:
      The step, the state, and the meta object; None if there is no checkpoint.

    Raises:
      CheckpointError: the state's paths, shapes or dtypes differ, or another
        number of processes saved the position in the data, or the checkpoint is
        damaged.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    path = self.folder / str(step)
    needed = [f"state/{name}" for name in _STATE_FILES]
    if data_iterator is not None:
      needed.append("data")
    with _naming_damage(path, *needed, "meta/metadata"):
      return step, *self._restore(step, path, abstract_state, data_iterator)

  def _restore(
    self,
    step: int,
    path: epath.Path,
    abstract_state: PyTree,
    data_iterator: grain.DatasetIterator | None,
  ) -> tuple[PyTree, dict[str, Any]]:
    _check(
      self._manager.item_metadata(step)["state"],
      abstract_state,
      path,
      remedy="start afresh with another --workdir, or resume with the model "
      "and optimizer config that wrote it",
    )
    items = {
      "state": ocp.args.StandardRestore(abstract_state),
      "meta": ocp.args.JsonRestore(),
    }
    if data_iterator is not None:
      _check_writers(path)
      items["data"] = grain.checkpoint.CheckpointRestore(data_iterator)
    restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    return restored["state"], restored["meta"]

  def wait(self) -> None:
    """Waits until what was saved is on disk.

    Raises:
      CheckpointError: it couldn't be written.
    """
    with self._writing():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits as `wait` does, then frees the background threads."""
    # Orbax clears up in the background, and its `close` doesn't wait for
    # that: a thread that outlives the interpreter ends in a traceback.
    try:
      self._manager._maybe_await_cleanup_tmp_directory()
    except OSError as error:  # Nothing that was saved is lost by this.
      logging.warning("%s was not cleared up: %s", self.folder, error)
    with self._writing():
      self._manager.close()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError) as error:
      raise CheckpointError(
        f"a checkpoint in {self.folder} could not be saved ({_reason(error)})"
      ) from error

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
    CheckpointError: no checkpoint there, or a damaged one, or other paths,
      shapes or dtypes.
  """
  checkpoint = _latest(folder)
  path = checkpoint / "state"
  handler = ocp.PyTreeCheckpointHandler()
  with _naming_damage(checkpoint, *(f"state/{name}" for name in _STATE_FILES)):
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


def read_meta(folder: str | os.PathLike) -> dict[str, Any]:
  """The meta object of the latest checkpoint of another run.

  Args:
    folder: the other run's checkpoint folder.

  Raises:
    CheckpointError: no checkpoint there, or a damaged one.
  """
  path = _latest(folder)
  with _naming_damage(path, "meta/metadata"):
    return ocp.JsonCheckpointHandler().restore(path / "meta")


def _latest(folder: str | os.PathLike) -> epath.Path:
  folder = _absolute(folder)
  steps = ocp.utils.checkpoint_steps(folder) if folder.exists() else []
  if not steps:
    raise CheckpointError(f"no checkpoint in {folder}")
  return folder / str(max(steps))


def _check_writers(path: epath.Path) -> None:
  """Refuses positions in the data of another number of processes."""
  suffix = f"-of-{jax.process_count()}.json"
  writers = list((path / "data").glob("process_*.json"))
  if not all(writer.name.endswith(suffix) for writer in writers):
    raise CheckpointError(
      f"the data position in {path} was saved by {len(writers)} processes, "
      f"not {jax.process_count()}: resume with as many as before"
    )
  if len(writers) != jax.process_count():
    raise _damaged(
      path, f"data has {len(writers)} of {jax.process_count()} positions"
    )


@contextlib.contextmanager
def _naming_damage(path: epath.Path, *needed: str) -> Iterator[None]:
  """Makes one sentence of what is missing or can't be read in a checkpoint.

  Args:
    path: the checkpoint.
    needed: files and folders that it must have.
  """
  for name in needed:
    if not (path / name).exists():
      raise _damaged(path, f"{name} is missing")
  try:
    yield
  except Exception as error:  # Orbax wraps TensorStore's in a bare one.
    root: BaseException = error
    while root.__cause__:
      root = root.__cause__
    unreadable = isinstance(
      root, FileNotFoundError | UnicodeDecodeError | json.JSONDecodeError
    ) or (isinstance(root, ValueError) and str(root).startswith(_UNREADABLE))
    if not unreadable:
      raise
    raise _damaged(path, _reason(root)) from error


def _damaged(path: epath.Path, reason: str) -> CheckpointError:
  return CheckpointError(
    f"the checkpoint {path} is damaged ({reason}): remove that folder to go on"
    " from the one before"
  )


def _reason(error: BaseException) -> str:
  """The error in one line, without the details that TensorStore appends."""
  return re.sub(r" \[\w+='.*", "", " ".join(str(error).split()))


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
