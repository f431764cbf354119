"""What the parts of a run are given."""

import asyncio
import itertools

import pytest

from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.image import Image
from composer_jax.envs.sandbox import Pool
from composer_jax.envs.tasks import Probe, Task
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.verify import verify
from composer_jax.rl.drills import drills
from launch import rl


@pytest.mark.sandbox
def test_tasks_of_a_file_get_images_of_their_own():
  """Drills have the plain one; the others need not be there before."""
  (drill,) = itertools.islice(drills(0, held_out=False), 1)
  image = Image(without=("this",))
  other = Task(
    task_id="other",
    kind="repair",
    prompt="",
    files={"f.py": "x = 1\n"},
    gold={},
    probe=Probe("f", ("import this",), ("! ModuleNotFoundError",), image=image),
    image=image,
  )

  async def verdicts():
    async with Pool(Bubblewrap(), size=1) as pool:
      sandboxes = rl._sandboxes(pool)
      for task in (drill, other):
        async with await start(sandboxes, task, solved=True) as sandbox:
          snapshot = await sandbox.snapshot()
        yield (await verify(sandboxes, snapshot, task.probe)).ok

  async def collected():
    return [verdict async for verdict in verdicts()]

  assert asyncio.run(collected()) == [True, True]
