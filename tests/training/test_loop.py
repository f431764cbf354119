"""One run in this process, and what can be made of it afterwards.

Signals, crashes and several processes are in `tests/launch/test_train.py`.
"""

import dataclasses
import json
import logging
import math
import re

import jax
import numpy as np
import pytest
from helpers import SMALL, assert_same_bits, train_config
from ml_collections import ConfigDict

from composer_jax.data import DataConfig
from composer_jax.training.checkpoint import CheckpointError
from composer_jax.training.loop import Result, _make_evaluate, train
from composer_jax.training.meter import Meter, NonFiniteLossError
from composer_jax.training.optimizer import OptimizerConfig
from composer_jax.training.sample import complete
from launch.train import main

LINE = "def read_rows(path, limit):\n"


@dataclasses.dataclass
class Run:
  """What the module's one training run was told, did and said."""

  config: object
  result: Result
  workdir: object
  log: str


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_compilation):
  folder = tmp_path_factory.mktemp("loop")
  (folder / "code").mkdir()
  for count in range(4, 24):
    (folder / "code" / f"m{count}.py").write_text(LINE * count)
  config = train_config(
    model=dataclasses.replace(SMALL, vocab_size=270),
    data=DataConfig(
      sources=(str(folder / "code"),),
      validation_fraction=0.2,
      near_duplicate_threshold=0.0,
      decontaminate=False,
      fim_fraction=0.0,
      vocab_size=270,
      seq_len=32,
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-2, schedule="constant", warmup_steps=5
    ),
    balance_rate=0.01,
    num_steps=40,
    log_every=8,
    eval_every=20,
    checkpoint_every=40,
    data_folder=str(folder / "data"),
  )
  records = []
  handler = logging.Handler()
  handler.emit = lambda record: records.append(record.getMessage())
  logger = logging.getLogger("composer_jax")
  logger.addHandler(handler)
  level = logger.level
  logger.setLevel(logging.INFO)
  try:
    result = train(config, folder / "run", profile=(9, 10))
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
  return Run(config, result, folder / "run", "\n".join(records))


def test_learns_and_says_so(run):
  result = run.result
  assert result.finished
  assert int(result.state.step) == 40
  steps, bits_per_byte = zip(*result.history, strict=True)
  assert steps == (0, 20, 40)
  # 270 tokens for 256 bytes: log2(270) is 8.1 bits.
  assert 4 < bits_per_byte[0] < 9
  assert bits_per_byte[2] < 0.5
  assert result.tokens_per_second > 0


def test_a_log_line_tells_what_matters(run):
  lines = [line for line in run.log.splitlines() if "tokens/s" in line]
  assert len(lines) == 5
  number = r"\d+(\.\d+)?(e[+-]\d+)?"
  assert re.fullmatch(
    rf"step 16/40 \| loss {number} \| {number} bits/byte \| +{number}[kMG]?"
    rf" tokens/s \| MFU +{number}% \| lr 1.00e-02 \| grad +{number} \|"
    rf" imbalance {number} \| time: data \d+% step \d+% other \d+% \| left"
    r" (\d+m)?\d+s",
    lines[1],
  )
  assert "step 20 | validation" in run.log
  assert re.search(r"Mesh .*'fsdp': 8", run.log)


def test_metrics_are_finite_and_add_up(run):
  lines = [
    json.loads(line)
    for line in (run.workdir / "metrics.jsonl").read_text().splitlines()
  ]
  assert all(math.isfinite(value) for line in lines for value in line.values())
  validation = {
    line["step"]: line["validation/bits_per_byte"]
    for line in lines
    if "validation/bits_per_byte" in line
  }
  assert list(validation.items()) == run.result.history
  training = [line for line in lines if "loss" in line]
  assert [line["step"] for line in training] == [8, 16, 24, 32, 40]
  for line in training:
    split = [value for name, value in line.items() if name.startswith("time/")]
    np.testing.assert_allclose(sum(split), 1, rtol=1e-6)
    assert min(split) >= 0
    assert 1 <= line["load/max"] <= line["imbalance"] + 1e-6
    assert line["load/min"] <= 1
    assert line["mfu"] > 0
  # Every position with a target counts once.
  rows = run.result.data.train
  tokens = training[-1]["tokens"]
  assert tokens == np.round(tokens)
  assert 0.5 * 40 * 8 * 32 < tokens <= 40 * 8 * rows.seq_len
  assert list(run.workdir.glob("events.out.tfevents.*"))


def test_a_profile_is_left(run):
  (trace,) = run.workdir.glob("plugins/profile/*/*.xplane.pb")
  assert trace.stat().st_size > 10_000


def test_a_finished_run_is_only_read_again(run):
  # As a notebook does it.
  again = main(ConfigDict(dataclasses.asdict(run.config)), str(run.workdir))
  assert isinstance(again, Result)
  assert again.finished
  assert again.history == run.result.history
  assert_same_bits(
    jax.device_get(again.state), jax.device_get(run.result.state)
  )


def test_weights_of_another_run(run, tmp_path):
  config = dataclasses.replace(
    run.config,
    init_from=str(run.workdir / "checkpoints"),
    num_steps=1,
    optimizer=OptimizerConfig(learning_rate=1e-9, warmup_steps=0),
  )
  result = train(config, tmp_path / "next")
  assert result.history[0] == (0, run.result.history[-1][1])
  assert int(result.state.step) == 1
  nowhere = dataclasses.replace(config, init_from=str(tmp_path / "nowhere"))
  with pytest.raises(CheckpointError) as error:
    train(nowhere, tmp_path / "other")
  assert str(error.value) == f"no checkpoint in {tmp_path / 'nowhere'}"


def test_weights_of_another_tokenizer_are_refused(run, tmp_path):
  config = dataclasses.replace(
    run.config,
    init_from=str(run.workdir / "checkpoints"),
    data=dataclasses.replace(run.config.data, vocab_size=265),
  )
  with pytest.raises(CheckpointError, match="with another tokenizer"):
    train(config, tmp_path / "next")


def test_a_run_does_not_go_on_with_other_data(run):
  changed = {
    "seed": {"seed": 1},
    "batch_size": {"batch_size": 2 * run.config.batch_size},
    "data": {"data": dataclasses.replace(run.config.data, seed=1)},
  }
  for name, change in changed.items():
    config = dataclasses.replace(run.config, num_steps=80, **change)
    with pytest.raises(CheckpointError, match=f"have changed: {name} "):
      train(config, run.workdir)


def test_trains_without_anything_held_out(run, tmp_path):
  data = dataclasses.replace(run.config.data, validation_fraction=0.0)
  config = dataclasses.replace(run.config, data=data, num_steps=6)
  assert train(config, tmp_path / "all").history == []


def test_micro_batches_evaluate_the_same_rows(run):
  result = run.result
  values = []
  for accumulate in (1, 2):
    config = dataclasses.replace(
      run.config, accumulate=accumulate, eval_batches=1
    )
    evaluate = _make_evaluate(
      config,
      result.model,
      result.data,
      jax.sharding.NamedSharding(result.mesh, jax.P()),
    )
    values.append(evaluate(result.state))
  assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_a_profile_window_past_the_end_is_refused(run, tmp_path):
  with pytest.raises(ValueError, match="after the run's last step, 40"):
    train(run.config, tmp_path, profile=(39, 41))


@pytest.mark.parametrize("name", ["loss", "grad_norm", "param_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_told_with_its_documents(run, name, value):
  rows, meter = run.result.data.train, Meter()
  metrics = {"loss": 1.0, "grad_norm": 2.0, "param_norm": 3.0, "tokens": 4.0}
  meter.push(5, metrics, rows, np.array([0]))
  meter.push(6, metrics | {name: value}, rows, np.array([1, -1]))
  with pytest.raises(NonFiniteLossError) as error:
    meter.flush()
  message = str(error.value)
  assert message.startswith("Step 7 gave loss ")
  assert str(value) in message
  for document in rows.sources(1):
    assert document in message
  assert meter.tokens == 4


def sample(run, prompt, **options):
  result = run.result
  return complete(
    result.model,
    result.state.params,
    result.state.balance,
    result.data.tokenizer,
    prompt,
    **options,
  )


def test_completes_what_it_learned_by_heart(run):
  text = sample(run, LINE + "def read", num_tokens=24)
  assert len(text) > len(LINE)
  assert ("_rows(path, limit):\n" + LINE * 3).startswith(text)
  assert text == sample(run, LINE + "def read", num_tokens=24)


def test_greedy_is_the_likeliest_token_each_time(run):
  # A prompt unlike the corpus, so that no token is a matter of course.
  prompt, num_tokens = "limit = rows + path(def", 24
  result, tokenizer = run.result, run.result.data.tokenizer
  ids = [tokenizer.end_id, *tokenizer.encode_batch([prompt])[0].tolist()]
  start = len(ids)
  params = jax.device_get(result.state.params)
  balance = jax.device_get(result.state.balance)
  logits_of = jax.jit(lambda x: result.model.apply(params, balance, x).logits)
  for position in range(start, start + num_tokens):
    # What stands after a token is another filling than `complete` has.
    tokens = np.full((1, start + num_tokens), 97, np.int32)
    tokens[0, :position] = ids
    ids.append(int(np.asarray(logits_of(tokens))[0, position - 1].argmax()))
  assert tokenizer.end_id not in ids[start:]
  assert len(set(ids[start:])) > 4
  assert sample(run, prompt, num_tokens=num_tokens) == tokenizer.decode(
    ids[start:]
  )


def test_sampling_depends_on_seed_and_temperature(run):
  def draw(seed):
    return sample(run, "x", num_tokens=24, temperature=3.0, seed=seed)

  assert draw(1) == draw(1)
  assert len({draw(1), draw(2), sample(run, "x", num_tokens=24)}) == 3
