"""Turns requests into steps on the device, and keeps what stays there."""

import time
from typing import Any, NamedTuple

import jax
from absl import logging

from composer_jax.models import LanguageModel
from composer_jax.serving import step as device_step
from composer_jax.serving.live import Live
from composer_jax.serving.types import EngineConfig
from composer_jax.serving.weights import Weights


class FlightRow(NamedTuple):
  """One request's part in a step that was started.

  Attributes:
    live: whose.
    index: its row in the step's arrays.
    start: position of its first token.
    length: its tokens.
    pages: where they went; the request may have let go of them since.
    samples: whether the step drew its next token.
    stale: whether the cache that it read was made by other weights, too.
  """

  live: Live
  index: int
  start: int
  length: int
  pages: list[int]
  samples: bool
  stale: bool


class Flight(NamedTuple):
  """A step that was started and not yet read.

  Attributes:
    rows: who takes part.
    output: arrays that may not be there yet.
    version: of the weights that it runs on.
  """

  rows: list[FlightRow]
  output: device_step.Output
  version: int


class Runner:
  """The device's side of an engine: weights, cache and programs.

  Attributes:
    weights: that the next step runs on.
    version: of them.
    prefill_steps: started, over chunks of prompts.
    decode_steps: started, of one token a row.
  """

  def __init__(
    self,
    model: LanguageModel,
    weights: Weights,
    config: EngineConfig,
    version: int,
    device: jax.Device,
  ):
    self.weights, self.version = weights, version
    self.prefill_steps = self.decode_steps = 0
    self._model, self._config, self._device = model, config, device
    self._sizes = device_step.Sizes(
      config.max_rows,
      config.num_pages,
      config.page_size,
      config.max_top_logprobs,
    )
    self._state = device_step.empty_state(model, self._sizes, device)
    self._programs: dict[device_step.Shape, Any] = {}

  @property
  def cache_bytes(self) -> int:
    """Device memory that the cache takes."""
    return sum(part.nbytes for part in self._state.pool)

  @property
  def is_warm(self) -> bool:
    """Whether all programs are compiled."""
    return bool(self._programs)

  def warm_up(self) -> None:
    """Compiles every shape, and runs each once, on nothing."""
    config, began, programs = self._config, time.perf_counter(), {}
    for pages in config.context_pages:
      for rows, chunk in (
        (config.max_rows, 1),
        (config.prefill_rows, config.prefill_chunk),
      ):
        shape = device_step.Shape(rows, chunk, pages)
        programs[shape] = device_step.compiled(
          self._model, self._sizes, shape, self._device
        )
        batch = device_step.empty_batch(shape, config.max_rows)
        self._state, output = programs[shape](self.weights, self._state, batch)
        jax.block_until_ready(output)
    self._programs = programs
    seconds = time.perf_counter() - began
    logging.info("Warmed up %d programs in %.1f s.", len(programs), seconds)

  def prefill(self, lives: list[Live]) -> Flight:
    """Starts a step over the next chunk of each one's tokens."""
    self.prefill_steps += 1
    config = self._config
    return self._start(lives, config.prefill_rows, config.prefill_chunk)

  def decode(self, lives: list[Live]) -> Flight:
    """Starts a step over each one's one pending token, and samples the next."""
    self.decode_steps += 1
    return self._start(lives, self._config.max_rows, 1)

  def _start(self, lives, num_rows, chunk):
    lengths = [min(live.pending, chunk) for live in lives]
    longest = max(
      live.computed + n for live, n in zip(lives, lengths, strict=True)
    )
    shape = device_step.Shape(
      num_rows,
      chunk,
      next(
        pages
        for pages in self._config.context_pages
        if pages * self._config.page_size >= longest
      ),
    )
    batch = device_step.empty_batch(shape, self._config.max_rows)
    rows = []
    for nth, (live, n) in enumerate(zip(lives, lengths, strict=True)):
      # A row's place in a decode step is its slot.
      index = live.slot if chunk == 1 else nth
      samples = n == live.pending
      _fill(batch, index, live, n, samples)
      start = live.computed
      live.advance(n, samples, self.version)
      stale = live.cache_versions != {self.version}
      rows.append(
        FlightRow(live, index, start, n, list(live.pages), samples, stale)
      )
    program = self._programs[shape]
    self._state, output = program(self.weights, self._state, batch)
    for leaf in output:
      leaf.copy_to_host_async()
    return Flight(rows, output, self.version)


def _fill(batch, index, live, n, samples):
  start, sampling = live.computed, live.sampling
  # The host may not have seen the last token yet; the device has.
  batch.tokens[index, :n] = live.tokens[start : start + n] or -1
  batch.start[index] = start
  batch.length[index] = n
  batch.slot[index] = live.slot
  batch.samples[index] = samples
  held = live.pages[: batch.pages.shape[1]]
  batch.pages[index, : len(held)] = held
  batch.sampling.seed[index] = sampling.seed
  batch.sampling.temperature[index] = sampling.temperature
  batch.sampling.top_k[index] = sampling.top_k
  batch.sampling.top_p[index] = sampling.top_p
  batch.wants_top[index] = sampling.top_logprobs > 0
