"""Ships weights: from Orbax checkpoints, over a store, to inference hosts.

    python launch/ship.py publish s3://bucket/run runs/x/checkpoints/10 \
        --item=params --dtype=bfloat16
    python launch/ship.py follow s3://bucket/run --cache=/var/weights \
        --write=/var/checkpoints --keep=2
    python launch/ship.py log s3://bucket/run --live
    python launch/ship.py verify s3://bucket/run
    python launch/ship.py diff s3://bucket/run@3 s3://bucket/run@head
    python launch/ship.py gc s3://bucket/run --keep_last=5 --dry_run
    python launch/ship.py bench s3://bucket/scratch --size_mb=500

A store is a folder, or s3://, gs:// or az://, with credentials from the
environment. For a notebook: `composer_jax.shipping`, or `main` here with a list
of arguments.
"""

import argparse
import contextlib
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import logging as absl_logging

from launch.flags import one_line_errors

try:
  from composer_jax import shipping
  from composer_jax.shipping import retention, trial, verify
  from composer_jax.shipping.planner import reachable
  from launch import ship_diff, ship_follow, ship_log, ship_publish
  from launch.ship_terminal import (
    InterruptedWorkError,
    Stoppable,
    Terminal,
    human_bytes,
  )
except ModuleNotFoundError as error:
  raise ImportError(
    f"{error.name} is missing: pip install 'composer-jax[ship]'"
  ) from error

_EXIT_CODES = """\
exit codes:
  0    fine
  1    the store or the chain has a problem: it failed, damage was found, a
       version can't be had
  2    wrong usage, or a file or checkpoint that can't be read or written
  130  interrupted by SIGINT (Ctrl-C), 143 by SIGTERM: what was not finished is
       not there, and a reader is no longer listed; a second signal ends at once
"""

_HOW_TO_TELL = """

Bits are compared, so -0.0 is not +0.0; the weight is that of the deltas,
without their index. What belongs where is read off paths and shapes. A layer is
a number in the path, or lies along the leading axis below "layers" or "blocks".
An expert is a number after "experts"; or, where the path matches --expert_paths
(by default "expert", or a child of "moe"), it lies along the first axis that
isn't the layers', if that is as long as --num_experts, by default the last axis
of routers."""


def main(argv: Sequence[str]) -> int:
  """Runs a command.

  Args:
    argv: without the program's name.

  Returns:
    The exit code, 0 or 1.

  Raises:
    SystemExit: for errors, told in one line on stderr, and for --help.
  """
  mistakes = one_line_errors(ValueError, OSError, ImportError)
  problems = one_line_errors(shipping.ChainError, shipping.StoreError, code=1)
  with mistakes, problems:
    args = _parser().parse_args(argv)
    terminal = Terminal(as_json=args.json)
    try:
      with terminal.heeding_signals():
        return args.command(args, terminal)
    except (InterruptedWorkError, KeyboardInterrupt):
      terminal.remark("interrupted")
      raise SystemExit(terminal.interrupted_code) from None


def verify_chain(args: argparse.Namespace, terminal: Terminal) -> int:
  """Checks what the store holds."""
  chain = _chain(args.store, terminal)
  steps = verify.ways_to(chain, args.version)
  total = sum(step.delivery.size for step in steps)
  with terminal.bars(downloaded=total):
    report = verify.verify(chain, args.version, observe=terminal.observe)
  for found in report.damage:
    terminal.result(
      f"damaged: {found.reason}",
      damaged=found.version,
      base=found.base_version,
      reason=found.reason,
    )
  for version, base in report.undecoded:
    terminal.result(
      f"not applied: the delta from version {base} to {version}, since nothing"
      f" sound leads to {base}; its bytes are right",
      not_applied=version,
      base=base,
    )
  for version in report.lost:
    terminal.result(f"lost: version {version} can't be reached", lost=version)
  terminal.result(
    f"{len(report.checked)} of {len(steps)} deliveries checked to the last bit"
    f" ({human_bytes(total)}); {len(report.damage)} damages,"
    f" {len(report.lost)} versions lost",
    deliveries=len(steps),
    sound=len(report.checked),
    damages=len(report.damage),
    lost_versions=report.lost,
    bytes=total,
  )
  return 1 if report.damage else 0


def gc(args: argparse.Namespace, terminal: Terminal) -> int:
  """Deletes what nothing kept needs."""
  chain = _chain(args.store, terminal)
  newest = sorted(reachable(chain.deliveries))[-args.keep_last :]
  keep = sorted({*newest, *args.keep})
  garbage = retention.find_garbage(chain, keep)
  count = len(garbage.committed) + len(garbage.abandoned)
  if not args.dry_run:
    count = shipping.collect(chain, keep)
  size = sum(garbage.committed.values())
  terminal.result(
    f"{'would delete' if args.dry_run else 'deleted'} {count} objects,"
    f" {human_bytes(size)} of {len(garbage.retired)} deliveries"
    + (
      f" and {len(garbage.abandoned)} that were never committed"
      if garbage.abandoned
      else ""
    )
    + f"; kept versions {', '.join(map(str, keep)) or 'none'}",
    dry_run=args.dry_run,
    objects=count,
    bytes=size,
    abandoned=len(garbage.abandoned),
    retired=[[gone.version, gone.base_version] for gone in garbage.retired],
    kept=keep,
  )
  return 0


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
  """Measures a store and this machine."""
  config = trial.TrialConfig(
    size_mb=args.size_mb,
    density=args.density,
    versions=args.versions,
    readers=args.readers,
    bandwidth_mb_s=args.bandwidth,
  )
  prefix = f"bench-{uuid.uuid4().hex}"
  store = Stoppable(shipping.open_store(args.store), terminal)
  run = trial.run_trial(store, config, prefix)
  with contextlib.ExitStack() as stack:
    if "://" not in args.store:  # Only folders have something left then.
      folder = Path(args.store) / prefix
      stack.callback(shutil.rmtree, folder, ignore_errors=True)
    stack.enter_context(contextlib.closing(run))
    for row in run:
      if isinstance(row, trial.Shipped):
        terminal.result(
          f"version {row.version}: {human_bytes(row.full_bytes)} as"
          f" {human_bytes(row.bytes)}, published in {row.publish_s:.2f} s,"
          f" {args.readers} readers had the same bits {row.update_s:.2f} s"
          " later",
          **vars(row),
        )
      else:
        terminal.result(
          f"encode {row.encode_gb_s:.2f} GB/s and apply"
          f" {row.apply_gb_s:.2f} GB/s a thread; upload"
          f" {row.upload_mb_s:.1f} MB/s, download {row.download_mb_s:.1f} MB/s"
          " a reader, while transfers lasted",
          **vars(row),
        )
  return 0


def _chain(url: str, terminal: Terminal) -> shipping.Chain:
  chain = shipping.Chain(Stoppable(shipping.open_store(url), terminal))
  if not chain.epoch:
    raise shipping.ChainError(
      f"there is no chain in {url}; check the address, or `publish` a version"
    )
  return chain


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
  return int(text)


class _Parser(argparse.ArgumentParser):
  """Tells a mistake in one sentence, as everything else does."""

  def error(self, message):
    raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="ship",
    description="Ships weights as lossless deltas, over any object store.",
    epilog=_EXIT_CODES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(
    metavar="COMMAND", required=True, parser_class=_Parser
  )

  def add(name, run, help_text, more=""):
    command = commands.add_parser(
      name,
      help=help_text,
      description=f"{help_text[0].upper()}{help_text[1:]}.{more}",
      epilog=_EXIT_CODES,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run)
    command.add_argument(
      "--json", action="store_true", help="one JSON object a line, no bars"
    )
    return command.add_argument, command

  option, _ = add(
    "publish", ship_publish.run, "make a version of an Orbax checkpoint"
  )
  option("store")
  option("checkpoint", help="one step; with --watch, all steps' folder")
  option("--item", default="", help="subtree to publish, as in params")
  option("--base", help="checkpoint that is the head, to save its download")
  option(
    "--metadata",
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="what `log` tells; the step and the time are there already",
  )
  option(
    "--dtype",
    help="round wider floats to this first (bfloat16): hosts get, bit for bit,"
    " the rounded weights, not the masters",
  )
  option(
    "--watch",
    action="store_true",
    help="publish the newest step, then each as it is finished",
  )
  option("--interval", type=float, default=5.0, help="seconds between looks")
  defaults = shipping.PublisherConfig()
  option(
    "--snapshot_every",
    type=_positive,
    default=defaults.snapshot_every,
    help="so many versions apart, one that needs no other (%(default)s)",
  )
  option(
    "--longest_skip",
    type=_positive,
    default=defaults.longest_skip,
    help="deltas reach back so many versions at most (%(default)s); only a"
    " publisher that goes on, as with --watch, has bases before the head",
  )
  option(
    "--effort",
    choices=["small", "fast"],
    default=defaults.effort,
    help="of the codec (%(default)s)",
  )

  option, command = add("follow", ship_follow.run, "get each new version")
  option("store")
  option("--cache", help="folder of this reader alone, to restart from")
  option("--name", help="by which `log` lists this reader")
  option("--once", action="store_true", help="get one version, then end")
  option("--write", metavar="DIR", help="make Orbax checkpoints DIR/VERSION")
  option("--keep", type=int, help="how many checkpoints of --write stay")
  option("--interval", type=float, default=5.0, help="seconds between looks")
  policy = command.add_mutually_exclusive_group().add_argument
  policy("--version", type=int, help="get this one, then end")
  policy("--pin", type=int, metavar="N", help="stay at this version")
  policy("--unpin", action="store_true", help="go for the newest again")
  policy(
    "--skip",
    type=int,
    action="append",
    default=[],
    metavar="N",
    help="never expose this version",
  )
  policy("--roll_back", action="store_true", help="pin what ran before")

  option, _ = add("log", ship_log.run, "list versions and readers")
  option("store")
  option("--live", action="store_true", help="until interrupted")
  option("--interval", type=float, default=2.0, help="seconds between looks")

  option, _ = add("verify", verify_chain, "download and check all deliveries")
  option("store")
  option("--version", type=int, help="only what leads to this one")

  option, _ = add(
    "diff", ship_diff.run, "show what changed between two", _HOW_TO_TELL
  )
  option("a", metavar="A", help="checkpoint, STORE@VERSION or STORE@head")
  option("b", metavar="B", help="likewise")
  option("--item", default="", help="subtree of checkpoints, as in params")
  option("--dtype", help="round wider floats of checkpoints, as publish does")
  option("--plot", metavar="FILE", help="draw it, too: .png, .pdf, .svg")
  option("--num_experts", type=int, help="if not what routers have")
  option("--expert_paths", help="regular expression of experts' paths")

  option, _ = add("gc", gc, "delete what nothing that is kept needs")
  option("store")
  option(
    "--keep",
    type=int,
    action="append",
    default=[],
    metavar="N",
    help="this version stays within reach, too",
  )
  option(
    "--keep_last",
    type=_positive,
    default=10,
    help="how many of the newest versions stay (%(default)s)",
  )
  option("--dry_run", action="store_true", help="only say what would go")

  option, _ = add("bench", bench, "measure a store with made-up weights")
  option("store")
  made_up = trial.TrialConfig()
  option("--size_mb", type=float, default=made_up.size_mb, help="bfloat16, MB")
  option(
    "--density",
    type=float,
    default=made_up.density,
    help="share of elements that each version moves (%(default)s)",
  )
  option("--versions", type=int, default=made_up.versions)
  option("--readers", type=int, default=made_up.readers)
  option("--bandwidth", type=float, help="limit of each link, MB/s")
  return parser


if __name__ == "__main__":
  # Shipping needs no accelerator, and must not take memory of one.
  jax.config.update("jax_platforms", "cpu")
  absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax says much
  sys.exit(main(sys.argv[1:]))
