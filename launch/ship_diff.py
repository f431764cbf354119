"""`ship diff`: what changed between two checkpoints or versions."""

import argparse
import re
from pathlib import Path

from composer_jax import shipping
from composer_jax.shipping import density, source
from composer_jax.shipping.contents import ArraySpec
from composer_jax.shipping.density import Comparison
from composer_jax.shipping.source import Piece, Source
from launch.ship_terminal import (
  Stoppable,
  Terminal,
  bar,
  human_bytes,
  stacked,
  table,
)

# A longer list than this is for the plot and --json.
_MOST_ROWS = 64


def run(args: argparse.Namespace, terminal: Terminal) -> int:
  """Compares, then shows counts by kind, layer and expert, and the weight."""
  if args.plot:
    _pyplot(Path(args.plot))  # Rather now than after the work.
  base, new = (_open(text, args, terminal) for text in (args.a, args.b))
  options = {"num_experts": args.num_experts}
  if args.expert_paths:
    options["expert_paths"] = args.expert_paths
  roles = density.classify(new.arrays, **options)
  with terminal.bars(compared=new.nbytes):
    found = density.compare(base, new, roles, observe=terminal.observe)
  if terminal.as_json:
    _print_rows(found, terminal)
  else:
    terminal.out.print(stacked(*_tables(found)))
    _print_total(found, terminal)
  if args.plot:
    plot(found, Path(args.plot), f"{args.a} to {args.b}")
    if not terminal.as_json:
      terminal.result(f"plot: {args.plot}")
  return 0


def _open(text: str, args, terminal) -> Source:
  """A checkpoint, or a version as STORE@VERSION."""
  match = re.fullmatch(r"(.+)@(\d+|head)", text)
  if match is None or Path(text).exists():
    found = shipping.from_checkpoint(text, args.item)
    return source.cast(found, args.dtype) if args.dtype else found
  version = None if match[2] == "head" else int(match[2])
  with (
    shipping.Subscriber(
      Stoppable(shipping.open_store(match[1]), terminal),
      observe=terminal.observe,
    ) as reader,
    terminal.bars(downloaded=None),
  ):
    weights = reader.update(version)
  if weights is None:
    raise shipping.ChainError(f"there is no version in {match[1]}")
  arrays = {
    path: ArraySpec(array.shape, array.dtype.name)
    for path, array in weights.tree.items()
  }
  return Source(
    arrays,
    [
      Piece(path, arrays[path].whole, lambda array=array: array)
      for path, array in weights.tree.items()
    ],
  )


def _rows(found: Comparison):
  for what in ("kind", "layer", "expert"):
    for name, count in found.by(what).items():
      size = found.sizes[name] if what == "kind" else None
      yield {"by": what, "name": name} | _facts(count, size)


def _facts(count, size=None) -> dict:
  facts = {
    "changed": count.changed,
    "elements": count.elements,
    "density": count.density,
  }
  if size:
    facts |= {"delta_bytes": size.delta, "full_bytes": size.full}
  return facts


def _print_rows(found: Comparison, terminal) -> None:
  for row in _rows(found):
    terminal.result("", **row)
  for path, reason in found.unmatched.items():
    terminal.result("", by="unmatched", name=path, reason=reason)
  terminal.result("", by="total", **_facts(*found.total))


def _tables(found: Comparison):
  counts = found.by("kind")
  rows = []
  for kind, size in found.sizes.items():
    count = counts.get(kind, density.Count())
    rows.append(
      [
        kind,
        f"{count.elements:,}",
        f"{count.density:.3%}",
        bar(count.density),
        human_bytes(size.delta),
        f"{size.ratio:.1f}x",
      ]
    )
  columns = ["kind", ">elements", ">changed", "", ">delta", ">smaller"]
  yield table("by kind", columns, rows)
  for what in ("layer", "expert"):
    counts = found.by(what)
    if counts:
      # Bars against the densest: differences are what one looks for here.
      most = max(count.density for count in counts.values()) or 1.0
      listed = sorted(
        counts.items(), key=lambda item: item[1].density, reverse=True
      )[:_MOST_ROWS]
      kept = counts if len(counts) <= _MOST_ROWS else dict(listed)
      title = f"by {what}"
      if len(counts) > _MOST_ROWS:
        title += f", the {_MOST_ROWS} of {len(counts)} that changed most"
      yield table(
        title,
        [what, ">elements", ">changed", ""],
        [
          [
            name,
            f"{count.elements:,}",
            f"{count.density:.3%}",
            bar(count.density / most),
          ]
          for name, count in kept.items()
        ],
      )
  if found.unmatched:
    yield table("not compared", ["path", "why"], list(found.unmatched.items()))


def _print_total(found: Comparison, terminal) -> None:
  count, size = found.total
  terminal.result(
    f"\n{count.changed:,} of {count.elements:,} elements changed"
    f" ({count.density:.3%}); the delta weighs {human_bytes(size.delta)},"
    f" {size.ratio:.1f} times less than all {human_bytes(size.full)}"
  )


def plot(found: Comparison, path: Path, title: str) -> None:
  """Draws densities by kind, layer and expert.

  Args:
    found: what to draw.
    path: of the picture; its suffix decides the format.
    title: above all.

  Raises:
    ImportError: if matplotlib is missing.
    ValueError: if it knows no such format.
  """
  plt = _pyplot(path)
  parts = [
    (what, counts)
    for what in ("kind", "layer", "expert")
    if (counts := found.by(what))
  ]
  heights = [1 + 0.25 * min(len(counts), 40) for _, counts in parts]
  figure, axes = plt.subplots(
    max(1, len(parts)),
    figsize=(9, max(2.0, sum(heights))),
    height_ratios=heights or [1],
    layout="constrained",
    squeeze=False,
  )
  for ax, (what, counts) in zip(axes[:, 0], parts, strict=False):
    shares = [100 * count.density for count in counts.values()]
    if len(counts) <= 40:
      ax.barh([str(name) for name in counts], shares)
      ax.invert_yaxis()
      ax.set(xlabel="% of elements that changed", title=f"by {what}")
    else:
      ax.bar(range(len(shares)), shares, width=1.0)
      ax.set(xlabel=what, ylabel="% changed", title=f"by {what}")
    ax.grid(alpha=0.3)
  count, size = found.total
  figure.suptitle(
    f"{title}: {count.density:.3%} changed, delta {human_bytes(size.delta)}"
    f" of {human_bytes(size.full)}"
  )
  figure.savefig(path, dpi=150)
  plt.close(figure)


def _pyplot(path: Path):
  try:
    import matplotlib as mpl
  except ImportError:
    raise ImportError(
      "--plot needs matplotlib: pip install 'composer-jax[demo]'"
    ) from None
  mpl.use("agg")
  from matplotlib import backend_bases, pyplot

  if path.suffix[1:] not in backend_bases.FigureCanvasBase.filetypes:
    raise ValueError(f"{path} is no kind of picture: try .png, .pdf or .svg")
  return pyplot
