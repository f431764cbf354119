"""How rollouts are ordered, and how they come back: files in a folder.

    tickets/NAME.json         an order: one task a rollout
    rollouts/NAME.0003.npz    its rollout number 3, a `Group` of one

A learner orders, workers claim. A claim is a lock on the ticket's file, which
the kernel takes back when its owner dies, however it dies: another worker goes
on at once, with the rollouts that aren't there yet. Files appear whole or not
at all, and nothing in them is pickled. Only the learner removes anything, once
its checkpoint knows that it is done with; so a learner that dies loses nothing,
and one that goes on from a checkpoint finds all that was not in it.

The folder may be on a network file system whose locks work (NFS of version 4).
"""

import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from composer_jax.rl.trajectory import Group

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Ticket:
  """An order of rollouts.

  Attributes:
    name: unique in the run, for ever; also a file's name.
    tasks: the task of each rollout, by id.
    purpose: what for.
    version: rollouts begin with weights that are no older.
    ordered_at: seconds since 1970.
    seed: with a rollout's number, of its sampling.
  """

  name: str
  tasks: tuple[str, ...]
  purpose: Literal["train", "evaluate"]
  version: int
  ordered_at: float
  seed: tuple[int, ...]


class Spool:
  """The folder, for learner and workers alike."""

  def __init__(self, folder: str | os.PathLike):
    """Opens it; makes it if it isn't there."""
    folder = Path(folder)
    self._tickets = folder / "tickets"
    self._rollouts = folder / "rollouts"
    for part in (self._tickets, self._rollouts):
      part.mkdir(parents=True, exist_ok=True)
    self._seen: set[str] = set()

  # ------------------------------------------------------------ the learner's
  def order(self, ticket: Ticket) -> None:
    """Makes a ticket known; one that is there already stays as it is."""
    path = self._tickets / f"{ticket.name}.json"
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
      with scratch.open("w") as file:
        json.dump(dataclasses.asdict(ticket), file)
        file.flush()
        os.fsync(file.fileno())
      scratch.replace(path)
    finally:
      scratch.unlink(missing_ok=True)

  def tickets(self) -> list[Ticket]:
    """All that are open, by name."""
    found = (_read_ticket(path) for path in _visible(self._tickets))
    return [ticket for ticket in found if ticket]

  def arrivals(self) -> Iterator[tuple[str, int, Group]]:
    """Rollouts that this object has not told of: ticket, number, result.

    A damaged file is removed, so that its rollout is run again.
    """
    for path in _visible(self._rollouts):
      if path.name in self._seen:
        continue
      self._seen.add(path.name)
      name, member = _parts(path)
      try:
        group = Group.load(path)
      except FileNotFoundError:
        continue
      except ValueError as error:
        _log.warning("%s", error)
        path.unlink(missing_ok=True)
        self._seen.discard(path.name)
        continue
      yield name, member, group

  def clear(self, names: Iterable[str]) -> None:
    """Removes tickets and their rollouts.

    Tickets go first, so that nobody begins what nobody wants.
    """
    names = set(names)
    for name in names:
      (self._tickets / f"{name}.json").unlink(missing_ok=True)
    for path in _visible(self._rollouts):
      if _parts(path)[0] in names:
        path.unlink(missing_ok=True)
        self._seen.discard(path.name)

  # ------------------------------------------------------------- the workers'
  def claim(self) -> "Claim | None":
    """The first ticket with work to do that nobody has; None if there is none.

    Evaluation's come first.
    """
    done = {path.name for path in _visible(self._rollouts)}
    tickets = self.tickets()
    for ticket in sorted(tickets, key=lambda t: t.purpose != "evaluate"):
      missing = [
        i
        for i in range(len(ticket.tasks))
        if f"{ticket.name}.{i:04d}.npz" not in done
      ]
      if missing and (lock := self._lock(ticket)) is not None:
        return Claim(self, ticket, lock)
    return None

  def _lock(self, ticket):
    try:
      lock = os.open(self._tickets / f"{ticket.name}.json", os.O_RDONLY)
    except FileNotFoundError:
      return None
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(lock)
      return None
    return lock


class Claim:
  """A ticket that this process works on; a context manager that gives it back.

  Attributes:
    ticket: the ticket.
  """

  def __init__(self, spool: Spool, ticket: Ticket, lock: int):
    """Takes a lock's descriptor, to close it."""
    self.ticket = ticket
    self._spool = spool
    self._lock: int | None = lock

  @property
  def missing(self) -> list[int]:
    """Numbers of the rollouts that aren't there yet."""
    numbers = range(len(self.ticket.tasks))
    return [i for i in numbers if not self._path(i).exists()]

  @property
  def wanted(self) -> bool:
    """Whether the learner still wants it."""
    path = self._spool._tickets / f"{self.ticket.name}.json"
    return path.exists()

  def save(self, number: int, result: Group) -> None:
    """Delivers one rollout: a group of one trajectory or one failure."""
    result.save(self._path(number))

  def release(self) -> None:
    """Lets others claim what is missing."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def __enter__(self) -> "Claim":
    return self

  def __exit__(self, *_) -> None:
    self.release()

  def _path(self, number):
    name = f"{self.ticket.name}.{number:04d}.npz"
    return self._spool._rollouts / name


def _visible(folder: Path) -> list[Path]:
  return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def _parts(path: Path) -> tuple[str, int]:
  """Ticket and number, of a rollout's file."""
  name, number, _ = path.name.rsplit(".", 2)
  return name, int(number)


def _read_ticket(path: Path) -> Ticket | None:
  try:
    fields = json.loads(path.read_text())
    return Ticket(
      **{
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
      }
    )
  except FileNotFoundError:  # It was cleared meanwhile.
    return None
