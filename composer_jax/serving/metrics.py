"""What a server tells Prometheus.

Counts of the engine and of weight updates are read when they are asked for;
only what has no other home (requests by status, distributions of times) is
kept here. A registry for each server: a process may have several.
"""

import math
from collections.abc import Callable, Iterator

from prometheus_client import (
  CollectorRegistry,
  Counter,
  Histogram,
  generate_latest,
)
from prometheus_client.core import (
  CounterMetricFamily,
  GaugeMetricFamily,
  Metric,
)
from prometheus_client.registry import Collector

from composer_jax.serving.follow import Follower
from composer_jax.serving.types import Completion, Stats, SwapReport

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SHORT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_GAUGES = {
  "version": "Weight version that serves.",
  "waiting": "Requests in the queue, preempted ones included.",
  "running": "Requests that have a row.",
  "pages_total": "Pages of the cache.",
  "pages_used": "Pages that a running request holds.",
  "pages_cached": "Pages kept for a prefix to come.",
}
_COUNTERS = {
  "requests": "Requests accepted.",
  "rejected": "Requests refused because the queue was full.",
  "prompt_tokens": "Prompt tokens of admitted requests.",
  "cached_tokens": "Of them, found in the cache.",
  "sampled_tokens": "Tokens handed out.",
  "preemptions": "Requests that lost their pages to an older one.",
  "evictions": "Cached pages given to other tokens.",
  "prefill_steps": "Device steps over prompts.",
  "decode_steps": "Device steps of one token a row.",
  "swaps": "Swaps of weights.",
}


class Metrics:
  """One server's metrics."""

  def __init__(self, stats: Callable[[], Stats]):
    """Takes where the engine's counts come from."""
    self._registry = CollectorRegistry()
    self._source = _EngineCollector(stats)
    self._registry.register(self._source)
    self.requests = Counter(
      "composer_http_requests",
      "HTTP requests by route and status.",
      ("route", "status"),
      registry=self._registry,
    )
    self._first_token = self._histogram(
      "composer_first_token_seconds", "From arrival to the first token."
    )
    self._request = self._histogram(
      "composer_completion_seconds", "From arrival to the last token."
    )
    self._token = self._histogram(
      "composer_token_seconds", "Mean time per token after the first.", _SHORT
    )
    self._pause = self._histogram(
      "composer_swap_pause_seconds", "Time without steps in a swap.", _SHORT
    )

  def follow(self, follower: Follower) -> None:
    """Adds what a follower counts."""
    self._source.follower = follower

  def completion(self, completion: Completion) -> None:
    """Counts the times of one that ended."""
    first, total = completion.first_token_s, completion.total_s
    if not math.isnan(first):
      self._first_token.observe(first)
      self._request.observe(total)
    if len(completion.token_ids) > 1:
      self._token.observe((total - first) / (len(completion.token_ids) - 1))

  def swap(self, report: SwapReport) -> None:
    """Counts the pause of a swap."""
    self._pause.observe(report.pause_s)

  def exposition(self) -> bytes:
    """Everything, in Prometheus' text format."""
    return generate_latest(self._registry)

  def _histogram(self, name, text, buckets=_SECONDS):
    return Histogram(name, text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
  """Reads counts where they are kept."""

  def __init__(self, stats: Callable[[], Stats]):
    self.follower: Follower | None = None
    self._stats = stats

  def collect(self) -> Iterator[Metric]:
    stats = self._stats()
    for name, text in _GAUGES.items():
      yield GaugeMetricFamily(
        f"composer_engine_{name}", text, getattr(stats, name)
      )
    for name, text in _COUNTERS.items():
      yield CounterMetricFamily(
        f"composer_engine_{name}", text, getattr(stats, name)
      )
    finished = CounterMetricFamily(
      "composer_engine_finished", "Requests ended, by reason.", None, ["reason"]
    )
    for reason, count in stats.finished.items():
      finished.add_metric([reason], count)
    yield finished
    if self.follower:
      yield CounterMetricFamily(
        "composer_weight_updates", "Versions that came.", self.follower.swaps
      )
      yield CounterMetricFamily(
        "composer_weight_update_failures",
        "Versions that failed to come.",
        self.follower.failures,
      )
      newest = self.follower.newest
      yield GaugeMetricFamily(
        "composer_weight_newest",
        "The newest version in the chain, as last seen; -1 if none.",
        -1 if newest is None else newest,
      )
