"""Is each served token what the weights that it names give?

Log-probability and experts of tokens that a server sampled, against plain
forward passes without a cache. Two right computations may differ in a token's
experts: they sum in other orders, so that a router's two next best scores,
where all but equal, may change places; what reads the token then differs by
more than rounding. Such a *near tie* isn't taken on trust: the forward pass is
repeated with one expert's selection bias moved by no more than `TIE`, and
must then give just what was served.

What a token that isn't right differs in goes to stderr, a JSON object each:

* session, turn, token: which, from 0; position: in its row; cached: tokens of
  its prompt that came from the cache; since_swap: tokens since the version
  changed in the answer, null if it hadn't.
* version: that it names; fits: the published versions that would be right.
* logprob_off: what was served less what is right; experts: served and right, of
  the layers where they differ.
* tie: the nudge that makes it right, `[MoE layer, expert, by]`, or null.
"""

import dataclasses
import itertools
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from composer_jax.models import LanguageModel
from composer_jax.serving import Weights

# Rounding of another order of summation moves a log-probability by some 1e-5.
TOLERANCE = 1e-3
# It moves a router's score by at most 8e-6 (whole forward passes against chunks
# of 64 and single tokens over a cache, 8 sets of weights, 832 tokens each), so
# it can swap two that are up to twice as far apart.
TIE = 2e-5
NUDGES = (2e-7, 2e-6, TIE)
# The search for ties takes seconds a row; what fails more often isn't one.
_MOST_EXAMINED = 16


@dataclasses.dataclass(frozen=True)
class Answer:
  """One turn, as it arrived, N tokens.

  Attributes:
    prompt: token ids that were sent.
    token_ids: sampled, like the next four.
    logprobs: in the distribution sampled from.
    versions: of the weights.
    stale: whether a token's cache was of other weights.
    routes: experts, `[N, moe_layers, top_k]`.
    cached: prompt tokens found in the cache, by the server's count.
    first_s: from the request to the first token.
    total_s: to the last.
  """

  prompt: list[int]
  token_ids: list[int]
  logprobs: list[float]
  versions: list[int]
  stale: list[bool]
  routes: Int[np.ndarray, "N L K"]
  cached: int
  first_s: float
  total_s: float


class Nudge(NamedTuple):
  """A small change of one selection bias.

  Attributes:
    layer: among the MoE layers.
    expert: which becomes likelier.
    by: how much, in units of the router's score.
  """

  layer: int
  expert: int
  by: float


class Row(NamedTuple):
  """A session as its last request left it, S tokens of which N were sampled.

  Attributes:
    tokens: all of them.
    turn: of each sampled one, like the rest.
    index: in its answer.
    position: in the row.
    logprob: in the distribution sampled from.
    version: that it names.
    routes: experts.
    since_swap: tokens since the version changed in the answer; -1: it hadn't.
  """

  tokens: Int[np.ndarray, " S"]
  turn: Int[np.ndarray, " N"]
  index: Int[np.ndarray, " N"]
  position: Int[np.ndarray, " N"]
  logprob: Float[np.ndarray, " N"]
  version: Int[np.ndarray, " N"]
  routes: Int[np.ndarray, "N L K"]
  since_swap: Int[np.ndarray, " N"]


class Truth(NamedTuple):
  """What weights give for a row's sampled tokens.

  Attributes:
    logprob: like `Row.logprob`.
    routes: like `Row.routes`.
    fits: whether the row has the same but for rounding.
  """

  logprob: Float[np.ndarray, " N"]
  routes: Int[np.ndarray, "N L K"]
  fits: Bool[np.ndarray, " N"]


def row_of(session: list[Answer]) -> Row:
  """Joins the turns of a session, each of which continues the one before.

  Raises:
    ValueError: one doesn't.
  """
  last = session[-1]
  tokens = last.prompt + last.token_ids
  columns: list[tuple] = []
  for turn, answer in enumerate(session):
    start = len(answer.prompt)
    own = answer.prompt + answer.token_ids
    if own != tokens[: len(own)]:
      raise ValueError(f"Turn {turn} isn't the beginning of the last turn.")
    index = np.arange(len(answer.token_ids))
    changed = np.diff(answer.versions, prepend=answer.versions[:1]) != 0
    swap = np.maximum.accumulate(np.where(changed, index, -1))
    columns.append(
      (
        np.full(len(index), turn),
        index,
        start + index,
        np.array(answer.logprobs),
        np.array(answer.versions),
        answer.routes,
        np.where(swap < 0, -1, index - swap),
      )
    )
  return Row(np.array(tokens), *map(np.concatenate, zip(*columns, strict=True)))


class Check:
  """Compares sessions with forward passes of one model.

  Attributes:
    published: weights by version.
  """

  def __init__(
    self,
    model: LanguageModel,
    published: dict[int, Weights],
    *,
    temperature: float,
    max_len: int,
  ):
    """Compiles nothing yet.

    Args:
      model: that was served.
      published: weights by version.
      temperature: of the sampling.
      max_len: of a row, to which all are padded.
    """
    self.published = published
    self._max_len = max_len
    # One stack of MoE layers, whose biases are one array.
    (self._biases,) = jax.tree.leaves(model.balance_shapes)
    self._examined = 0

    @jax.jit
    def forward(params, balance, tokens):
      out = model.apply(params, balance, tokens[None])
      logprobs = jax.nn.log_softmax(out.logits[0, :-1] / temperature)
      drawn = jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]
      return drawn, out.routing.expert_ids[:, 0, :-1].transpose(1, 0, 2)

    self._forward = forward

  def __call__(self, sessions: list[list[Answer]]) -> dict:
    """Checks all tokens; columns of a benchmark's table.

    Args:
      sessions: the answers of each, in order.

    Returns:
      checked: tokens; wrong: of them, those that are not right, nor near_ties;
      stale: tokens that say that they are; backwards: how often a later token
      of a session names an earlier version; control: the share of tokens that
      the weights of another version don't fit.
    """
    tokens = wrong = ties = stale = backwards = seen = 0
    for nth, session in enumerate(sessions):
      if not session:
        continue
      row = row_of(session)
      tokens += len(row.version)
      stale += sum(sum(answer.stale) for answer in session)
      backwards += int((np.diff(row.version) < 0).sum())
      truths = {v: self.truth(row, v) for v in self.published}
      for report in self._failures(row, truths):
        report |= {"cached": session[report["turn"]].cached}
        print(json.dumps({"session": nth} | report), file=sys.stderr)
        ties += report["tie"] is not None
        wrong += report["tie"] is None
      for other, named in itertools.pairwise([*truths, next(iter(truths))]):
        seen += int((~truths[other].fits & (row.version == named)).sum())
    return {
      "checked": tokens,
      "wrong": wrong,
      "near_ties": ties,
      "stale": stale,
      "backwards": backwards,
      "control": seen / tokens,
    }

  def truth(self, row: Row, version: int, nudge: Nudge | None = None) -> Truth:
    """What a version's weights give for a row, after a nudge to them if any."""
    out = self.forward(row.tokens, version, nudge)
    # The pass over a token's predecessor is what it was sampled from.
    logprob, routes = (part[row.position - 1] for part in out)
    fits = np.abs(row.logprob - logprob) < TOLERANCE
    fits &= (row.routes == routes).all(axis=(1, 2))
    return Truth(logprob, routes, fits)

  def forward(
    self,
    tokens: Int[np.ndarray, " S"],
    version: int,
    nudge: Nudge | None = None,
  ) -> tuple[Float[np.ndarray, " S-1"], Int[np.ndarray, "S-1 L K"]]:
    """What weights give at each token but the last, by one plain forward pass.

    Args:
      tokens: a row.
      version: of the weights.
      nudge: to them.

    Returns:
      The log-probability of the token that comes next, and the experts.
    """
    weights = self.published[version]
    balance = weights["balance"]
    if nudge:
      balance = jax.tree.map(lambda bias: _nudged(bias, nudge), balance)
    padded = np.zeros(self._max_len, np.int32)
    padded[: len(tokens)] = tokens
    out = self._forward(weights["params"], balance, padded)
    logprob, routes = (np.asarray(part)[: len(tokens) - 1] for part in out)
    return logprob, routes

  def _failures(self, row, truths) -> list[dict]:
    """What differs in each token that isn't right; see the module."""
    found = []
    for version, truth in truths.items():
      failed = np.flatnonzero((row.version == version) & ~truth.fits)
      ties = self._ties(row, version, failed) if failed.size else {}
      for n in failed.tolist():
        served, right = row.routes[n], truth.routes[n]
        since = int(row.since_swap[n])
        found.append(
          {
            "turn": int(row.turn[n]),
            "token": int(row.index[n]),
            "position": int(row.position[n]),
            "since_swap": None if since < 0 else since,
            "version": version,
            "fits": [v for v in truths if truths[v].fits[n]],
            "logprob_off": float(row.logprob[n] - truth.logprob[n]),
            "experts": {
              layer: [served[layer].tolist(), right[layer].tolist()]
              for layer in np.flatnonzero((served != right).any(-1)).tolist()
            },
            "tie": ties.get(n),
          }
        )
    return found

  def _ties(self, row, version, failed) -> dict[int, Nudge]:
    """The smallest nudge that makes a token right, of those that have one."""
    self._examined += 1
    if self._examined > _MOST_EXAMINED:
      return {}
    found: dict[int, Nudge] = {}
    for by in NUDGES:
      for layer, expert in np.ndindex(self._biases.shape):
        nudge = Nudge(layer, expert, by)
        fits = self.truth(row, version, nudge).fits
        found |= {
          n: nudge for n in failed.tolist() if fits[n] and n not in found
        }
        if len(found) == len(failed):
          return found
    return found


def _nudged(bias, nudge):
  return jnp.asarray(bias).at[nudge.layer, nudge.expert].add(nudge.by)
