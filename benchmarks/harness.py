"""What every benchmark shares: its two flags, fair timing, one table."""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax


def arguments(
  description: str, add_flags: Callable | None = None
) -> argparse.Namespace:
  """Parses the flags that every benchmark takes, and a benchmark's own.

  Args:
    description: one line for --help.
    add_flags: adds flags to the parser that it is given.
  """
  parser = argparse.ArgumentParser(description=description)
  parser.add_argument(
    "--json", action="store_true", help="print one JSON object a row"
  )
  parser.add_argument(
    "--quick", action="store_true", help="small sizes: a minute on two cores"
  )
  if add_flags:
    add_flags(parser)
  return parser.parse_args()


def median_ms(calls: dict, *, rounds: int = 5, seconds: float = 0.05) -> dict:
  """Times peers side by side: each round times every one of them in turn.

  Args:
    calls: name -> function without arguments that returns arrays. They must
      have run before, so that nothing is compiled here.
    rounds: times each peer is measured; the median counts.
    seconds: a measurement repeats its call for about so long.

  Returns:
    name -> median milliseconds a call.
  """
  repeats = {
    name: max(1, round(seconds / _seconds(call, 1)))
    for name, call in calls.items()
  }
  times = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      times[name].append(_seconds(call, repeats[name]))
  return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def _seconds(call, repeats):
  start = time.perf_counter()
  for _ in range(repeats):
    result = call()
  jax.block_until_ready(result)
  return (time.perf_counter() - start) / repeats


def report(rows: list[dict], *, as_json: bool) -> None:
  """Prints rows as JSON lines or as a table; both end the output."""
  if as_json:
    for row in rows:
      print(json.dumps(row))
    return
  columns = list(dict.fromkeys(key for row in rows for key in row))
  table = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  for line in table:
    print("  ".join(map(str.ljust, line, widths)).rstrip())


def _cell(value):
  if value is None:
    return "-"
  return f"{value:.3g}" if isinstance(value, float) else str(value)
