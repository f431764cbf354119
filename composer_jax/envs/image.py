"""What a sandbox can read beside the system's /usr: Python and packages.

An image is a folder: this interpreter, its standard library, chosen
distributions and the agent. It is copied once, because the interpreter may lie
where the unprivileged user of a sandbox can't look, and because a sandbox
should see what its tasks need and nothing else.
"""

import hashlib
import importlib.metadata
import os
import py_compile
import shutil
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


def build(
  distributions: Sequence[str] = (), folder: str | Path | None = None
) -> Path:
  """Makes an image, or finds the one made before.

  Args:
    distributions: installed ones, by name, to put into `site-packages`.
    folder: where images are kept. By default `/var/cache/composer-jax` for
      root, whose sandboxes run as somebody else, and `~/.cache/composer-jax`.

  Returns:
    The image: `bin/python`, `lib`, `agent.pyc`, and a `digest` in its name.

  Raises:
    ModuleNotFoundError: a distribution is not installed.
  """
  found = []
  for name in sorted(distributions):
    try:
      found.append(importlib.metadata.distribution(name))
    except importlib.metadata.PackageNotFoundError:
      raise ModuleNotFoundError(
        f"{name} is not installed, so no image can hold it: pip install {name}."
      ) from None
  digest = hashlib.sha256(_AGENT.read_bytes() + Path(__file__).read_bytes())
  digest.update(f"{sys.version}{sys.base_prefix}".encode())
  for distribution in found:
    digest.update(f"{distribution.name}={distribution.version}\n".encode())
  root = Path(folder) if folder else _default_folder()
  image = root / f"image-{digest.hexdigest()[:16]}"
  if image.is_dir():
    return image
  root.mkdir(parents=True, exist_ok=True)
  temporary = Path(tempfile.mkdtemp(dir=root))
  _fill(temporary, found)
  temporary.chmod(0o755)
  try:
    temporary.rename(image)
  except OSError:  # Another process was first.
    shutil.rmtree(temporary)
  return image


def _default_folder() -> Path:
  if os.geteuid() == 0:
    return Path("/var/cache/composer-jax")
  return Path("~/.cache/composer-jax").expanduser()


def _fill(image, distributions):
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
      shutil.copy(source, target)
  py_compile.compile(str(_AGENT), str(image / "agent.pyc"), doraise=True)
  for path in (image, *image.rglob("*")):
    if not path.is_symlink():
      path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
