"""Runs reinforcement learning: all of it on one machine, or one part of it.

`launch/train.py` calls this for a config that is an `RlConfig`. Without --role
it starts the parts as processes, watches them, and reports at the end:

    learner     composer_jax.rl.loop
    host-N      launch/serve.py, which follows the chain of weights
    worker-N    composer_jax.rl.worker

Logs are in <workdir>/logs. Whichever part is killed is started again; if this
process is, the others end, and the same command goes on.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from composer_jax.data import Tokenizer
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.image import PLAIN
from composer_jax.envs.sandbox import Limits, Provider, SandboxError
from composer_jax.envs.sandbox import Pool as SandboxPool
from composer_jax.envs.tasks import Images
from composer_jax.fleet.local import Fleet, Program
from composer_jax.rl import report
from composer_jax.rl import tasks as task_lib
from composer_jax.rl.config import RlConfig
from composer_jax.rl.play import play_task
from composer_jax.rl.rollout import RolloutConfig, Rollouts
from composer_jax.rl.sessions import Pool, PoolConfig
from composer_jax.rl.spool import Spool
from composer_jax.rl.trajectory import Sampling
from composer_jax.rl.watch import Watch, weights_digest
from composer_jax.rl.worker import Host, Worker, read_json, write_json
from composer_jax.serving.server import ServerConfig

_log = logging.getLogger(__name__)
_REPOSITORY = Path(__file__).resolve().parents[1]
_MODEL = ServerConfig.model
_LOOK_S = 0.2
_WATCH_S = 2.0
# How often hosts look for a new version, seconds.
_FOLLOW_S = 0.2
# For hosts to catch up with the last version.
_CATCH_UP_S = 180.0


def run(config: RlConfig, workdir: str, arguments: list[str]) -> bool:
  """Starts all parts, and waits until the run is done.

  Args:
    config: what to do.
    workdir: where to leave it.
    arguments: of this command, for the parts.

  Returns:
    Whether it is done; False if a signal stopped it.

  Raises:
    FleetError: a part can't be kept running.
    ValueError: the config doesn't fit the tasks.
  """
  folder = Path(workdir).expanduser().absolute()
  folder.mkdir(parents=True, exist_ok=True)
  _check(config)
  key = secrets.token_hex(16)
  programs = _programs(config, folder, arguments, key)
  hosts = [p.name for p in programs if p.name.startswith("host")]
  (folder / "result.json").unlink(missing_ok=True)
  watch = Watch(folder)
  with (
    _StopFlag() as stop,
    contextlib.closing(watch),
    Fleet(folder, programs) as fleet,
    _shown(folder) as show,
  ):
    watched = 0.0
    while not fleet.ended("learner") and not stop.received:
      fleet.look()
      if time.monotonic() - watched > _WATCH_S:
        watched = time.monotonic()
        urls = {name: fleet.ready(name) for name in hosts}
        pids = {p.name: fleet.pid(p.name) for p in programs}
        show(watch, watch.look(urls, pids, fleet.restarts))
      time.sleep(_LOOK_S)
    result = read_json(folder / "result.json")
    if result is None:
      print("Stopped; the same command resumes", flush=True)
      return False
    digests = _digests(fleet, hosts, key, result["weights_digest"], stop)
    end = {"digests": digests, "restarts": fleet.restarts}
    write_json(folder / "fleet_end.json", end)
  report.write(folder)
  return True


def learn(config: RlConfig, workdir: str) -> None:
  """The learner's process."""
  from composer_jax.rl.loop import learn as loop

  loop(config, workdir)


def rollouts(config: RlConfig, workdir: str, name: str) -> None:
  """A worker's process."""
  with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(_rollouts(config, Path(workdir).expanduser(), name))


async def _rollouts(config, folder, name):
  import aiohttp  # Of the extra `serve`.

  asyncio.get_running_loop().add_signal_handler(
    signal.SIGTERM, asyncio.current_task().cancel
  )
  train, held_out = task_lib.load(config)
  tasks = train | held_out
  dialect, stops = task_lib.speech(config, Tokenizer.load(config.tokenizer))
  ready = folder / "ready"
  async with (
    aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    SandboxPool(Bubblewrap(), size=min(4, config.max_rollouts)) as pool,
  ):
    sandboxes = _sandboxes(pool)
    hosts = [
      Host(client, ready / f"host-{i}", _MODEL, stops)
      for i in range(config.hosts)
    ]
    runner = Rollouts(
      Pool(hosts, PoolConfig(attempts=8, request_s=config.rollout_s)),
      RolloutConfig(
        sampling=Sampling(temperature=config.temperature),
        max_rollouts=config.max_rollouts,
        rollout_s=config.rollout_s,
      ),
    )

    def play_of(task_id):
      return play_task(
        sandboxes,
        dialect,
        tasks[task_id],
        config.rewards,
        config.budget,
        tool_latency_s=config.tool_latency_s,
      )

    (folder / "status").mkdir(exist_ok=True)
    await Worker(
      Spool(folder / "spool"),
      hosts,
      runner,
      play_of,
      folder / "status" / f"{name}.json",
    ).run()


def _sandboxes(pool: Provider) -> Images:
  """Of all images; the plain one's come from `pool`."""
  return Images(
    lambda image: (
      pool
      if image == PLAIN
      else Bubblewrap(Limits(), image.distributions, image.without)
    )
  )


def _check(config: RlConfig) -> None:
  """Finds a user's mistakes before any process is started."""
  Tokenizer.load(config.tokenizer)
  task_lib.load(config)
  try:
    Bubblewrap()
  except SandboxError as error:
    raise ValueError(str(error)) from error


def _programs(config, folder, arguments, key) -> list[Program]:
  train = [sys.executable, str(_REPOSITORY / "launch/train.py"), *arguments]
  rows = -(-config.workers * config.max_rollouts // config.hosts)
  serve = [
    sys.executable,
    str(_REPOSITORY / "launch/serve.py"),
    f"--store={config.store or folder / 'chain'}",
    f"--tokenizer={Path(config.tokenizer).expanduser().absolute()}",
    "--port=0",
    f"--interval_s={_FOLLOW_S}",
    f"--max_len={config.budget.tokens}",
    f"--contexts={config.budget.tokens}",
    f"--max_rows={rows}",
    "--drain_s=0.5",
  ]
  # Compiled once for all lives of all hosts.
  cache = {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  return [
    Program(
      "learner",
      [*train, "--role=learner"],
      ends=True,
      env=cache,
      cores=config.learner_cores,
    ),
    *(
      Program(
        f"host-{i}",
        [*serve, f"--workdir={folder / 'hosts' / str(i)}"],
        env={**cache, "COMPOSER_ADMIN_KEY": key},
        ready=r"Serving version \d+ as .* at (http\S+)",
        cores=config.rollout_cores,
      )
      for i in range(config.hosts)
    ),
    *(
      Program(
        f"worker-{i}",
        [*train, "--role=rollouts", f"--name=worker-{i}"],
        env={"JAX_PLATFORMS": "cpu"},
        cores=config.rollout_cores,
      )
      for i in range(config.workers)
    ),
  ]


def _digests(fleet, hosts, key, wanted, stop) -> dict[str, str]:
  """What each host serves at the end, once it is what the learner has."""
  found = dict.fromkeys(hosts, "")
  give_up = time.monotonic() + _CATCH_UP_S
  while time.monotonic() < give_up and not stop.received:
    fleet.look()
    for name in hosts:
      url = fleet.ready(name)
      if url and found[name] != wanted:
        with contextlib.suppress(OSError):
          found[name] = weights_digest(url, key)
    if all(digest == wanted for digest in found.values()):
      break
    time.sleep(_LOOK_S)
  return found


class _StopFlag:
  """Notes SIGTERM and Ctrl-C; a second Ctrl-C interrupts."""

  def __init__(self):
    self.received = False
    self._previous = {}

  def __enter__(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number, frame):
    del frame
    if self.received and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.received = True
    os.write(2, b"Stopping all parts\n")


@contextlib.contextmanager
def _shown(folder: Path):
  """How a look is shown: a live picture, or the learner's log as it grows."""
  if sys.stdout.isatty():
    from rich.live import Live

    with Live(auto_refresh=False) as live:
      yield lambda watch, sight: live.update(watch.picture(sight), refresh=True)
    return
  log = folder / "logs" / "learner.log"
  place = log.stat().st_size if log.exists() else 0

  def show(watch, sight):
    nonlocal place
    del watch, sight
    with log.open("rb") as file:
      file.seek(place)
      text = file.read()
    place += len(text)
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()

  yield show
