"""Drills for a tiny model: one token to repair, one tool to use.

They show that the loop learns, not that a model can program.
"""

import hashlib
import random
from collections.abc import Iterator

from composer_jax.envs.tasks.types import Probe, Task

_OPERATORS = ("+", "-", "*", "//", "%")
_WORDS = (
  "apple",
  "bread",
  "cloud",
  "dream",
  "eagle",
  "flame",
  "grass",
  "house",
)


def generate(seed: int = 0) -> Iterator[Task]:
  """Candidates without end, the kinds in turn; the same for the same seed."""
  rng = random.Random(seed)
  made = set()
  while True:
    for make in (_operator, _constant, _write, _copy):
      task = make(rng)
      if task.task_id not in made:
        made.add(task.task_id)
        yield task


def _operator(rng: random.Random) -> Task:
  right, wrong = rng.sample(_OPERATORS, 2)
  name = rng.choice(_WORDS)

  def text(operator):
    return f"def {name}(a, b):\n  return a {operator} b\n"

  calls = [(rng.randint(2, 99), rng.randint(2, 9)) for _ in range(6)]
  return _task(
    f"{name}.py: {name}(a, b) must return a {right} b. Repair it.",
    {f"{name}.py": text(wrong)},
    {f"{name}.py": text(right)},
    Probe(name, tuple(f"{name}({a}, {b})" for a, b in calls)),
  )


def _constant(rng: random.Random) -> Task:
  right, wrong = rng.sample(range(10), 2)
  name = rng.choice(_WORDS)
  return _task(
    f"{name}.py: LIMIT must be {right}. Repair it.",
    {f"{name}.py": f"LIMIT = {wrong}\n"},
    {f"{name}.py": f"LIMIT = {right}\n"},
    Probe(name, ("LIMIT",)),
  )


def _write(rng: random.Random) -> Task:
  name, word = rng.sample(_WORDS, 2)
  return _task(
    f"Write the word {word} into {name}.txt.",
    {"README": "Nothing here yet.\n"},
    {f"{name}.txt": word},
    Probe("", (f"open('/work/{name}.txt').read().strip()",)),
  )


def _copy(rng: random.Random) -> Task:
  source, target = rng.sample(_WORDS, 2)
  number = str(rng.randrange(10))
  return _task(
    f"Write the number that is in {source}.txt into {target}.txt.",
    {f"{source}.txt": number},
    {f"{target}.txt": number},
    Probe("", (f"open('/work/{target}.txt').read().strip()",)),
  )


def _task(prompt, files, gold, probe) -> Task:
  content = f"{prompt}{files}{gold}"
  digest = hashlib.sha256(content.encode()).hexdigest()[:12]
  return Task(
    task_id=f"micro-{digest}",
    kind="micro",
    prompt=prompt,
    files=files,
    gold=gold,
    probe=probe,
  )
