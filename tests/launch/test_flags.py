import dataclasses
import functools
import subprocess
import sys
import textwrap
from typing import Literal

import pytest
from absl import flags as absl_flags
from ml_collections import ConfigDict

from launch import flags

MAIN = '''
  """What this binary is for."""
  import sys
  from launch import flags

  def main(config, workdir):
    if config.steps < 0:
      raise LookupError(f"steps={config.steps} \\n is negative")
    if config.steps == 0:
      raise RuntimeError("a bug")
    print(config.to_json(), workdir, "jax" in sys.modules)

  flags.run(main, mistakes=(LookupError,))
'''
CONFIG = """
  from ml_collections import ConfigDict

  def get_config(size="small"):
    if size not in ("small", "large"):
      raise ValueError(f"unknown size {size!r}; there are 'small', 'large'")
    return ConfigDict({
      "steps": 3,
      "rate": 1.0,
      "model": {"width": 4 if size == "small" else 8, "tied": True},
      "sizes": (1, 2),
    })
"""


@pytest.fixture
def files(tmp_path):
  (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
  (tmp_path / "config.py").write_text(textwrap.dedent(CONFIG))
  (tmp_path / "plain.py").write_text("def get_config():\n  return 1\n")
  return tmp_path


def launch(folder, *arguments):
  return subprocess.run(
    [sys.executable, folder / "main.py", *arguments],
    capture_output=True,
    text=True,
    timeout=60,
    cwd=folder,
  )


def test_file_argument_and_overrides(files):
  result = launch(
    files,
    "--config=config.py:large",
    "--workdir=gs://bucket/run",
    "--config.steps=7",
    "--config.rate=2",
    "--noconfig.model.tied",
    "--config.sizes=(3, 4, 5)",
  )
  assert result.stderr == ""
  assert result.stdout == (
    '{"steps": 7, "rate": 2.0, "model": {"width": 8, "tied": false},'
    ' "sizes": [3, 4, 5]} gs://bucket/run False\n'
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      "--config=config.py --workdir=w --config.model.widht=3",
      "config has no key 'model.widht'; did you mean 'model.width'?",
    ),
    (
      "--config=config.py --workdir=w --config.steps=abc",
      "flag --config.steps=abc: invalid literal for int() with base 10: 'abc'",
    ),
    ("--config=no.py --workdir=w", "there is no config file 'no.py'"),
    (
      "--config=config.py",
      "--workdir is missing: Where the run keeps its files.",
    ),
    (
      "--config=config.py:big --workdir=w",
      "--config=config.py:big: unknown size 'big'; there are 'small', 'large'",
    ),
    (
      "--config=plain.py:large --workdir=w",
      "--config=plain.py:large: too many positional arguments of get_config;"
      " an argument follows a colon",
    ),
    (
      "--config=config.py --workdr=w",
      "Unknown command line flag 'workdr'. Did you mean: workdir ?",
    ),
    (
      "--config=config.py --workdir=w --config.steps 5",
      "unexpected argument '5'; flags are --name=value",
    ),
    (
      "--config=config.py --workdir=w --config.steps=-1",
      "steps=-1 is negative",
    ),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(files, arguments, message):
  result = launch(files, *arguments.split())
  assert (result.returncode, result.stdout) == (2, "")
  assert result.stderr == f"error: {message}\n"


def test_a_bug_keeps_its_traceback(files):
  result = launch(
    files, "--config=config.py", "--workdir=w", "--config.steps=0"
  )
  assert result.returncode == 1
  assert "Traceback" in result.stderr
  assert "a bug" in result.stderr


def test_help_shows_both_flags(files):
  result = launch(files, "--help")
  assert "What this binary is for." in result.stdout
  assert "--config:" in result.stdout
  assert "--workdir:" in result.stdout


@dataclasses.dataclass(frozen=True)
class Limits:
  """How much.

  Longer, with words: that aren't attributes.

  Attributes:
    rows: that run
      together.
    rate: a second.
    name: of it.
    sizes: in bytes.
    loud: whether it says so.
    way: of two.
  """

  rows: int = 2
  rate: float = 0.5
  name: str = "a"
  sizes: tuple[int, ...] = ()
  loud: bool = True
  way: Literal["in", "out"] = "in"

  def __post_init__(self):
    if self.rows < 1:
      raise ValueError("rows must be at least 1.")


@pytest.fixture
def limits(monkeypatch):
  """Parses arguments by the flags of `Limits`, with another default for one."""
  values = absl_flags.FlagValues()
  for name in ("bool", "integer", "float", "list", "string"):
    define = getattr(absl_flags, f"DEFINE_{name}")
    monkeypatch.setattr(
      flags.flags,
      f"DEFINE_{name}",
      functools.partial(define, flag_values=values),
    )
  make = flags.define_fields(Limits, rows=3)

  def parse(*arguments):
    values(["", *arguments])
    return make()

  parse.flags = values
  return parse


def test_fields_become_flags(limits):
  assert limits() == Limits(rows=3)
  got = limits(
    "--rows=7", "--rate=2", "--name=b", "--sizes=3,4", "--noloud", "--way=out"
  )
  assert got == Limits(7, 2.0, "b", (3, 4), False, "out")
  assert type(got.rate) is float
  assert limits("--sizes=").sizes == ()
  helps = {name: limits.flags[name].help for name in ("rows", "way")}
  assert helps == {"rows": "that run together.", "way": "of two."}


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--rows=0", "^config: rows must be at least 1.$"),
    ("--sizes=1,x", "^--sizes must be integers with commas .* '1,x'$"),
    ("--way=up", "^config: way must be one of 'in', 'out', not 'up'$"),
  ],
)
def test_fields_refuse_what_the_class_does(limits, argument, message):
  with pytest.raises(flags.ConfigError, match=message):
    limits(argument)


@dataclasses.dataclass(frozen=True)
class Attention:
  heads: int
  kind: Literal["grouped", "latent"] = "grouped"


@dataclasses.dataclass(frozen=True)
class Pooling:
  window: int
  stride: int = 1

  def __post_init__(self):
    if self.window % self.stride:
      raise ValueError(f"stride={self.stride} must divide {self.window}")


@dataclasses.dataclass(frozen=True)
class Model:
  width: int
  attention: Attention
  mixture: Attention | None = None
  mixer: Attention | Pooling | None = None
  sizes: tuple[int, ...] = ()
  weights: dict[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.width % self.attention.heads:
      raise ValueError("width must be a multiple of attention.heads")


@dataclasses.dataclass(frozen=True)
class Run:
  model: Model
  rate: float = 1.0
  limit: float | None = None


def test_from_config_builds_nested_dataclasses():
  config = ConfigDict(
    {
      "model": {
        "width": 4,
        "attention": {"heads": 2},
        "mixture": {"heads": 1, "kind": "latent"},
        "sizes": [1, 2],
        "weights": {"any": 1},
      },
      "rate": 2,
      "limit": 3,
    }
  )
  run = flags.from_config(Run, config)
  assert run == Run(
    model=Model(
      width=4,
      attention=Attention(heads=2),
      mixture=Attention(heads=1, kind="latent"),
      sizes=(1, 2),
      weights={"any": 1.0},
    ),
    rate=2.0,
    limit=3.0,
  )
  assert [type(x) for x in (run.rate, run.limit)] == [float, float]
  assert hash(run.model.sizes) == hash((1, 2))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attention.haeds": 2}, "no key 'model.attention.haeds'; did you mean"),
    ({"mixture": {"haeds": 1}}, "'model.mixture.haeds'; did you mean"),
    ({"zzzzzzzzz": 2}, "config has no key 'model.zzzzzzzzz'$"),
    ({"width": "4"}, 'field "model.width" - should be "int" instead of'),
    ({"width": 4.0}, 'field "model.width" - should be "int" instead of'),
    ({"sizes": "12"}, 'field "model.sizes"'),
    (
      {"attention.kind": "other"},
      "config: model.attention.kind must be one of 'grouped', 'latent', not",
    ),
    ({"mixer": {"heads": 1, "kind": "x"}}, "model.mixer.kind must be one of"),
    ({"mixer": {"window": 5, "stride": 2}}, "^config: stride=2 must divide 5$"),
    ({"mixer": {"stride": 2}}, 'missing value for field "model.mixer.window"'),
    (
      {"mixer": {"window": "5"}},
      'field "model.mixer.window" - should be "int"',
    ),
    (
      {"mixer": {"window": 5, "stride": 1, "kind": "latent"}},
      "model.mixer has no key 'kind', taken for a Pooling",
    ),
    ({"attention": {}}, 'missing value for field "model.attention.heads"'),
    ({"width": 3}, "width must be a multiple of attention.heads"),
  ],
)
def test_from_config_refuses(changes, message):
  config = {"model": {"width": 4, "attention": {"heads": 2}}}
  for key, value in changes.items():
    *parents, name = key.split(".")
    target = config["model"]
    for parent in parents:
      target = target[parent]
    target[name] = value
  with pytest.raises(flags.ConfigError, match=message):
    flags.from_config(Run, config)
