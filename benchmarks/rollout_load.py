"""Does every token of many long rollouts end where it belongs?

`launch/serve.py` runs as a process of its own and follows a chain. Rollouts of
many turns, all at the same time, each in a sandbox of its own, ask it over
HTTP, while new versions of the weights are published. What samples is the tiny
model with random weights, which calls no tools: so each reply is taken for the
next call of a script (`Scripted.parse`). All else is what training runs:
harness, tools, sandboxes, sessions, endpoints, trajectories.

Three other books are kept of it. `differs`: places where a trajectory is not
what went over the wire, see `rollout_wire`: ids, mask, log-probabilities,
versions, routes. `lost`: tokens that the server counted as sampled, less those
under a mask. And of a sample of trajectories, plain forward passes without a
cache, by the weights of the version that each token names: `wrong` positions
have other experts, or the sampled token after them another log-probability.
(Where nothing was sampled, the experts are those of a version that served
between the neighbours.) `near_ties` would be wrong, but for a router's two next
best scores that are all but equal; see `serving_check`. `control` is the share
of the sampled tokens that the same check refuses under another version's
weights, and should be near 1.

    python -m benchmarks.rollout_load --json      # 15 minutes on two busy cores

Rows: sessions, turns, requests, failed (rollouts), versions (that sampled),
tokens, sampled, differs, lost, seconds, requests_per_s, rows_received (of
routes), rows_whole (had each turn resent those of its whole prompt), checked
(positions), wrong, near_ties, control.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import jax
import numpy as np
from jaxtyping import Bool, Int

from benchmarks.harness import arguments, report
from benchmarks.rollout_wire import Wire, differences
from benchmarks.serve_process import metrics, serving
from benchmarks.serving_check import NUDGES, TOLERANCE, Check, Nudge
from composer_jax.data import Tokenizer
from composer_jax.envs import harness, sandbox, tools
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.rl.endpoints import HttpEndpoint
from composer_jax.rl.rollout import RolloutConfig, Rollouts
from composer_jax.rl.sessions import Pool, PoolConfig
from composer_jax.rl.trajectory import Sampling, Trajectory
from composer_jax.serving import Weights, serving_weights
from composer_jax.serving.chat import HermesFormat
from composer_jax.serving.dialect import ChatDialect
from composer_jax.shipping import Publisher, open_store

TEMPERATURE = 0.8
_MARKERS = ("<|im_start|>", "<|im_end|>")


@dataclasses.dataclass(frozen=True)
class Load:
  """What is asked of a server.

  Attributes:
    sessions: at once.
    turns: of each.
    sampled: tokens of each reply, at most.
    versions: that serve in turn.
    checked: trajectories that forward passes check, at most.
    max_len: of a transcript, in tokens.
  """

  sessions: int = 64
  turns: int = 50
  sampled: int = 8
  versions: int = 4
  checked: int = 16
  max_len: int = 4096


QUICK = Load(sessions=6, turns=8, versions=3, checked=6, max_len=2048)


def main() -> None:
  """Prints one row."""
  args = arguments(__doc__.splitlines()[0])
  with tempfile.TemporaryDirectory() as folder:
    row = measure(QUICK if args.quick else Load(), Path(folder))
  report([row], as_json=args.json)


def measure(load: Load, folder: Path) -> dict:
  """Runs all rollouts against one server, and checks them.

  Args:
    load: how many, and how long.
    folder: an empty one, for the chain and the tokenizer.
  """
  model = LanguageModel(PRESETS["tiny"]())
  tokenizer = _tokenizer(model.config.vocab_size)
  tokenizer.save(folder / "tokenizer.json")
  trees = _weights(model, load.versions)
  about = {"model": dataclasses.asdict(model.config)}
  wire = Wire()
  with Publisher(open_store(str(folder / "chain"))) as publisher:
    published: dict[int, Weights] = {}

    def publish() -> int:
      tree = trees[len(published)]
      version = publisher.publish(tree, about).result()
      published[version] = tree
      return version

    publish()
    with serving(
      [
        f"--store={folder / 'chain'}",
        f"--tokenizer={folder / 'tokenizer.json'}",
        f"--max_len={load.max_len}",
        # No prompt is short: others would only be compiled.
        f"--contexts={load.max_len}",
        f"--max_rows={min(load.sessions, 64)}",
        "--interval_s=0.05",
      ]
    ) as url:
      began = time.perf_counter()
      ended = asyncio.run(_roll_out(url, load, tokenizer, publish, wire))
      seconds = time.perf_counter() - began
      counts = metrics(url)
  done = {n: t for n, t in enumerate(ended) if isinstance(t, Trajectory)}
  exchanges = wire.exchanges()
  by_seed = {exchange.request["seed"]: exchange for exchange in exchanges}
  differs = len(exchanges) - len(by_seed)  # Answered more than once.
  for number, trajectory in done.items():
    turns = [by_seed[seed] for seed in _seeds(number, load.turns)]
    found = differences(trajectory, turns)
    differs += len(found)
    for problem in found:
      print(f"Session {number}: {problem}", file=sys.stderr)
  sampled = sum(int(t.loss_mask.sum()) for t in done.values())
  whole = [len(e.request["prompt_token_ids"]) - 1 for e in exchanges]
  skipped = [e.request["prompt_routes_from"] for e in exchanges]
  rows = sum(whole) + sampled
  row = {
    "sessions": load.sessions,
    "turns": load.turns,
    "requests": len(exchanges),
    "failed": load.sessions - len(done),
    "versions": len(
      {v for t in done.values() for v in t.versions[t.loss_mask].tolist()}
    ),
    "tokens": sum(map(len, done.values())),
    "sampled": sampled,
    "differs": differs,
    "lost": int(counts["composer_engine_sampled_tokens_total"]) - sampled,
    "seconds": seconds,
    "requests_per_s": len(exchanges) / seconds,
    "rows_received": rows - sum(skipped),
    "rows_whole": rows,
  }
  print(row, file=sys.stderr, flush=True)  # The checks take minutes.
  return row | check(
    model, published, list(done.values())[: load.checked], load
  )


def _tokenizer(vocab_size: int) -> Tokenizer:
  """Of these sources, in whose words the tools speak; turns have own tokens."""
  sources = [
    Path(m.__file__).read_text("utf-8") for m in (harness, tools, sandbox)
  ]
  plain = Tokenizer.train(sources, vocab_size - len(_MARKERS))
  spec = json.loads(plain.to_json())
  for i, name in enumerate(_MARKERS):
    token = spec["added_tokens"][0] | {"id": plain.vocab_size + i}
    spec["added_tokens"].append(token | {"content": name})
  return Tokenizer(json.dumps(spec))


def _weights(model: LanguageModel, versions: int) -> list[Weights]:
  init, trees = jax.jit(model.init), []
  for seed in range(versions):
    params, balance = init(jax.random.key(seed))
    # A new model's logits are all but equal; versions must differ in theirs.
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    trees.append(serving_weights(model, params, balance))
  return trees


# ---- Rollouts ----------------------------------------------------------------


class Scripted(ChatDialect):
  """Takes each reply for the next call of a script, whatever it says."""

  def __init__(self, chat: HermesFormat, tokenizer: Tokenizer, number: int):
    """Begins the script of a session."""
    super().__init__(chat, tokenizer.spellings)
    self._script = _calls(number)

  def parse(self, reply):
    """See `composer_jax.envs.harness.Dialect`."""
    said, _ = super().parse(reply)
    name, arguments = next(self._script)
    return said, [(name, json.dumps(arguments))]


def _calls(number: int) -> Iterator[tuple[str, dict]]:
  """Calls without end, some of them wrong; results tell sessions apart."""
  for turn in itertools.count():
    yield from (
      ("run_command", {"command": f"echo {number} {turn}"}),
      ("write_file", {"path": f"{turn}", "content": f"{number}"}),
      ("read_file", {"path": f"{turn}"}),
      ("edit_file", {"path": f"{turn}", "old": f"{number}", "new": "x"}),
      ("read_file", {"path": f"no {turn}"}),
      ("no_tool", {}),
    )


async def _roll_out(
  url: str,
  load: Load,
  tokenizer: Tokenizer,
  publish: Callable[[], int],
  wire: Wire,
) -> list:
  """All rollouts at once: trajectories, or what failed."""
  total = load.sessions * load.turns
  # The n-th version comes when so much of the work is done.
  due = {total * n // load.versions for n in range(1, load.versions)}
  done = itertools.count(1)
  loop = asyncio.get_running_loop()
  chat = HermesFormat(tokenizer)
  provider = Bubblewrap()
  budget = harness.Budget(
    turns=load.turns,
    tokens=load.max_len,
    turn_tokens=load.sampled,
    wall_s=3600.0,
  )
  config = RolloutConfig(Sampling(TEMPERATURE), max_rollouts=load.sessions)
  with concurrent.futures.ThreadPoolExecutor(1) as publisher:
    async with aiohttp.ClientSession(
      connector=aiohttp.TCPConnector(limit=0), trace_configs=[wire.trace]
    ) as client:
      endpoint = HttpEndpoint(client, url, "composer-jax", chat)
      pool = Pool([endpoint], PoolConfig(max_requests=load.sessions))
      rollouts = Rollouts(pool, config)

      def publishing(sampler: harness.Sampler) -> harness.Sampler:
        async def sample(prompt, max_tokens):
          answer = await sampler(prompt, max_tokens)
          if next(done) in due:
            # This session goes on once it serves; the others don't wait.
            version = await loop.run_in_executor(publisher, publish)
            while await _version(client, url) < version:
              await asyncio.sleep(0.02)
          return answer

        return sample

      async def play(number, sampler):
        async with await provider.create() as box:
          transcript = await harness.run(
            publishing(sampler),
            Scripted(chat, tokenizer, number),
            box,
            tools.Toolbox(),
            f"Session {number}.",
            budget,
          )
        return transcript, {}

      return await asyncio.gather(
        *(
          rollouts.rollout(
            f"session-{number}", functools.partial(play, number), (0, number)
          )
          for number in range(load.sessions)
        )
      )


async def _version(client: aiohttp.ClientSession, url: str) -> int:
  async with client.get(f"{url}/health") as response:
    return (await response.json())["version"]


def _seeds(number: int, turns: int) -> list[int]:
  """Of each turn's request, as `composer_jax.rl.sessions` derives them."""
  return [
    int(np.random.SeedSequence((0, number, turn)).generate_state(1)[0])
    for turn in range(turns)
  ]


# ---- Forward passes ----------------------------------------------------------


def check(
  model: LanguageModel,
  published: dict[int, Weights],
  trajectories: list[Trajectory],
  load: Load,
) -> dict:
  """Compares trajectories with plain forward passes; columns of the table."""
  checker = Check(
    model, published, temperature=TEMPERATURE, max_len=load.max_len
  )
  checked = wrong = ties = refused = sampled = 0
  order = list(published)
  for trajectory in trajectories:
    compared = functools.cache(functools.partial(_compare, checker, trajectory))
    after = trajectory.loss_mask[1:]
    for version, other in itertools.pairwise([*order, order[0]]):
      named = after & (trajectory.versions[1:] == version)
      sampled += int(named.sum())
      refused += int((named & ~compared(other).fits).sum())
    for position in np.flatnonzero(trajectory.routed):
      checked += 1
      versions = _versions_at(trajectory, position, order)
      if any(compared(version).fits[position] for version in versions):
        continue
      tie = any(
        _is_tie(compared, trajectory, position, version) for version in versions
      )
      ties += tie
      wrong += not tie
  return {
    "checked": checked,
    "wrong": wrong,
    "near_ties": ties,
    "control": refused / sampled if sampled else None,
  }


class Compared(NamedTuple):
  """A trajectory of S tokens beside a pass over all but the last.

  Attributes:
    fits: where the pass gives what was served, the next token's chance, too.
    routes: the experts that it gives.
  """

  fits: Bool[np.ndarray, " S-1"]
  routes: Int[np.ndarray, "S-1 L K"]


def _compare(checker, trajectory, version, nudge=None) -> Compared:
  logprobs, routes = checker.forward(trajectory.token_ids, version, nudge)
  same = (routes == trajectory.routes[:-1]).all(axis=(1, 2))
  near = np.abs(logprobs - trajectory.logprobs[1:]) < TOLERANCE
  return Compared(same & (near | ~trajectory.loss_mask[1:]), routes)


def _versions_at(trajectory, position, order) -> list[int]:
  """By which a position may have been computed.

  The pass over it gave what comes next; what was not sampled names no version,
  but was computed between its neighbours.
  """
  sampled = np.flatnonzero(trajectory.loss_mask)
  named = trajectory.versions[sampled]
  after = int(np.searchsorted(sampled, position + 1))
  first = last = order.index(named[after])
  if not trajectory.loss_mask[position + 1]:
    first = order.index(named[after - 1]) if after else 0
  return order[first : last + 1]


def _is_tie(compared, trajectory, position, version) -> bool:
  """Whether a router's near tie, there or before, explains what was served.

  Wherever experts differ, in the first layer where they do, those that were
  served and shouldn't have been are made likelier.
  """
  served, right = trajectory.routes[: position + 1], compared(version).routes
  differ = (served != right[: position + 1]).any(axis=2)
  for place in np.flatnonzero(differ.any(axis=1)):
    layer = int(differ[place].argmax())
    for expert in set(served[place, layer]) - set(right[place, layer]):
      for by in NUDGES:
        nudge = Nudge(layer, int(expert), by)
        if compared(version, nudge).fits[position]:
          return True
  return False


if __name__ == "__main__":
  main()
