"""Any package or checkout becomes an environment, and its tests verify."""

import asyncio
import dataclasses
import subprocess

import pytest

from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.tasks import Images, Task, sources, suites, trees
from composer_jax.envs.tasks.requirements import closure
from composer_jax.envs.tasks.sources import is_test
from composer_jax.envs.tasks.types import Suite, start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import verify

pytestmark = pytest.mark.sandbox

MODULE = '''\
import more_itertools


def clamp(x, low, high):
  """The nearest number from low to high."""
  if x < low:
    return low
  return min(x, high)


def pairs(items):
  """The items, two and two."""
  return list(more_itertools.chunked(items, 2))


def unused():
  """Nobody tests this."""
  return 1
'''
TESTS = """\
import random
import pytest
from calc.core import clamp, pairs

@pytest.fixture
def low(lowest):
  return lowest

def test_inside(low): assert clamp(3, low, 5) == 3
def test_below(low): assert clamp(-3, low, 5) == low
@pytest.mark.parametrize("x", [5, 9])
def test_above(low, x): assert clamp(x, low, 5) == 5
def test_pairs(): assert pairs("abc") == [["a", "b"], ["c"]]
def test_broken(): assert clamp(1, 2, 3) == 1
"""
FILES = {
  "pyproject.toml": '[project]\nname="calc"\ndependencies=["more-itertools"]\n',
  "src/calc/__init__.py": "",
  "src/calc/core.py": MODULE,
  "tests/test_core.py": TESTS,
  "tests/conftest.py": (
    "import pytest\n@pytest.fixture\ndef lowest(): return 0\n"
  ),
  ".github/x.py": "",
  "ignored.py": "",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  folder = tmp_path_factory.mktemp("calc")
  for path, text in FILES.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
  (folder / ".gitignore").write_text("ignored.py\n")
  for command in (["init", "-q"], ["add", "."]):
    subprocess.run(["git", *command], cwd=folder, check=True)
  return sources.find(str(folder))


@pytest.fixture(scope="module")
def provider():
  limits = dataclasses.replace(LIMITS, wall_s=60.0, memory_bytes=256 << 20)
  return Images(
    lambda image: Bubblewrap(limits, image.distributions, image.without)
  )


def test_a_checkout_is_split_into_repository_and_tests(checkout):
  assert checkout.root == "src"
  assert set(checkout.files) == {
    "pyproject.toml",
    "src/calc/__init__.py",
    "src/calc/core.py",
  }
  assert set(checkout.tests) == {"tests/test_core.py", "tests/conftest.py"}
  assert checkout.modules["src/calc/core.py"] == ("calc.core", MODULE)
  names = {pin.split("==")[0] for pin in checkout.image.distributions}
  assert {"more-itertools", "pytest", "pluggy"} <= names


def test_tests_are_known_by_place_and_name():
  tests = ["a/tests/x.py", "test/x.txt", "test_a.py", "b/a_test.py", "tests.py"]
  assert all(map(is_test, [*tests, "b/conftest.py"]))
  assert not any(map(is_test, ["a/testing/x.py", "a/contest.py", "attest.py"]))


@pytest.fixture(scope="module")
def tested(checkout, provider):
  return asyncio.run(suites.survey(provider, checkout))


@pytest.fixture(scope="module")
def kept(tested, provider):
  candidates = list(suites.generate(tested, per_function=3))
  kept, dropped = asyncio.run(build(provider, candidates))
  assert len(kept) + dropped.total() == len(candidates)
  return kept


def test_a_survey_says_which_tests_call_a_function(tested):
  assert tested.counts == {"passed": 5, "failed": 1}
  names = {
    name: {node.split("::")[1] for node in nodes}
    for name, nodes in tested.tests.items()
  }
  assert names["src/calc/core.py:clamp"] == {
    "test_inside",
    "test_below",
    "test_above[5]",
    "test_above[9]",
  }
  assert names["src/calc/core.py:pairs"] == {"test_pairs"}
  assert "src/calc/core.py:unused" not in names


def test_suites_make_tasks_that_hold(kept, provider):
  assert {(t.kind, t.task_id.split("-")[1]) for t in kept} >= {
    ("repair", "calc.core.clamp"),
    ("implement", "calc.core.clamp"),
    ("implement", "calc.core.pairs"),
  }
  task = next(t for t in kept if t.task_id.startswith("implement-calc.core.p"))
  assert task.probe.total == 1
  assert asyncio.run(verdict(provider, task, task.gold)).ok
  assert not asyncio.run(verdict(provider, task, {})).ok


async def verdict(provider, task, files):
  async with await start(provider, task) as sandbox:
    for path, text in files.items():
      await sandbox.write(path, text.encode())
    snapshot = await sandbox.snapshot()
  return await verify(provider, snapshot, task.probe)


def test_a_policy_sees_no_tests_and_can_import(kept, provider):
  async def look():
    async with await start(provider, kept[0]) as sandbox:
      found = await sandbox.exec(["find", "/work", "-type", "f"])
      ran = await sandbox.exec(["python", "-c", "import more_itertools"])
    return found.text, ran.ok

  text, ran = asyncio.run(look())
  assert "src/calc/core.py" in text and "test" not in text
  assert ran


CHEATS = {
  "nothing": {},
  "exit": {"src/calc/core.py": "import os; os._exit(0)"},
  "raise": {"src/calc/core.py": "raise SystemExit(0)"},
  "conftest": {
    "conftest.py": """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  report.outcome = "passed"
  return report
"""
  },
  "report_passes": {
    "src/calc/core.py": """
import _pytest.reports
made = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(kind, item, call):
  report = made(kind, item, call)
  report.outcome = "passed"
  return report
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
clamp = pairs = None
"""
  },
  "tests_of_its_own": {
    "tests/test_core.py": "def test_pairs(): pass\ndef test_inside(): pass\n"
  },
  "pytest_of_its_own": {"pytest.py": "import sys; sys.exit(0)"},
  "settings": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass_a_suite(kept, provider, name):
  task = next(t for t in kept if t.kind == "implement")
  found = asyncio.run(verdict(provider, task, CHEATS[name]))
  assert not found.ok and found.total == task.probe.total


def test_what_lies_beside_a_solution_does_not_harm_it(kept, provider):
  task = next(t for t in kept if t.kind == "implement")
  beside = {"json.py": "1 / 0", "pluggy.py": "1 / 0", "conftest.py": "1 / 0"}
  assert asyncio.run(verdict(provider, task, task.gold | beside)).ok


def test_tests_that_pass_at_times_make_no_tasks(checkout, provider):
  flaky = "import random\nfrom calc.core import unused\n" + "".join(
    f"def test_{i}(): assert unused() and random.random() < 0.5\n"
    for i in range(12)
  )
  source = dataclasses.replace(
    checkout, tests={"tests/test_flaky.py": flaky.encode()}
  )
  probe = Suite(
    source.keep_tests(),
    tuple(f"tests/test_flaky.py::test_{i}" for i in range(12)),
    source.root,
    source.image,
  )
  task = Task(
    task_id="t",
    kind="repair",
    prompt="p",
    files={},
    gold={},
    probe=probe,
    tree=source.keep(),
    image=source.image,
  )
  kept, dropped = asyncio.run(build(provider, [task]))
  assert not kept and dropped == {"the gold state fails": 1}


def test_the_standard_library_has_no_original_in_its_sandboxes(provider):
  source = sources.find("stdlib")
  assert "statistics.py" in source.files
  assert "test/test_statistics.py" in source.tests

  async def look():
    place = provider.of(source.image)
    async with await place.create(trees.get(source.keep())) as sandbox:
      code = "import statistics, pytest; print(statistics.__file__)"
      there = await sandbox.exec(["python", "-c", code])
      gone = await sandbox.exec(["python", "-P", "-c", code])
      found = await sandbox.exec(["find", "/image", "-name", "statistics*"])
    return there.text, gone.text, found.text

  there, gone, found = asyncio.run(look())
  assert there == "/work/statistics.py\n"
  assert "No module named 'statistics'" in gone
  assert not found


def test_versions_are_pinned_and_other_extras_left_out():
  assert closure([]) == ()
  pins = closure(["pytest", 'nothing; python_version < "3"'], ["Pygments"])
  assert [pin.split("==")[0] for pin in pins] == [
    "iniconfig",
    "packaging",
    "pluggy",
    "pytest",
  ]
  with pytest.raises(ModuleNotFoundError, match="check the name"):
    closure(["no-such-package-at-all"])


def test_no_image_holds_the_original_as_a_dependency(tmp_path):
  (tmp_path / "test_it.py").write_text("")
  (tmp_path / "pyproject.toml").write_text('[project]\nname = "Iniconfig"\n')
  (tmp_path / "iniconfig.py").write_text("x = 1\n")
  image = sources.find(str(tmp_path)).image
  names = {pin.split("==")[0] for pin in image.distributions}
  assert "pytest" in names and "iniconfig" not in names


def test_what_can_be_no_source_is_explained(tmp_path):
  (tmp_path / "README").write_text("No code.")
  with pytest.raises(ModuleNotFoundError, match="no Python files"):
    sources.find(str(tmp_path))
  (tmp_path / "a.py").write_text("x = '" + "a" * (49 << 20) + "'")
  with pytest.raises(ValueError, match="a sandbox room for"):
    sources.find(str(tmp_path))
