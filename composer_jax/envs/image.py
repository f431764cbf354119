"""What a sandbox can read beside the system's /usr: Python and packages.

An image is a folder: this interpreter, its standard library, chosen
distributions and the agent. It is copied once, because the interpreter may lie
where the unprivileged user of a sandbox can't look, and because a sandbox
should see what its tasks need and nothing else.
"""

import compileall
import dataclasses
import hashlib
import importlib.metadata
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

_LEFT_OUT = (
  "config-*",
  "ensurepip",
  "idlelib",
  "lib2to3",
  "site-packages",
  "test",
  "tests",
  "tkinter",
  "turtledemo",
)
_AGENT = Path(__file__).with_name("agent.py")


@dataclasses.dataclass(frozen=True)
class Image:
  """What an environment needs beside Python; see `build`.

  Attributes:
    distributions: that code inside can import.
    without: top-level modules of the standard library that it can't.
  """

  distributions: tuple[str, ...] = ()
  without: tuple[str, ...] = ()


PLAIN = Image()


def build(
  distributions: Sequence[str] = (),
  without: Sequence[str] = (),
  folder: str | Path | None = None,
) -> Path:
  """Makes an image, or finds the one made before.

  Args:
    distributions: to put into `site-packages`, and nothing that they depend
      on: by name ("toolz"), installed here, or by name and version
      ("toolz==1.0.0"), taken from the package index where it isn't.
    without: top-level modules of the standard library to leave out, because a
      task is about them.
    folder: where images are kept, by default in `cache_folder()`.

  Returns:
    The image: `bin/python`, `lib`, `agent.pyc`, and a `digest` in its name.

  Raises:
    ModuleNotFoundError: a distribution is not installed, or pip has no wheel.
  """
  root = Path(folder) if folder else cache_folder()
  found = [_find(name, root) for name in sorted(distributions)]
  digest = hashlib.sha256(_AGENT.read_bytes() + Path(__file__).read_bytes())
  digest.update(f"{sys.version}{sys.base_prefix}".encode())
  for distribution in found:
    digest.update(f"{distribution.name}={distribution.version}\n".encode())
  for module in sorted(without):
    digest.update(f"-{module}\n".encode())
  image = root / f"image-{digest.hexdigest()[:16]}"
  if image.is_dir():
    return image
  root.mkdir(parents=True, exist_ok=True)
  temporary = Path(tempfile.mkdtemp(dir=root))
  _fill(temporary, found, without)
  temporary.chmod(0o755)
  _move(temporary, image)
  return image


def cache_folder() -> Path:
  """Where images lie: root's sandboxes, run by another user, must see them."""
  if os.geteuid() == 0:
    return Path("/var/cache/composer-jax")
  return Path("~/.cache/composer-jax").expanduser()


def _find(name: str, root: Path) -> importlib.metadata.Distribution:
  """The distribution that is installed here or, at a version, from pip."""
  bare, _, version = name.partition("==")
  try:
    here = importlib.metadata.distribution(bare)
    if version in ("", here.version):
      return here
  except importlib.metadata.PackageNotFoundError:
    if not version:
      raise ModuleNotFoundError(
        f"{name} is not installed, so no image can hold it: pip install {name}."
      ) from None
  folder = root / "packages" / f"{bare}-{version}"
  if not folder.is_dir():
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    # Wheels alone: to build one would run the package's code outside.
    done = subprocess.run(
      [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--no-compile", "--target", str(temporary)),
        name,
      ],
      capture_output=True,
      text=True,
    )
    if done.returncode:
      shutil.rmtree(temporary)
      last = done.stderr.strip().splitlines()[-1:]
      raise ModuleNotFoundError(
        f"{name} can't be put into an image, because pip gets no wheel of it:"
        f" {''.join(last)}"
      )
    _move(temporary, folder)
  (found,) = importlib.metadata.distributions(path=[str(folder)])
  return found


def _move(temporary: Path, target: Path):
  try:
    temporary.rename(target)
  except OSError:  # Another process was first.
    shutil.rmtree(temporary)


def _fill(image, distributions, without):
  name = f"python{sys.version_info.major}.{sys.version_info.minor}"
  (image / "bin").mkdir()
  shutil.copy(Path(sys.base_prefix, "bin", name), image / "bin" / name)
  for alias in ("python", "python3"):
    (image / "bin" / alias).symlink_to(name)
  library = image / "lib" / name
  shutil.copytree(
    sysconfig.get_path("stdlib"),
    library,
    ignore=shutil.ignore_patterns(*_LEFT_OUT),
  )
  for module in without:
    for cached in (library / "__pycache__").glob(f"{module}.*.pyc"):
      cached.unlink()
    for path in (library / module, library / f"{module}.py"):
      if path.is_dir():
        shutil.rmtree(path)
      else:
        path.unlink(missing_ok=True)
  shared = Path(sys.base_prefix, "lib")
  for file in shared.glob("libpython*.so*"):
    shutil.copy(file, image / "lib", follow_symlinks=False)
  for distribution in distributions:
    for file in distribution.files or ():
      source = Path(distribution.locate_file(file))
      if ".." in file.parts or not source.is_file():
        continue  # Scripts, which start another interpreter.
      target = library / "site-packages" / file
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, target)  # With its time, or its .pyc is void.
  # Once here, what pip hasn't compiled, and not each time in a sandbox.
  compileall.compile_dir(library / "site-packages", quiet=2)
  py_compile.compile(str(_AGENT), str(image / "agent.pyc"), doraise=True)
  for path in (image, *image.rglob("*")):
    if not path.is_symlink():
      path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
