"""What staleness, mismatch and group size do to learning, in small.

  python -m benchmarks.rl_curves [--figures=staleness,...] [--seeds=2]
    [--quick] [--json] [--out=FOLDER]

A model of two MoE layers learns which token each of sixteen prompts wants, from
the share of wanted tokens in its replies alone. Learner, objective, replay and
batches are the product's; the sampler is a loop in this process, whose weights,
numbers and age are chosen here, so that each figure has one cause:

  staleness    the sampler has the weights of 0, 1 or 4 updates ago; with and
               without corrections
  mismatch     its weights are rounded to float8 (E5M2), scaled to err more, or
               not at all; with and without replay and corrections
  group_size   4, 16 and 64 rollouts of a prompt, at equal samples a step
  sharpening   pass@1 against pass@16, of replies with no wrong token

A row is a variant: mean reward of all steps (the area under its curve), of the
last tenth, and the worst drop from the best ten steps so far. `--out` gets one
plot a figure. Rewards are those of the learner's own policy, sampled anew.
"""

import collections
import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from composer_jax.models import PRESETS, GqaConfig, LanguageModel
from composer_jax.rl.batch import BatchShape
from composer_jax.rl.learner import Learner, LearnerConfig
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from composer_jax.sharding import MeshConfig, make_mesh
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer

PROMPTS, REPLY, VOCABULARY = 16, 4, 32
SAMPLES = 256  # A step, and of each look at the policy.
K = 16


@dataclasses.dataclass(frozen=True)
class Variant:
  """One curve.

  Attributes:
    name: in the table and the plot.
    stale: updates that the sampler is behind.
    error: of the sampler's weights; see `rounded`.
    correction: of the objective.
    anchor: see `LearnerConfig`.
    replay: whether the sampler's routes are replayed.
    group: rollouts of a prompt.
    rate: of learning.
  """

  name: str
  stale: int = 0
  error: float = 0.0
  correction: str = "none"
  anchor: str = "policy"
  replay: bool = False
  group: int = 16
  rate: float = 1e-2


FIGURES = {
  "staleness": (
    Variant("0"),
    Variant("1, none", stale=1),
    Variant("1, tis", stale=1, correction="tis"),
    Variant("4, none", stale=4),
    Variant("4, tis", stale=4, correction="tis"),
    Variant("4, icepop", stale=4, correction="icepop"),
    Variant("4, ppo against the sampler", stale=4, anchor="sampler"),
  ),
  "mismatch": (
    Variant("the same numbers"),
    Variant("none", error=1.0),
    Variant("replay", error=1.0, replay=True),
    Variant("tis", error=1.0, correction="tis"),
    Variant("icepop", error=1.0, correction="icepop"),
    Variant("replay, icepop", error=1.0, correction="icepop", replay=True),
    Variant("none, 4 times the error", error=4.0),
    Variant(
      "replay, icepop, 4 times the error",
      error=4.0,
      correction="icepop",
      replay=True,
    ),
  ),
  "group_size": tuple(Variant(str(size), group=size) for size in (4, 16, 64)),
  "sharpening": (Variant("pass@k"),),
}


def make_learner(variant: Variant) -> Learner:
  """A learner without weights."""
  model = LanguageModel(_model())
  optimizer = make_optimizer(
    OptimizerConfig(
      name="adamw",
      learning_rate=variant.rate,
      schedule="constant",
      warmup_steps=0,
    ),
    model.param_specs,
    1000,
  )
  config = LearnerConfig(
    objective=ObjectiveConfig(correction=variant.correction),
    shape=BatchShape(rows=SAMPLES // 8, seq_len=8 * REPLY),
    budget=float(SAMPLES * REPLY),
    anchor=variant.anchor,
    replay=ReplayConfig() if variant.replay else None,
  )
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  return Learner(model, optimizer, config, mesh)


def _model():
  base = PRESETS["tiny"]()
  return dataclasses.replace(
    base,
    vocab_size=VOCABULARY,
    width=32,
    num_layers=2,
    num_dense_layers=0,
    attention=GqaConfig(num_heads=2, num_kv_heads=2, head_dim=16),
    moe=dataclasses.replace(
      base.moe,
      num_experts=8,
      expert_dim=32,
      router=dataclasses.replace(base.moe.router, top_k=2),
    ),
  )


def rounded(weights, error: float):
  """Weights through float8 (E5M2); `error` times as far from where they were.

  Norms and routers stay, as they would in an engine with quantised weights.
  """
  if not error:
    return weights

  def one(path, x):
    if x.ndim < 3 or "router" in jax.tree_util.keystr(path):
      return x
    off = x.astype(jnp.float8_e5m2).astype(x.dtype) - x
    return x + error * off

  params = jax.tree_util.tree_map_with_path(one, weights["params"])
  return weights | {"params": params}


@functools.partial(jax.jit, static_argnums=0)
def sample(model, weights, prompts, key):
  """Replies, their log-probabilities and routes, a token at a time."""

  def forward(tokens):
    out = model.apply(weights["params"], weights["balance"], tokens)
    return jax.nn.log_softmax(out.logits), out.routing.expert_ids

  def draw(place, tokens):
    logprobs, _ = forward(tokens)
    drawn = jax.random.categorical(
      jax.random.fold_in(key, place), logprobs[:, place]
    )
    return tokens.at[:, place + 1].set(drawn.astype(jnp.int32))

  tokens = jnp.zeros((len(prompts), REPLY + 1), jnp.int32)
  tokens = tokens.at[:, 0].set(prompts)
  tokens = jax.lax.fori_loop(0, REPLY, draw, tokens)
  logprobs, routes = forward(tokens)
  chosen = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=2)
  return tokens, chosen[..., 0], routes.transpose(1, 2, 0, 3)


def wanted(prompt):
  """The token that a prompt wants: some permutation of the second half."""
  return PROMPTS + (7 * prompt + 3) % PROMPTS


def rewards_of(tokens) -> np.ndarray:
  """The share of wanted tokens in each reply."""
  return (tokens[:, 1:] == wanted(tokens[:, :1])).mean(axis=1)


def groups_of(answers, size: int, version: int) -> list[Group]:
  """Neighbours are of one prompt."""
  rewards = rewards_of(answers[0])
  members = [
    Trajectory(
      token_ids=tokens,
      loss_mask=np.arange(REPLY + 1) > 0,
      logprobs=np.append(0, logprobs).astype(np.float32),
      versions=np.append(-1, np.full(REPLY, version)).astype(np.int32),
      routes=routes.astype(np.uint8),
      sampling=Sampling(),
      rewards={"wanted": float(reward)},
      task_id=str(tokens[0]),
      stop_reason="finish",
    )
    for tokens, logprobs, routes, reward in zip(*answers, rewards, strict=True)
  ]
  groups = [tuple(members[i : i + size]) for i in range(0, len(members), size)]
  return [Group(group[0].task_id, group) for group in groups]


def curve(variant: Variant, seed: int, steps: int) -> list[dict[str, float]]:
  """One point a step: what the policy reaches, before its update."""
  learner = _learner(dataclasses.replace(variant, name="", stale=0, error=0.0))
  learner.start(seed=seed)
  rng = np.random.default_rng(seed)
  keys = jax.random.split(jax.random.key(seed), 2 * steps)
  past = collections.deque(maxlen=variant.stale + 1)
  points = []
  for step in range(steps):
    current = jax.tree.map(jnp.copy, learner.weights())
    past.append(rounded(current, variant.error))
    points.append(_look(learner.model, current, keys[2 * step]))
    # Each step has all prompts equally often where there is room for them.
    count = SAMPLES // variant.group
    chosen = rng.permutation(np.arange(max(count, PROMPTS)) % PROMPTS)[:count]
    prompts = np.repeat(chosen, variant.group).astype(np.int32)
    answers = sample(learner.model, past[0], prompts, keys[2 * step + 1])
    answers = jax.device_get(answers)
    groups = groups_of(answers, variant.group, step)
    metrics = learner.step(learner.admit(groups))
    points[-1]["mismatch"] = metrics["mismatch_mean"]
    points[-1]["entropy"] = metrics["entropy"]
  return points


@functools.lru_cache(4)
def _learner(variant):
  return make_learner(variant)


def _look(model, weights, key):
  size = SAMPLES // PROMPTS
  prompts = np.repeat(np.arange(PROMPTS, dtype=np.int32), size)
  tokens = np.asarray(sample(model, weights, prompts, key)[0])
  rewards = rewards_of(tokens)
  solved = (rewards == 1).reshape(PROMPTS, size).sum(axis=1)
  return {
    "reward": float(rewards.mean()),
    "pass@1": float(solved.mean() / size),
    f"pass@{K}": float(np.mean([pass_at(K, size, c) for c in solved])),
  }


def pass_at(k: int, samples: int, solved: int) -> float:
  """The chance that one of k is right (Chen et al. 2021, arXiv:2107.03374)."""
  return 1 - math.comb(samples - solved, k) / math.comb(samples, k)


def summarise(curves: list[list[dict[str, float]]]) -> dict[str, float]:
  """The columns of a row, over seeds."""
  values = {
    name: np.array([[p[name] for p in points] for points in curves])
    for name in curves[0][0]
  }
  rewards = values["reward"]
  late = -(-rewards.shape[1] // 10)
  smooth = np.array(
    [np.convolve(r, np.ones(10) / 10, mode="valid") for r in rewards]
  )
  drop = (np.maximum.accumulate(smooth, axis=1) - smooth).max()
  return {
    "reward": float(rewards.mean()),
    "last": float(rewards[:, -late:].mean()),
    "worst_drop": float(drop),
    "pass@1": float(values["pass@1"][:, -late:].mean()),
    f"pass@{K}": float(values[f"pass@{K}"][:, -late:].mean()),
    "mismatch": float(values["mismatch"].mean()),
    "entropy": float(values["entropy"][:, -late:].mean()),
  }


def plot(figure: str, curves: dict, path: pathlib.Path) -> None:
  """Draws the mean over seeds of each variant."""
  import matplotlib as mpl

  mpl.use("agg")
  from matplotlib import pyplot as plt

  shown = ("pass@1", f"pass@{K}") if figure == "sharpening" else ("reward",)
  canvas, axes = plt.subplots(figsize=(8, 4), layout="constrained")
  for name, runs in curves.items():
    for what in shown:
      mean = np.mean([[p[what] for p in points] for points in runs], axis=0)
      axes.plot(mean, label=what if len(shown) > 1 else name)
  axes.set(title=figure, xlabel="update", ylabel=" and ".join(shown))
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(path, dpi=120)
  plt.close(canvas)


def add_flags(parser):
  """This benchmark's own flags."""
  parser.add_argument("--figures", default=",".join(FIGURES))
  parser.add_argument("--seeds", type=int, default=2)
  parser.add_argument("--steps", type=int, default=150)
  parser.add_argument("--out", default="", help="a folder for the plots")


def main() -> None:
  """Prints the table, and draws."""
  args = harness.arguments(__doc__.splitlines()[0], add_flags)
  steps, seeds = (12, 1) if args.quick else (args.steps, args.seeds)
  rows = []
  for figure in args.figures.split(","):
    if figure not in FIGURES:
      raise SystemExit(f"No figure {figure!r}: choose of {', '.join(FIGURES)}.")
    curves = {
      variant.name: [curve(variant, seed, steps) for seed in range(seeds)]
      for variant in FIGURES[figure]
    }
    rows += [
      {"figure": figure, "variant": name} | summarise(runs)
      for name, runs in curves.items()
    ]
    if args.out:
      folder = pathlib.Path(args.out)
      folder.mkdir(parents=True, exist_ok=True)
      plot(figure, curves, folder / f"{figure}.png")
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
