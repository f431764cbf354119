"""Trains a model: mid-training or reinforcement learning, as the config says.

    python launch/train.py --config=configs/midtrain_tiny.py --workdir=runs/tiny
    python launch/train.py --config=configs/midtrain_tiny.py:runlocal \
        --config.optimizer.learning_rate=1e-3 --workdir=/tmp/run
    python launch/train.py --config=configs/rl_tiny.py --workdir=runs/rl

The same command goes on where the last checkpoint was taken. For a notebook:
`from launch.train import main`.

On several hosts, every host runs the same command with --coordinator: "auto"
where a cluster manager tells JAX who is who, or host:port with --num_processes
and --process_id.
"""

import logging
import sys

import jax
from absl import flags
from absl import logging as absl_logging
from ml_collections import ConfigDict

from composer_jax.fleet.local import FleetError
from composer_jax.training.config import TrainConfig
from composer_jax.training.loop import Result, train
from composer_jax.training.meter import NonFiniteLossError
from launch.flags import ConfigError, from_config, run

_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, or 'auto'; see above."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Of this run.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "From 0.")
_PROFILE = flags.DEFINE_string(
  "profile",
  None,
  "FIRST:LAST, a window of steps to trace into workdir; steps count from 1.",
)
_ROLE = flags.DEFINE_enum(
  "role",
  "all",
  ["all", "learner", "rollouts"],
  "Of reinforcement learning: one part of it alone; see launch/rl.py.",
)
_NAME = flags.DEFINE_string(
  "name", "worker-0", "Of a worker, with --role=rollouts; unique in the run."
)


def main(
  config: ConfigDict, workdir: str, *, profile: tuple[int, int] | None = None
) -> Result:
  """Trains as `config` says; see `composer_jax.training.loop`."""
  setup_logging()
  return train(from_config(TrainConfig, config), workdir, profile=profile)


def setup_logging(*, alone: bool = False) -> None:
  """Our lines on the terminal, of process 0 only, and others' warnings.

  Args:
    alone: this process is the only one; JAX, which knows, isn't asked, since it
      would take the devices.
  """
  absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax says much
  logging.basicConfig(
    format="%(asctime)s %(message)s",
    datefmt="%H:%M:%S",
    level=logging.WARNING,
    force=True,
  )
  quiet = not alone and jax.process_index() != 0
  level = logging.WARNING if quiet else logging.INFO
  for package in ("composer_jax", "launch"):
    logging.getLogger(package).setLevel(level)


def _main(config: ConfigDict, workdir: str) -> None:
  if "objective" in config:
    _reinforce(config, workdir)
    return
  _initialize_processes()
  main(config, workdir, profile=_window(_PROFILE.value))


def _reinforce(config: ConfigDict, workdir: str) -> None:
  """The part of reinforcement learning that --role names."""
  from composer_jax.rl.config import RlConfig
  from launch import rl

  setup_logging(alone=True)
  rl_config = from_config(RlConfig, config)
  match _ROLE.value:
    case "all":
      rl.run(rl_config, workdir, sys.argv[1:])
    case "learner":
      rl.learn(rl_config, workdir)
    case "rollouts":
      rl.rollouts(rl_config, workdir, _NAME.value)


def _initialize_processes() -> None:
  """Joins the other processes of this run, if the flags speak of any."""
  place = (_NUM_PROCESSES.value, _PROCESS_ID.value)
  if _COORDINATOR.value in (None, "auto"):
    if place != (None, None):
      raise ConfigError(
        "--num_processes and --process_id go with --coordinator=HOST:PORT"
      )
    if _COORDINATOR.value == "auto":
      try:
        jax.distributed.initialize()
      except (ValueError, RuntimeError) as error:
        raise ConfigError(
          "--coordinator=auto found no cluster manager that tells who is who:"
          " give HOST:PORT, --num_processes and --process_id"
        ) from error
  elif None in place:
    raise ConfigError(
      f"--coordinator={_COORDINATOR.value} needs --num_processes and"
      " --process_id, too"
    )
  else:
    jax.distributed.initialize(_COORDINATOR.value, *place)


def _window(text: str | None) -> tuple[int, int] | None:
  """FIRST:LAST as two numbers."""
  if text is None:
    return None
  first, _, last = text.partition(":")
  if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
    raise ConfigError(
      f"--profile must be FIRST:LAST, steps counted from 1; got {text!r}"
    )
  return int(first), int(last)


# What a user can get wrong, beside the config itself.
MISTAKES = (
  *(ValueError, OSError, ImportError),
  *(NonFiniteLossError, FleetError),
)

if __name__ == "__main__":
  run(_main, mistakes=MISTAKES)
