"""What a run says about itself: log files, log lines, where its time goes.

`MetricWriter` keeps the numbers (`metrics.jsonl` for programs, TensorBoard for
eyes), `format_line` shows them to whoever watches the terminal. Nothing here
knows the model; `peak_flops` is what turns its floating-point operations into a
model FLOP utilisation (MFU).
"""

import contextlib
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import tensorboardX
from etils import epath

# Dense bfloat16 FLOP/s from the vendors' data sheets, without sparsity, by a
# pattern of JAX's `device_kind`. The first match counts.
_PEAK_FLOPS = {
  r"GB[23]00": 2500e12,
  r"B[23]00": 2250e12,
  r"H100 PCIe": 756e12,
  r"H[12]00 NVL": 835e12,
  r"G?H[12]00": 989e12,
  r"A100": 312e12,
  r"L40S": 362e12,
  r"L4": 121e12,
  r"RTX 4090": 165e12,
  r"TPU (v6 lite|v6e)": 918e12,
  r"TPU (v5 lite|v5e)": 197e12,
  r"TPU v5p?": 459e12,
}


class MetricWriter:
  """Writes scalars to `<folder>/metrics.jsonl` and to TensorBoard.

  A line is one JSON object: `step`, `wall_time` (seconds since 1970), and the
  values; what is not finite is null. A resumed run repeats the steps after its
  checkpoint: opening the writer removes their lines, and a last line that a
  crash cut short, so that each step is there once. TensorBoard hides them.

  A context manager. Processes other than the first write nothing.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    process_index: int,
    *,
    resumed_step: int = 0,
  ):
    """Opens the log.

    Args:
      folder: where; made if it isn't there.
      process_index: `jax.process_index()`.
      resumed_step: the run's step now; lines of later steps are removed.
    """
    self._file = self._board = None
    if process_index != 0:
      return
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    if path.exists():
      lines = path.read_text().splitlines()
      kept = [line for line in lines if _step_of(line) <= resumed_step]
      # Written aside, so that a crash here loses nothing.
      aside = folder / "metrics.jsonl.tmp"
      aside.write_text("".join(f"{line}\n" for line in kept))
      aside.replace(path)
    self._file = path.open("a")
    self._board = tensorboardX.SummaryWriter(
      os.fspath(folder), purge_step=resumed_step + 1
    )

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line.

    Args:
      step: the number of updates made.
      values: scalars, Python's, NumPy's or JAX's.
    """
    if self._file is None:
      return
    wall_time = time.time()
    line = {"step": step, "wall_time": round(wall_time, 3)}
    for name, value in values.items():
      value = float(value)
      line[name] = value if math.isfinite(value) else None
      if math.isfinite(value):
        self._board.add_scalar(name, value, step, walltime=wall_time)
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def close(self) -> None:
    """Flushes and closes both files."""
    if self._file is not None:
      self._file.close()
      self._board.close()
      self._file = None

  def __enter__(self) -> "MetricWriter":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


def _step_of(line: str) -> float | int:
  """The step of a line; infinite if the line is not whole."""
  try:
    return json.loads(line)["step"]
  except (json.JSONDecodeError, TypeError, KeyError):
    return math.inf


class TimeSplit:
  """Where the wall time goes, as fractions of it.

  Phases don't nest. What no phase covers is "other".
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    """Starts the clock, which is an argument for the sake of tests."""
    self._clock = clock
    self._start = clock()
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Counts the time of a `with` block as the named phase."""
    start = self._clock()
    try:
      yield
    finally:
      spent = self._clock() - start
      self._seconds[name] = self._seconds.get(name, 0.0) + spent

  def pop(self) -> tuple[float, dict[str, float]]:
    """Ends a period and starts the next.

    Returns:
      The period's length in seconds; and the fraction of it for each phase
      and for "other", which add up to 1.
    """
    now = self._clock()
    period = max(now - self._start, 1e-9)
    fractions = {name: spent / period for name, spent in self._seconds.items()}
    fractions["other"] = 1.0 - sum(fractions.values())
    self._start, self._seconds = now, {}
    return period, fractions


def bits_per_byte(nats: float, num_bytes: float | int) -> float:
  """Total negative log-likelihood in nats, as bits for each byte of text."""
  return nats / math.log(2) / num_bytes


def format_line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
  """One aligned line for the terminal.

  Args:
    step: updates made.
    num_steps: updates of the whole run.
    values: scalars by name, as given to `MetricWriter.write`. Shown are `loss`,
      `bits_per_byte`, `tokens_per_second`, `mfu`, `learning_rate`, `grad_norm`,
      `imbalance`, each `time/<phase>` (fractions), and from `seconds_per_step`
      the time left. Missing ones are left out, others ignored.
  """
  parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
  for name, template in _COLUMNS.items():
    if name in values:
      parts.append(template(float(values[name])))
  split = [
    f"{name.removeprefix('time/')} {100 * float(fraction):.0f}%"
    for name, fraction in values.items()
    if name.startswith("time/")
  ]
  if split:
    parts.append("time: " + " ".join(split))
  if "seconds_per_step" in values:
    seconds_left = (num_steps - step) * float(values["seconds_per_step"])
    parts.append(f"left {_duration(seconds_left)}")
  return " | ".join(parts)


def _quantity(value: float) -> str:
  """Three digits and a unit: 12345 is "12.3k"."""
  for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= factor:
      return f"{value / factor:.3g}{unit}"
  return f"{value:.3g}"


def _duration(seconds: float) -> str:
  """Two units: "42s", "3m07s", "5h02m", "2d03h"."""
  if not math.isfinite(seconds):
    return "?"
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f"{days}d{hours:02}h"
  if hours:
    return f"{hours}h{minutes:02}m"
  return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


_COLUMNS: dict[str, Callable[[float], str]] = {
  "loss": "loss {:.4f}".format,
  "bits_per_byte": "{:.4f} bits/byte".format,
  "tokens_per_second": lambda rate: f"{_quantity(rate):>5} tokens/s",
  "mfu": lambda fraction: f"MFU {100 * fraction:4.1f}%",
  "learning_rate": "lr {:.2e}".format,
  "grad_norm": lambda norm: f"grad {_quantity(norm):>5}",
  "imbalance": "imbalance {:.2f}".format,
}


def peak_flops(device: jax.Device) -> float:
  """The most bfloat16 FLOP/s that a device can do: what an MFU is relative to.

  For a device that isn't in the table, a CPU above all, it is the measured rate
  of a large float32 matrix product, and an MFU is then relative to what this
  machine's matrix product reaches. Emulated devices share their machine, so
  each has its part of that rate.

  Args:
    device: any device of this process.
  """
  for pattern, flops in _PEAK_FLOPS.items():
    if re.search(rf"\b{pattern}\b", device.device_kind):
      return flops
  return _measured_flops(device)


@functools.cache
def _measured_flops(device: jax.Device) -> float:
  size = 2048
  matmul = jax.jit(lambda a: a @ a)
  ones = jax.device_put(jnp.ones((size, size), jnp.float32), device)
  matmul(ones).block_until_ready()
  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    matmul(ones).block_until_ready()
    seconds.append(time.perf_counter() - start)
  sharing = 1
  if device.platform == "cpu":
    sharing = len(jax.local_devices(backend="cpu"))
  return 2 * size**3 / min(seconds) / sharing
