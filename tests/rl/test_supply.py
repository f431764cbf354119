"""Orders, arrivals, evaluations, and going on from any checkpoint."""

import json
import math

import numpy as np
import pytest

from composer_jax.rl.buffer import BufferConfig
from composer_jax.rl.journal import Journal, read
from composer_jax.rl.spool import Spool
from composer_jax.rl.supply import Supply
from composer_jax.rl.trajectory import Group, Sampling, Trajectory

CONFIG = BufferConfig(groups=2, group_size=2, staleness=1)
TASKS = [f"task-{i}" for i in range(6)]


def result(task_id, solved, version):
  trajectory = Trajectory(
    token_ids=np.array([1, 2], np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.array([0, -1], np.float32),
    versions=np.array([-1, version], np.int32),
    routes=None,
    sampling=Sampling(),
    rewards={"solved": float(solved)},
    task_id=task_id,
    stop_reason="finish",
  )
  return Group(task_id, (trajectory,))


def work(folder, most=math.inf):
  """Delivers what is ordered; of each group the first is solved."""
  spool = Spool(folder)
  done = 0
  while done < most and (claim := spool.claim()):
    with claim:
      for number in claim.missing:
        if done == most:
          break
        ticket = claim.ticket
        task = ticket.tasks[number]
        claim.save(number, result(task, number == 0, ticket.version))
        done += 1
  return done


def supply(folder, state=None, seed=0):
  return Supply(Spool(folder), CONFIG, TASKS, seed, state)


def test_groups_are_ordered_up_to_the_room_there_is(tmp_path):
  books = supply(tmp_path)
  books.order(version=3, progress=0.0, now=1.0)
  tickets = Spool(tmp_path).tickets()
  assert [t.name for t in tickets] == [f"group-{i:08d}" for i in range(4)]
  assert all(t.version == 3 and len(set(t.tasks)) == 1 for t in tickets)
  # Different tasks, as long as there are any.
  assert len({t.tasks[0] for t in tickets}) == 4
  books.order(version=3, progress=0.0, now=1.0)
  assert len(Spool(tmp_path).tickets()) == 4


def test_a_run_goes_on_from_any_checkpoint_and_trains_nothing_twice(tmp_path):
  """A learner that dies at each step in turn, after work of its own."""
  books = supply(tmp_path)
  state, published = books.state(), [0]
  trained = []
  for _ in range(6):
    books = supply(tmp_path, state)
    published.append(published[-1] + 2)
    survives = []
    for step in range(2):
      batch = None
      while batch is None:  # What is left of a life before may be stale.
        books.order(published[-1], 0.0, now=1.0)
        assert work(tmp_path) or books.buffer.waiting
        books.take()
        batch = books.batch(published, now=2.0)
      published.append(published[-1] + 1)
      books.buffer.trained(batch)
      if step == 0:  # The second step's checkpoint is never written.
        survives += batch.groups
        state, done = json.loads(json.dumps(books.state())), books.done()
        books.clear(done)
    trained += survives
  assert len(trained) == len(set(trained)) == 12
  counts = supply(tmp_path, state).buffer.counts
  assert counts["trained"] == 24
  assert counts["stale"] > 0
  settled = counts["trained"] + counts["stale"] + counts["lost"]
  outstanding = supply(tmp_path, state).buffer.outstanding
  assert counts["ordered"] == settled + 2 * outstanding


def test_only_what_a_checkpoint_knows_is_cleared(tmp_path):
  books = supply(tmp_path)
  books.order(1, 0.0, now=1.0)
  work(tmp_path)
  books.take()
  assert books.done() == set()
  batch = books.batch([1], now=2.0)
  books.buffer.trained(batch)
  assert books.done() == {f"group-{i:08d}" for i in batch.groups}
  books.clear(books.done())
  assert len(Spool(tmp_path).tickets()) == 2
  assert len(list(Spool(tmp_path).arrivals())) == 4


def test_what_arrives_for_a_settled_group_is_cleared_later(tmp_path):
  books = supply(tmp_path)
  books.order(1, 0.0, now=1.0)
  claim = Spool(tmp_path).claim()
  books.batch([1], now=1e9)  # All are past their deadline.
  books.clear(books.done())
  claim.save(0, result("task-0", True, 1))
  books.take()
  assert books.done() == {claim.ticket.name}
  assert books.buffer.counts["missed_deadline"] == 8


def test_the_curriculum_learns_from_all_groups(tmp_path):
  books = supply(tmp_path)
  books.order(1, 0.0, now=1.0)
  work(tmp_path, most=5)
  books.take()
  books.batch([1], now=1e9)
  books.batch([1], now=1e9)
  known = books.curriculum.state()
  # Two groups are whole, one has its solved member alone, one has nothing.
  assert sorted(known.values()) == [[1, 1], [1, 2], [1, 2]]


def test_an_evaluation_counts_what_was_solved_of_what_ran(tmp_path):
  books = supply(tmp_path)
  tasks = [f"held-{i}" for i in range(23)]
  exam = books.begin_evaluation(tasks, step=0, version=5, now=1.0)
  spool = Spool(tmp_path)
  order = 0
  while claim := spool.claim():
    assert claim.ticket.version == 5
    with claim:
      for number in claim.missing:
        task = claim.ticket.tasks[number]
        assert task == tasks[order]
        claim.save(
          number,
          Group(task, (), {"sandbox": 1})
          if order < 3
          else result(task, order < 8, 5),
        )
        order += 1
    books.take()
    assert exam.done == (order == 23)
  summary = exam.summary()
  assert summary == {
    "step": 0,
    "version": 5,
    "tasks": 23,
    "failed": 3,
    "pass_rate": 5 / 20,
  }
  books.end_evaluation()
  books.clear(books.done())
  assert Spool(tmp_path).tickets() == []


def test_an_evaluation_begun_anew_keeps_what_was_done(tmp_path):
  tasks = [f"held-{i}" for i in range(12)]
  supply(tmp_path).begin_evaluation(tasks, step=3, version=5, now=1.0)
  assert work(tmp_path, most=7) == 7
  again = supply(tmp_path)
  exam = again.begin_evaluation(tasks, step=3, version=6, now=9.0)
  again.take()
  assert len(exam.results) == 7
  assert work(tmp_path) == 5
  again.take()
  assert exam.done


def test_a_journal_takes_back_what_no_checkpoint_knows(tmp_path):
  path = tmp_path / "steps.jsonl"
  with Journal(path, resumed_step=-1) as journal:
    for step in (1, 2, 3):
      journal.write(step, groups=[step])
  with path.open("a") as file:
    file.write('{"step": 4, "gro')  # Cut short by a crash.
  with Journal(path, resumed_step=2) as journal:
    journal.write(3, groups=[30])
  assert read(path) == [
    {"step": 1, "groups": [1]},
    {"step": 2, "groups": [2]},
    {"step": 3, "groups": [30]},
  ]
  assert read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("seed", [0, 1])
def test_tickets_have_seeds_of_their_own(tmp_path, seed):
  books = supply(tmp_path, seed=seed)
  books.order(1, 0.0, now=1.0)
  books.begin_evaluation(TASKS, step=0, version=1, now=1.0)
  seeds = [t.seed for t in Spool(tmp_path).tickets()]
  assert len(seeds) == len(set(seeds)) == 5
  assert all(s[0] == seed for s in seeds)
