"""Which rollouts are begun, and which of them are trained on.

Two pure functions decide. `room` says how many groups may be begun: a batch of
`groups`, and as many again for each version that a group may lag behind. So
with nothing slow or discarded a group is at most `staleness` versions old when
its turn comes, and with a staleness of 0 nothing is begun before the weights
that it is to improve are there: the synchronous baseline is the same code.
`admit` looks at a finished group when its turn comes, and states what is left
of it, and why the rest is not.

`Buffer` keeps the books between the two: who is on the way, which groups are
complete or past their deadline, what was trained on, and what was discarded,
by reason. Each rollout that was ordered ends in exactly one of these. Its state
is plain JSON, a part of the learner's checkpoint; trajectories themselves stay
in the spool (`composer_jax.rl.spool`) until a checkpoint knows that they are
done with.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from composer_jax.rl.trajectory import Group, Trajectory

# Why rollouts are discarded, beside "failed/<what failed>".
REASONS = (
  "equal_rewards",
  "group_too_small",
  "lost",
  "missed_deadline",
  "stale",
  "unusable",
)


@dataclasses.dataclass(frozen=True)
class BufferConfig:
  """What a batch is made of.

  Attributes:
    groups: a batch.
    group_size: rollouts of a group.
    staleness: versions that a group may lag behind when it is trained on.
    max_token_lag: tokens of older versions lose their part in the loss; None:
      `staleness`.
    max_trajectory_lag: trajectories whose first token is older are discarded
      whole; None: `max_token_lag`.
    deadline_s: from a group's order to when it is closed with what it has.
    min_group: trajectories that a group needs.
  """

  groups: int = 8
  group_size: int = 8
  staleness: int = 1
  max_token_lag: int | None = None
  max_trajectory_lag: int | None = None
  deadline_s: float = 300.0
  min_group: int = 2

  def __post_init__(self):
    for name, least in {
      "groups": 1,
      "group_size": 2,
      "staleness": 0,
      "min_group": 2,
    }.items():
      if getattr(self, name) < least:
        raise ValueError(
          f"{name}={getattr(self, name)} must be at least {least}."
        )
    if self.min_group > self.group_size:
      raise ValueError(
        f"min_group={self.min_group} is above group_size={self.group_size}: no"
        " group could ever be trained on."
      )
    if not self.deadline_s > 0:
      raise ValueError(f"deadline_s={self.deadline_s} must be above 0.")
    token, whole = self.max_lags
    if not 0 <= token <= whole:
      raise ValueError(
        f"max_token_lag={token} must be at least 0 and at most"
        f" max_trajectory_lag={whole}: older trajectories are discarded whole."
      )

  @property
  def max_lags(self) -> tuple[int, int]:
    """The two bounds, of a token and of a trajectory, in versions."""
    token, whole = self.max_token_lag, self.max_trajectory_lag
    token = self.staleness if token is None else token
    return token, token if whole is None else whole


@dataclasses.dataclass(frozen=True)
class Admitted:
  """What is left of a group.

  Attributes:
    trajectories: to train on; none, or at least `min_group`.
    discarded: the others by reason.
    masked_tokens: of the trajectories, that are too old for the loss.
  """

  trajectories: tuple[Trajectory, ...]
  discarded: collections.Counter[str]
  masked_tokens: int = 0


def room(outstanding: int, config: BufferConfig) -> int:
  """How many groups may be begun.

  groups * (staleness + 1) - outstanding, at least 0. It is AReaL's bound
  (Fu et al. 2025, https://arxiv.org/abs/2505.24298, eq. 3), but discarded
  groups make room again, or a batch of none but solved tasks would be the last.

  Args:
    outstanding: groups that were begun and neither discarded nor part of a
      version that is published.
    config: of the batch.
  """
  return max(0, config.groups * (config.staleness + 1) - outstanding)


def lags(
  versions: Int[np.ndarray, " N"], published: Sequence[int]
) -> Int[np.ndarray, " N"]:
  """How many versions came after each: numbers of a chain have gaps.

  Args:
    versions: of tokens.
    published: all versions, rising; the last one is what would learn.
  """
  older = np.searchsorted(np.asarray(published), versions, side="right")
  return len(published) - older


def admit(
  group: Group, published: Sequence[int], config: BufferConfig
) -> Admitted:
  """What of a group may be trained on, by versions alone.

  In this order, each for the rest of the one before, with `lags` of tokens:

  * "failed/<what failed>": rollouts that have no trajectory;
  * "stale": trajectories with a lag above the bound for trajectories. Of the
    others, tokens with a lag above the bound for tokens lose their loss;
    trajectories that have none left are "stale", too;
  * "unusable": trajectories without any sampled token;
  * "group_too_small": fewer than `min_group` are left;
  * "equal_rewards": all have the same reward, so that none is better.

  Args:
    group: of rollouts that ended.
    published: see `lags`.
    config: the bounds.
  """
  token_lag, trajectory_lag = config.max_lags
  discarded = collections.Counter(
    {f"failed/{where}": n for where, n in group.failures.items() if n}
  )
  kept, masked = [], 0
  for trajectory in group.trajectories:
    sampled = trajectory.loss_mask
    lag = lags(trajectory.versions, published)
    old = sampled & (lag > token_lag)
    if not sampled.any():
      discarded["unusable"] += 1
    elif lag[sampled].max() > trajectory_lag or old.sum() == sampled.sum():
      discarded["stale"] += 1
    else:
      kept.append(_without(trajectory, old))
      masked += int(old.sum())
  if len(kept) < config.min_group:
    reason = "group_too_small"
  elif len({trajectory.reward for trajectory in kept}) == 1:
    reason = "equal_rewards"
  else:
    return Admitted(tuple(kept), discarded, masked)
  discarded[reason] += len(kept)
  return Admitted((), +discarded)


def _without(trajectory: Trajectory, old: Bool[np.ndarray, " N"]) -> Trajectory:
  """The trajectory with nothing to learn from some of its tokens."""
  if not old.any():
    return trajectory
  mask = trajectory.loss_mask & ~old
  return dataclasses.replace(
    trajectory,
    loss_mask=mask,
    logprobs=np.where(mask, trajectory.logprobs, 0).astype(np.float32),
    versions=np.where(mask, trajectory.versions, -1).astype(np.int32),
  )


@dataclasses.dataclass
class _Open:
  """A group on its way."""

  task_id: str
  size: int
  closes_at: float
  members: dict[int, Group] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Batch:
  """Groups to train on, by id, and how many versions old their tokens are.

  Attributes:
    groups: id -> group, all of at least `min_group` trajectories.
    lags: versions -> tokens of the loss.
    masked_tokens: too old for the loss.
  """

  groups: Mapping[int, Group]
  lags: Mapping[int, int]
  masked_tokens: int


class Buffer:
  """The books of one run.

  Time comes in as an argument, seconds since 1970, so that deadlines survive a
  restart.

  Attributes:
    config: of the batch.
    counts: rollouts: "ordered", "trained", and those discarded, by reason.
    masked_tokens: that were too old for the loss of their trajectory.
    next_id: of the next group; no id is used twice.
    settled: ids of groups that are trained on or discarded.
  """

  def __init__(
    self,
    config: BufferConfig,
    state: dict[str, Any] | None = None,
    *,
    observe: Callable[[int, Group], object] = lambda number, group: None,
  ):
    """Begins, or goes on from what `state` gave; see `order`.

    Args:
      config: of the batch.
      state: of an earlier buffer.
      observe: told each group when it is settled: its id, and all of it.
    """
    state = state or {}
    self.config = config
    self.counts: collections.Counter[str] = collections.Counter(
      state.get("counts")
    )
    self.masked_tokens: int = state.get("masked_tokens", 0)
    self.next_id: int = state.get("next_id", 0)
    self.settled = Ids(**state.get("settled", {}))
    self._observe = observe
    self._open: dict[int, _Open] = {}
    self._training: set[int] = set()

  def state(self) -> dict[str, Any]:
    """What a checkpoint must hold; JSON.

    Only between `trained` and the next `draw` does it fit the weights.
    """
    return {
      "counts": dict(self.counts),
      "masked_tokens": self.masked_tokens,
      "next_id": self.next_id,
      "settled": self.settled.state(),
    }

  @property
  def outstanding(self) -> int:
    """Groups begun and not settled."""
    return len(self._open) + len(self._training)

  @property
  def room(self) -> int:
    """Groups that may be begun; see the function of that name."""
    return room(self.outstanding, self.config)

  @property
  def waiting(self) -> int:
    """Groups that are complete, and wait for their turn."""
    return sum(len(o.members) >= o.size for o in self._open.values())

  def order(self, group: int, task_id: str, size: int, now: float) -> None:
    """Notes that a group was begun, or that it was when the run was cut.

    A buffer that goes on must be told of all that were ordered and aren't
    settled, in order, and then that the others are `lost`.

    Args:
      group: its id.
      task_id: the task.
      size: rollouts.
      now: when it was ordered.

    Raises:
      ValueError: the id was used before.
    """
    if group in self.settled or group in self._open:
      raise ValueError(f"Group {group} was ordered before: ids are used once.")
    if group >= self.next_id:
      # What lies between was ordered, too; `lost` settles it.
      self.counts["ordered"] += size * (group + 1 - self.next_id)
      self.next_id = group + 1
    self._open[group] = _Open(task_id, size, now + self.config.deadline_s)

  def lost(self) -> list[int]:
    """Settles groups that were ordered and of which nobody told: their ids."""
    gone = [
      group
      for group in range(self.next_id)
      if group not in self.settled and group not in self._open
    ]
    for group in gone:
      self.counts["lost"] += self.config.group_size
      self.settled.add(group)
    return gone

  def add(self, group: int, member: int, result: Group) -> bool:
    """Takes in one rollout, as a group of one trajectory or one failure.

    Returns:
      False if it is of no use: it came twice, or after its group was closed.
    """
    found = self._open.get(group)
    if found is None or member in found.members or member >= found.size:
      return False
    found.members[member] = result
    return True

  def draw(self, published: Sequence[int], now: float) -> Batch | None:
    """The next batch, if there is one; otherwise discards what can't be used.

    Groups go in the order of their ids. Those of the batch stay outstanding
    until `trained`.

    Args:
      published: see `lags`.
      now: for the deadlines.
    """
    usable: list[tuple[int, Admitted]] = []
    for group in sorted(self._open):
      found = self._open[group]
      missing = found.size - len(found.members)
      if missing and now < found.closes_at:
        continue
      admitted = admit(_joined(found), published, self.config)
      if not admitted.trajectories:
        self._settle(group, admitted)
        continue
      usable.append((group, admitted))
      if len(usable) == self.config.groups:
        return self._batch(usable, published)
    return None

  def trained(self, batch: Batch) -> None:
    """Notes that a batch's version is published: there is room again."""
    self._training -= batch.groups.keys()

  def _batch(self, usable, published):
    groups, counted, masked = {}, collections.Counter(), 0
    for group, admitted in usable:
      task_id = self._open[group].task_id
      self._settle(group, admitted)
      self._training.add(group)
      groups[group] = Group(task_id, admitted.trajectories)
      masked += admitted.masked_tokens
      for trajectory in admitted.trajectories:
        sampled = trajectory.versions[trajectory.loss_mask]
        counted.update(lags(sampled, published).tolist())
    return Batch(groups, dict(sorted(counted.items())), masked)

  def _settle(self, group, admitted):
    found = self._open.pop(group)
    missing = found.size - len(found.members)
    self.counts += admitted.discarded
    self.counts += collections.Counter(
      missed_deadline=missing, trained=len(admitted.trajectories)
    )
    self.masked_tokens += admitted.masked_tokens
    self.settled.add(group)
    self._observe(group, _joined(found))


def _joined(found: _Open) -> Group:
  """The members that came, in their order, as one group."""
  members = [found.members[i] for i in sorted(found.members)]
  return Group(
    found.task_id,
    tuple(t for member in members for t in member.trajectories),
    sum((collections.Counter(m.failures) for m in members), start=_NONE),
  )


_NONE: collections.Counter[str] = collections.Counter()


class Ids:
  """A set of ids that fills up from 0: all below a number, and some above."""

  def __init__(self, below: int = 0, above: Iterable[int] = ()):
    """Takes what `state` gave."""
    self._below = below
    self._above = set(above)

  def __contains__(self, number: int) -> bool:
    return number < self._below or number in self._above

  def add(self, number: int) -> None:
    """Adds one."""
    if number not in self:
      self._above.add(number)
    while self._below in self._above:
      self._above.remove(self._below)
      self._below += 1

  def state(self) -> dict[str, Any]:
    """JSON."""
    return {"below": self._below, "above": sorted(self._above)}
