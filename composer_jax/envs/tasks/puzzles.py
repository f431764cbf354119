"""Puzzles of reasoning-gym as tasks: a question, and an answer in a file.

Made and scored by reasoning-gym itself (https://arxiv.org/abs/2505.24760), in
sandboxes whose image has it; the image that a policy works in does not.
"""

import hashlib
import json
from collections.abc import Sequence

from composer_jax.envs.image import Image
from composer_jax.envs.sandbox import Provider, SandboxError
from composer_jax.envs.tasks.providers import with_image
from composer_jax.envs.tasks.requirements import closure
from composer_jax.envs.tasks.types import Riddle, Task

_ANSWER = "answer.txt"
_DATASET_S = 20
_MAKER = r"""
import json, signal, sys
import reasoning_gym
from reasoning_gym.factory import DATASETS
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
request = json.load(sys.stdin)
for name in request["names"] or sorted(DATASETS):
  signal.alarm(request["seconds"])
  try:
    for entry in reasoning_gym.create_dataset(
        name, size=request["size"], seed=request["seed"]):
      print(request["mark"] + json.dumps([name, entry]), flush=True)
  except Exception as error:
    print(f"{name}: {type(error).__name__}: {error}")
  signal.alarm(0)
"""


def image() -> Image:
  """What makes and scores puzzles.

  Raises:
    ModuleNotFoundError: reasoning-gym is neither installed nor to be had.
  """
  return Image(closure(["reasoning-gym"]))


async def generate(
  provider: Provider, names: Sequence[str] = (), size: int = 4, seed: int = 0
) -> list[Task]:
  """Candidates; a dataset that fails or takes too long makes fewer.

  Args:
    provider: of sandboxes; an `Images`.
    names: of datasets; none: all.
    size: puzzles of each.
    seed: chooses them.

  Raises:
    ModuleNotFoundError: reasoning-gym is neither installed nor to be had.
    SandboxError: the sandbox failed.
    ValueError: no puzzle was made.
  """
  needed = image()
  mark = "puzzle "
  request = {
    "names": list(names),
    "size": size,
    "seed": seed,
    "seconds": _DATASET_S,
    "mark": mark,
  }
  async with await with_image(provider, needed).create() as sandbox:
    result = await sandbox.exec(
      ["python", "-c", _MAKER],
      stdin=json.dumps(request).encode(),
      output_bytes=64 << 20,
    )
  lines = [s for s in result.text.splitlines() if s.startswith(mark)]
  if not lines:
    raise ValueError(
      f"reasoning-gym made no puzzle of {', '.join(names) or 'any kind'}:"
      f" {result.text[-300:]}"
    )
  if result.omitted_bytes:
    raise SandboxError("The puzzles are too long: ask for fewer.")
  return [_task(*json.loads(s.removeprefix(mark)), needed) for s in lines]


def _task(name, entry, needed) -> Task:
  text = json.dumps(entry)
  short = hashlib.sha256(f"{name} {text}".encode()).hexdigest()[:12]
  return Task(
    task_id=f"puzzle-{name}-{short}",
    kind="puzzle",
    prompt=(
      f"{entry['question']}\n\nWrite the answer, and nothing else, into"
      f" {_ANSWER}."
    ),
    files={},
    gold={_ANSWER: str(entry["answer"])},
    probe=Riddle(name, text, _ANSWER, needed),
  )
