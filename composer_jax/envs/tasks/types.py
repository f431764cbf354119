"""What a task is, and how tasks lie on disk."""

import dataclasses
import json
import lzma
import shutil
from collections.abc import Iterable
from pathlib import Path

from composer_jax.envs.image import PLAIN, Image
from composer_jax.envs.sandbox import Provider, Sandbox
from composer_jax.envs.tasks import trees
from composer_jax.envs.tasks.providers import with_image


@dataclasses.dataclass(frozen=True)
class Probe:
  """A hidden test: lines run one after the other, and what each must give.

  The answers never enter a policy's sandbox, nor the one that its work is
  verified in: code inside can't know what to pretend.

  Attributes:
    module: whose names the lines see; "" for none.
    lines: expressions or statements of Python.
    answers: of each line: "= " and the repr of its value, or "! " and the
      name of the exception, after what it printed.
    root: the folder in the repository that modules are imported from.
    image: that the lines need.
  """

  module: str
  lines: tuple[str, ...]
  answers: tuple[str, ...] = ()
  root: str = ""
  image: Image = PLAIN

  @property
  def total(self) -> int:
    """What can be passed."""
    return len(self.lines)


@dataclasses.dataclass(frozen=True)
class Suite:
  """A hidden test: tests of a package's own suite, run by pytest.

  Attributes:
    tree: of the suite's files, by digest; see `trees`.
    nodes: ids of the tests that must pass.
    root: as in `Probe`.
    image: that they need; pytest is in it.
  """

  tree: str
  nodes: tuple[str, ...]
  root: str = ""
  image: Image = PLAIN

  @property
  def total(self) -> int:
    """What can be passed."""
    return len(self.nodes)


@dataclasses.dataclass(frozen=True)
class Riddle:
  """A hidden test: an answer in a file, and a scorer of reasoning-gym.

  Attributes:
    dataset: of reasoning-gym.
    entry: of the dataset, as JSON; the scorer reads it.
    path: of the file with the answer.
    image: with reasoning-gym, which no policy's image holds.
  """

  dataset: str
  entry: str
  path: str
  image: Image = PLAIN

  @property
  def total(self) -> int:
    """What can be passed: the score is in hundredths."""
    return 100


Hidden = Probe | Suite | Riddle
_KINDS = {kind.__name__.lower(): kind for kind in (Probe, Suite, Riddle)}


@dataclasses.dataclass(frozen=True)
class Task:
  """A repository, what to do in it, and how to tell that it is done.

  Attributes:
    task_id: unique, and the same whenever the same task is made.
    kind: "micro", "repair", "implement", "puzzle" or "humaneval".
    prompt: what the policy is told.
    files: path -> text, over the tree: the state that the policy begins with.
    gold: path -> text, over that: a state that solves the task.
    probe: the hidden test.
    tree: the repository, by digest; "" for an empty one. See `trees`.
    image: that the policy works in. It never holds what `tree` was made of:
      there is the gold.
    test_command: that the policy may run; empty: none.
  """

  task_id: str
  kind: str
  prompt: str
  files: dict[str, str]
  gold: dict[str, str]
  probe: Hidden
  tree: str = ""
  image: Image = PLAIN
  test_command: tuple[str, ...] = ()


async def start(
  provider: Provider, task: Task, solved: bool = False
) -> Sandbox:
  """A sandbox with the task's repository; with `solved`, its gold state.

  Raises:
    FileNotFoundError: the repository is not on this machine.
    ValueError: the provider has one image, and the task needs another.
    SandboxError: the sandbox failed.
  """
  tree = trees.get(task.tree) if task.tree else b""
  sandbox = await with_image(provider, task.image).create(tree)
  try:
    for path, text in (task.files | (task.gold if solved else {})).items():
      await sandbox.write(path, text.encode())
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


def save(path: str | Path, tasks: Iterable[Task], append: bool = False) -> None:
  """Writes tasks, one JSON object a line, and their trees into a folder.

  The folder is called as the file, with ".trees" at its end. A file whose name
  ends in ".xz" is compressed, some fifty times: faults in one file differ in a
  word.
  """
  path = Path(path)
  folder = path.with_name(path.name + ".trees")
  with _open(path, "at" if append else "wt") as file:
    for task in tasks:
      fields = dataclasses.asdict(task)
      fields["probe"]["kind"] = type(task.probe).__name__.lower()
      file.write(json.dumps(fields) + "\n")
      for digest in (task.tree, getattr(task.probe, "tree", "")):
        target = folder / f"{digest}.tar"
        if digest and not target.exists():
          folder.mkdir(exist_ok=True)
          shutil.copy(trees.path(digest), target)


def load(path: str | Path) -> list[Task]:
  """Reads what `save` wrote, on any machine.

  Raises:
    ValueError: a line is no task; its number is in the message.
  """
  path = Path(path)
  tasks = []
  with _open(path, "rt") as file:
    for number, line in enumerate(file, 1):
      try:
        tasks.append(_task(json.loads(line)))
      except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
          f"{path}, line {number}, is no task: {error}."
        ) from None
  for tree in path.with_name(path.name + ".trees").glob("*.tar"):
    trees.put(tree.read_bytes())
  return tasks


def _open(path, mode):
  opener = lzma.open if path.suffix == ".xz" else open
  return opener(path, mode, encoding="utf-8")


def _task(fields) -> Task:
  probe = fields["probe"]
  kind = _KINDS[probe.pop("kind")]
  fields["probe"] = kind(**{k: _tuples(k, v) for k, v in probe.items()})
  return Task(**{k: _tuples(k, v) for k, v in fields.items()})


def _tuples(name, value):
  if name == "image":
    return Image(**{k: tuple(v) for k, v in value.items()})
  return tuple(value) if isinstance(value, list) else value
