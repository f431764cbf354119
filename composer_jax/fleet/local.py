r"""Runs programs on this machine, and keeps them running.

    host = Program("host-0", [...], ready=r"Serving .* at (http\S+)")
    learner = Program("learner", [...], ends=True)
    with Fleet(folder, [learner, host]) as fleet:
      while not fleet.ended("learner"):
        fleet.look()
        time.sleep(0.2)

Each program has a log, `<folder>/logs/<name>.log`, to which all its lives are
appended. One that ends without being told to is started again, later and later;
one that can't get up at all ends the fleet. What a program says when it is
ready, its address say, is kept in `<folder>/ready/<name>` as long as it lives:
so ports are chosen by the operating system, and nobody guesses.

Leaving the context stops all: SIGTERM, time to end, then SIGKILL for each and
for what it started. If this process is killed, the kernel kills them (see
`bound`). One fleet at a time has a folder.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

# A program that lived so long without a fault is not failing.
_STEADY_S = 60.0
_LONGEST_REST_S = 30.0
# By our own binaries' rule, a user's mistake: trying again won't help.
_MISTAKE = 2


class FleetError(Exception):
  """A program can't be kept running; says which, why, and where its log is."""


@dataclasses.dataclass(frozen=True)
class Program:
  """What to run.

  Attributes:
    name: unique; names its log.
    argv: the command.
    env: variables beside this process's own.
    ready: a pattern; the first group of the first line of its log that has it
      is kept in `ready/<name>`. Empty: it is ready at once.
    ends: whether it ends by itself, with exit code 0, when its work is done.
    cores: processors that it and what it starts may use, by number; none: all
      that this process may. Linux alone.
  """

  name: str
  argv: Sequence[str]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ready: str = ""
  ends: bool = False
  cores: Sequence[int] = ()


class Fleet:
  """The programs of one folder.

  Attributes:
    restarts: of each program, by name.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    programs: Sequence[Program],
    *,
    attempts: int = 5,
    rest_s: float = 0.5,
    grace_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts nothing yet.

    Args:
      folder: for logs; made if it isn't there.
      programs: what to run.
      attempts: lives in a row that may end within a minute.
      rest_s: before a program is started again; twice as long each time.
      grace_s: from SIGTERM to SIGKILL.
      clock: seconds; an argument for the sake of tests.
    """
    self._folder = Path(folder)
    self._attempts, self._grace_s = attempts, grace_s
    self._rest_s, self._clock = rest_s, clock
    self._lock: int | None = None
    self._charges = {p.name: _Charge(p, self._folder) for p in programs}
    if len(self._charges) != len(programs):
      raise ValueError("Two programs have the same name: names are unique.")
    for program in programs:
      _check_cores(program)

  @property
  def restarts(self) -> dict[str, int]:
    """How often each program was started again."""
    return {n: max(0, c.lives - 1) for n, c in self._charges.items()}

  def pid(self, name: str) -> int | None:
    """The process of a program; None while it doesn't run."""
    process = self._charges[name].process
    return process and process.pid

  def ready(self, name: str) -> str | None:
    """What a program said when it was ready; None while it isn't."""
    return self._charges[name].said

  def ended(self, name: str) -> bool:
    """Whether a program ended because its work is done."""
    return self._charges[name].done

  def look(self) -> None:
    """Notices what ended or became ready, and starts what is to run.

    Raises:
      FleetError: a program can't be kept running.
    """
    for name, charge in self._charges.items():
      code = charge.look()
      if code is not None:
        self._bury(name, charge, code)
      idle = charge.process is None and not charge.done
      if idle and self._clock() >= charge.next_start:
        charge.start(self._clock())

  def _bury(self, name, charge, code):
    if code == 0 and charge.program.ends:
      charge.done = True
      return
    steady = self._clock() - charge.started > _STEADY_S
    charge.failures = 1 if steady else charge.failures + 1
    told = f"{name} ended with exit code {code}"
    if code == _MISTAKE:
      raise FleetError(f"{told}: {charge.last_words()}")
    if charge.failures >= self._attempts:
      raise FleetError(
        f"{told}, {charge.failures} times in a row; its last words were"
        f" {charge.last_words()!r}, all are in {charge.log}"
      )
    rest = min(_LONGEST_REST_S, self._rest_s * 2 ** (charge.failures - 1))
    charge.next_start = self._clock() + rest
    _log.warning("%s; it is started again in %.1f s", told, rest)

  def stop(self) -> None:
    """Ends all programs, and what they started. May be repeated."""
    alive = [c for c in self._charges.values() if c.process]
    give_up = time.monotonic() + self._grace_s
    try:
      for charge in alive:
        charge.signal(signal.SIGTERM)
      for charge in alive:
        charge.wait(max(0.0, give_up - time.monotonic()))
    finally:  # Also if somebody won't wait that long.
      for charge in alive:
        charge.end()

  def __enter__(self) -> "Fleet":
    for part in ("logs", "ready"):
      (self._folder / part).mkdir(parents=True, exist_ok=True)
    lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(lock)
      raise FleetError(
        f"another run is at work in {self._folder}: end it, or take another"
        " folder"
      ) from None
    self._lock = lock
    for leftover in (self._folder / "ready").iterdir():
      leftover.unlink()
    return self

  def __exit__(self, *_) -> None:
    self.stop()
    os.close(self._lock)


def _check_cores(program: Program) -> None:
  if not program.cores:
    return
  if sys.platform != "linux":
    raise ValueError(
      f"{program.name} asks for cores {tuple(program.cores)}, which Linux alone"
      " can hold it to: leave them out"
    )
  mine = os.sched_getaffinity(0)
  if not set(program.cores) <= mine:
    raise ValueError(
      f"{program.name} asks for cores {tuple(program.cores)}: choose among"
      f" {tuple(sorted(mine))}, which this process may use"
    )


class _Charge:
  """A program and the process that it has."""

  def __init__(self, program: Program, folder: Path):
    self.program = program
    self.log = folder / "logs" / f"{program.name}.log"
    self.process: subprocess.Popen | None = None
    self.said: str | None = None
    self.done = False
    self.lives = self.failures = 0
    self.started = self.next_start = 0.0
    self._place = folder / "ready" / program.name
    self._read = 0  # How far the log was looked through.

  def start(self, now: float) -> None:
    self.log.touch()
    self._read = self.log.stat().st_size
    bound = Path(__file__).with_name("bound.py")
    cores = ",".join(map(str, self.program.cores))
    with self.log.open("ab") as log:
      self.process = subprocess.Popen(
        [
          *(sys.executable, "-I", "-S", str(bound), str(os.getpid()), cores),
          *self.program.argv,
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **self.program.env},
        # A group of its own: Ctrl-C is for this process, which ends the others.
        start_new_session=True,
      )
    self.started = now
    self.lives += 1
    if not self.program.ready:
      self.said = ""

  def look(self) -> int | None:
    """The exit code, if it just ended."""
    if self.process is None:
      return None
    code = self.process.poll()
    if code is None:
      self._listen()
      return None
    self.end()
    return code

  def wait(self, patience_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(patience_s)

  def end(self) -> None:
    """Kills the process, if it lives, and what it started."""
    self.signal(signal.SIGKILL)
    self.process.wait()
    self.process, self.said = None, None
    self._place.unlink(missing_ok=True)

  def signal(self, number: signal.Signals) -> None:
    # To the group, which may outlive its leader.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, number)

  def last_words(self) -> str:
    lines = self.log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "nothing"

  def _listen(self):
    if self.said is not None:
      return
    with self.log.open("rb") as log:
      log.seek(self._read)
      text = log.read()
    # Not of a line that is still being written.
    lines = text[: text.rfind(b"\n") + 1].decode(errors="replace")
    if found := re.search(self.program.ready, lines):
      self.said = found[1]
      scratch = self._place.with_name(f".{self._place.name}")
      scratch.write_text(self.said)
      scratch.replace(self._place)
