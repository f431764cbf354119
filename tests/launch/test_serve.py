"""`launch/serve.py` as it is run: a chain, a run, signals, mistakes."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import openai
import orbax.checkpoint as ocp
import pytest

from composer_jax import shipping
from composer_jax.data import Tokenizer
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.serving import serving_weights
from tests.serving.serving_rig import MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LEN = 256
NAME = "composer-jax"
PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  """A tokenizer, and a folder that keeps compiled programs."""
  folder = tmp_path_factory.mktemp("serve")
  Tokenizer.train(["def f(x): return x"], 280).save(folder / "tokenizer.json")
  return folder


@pytest.fixture(scope="module")
def model():
  return LanguageModel(MODEL)


@pytest.fixture(scope="module")
def trees(model):
  return [_weights(model, seed) for seed in range(3)]


def _weights(model, seed):
  params, balance = model.init(jax.random.key(seed))
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  return serving_weights(model, params, balance)


@dataclasses.dataclass
class Served:
  process: subprocess.Popen
  log: Path
  url: str = ""

  def client(self):
    return openai.OpenAI(
      base_url=f"{self.url}/v1", api_key="none", max_retries=0
    )

  def get(self, path):
    address = self.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
      connection.request("GET", path)
      return json.loads(connection.getresponse().read())

  def end(self, number):
    """Sends a signal; the exit code, and what it printed last."""
    self.process.send_signal(number)
    said, _ = self.process.communicate(timeout=60)
    return self.process.returncode, said


@contextlib.contextmanager
def serve(home, *flags):
  """Starts the server, and kills what is left of it."""
  log = home / f"{time.monotonic_ns()}.log"
  cache = {
    "JAX_COMPILATION_CACHE_DIR": str(home / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  environment = os.environ | cache
  environment.pop("JAX_NUM_CPU_DEVICES", None)
  command = [
    sys.executable,
    "launch/serve.py",
    "--port=0",
    f"--max_len={MAX_LEN}",
    f"--contexts={MAX_LEN}",
    "--max_rows=4",
    "--interval_s=0.05",
    *flags,
  ]
  with (
    log.open("wb") as errors,
    subprocess.Popen(
      command,
      cwd=REPOSITORY,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      env=environment,
    ) as process,
  ):
    try:
      yield Served(process, log)
    finally:
      process.kill()


def wait_for_url(served):
  line = served.process.stdout.readline()
  found = re.fullmatch(r"Serving version (\d+) as '.*' at (http\S+)\n", line)
  assert found, (line, served.log.read_text())
  served.url = found[2]
  return int(found[1])


def wait_until(condition, seconds=60.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    time.sleep(0.02)


def ask(client, **changes):
  arguments = {
    "model": NAME,
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "extra_body": {
      "return_token_ids": True,
      "return_versions": True,
      "ignore_eos": True,
    },
  }
  return client.completions.create(**arguments | changes)


def greedy(model, weights, count=8):
  """What a plain forward pass over all tokens says, token by token."""
  apply, tokens = jax.jit(model.apply), list(PROMPT)
  for _ in range(count):
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = apply(weights["params"], weights["balance"], padded).logits
    tokens.append(int(np.argmax(np.asarray(logits)[0, len(tokens) - 1])))
  return tokens[len(PROMPT) :]


def test_serves_a_chain_and_every_later_version(home, model, trees, tmp_path):
  chain = tmp_path / "chain"
  flags = (
    f"--store={chain}",
    f"--tokenizer={home / 'tokenizer.json'}",
    f"--workdir={tmp_path / 'work'}",
  )
  about = {"model": dataclasses.asdict(MODEL)}
  wanted = [greedy(model, tree) for tree in trees]
  # Else nothing is shown by comparing.
  assert len({*map(tuple, wanted)}) == 3
  with (
    serve(home, *flags) as served,
    shipping.Publisher(shipping.open_store(str(chain))) as publisher,
  ):
    # It waits for a chain that has nothing yet.
    first = publisher.publish(trees[0], about).result()
    assert wait_for_url(served) == first
    with served.client() as client:
      (choice,) = ask(client).choices
      assert choice.token_ids == wanted[0]
      assert choice.versions == [first] * 8
      second = publisher.publish(trees[1], about).result()
      wait_until(lambda: served.get("/health")["version"] == second)
      answer = ask(client)
      assert answer.choices[0].token_ids == wanted[1]
      assert answer.choices[0].versions == [second] * 8
      assert answer.system_fingerprint == f"weights-{second}"
    # A request in flight ends; the server then does, too.
    with served.client() as client:
      stream = ask(client, max_tokens=200, stream=True)
      chunks = [next(iter(stream))]
      served.process.send_signal(signal.SIGTERM)
      chunks += list(stream)
    tokens = [t for chunk in chunks for t in chunk.choices[0].token_ids]
    assert tokens[:8] == wanted[1]
    assert len(tokens) == 200
    assert chunks[-1].choices[0].finish_reason == "length"
    said, _ = served.process.communicate(timeout=60)
    assert (served.process.returncode, said) == (0, "Stopped\n")
    assert "Traceback" not in served.log.read_text()
  # From the copy of what was downloaded, and again the newest.
  with shipping.Publisher(shipping.open_store(str(chain))) as publisher:
    third = publisher.publish(trees[2], about).result()
  with serve(home, *flags) as served:
    assert wait_for_url(served) == third
    with served.client() as client:
      assert ask(client).choices[0].token_ids == wanted[2]
    assert served.end(signal.SIGINT) == (0, "Stopped\n")


def test_requests_that_outlast_drain_s_are_cut(home, trees, tmp_path):
  with shipping.Publisher(shipping.open_store(str(tmp_path))) as publisher:
    publisher.publish(trees[0], {"model": dataclasses.asdict(MODEL)}).result()
  flags = (
    f"--store={tmp_path}",
    f"--tokenizer={home / 'tokenizer.json'}",
    "--max_len=8192",
    "--contexts=8192",
    "--drain_s=0.2",
  )
  with serve(home, *flags) as served:
    wait_for_url(served)
    with served.client() as client:
      # Some ten seconds of tokens.
      stream = ask(client, max_tokens=8000, stream=True)
      next(iter(stream))
      began = time.monotonic()
      assert served.end(signal.SIGTERM) == (0, "Stopped\n")
      print(f"ended in {time.monotonic() - began:.1f} s")
      with pytest.raises(openai.APIConnectionError):
        list(stream)
    assert "Traceback" not in served.log.read_text()


def test_a_signal_ends_a_server_that_waits_for_its_chain(home, tmp_path):
  flags = (f"--store={tmp_path}", f"--tokenizer={home / 'tokenizer.json'}")
  with serve(home, *flags) as served:
    wait_until(lambda: "Waiting" in served.log.read_text())
    assert served.end(signal.SIGTERM) == (0, "")


TINY = {
  "model.width": 32,
  "model.num_layers": 2,
  "model.dense_dim": 48,
  "model.attention.num_heads": 2,
  "model.attention.num_kv_heads": 1,
  "model.attention.head_dim": 16,
  "model.moe.expert_dim": 16,
}


def config_flags(**changes):
  values = (TINY | changes).items()
  return [
    "--config=configs/midtrain_tiny.py:runlocal",
    *(f"--config.{key}={value}" for key, value in values),
  ]


def test_serves_the_latest_checkpoint_of_a_run(home, tmp_path):
  config = config_flags(
    num_steps=2, **{"data.max_bytes": 200_000, "data.seq_len": 32}
  )
  environment = os.environ.copy()
  environment.pop("JAX_NUM_CPU_DEVICES", None)
  subprocess.run(
    [sys.executable, "launch/train.py", *config, f"--workdir={tmp_path}"],
    cwd=REPOSITORY,
    check=True,
    capture_output=True,
    env=environment,
    timeout=120,
  )
  # Two steps were taken.
  path = tmp_path / "checkpoints" / "2" / "state"
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It says that it takes the shardings.
    state = ocp.PyTreeCheckpointer().restore(path)
  preset = PRESETS["tiny"]()
  model = LanguageModel(
    dataclasses.replace(
      preset,
      vocab_size=512,
      width=32,
      num_layers=2,
      dense_dim=48,
      attention=dataclasses.replace(
        preset.attention, num_heads=2, num_kv_heads=1, head_dim=16
      ),
      moe=dataclasses.replace(preset.moe, expert_dim=16),
    )
  )
  weights = serving_weights(model, state["params"], state["balance"])
  with serve(home, *config, f"--workdir={tmp_path}") as served:
    assert wait_for_url(served) == 0
    with served.client() as client:
      assert ask(client).choices[0].token_ids == greedy(model, weights)
      # Its own tokenizer is found.
      text = ask(client, prompt="def f(x):").choices[0]
      assert text.prompt_token_ids[0] == 0
    assert served.end(signal.SIGTERM) == (0, "Stopped\n")


def test_random_weights_can_be_tried(home):
  flags = config_flags()
  tokenizer = f"--tokenizer={home / 'tokenizer.json'}"
  with serve(home, *flags, "--random", tokenizer) as served:
    assert wait_for_url(served) == 0
    with served.client() as client:
      first, second = (ask(client).choices[0].token_ids for _ in range(2))
      assert first == second
    assert served.end(signal.SIGTERM) == (0, "Stopped\n")


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "give --config and --workdir of a training run, or --store of a"),
    (["--store=/tmp/none"], "--store needs the --tokenizer of its model"),
    (["--random"], "--random needs the --config and --tokenizer of a model"),
    (["--mode=later"], "config: mode must be one of 'in_flight', 'drain', not"),
    (["--max_row=3"], "Unknown command line flag 'max_row'. Did you mean:"),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, message):
  result = subprocess.run(
    [sys.executable, "launch/serve.py", *flags],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (result.returncode, result.stdout) == (2, "")
  assert result.stderr.startswith(f"error: {message}"), result.stderr
  assert result.stderr.count("\n") == 1
