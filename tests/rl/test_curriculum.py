"""Which tasks are drawn."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.rl.curriculum import Curriculum, weights


def test_weights_by_hand():
  # p = 1/2, 1/2, 3/4, 1/4 for groups of 2: mixed = 2 p (1 - p).
  solved, tried = np.array([0, 1, 2, 0.0]), np.array([0, 2, 2, 2.0])
  early = weights(solved, tried, 2, 0.0)
  np.testing.assert_allclose(early, [1 / 2, 1 / 2, 3 / 8, 3 / 8])
  late = weights(solved, tried, 2, 1.0)
  np.testing.assert_allclose(late, [5 / 16, 5 / 16, 21 / 128, 39 / 128])


@given(
  st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1),
  st.integers(2, 64),
  st.floats(0, 1),
)
def test_no_task_is_given_up(known, group_size, progress):
  solved = np.array([a for a, _ in known], float)
  tried = np.array([a + b for a, b in known], float)
  found = weights(solved, tried, group_size, progress)
  assert (found > 0).all()
  assert (found >= 0.05 * found.max() - 1e-12).all()


def test_harder_tasks_are_drawn_more_later():
  curriculum = Curriculum(["easy", "hard"], 4, seed=0)
  for _ in range(5):
    curriculum.learn("easy", 3, 4)
    curriculum.learn("hard", 1, 4)
  early, late = (
    sum(curriculum.draw(i, progress) == "hard" for i in range(2000)) / 2000
    for progress in (0.0, 1.0)
  )
  assert 0.45 < early < 0.55  # Both groups are mixed as often.
  assert 0.6 < late < 0.8  # By a bounded factor: hopeless ones are hard too.


def test_solved_and_hopeless_tasks_are_drawn_less():
  curriculum = Curriculum(["solved", "open", "hopeless"], 4, seed=0)
  for _ in range(10):
    curriculum.learn("solved", 4, 4)
    curriculum.learn("hopeless", 0, 4)
    curriculum.learn("open", 2, 4)
  drawn = [curriculum.draw(i, 0.0) for i in range(500)]
  assert drawn.count("open") > 2 * drawn.count("hopeless") > 0
  assert drawn.count("open") > 2 * drawn.count("solved") > 0


def test_a_busy_task_waits_unless_all_are():
  curriculum = Curriculum(["a", "b"], 4, seed=0)
  assert {curriculum.draw(i, 0.0, {"a"}) for i in range(50)} == {"b"}
  assert {curriculum.draw(i, 0.0, {"a", "b"}) for i in range(50)} == {"a", "b"}


def test_a_restart_draws_the_same():
  curriculum = Curriculum(["a", "b", "c"], 4, seed=3)
  curriculum.learn("a", 4, 4)
  curriculum.learn("b", 1, 4)
  state = json.loads(json.dumps(curriculum.state()))
  again = Curriculum(["a", "b", "c"], 4, seed=3, state=state)
  draws = [curriculum.draw(i, 0.5) for i in range(50)]
  assert draws == [again.draw(i, 0.5) for i in range(50)]
  assert draws != [
    Curriculum(["a", "b", "c"], 4, 4).draw(i, 0.5) for i in range(50)
  ]


def test_tasks_are_needed():
  with pytest.raises(ValueError, match="no task to train on"):
    Curriculum([], 4, seed=0)
