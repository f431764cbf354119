"""What tasks are made of: a package, a checkout, the standard library.

Nothing of a source is ever imported or run here, outside of sandboxes.
"""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path, PurePosixPath

from composer_jax.envs.image import PLAIN, Image
from composer_jax.envs.tasks import trees
from composer_jax.envs.tasks.requirements import closure, download

_MAX_TREE_BYTES = 48 << 20
# Modules with tests of their own that pytest and `runner.py` do without.
_STDLIB = (
  "chunk",
  "colorsys",
  "configparser",
  "filecmp",
  "fileinput",
  "fractions",
  "getopt",
  "graphlib",
  "gzip",
  "hmac",
  "imghdr",
  "mailbox",
  "mailcap",
  "mimetypes",
  "modulefinder",
  "netrc",
  "optparse",
  "pickletools",
  "pipes",
  "plistlib",
  "pstats",
  "pyclbr",
  "rlcompleter",
  "sched",
  "secrets",
  "shelve",
  "sndhdr",
  "statistics",
  "stringprep",
  "sunau",
  "symtable",
  "tabnanny",
  "timeit",
  "tomllib",
  "trace",
  "uu",
  "wave",
  "wsgiref",
  "xdrlib",
  "xmlrpc",
  "zipapp",
  "zoneinfo",
)


@dataclasses.dataclass(frozen=True)
class Source:
  """A repository to make tasks of.

  Attributes:
    name: for people and task ids.
    files: path -> contents, without its tests.
    tests: path -> contents of its own test suite; may be empty.
    root: the folder in it that modules are imported from.
    image: with what it depends on.
  """

  name: str
  files: dict[str, bytes]
  tests: dict[str, bytes]
  root: str = ""
  image: Image = PLAIN

  def keep(self) -> str:
    """Keeps the repository among the trees, and returns its digest."""
    return trees.put(trees.pack(self.files))

  def keep_tests(self) -> str:
    """Keeps the test suite, too."""
    return trees.put(trees.pack(self.tests))

  @property
  def modules(self) -> dict[str, tuple[str, str]]:
    """Path -> import name and text of each module."""
    found = {}
    prefix = f"{self.root}/" if self.root else ""
    for path, content in self.files.items():
      if path.endswith(".py") and path.startswith(prefix):
        name = path.removeprefix(prefix).removesuffix(".py").replace("/", ".")
        name = name.removesuffix(".__init__")
        if all(part.isidentifier() for part in name.split(".")):
          try:
            found[path] = name, content.decode()
          except UnicodeDecodeError:
            continue
    return found


def find(
  place: str, requires: Sequence[str] = (), dependencies: bool = True
) -> Source:
  """The source at a place.

  Args:
    place: "stdlib", a folder (a git checkout, say), or a requirement such as
      "toolz" or "toolz==1.0.0", installed here or else downloaded.
    requires: requirements beside those that it declares, such as what its tests
      import.
    dependencies: install those that it declares; without them, what needs them
      makes no tasks.

  Raises:
    ModuleNotFoundError: there is no such package, or it or what it depends on
      has no wheel.
    ValueError: it is too large.
  """
  if place == "stdlib":
    return _standard_library()
  if Path(place).is_dir():
    name, declared, found = _checkout(Path(place))
  else:
    name, declared, found = _package(place)
  if not any(path.endswith(".py") for path in found):
    raise ModuleNotFoundError(
      f"{place!r} has no Python files: nothing to make tasks of."
    )
  size = sum(map(len, found.values()))
  if size > _MAX_TREE_BYTES:
    raise ValueError(
      f"{place} has {size >> 20} MB of files and a sandbox room for"
      f" {_MAX_TREE_BYTES >> 20}: give a smaller package or checkout."
    )
  tests = {path: text for path, text in found.items() if is_test(path)}
  files = {path: text for path, text in found.items() if path not in tests}
  # A folder of packages, or of scripts, is imported from where it is.
  src = any(re.fullmatch(r"src/[^/]+/__init__\.py", path) for path in files)
  wanted = [*requires, *(declared if dependencies else ())]
  if tests:
    wanted.append("pytest")
  image = Image(closure(wanted, {re.split("[-=]", name)[0]}))
  return Source(name, files, tests, "src" if src else "", image)


def _package(requirement: str) -> tuple[str, list[str], dict[str, bytes]]:
  """Name, requirements and files of a distribution, as its wheel has them."""
  name, _, version = requirement.partition("==")
  try:
    here = importlib.metadata.distribution(name)
  except (importlib.metadata.PackageNotFoundError, ValueError):
    here = None
  if here and version in ("", here.version):
    paths = {str(file): Path(here.locate_file(file)) for file in here.files}
    found = {
      path: place.read_bytes()
      for path, place in paths.items()
      if _wanted(path) and place.is_file()
    }
    return f"{name}=={here.version}", here.requires or [], found
  with tempfile.TemporaryDirectory() as folder:
    wheel = download(requirement, Path(folder))
    with zipfile.ZipFile(wheel) as archive:
      found = {
        path: archive.read(path)
        for path in archive.namelist()
        if _wanted(path) and not path.endswith("/")
      }
      (about,) = (n for n in archive.namelist() if n.endswith("-info/METADATA"))
      fields = message_from_bytes(archive.read(about))
  declared = fields.get_all("Requires-Dist", [])
  return f"{name}=={wheel.name.split('-')[1]}", declared, found


def _checkout(folder: Path) -> tuple[str, list[str], dict[str, bytes]]:
  """Name, requirements and files: what git knows, or all there are."""
  listed = subprocess.run(
    ["git", "-C", str(folder), "ls-files", "-z"], capture_output=True, text=True
  )
  if listed.returncode == 0 and listed.stdout:
    paths = [path for path in listed.stdout.split("\0") if path]
  else:
    paths = [p.relative_to(folder).as_posix() for p in folder.rglob("*")]
  found = {
    path: (folder / path).read_bytes()
    for path in paths
    if _wanted(path) and (folder / path).is_file()
  }
  project = {}
  if "pyproject.toml" in found:
    settings = tomllib.loads(found["pyproject.toml"].decode())
    project = settings.get("project", {})
  # By its own name, so that no image gets it as somebody's dependency.
  name = project.get("name", folder.resolve().name)
  return name, project.get("dependencies", []), found


def _standard_library() -> Source:
  """Modules of this Python's library that its image can do without.

  No sandbox of their tasks has the original, so that it can't be copied.

  Raises:
    ModuleNotFoundError: this Python came without its tests.
  """
  library = Path(sysconfig.get_path("stdlib"))
  if not (library / "test" / "support").is_dir():
    raise ModuleNotFoundError(
      "This Python has no package `test`: take one that was built from source,"
      " or other sources of tasks."
    )
  patterns = ["test/__init__.py", "test/support/**/*"]
  for module in _STDLIB:
    patterns += [f"{module}.py", f"{module}/**/*"]
    patterns += [f"test/test_{module}.py", f"test/test_{module}/**/*"]
  found = {}
  for file in (file for p in patterns for file in library.glob(p)):
    path = file.relative_to(library).as_posix()
    if _wanted(path) and file.is_file():
      found[path] = file.read_bytes()
  tests = {path: text for path, text in found.items() if is_test(path)}
  files = {path: text for path, text in found.items() if path not in tests}
  version = ".".join(map(str, sys.version_info[:3]))
  image = Image(closure(["pytest"]), _STDLIB)
  return Source(f"python=={version}", files, tests, "", image)


def _wanted(path: str) -> bool:
  parts = PurePosixPath(path).parts
  return not path.endswith((".so", ".pyc", ".pyd")) and not any(
    part.startswith(".") or part.endswith(".dist-info") for part in parts
  )


def is_test(path: str) -> bool:
  """Whether a file belongs to a test suite, by its place and name."""
  *folders, name = PurePosixPath(path).parts
  return (
    any(folder in ("test", "tests") for folder in folders)
    or re.fullmatch(r"test_.*\.py|.*_test\.py|tests?\.py|conftest\.py", name)
    is not None
  )
