"""What `launch/agent.py` shows a person, and what it asks.

All that a model or a file says is shown with escapes for what a terminal would
obey: nothing of it can pass for a question, or hide a part of a command.
"""

import difflib
import signal
import sys
import termios
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_jax.envs.local import LocalFolder
from composer_jax.envs.outcome import Edit
from composer_jax.envs.tools import Tool
from composer_jax.rl.viewer import visible

_RESULT_LINES = 12
_CALL_CHARS = 100
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def _line(question: str) -> str:
  # What was typed before a question can't be an answer to it.
  if sys.stdin.isatty():
    termios.tcflush(sys.stdin, termios.TCIFLUSH)
  return input(question)


class InterruptedWorkError(Exception):
  """A person wants to stop, or is no longer there."""


class Terminal:
  """Shows a session as it goes on; its `watch` is the harness's.

  Attributes:
    console: where.
  """

  def __init__(
    self, console: Console | None = None, ask: Callable[[str], str] = _line
  ):
    """Takes where to print, and what asks for a line."""
    self.console = console or Console(highlight=False)
    self._ask = ask

  def watch(self, kind: str, text: str) -> None:
    """See `composer_jax.envs.harness.Watch`."""
    match kind:
      case "reply":
        self.console.print()
        if text.strip():
          self.say(text.strip())
      case "call":
        short = text[:_CALL_CHARS] + "..." * (len(text) > _CALL_CHARS)
        self.say(f"> {short}", "bold blue")
      case "result":
        lines = text.splitlines()
        half = _RESULT_LINES // 2
        if len(lines) > _RESULT_LINES:
          more = f"({len(lines) - 2 * half} more lines)"
          lines = [*lines[:half], more, *lines[-half:]]
        self.say("\n".join(f"  {line}" for line in lines), "dim")

  def say(self, text: str, style: str = "") -> None:
    """Prints a text, whoever wrote it."""
    self.console.print(Text(visible(text), style), soft_wrap=True)

  def diff(self, path: str, before: str, after: str) -> None:
    """Prints what changes in a file."""
    old, new = before.splitlines(), after.splitlines()
    for line in difflib.unified_diff(old, new, path, path, lineterm=""):
      self.say(line, _DIFF_STYLES.get(line[:1], ""))

  def edits(self, edits: dict[str, Edit]) -> None:
    """Prints what changes in a tree."""
    for path, edit in edits.items():
      before, after = _text(edit.before), _text(edit.after)
      if before is None or after is None:
        self.say(f"{path}: not a text, or too large to show", "yellow")
        continue
      if edit.after is None:
        self.say(f"{path}: deleted", "yellow")
      self.diff(path, before, after)

  def question(self, text: str) -> str:
    """Asks for a line.

    Nothing else goes on meanwhile: there is nothing else to do.

    Raises:
      InterruptedWorkError: Ctrl-C, a signal to end, or nobody there.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Those of asyncio would be heard after the answer only.
    before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
    try:
      return self._ask(text).strip()
    except (KeyboardInterrupt, EOFError):
      self.console.print()
      raise InterruptedWorkError from None
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

  def agreed(self, text: str) -> bool:
    """Asks for a yes or a no."""
    while True:
      match self.question(f"{text} [y/n] ").lower():
        case "y" | "yes":
          return True
        case "n" | "no":
          return False


class Approval:
  """Asks a person before a call that may do harm; a toolbox's `approve`."""

  def __init__(
    self, terminal: Terminal, folder: LocalFolder, *, yes: bool = False
  ):
    """Begins without any tool that is always allowed.

    Args:
      terminal: where to ask.
      folder: in which reading needs no question.
      yes: whether nothing needs any, and what is done is only shown.
    """
    self._terminal = terminal
    self._folder = folder
    self._yes = yes
    self._always: set[str] = set()

  async def __call__(self, tool: Tool, arguments: dict[str, Any]) -> str | None:
    """None, or what the policy is told."""
    place = self._folder.place(arguments.get("path", "."))
    inside = place.is_relative_to(self._folder.folder)
    if tool.reads_only and inside:
      return None
    await self._show(tool, arguments)
    if not inside:
      self._terminal.say(f"Outside of the folder: {place}", "bold yellow")
    if self._yes or tool.name in self._always:
      return None
    answer = ""
    while not answer:
      answer = self._terminal.question(
        f"Allow {tool.name}? [y]es, [n]o, [a]lways, or say what to do instead: "
      )
    match answer.lower():
      case "y" | "yes":
        return None
      case "a" | "always":
        self._always.add(tool.name)
        return None
      case "n" | "no":
        return "The user refused this call."
    return f"The user refused this call, and says: {answer}"

  async def _show(self, tool, arguments):
    """All of what would be done, since a part of it may be the harmless one."""
    match tool.name:
      case "run_command":
        self._terminal.say(f"$ {arguments['command']}", "bold")
      case "edit_file":
        old, new = arguments["old"], arguments["new"]
        before = self._file(arguments["path"])
        if before and before.count(old) == 1:
          old, new = before, before.replace(old, new)
        self._terminal.diff(arguments["path"], old, new)
      case "write_file":
        before = self._file(arguments["path"])
        if before is None:
          self._terminal.say("It replaces what is not a text.", "bold yellow")
        self._terminal.diff(
          arguments["path"], before or "", arguments["content"]
        )
      case _:
        self._terminal.say(f"{tool.description} {arguments or ''}", "bold")

  def _file(self, path):
    place = self._folder.place(path)
    return _text(place.read_bytes() if place.is_file() else None)


def _text(data: bytes | None) -> str | None:
  """None if it isn't one that a person can read; of no file, an empty one."""
  try:
    return (data or b"").decode()
  except UnicodeDecodeError:
    return None
