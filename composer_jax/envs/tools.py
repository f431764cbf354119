"""The tools that a policy has: the ones that the product has.

A tool turns JSON arguments into an observation, a text. A call that can't be
carried out is answered by a sentence that says how to do it right; nothing the
policy writes raises, except where the sandbox itself fails.
"""

import asyncio
import dataclasses
import difflib
import json
import shlex
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from composer_jax.envs.sandbox import WORK, ExecResult, FileError, Sandbox

_READ_LINES = 400
_OUTPUT_BYTES = 8_000
_GREP = ("grep", "-rnIE", "-m", "50", "--exclude-dir=.git")


class ToolError(Exception):
  """A call that can't be carried out; the message is for the policy."""


@dataclasses.dataclass(frozen=True)
class Tool:
  """One tool.

  Attributes:
    name: by which it is called.
    description: for the policy.
    parameters: name -> JSON type ("string" or "integer") and what it is.
    required: names that every call must give.
    run: takes a sandbox and the arguments; raises `ToolError`.
    reads_only: whether it can neither change a file nor run code.
  """

  name: str
  description: str
  parameters: dict[str, tuple[str, str]]
  required: tuple[str, ...]
  run: Callable[..., Awaitable[str]]
  reads_only: bool = False

  @property
  def schema(self) -> dict[str, Any]:
    """The tool as OpenAI's API describes functions."""
    properties = {
      name: {"type": kind, "description": text}
      for name, (kind, text) in self.parameters.items()
    }
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": {
          "type": "object",
          "properties": properties,
          "required": list(self.required),
        },
      },
    }


@dataclasses.dataclass(frozen=True)
class Observation:
  """What a call gave.

  Attributes:
    text: for the policy.
    ok: whether the call was well-formed and could be carried out.
    finished: whether it was the last one.
  """

  text: str
  ok: bool = True
  finished: bool = False


# Is asked before a call that is well-formed: None, or why it is refused.
Approve = Callable[[Tool, dict[str, Any]], Awaitable[str | None]]


class Toolbox:
  """The tools of one task.

  Attributes:
    schemas: of all tools, for the prompt.
  """

  def __init__(
    self,
    test_command: Sequence[str] = (),
    approve: Approve | None = None,
    latency_s: float = 0.0,
  ):
    """Collects the tools.

    Args:
      test_command: that `run_tests` runs; empty: there is no such tool.
      approve: is asked before each call; None: all may be carried out.
      latency_s: that each call takes longer than it would, as slow tools do.
    """
    tools = [_LIST, _READ, _SEARCH, _EDIT, _WRITE, _RUN]
    if test_command:
      tools.append(_tests(test_command))
    tools.append(_FINISH)
    self._tools = {tool.name: tool for tool in tools}
    self._approve, self._latency_s = approve, latency_s
    self.schemas = [tool.schema for tool in tools]

  async def call(
    self, sandbox: Sandbox, name: str, arguments: str
  ) -> Observation:
    """Carries out a call.

    Args:
      sandbox: where.
      name: of the tool.
      arguments: a JSON object, as text.

    Raises:
      SandboxError: the sandbox failed.
    """
    if self._latency_s:
      await asyncio.sleep(self._latency_s)
    try:
      tool = self._tools.get(name)
      if tool is None:
        raise ToolError(_unknown("tool", name, self._tools))
      given = _checked(tool, arguments)
      refusal = await self._approve(tool, given) if self._approve else None
      if refusal is not None:
        raise ToolError(refusal)
      text = await tool.run(sandbox, **given)
      return Observation(text, finished=tool is _FINISH)
    except (ToolError, FileError) as error:
      # Paths as a policy gives them: the repository may lie anywhere.
      text = str(error).replace(f"{WORK}/", "")
      return Observation(f"Error: {text}", ok=False)


def _checked(tool: Tool, arguments: str) -> dict[str, Any]:
  try:
    given = json.loads(arguments)
  except (ValueError, RecursionError) as error:
    raise ToolError(f"The arguments are not JSON: {error}.") from None
  if not isinstance(given, dict):
    raise ToolError("The arguments must be a JSON object.")
  for name in given:
    if name not in tool.parameters:
      raise ToolError(
        _unknown(f"argument of {tool.name}", name, tool.parameters)
      )
  for name in tool.required:
    if name not in given:
      raise ToolError(
        f"{tool.name} needs {name!r}: {tool.parameters[name][1]}."
      )
  kinds = {"string": str, "integer": int}
  for name, value in given.items():
    kind = tool.parameters[name][0]
    if type(value) is not kinds[kind]:
      raise ToolError(f"{name!r} of {tool.name} must be a JSON {kind}.")
    if kind == "string" and not _sayable(value):
      raise ToolError(f"{name!r} has a NUL or half of a surrogate pair.")
  return given


def _sayable(text: str) -> bool:
  try:
    return b"\0" not in text.encode()
  except UnicodeEncodeError:
    return False


def _unknown(what: str, name: str, known) -> str:
  close = difflib.get_close_matches(name, known, n=1)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  return (
    f"There is no {what} {name[:80]!r}.{hint} There are: {', '.join(known)}."
  )


async def _list(sandbox, path="."):
  if not path.startswith(("/", ".")):
    path = f"./{path}"  # Not for an option: `find` has one that deletes.
  result = await sandbox.exec(
    ["find", path, "-not", "-path", "*/.*", "-type", "f", "-printf", "%P\\n"],
    output_bytes=_OUTPUT_BYTES,
  )
  if not result.ok:
    raise ToolError(result.text.strip())
  return "\n".join(sorted(result.text.splitlines())) or "(no files)"


async def _read(sandbox, path, first_line=1, last_line=0):
  lines = (await _text(sandbox, path)).splitlines()
  last = min(last_line or len(lines), first_line + _READ_LINES - 1, len(lines))
  if first_line < 1 or (lines and first_line > last):
    raise ToolError(
      f"Lines {first_line} to {last_line or 'the end'} are not in {path}, which"
      f" has {len(lines)}."
    )
  shown = "\n".join(lines[first_line - 1 : last])
  if last < len(lines):
    shown += f"\n({len(lines) - last} more lines)"
  return shown or "(empty)"


async def _search(sandbox, pattern, path=None):
  result = await sandbox.exec(
    [*_GREP, "-e", pattern, "--", *([path] if path else [])],
    output_bytes=_OUTPUT_BYTES,
  )
  if result.exit_code > 1 or result.reason != "exited":
    raise ToolError(result.text.strip() or result.reason)
  return result.text.rstrip("\n") or "(no match)"


async def _edit(sandbox, path, old, new):
  text = await _text(sandbox, path)
  count = text.count(old) if old else 0
  if not old:
    raise ToolError("'old' is empty: give the text to replace.")
  if count == 0:
    raise ToolError(
      f"{path} doesn't contain 'old': copy it exactly, white space included."
      f"{_closest(text, old)}"
    )
  if count > 1:
    raise ToolError(
      f"{path} contains 'old' {count} times: add lines around it, so that it"
      " is found once."
    )
  await sandbox.write(path, text.replace(old, new).encode())
  return f"Edited {path}."


def _closest(text: str, old: str) -> str:
  first = old.strip().splitlines()[:1]
  lines = {line.strip(): line for line in text.splitlines() if line.strip()}
  close = difflib.get_close_matches(first[0].strip(), lines, 1) if first else []
  return f" The nearest line there is:\n{lines[close[0]]}" if close else ""


async def _write(sandbox, path, content):
  await sandbox.write(path, content.encode())
  return f"Wrote {path}."


async def _run(sandbox, command):
  result = await sandbox.exec(["sh", "-c", command], output_bytes=_OUTPUT_BYTES)
  return _outcome(result, sandbox)


def _tests(command: Sequence[str]) -> Tool:
  async def run(sandbox):
    result = await sandbox.exec(list(command), output_bytes=_OUTPUT_BYTES)
    return (
      ("Passed." if result.ok else "Failed.") + "\n" + _outcome(result, sandbox)
    )

  return Tool(
    "run_tests", f"Runs the tests: {shlex.join(command)}", {}, (), run
  )


def _outcome(result: ExecResult, sandbox: Sandbox) -> str:
  ends = {
    "exited": f"exit code {result.exit_code}",
    "timeout": f"ended: over {sandbox.limits.wall_s:g} s",
    "memory": f"ended: over {sandbox.limits.memory_bytes >> 20} MB of memory",
    "files": f"ended: over {sandbox.limits.files} files",
  }
  return f"{result.text.rstrip()}\n({ends[result.reason]})".lstrip("\n")


async def _finish(sandbox, message=""):
  return message


async def _text(sandbox: Sandbox, path: str) -> str:
  try:
    return (await sandbox.read(path)).decode()
  except UnicodeDecodeError:
    raise ToolError(f"{path} is not a text in UTF-8.") from None


_PATH = ("string", "a path, relative to the repository or absolute")
_LIST = Tool(
  "list_files",
  "Lists the files below a folder.",
  {"path": _PATH},
  (),
  _list,
  True,
)
_READ = Tool(
  "read_file",
  f"Shows a text file, {_READ_LINES} lines at most.",
  {
    "path": _PATH,
    "first_line": ("integer", "the first line to show, from 1"),
    "last_line": ("integer", "the last line to show"),
  },
  ("path",),
  _read,
  True,
)
_SEARCH = Tool(
  "search",
  "Finds lines that match an extended regular expression.",
  {"pattern": ("string", "the expression"), "path": _PATH},
  ("pattern",),
  _search,
  True,
)
_EDIT = Tool(
  "edit_file",
  "Replaces a text that occurs exactly once in a file.",
  {
    "path": _PATH,
    "old": ("string", "the text to replace, exactly as it is"),
    "new": ("string", "the text to put there"),
  },
  ("path", "old", "new"),
  _edit,
)
_WRITE = Tool(
  "write_file",
  "Writes a whole file.",
  {"path": _PATH, "content": ("string", "all of its text")},
  ("path", "content"),
  _write,
)
_RUN = Tool(
  "run_command",
  "Runs a command with sh in the repository; what it starts ends with it.",
  {"command": ("string", "the command")},
  ("command",),
  _run,
)
_FINISH = Tool(
  "finish",
  "Ends the work, once it is done.",
  {"message": ("string", "what was done")},
  (),
  _finish,
  True,
)
