"""Metrics on their way from the device to the log, and the watch for NaN.

What is measured is decided in `step`, and where it is written in `metrics`.
"""

from typing import Any

import jax
import numpy as np

from composer_jax.data import PackedRows
from composer_jax.training.metrics import TimeSplit


class NonFiniteLossError(RuntimeError):
  """Loss, gradient or weights are NaN or infinite; says since which step."""


class Meter:
  """Metrics on their way from the device to the log, one step behind.

  Reading a step's metrics waits for the step; reading them when the next one
  has been dispatched keeps the device busy, and finds a NaN one step late at
  most. Values are means over the tokens since the last line.

  Attributes:
    tokens: of all steps whose metrics were read.
  """

  def __init__(self):
    self.tokens = 0.0
    self._pending: tuple | None = None
    self._seen: list[dict[str, Any]] = []
    self._seconds = 0.0

  @property
  def tokens_per_second(self) -> float:
    """Over all steps, evaluations and checkpoints left out."""
    return self.tokens / max(self._seconds, 1e-9)

  def push(
    self, step: int, metrics: dict, rows: PackedRows, indices: np.ndarray
  ) -> None:
    """Takes a dispatched step's metrics and reads those of the one before."""
    self.flush()
    self._pending = (step, metrics, rows, indices)

  def flush(self) -> None:
    """Reads the last step's metrics.

    Raises:
      NonFiniteLossError: its loss, gradient or new weights aren't finite.
    """
    if self._pending is None:
      return
    step, metrics, rows, indices = self._pending
    self._pending = None
    metrics = jax.device_get(metrics)
    # The loss of this step says nothing of the weights that it made.
    watched = [metrics[name] for name in ("loss", "grad_norm", "param_norm")]
    if not np.isfinite(watched).all():
      raise NonFiniteLossError(
        _explain_non_finite(step, metrics, rows, indices)
      )
    self.tokens += float(metrics["tokens"])
    self._seen.append(metrics)

  def pop(self, split: TimeSplit, mfu_per_rate: float) -> dict[str, float]:
    """What to log of the steps since the last call.

    Args:
      split: where the time went.
      mfu_per_rate: model FLOPs utilisation at one token a second.
    """
    period, fractions = split.pop()
    busy = period * (
      1 - fractions.get("eval", 0.0) - fractions.get("checkpoint", 0.0)
    )
    seen, self._seen = self._seen, []
    tokens = sum(float(m["tokens"]) for m in seen)
    self._seconds += busy
    rate = tokens / busy
    values = {
      name: sum(float(m[name] * m["tokens"]) for m in seen) / max(tokens, 1.0)
      for name in seen[0]
      if name not in ("tokens", "load")
    }
    if "load" in seen[0]:
      # [layers, experts]; the share of tokens of the fullest and the emptiest.
      load = np.sum([m["load"] for m in seen], axis=0)
      share = load * load.shape[1] / load.sum(axis=1, keepdims=True)
      values["load/max"] = float(share.max())
      values["load/min"] = float(share.min())
      for layer, worst in enumerate(share.max(axis=1)):
        values[f"load/layer_{layer}_max"] = float(worst)
    values |= {
      "tokens_per_second": rate,
      "mfu": rate * mfu_per_rate,
      "seconds_per_step": period / len(seen),
    }
    return values | {f"time/{name}": part for name, part in fractions.items()}


def _explain_non_finite(
  step: int, metrics: dict, rows: PackedRows, indices: np.ndarray
) -> str:
  documents = sorted(
    {path for index in indices for path in rows.sources(int(index))}
  )
  shown = ", ".join(documents[:8])
  if len(documents) > 8:
    shown += f" and {len(documents) - 8} more"
  return (
    f"Step {step + 1} gave loss {float(metrics['loss'])}, gradient norm"
    f" {float(metrics['grad_norm'])} and parameter norm"
    f" {float(metrics['param_norm'])}; its batch came from {shown}. Nothing of"
    " it was saved: lower optimizer.learning_rate, or look at those files, and"
    " run the command again, which goes on from the last checkpoint, if any."
  )
