"""The learner's side of the spool: orders out, batches and pass rates in.

Puts buffer, curriculum and spool together. What it knows and no file says is
its `state`, a part of the learner's checkpoint; it goes on from any of them,
with whatever tickets and rollouts lie in the spool then.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from composer_jax.rl.buffer import Batch, Buffer, BufferConfig
from composer_jax.rl.curriculum import Curriculum
from composer_jax.rl.spool import Spool, Ticket
from composer_jax.rl.trajectory import Group, Trajectory

# A ticket of an evaluation: enough for several workers to share the tasks.
_PART = 10
# Transcripts that an evaluation keeps for people to read.
_KEPT = 6
_GROUP = re.compile(r"group-(\d+)")


@dataclasses.dataclass
class Evaluation:
  """Rollouts of held-out tasks, each once, by one version.

  Attributes:
    step: of the learner.
    version: of the weights.
    size: tasks.
    parts: names of its tickets.
    results: of the tasks that are done, by ticket and number.
  """

  step: int
  version: int
  size: int
  parts: tuple[str, ...]
  results: dict[tuple[str, int], Group]

  @property
  def done(self) -> bool:
    """Whether all tasks are."""
    return len(self.results) == self.size

  @property
  def trajectories(self) -> list[Trajectory]:
    """Of all tasks whose rollout the machinery didn't fail, in order."""
    return [
      trajectory
      for key in sorted(self.results)
      for trajectory in self.results[key].trajectories
    ]

  def summary(self) -> dict[str, Any]:
    """Pass rate and counts; JSON. NaN if the machinery failed them all."""
    solved = [t.rewards["solved"] > 0 for t in self.trajectories]
    return {
      "step": self.step,
      "version": self.version,
      "tasks": self.size,
      "failed": self.size - len(solved),
      "pass_rate": sum(solved) / len(solved) if solved else float("nan"),
    }


class Supply:
  """See the module.

  Attributes:
    buffer: the books.
    curriculum: which task is next.
  """

  def __init__(
    self,
    spool: Spool,
    config: BufferConfig,
    train_tasks: Sequence[str],
    seed: int,
    state: dict[str, Any] | None = None,
  ):
    """Begins, or goes on from what `state` gave.

    Args:
      spool: nobody else may order from it.
      config: of the batches.
      train_tasks: tasks to draw from, by id.
      seed: of sampling and of the choice of tasks.
      state: of an earlier one.
    """
    state = state or {}
    self.curriculum = Curriculum(
      train_tasks, config.group_size, seed, state.get("curriculum")
    )
    self.buffer = Buffer(config, state.get("buffer"), observe=self._learn)
    self._spool, self._seed = spool, seed
    self._tasks: dict[int, str] = {}
    self._evaluation: Evaluation | None = None
    # Names of what is done with, to be cleared once a checkpoint says so.
    self._done: set[str] = set()
    self._early: dict[tuple[str, int], Group] = {}
    self._tried = self._solved = 0
    for ticket in spool.tickets():
      group = _group_of(ticket.name)
      if group is None:
        continue
      if group in self.buffer.settled:
        self._done.add(ticket.name)
      else:
        self._note(group, ticket)
    self.buffer.lost()
    self.take()

  def state(self) -> dict[str, Any]:
    """For the checkpoint; see `Buffer.state` for when."""
    return {
      "buffer": self.buffer.state(),
      "curriculum": self.curriculum.state(),
    }

  def done(self) -> set[str]:
    """Names to `clear` once a checkpoint with this `state` is on disk."""
    return set(self._done)

  def clear(self, names: set[str]) -> None:
    """Removes their files."""
    self._spool.clear(names)
    self._done -= names

  def order(self, version: int, progress: float, now: float) -> None:
    """Orders as many groups as there is room for.

    Args:
      version: that their rollouts begin with, at least.
      progress: of training, from 0 to 1, for the curriculum.
      now: seconds since 1970.
    """
    size = self.buffer.config.group_size
    for _ in range(self.buffer.room):
      group = self.buffer.next_id
      busy = set(self._tasks.values())
      task_id = self.curriculum.draw(group, progress, busy)
      ticket = Ticket(
        name=f"group-{group:08d}",
        tasks=(task_id,) * size,
        purpose="train",
        version=version,
        ordered_at=now,
        seed=(self._seed, 0, group),
      )
      self._spool.order(ticket)
      self._note(group, ticket)

  def take(self) -> int:
    """Takes in what has arrived; how many rollouts."""
    count = 0
    for name, number, result in self._spool.arrivals():
      count += 1
      group = _group_of(name)
      if group is None:
        self._early[name, number] = result
      elif group in self.buffer.settled:
        self._done.add(name)
      else:
        self.buffer.add(group, number, result)
    if self._evaluation:
      for name, number in [k for k in self._early if k[0] in self._parts]:
        self._evaluation.results[name, number] = self._early.pop((name, number))
    return count

  def pop_pass_rate(self) -> float:
    """Of rollouts settled since the last call, discarded ones included."""
    rate = self._solved / self._tried if self._tried else float("nan")
    self._tried = self._solved = 0
    return rate

  def batch(self, published: Sequence[int], now: float) -> Batch | None:
    """The next batch, if it is there; see `Buffer.draw`."""
    return self.buffer.draw(published, now)

  def begin_evaluation(
    self, tasks: Sequence[str], step: int, version: int, now: float
  ) -> Evaluation:
    """Orders one rollout of each of some tasks; `take` fills it in.

    Begun anew after a crash, it keeps what was done before.
    """
    parts = []
    for start in range(0, len(tasks), _PART):
      name = f"evaluate-{step:08d}-{start // _PART:04d}"
      part = tuple(tasks[start : start + _PART])
      seed = (self._seed, 1, step, start)
      self._spool.order(Ticket(name, part, "evaluate", version, now, seed))
      parts.append(name)
    self._evaluation = Evaluation(step, version, len(tasks), tuple(parts), {})
    return self._evaluation

  def end_evaluation(self) -> None:
    """Its files are not needed any more."""
    assert self._evaluation
    self._done.update(self._evaluation.parts)
    self._evaluation = None

  @property
  def _parts(self):
    return self._evaluation.parts if self._evaluation else ()

  def _note(self, group, ticket):
    size = len(ticket.tasks)
    self.buffer.order(group, ticket.tasks[0], size, ticket.ordered_at)
    self._tasks[group] = ticket.tasks[0]

  def _learn(self, number: int, group: Group):
    self._tasks.pop(number, None)
    self._done.add(f"group-{number:08d}")
    solved = sum(t.rewards["solved"] > 0 for t in group.trajectories)
    self._tried += len(group.trajectories)
    self._solved += solved
    self.curriculum.learn(group.task_id, solved, len(group.trajectories))


def _group_of(name: str) -> int | None:
  """The group's id; None if the ticket is an evaluation's."""
  found = _GROUP.fullmatch(name)
  return int(found[1]) if found else None
