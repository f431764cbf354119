"""`ship follow`: each new version, kept in a cache or written to disk."""

import argparse
import contextlib
import time

from composer_jax import shipping
from composer_jax.shipping import export
from composer_jax.shipping.wrappers import Counted
from launch.ship_terminal import Stoppable, Terminal, human_bytes


def run(args: argparse.Namespace, terminal: Terminal) -> int:
  """Gets versions as they come."""
  if (args.unpin or args.roll_back) and not args.cache:
    raise ValueError(
      "--unpin and --roll_back need --cache: only there is it noted what was"
      " pinned and what ran before"
    )
  if args.keep is not None and not args.write:
    raise ValueError("--keep goes with --write")
  store = Counted(Stoppable(shipping.open_store(args.store), terminal))
  with contextlib.ExitStack() as stack:
    writer = None
    if args.write:
      writer = stack.enter_context(
        export.CheckpointWriter(args.write, keep=args.keep)
      )
    reader = stack.enter_context(
      shipping.Subscriber(
        store, cache=args.cache, name=args.name, observe=terminal.observe
      )
    )
    if args.pin is not None:
      reader.pin(args.pin)
    if args.unpin:
      reader.unpin()
    for version in args.skip:
      reader.skip(version)
    move = reader.roll_back if args.roll_back else reader.update
    if args.version is not None:
      move = lambda: reader.update(args.version)  # noqa: E731
    once = args.once or args.version is not None
    told = None
    while True:
      try:
        weights = _update(move, reader, store, writer, terminal)
        if weights is None and once:
          raise shipping.ChainError(f"{args.store} holds no version yet")
        told = None
      except (shipping.ChainError, shipping.StoreError) as error:
        if once or move == reader.roll_back:
          raise
        weights = None
        if str(error) != told:
          told = str(error)
          terminal.remark(f"no update: {told}")
      if once:
        return 0
      move = reader.update
      if weights is None:
        terminal.sleep(args.interval)


def _update(move, reader, store, writer, terminal):
  began, before = time.monotonic(), store.down.bytes
  with terminal.bars(downloaded=None, applied=None):
    weights = move()
  if weights is None:
    return None
  written = writer.write(weights) if writer else None
  seconds, size = time.monotonic() - began, store.down.bytes - before
  terminal.result(
    f"version {weights.version}: {human_bytes(size)} downloaded in"
    f" {seconds:.1f} s; digest {weights.digest[:12]}"
    + (f"; {written}" if written else ""),
    version=weights.version,
    digest=weights.digest,
    metadata=weights.metadata,
    downloaded=size,
    seconds=round(seconds, 3),
    written=str(written) if written else None,
  )
  return weights
