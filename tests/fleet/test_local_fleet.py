"""A fleet of small programs: ends, crashes, signals, orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_jax.fleet.local import Fleet, FleetError, Program

REPOSITORY = Path(__file__).resolve().parents[2]


def python(name, code, **rest):
  return Program(name, [sys.executable, "-c", code], **rest)


SLEEPS = "import time\ntime.sleep(60)"


def look_until(fleet, condition, seconds=20.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    fleet.look()
    time.sleep(0.02)


def alive(pid):
  """Whether a process runs; a zombie that nobody reaped doesn't."""
  try:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except FileNotFoundError:
    return False
  return state != "Z"


def wait_gone(*pids, seconds=10.0):
  deadline = time.monotonic() + seconds
  while any(map(alive, pids)):
    assert time.monotonic() < deadline, f"{pids} live on"
    time.sleep(0.02)


def test_work_that_is_done_is_not_begun_anew(tmp_path):
  program = python("learner", "print('worked')", ends=True)
  with Fleet(tmp_path, [program]) as fleet:
    look_until(fleet, lambda: fleet.ended("learner"))
    fleet.look()
    assert fleet.pid("learner") is None
  assert (tmp_path / "logs/learner.log").read_text() == "worked\n"


def test_what_is_killed_comes_back_with_its_log(tmp_path):
  code = f"import os\nprint('up', os.getpid(), flush=True)\n{SLEEPS}"
  program = python("host", code, ready=r"up (\d+)")
  with Fleet(tmp_path, [program], rest_s=0.05) as fleet:
    look_until(fleet, lambda: fleet.ready("host"))
    first = fleet.pid("host")
    assert (tmp_path / "ready/host").read_text() == str(first)
    os.kill(first, signal.SIGKILL)
    look_until(fleet, lambda: fleet.pid("host") is None)
    assert not (tmp_path / "ready/host").exists()
    look_until(fleet, lambda: fleet.ready("host"))
    assert (tmp_path / "ready/host").read_text() == str(fleet.pid("host"))
    assert fleet.restarts == {"host": 1}
  lines = (tmp_path / "logs/host.log").read_text().splitlines()
  assert len(lines) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_cores_are_the_programs_and_its_childrens(tmp_path):
  core = min(os.sched_getaffinity(0))
  say = "import os\nprint('on', *os.sched_getaffinity(0), flush=True)\n"
  child = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {say!r}])"
  )
  pinned = python("pinned", child, ends=True, cores=(core,))
  free = python("free", say, ends=True)
  with Fleet(tmp_path, [pinned, free]) as fleet:
    look_until(fleet, lambda: fleet.ended("pinned") and fleet.ended("free"))
  logs = {
    p: (tmp_path / f"logs/{p}.log").read_text() for p in ("pinned", "free")
  }
  assert logs["pinned"] == f"on {core}\n"
  mine = " ".join(map(str, os.sched_getaffinity(0)))
  assert logs["free"] == f"on {mine}\n"
  with pytest.raises(
    ValueError, match=r"pinned asks for cores \(4096,\): choose"
  ):
    Fleet(tmp_path, [python("pinned", say, cores=(4096,))])


def test_a_program_that_cannot_get_up_ends_the_fleet(tmp_path):
  program = python("host", "import sys\nsys.exit('no such device')")
  with (
    Fleet(tmp_path, [program], attempts=3, rest_s=0.01) as fleet,
    pytest.raises(FleetError, match="host ended with exit code 1, 3 times"),
  ):
    look_until(fleet, lambda: False)
  assert (tmp_path / "logs/host.log").read_text().count("no such device") == 3


def test_a_users_mistake_is_not_tried_again(tmp_path):
  code = "import sys\nprint('error: no such file')\nsys.exit(2)"
  with (
    Fleet(tmp_path, [python("learner", code, ends=True)]) as fleet,
    pytest.raises(FleetError, match="exit code 2: error: no such file"),
  ):
    look_until(fleet, lambda: False)


def test_restarts_come_later_and_later(tmp_path):
  now = [0.0]
  program = python("worker", "raise SystemExit(1)")
  starts = []
  with Fleet(tmp_path, [program], rest_s=1.0, clock=lambda: now[0]) as fleet:
    fleet.look()
    for _ in range(3):
      look_until(fleet, lambda: fleet.pid("worker") is None)
      rested = 0.0
      while fleet.pid("worker") is None:
        now[0] += 0.25
        rested += 0.25
        fleet.look()
      starts.append(rested)
  assert starts == [1.0, 2.0, 4.0]


def test_a_stop_reaches_all_and_what_they_started(tmp_path):
  # One ends in order, one ignores the signal, one has a child.
  polite = (
    "import signal, sys, time\n"
    "def stop(*_): print('bye', flush=True); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    f"print('up yes', flush=True)\n{SLEEPS}"
  )
  deaf = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    f"print('up yes', flush=True)\n{SLEEPS}"
  )
  parent = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])\n"
    f"print('up', child.pid, flush=True)\n{SLEEPS}"
  )
  programs = [
    python(name, code, ready=r"up (\w+)")
    for name, code in (("polite", polite), ("deaf", deaf), ("parent", parent))
  ]
  with Fleet(tmp_path, programs, grace_s=0.5) as fleet:
    look_until(fleet, lambda: all(fleet.ready(p.name) for p in programs))
    pids = [fleet.pid(p.name) for p in programs]
    grandchild = int(fleet.ready("parent"))
    assert alive(grandchild)
  wait_gone(*pids, grandchild)
  assert (tmp_path / "logs/polite.log").read_text().endswith("bye\n")
  assert list((tmp_path / "ready").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_killed_fleet_leaves_no_orphan(tmp_path):
  code = (
    "import sys, time\n"
    "from composer_jax.fleet.local import Fleet, Program\n"
    f"argv = [sys.executable, '-c', {SLEEPS!r}]\n"
    f"with Fleet({str(tmp_path)!r}, [Program('host', argv)]) as fleet:\n"
    "  fleet.look()\n"
    "  print(fleet.pid('host'), flush=True)\n"
    "  time.sleep(60)\n"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY
  ) as owner:
    pid = int(owner.stdout.readline())
    time.sleep(0.3)  # Until the program is bound.
    assert alive(pid)
    owner.kill()
    owner.wait()
  wait_gone(pid)


def test_a_folder_has_one_fleet(tmp_path):
  with (
    Fleet(tmp_path, []),
    pytest.raises(FleetError, match="another run is at work"),
    Fleet(tmp_path, []),
  ):
    pass
  with Fleet(tmp_path, []):
    pass


def test_names_are_unique(tmp_path):
  with pytest.raises(ValueError, match="same name"):
    Fleet(tmp_path, [python("a", "1"), python("a", "2")])
