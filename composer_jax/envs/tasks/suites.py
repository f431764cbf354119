"""Tasks whose hidden tests are a package's own test suite.

First the whole suite runs, in sandboxes, and says which functions of the
repository each test calls. A function that tests call can get a fault, or lose
its body; its hidden test is those tests. Faults that none of them notices are
dropped when the task is validated.
"""

import asyncio
import collections
import dataclasses
import hashlib
from collections.abc import Iterator

from composer_jax.envs.sandbox import Provider
from composer_jax.envs.tasks import implement, repair, trees
from composer_jax.envs.tasks.examples import functions
from composer_jax.envs.tasks.sources import Source, is_test
from composer_jax.envs.tasks.types import Suite, Task
from composer_jax.envs.tasks.verify import job_of, run_jobs, sandbox_for

# Enough to notice a fault, and few and quick enough to run a thousand times.
_MAX_TESTS = 16
_MAX_TEST_S = 0.5
_FILE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Tested:
  """A repository and what its suite says about it.

  Attributes:
    source: the repository.
    tests: "path:function" -> the tests that call it and pass, quickest first.
    counts: of tests, by outcome.
  """

  source: Source
  tests: dict[str, tuple[str, ...]]
  counts: collections.Counter[str]


async def survey(provider: Provider, source: Source, lanes: int = 2) -> Tested:
  """Runs a repository's suite, file by file.

  Args:
    provider: of sandboxes.
    source: the repository.
    lanes: sandboxes that work at a time.

  Raises:
    SandboxError: a sandbox failed.
  """
  probe = Suite(source.keep_tests(), (), source.root, source.image)
  tree = trees.get(source.keep())
  files = [path for path in sorted(source.tests) if _holds_tests(path)]
  gate = asyncio.Semaphore(lanes)

  async def run(path):
    job = job_of(probe, nodes=[path], files={}, trace=True, wall_s=_FILE_S)
    async with gate, await sandbox_for(provider, probe, tree) as sandbox:
      (given,), _ = await run_jobs(sandbox, [job])
    return given

  quick: dict[str, dict[str, float]] = collections.defaultdict(dict)
  counts: collections.Counter[str] = collections.Counter()
  for given in await asyncio.gather(*map(run, files)):
    if not isinstance(given, dict) or not given:
      counts["files that don't run"] += 1
      continue
    for node, (outcome, seconds, called) in given.items():
      counts[outcome or "no outcome"] += 1
      if outcome == "passed" and seconds <= _MAX_TEST_S:
        for name in called:
          quick[name][node] = seconds
  tests = {
    name: tuple(sorted(found, key=lambda node: (found[node], node)))
    for name, found in quick.items()
  }
  return Tested(source, tests, counts)


def generate(
  tested: Tested, seed: int = 0, per_function: int = 2
) -> Iterator[Task]:
  """Candidates of both kinds.

  Args:
    tested: what to make them of.
    seed: chooses the faults.
    per_function: at most so many repairs of one function.
  """
  source = tested.source
  tree, suite = source.keep(), source.keep_tests()
  for path, (module, text) in source.modules.items():
    for name, function in functions(text):
      nodes = tested.tests.get(f"{path}:{name}", ())[:_MAX_TESTS]
      if not nodes:
        continue
      probe = Suite(suite, nodes, source.root, source.image)
      broken = [
        ("repair", repair.prompt(name, path, function), mutant)
        for mutant in repair.some(text, function, seed, per_function)
      ]
      empty = implement.emptied(text, function)
      if empty is not None:
        broken.append(("implement", implement.prompt(name, path), empty))
      for kind, prompt, changed in broken:
        content = f"{path} {name} {changed} {nodes}".encode()
        short = hashlib.sha256(content).hexdigest()[:12]
        yield Task(
          task_id=f"{kind}-{module}.{name}-{short}",
          kind=kind,
          prompt=prompt,
          files={path: changed},
          gold={path: text},
          probe=probe,
          tree=tree,
          image=source.image,
        )


def _holds_tests(path: str) -> bool:
  name = path.rsplit("/", 1)[-1]
  return is_test(name) and name != "conftest.py"
