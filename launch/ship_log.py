"""`ship log`: the versions of a chain and its readers, as a table or live."""

import argparse
import contextlib
import time

from rich.live import Live

from composer_jax import shipping
from composer_jax.shipping.planner import reachable
from launch.ship_terminal import (
  Stoppable,
  Terminal,
  human_bytes,
  human_seconds,
  stacked,
  table,
)

# Titles, headings, the line between the tables and the cursor's.
_OTHER_LINES = 6


def run(args: argparse.Namespace, terminal: Terminal) -> int:
  """Shows a chain once, or until interrupted."""
  store = Stoppable(shipping.open_store(args.store), terminal)
  chain = shipping.Chain(store)
  if not (chain.epoch or args.live):
    raise shipping.ChainError(
      f"there is no chain in {args.store}; check the address, or `publish` a"
      " version"
    )
  told: dict = {}
  with contextlib.ExitStack() as stack:
    live = None
    if args.live and not terminal.as_json:
      live = stack.enter_context(Live(console=terminal.out, auto_refresh=False))
    while True:
      versions = version_rows(chain)
      readers = reader_rows(chain)
      if terminal.as_json:
        _tell_news(versions, readers, told, terminal)
      elif live:
        # What doesn't fit on the screen would push the readers off it.
        room = max(3, terminal.out.height - len(readers) - _OTHER_LINES)
        live.update(_tables(versions, readers, room), refresh=True)
      else:
        terminal.out.print(_tables(versions, readers))
      if not args.live:
        return 0
      terminal.sleep(args.interval)
      try:
        chain.refresh()
      except shipping.StoreError as error:
        terminal.remark(f"no news: {error}")


def version_rows(chain: shipping.Chain) -> list[dict]:
  """What there is to say of each version."""
  rows = []
  within_reach = reachable(chain.deliveries)
  snapshot = None
  for number in sorted(chain.versions):
    manifest = chain.versions[number]
    sizes = {d.base_version: d.size for d in manifest.deliveries}
    snapshot = sizes.get(None, snapshot)
    deltas = [size for base, size in sizes.items() if base is not None]
    standing = {d.base_version for d in chain.deliveries[number]}
    if number == chain.head:
      state = "head"
    elif number in within_reach:
      state = "kept"
    else:
      # Some of a version's deltas may stand for readers who hold their bases.
      state = "cut off" if standing else "retired"
    rows.append(
      {
        "version": number,
        "state": state,
        "epoch": chain.epochs[number],
        "digest": manifest.digest,
        "metadata": manifest.metadata,
        "deliveries": [
          {"base": base, "bytes": size, "retired": base not in standing}
          for base, size in sizes.items()
        ],
        "ratio": snapshot / min(deltas) if deltas and snapshot else None,
      }
    )
  return rows


def reader_rows(chain: shipping.Chain) -> list[dict]:
  """What there is to say of each reader."""
  return [
    {
      "reader": reader.name,
      "version": reader.version,
      "behind": sum(version > reader.version for version in chain.versions),
      "time": reader.time,
    }
    for reader in sorted(
      shipping.readers(chain.store), key=lambda reader: reader.name
    )
  ]


def _tell_news(versions, readers, told, terminal) -> None:
  for name, rows in (("version", versions), ("reader", readers)):
    for row in rows:
      key = (name, row[name])
      if told.get(key) != row:
        told[key] = row
        terminal.result("", **row)


def _tables(versions, readers, room=None):
  shown = versions if room is None else versions[-room:]
  title = "versions"
  if len(shown) < len(versions):
    title += f", the newest {len(shown)} of {len(versions)}"
  newest = table(
    title,
    [
      ">version",
      "state",
      "when",
      ">epoch",
      "downloads",
      ">smaller",
      "metadata",
    ],
    [_version_cells(row) for row in shown],
  )
  now = time.time()
  who = table(
    "readers",
    ["reader", ">version", ">behind", "seen"],
    [
      [
        row["reader"],
        row["version"],
        row["behind"] or "-",
        f"{human_seconds(max(0, now - row['time']))} ago",
      ]
      for row in readers
    ],
  )
  return stacked(newest, who)


def _version_cells(row) -> list:
  downloads = ", ".join(
    ("(gone) " if way["retired"] else "")
    + ("by itself " if way["base"] is None else f"from {way['base']}: ")
    + human_bytes(way["bytes"])
    for way in row["deliveries"]
  )
  rest = {k: v for k, v in row["metadata"].items() if k != "time"}
  return [
    row["version"],
    row["state"],
    str(row["metadata"].get("time", "-")).removesuffix("+00:00"),
    row["epoch"],
    downloads,
    f"{row['ratio']:.1f}x" if row["ratio"] else "-",
    " ".join(f"{name}={value}" for name, value in rest.items()),
  ]
