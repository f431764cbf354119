"""Do many agents at once get the right tokens while the weights change?

`launch/serve.py` runs as a process of its own and follows a chain. Sessions,
all at the same time, ask it turn by turn over HTTP, token ids in and out: each
turn's prompt is the last one, its answer, and some new tokens. Meanwhile new
versions are published, at even shares of the work.

Then every token is compared with plain forward passes without a cache, by the
weights of the version that it names: log-probability and experts;
`serving_check` says how, and what it writes to stderr of a token that isn't
right. `control` is the share of tokens that the same check refuses when it
takes another version's weights; it says how much the check can see, and should
be near 1.

    python -m benchmarks.serving_load --json     # 8 minutes on two busy cores

Rows: prefix_sharing, sessions, turns, requests, failed, versions (that answered
with tokens), swaps, swap_ms (mean pause), preemptions, tokens, lost (sampled,
by the server's own count, less those that arrived; below 0: duplicated),
tokens_per_second, ms_per_token (median over requests, after the first),
first_token_ms_p50 and _p99, prefix_hit_share, checked, wrong, near_ties, stale,
backwards (of versions), control.
"""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import jax
import numpy as np

from benchmarks.harness import arguments, report
from benchmarks.serve_process import metrics, serving
from benchmarks.serving_check import Answer, Check
from composer_jax.data import Tokenizer
from composer_jax.models import PRESETS, LanguageModel
from composer_jax.serving import Weights, serving_weights
from composer_jax.serving.arrays import unpack
from composer_jax.shipping import Publisher, open_store

MAX_LEN = 1024
TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True)
class Load:
  """What is asked of a server.

  Attributes:
    sessions: at once.
    turns: of each.
    opening: tokens of a session's first prompt.
    said: new tokens of each later turn.
    sampled: tokens of each answer.
    versions: that serve in turn.
    cache_tokens: of the engine; see `EngineConfig`.
  """

  sessions: int = 64
  turns: int = 20
  opening: int = 48
  said: int = 8
  sampled: int = 32
  versions: int = 8
  cache_tokens: int = 0


QUICK = Load(sessions=8, turns=12, sampled=12, versions=3)


def main() -> None:
  """Loads one server that shares prefixes, and one that doesn't."""
  args = arguments(__doc__.splitlines()[0])
  rows = []
  with tempfile.TemporaryDirectory() as scratch:
    for prefix_sharing in (True, False):
      load = QUICK if args.quick else Load()
      folder = Path(scratch) / str(prefix_sharing)
      rows.append(measure(load, folder, prefix_sharing=prefix_sharing))
      print(rows[-1], file=sys.stderr, flush=True)
  report(rows, as_json=args.json)


def measure(load: Load, folder: Path, *, prefix_sharing: bool) -> dict:
  """Loads one server; one row of the table.

  Args:
    load: what is asked.
    folder: for the chain and the tokenizer; made here.
    prefix_sharing: of the engine.
  """
  folder.mkdir(parents=True)
  model = LanguageModel(PRESETS["tiny"]())
  # A vocabulary of any text does: no text is sent.
  Tokenizer.train(["def f(x): return x"], 300).save(folder / "tokenizer.json")
  trees = [_weights(model, seed) for seed in range(load.versions)]
  about = {"model": dataclasses.asdict(model.config)}
  flags = [
    f"--store={folder / 'chain'}",
    f"--tokenizer={folder / 'tokenizer.json'}",
    f"--prefix_sharing={prefix_sharing}",
    f"--max_len={MAX_LEN}",
    f"--max_rows={min(load.sessions, 64)}",
    f"--cache_tokens={load.cache_tokens}",
    "--interval_s=0.05",
  ]
  with Publisher(open_store(str(folder / "chain"))) as publisher:
    first = publisher.publish(trees[0], about).result()
    published = {first: trees[0]}

    def publish() -> int:
      tree = trees[len(published)]
      version = publisher.publish(tree, about).result()
      published[version] = tree
      return version

    with serving(flags) as url:
      sessions, failed, seconds = asyncio.run(_load(url, load, publish))
      counts = metrics(url)
  check = Check(model, published, temperature=TEMPERATURE, max_len=MAX_LEN)
  answers = [answer for session in sessions for answer in session]
  tokens = sum(len(answer.token_ids) for answer in answers)
  gaps = [(a.total_s - a.first_s) / (load.sampled - 1) for a in answers]
  first_ms = [1e3 * answer.first_s for answer in answers]
  swaps = counts["composer_swap_pause_seconds_count"]
  pauses = counts["composer_swap_pause_seconds_sum"]
  return {
    "prefix_sharing": prefix_sharing,
    "sessions": load.sessions,
    "turns": load.turns,
    "requests": len(answers) + failed,
    "failed": failed,
    "versions": len({v for answer in answers for v in answer.versions}),
    "swaps": int(swaps),
    "swap_ms": 1e3 * pauses / swaps,
    "preemptions": int(counts["composer_engine_preemptions_total"]),
    "tokens": tokens,
    "lost": int(counts["composer_engine_sampled_tokens_total"]) - tokens,
    "tokens_per_second": tokens / seconds,
    "ms_per_token": 1e3 * float(np.median(gaps)),
    "first_token_ms_p50": float(np.percentile(first_ms, 50)),
    "first_token_ms_p99": float(np.percentile(first_ms, 99)),
    "prefix_hit_share": sum(answer.cached for answer in answers)
    / sum(len(answer.prompt) for answer in answers),
  } | check(sessions)


def _weights(model: LanguageModel, seed: int) -> Weights:
  params, balance = jax.jit(model.init)(jax.random.key(seed))
  # A new model's logits are all but equal; versions must differ in theirs.
  params = jax.tree.map(lambda leaf: 2 * leaf, params)
  return serving_weights(model, params, balance)


# ---- Asking ------------------------------------------------------------------


async def _load(
  url: str, load: Load, publish: Callable[[], int]
) -> tuple[list[list[Answer]], int, float]:
  """All sessions at once: their answers, how many failed, and seconds."""
  total = load.sessions * load.turns
  done, failed = itertools.count(1), 0
  # The n-th version comes when so much of the work is done.
  due = {total * n // load.versions for n in range(1, load.versions)}
  loop = asyncio.get_running_loop()
  with concurrent.futures.ThreadPoolExecutor(1) as publisher:
    async with aiohttp.ClientSession(
      url, connector=aiohttp.TCPConnector(limit=0)
    ) as http:

      async def session(nth: int) -> list[Answer]:
        nonlocal failed
        rng, answers = np.random.default_rng(nth), []
        vocab = PRESETS["tiny"]().vocab_size
        prompt = rng.integers(0, vocab, load.opening).tolist()
        for _ in range(load.turns):
          try:
            answer = await _ask(http, prompt, load.sampled)
          except (aiohttp.ClientError, _WrongAnswerError) as error:
            print(f"Session {nth}: {error!r}", file=sys.stderr)
            failed += load.turns - len(answers)
            break
          answers.append(answer)
          said = rng.integers(0, vocab, load.said).tolist()
          prompt = prompt + answer.token_ids + said
          if next(done) in due:
            # This session goes on once it serves; the others don't wait.
            version = await loop.run_in_executor(publisher, publish)
            while (await _health(http))["version"] < version:
              await asyncio.sleep(0.02)
        return answers

      began = time.perf_counter()
      sessions = await asyncio.gather(*map(session, range(load.sessions)))
      seconds = time.perf_counter() - began
  return sessions, failed, seconds


class _WrongAnswerError(Exception):
  """A turn that isn't what was asked for."""


async def _ask(
  http: aiohttp.ClientSession, prompt: list[int], count: int
) -> Answer:
  """One turn, as a stream."""
  body = {
    "model": "composer-jax",
    "prompt_token_ids": prompt,
    "max_tokens": count,
    "temperature": TEMPERATURE,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "return_versions": True,
    "return_routes": True,
  }
  choices, usage, first = [], {}, None
  began = time.perf_counter()
  async with http.post("/v1/completions", json=body) as response:
    if response.status != 200:
      raise _WrongAnswerError(f"{response.status}: {await response.text()}")
    async for line in response.content:
      data = line.removeprefix(b"data: ").strip()
      if not data or data == b"[DONE]":
        continue
      first = first or time.perf_counter() - began
      event = json.loads(data)
      if "error" in event:
        raise _WrongAnswerError(event["error"]["message"])
      choices += event["choices"]
      usage = event.get("usage") or usage
  total = time.perf_counter() - began

  def joined(name):
    return [value for choice in choices for value in choice[name]]

  answer = Answer(
    prompt,
    joined("token_ids"),
    joined("sampled_logprobs"),
    joined("versions"),
    joined("stale_cache"),
    np.concatenate([unpack(choice["routes"]) for choice in choices]),
    usage["prompt_tokens_details"]["cached_tokens"],
    first,
    total,
  )
  lengths = {len(getattr(answer, name)) for name in _COLUMNS}
  echo = choices[-1]["prompt_token_ids"]
  if lengths != {count} or usage["completion_tokens"] != count:
    raise _WrongAnswerError(f"{lengths} tokens came instead of {count}")
  if echo != prompt:
    raise _WrongAnswerError("another prompt was answered")
  return answer


_COLUMNS = ("token_ids", "logprobs", "versions", "stale", "routes")


async def _health(http: aiohttp.ClientSession) -> dict:
  async with http.get("/health") as response:
    return await response.json()


if __name__ == "__main__":
  main()
