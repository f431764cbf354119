"""From a command line to a configuration, with one-line errors.

    python launch/train.py --config=configs/x.py:argument --config.a.b=1 \
        --workdir=/tmp/run

A config file has a `get_config(argument)`, plain Python, that returns a
`ConfigDict`. `run` loads it, applies the overrides, and calls a binary's
`main`; `from_config` turns it into the frozen dataclass that the library takes.
What a user gets wrong ends in one line on stderr and exit code 2. JAX is not
needed here, and not imported.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import dacite
from absl import app, flags
from ml_collections import ConfigDict, config_flags

_OURS = ("__main__", "launch", "composer_jax", "pallas_kernels")

# `--help` shows the flags of the binary's own module: let `run` count as that.
flags.disclaim_key_flags()


class ConfigError(ValueError):
  """A user's mistake in a configuration; the message is one sentence."""


def run(
  main: Callable[[ConfigDict, str], None],
  *,
  mistakes: tuple[type[Exception], ...] = (),
  optional: bool = False,
) -> None:
  """Runs a binary: parses flags, then calls `main(config, workdir)`; exits.

  Args:
    main: what to do; gets the config, locked, with all overrides applied, and
      the working directory as it was given.
    mistakes: exceptions that mean a user's mistake, beside `ConfigError`, where
      our own code raises them. They are told in one line without a traceback;
      one that comes from inside a library is a fault, and keeps its traceback.
    optional: whether both may be left out, and are then None.
  """
  flags.DEFINE_string(
    "config",
    None,
    "A config file, configs/x.py or configs/x.py:argument. Override a value "
    "with --config.name=value.",
  )
  flags.DEFINE_string("workdir", None, "Where the run keeps its files.")

  def call(arguments):
    with one_line_errors(ConfigError, *mistakes):
      main(*arguments)

  app.run(call, flags_parser=functools.partial(_parse, optional=optional))


@contextlib.contextmanager
def one_line_errors(*types: type[Exception], code: int = 2) -> Iterator[None]:
  """Prints exceptions of these types as one line, and exits with `code`.

  Only those that our own code raises, or absl for its flags, or the operating
  system for a path.
  """
  try:
    yield
  except types as error:
    if not isinstance(error, ConfigError | flags.Error | OSError):
      *_, (frame, _) = traceback.walk_tb(error.__traceback__)
      if frame.f_globals["__name__"].partition(".")[0] not in _OURS:
        raise
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    raise SystemExit(code) from None


def define_fields[T](cls: type[T], **defaults: Any) -> Callable[[], T]:
  """Defines a flag for each field of a dataclass of plain values.

  Args:
    cls: the dataclass; all its fields have defaults. Each flag's help is what
      the class's docstring says of the attribute.
    **defaults: other than the class's.

  Returns:
    To be called once flags are parsed: makes the object. Raises ConfigError if
    the class refuses its values.
  """
  helps = _attribute_docs(cls)
  holders = {}
  for field in dataclasses.fields(cls):
    default = defaults.get(field.name, field.default)
    if isinstance(default, bool):
      define = flags.DEFINE_bool
    elif isinstance(default, int):
      define = flags.DEFINE_integer
    elif isinstance(default, float):
      define = flags.DEFINE_float
    elif isinstance(default, tuple):
      define = flags.DEFINE_list
    else:
      define = flags.DEFINE_string
    holders[field.name] = define(field.name, default, helps[field.name])

  def make() -> T:
    values = {}
    for field in dataclasses.fields(cls):
      value = holders[field.name].value
      if isinstance(value, list):
        try:
          value = tuple(int(item) for item in value)
        except ValueError:
          raise ConfigError(
            f"--{field.name} must be integers with commas between; got"
            f" {','.join(value)!r}"
          ) from None
      values[field.name] = value
    return from_config(cls, values)

  return make


def _attribute_docs(cls: type) -> dict[str, str]:
  """What the Attributes section of a docstring says of each."""
  section = inspect.getdoc(cls).partition("Attributes:\n")[2]
  entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
  return {name: " ".join(text.split()) for name, text in entries}


def _parse(
  argv: list[str], *, optional: bool
) -> tuple[ConfigDict | None, str | None]:
  with one_line_errors(ConfigError, flags.Error):
    overrides = [arg for arg in argv if re.match(r"--?(no)?config\.", arg)]
    positional = flags.FLAGS([arg for arg in argv if arg not in overrides])[1:]
    if positional:
      raise ConfigError(
        f"unexpected argument {positional[0]!r}; flags are --name=value"
      )
    for name in ("config", "workdir"):
      if flags.FLAGS[name].value is None and not optional:
        raise ConfigError(f"--{name} is missing: {flags.FLAGS[name].help}")
    if flags.FLAGS.config is None:
      if overrides:
        raise ConfigError(f"{overrides[0]} needs a --config to change")
      return None, flags.FLAGS.workdir
    config = load_config(flags.FLAGS.config)
    return _override(config, overrides), flags.FLAGS.workdir


def load_config(spec: str) -> ConfigDict:
  """Calls the `get_config` of a config file.

  Args:
    spec: "file.py", or "file.py:argument" for `get_config(argument)`.

  Raises:
    ConfigError: no such file, or `get_config` doesn't take the argument.
  """
  filename, *arguments = spec.split(":", 1)
  if not Path(filename).is_file():
    raise ConfigError(f"there is no config file {filename!r}")
  module_spec = importlib.util.spec_from_file_location("config", filename)
  if module_spec is None:
    raise ConfigError(f"{filename!r} is not a Python file")
  module = importlib.util.module_from_spec(module_spec)
  module_spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"{filename!r} has no function get_config")
  try:
    inspect.signature(module.get_config).bind(*arguments)
  except TypeError as error:
    raise ConfigError(
      f"--config={spec}: {error} of get_config; an argument follows a colon"
    ) from None
  try:
    return module.get_config(*arguments)
  except ValueError as error:
    raise ConfigError(f"--config={spec}: {error}") from error


def _override(config: ConfigDict, overrides: list[str]) -> ConfigDict:
  """Applies `--config.name=value` flags, parsed as the types of the values."""
  known = list(_flat_keys(config))
  for override in overrides:
    key = override.split("=", 1)[0].split(".", 1)[1]
    if key not in known:
      raise ConfigError(_no_such_key(key, known))
  values = flags.FlagValues()
  config_flags.DEFINE_config_dict(
    "config", config, flag_values=values, sys_argv=["", *overrides]
  )
  positional = values(["", *overrides])[1:]
  assert not positional, positional
  return values.config


def from_config[T](cls: type[T], config: ConfigDict | Mapping[str, Any]) -> T:
  """Builds a dataclass, nested ones included, and checks every type.

  Lists become tuples, and integers floats where a float is wanted.

  Args:
    cls: the dataclass.
    config: its values, by the fields' names; those with defaults may be absent.

  Raises:
    ConfigError: an unknown or missing key, a wrong type, or a value that the
      dataclass itself refuses with a ValueError.
  """
  values = _plain(config)
  known = set(_field_names(cls))
  for key in _flat_keys(values):
    parent = key.rpartition(".")[0]
    is_field_of_dataclass = not parent or any(
      name.startswith(f"{parent}.") for name in known
    )
    if key not in known and is_field_of_dataclass:
      raise ConfigError(_no_such_key(key, known))
  checks = dacite.Config(strict=True, type_hooks={float: _to_float})
  try:
    return dacite.from_dict(cls, values, checks)
  except (dacite.DaciteError, ValueError) as error:
    raise ConfigError(f"config: {_explain(error, checks)}") from error


def _explain(error: Exception, checks: dacite.Config) -> str:
  """What is wrong, where dacite says only that something is."""
  if not isinstance(error, dacite.WrongTypeError):
    return str(error)
  path, hint, value = error.field_path, error.field_type, error.value
  choices = typing.get_args(hint)
  if typing.get_origin(hint) is Literal:
    listed = ", ".join(map(repr, choices))
    return f"{path} must be one of {listed}, not {value!r}"
  members = [member for member in choices if dataclasses.is_dataclass(member)]
  if not (members and isinstance(value, Mapping)):
    return str(error)
  # The member that was meant has most of the names.
  meant = max(
    members, key=lambda cls: len(value.keys() & set(_field_names(cls)))
  )
  try:
    dacite.from_dict(meant, value, checks)
  except dacite.UnexpectedDataError as inner:
    names = ", ".join(map(repr, sorted(inner.keys)))
    return f"{path} has no key {names}, taken for a {meant.__name__}"
  except (dacite.DaciteError, ValueError) as inner:
    if isinstance(inner, dacite.DaciteFieldError):
      inner.update_path(path)
    return _explain(inner, checks)
  return str(error)


def _no_such_key(key: str, known: Iterable[str]) -> str:
  message = f"config has no key {key!r}"
  candidates = [name for name in known if not key.startswith(f"{name}.")]
  close = difflib.get_close_matches(key, candidates, n=1)
  return f"{message}; did you mean {close[0]!r}?" if close else message


def _flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
  """All keys, those of branches included: "model", "model.width", ..."""
  for name, value in values.items():
    yield prefix + name
    if isinstance(value, ConfigDict | Mapping):
      yield from _flat_keys(value, f"{prefix}{name}.")


def _field_names(cls: type, prefix: str = "") -> Iterator[str]:
  """The same for the fields of a dataclass, through `A | None` and the like."""
  for name, hint in typing.get_type_hints(cls).items():
    yield prefix + name
    for inner in (hint, *typing.get_args(hint)):
      if dataclasses.is_dataclass(inner):
        yield from _field_names(inner, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
  if isinstance(value, ConfigDict | Mapping):
    return {name: _plain(inner) for name, inner in value.items()}
  if isinstance(value, list | tuple):
    return tuple(_plain(inner) for inner in value)
  return value


def _to_float(value: Any) -> Any:
  is_int = isinstance(value, int) and not isinstance(value, bool)
  return float(value) if is_int else value
