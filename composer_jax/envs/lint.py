"""Whether edited Python files compile, and whether they break more rules.

The first is Python's word, the second ruff's. The files are a policy's, so they
are read in processes of their own: a text can be nested so deeply that a parser
takes its process with it. Nothing in them is run. Settings of repositories and
comments such as `noqa` have no say, since a policy could write them.
"""

import asyncio
import dataclasses
import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from composer_jax.envs.outcome import Edit, InfrastructureError

# Names that are undefined, imports that are unused, formats that don't fit:
# pyflakes' rules, which say nothing of taste.
RULES = ("F",)
_CHECK = (
  *("check", "--isolated", "--no-cache", "--ignore-noqa"),
  *("--target-version=py312", "--output-format=json"),
)
_NO = 3
_COMPILE = (
  *(sys.executable, "-I", "-S", "-W", "ignore", "-c"),
  f"""\
import sys
try:
  compile(sys.stdin.buffer.read(), "file", "exec")
except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
  sys.exit({_NO})""",
)
# The stack overflowed: no machine's fault, but that of the text.
_CRASHED = (-signal.SIGABRT, -signal.SIGSEGV)
_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Lint:
  """What was found in the edited Python files.

  Attributes:
    files: edited, and not deleted.
    broken: of them, those that don't compile.
    worse: of them, those that break some rule more often than before the edit.
  """

  files: int
  broken: int
  worse: int


async def lint(
  edits: Mapping[str, Edit], rules: tuple[str, ...] = RULES
) -> Lint:
  """Reads the Python files among the edited ones.

  Args:
    edits: path -> what was changed; other files are left alone.
    rules: of ruff, by code or prefix.

  Raises:
    ImportError: ruff isn't installed.
    InfrastructureError: it or Python could not be run.
  """
  files = broken = worse = 0
  for path, edit in edits.items():
    suffix = PurePosixPath(path).suffix
    if suffix not in (".py", ".pyi") or edit.after is None:
      continue
    # Only so much of the name matters to rules; the rest is the policy's.
    package = PurePosixPath(path).stem == "__init__"
    name = f"{'__init__' if package else 'module'}{suffix}"
    before = await _findings(edit.before or b"", name, rules)
    after = await _findings(edit.after, name, rules)
    files += 1
    broken += not await _compiles(edit.after)
    worse += bool(after - before)
  return Lint(files, broken, worse)


async def _compiles(text: bytes) -> bool:
  status, _, errors = await _run(_COMPILE, text)
  if status in (_NO, *_CRASHED):
    return False
  if status:
    raise InfrastructureError("lint", f"Python ended with {status}: {errors}")
  return True


async def _findings(text: bytes, name: str, rules) -> Counter[str]:
  """How often each rule is broken."""
  try:
    text.decode()
  except UnicodeDecodeError:
    return Counter(["not UTF-8"])
  arguments = (f"--select={','.join(rules)}", f"--stdin-filename={name}", "-")
  command = (_ruff(), *_CHECK, *arguments)
  status, output, errors = await _run(command, text)
  if status in _CRASHED:
    return Counter(["nested too deeply"])
  if status not in (0, 1):
    raise InfrastructureError("lint", f"ruff ended with {status}: {errors}")
  return Counter(finding["code"] for finding in json.loads(output))


async def _run(command, text: bytes) -> tuple[int, bytes, str]:
  """Exit status, output, and the end of the errors."""
  program = PurePosixPath(command[0]).name
  try:
    process = await asyncio.create_subprocess_exec(
      *command,
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
      cwd="/",
    )
  except OSError as error:
    detail = f"{program} didn't start: {error}"
    raise InfrastructureError("lint", detail) from error
  try:
    async with asyncio.timeout(_TIMEOUT_S):
      output, errors = await process.communicate(text)
  except TimeoutError:
    detail = f"{program} took longer than {_TIMEOUT_S:g} s"
    raise InfrastructureError("lint", detail) from None
  finally:
    if process.returncode is None:
      process.kill()
      await process.wait()
  return process.returncode, output, errors.decode(errors="replace")[-300:]


def _ruff() -> str:
  try:
    from ruff import find_ruff_bin
  except ImportError:
    raise ImportError(
      "The parts 'compiles' and 'lint' need ruff: pip install"
      " 'composer-jax[rewards]'."
    ) from None
  return find_ruff_bin()
