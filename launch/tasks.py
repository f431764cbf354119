"""Makes tasks and validates them in sandboxes.

    python launch/tasks.py build --from=toolz --from=boltons --out=repair.jsonl
    python launch/tasks.py build --from=micro --count=500 --out=micro.jsonl

Each task that is kept was solved by its gold state and failed by its untouched
state, both twice. The others are counted by reason.
"""

import asyncio
import collections
import itertools
import sys

from absl import app, flags

from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.sandbox import SandboxError
from composer_jax.envs.tasks import implement, micro, repair, save
from composer_jax.envs.tasks.validate import build

_FROM = flags.DEFINE_multi_string(
  "from", [], "'micro', or the import name of a package; may be repeated."
)
_OUT = flags.DEFINE_string("out", "tasks.jsonl", "The file to write.")
_COUNT = flags.DEFINE_integer("count", 200, "Candidates of a source at most.")
_SEED = flags.DEFINE_integer("seed", 0, "Chooses drills and faults.")
_LANES = flags.DEFINE_integer("lanes", 2, "Sandboxes that work at a time.")


def main(argv) -> None:
  """Runs the verb on the command line."""
  if argv[1:] != ["build"] or not _FROM.value:
    sys.exit("Usage: tasks.py build --from=micro|PACKAGE [--out=FILE].")
  try:
    kept, dropped = asyncio.run(_build())
  except (ModuleNotFoundError, SandboxError, ValueError) as error:
    sys.exit(str(error))
  save(_OUT.value, kept)
  print(f"{len(kept)} tasks in {_OUT.value}")
  for reason, count in dropped.most_common():
    print(f"{count} dropped: {reason}")


async def _build():
  provider = Bubblewrap()
  kept, dropped = [], collections.Counter()
  for source in _FROM.value:
    if source == "micro":
      candidates = micro.generate(_SEED.value)
    else:
      candidates = itertools.chain(
        repair.generate(source, _SEED.value), implement.generate(source)
      )
    candidates = itertools.islice(candidates, _COUNT.value)
    more, others = await build(provider, candidates, _LANES.value)
    kept += more
    dropped += others
  return kept, dropped


if __name__ == "__main__":
  app.run(main)
