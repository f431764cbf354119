"""From groups of trajectories to what the learner trains on: packed streams.

Each context window of a trajectory is a sequence. It ends with its last sampled
token, since nothing is learnt from what comes after, and is never cut. Several
share a row, as mid-training's documents do; rows fill *micro-batches* of one
fixed shape, as many as it takes, so that nothing is compiled anew.

Batches are NumPy, and pure functions of their arguments: processes that pack
the same groups get the same batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from composer_jax.rl import objective as objective_lib
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import NO_ROUTE
from composer_jax.rl.trajectory import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """What the learner's programs are compiled for.

  Attributes:
    rows: B, of a micro-batch, over all devices.
    seq_len: S, tokens a row: no context window may need more.
  """

  rows: int
  seq_len: int

  def __post_init__(self):
    for name in ("rows", "seq_len"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


class RlBatch(NamedTuple):
  """M micro-batches for one update, token by token, and R trajectories.

  At each place stands an input token; loss mask, log-probabilities, versions
  and advantages are those of its target, the token after it.

  Attributes:
    tokens: inputs; 0 is padding.
    targets: the token after each.
    positions: of the input in its sequence, from 0.
    segment_ids: which sequence of the row, from 1; 0 is padding.
    loss_mask: True where the target was sampled.
    trajectories: which trajectory, in the groups' order; -1 is padding.
    temperatures: that the target was sampled at; 1 is padding.
    sampler_logprobs: in the distribution sampled from; 0 outside of the mask.
    versions: of the weights that sampled the target; -1 outside of the mask.
    routes: experts that the sampler took for the input; see `replay.routes_of`.
      None if they aren't replayed.
    advantages: of the target; 0 until `with_advantages`. Every surrogate is
      linear in them, so a token's weight is multiplied in here.
    proximal_logprobs: see `objective.Streams`; None is the policy itself.
    reference_logprobs: of the reference policy; None if that is free.
    rewards: of each trajectory.
    groups: each trajectory's group, from 0, rising.
    updates: that the learner had made when it admitted the batch. Until it
      makes another, the proximal policy of then is the policy itself.
  """

  tokens: Int[np.ndarray, "M B S"]
  targets: Int[np.ndarray, "M B S"]
  positions: Int[np.ndarray, "M B S"]
  segment_ids: Int[np.ndarray, "M B S"]
  loss_mask: Bool[np.ndarray, "M B S"]
  trajectories: Int[np.ndarray, "M B S"]
  temperatures: Float[np.ndarray, "M B S"]
  sampler_logprobs: Float[np.ndarray, "M B S"]
  versions: Int[np.ndarray, "M B S"]
  routes: Int[np.ndarray, "M B S L K"] | None
  advantages: Float[np.ndarray, "M B S"]
  proximal_logprobs: Float[np.ndarray, "M B S"] | None
  reference_logprobs: Float[np.ndarray, "M B S"] | None
  rewards: Float[np.ndarray, " R"]
  groups: Int[np.ndarray, " R"]
  updates: int | None = None

  @property
  def num_tokens(self) -> int:
    """Tokens to learn from."""
    return int(self.loss_mask.sum())


class _Window(NamedTuple):
  """A sequence: inputs [start, stop) of a trajectory, targets one later."""

  trajectory: Trajectory
  index: int
  start: int
  stop: int
  routes: Int[np.ndarray, "N L K"] | None


def pack(
  groups: Sequence[Group],
  shape: BatchShape,
  *,
  ranks: int = 1,
  cost: Callable[[int], float] = float,
  routes: Callable[[Trajectory], Int[np.ndarray, "N L K"]] | None = None,
) -> RlBatch:
  """Packs all trajectories of some groups for one update.

  The longest sequence first, each goes to the rank with the least work that has
  room, there to the fullest row that has: ranks wait for one another. Their
  work differs by one sequence at most, unless rows are full.

  Args:
    groups: whose trajectories to learn from.
    shape: of a micro-batch.
    ranks: D, over which a micro-batch's rows are split, in blocks.
    cost: of a sequence of so many tokens, to balance; its tokens by default.
    routes: of a trajectory, if they are to be replayed; see `replay.routes_of`.

  Returns:
    The batch, without advantages.

  Raises:
    ValueError: there is nothing to learn from, or a window is too long, or was
      sampled at temperature 0 or with top-p or top-k.
  """
  if shape.rows % ranks:
    raise ValueError(
      f"rows={shape.rows} must be a multiple of the {ranks} ranks that share"
      " them."
    )
  trajectories = [t for group in groups for t in group.trajectories]
  windows = [
    window
    for index, trajectory in enumerate(trajectories)
    for window in _windows(trajectory, index, shape, routes)
  ]
  if not windows:
    raise ValueError("There is no sampled token in these groups.")
  lengths = np.array([window.stop - window.start for window in windows])
  costs = np.array([cost(length) for length in lengths.tolist()])
  rows, columns, micro_batches = place(lengths, costs, shape, ranks)
  streams = _blank((micro_batches * shape.rows, shape.seq_len))
  if routes:
    size = windows[0].routes.shape[1:]
    filled = np.full((*streams["tokens"].shape, *size), NO_ROUTE, np.int16)
    streams["routes"] = filled
  for i in np.lexsort((columns, rows)).tolist():
    _fill(streams, int(rows[i]), int(columns[i]), windows[i])
  sizes = [len(group.trajectories) for group in groups]
  return RlBatch(
    **{"routes": None}
    | {
      name: stream.reshape(micro_batches, shape.rows, *stream.shape[1:])
      for name, stream in streams.items()
    },
    proximal_logprobs=None,
    reference_logprobs=None,
    rewards=np.array([t.reward for t in trajectories], np.float32),
    groups=np.repeat(np.arange(len(groups), dtype=np.int32), sizes),
  )


def place(
  lengths: Int[np.ndarray, " N"],
  costs: Float[np.ndarray, " N"],
  shape: BatchShape,
  ranks: int,
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"], int]:
  """Decides where sequences go; see `pack`.

  Args:
    lengths: tokens of each, at most `shape.seq_len`.
    costs: work of each.
    shape: of a micro-batch.
    ranks: that share a micro-batch's rows.

  Returns:
    The row of each, counted through all micro-batches, its first column, and
    the number of micro-batches: the fewest with which this rule finds room.
  """
  least = math.ceil(lengths.sum() / (shape.rows * shape.seq_len))
  for micro_batches in itertools.count(max(1, least)):
    blocks = micro_batches * ranks, shape.rows // ranks
    room = np.full(blocks, shape.seq_len)
    placed = _try_to_place(lengths, costs, room)
    if placed is not None:
      return *placed, micro_batches
  raise AssertionError("With a row for each sequence there is room.")


def _try_to_place(lengths, costs, room):
  """Row and column of each sequence; None if they don't fit.

  `room`, `[blocks, rows]`, is what is free in each row; a block is a rank's
  rows in one micro-batch.
  """
  seq_len, rows_each = room.max(), room.shape[1]
  work = np.zeros(len(room))
  rows, columns = np.zeros_like(lengths), np.zeros_like(lengths)
  for i in np.lexsort((-lengths, -costs)).tolist():
    fits = room >= lengths[i]
    able = fits.any(axis=1)
    if not able.any():
      return None
    block = np.where(able, work, np.inf).argmin()
    row = np.where(fits[block], room[block], seq_len + 1).argmin()
    rows[i] = block * rows_each + row
    columns[i] = seq_len - room[block, row]
    room[block, row] -= lengths[i]
    work[block] += costs[i]
  return rows, columns


def with_advantages(batch: RlBatch, config: ObjectiveConfig) -> RlBatch:
  """Gives each token the advantage of its trajectory in its group.

  Args:
    batch: from `pack`; with `reference_logprobs` if KL divergence costs.
    config: which advantages; how much KL divergence costs, in the reward.

  Raises:
    ValueError: KL divergence costs, but there is no reference.
  """
  rewards, reference = batch.rewards, batch.reference_logprobs
  if config.kl_coef:
    if reference is None:
      raise ValueError(
        f"kl_coef={config.kl_coef} needs the reference policy's"
        " log-probabilities."
      )
    streams = batch.sampler_logprobs, reference
    streams += batch.loss_mask, batch.trajectories
    penalised = objective_lib.penalise_kl(
      jnp.asarray(rewards), *map(flat, streams), config.kl_coef
    )
    rewards = np.asarray(penalised)
  # [groups, largest group], filled up with members that don't count.
  member = np.arange(len(rewards)) - np.searchsorted(batch.groups, batch.groups)
  table = np.zeros((batch.groups[-1] + 1, member.max() + 1), np.float32)
  valid = np.zeros(table.shape, bool)
  table[batch.groups, member], valid[batch.groups, member] = rewards, True
  advantages = objective_lib.group_advantages(
    jnp.asarray(table), jnp.asarray(valid), config.advantages
  )
  advantages = np.asarray(advantages)[batch.groups, member]
  return batch._replace(
    advantages=np.where(
      batch.loss_mask, advantages[batch.trajectories], np.float32(0)
    )
  )


def flat(stream: Shaped[np.ndarray, "M B S"]) -> Shaped[Array, "rows S"]:
  """All rows of all micro-batches."""
  return jnp.asarray(stream.reshape(-1, stream.shape[-1]))


def _windows(trajectory: Trajectory, index: int, shape: BatchShape, routes):
  """The trajectory's sequences, or ValueError if it can't be learnt from."""
  name = f"A trajectory of task {trajectory.task_id!r}"
  sampling = trajectory.sampling
  if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k:
    raise ValueError(
      f"{name} was sampled with {sampling}: the learner knows temperatures"
      " above 0 only, without top_p and top_k."
    )
  windows, replayed = [], routes and routes(trajectory)
  for start, stop in trajectory.windows:
    sampled = np.flatnonzero(trajectory.loss_mask[start:stop])
    if not sampled.size:
      continue
    if sampled[0] == 0:
      raise ValueError(
        f"{name} has a sampled token at {start}, where a context window starts:"
        " there is nothing to predict it from."
      )
    if sampled[-1] > shape.seq_len:
      raise ValueError(
        f"{name} has a context window of {sampled[-1]} tokens, but rows have"
        f" seq_len={shape.seq_len}: raise that, or let rollouts say less."
      )
    stop = start + int(sampled[-1])
    windows.append(_Window(trajectory, index, start, stop, replayed))
  return windows


def _blank(shape):
  """Rows of padding."""
  fills = {
    "tokens": np.int32(0),
    "targets": np.int32(0),
    "positions": np.int32(0),
    "segment_ids": np.int32(0),
    "loss_mask": np.bool(False),
    "trajectories": np.int32(-1),
    "temperatures": np.float32(1),
    "sampler_logprobs": np.float32(0),
    "versions": np.int32(-1),
    "advantages": np.float32(0),
  }
  return {name: np.full(shape, fill) for name, fill in fills.items()}


def _fill(streams, row, column, window):
  """Writes a sequence to the right of those that the row has."""
  trajectory, index, start, stop, routes = window
  inputs, targets = slice(start, stop), slice(start + 1, stop + 1)
  place = row, slice(column, column + stop - start)
  segment = streams["segment_ids"][row].max() + 1
  for name, values in {
    "tokens": trajectory.token_ids[inputs],
    "targets": trajectory.token_ids[targets],
    "positions": np.arange(stop - start),
    "segment_ids": segment,
    "loss_mask": trajectory.loss_mask[targets],
    "trajectories": index,
    "temperatures": trajectory.sampling.temperature,
    "sampler_logprobs": trajectory.logprobs[targets],
    "versions": trajectory.versions[targets],
  }.items():
    streams[name][place] = values
  if routes is not None:
    streams["routes"][place] = routes[inputs]
