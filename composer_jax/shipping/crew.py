"""How the processes of one training job agree on a version, by the store alone.

Publishing goes on in the background, where a collective of JAX would mix with
those of the training step. So each process leaves a note in the store, the
first one reads all of them, decides, and leaves the answer for the others.
"""

import json
import time
from collections.abc import Callable

import jax
import numpy as np

from composer_jax.shipping.chain import Chain
from composer_jax.shipping.errors import (
  ChainError,
  FencedError,
  MissingObjectError,
)


class Crew:
  """The publishing processes; all of them make the same calls.

  Attributes:
    epoch: of the publisher that they are, together.
    size: how many they are.
  """

  def __init__(self, chain: Chain, *, timeout_s: float = 600.0):
    """Takes over the chain.

    Args:
      chain: this process's view.
      timeout_s: how long to wait for the other processes, seconds.
    """
    self._chain = chain
    self._index = jax.process_index()
    self.size = jax.process_count()
    self._timeout_s = timeout_s
    self._answered: str | None = None
    self.epoch = chain.take_over() if self._index == 0 else 0
    if self.size > 1:
      from jax.experimental import multihost_utils

      epoch = multihost_utils.broadcast_one_to_all(np.int32(self.epoch))
      self.epoch = int(epoch)
      if self._index:
        chain.join(self.epoch)

  def agree(
    self, topic: str, mine: dict, decide: Callable[[list[dict]], dict]
  ) -> dict:
    """Has the first process decide upon what all of them say.

    Args:
      topic: never used before.
      mine: what this process says, as JSON; {"error": reason} if it failed.
      decide: called in the first process, with one dict a process, in order.

    Returns:
      What was decided.

    Raises:
      FencedError: if another publisher took over.
      ChainError: if a process failed or is missing.
    """
    if self._index:
      note = self._leave(f"{topic}-{self._index}", mine)
      answer = self._wait_for(f"{topic}-answer")
      self._chain.store.delete(note)
      if "fenced" in answer:
        raise FencedError(answer["fenced"])
      _raise_errors([answer])
      return answer
    try:
      others = range(1, self.size)
      notes = [mine, *(self._wait_for(f"{topic}-{i}") for i in others)]
      self._forget_answer()  # All are past it.
      _raise_errors(notes)
      answer = decide(notes)
    except Exception as error:
      kind = "fenced" if isinstance(error, FencedError) else "error"
      self._answer(topic, {kind: str(error)})
      raise
    self._answer(topic, answer)
    return answer

  def _answer(self, topic, answer):
    if self.size > 1:
      self._answered = self._leave(f"{topic}-answer", answer)

  def _forget_answer(self):
    if self._answered:
      self._chain.store.delete(self._answered)
      self._answered = None

  def _leave(self, topic, note) -> str:
    # With the data, so that notes of an epoch that is over are collected.
    key = f"data/{self.epoch:08d}/crew/{topic}"
    self._chain.store.put_if_absent(key, json.dumps(note).encode())
    return key

  def _wait_for(self, topic) -> dict:
    key = f"data/{self.epoch:08d}/crew/{topic}"
    ends = time.monotonic() + self._timeout_s
    wait_s = 0.02
    while time.monotonic() < ends:
      try:
        return json.loads(self._chain.store.get(key))
      except MissingObjectError:
        self._chain.check_fence()
        self._chain.refresh()
        time.sleep(wait_s)
        wait_s = min(1.0, 1.5 * wait_s)
    raise ChainError(
      f"no word of {topic} after {self._timeout_s:.0f} s: is a process gone?"
    )


def _raise_errors(notes):
  for number, note in enumerate(notes):
    if "error" in note:
      raise ChainError(f"publishing process {number} failed: {note['error']}")
