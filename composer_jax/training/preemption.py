"""When to stop early: a signal, from a scheduler or from the keyboard.

The training loop asks after each step and, once the answer is yes, saves and
leaves. Saving itself is the business of `composer_jax.training.checkpoint`.
"""

import os
import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopSignal:
  """A context manager that turns signals into a flag.

  In one process SIGTERM and the first Ctrl-C set the flag; Ctrl-C after that
  interrupts at once. Leaving restores the earlier handlers.

  In several processes a scheduler's SIGTERM may reach only some of them, at
  different steps. There JAX's own handler, which `jax.distributed.initialize`
  installs, tells all and agrees on a step; a handler of ours would disable it,
  so none is installed.
  """

  def __init__(self):
    self._received = False
    self._previous: dict[signal.Signals, object] = {}

  def __enter__(self) -> "StopSignal":
    # Only the main thread may install handlers; elsewhere nothing is caught.
    on_main_thread = threading.current_thread() is threading.main_thread()
    if jax.process_count() == 1 and on_main_thread:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exc_info) -> None:
    for number, handler in self._previous.items():
      # None stands for a handler that was not installed from Python.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    self._previous.clear()

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    if number == signal.SIGINT and self._received:
      raise KeyboardInterrupt
    self._received = True
    # Unlike print, this may interrupt a print.
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopping after this step\n".encode())

  def stop_requested(self, step: int) -> bool:
    """Whether to save and stop now, after this step.

    Args:
      step: the number of updates made. All processes must ask after each step,
        with the same numbers, and get the same answer.
    """
    if jax.process_count() > 1:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._received
