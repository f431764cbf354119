"""Shows trajectories to people: as one HTML file, or as text for a terminal.

    python -m composer_jax.rl.viewer group.npz --tokenizer=tokenizer.json \
        --html=group.html               # without --html: text

Sampled tokens are shaded by log-probability, each with its id, its
log-probability and its weight version; where the version changes, a mark says
so. Prompts and observations are plain, calls are listed below their reply.

A transcript may hold anything: the page has no script, forbids itself to load
or run any, and escapes all text. Characters that a terminal obeys, or that turn
the direction of text, are shown as escapes in both.
"""

import argparse
import codecs
import dataclasses
import html
import itertools
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from composer_jax.data import Tokenizer
from composer_jax.envs.harness import Dialect
from composer_jax.rl.trajectory import Group, Trajectory
from composer_jax.serving.chat import HermesFormat
from composer_jax.serving.dialect import ChatDialect

# Shades from sure to surprising: the steps' upper bounds, in nats.
_SHADES = (0.1, 0.5, 1.0, 2.0, 4.0)
# Controls, formats (bidirectional ones too), halves of pairs, private ones.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1em;
  max-width: 60em; color: #1b1b1b; background: #fff }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; padding: .5em .7em }
section > details, section > div { border: 1px solid #ccc; margin: .5em 0;
  border-radius: 4px }
summary, h3 { font: 600 12px system-ui, sans-serif; margin: 0;
  padding: .3em .7em; background: #f0f0f0; color: #444 }
table { border-collapse: collapse } td, th { padding: 0 1em 0 0;
  text-align: left; font-weight: normal } td { font-variant: tabular-nums }
.call { background: #eef4ff; border-top: 1px solid #ccc }
.v { font: 600 10px system-ui, sans-serif; color: #fff; background: #06c;
  border-radius: 3px; padding: 0 .3em; margin: 0 .2em }
.s1 { background: #fff6d6 } .s2 { background: #ffe9a8 }
.s3 { background: #ffd080 } .s4 { background: #ffb08a }
.s5 { background: #ff8f8f }
"""


@dataclasses.dataclass(frozen=True)
class Part:
  """A run of tokens of one origin.

  Attributes:
    kind: "prompt", "reply" or "observation".
    start: of the run.
    stop: its end.
    texts: of each token: the characters that it completed.
    calls: that a reply makes: names, and arguments as JSON.
  """

  kind: str
  start: int
  stop: int
  texts: list[str]
  calls: list[tuple[str, str]]


def parts(
  trajectory: Trajectory,
  spellings: Sequence[bytes],
  dialect: Dialect | None = None,
) -> Iterator[Part]:
  """Splits a trajectory into prompts, replies and observations.

  Args:
    trajectory: to split; each context window begins with a prompt.
    spellings: the bytes of each token, as `Tokenizer.spellings`.
    dialect: finds the calls; None: they are not looked for.
  """
  for first, last in trajectory.windows:
    mask = trajectory.loss_mask[first:last]
    turns = np.flatnonzero(np.diff(mask)) + 1
    for start, stop in itertools.pairwise((0, *turns.tolist(), len(mask))):
      ids = trajectory.token_ids[first + start : first + stop].tolist()
      kind = "observation" if start else "prompt"
      calls = []
      if mask[start]:
        kind = "reply"
        calls = dialect.parse(ids)[1] if dialect else []
      yield Part(
        kind, first + start, first + stop, _texts(ids, spellings), calls
      )


def to_html(
  trajectories: Sequence[Trajectory],
  spellings: Sequence[bytes],
  dialect: Dialect | None = None,
  title: str = "Trajectories",
) -> str:
  """One page that needs nothing else; arguments as of `parts`."""
  body = "".join(
    _section(number, trajectory, spellings, dialect)
    for number, trajectory in enumerate(trajectories, 1)
  )
  bounds = (0.0, *_SHADES)
  legend = " ".join(
    f'<span class="s{i}">from &minus;{low:g}</span>'
    for i, low in enumerate(bounds)
  )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta http-equiv="Content-Security-Policy" content="default-src'
    " 'none'; style-src 'unsafe-inline'\">\n"
    f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>\n"
    f"<h1>{_escaped(title)}</h1>\n<p>Log-probability: {legend}</p>\n"
    f"{body}</body></html>\n"
  )


def to_text(
  trajectory: Trajectory,
  spellings: Sequence[bytes],
  dialect: Dialect | None = None,
) -> str:
  """The same for a terminal, without shades; arguments as of `parts`."""
  lines = [f"{name}: {value}" for name, value in _facts(trajectory)]
  version = None
  for part in parts(trajectory, spellings, dialect):
    text = ""
    for i, piece in enumerate(part.texts, part.start):
      if part.kind == "reply" and trajectory.versions[i] != version:
        version = trajectory.versions[i]
        text += f"[v{version}]"
      text += visible(piece)
    lines += ["", _heading(trajectory, part)]
    # Indented, so that no content can pass for a heading.
    lines += ["  | " + line for line in text.split("\n")]
    lines += [
      f"calls {_line(name)} {_line(arguments)}"
      for name, arguments in part.calls
    ]
  return "\n".join(lines) + "\n"


def visible(text: str) -> str:
  """Text with escapes for what a reader would not see, or a terminal obey."""
  return "".join(
    ascii(c)[1:-1]
    if c not in "\n\t" and unicodedata.category(c) in _HIDDEN
    else c
    for c in text
  )


def _section(number, trajectory, spellings, dialect) -> str:
  rows = "".join(
    f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>"
    for name, value in _facts(trajectory)
  )
  shown = [f"<section><h2>{number}</h2><table>{rows}</table>"]
  version = None
  for part in parts(trajectory, spellings, dialect):
    heading = _escaped(_heading(trajectory, part))
    if part.kind != "reply":
      # A line break right after <pre> would be dropped.
      text = "\n" + _escaped("".join(part.texts))
      opened = " open" if part.kind == "observation" else ""
      shown.append(
        f"<details{opened}><summary>{heading}</summary><pre>{text}</pre>"
        "</details>"
      )
      continue
    tokens = []
    for i, piece in enumerate(part.texts, part.start):
      if trajectory.versions[i] != version:
        version = trajectory.versions[i]
        tokens.append(f'<b class="v">v{version}</b>')
      tokens.append(_token(trajectory, i, piece))
    calls = "".join(
      f'<pre class="call">\n{_escaped(f"{name} {arguments}")}</pre>'
      for name, arguments in part.calls
    )
    shown.append(
      f'<div class="reply"><h3>{heading}</h3><pre>\n{"".join(tokens)}</pre>'
      f"{calls}</div>"
    )
  return "\n".join([*shown, "</section>\n"])


def _token(trajectory, i, piece) -> str:
  logprob = float(trajectory.logprobs[i])
  shade = int(np.searchsorted(_SHADES, -logprob, side="right"))
  about = (
    f"{i}: token {trajectory.token_ids[i]}, {logprob:.4g},"
    f" v{trajectory.versions[i]}"
  )
  return f'<span class="s{shade}" title="{about}">{_escaped(piece)}</span>'


def _facts(trajectory) -> Iterator[tuple[str, str]]:
  versions = trajectory.versions[trajectory.loss_mask]
  sampling = trajectory.sampling
  yield "task", _line(trajectory.task_id)
  yield "reward", f"{trajectory.reward:g}"
  for name, part in trajectory.rewards.items():
    yield f"  {_line(name)}", f"{part:g}"
  yield "stop reason", _line(trajectory.stop_reason)
  yield "tokens", f"{len(trajectory)}, {len(versions)} sampled"
  if versions.size:
    changes = np.count_nonzero(np.diff(versions))
    yield (
      "versions",
      f"{versions.min()} to {versions.max()}, changes: {changes}",
    )
    logprobs = trajectory.logprobs[trajectory.loss_mask]
    yield "mean log-probability", f"{logprobs.mean():.4g}"
  yield (
    "sampling",
    f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g},"
    f" top-k {sampling.top_k}",
  )


def _heading(trajectory, part) -> str:
  heading = f"{part.kind}, tokens {part.start} to {part.stop - 1}"
  if part.kind == "reply":
    mean = trajectory.logprobs[part.start : part.stop].mean()
    heading += f", mean log-probability {mean:.3g}"
  return heading


def _texts(ids, spellings) -> list[str]:
  """What each token completes; bytes that aren't UTF-8 become U+FFFD."""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  texts = [
    decoder.decode(spellings[i] if i < len(spellings) else b"") for i in ids
  ]
  texts[-1] += decoder.decode(b"", final=True)
  return texts


def _failures(group: Group) -> str:
  failed = ", ".join(f"{n} by {what}" for what, n in group.failures.items())
  return f" (failed: {failed})" if failed else ""


def _line(text: str) -> str:
  return visible(text).replace("\n", "\\n")


def _escaped(text: str) -> str:
  return html.escape(visible(text))


def main(argv: Sequence[str] | None = None) -> None:
  """Shows a file that `Group.save` wrote."""
  parser = argparse.ArgumentParser(
    prog="python -m composer_jax.rl.viewer", description=main.__doc__
  )
  parser.add_argument("group", type=Path)
  parser.add_argument("--tokenizer", type=Path, required=True)
  parser.add_argument("--html", type=Path, help="where to write the page")
  args = parser.parse_args(argv)
  try:
    group = Group.load(args.group)
    tokenizer = Tokenizer.load(args.tokenizer)
  except (OSError, ValueError) as error:
    sys.exit(str(error))
  spellings = tokenizer.spellings
  dialect = ChatDialect(HermesFormat(tokenizer), spellings)
  if args.html:
    title = f"Task {group.task_id}{_failures(group)}"
    page = to_html(group.trajectories, spellings, dialect, title)
    args.html.write_text(page, encoding="utf-8")
    return
  print(f"Task {_line(group.task_id)}{_line(_failures(group))}\n")
  for trajectory in group.trajectories:
    print(to_text(trajectory, spellings, dialect))


if __name__ == "__main__":
  main()
