"""What `make demo` runs: mid-training, then asynchronous RL, on two cores.

    python launch/demo.py --workdir=runs/demo

A tiny Mixture-of-Experts model learns to write code, then what the tools are
and how drills are told (`composer_jax.rl.drills`); then it improves by doing
drills in sandboxes, while each new version of its weights is shipped as a delta
to two inference hosts. The same command goes on where it was stopped. Leaves

    code/ drills/   mid-training
    rl/             reinforcement learning; see `composer_jax.rl.loop`
    report.html     plots, and what the model did before and after
    summary.json    the figures; wall_s includes the installation
"""

import itertools
import json
import shutil
import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from composer_jax.data import bigram_bits_per_byte
from composer_jax.rl.config import RlConfig
from composer_jax.rl.drills import traces, write_traces
from composer_jax.training.loop import Result
from configs import midtrain_tiny, rl_tiny
from launch import rl, train
from launch.flags import ConfigError, from_config, run

_BEGAN = flags.DEFINE_float(
  "began", None, "When it all began, in seconds since 1970; now if absent."
)
_CODE_STEPS = flags.DEFINE_integer("code_steps", 150, "Of the first training.")
_DRILL_STEPS = flags.DEFINE_integer("drill_steps", 360, "Of the second.")
_RL_STEPS = flags.DEFINE_integer("rl_steps", 28, "Of reinforcement learning.")
_SEED = flags.DEFINE_integer("seed", 0, "Of all of it.")
_TRACES = 12_000


def main(config: ConfigDict | None, workdir: str | None) -> None:
  """Trains twice, improves, and writes the report."""
  if config is not None or workdir is None:
    raise ConfigError("give --workdir alone: the configs are the demo's own")
  began = _BEGAN.value or time.time()
  folder = Path(workdir).expanduser().absolute()
  source = folder / "traces.zip"
  if not source.exists():
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / ".traces.zip"
    write_traces(scratch, itertools.islice(traces(_SEED.value + 1), _TRACES))
    scratch.replace(source)
  code = train.main(_code_config(source), str(folder / "code"))
  if not code.finished:
    return
  tokenizer = folder / "tokenizer.json"
  code.data.tokenizer.save(tokenizer)
  summary = _code_summary(code)
  drills = train.main(
    _drill_config(folder, source, tokenizer), str(folder / "drills")
  )
  if not drills.finished:
    return
  del code, drills  # Their arrays: the learner's is another process.
  arguments = {
    "config": "configs/rl_tiny.py",
    "workdir": str(folder / "rl"),
    "config.init_from": str(folder / "drills" / "checkpoints"),
    "config.tokenizer": str(tokenizer),
    "config.num_steps": str(_RL_STEPS.value),
    "config.seed": str(_SEED.value),
  }
  config = rl_tiny.get_config()
  config.update(
    init_from=arguments["config.init_from"],
    tokenizer=arguments["config.tokenizer"],
    num_steps=_RL_STEPS.value,
    seed=_SEED.value,
  )
  done = rl.run(
    from_config(RlConfig, config),
    arguments["workdir"],
    [f"--{name}={value}" for name, value in arguments.items()],
  )
  if not done:
    return
  learned = json.loads((folder / "rl" / "summary.json").read_text())
  summary |= {"wall_s": round(time.time() - began, 1)} | learned
  (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  shutil.copy(folder / "rl" / "report.html", folder / "report.html")
  print(
    f"\nHeld-out drills solved: {summary['pass_rate_before']:.0%} before,"
    f" {summary['pass_rate_after']:.0%} after {summary['steps']} steps and"
    f" {summary['versions_shipped']} versions of"
    f" {summary['full_bytes'] / max(1, summary['delta_bytes']):.1f} times fewer"
    f" bytes than copies.\nReport: {folder / 'report.html'}"
  )


def _code_config(traces: Path) -> ConfigDict:
  config = midtrain_tiny.get_config("demo")
  config.update(num_steps=_CODE_STEPS.value, seed=_SEED.value)
  # Some traces, so that the tokenizer knows their words.
  config.data.update(sources=("stdlib", str(traces)))
  config.data.near_duplicate_threshold = 0.0
  return config


def _drill_config(folder: Path, traces: Path, tokenizer: Path) -> ConfigDict:
  config = rl_tiny.get_config("midtrain")
  config.update(
    init_from=str(folder / "code" / "checkpoints"),
    num_steps=_DRILL_STEPS.value,
    seed=_SEED.value,
  )
  config.data.update(sources=(str(traces),), tokenizer=str(tokenizer))
  return config


def _code_summary(result: Result) -> dict[str, float]:
  """What mid-training on code came to, as `launch/demo_midtrain.py` has it."""
  return {
    "val_bits_per_byte_first": result.history[0][1],
    "val_bits_per_byte_last": result.history[-1][1],
    "bigram_bits_per_byte": bigram_bits_per_byte(
      result.data.train,
      result.data.validation,
      result.data.tokenizer.token_bytes,
      result.data.tokenizer.vocab_size,
    ),
    "tokens_per_s": round(result.tokens_per_second, 1),
  }


if __name__ == "__main__":
  run(main, mistakes=train.MISTAKES, optional=True)
