"""Orders and deliveries, with workers that are killed."""

import multiprocessing
import os
import signal
import time

import pytest

from composer_jax.rl.spool import Spool, Ticket
from composer_jax.rl.trajectory import Group
from tests.rl.spool_rig import trajectory


def ticket(name="group-0", size=3, purpose="train"):
  return Ticket(name, tuple("abc"[:size]), purpose, 4, 12.5, (1, 2))


def rollout(value=0):
  return Group("a", (trajectory("a", value),))


def test_a_ticket_is_read_as_it_was_ordered(tmp_path):
  Spool(tmp_path).order(ticket())
  assert Spool(tmp_path).tickets() == [ticket()]


def test_a_rollout_arrives_once_and_again_after_a_restart(tmp_path):
  spool = Spool(tmp_path)
  spool.order(ticket())
  with spool.claim() as claim:
    claim.save(1, rollout(7))
    claim.save(2, Group("c", (), {"sandbox": 1}))
  arrived = list(spool.arrivals())
  assert [(name, number) for name, number, _ in arrived] == [
    ("group-0", 1),
    ("group-0", 2),
  ]
  assert arrived[0][2].trajectories[0].token_ids[1] == 7
  assert arrived[1][2].failures == {"sandbox": 1}
  assert list(spool.arrivals()) == []
  assert len(list(Spool(tmp_path).arrivals())) == 2


def test_a_ticket_has_one_worker_at_a_time(tmp_path):
  spool = Spool(tmp_path)
  spool.order(ticket("group-0"))
  spool.order(ticket("group-1"))
  first = spool.claim()
  other = Spool(tmp_path).claim()
  assert [first.ticket.name, other.ticket.name] == ["group-0", "group-1"]
  assert Spool(tmp_path).claim() is None
  first.save(0, rollout())
  first.release()
  again = Spool(tmp_path).claim()
  assert again.ticket.name == "group-0"
  assert again.missing == [1, 2]


def test_what_is_complete_or_cleared_is_not_claimed(tmp_path):
  spool = Spool(tmp_path)
  for number in range(2):
    spool.order(ticket(f"group-{number}", size=1))
  with spool.claim() as claim:
    claim.save(0, rollout())
  with spool.claim() as claim:
    assert claim.ticket.name == "group-1"
    assert claim.wanted
    spool.clear(["group-0", "group-1"])
    assert not claim.wanted
    claim.save(0, rollout())  # Too late; harmless, and cleared next time.
  assert spool.claim() is None
  assert [name for name, *_ in Spool(tmp_path).arrivals()] == ["group-1"]
  spool.clear(["group-1"])
  assert list(Spool(tmp_path).arrivals()) == []


def test_evaluation_comes_first(tmp_path):
  spool = Spool(tmp_path)
  spool.order(ticket("a"))
  spool.order(ticket("b", purpose="evaluate"))
  assert spool.claim().ticket.name == "b"


def test_a_damaged_rollout_is_run_again(tmp_path, caplog):
  spool = Spool(tmp_path)
  spool.order(ticket(size=1))
  with spool.claim() as claim:
    claim.save(0, rollout())
  (file,) = (tmp_path / "rollouts").iterdir()
  file.write_bytes(file.read_bytes()[:50])
  assert list(spool.arrivals()) == []
  assert "holds no group of trajectories" in caplog.text
  with spool.claim() as claim:
    assert claim.missing == [0]
    claim.save(0, rollout())
  assert len(list(spool.arrivals())) == 1


def _claim_and_hang(folder, said):
  claim = Spool(folder).claim()
  claim.save(0, rollout())
  said.put(claim.ticket.name)
  time.sleep(60)


def test_a_killed_workers_ticket_is_taken_over(tmp_path):
  spool = Spool(tmp_path)
  spool.order(ticket())
  context = multiprocessing.get_context("spawn")
  said = context.Queue()
  worker = context.Process(target=_claim_and_hang, args=(tmp_path, said))
  worker.start()
  try:
    assert said.get(timeout=60) == "group-0"
    assert spool.claim() is None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(timeout=10)
    with spool.claim() as claim:
      assert claim.missing == [1, 2]
  finally:
    worker.kill()
    worker.join()


@pytest.mark.parametrize("cut", ["ticket", "rollout"])
def test_nothing_half_written_is_seen(tmp_path, cut):
  spool = Spool(tmp_path)
  spool.order(ticket())
  # What a writer that was killed leaves behind.
  names = {"ticket": "tickets/.x.json.9", "rollout": "rollouts/.x.0000.npz.9"}
  (tmp_path / names[cut]).write_bytes(b"{")
  assert len(spool.tickets()) == 1
  assert list(spool.arrivals()) == []
