"""Which task next: what is neither solved nor hopeless, and harder ones later.

A group whose rollouts all do the same teaches nothing. So a task is drawn the
more often, the likelier its group is mixed; and as training goes on, the more
often, the harder it is (Cursor 2026, https://arxiv.org/abs/2603.24477, samples
harder tasks more later, without a formula: this one is ours).
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

# No task is ever given up: one that looks hopeless may have become solvable.
_LEAST = 0.05
# Of what is known about a task, the share left once another group was tried.
_MEMORY = 0.7


def weights(
  solved: Float[np.ndarray, " T"],
  tried: Float[np.ndarray, " T"],
  group_size: int,
  progress: float,
) -> Float[np.ndarray, " T"]:
  """How often each task is drawn, relative to the others.

  With p = (solved + 1) / (tried + 2), the mean of the posterior under a uniform
  prior: (1 - p^G - (1 - p)^G) * (1 - 3/4 progress p), at least 0.05 of the
  largest.

  Args:
    solved: rollouts that solved each task, of those remembered.
    tried: rollouts remembered.
    group_size: G; the first factor is the chance of a mixed group.
    progress: of training, from 0 to 1; the second factor prefers hard tasks, at
      most four times: what nobody can solve yet is hard too.
  """
  p = (solved + 1) / (tried + 2)
  mixed = 1 - p**group_size - (1 - p) ** group_size
  raw = mixed * (1 - 0.75 * progress * p)
  return np.maximum(raw, _LEAST * raw.max(initial=0))


class Curriculum:
  """What is known of each task, and the next one to do."""

  def __init__(
    self, task_ids: Sequence[str], group_size: int, seed: int, state=None
  ):
    """Begins, or goes on from what `state` gave.

    Args:
      task_ids: the tasks to draw from.
      group_size: rollouts of a group.
      seed: of the draws.
      state: of an earlier one.

    Raises:
      ValueError: there is no task.
    """
    if not task_ids:
      raise ValueError("There is no task to train on: give at least one.")
    self._ids = list(task_ids)
    self._place = {task_id: i for i, task_id in enumerate(self._ids)}
    self._size, self._seed = group_size, seed
    self._known = np.zeros((2, len(self._ids)))
    for task_id, known in (state or {}).items():
      if task_id in self._place:
        self._known[:, self._place[task_id]] = known

  def state(self) -> dict[str, Any]:
    """Task -> rollouts that solved it, and all, of those remembered; JSON."""
    tried = np.flatnonzero(self._known[1])
    return {self._ids[i]: self._known[:, i].tolist() for i in tried}

  def draw(
    self, group: int, progress: float, busy: Collection[str] = ()
  ) -> str:
    """The task of a group; the same for the same group and knowledge.

    Args:
      group: its id.
      progress: see `weights`.
      busy: tasks that groups are working on; drawn only if all are.
    """
    chances = weights(*self._known, self._size, progress)
    free = np.array([task_id not in busy for task_id in self._ids])
    chances = np.where(free, chances, 0) if free.any() else chances
    rng = np.random.default_rng((self._seed, group))
    return self._ids[rng.choice(len(self._ids), p=chances / chances.sum())]

  def learn(self, task_id: str, solved: int, tried: int) -> None:
    """Notes how a group did."""
    place = self._place.get(task_id)
    if place is not None and tried:
      known = self._known[:, place]
      self._known[:, place] = _MEMORY * known + (solved, tried)
