"""What a repository depends on, down to the last version.

Answers come from what is installed here, where that is enough, and else from
pip. pip may take wheels only: to build one would run its code here.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(
  requirements: Iterable[str], leave_out: Iterable[str] = ()
) -> tuple[str, ...]:
  """Requirements and all that they need, as "name==version", sorted.

  Args:
    requirements: as packages declare them; those for other machines and extras
      are passed over.
    leave_out: names of distributions that the answer shall not have.

  Raises:
    ModuleNotFoundError: pip finds no wheels that go together.
  """
  wanted = _applicable(requirements)
  found = _installed(wanted)
  if found is None:
    found = _resolved(wanted)
  left_out = {canonicalize_name(name) for name in leave_out}
  return tuple(
    sorted(
      f"{name}=={version}"
      for name, version in found.items()
      if name not in left_out
    )
  )


def download(requirement: str, folder: Path) -> Path:
  """Puts the wheel of a requirement into a folder.

  Raises:
    ModuleNotFoundError: there is none.
  """
  _pip("download", "--no-deps", f"--dest={folder}", requirement)
  (wheel,) = folder.glob("*.whl")
  return wheel


def _applicable(requirements) -> list[Requirement]:
  parsed = map(Requirement, requirements)
  return [r for r in parsed if not r.marker or r.marker.evaluate({"extra": ""})]


def _installed(wanted) -> dict[str, str] | None:
  """Names and versions, if all that is wanted is here."""
  found: dict[str, str] = {}
  left = list(wanted)
  while left:
    one = left.pop()
    try:
      here = importlib.metadata.distribution(one.name)
    except importlib.metadata.PackageNotFoundError:
      return None
    if one.extras or not one.specifier.contains(here.version, prereleases=True):
      return None
    name = canonicalize_name(one.name)
    if name not in found:
      found[name] = here.version
      left += _applicable(here.requires or ())
  return found


def _resolved(wanted) -> dict[str, str]:
  with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    _pip(
      *("install", "--dry-run", "--ignore-installed", f"--report={report}"),
      # Without their markers, which hold.
      *(f"{r.name}{_extras(r)}{r.specifier}" for r in wanted),
    )
    items = json.loads(report.read_text())["install"]
  found = (item["metadata"] for item in items)
  return {canonicalize_name(m["name"]): m["version"] for m in found}


def _extras(wanted: Requirement) -> str:
  return f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""


def _pip(verb, *arguments):
  pip = (sys.executable, "-m", "pip", verb, "--quiet", "--only-binary=:all:")
  done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
  if done.returncode:
    errors = [e for e in done.stderr.splitlines() if e.startswith("ERROR")]
    names = [a for a in arguments if not a.startswith("-")]
    raise ModuleNotFoundError(
      f"pip gets no wheels of {', '.join(names)}: check the name, or install it"
      f" here. {' '.join(errors[:1])}"
    )
