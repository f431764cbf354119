"""Serves a model over HTTP, as OpenAI's clients expect it.

What a run has trained, by its latest checkpoint and its own tokenizer:

    python launch/serve.py --config=configs/midtrain_tiny.py --workdir=runs/tiny

Or the newest version of a chain, and every later one as it comes:

    python launch/serve.py --store=/shared/chain --tokenizer=tokenizer.json

The model's shape is then that of --config, or what the chain's versions say
under "model" in their metadata. --workdir, if given, keeps a copy of what was
downloaded last, to restart from.

Or random weights, to try a client or a load:

    python launch/serve.py --config=configs/midtrain_tiny.py --random \
        --tokenizer=tokenizer.json

`composer_jax.serving.server` says what it answers to. SIGTERM stops it: open
requests get --drain_s seconds to end.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags
from ml_collections import ConfigDict

from composer_jax import shipping
from composer_jax.data import Tokenizer
from composer_jax.models import LanguageModel, ModelConfig
from composer_jax.serving import AsyncEngine, Engine, EngineConfig
from composer_jax.serving.follow import (
  FollowConfig,
  Follower,
  wait_for_first,
)
from composer_jax.serving.server import Server, ServerConfig
from composer_jax.serving.weights import serving_weights, weight_shapes
from composer_jax.training.checkpoint import read_meta, restore_parts
from composer_jax.training.config import TrainConfig
from launch import flags as our_flags
from launch.flags import ConfigError, from_config, run
from launch.train import setup_logging

_STORE = flags.DEFINE_string(
  "store", None, "A chain's place: a folder, or s3://, gs:// or az:// URL."
)
_RANDOM = flags.DEFINE_bool(
  "random",
  False,
  "Serve random weights of --config's model, to try things out.",
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", None, "A tokenizer.json; by default that of the run in workdir."
)
_ADMIN_KEY_FILE = flags.DEFINE_string(
  "admin_key_file",
  None,
  "A file with the key to /admin; by default the environment variable"
  " COMPOSER_ADMIN_KEY. Without either there is no /admin.",
)
_ENGINE = our_flags.define_fields(EngineConfig)
_SERVER = our_flags.define_fields(ServerConfig)
_FOLLOW = our_flags.define_fields(FollowConfig)

# Not __name__: as a program this is __main__, whose lines aren't shown.
_log = logging.getLogger("launch.serve")


class _Served(NamedTuple):
  """What there is to serve."""

  model: LanguageModel
  weights: Any
  version: int
  tokenizer: Tokenizer
  subscriber: shipping.Subscriber | None


def main(config: ConfigDict | None, workdir: str | None) -> None:
  """Serves until it is told to stop."""
  setup_logging()
  engine_config, server_config = _ENGINE(), _SERVER()
  follow_config, key = _FOLLOW(), _admin_key()
  train = from_config(TrainConfig, config) if config else None
  stop = threading.Event()
  with _stop_signals(stop.set):
    if _STORE.value:
      served = from_store(
        _STORE.value, train, workdir, follow_config.interval_s, stop
      )
    elif _RANDOM.value:
      served = from_nothing(train)
    else:
      served = from_run(train, workdir)
    if served is None:
      return
    engine = Engine(
      served.model, served.weights, engine_config, version=served.version
    )
    served = served._replace(weights=None)  # The engine has its own copy.
    _log.info("Compiling")
    engine.warm_up()
  if stop.is_set():
    return
  with AsyncEngine(engine) as front:
    server = Server(front, served.tokenizer, server_config, admin_key=key)
    asyncio.run(_serve(server, front, served.subscriber, follow_config))


async def _serve(server, front, subscriber, follow_config):
  stop = asyncio.Event()
  loop = asyncio.get_running_loop()
  with _stop_signals(lambda: loop.call_soon_threadsafe(stop.set)):
    await server.start()
    if subscriber:
      server.follower = Follower(
        subscriber,
        front.engine,
        follow_config,
        observe=server.metrics.swap,
      )
      server.metrics.follow(server.follower)
    print(
      f"Serving version {front.engine.version} as {server.config.model!r} at"
      f" {server.url}",
      flush=True,
    )
    try:
      while not stop.is_set() and front.healthy:
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(stop.wait(), 1.0)
      failed = not front.healthy
    finally:
      await server.stop()
      # A swap that waits would keep the follower waiting.
      await asyncio.to_thread(front.close)
      if server.follower:
        await asyncio.to_thread(server.follower.close)
  if failed:
    raise SystemExit("The engine failed; see above.")
  print("Stopped", flush=True)


def from_run(config: TrainConfig | None, workdir: str | None) -> _Served:
  """The latest checkpoint of a training run.

  Raises:
    ValueError: there is none, or it doesn't fit the config.
  """
  if config is None or workdir is None:
    raise ConfigError(
      "give --config and --workdir of a training run, or --store of a chain,"
      " or --config, --tokenizer and --random"
    )
  model = _model(config.model)
  folder = Path(workdir).expanduser() / "checkpoints"
  tokenizer = _run_tokenizer(config, Path(workdir))
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = {"params": model.param_shapes, "balance": model.balance_shapes}
  state = restore_parts(folder, _abstract(shapes, where))
  weights = serving_weights(model, state["params"], state["balance"])
  return _Served(model, weights, 0, tokenizer, None)


def from_nothing(config: TrainConfig | None) -> _Served:
  """Random weights, as training would begin with.

  Raises:
    ValueError: no config, or no tokenizer that fits it.
  """
  if config is None or not _TOKENIZER.value:
    raise ConfigError("--random needs the --config and --tokenizer of a model")
  model = _model(config.model)
  tokenizer = Tokenizer.load(_TOKENIZER.value)
  _check_vocabulary(tokenizer, model)
  params, balance = jax.jit(model.init)(jax.random.key(config.seed))
  weights = serving_weights(model, params, balance)
  return _Served(model, weights, 0, tokenizer, None)


def from_store(
  url: str,
  config: TrainConfig | None,
  workdir: str | None,
  interval_s: float,
  stop: threading.Event,
) -> _Served | None:
  """The newest version of a chain, once there is one; None if stopped first.

  Raises:
    ValueError: no tokenizer, or the model's shape isn't known.
  """
  if _TOKENIZER.value:
    tokenizer = Tokenizer.load(_TOKENIZER.value)
  elif config is not None and config.data.tokenizer:
    tokenizer = Tokenizer.load(config.data.tokenizer)
  else:
    raise ConfigError("--store needs the --tokenizer of its model")
  store = shipping.open_store(url)
  model_config = config.model if config else _shipped_model(store, stop)
  if model_config is None:
    return None
  model = _model(model_config)
  _check_vocabulary(tokenizer, model)
  # On the host: the engine copies what it needs to its device.
  where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  subscriber = shipping.Subscriber(
    store,
    like=_abstract(weight_shapes(model), where),
    cache=Path(workdir).expanduser() / "weights" if workdir else None,
  )
  if not wait_for_first(subscriber, interval_s, stop=stop):
    subscriber.close()
    return None
  first = subscriber.current
  return _Served(model, first.tree, first.version, tokenizer, subscriber)


def _shipped_model(store, stop) -> ModelConfig | None:
  """The model's shape, as the newest version's metadata has it."""
  chain = shipping.Chain(store)
  while chain.head is None:
    _log.info("Waiting for the first version")
    if stop.wait(1.0):
      return None
    chain.refresh()
  shape = chain.versions[chain.head].metadata.get("model")
  if shape is None:
    raise ConfigError(
      f"version {chain.head} doesn't say what model it is of: give its --config"
    )
  return from_config(ModelConfig, shape)


def _model(config: ModelConfig) -> LanguageModel:
  # The engine has its own attention, over its cache.
  return LanguageModel(dataclasses.replace(config, attention_kernel="xla"))


def _run_tokenizer(config: TrainConfig, workdir: Path) -> Tokenizer:
  """The one that a run was trained with."""
  identity = read_meta(workdir / "checkpoints")["identity"]
  folder = Path(config.data_folder or workdir / "data").expanduser()
  path = folder / f"data-{identity['data']}" / "tokenizer.json"
  tokenizer = Tokenizer.load(_TOKENIZER.value or path)
  if tokenizer.digest != identity["tokenizer"]:
    raise ConfigError(
      f"the run in {workdir} was trained with another tokenizer than"
      f" {_TOKENIZER.value or path}"
    )
  return tokenizer


def _check_vocabulary(tokenizer: Tokenizer, model: LanguageModel) -> None:
  if tokenizer.vocab_size > model.config.vocab_size:
    raise ConfigError(
      f"the tokenizer has {tokenizer.vocab_size} tokens, but the model"
      f" {model.config.vocab_size}: it is another model's"
    )


def _abstract(shapes, where):
  def place(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return jax.tree.map(place, shapes)


def _admin_key() -> str:
  if not _ADMIN_KEY_FILE.value:
    return os.environ.get("COMPOSER_ADMIN_KEY", "").strip()
  key = Path(_ADMIN_KEY_FILE.value).read_text("utf-8").strip()
  if not key:
    raise ConfigError(f"--admin_key_file={_ADMIN_KEY_FILE.value} is empty")
  return key


@contextlib.contextmanager
def _stop_signals(stop):
  """Calls `stop` on SIGTERM and SIGINT, instead of dying."""
  previous = {
    number: signal.signal(number, lambda *_: stop())
    for number in (signal.SIGTERM, signal.SIGINT)
  }
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


MISTAKES = (ValueError, OSError, ImportError)

if __name__ == "__main__":
  run(main, mistakes=MISTAKES, optional=True)
