"""Batches of packed rows, in a fixed random order, for each process its part.

Batch i of a run is a function of the rows, the seed, the batch size and i
alone: not of the number of processes, nor of where a run was interrupted. The
iterator's state is that one number, and goes into the checkpoint (Orbax's
composite with `grain.checkpoint.CheckpointSave`, or `get_state`).
"""

import grain
import numpy as np

from composer_jax.data.rows import PackedRows

_MANY_ROWS = 2**53


def make_loader(
  rows: PackedRows,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
  shuffle: bool = True,
  num_epochs: int | None = None,
) -> grain.DatasetIterator:
  """Iterates over this process's part of each global batch.

  For validation: `shuffle=False, num_epochs=1`.

  Args:
    rows: what to read.
    batch_size: B, rows of a batch over all processes.
    seed: of the order, which is another one in each epoch.
    process_index: which part to yield.
    process_count: P, into how many parts batches are split.
    shuffle: whether to shuffle at all.
    num_epochs: passes over the rows, or None for no end. Every row counts once
      a pass: the last batch is filled up with blank, masked rows.

  Returns:
    An iterator over dictionaries of `tokens`, `targets`, `segment_ids`,
    `positions`, int32 `[B/P, S]`; `loss_mask`, bool `[B/P, S]`; `row`, int32
    `[B/P]`, the index into `rows` or -1.

  Raises:
    ValueError: there are no rows, or the sizes do not go into each other.
  """
  if not len(rows):
    raise ValueError("There are no rows to load: the data set's part is empty.")
  if batch_size < 1 or batch_size % process_count:
    raise ValueError(
      f"batch_size {batch_size} must be a positive multiple of the number of "
      f"processes, {process_count}."
    )
  if not 0 <= process_index < process_count:
    raise ValueError(
      f"process_index {process_index} must lie in [0, {process_count})."
    )
  if num_epochs is not None and num_epochs < 1:
    raise ValueError(f"num_epochs must be at least 1, got {num_epochs}.")

  order = grain.MapDataset.range(len(rows))
  if shuffle:
    order = order.shuffle(seed=seed)
  # No end: more epochs than anyone will see, and few enough to count rows.
  order = order.repeat(num_epochs or _MANY_ROWS // len(rows))
  if num_epochs is not None and len(order) % batch_size:
    blanks = batch_size - len(order) % batch_size
    order = grain.MapDataset.concatenate(
      [order, grain.MapDataset.source([-1] * blanks)]
    )
  local = order[process_index::process_count].map(
    lambda index: rows[index] if index >= 0 else rows.blank()
  )
  local = local.batch(batch_size // process_count, batch_fn=_stack)
  options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
  return iter(local.to_iter_dataset(options))


def _stack(rows: list) -> dict[str, np.ndarray]:
  # Runs in Grain's threads. A type of the items would have beartype pick one
  # with the global random state, under the feet of hypothesis.
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
