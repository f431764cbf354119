"""What a microVM boots: a kernel of this system, and files for its memory.

The files are an image (see `image.py`), the commands that code in a sandbox
expects, the shared libraries of both, the kernel's modules for the host's
messages, and `guest.py` as the first process. They travel as a cpio archive
(https://docs.kernel.org/driver-api/early-userspace/buffer-format.html), which
the kernel unpacks into memory: the machine needs no disk.
"""

import lzma
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

_GUEST = Path(__file__).with_name("guest.py")
# In the order in which they can be loaded. A missing one is built in.
_MODULES = (
  "virtio_ring",
  "virtio",
  "virtio_pci_legacy_dev",
  "virtio_pci_modern_dev",
  "virtio_pci",
  "virtio_console",
)
_PROGRAMS = (
  *("awk", "base64", "basename", "bash", "cat", "chmod", "cmp", "comm", "cp"),
  *("cut", "date", "dd", "df", "diff", "dirname", "du", "echo", "env", "expr"),
  *("egrep", "false", "fgrep", "find", "fold", "git", "grep", "gunzip", "gzip"),
  *(
    "head",
    "id",
    "install",
    "join",
    "kill",
    "link",
    "ln",
    "ls",
    "make",
    "md5sum",
  ),
  *("mkdir", "mkfifo", "mktemp", "mv", "nl", "nproc", "od", "patch", "paste"),
  *("pr", "printf", "pwd", "readlink", "realpath", "rev", "rm", "rmdir", "sed"),
  *("seq", "setsid", "sh", "sha256sum", "shuf", "sleep", "sort", "split"),
  *("stat", "stdbuf", "sync", "tac", "tail", "tar", "tee", "test", "time"),
  *("timeout", "touch", "tr", "true", "truncate", "tty", "uname", "uniq"),
  *("wc", "which", "whoami", "xargs", "yes", "zcat"),
)
_LOCALE = Path("/usr/lib/locale/C.utf8")
_FOLDERS = ("dev/shm", "modules", "proc", "sys", "tmp", "work")
# Device files that hold no memory; /dev/zero, mapped shared, is unlimited.
_DEVICES = {
  "console": (0o600, 5, 1),
  "full": (0o666, 1, 7),
  "null": (0o666, 1, 3),
  "random": (0o666, 1, 8),
  "urandom": (0o666, 1, 9),
}
_LINKS = {
  "dev/fd": "/proc/self/fd",
  "dev/stderr": "/proc/self/fd/2",
  "dev/stdin": "/proc/self/fd/0",
  "dev/stdout": "/proc/self/fd/1",
}


def find_kernel(*roots: Path) -> tuple[Path, Path]:
  """The newest kernel under any of `roots` that can be read.

  Returns:
    `ROOT/boot/vmlinuz-VERSION` and `ROOT/lib/modules/VERSION`.

  Raises:
    FileNotFoundError: there is none.
  """
  found = []
  for root in roots:
    for kernel in root.glob("boot/vmlinuz-*"):
      version = kernel.name.removeprefix("vmlinuz-")
      modules = root / "lib/modules" / version
      if modules.is_dir() and os.access(kernel, os.R_OK):
        found.append((kernel.stat().st_mtime, kernel, modules))
  if not found:
    raise FileNotFoundError(
      "There is no kernel for microVMs: no boot/vmlinuz-VERSION that can be"
      " read, with its lib/modules/VERSION, under"
      f" {' or '.join(map(str, roots))}. On Debian, .ci/microvm.sh gets one."
    )
  return max(found)[1:]


def pack(image: Path, modules: Path) -> Iterator[bytes]:
  """The archive, in pieces.

  Args:
    image: by `image.build`.
    modules: the folder of the kernel's modules.
  """
  contents = _contents(image, modules)
  folders = {parent for path in contents for parent in Path(path).parents}
  contents |= {
    str(f): None for f in folders if f.name and str(f) not in contents
  }
  for number, path in enumerate(sorted(contents)):  # Folders come first.
    yield _entry(number, path, *_inode(contents[path]))
  for path, target in _LINKS.items():
    yield _entry(0, path, stat.S_IFLNK | 0o777, target.encode())
  yield _entry(0, "TRAILER!!!", 0)


def _contents(image, modules):
  """Path in the machine to a file here, bytes, or (mode, major, minor)."""
  python = f"#!/image/bin/python -IS\n{_GUEST.read_text()}"
  contents = {"init": python.encode()}
  contents |= dict.fromkeys(_FOLDERS)
  contents |= {f"dev/{name}": device for name, device in _DEVICES.items()}
  for i, name in enumerate(_MODULES):
    for file in modules.glob(f"kernel/drivers/*/{name}.ko*"):
      data = file.read_bytes()
      if file.suffix == ".xz":
        data = lzma.decompress(data)
      contents[f"modules/{i}"] = data
  programs = {}
  for name in _PROGRAMS:
    if found := shutil.which(name, path="/usr/bin:/bin"):
      programs[f"usr/bin/{name}"] = Path(found).resolve()
  binaries = [image / "bin/python", *image.rglob("*.so*"), *programs.values()]
  for library in _libraries(binaries, image / "lib"):
    # Under the name that is asked for, in the folder where it really is.
    place = library.parent.resolve() / library.name
    contents[str(place)[1:]] = library.resolve()
  for path in image.rglob("*"):
    contents[f"image/{path.relative_to(image)}"] = path
  for name in ("bin", "sbin", "lib", "lib64"):
    if Path("/", name).is_symlink():
      contents[name] = Path("/", name)
  for path in (Path("/etc/ld.so.cache"), *_LOCALE.rglob("*")):
    if path.is_file():
      contents[str(path)[1:]] = path
  return contents | programs


def _libraries(binaries, folder):
  done = subprocess.run(
    ["ldd", *binaries],
    env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder)},
    capture_output=True,
    text=True,
    check=False,  # It fails for scripts and static programs.
  )
  words = {word for line in done.stdout.splitlines() for word in line.split()}
  paths = map(Path, (w for w in words if w.startswith("/") and w[-1] != ":"))
  return [p for p in paths if not p.is_relative_to(folder) and p.is_file()]


def _inode(source):
  """Mode, data, major and minor number of one file."""
  if source is None:
    return stat.S_IFDIR | 0o755, b"", 0, 0
  if isinstance(source, bytes):
    return stat.S_IFREG | 0o755, source, 0, 0
  if isinstance(source, tuple):
    mode, major, minor = source
    return stat.S_IFCHR | mode, b"", major, minor
  mode = source.lstat().st_mode
  if source.is_symlink():
    return mode, os.fsencode(source.readlink()), 0, 0
  return mode, source.read_bytes() if source.is_file() else b"", 0, 0


def _entry(number, path, mode, data=b"", major=0, minor=0):
  name = path.encode() + b"\0"
  fields = (
    *(number, mode, 0, 0, 1, 0),  # User, group, links, time.
    *(len(data), 0, 0, major, minor, len(name), 0),
  )
  head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
  return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
