"""Files of source code from folders, archives, wheels or the standard library.

Archives are read in place and never unpacked to disk. What the bytes mean is
`corpus`'s business.
"""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# The standard library without its tests (they are two thirds of its bytes, and
# whether they are there at all depends on who packaged this Python) and without
# the generated text of its manual (one file would outweigh a validation set).
_NOT_STDLIB = frozenset(
  {
    "dist-packages",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
  }
)
_ZIP = (".whl", ".zip")
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """One file: its source's name and its path in there, and its bytes."""

  path: str
  content: bytes


def read_sources(
  sources: Sequence[str], suffixes: Sequence[str], wheel_cache: Path
) -> list[SourceFile]:
  """Reads every file with one of the suffixes, sorted by path.

  Args:
    sources: as in `DataConfig`.
    suffixes: endings of the file names to read.
    wheel_cache: folder that keeps downloaded wheels.

  Returns:
    The files. Paths begin with the source's own name, not with where it lies,
    so that they are the same on every machine.

  Raises:
    ValueError: a source is not one of the known kinds, or pip isn't there.
    FileNotFoundError: a folder or archive does not exist.
    OSError: pip could not download a wheel.
  """
  files = [
    SourceFile(path, content)
    for source in sources
    for path, content in _read(source, tuple(suffixes), wheel_cache)
  ]
  return sorted(files, key=lambda file: (file.path, file.content))


def _read(
  source: str, suffixes: tuple[str, ...], wheel_cache: Path
) -> Iterator[tuple[str, bytes]]:
  if source == "stdlib":
    root = Path(sysconfig.get_path("stdlib"))
    return _read_folder(root, "stdlib", suffixes, _NOT_STDLIB)
  if source.startswith("wheel:"):
    return _read_zip(_wheel(source, wheel_cache), suffixes)
  path = Path(source).expanduser()
  if not path.exists():
    raise FileNotFoundError(
      f"Data source {source!r} does not exist: give 'stdlib', a folder, a "
      ".whl, .zip or .tar.gz file, or 'wheel:NAME==VERSION'."
    )
  if path.is_dir():
    return _read_folder(path, path.resolve().name, suffixes)
  if path.name.endswith(_ZIP):
    return _read_zip(path, suffixes)
  if path.name.endswith(_TAR):
    return _read_tar(path, suffixes)
  raise ValueError(
    f"Data source {source!r} is neither a folder nor an archive of a known "
    f"kind ({', '.join(_ZIP + _TAR)})."
  )


def _read_folder(
  root: Path,
  name: str,
  suffixes: tuple[str, ...],
  excluded: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, bytes]]:
  for folder, subfolders, file_names in root.walk():
    # Hidden folders are version control and caches.
    subfolders[:] = sorted(
      sub
      for sub in subfolders
      if sub not in excluded and not sub.startswith(".")
    )
    for file_name in sorted(file_names):
      path = folder / file_name
      if file_name.endswith(suffixes) and path.is_file():
        yield f"{name}/{path.relative_to(root).as_posix()}", path.read_bytes()


def _read_zip(
  path: Path, suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
  with zipfile.ZipFile(path) as archive:
    for member in archive.infolist():
      if member.filename.endswith(suffixes):
        yield f"{path.name}/{member.filename}", archive.read(member)


def _read_tar(
  path: Path, suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
  with tarfile.open(path) as archive:
    for member in archive:
      if member.isfile() and member.name.endswith(suffixes):
        yield f"{path.name}/{member.name}", archive.extractfile(member).read()


def _wheel(source: str, cache: Path) -> Path:
  """The wheel's file, downloaded by pip unless the cache has it."""
  pin = re.fullmatch(r"wheel:([\w.-]+)==([\w.+!-]+)", source)
  if not pin:
    raise ValueError(
      f"Data source {source!r} must pin a version, as in 'wheel:NAME==1.2.3', "
      "for the corpus to stay the same."
    )
  name, version = pin.groups()
  # A wheel's name begins with its normalised project and version.
  normalised = re.sub(r"[-_.]+", "_", name).lower()
  kept = cache / f"{normalised}-{version}.whl"
  if not kept.exists():
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
      _download(f"{name}=={version}", Path(folder))
      # Whoever renames last wins, with the same bytes.
      next(Path(folder).glob("*.whl")).replace(kept)
  return kept


def _download(requirement: str, folder: Path) -> None:
  if importlib.util.find_spec("pip") is None:
    raise ValueError(
      f"Downloading {requirement} needs pip in this environment: install pip, "
      "or give the path of a wheel."
    )
  # `--platform any` asks for pure Python: the same file on every machine.
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
  command += ["--disable-pip-version-check", "--only-binary=:all:"]
  command += ["--platform=any", f"--dest={folder}", requirement]
  result = subprocess.run(command, capture_output=True, text=True)
  if result.returncode:
    lines = result.stderr.strip().splitlines() or ["no reason given"]
    raise OSError(
      f"pip could not download a pure-Python wheel of {requirement}: "
      f"{lines[-1]}"
    )
