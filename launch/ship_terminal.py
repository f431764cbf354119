"""What `launch/ship.py` shows: lines, tables and bars, or JSON.

Results go to stdout, as text or one JSON object a line; bars and remarks go to
stderr, bars only where it is a terminal.
"""

import concurrent.futures
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import (
  BarColumn,
  DownloadColumn,
  Progress,
  TextColumn,
  TimeRemainingColumn,
  TransferSpeedColumn,
)
from rich.table import Table

from composer_jax.shipping.store import Store
from composer_jax.shipping.wrappers import Wrapper

# Where nobody looks, a table takes the room that it needs.
_WIDE = 200

# Between looks at whether there was a signal, seconds.
_LOOK_S = 0.1


class InterruptedWorkError(Exception):
  """Ends the work of a command, in any of its threads, after a signal."""


class Terminal:
  """Stdout and stderr of one command."""

  def __init__(self, *, as_json: bool):
    self.as_json = as_json
    self._signal: signal.Signals | None = None
    self._bars: Bars | None = None
    self.out = _console(sys.stdout)
    self._remarks = _console(sys.stderr)
    self._shows_bars = sys.stderr.isatty() and not as_json

  def result(self, text: str, **fields) -> None:
    """One result: text for people, or its fields as JSON."""
    if self.as_json:
      print(json.dumps(fields), flush=True)
    else:
      self.out.print(escape(text), soft_wrap=True)

  def remark(self, text: str) -> None:
    """Something beside the results."""
    self._remarks.print(escape(text), soft_wrap=True)

  @contextlib.contextmanager
  def bars(self, **totals: int | None) -> Iterator["Bars"]:
    """Shows bars while inside; None is a total that isn't known yet."""
    progress = Progress(
      TextColumn("{task.description:>10}"),
      BarColumn(),
      DownloadColumn(),
      TransferSpeedColumn(),
      TimeRemainingColumn(),
      console=self._remarks,
      transient=True,
      redirect_stdout=False,  # It is for results, whoever reads it.
      disable=not self._shows_bars,
    )
    with progress:
      self._bars = Bars(progress, totals)
      try:
        yield self._bars
      finally:
        self._bars = None

  def observe(self, stage: str, size: int) -> None:
    """Moves the bars that are shown; for any thread.

    Raises:
      InterruptedWorkError: after a signal, so that the caller ends.
    """
    self.check()
    if self._bars:
      self._bars.observe(stage, size)

  @contextlib.contextmanager
  def heeding_signals(self) -> Iterator[None]:
    """Notes the first SIGINT or SIGTERM, for `check`; a second one is as ever.

    A handler that raises is not heard everywhere (destructors and callbacks
    swallow it), and may leave a lock taken. Background jobs of a script ignore
    SIGINT by inheritance; whoever sends it to one means it.
    """
    if threading.current_thread() is not threading.main_thread():
      yield  # Only the main thread gets signals.
      return
    before = {}

    def restore():
      for number, handler in before.items():
        # None stands for a handler that was not installed from Python.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(number, frame):
      del frame
      self._signal = signal.Signals(number)
      restore()

    for number in (signal.SIGINT, signal.SIGTERM):
      before[number] = signal.signal(number, note)
    try:
      yield
    finally:
      restore()

  @property
  def interrupted_code(self) -> int:
    """Exit code, as shells have it: 130 after SIGINT, 143 after SIGTERM."""
    return 128 + (self._signal or signal.SIGINT)

  def check(self) -> None:
    """Raises InterruptedWorkError if there was a signal; for any thread."""
    if self._signal:
      raise InterruptedWorkError(self._signal.name)

  def sleep(self, seconds: float) -> None:
    """Sleeps; raises InterruptedWorkError soon after a signal."""
    ends = time.monotonic() + seconds
    self.check()
    while (left := ends - time.monotonic()) > 0:
      time.sleep(min(left, _LOOK_S))
      self.check()

  def result_of[T](self, job: concurrent.futures.Future[T]) -> T:
    """Waits for a job, which `check` ends, and lets signals in meanwhile."""
    # One that comes just before a wait is not seen until that is over.
    while not job.done():
      concurrent.futures.wait([job], timeout=_LOOK_S)
    return job.result()


class Stoppable(Wrapper):
  """A store that begins nothing more once its command was interrupted.

  But for deletions: to leave no remains is how a command ends.
  """

  def __init__(self, store: Store, terminal: Terminal):
    super().__init__(store)
    self._terminal = terminal

  def get(self, key: str, start: int = 0, size: int | None = None) -> bytes:
    """See `Store.get`."""
    self._terminal.check()
    return super().get(key, start, size)

  def put_if_absent(self, key: str, data: bytes) -> bool:
    """See `Store.put_if_absent`."""
    self._terminal.check()
    return super().put_if_absent(key, data)

  def put(self, key: str, data: bytes) -> None:
    """See `Store.put`."""
    self._terminal.check()
    super().put(key, data)


class Bars:
  """Bytes done, of each stage; for any thread."""

  def __init__(self, progress: Progress, totals: Mapping[str, int | None]):
    self._progress = progress
    self._tasks = {
      stage: progress.add_task(stage, total=total)
      for stage, total in totals.items()
    }

  def observe(self, stage: str, size: int) -> None:
    """Counts `size` bytes; "planned" tells what there is to download."""
    if stage == "planned":
      self._progress.reset(self._tasks["downloaded"], total=size)
    elif stage in self._tasks:
      self._progress.advance(self._tasks[stage], size)


def table(
  title: str, columns: Sequence[str], rows: Sequence[Sequence]
) -> Table:
  """A plain table; columns that begin with `>` hold numbers."""
  made = Table(title=title, title_justify="left", box=None, pad_edge=False)
  for column in columns:
    justify = "right" if column.startswith(">") else "left"
    made.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
  for row in rows:
    made.add_row(*(escape(str(cell)) for cell in row))
  return made


def stacked(*tables: Table) -> Group:
  """Tables below each other."""
  spaced = [part for made in tables for part in (made, "")]
  return Group(*spaced[:-1])


def human_bytes(size: float) -> str:
  """As in "1.25 MB"; decimal units."""
  for unit in ("B", "kB", "MB", "GB"):
    if abs(size) < 1000:
      return f"{size:.4g} {unit}"
    size /= 1000
  return f"{size:.4g} TB"


def human_seconds(seconds: float) -> str:
  """As in "3 min"."""
  for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
    if seconds >= size:
      return f"{seconds / size:.0f} {unit}"
  return f"{seconds:.0f} s"


def bar(share: float, width: int = 20) -> str:
  """A share of 0 to 1 as a bar, in eighths of a character."""
  eighths = round(min(max(share, 0.0), 1.0) * width * 8)
  return "█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1] * (eighths % 8 > 0)


def _console(stream) -> Console:
  width = None if stream.isatty() else _WIDE
  return Console(file=stream, width=width, highlight=False)
