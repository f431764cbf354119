"""What a task is, and how tasks lie on disk."""

import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from composer_jax.envs.sandbox import Provider, Sandbox


@dataclasses.dataclass(frozen=True)
class Probe:
  """A hidden test: lines run one after the other, and what each must give.

  The answers never enter a sandbox: code inside can't know what to pretend.

  Attributes:
    module: whose names the lines see; "" for none.
    lines: expressions or statements of Python.
    answers: of each line: "= " and the repr of its value, or "! " and the
      name of the exception, after what it printed.
  """

  module: str
  lines: tuple[str, ...]
  answers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Task:
  """A repository, what to do in it, and how to tell that it is done.

  Attributes:
    task_id: unique, and the same whenever the same task is made.
    kind: "micro", "repair" or "implement".
    prompt: what the policy is told.
    base: an installed package that is copied into the repository; "" for none.
      No image that a policy works in may hold it, too: there is the gold.
    base_digest: of its `source_tree`.
    files: path -> text, over the base: the state that the policy begins with.
    gold: path -> text, over that: a state that solves the task.
    probe: the hidden test.
    test_command: that the policy may run; empty: none.
  """

  task_id: str
  kind: str
  prompt: str
  files: dict[str, str]
  gold: dict[str, str]
  probe: Probe
  base: str = ""
  base_digest: str = ""
  test_command: tuple[str, ...] = ()


async def start(
  provider: Provider, task: Task, solved: bool = False
) -> Sandbox:
  """A sandbox with the task's repository; with `solved`, its gold state.

  Raises:
    ModuleNotFoundError: the base is not installed here.
    ValueError: it is, in another version.
    SandboxError: the sandbox failed.
  """
  tree = b""
  if task.base:
    tree = source_tree(task.base)
    if digest(tree) != task.base_digest:
      raise ValueError(
        f"Task {task.task_id} was made from another version of {task.base}:"
        " install that one, or make the tasks anew."
      )
  sandbox = await provider.create(tree)
  try:
    for path, text in (task.files | (task.gold if solved else {})).items():
      await sandbox.write(path, text.encode())
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


@functools.lru_cache(maxsize=16)
def source_tree(base: str) -> bytes:
  """The Python files of an installed package or module, without its tests.

  Args:
    base: its import name.

  Returns:
    A tar archive; the same files give the same bytes.

  Raises:
    ModuleNotFoundError: there is no such package of Python files.
  """
  archive = io.BytesIO()
  with tarfile.open(
    fileobj=archive, mode="w", format=tarfile.GNU_FORMAT
  ) as tar:
    for path, text in source_files(base).items():
      entry = tarfile.TarInfo(path)
      entry.size = len(text.encode())
      tar.addfile(entry, io.BytesIO(text.encode()))
  return archive.getvalue()


def source_files(base: str) -> dict[str, str]:
  """Path -> text of what `source_tree` archives; see there."""
  spec = importlib.util.find_spec(base)
  if spec is None or not spec.origin or not spec.origin.endswith(".py"):
    raise ModuleNotFoundError(
      f"{base!r} is no installed package of Python files: pip install it, or"
      " check its import name."
    )
  origin = Path(spec.origin)
  package = origin.name == "__init__.py"
  files = sorted(origin.parent.rglob("*.py")) if package else [origin]
  root = origin.parent.parent if package else origin.parent
  found = {}
  for file in files:
    path = file.relative_to(root)
    if not any(part.startswith("test") for part in path.parts):
      found[path.as_posix()] = file.read_text(encoding="utf-8")
  return found


def digest(data: bytes) -> str:
  """Names a tree in `Task.base_digest`."""
  return hashlib.sha256(data).hexdigest()


def save(path: str | Path, tasks: Iterable[Task]) -> None:
  """Writes tasks, one JSON object a line."""
  lines = (json.dumps(dataclasses.asdict(task)) + "\n" for task in tasks)
  Path(path).write_text("".join(lines), encoding="utf-8")


def load(path: str | Path) -> list[Task]:
  """Reads what `save` wrote.

  Raises:
    ValueError: a line is no task; its number is in the message.
  """
  tasks = []
  text = Path(path).read_text(encoding="utf-8")
  for number, line in enumerate(text.splitlines(), 1):
    try:
      fields = json.loads(line)
      probe = {
        k: v if k == "module" else tuple(v) for k, v in fields["probe"].items()
      }
      fields["probe"] = Probe(**probe)
      fields["test_command"] = tuple(fields["test_command"])
      tasks.append(Task(**fields))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(f"{path}, line {number}, is no task: {error}.") from None
  return tasks
