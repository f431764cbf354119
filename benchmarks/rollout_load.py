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
cache, by the weights of the version that each token names: `wrong_tokens` have
another log-probability, `wrong_routes` are positions with other experts (those
that were not sampled have the experts of one of the versions that served
between their neighbours). `control` is the share of the sampled tokens that the
same check refuses under another version's weights, and should be near 1.

    python -m benchmarks.rollout_load --json      # 15 minutes on two busy cores

Rows: sessions, turns, requests, failed (rollouts), versions (that sampled),
tokens, sampled, differs, lost, seconds, requests_per_s, rows_received (of
routes), rows_whole (had each turn resent those of its whole prompt), checked
(positions), wrong_tokens, wrong_routes, control.
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

import aiohttp
import jax
import numpy as np

from benchmarks.harness import arguments, report
from benchmarks.rollout_wire import Wire, differences
from benchmarks.serve_process import metrics, serving
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
# Rounding of another order of summation moves a log-probability by some 1e-5.
TOLERANCE = 1e-3
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
  forward = jax.jit(model.apply)
  order = list(published)
  checked = wrong_tokens = wrong_routes = refused = compared = 0
  for trajectory in trajectories:
    size, sampled = len(trajectory), np.flatnonzero(trajectory.loss_mask)
    padded = np.zeros((1, load.max_len), np.int32)
    padded[0, :size] = trajectory.token_ids
    near, experts = {}, {}
    for version, weights in published.items():
      out = forward(weights["params"], weights["balance"], padded)
      logits = np.asarray(out.logits, np.float64)[0, sampled - 1] / TEMPERATURE
      logits -= logits.max(axis=-1, keepdims=True)
      total = np.log(np.exp(logits).sum(axis=-1))
      tokens = trajectory.token_ids[sampled]
      drawn = logits[np.arange(len(sampled)), tokens] - total
      off = np.abs(drawn - trajectory.logprobs[sampled])
      near[version] = off < TOLERANCE
      same = np.asarray(out.routing.expert_ids)[:, 0, :size].transpose(1, 0, 2)
      experts[version] = (same == trajectory.routes).all(axis=(1, 2))
    named = trajectory.versions[sampled]
    for i, version in enumerate(named.tolist()):
      wrong_tokens += not near[version][i]
      others = [v for v in published if v != version]
      refused += not near[others[0]][i]
      compared += 1
    for position in np.flatnonzero(trajectory.routed):
      # The pass gave what comes next; what was not sampled names no version.
      after = int(np.searchsorted(sampled, position + 1))
      last = order.index(named[after])
      first = last
      if not trajectory.loss_mask[position + 1]:
        first = order.index(named[after - 1]) if after else 0
      versions = order[first : last + 1]
      wrong_routes += not any(experts[v][position] for v in versions)
      checked += 1
  return {
    "checked": checked,
    "wrong_tokens": wrong_tokens,
    "wrong_routes": wrong_routes,
    "control": refused / compared if compared else None,
  }


if __name__ == "__main__":
  main()
