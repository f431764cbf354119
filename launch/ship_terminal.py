"""What `launch/ship.py` shows: lines, tables and bars, or JSON.

Results go to stdout, as text or one JSON object a line; bars and remarks go to
stderr, bars only where it is a terminal.
"""

import contextlib
import json
import sys
import threading
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

# Where nobody looks, a table takes the room that it needs.
_WIDE = 200


class InterruptedWorkError(Exception):
  """Ends the work of a background thread after an interruption."""


class Terminal:
  """Stdout and stderr of one command."""

  def __init__(self, *, as_json: bool):
    self.as_json = as_json
    self._stopped = threading.Event()
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
      InterruptedWorkError: after an interruption, so that the caller ends.
    """
    if self._stopped.is_set():
      raise InterruptedWorkError(stage)
    if self._bars:
      self._bars.observe(stage, size)

  @contextlib.contextmanager
  def stopping(self) -> Iterator[None]:
    """Lets an interruption end background threads, before they are joined."""
    try:
      yield
    except KeyboardInterrupt:
      self._stopped.set()
      raise


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
