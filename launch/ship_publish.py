"""`ship publish`: versions of Orbax checkpoints, one or each new one."""

import argparse
import dataclasses
import datetime
import json
import time
from pathlib import Path

from composer_jax import shipping
from composer_jax.shipping import source
from launch.ship_terminal import (
  InterruptedWorkError,
  Stoppable,
  Terminal,
  human_bytes,
)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
  """Makes versions of checkpoints."""
  config = shipping.PublisherConfig(
    snapshot_every=args.snapshot_every,
    longest_skip=args.longest_skip,
    effort=args.effort,
  )
  metadata = dict(map(_pair, args.metadata))
  # Before the takeover: a mistake must not fence off a publisher at work.
  base = _checkpoint(args.base, args, terminal) if args.base else None
  newest = None
  if not args.watch:
    newest = _checkpoint(args.checkpoint, args, terminal)
  store = shipping.open_store(args.store)
  publisher = shipping.Publisher(
    Stoppable(store, terminal), config, observe=terminal.observe
  )
  try:
    with publisher:
      if base is not None:
        _begin_with(base, args.base, publisher, metadata, terminal)
      if newest is None:
        _watch(args, publisher, metadata, terminal)
      else:
        _publish_one(newest, args.checkpoint, publisher, metadata, terminal)
  except InterruptedWorkError:
    _discard(store, publisher.epoch)
    raise
  return 0


def _checkpoint(folder, args, terminal) -> shipping.Source:
  """Opens a checkpoint; to load it ends after a signal."""
  found = shipping.from_checkpoint(folder, args.item)
  if args.dtype:
    found = source.cast(found, args.dtype)

  def load(piece):
    terminal.check()
    return piece.load()

  pieces = [
    dataclasses.replace(piece, load=lambda piece=piece: load(piece))
    for piece in found.pieces
  ]
  return dataclasses.replace(found, pieces=pieces)


def _begin_with(base, folder, publisher, metadata, terminal) -> None:
  head = publisher.chain.head
  if head is None:
    _publish_one(base, folder, publisher, metadata, terminal)
  elif not publisher.adopt(base):
    terminal.remark(
      f"{folder} is not version {head}, the head of the chain: that one is"
      " downloaded as the base instead"
    )


def _publish_one(found, folder, publisher, metadata, terminal) -> None:
  began = time.monotonic()
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  step = {"step": int(name)} if (name := _step_name(folder)) else {}
  with terminal.bars(encoded=found.nbytes, uploaded=None):
    job = publisher.publish(found, {"time": now} | step | metadata, copy=False)
    version = terminal.result_of(job)
  manifest = publisher.chain.versions[version]
  sizes = {d.base_version: d.size for d in manifest.deliveries}
  listed = ", ".join(
    f"{human_bytes(size)} "
    + ("by itself" if base is None else f"from version {base}")
    for base, size in sizes.items()
  )
  seconds = time.monotonic() - began
  terminal.result(
    f"version {version}: {human_bytes(found.nbytes)} as {listed}, in"
    f" {seconds:.1f} s; digest {manifest.digest[:12]}",
    version=version,
    digest=manifest.digest,
    metadata=manifest.metadata,
    bytes=found.nbytes,
    deliveries=[{"base": base, "bytes": size} for base, size in sizes.items()],
    seconds=round(seconds, 3),
  )


def _step_name(folder) -> str | None:
  """The step in the path of a checkpoint: .../10 or .../10/params."""
  path = Path(folder).absolute()
  return next((p.name for p in (path, path.parent) if p.name.isdigit()), None)


def _watch(args, publisher, metadata, terminal) -> None:
  """Publishes the newest step that there is, then each as it is finished."""
  folder = Path(args.checkpoint).absolute()
  done: dict[int, object] | None = None
  while True:
    found = _steps(folder)
    if done is None and found:
      done = _done_before(found, publisher.chain)
    for step in sorted(found):
      if done.get(step) == found[step]:
        continue
      place = folder / str(step)
      try:
        fresh = _checkpoint(place, args, terminal)
        _publish_one(fresh, place, publisher, metadata, terminal)
      except shipping.StoreError as error:
        terminal.remark(f"{place} is not published yet: {error}")
        break
      except (ValueError, OSError) as error:  # removed meanwhile, or damaged
        terminal.remark(f"{place} was not published: {error}")
      done[step] = found[step]
    terminal.sleep(args.interval)


def _done_before(found, chain) -> dict[int, object]:
  """All but the newest step; that, too, if the head was made of it."""
  head = chain.versions[chain.head].metadata if chain.versions else {}
  newest = max(found)
  return {
    step: birth
    for step, birth in found.items()
    if step != newest or step == head.get("step")
  }


def _steps(folder: Path) -> dict[int, object]:
  """Finished checkpoints, each with what tells it from a later one of its step.

  A learner that resumed from an earlier checkpoint makes a step again.
  """
  import orbax.checkpoint as ocp

  if not folder.is_dir():
    return {}
  return {
    step: _birth(folder / str(step))
    for step in ocp.utils.checkpoint_steps(folder)
  }


def _birth(step: Path) -> object:
  try:
    facts = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    return facts["init_timestamp_nsecs"]
  except (OSError, ValueError, KeyError):
    return None


def _discard(store: shipping.Store, epoch: int) -> None:
  """Deletes what was uploaded for a version that was given up."""
  chain = shipping.Chain(store)
  named = {
    shard.key
    for manifest in chain.versions.values()
    for delivery in manifest.deliveries
    for shard in delivery.objects
  }
  # Nobody else writes here: keys of an epoch are its publisher's.
  for key in list(store.list(f"data/{epoch:08d}")):
    if key not in named:
      store.delete(key)


def _pair(text: str) -> tuple[str, object]:
  name, equals, value = text.partition("=")
  if not (name and equals):
    raise ValueError(f"--metadata takes name=value, not {text!r}")
  try:
    return name, json.loads(value)
  except ValueError:
    return name, value
