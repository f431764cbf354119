"""Whether edited Python files parse, and whether they got worse, by ruff.

The files are a policy's, so they are read in a process of their own: a text
can be nested so deeply that a parser, CPython's too, takes its process with it.
Repositories' own settings and comments such as `noqa` have no say, since a
policy could write them.
"""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from composer_jax.envs.outcome import Edit, InfrastructureError

# Names that are undefined, imports that are unused, formats that don't fit:
# pyflakes' rules, which say nothing of taste.
RULES = ("F",)
_SYNTAX = "invalid-syntax"
_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Lint:
  """What was found in the edited Python files.

  Attributes:
    files: edited, and not deleted.
    broken: of them, those that aren't Python.
    worse: of them, those that break some rule more often than before the edit.
  """

  files: int
  broken: int
  worse: int


async def lint(
  edits: Mapping[str, Edit], rules: tuple[str, ...] = RULES
) -> Lint:
  """Reads the Python files among the edited ones, as Python 3.12.

  Args:
    edits: path -> what was changed; other files are left alone.
    rules: of ruff, by code or prefix.

  Raises:
    ImportError: ruff isn't installed.
    InfrastructureError: it could not be run.
  """
  files = broken = worse = 0
  for path, edit in edits.items():
    if PurePosixPath(path).suffix in (".py", ".pyi") and edit.after is not None:
      before = await _findings(edit.before or b"", path, rules)
      after = await _findings(edit.after, path, rules)
      files += 1
      broken += _SYNTAX in after
      worse += bool(after - before)
  return Lint(files, broken, worse)


async def _findings(text: bytes, path: str, rules) -> Counter[str]:
  """How often each rule is broken."""
  try:
    text.decode()
  except UnicodeDecodeError:
    return Counter([_SYNTAX])
  # Only so much of the name matters to rules; the rest is the policy's.
  name = PurePosixPath(path)
  stem = "__init__" if name.stem == "__init__" else "module"
  try:
    process = await asyncio.create_subprocess_exec(
      *(_ruff(), "check", "--isolated", "--no-cache", "--ignore-noqa"),
      *("--target-version=py312", "--output-format=json"),
      *(f"--select={','.join(rules)}", f"--stdin-filename={stem}{name.suffix}"),
      "-",
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
      cwd="/",
      env={},
    )
  except OSError as error:
    raise InfrastructureError("lint", f"ruff didn't start: {error}") from error
  try:
    async with asyncio.timeout(_TIMEOUT_S):
      output, errors = await process.communicate(text)
  except TimeoutError:
    raise InfrastructureError(
      "lint", f"ruff took longer than {_TIMEOUT_S:g} s for {path}"
    ) from None
  finally:
    if process.returncode is None:
      process.kill()
      await process.wait()
  # Its stack overflowed: no machine's fault, but that of the text.
  if process.returncode in (-6, -11):
    return Counter([_SYNTAX])
  if process.returncode not in (0, 1):
    raise InfrastructureError(
      "lint",
      f"ruff ended with {process.returncode}:"
      f" {errors.decode(errors='replace')[-300:]}",
    )
  return Counter(finding["code"] for finding in json.loads(output))


def _ruff() -> str:
  try:
    from ruff import find_ruff_bin
  except ImportError:
    raise ImportError(
      "The parts 'compiles' and 'lint' need ruff: pip install"
      " 'composer-jax[rewards]'."
    ) from None
  return find_ruff_bin()
