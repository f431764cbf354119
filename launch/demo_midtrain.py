"""What `make demo-midtrain` runs: a tiny MoE model learns to write code.

Mid-trains `configs/midtrain_tiny.py:demo` on this Python's standard library,
beside a bigram model of the same tokens, and leaves in `workdir`:

    summary.json   the figures; wall_s includes the installation
    curve.png      validation bits per byte against steps
    sample.txt     what the model makes of the start of a function
"""

import json
import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from composer_jax.data import bigram_bits_per_byte
from composer_jax.training.loop import Result
from composer_jax.training.sample import complete
from launch import train
from launch.flags import run

_BEGAN = flags.DEFINE_float(
  "began", None, "When it all began, in seconds since 1970; now if absent."
)

_PROMPT = '''def read_lines(path):
    """Return the lines of a text file."""
'''


def main(config: ConfigDict, workdir: str) -> None:
  """Trains, compares, and writes the report."""
  began = _BEGAN.value or time.time()
  result = train.main(config, workdir)
  if not result.finished:
    return
  folder = Path(workdir)
  bigram = bigram_bits_per_byte(
    result.data.train,
    result.data.validation,
    result.data.tokenizer.token_bytes,
    result.data.tokenizer.vocab_size,
  )
  first, last = result.history[0][1], result.history[-1][1]
  text = complete(
    result.model,
    result.state.params,
    result.state.balance,
    result.data.tokenizer,
    _PROMPT,
    temperature=0.6,
  )
  (folder / "sample.txt").write_text(_PROMPT + text, "utf-8")
  plot(result, bigram, folder / "curve.png")
  summary = {
    "wall_s": round(time.time() - began, 1),
    "val_bits_per_byte_first": first,
    "val_bits_per_byte_last": last,
    "bigram_bits_per_byte": bigram,
    "tokens_per_s": round(result.tokens_per_second, 1),
  }
  (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  print(f"\nA completion (all of it in {folder / 'sample.txt'}):\n")
  print(_PROMPT + text)
  print(
    f"\nValidation bits per byte: {first:.3f} before, {last:.3f} after"
    f" {result.history[-1][0]} steps; a bigram model of the same tokens has"
    f" {bigram:.3f}.\nCurve: {folder / 'curve.png'}"
  )


def plot(result: Result, bigram: float, path: Path) -> None:
  """Draws the learning curve beside the bigram model's level."""
  import matplotlib as mpl

  mpl.use("agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
  axes.plot(*zip(*result.history, strict=True), marker="o", label="this model")
  axes.axhline(bigram, color="gray", linestyle="--", label="bigram model")
  axes.set(xlabel="step", ylabel="validation bits per byte")
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150)
  plt.close(figure)


if __name__ == "__main__":
  run(main, mistakes=train.MISTAKES)
