"""How fast is a whole training step, and what do its choices cost?

  python -m benchmarks.train_step [--quick] [--json] [--variants=NAME;...]

The `small` model on a GPU, `tiny` on a CPU; forward, backward and Muon's update
on random tokens, four documents a sequence. Each row changes a choice or two,
or the MoE layer itself: `ragged_dot` is a peer's, and without experts what is
missing is the layer's share of the step. Losses of all rows, from the same
weights on the same batch, are printed beside their speed: with experts, they
agree but for rounding. MFU counts model FLOPs only
(`composer_jax.models.count`); on a CPU it is relative to the machine's measured
matrix product.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import harness, xla_moe
from composer_jax.data import DataConfig
from composer_jax.models import (
  PRESETS,
  LanguageModel,
  moe,
  train_flops_per_token,
)
from composer_jax.sharding import MeshConfig, make_mesh
from composer_jax.training import state as state_lib
from composer_jax.training.config import TrainConfig
from composer_jax.training.metrics import peak_flops
from composer_jax.training.optimizer import OptimizerConfig, make_optimizer
from composer_jax.training.step import Batch, make_train_step

DOCUMENTS = 4
# Name of a row: what it changes in the model, in the run.
GPU_VARIANTS = {
  "base": ({}, {}),
  "cudnn": ({"attention_kernel": "cudnn"}, {}),
  "cudnn, xla": (
    {"attention_kernel": "cudnn", "moe": {"implementation": "xla"}},
    {},
  ),
  "cudnn, triton": (
    {"attention_kernel": "cudnn", "moe": {"implementation": "triton"}},
    {},
  ),
  "cudnn, full remat": ({"attention_kernel": "cudnn", "remat": "full"}, {}),
  "cudnn, no remat": ({"attention_kernel": "cudnn", "remat": "none"}, {}),
  "cudnn, batch 16": ({"attention_kernel": "cudnn"}, {"batch_size": 16}),
  "cudnn, no experts": ({"attention_kernel": "cudnn"}, {}),
  # ragged_dot copies its rows once an expert, so few of them.
  "cudnn, batch 4": ({"attention_kernel": "cudnn"}, {"batch_size": 4}),
  "cudnn, batch 4, xla": (
    {"attention_kernel": "cudnn", "moe": {"implementation": "xla"}},
    {"batch_size": 4},
  ),
  "cudnn, batch 4, ragged_dot": (
    {"attention_kernel": "cudnn"},
    {"batch_size": 4},
  ),
}
CPU_VARIANTS = {
  "base": ({}, {}),
  "full remat": ({"remat": "full"}, {}),
  "accumulate 2": ({}, {"accumulate": 2}),
  "no experts": ({}, {}),
  "ragged_dot": ({}, {}),
}


def no_experts(x, expert_ids, gates, w_gate_up, w_down, **_):
  """In the place of `moe_ffn`: returns what it was given."""
  del expert_ids, gates, w_gate_up, w_down
  return x


def ragged_dot(*arrays, **_):
  """In the place of `moe_ffn`, by lax.ragged_dot; every token has experts."""
  return xla_moe.ragged_dot_moe(*arrays)


# The end of a row's name: what it puts in the place of `moe_ffn`.
LAYERS = {"no experts": no_experts, "ragged_dot": ragged_dot}


def make_batch(batch_size: int, seq_len: int, vocab_size: int) -> Batch:
  """Random tokens in documents of equal length."""
  shape = (batch_size, seq_len)
  keys = jax.random.split(jax.random.key(1))
  place = jnp.broadcast_to(jnp.arange(seq_len), shape)
  length = seq_len // DOCUMENTS
  return Batch(
    tokens=jax.random.randint(keys[0], shape, 0, vocab_size),
    targets=jax.random.randint(keys[1], shape, 0, vocab_size),
    positions=place % length,
    segment_ids=1 + place // length,
    loss_mask=jnp.ones(shape, bool),
  )


def measure(config: TrainConfig, *, rounds: int) -> dict:
  """Times the steps of one configuration; returns its columns."""
  model = LanguageModel(config.model)
  optimizer = make_optimizer(config.optimizer, model.param_specs, 1000)
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  seq_len, vocab_size = config.data.seq_len, config.model.vocab_size
  with jax.set_mesh(mesh):
    abstract = state_lib.abstract_state(model, optimizer, mesh)
    state = state_lib.init_state(model, optimizer, abstract, config.seed)
    batch = make_batch(config.batch_size, seq_len, vocab_size)
    # Each token stands for three bytes, about as code is tokenised.
    token_bytes = 3 * jax.device_get(jnp.ones(vocab_size, jnp.int32))
    train_step = (
      jax.jit(
        make_train_step(model, optimizer, config, token_bytes),
        donate_argnums=0,
      )
      .lower(state, batch)
      .compile()
    )
    state, metrics = train_step(state, batch)
    loss = float(metrics["loss"])

    def step():
      nonlocal state
      state, metrics = train_step(state, batch)
      return metrics

    ms = harness.median_ms({"step": step}, rounds=rounds, seconds=0.5)["step"]
  rate = config.batch_size * seq_len / ms * 1e3
  flops = train_flops_per_token(config.model, seq_len)
  on_gpu = jax.default_backend() == "gpu"
  stats = jax.devices()[0].memory_stats() or {}
  return {
    "loss": loss,
    "mfu": rate * flops / peak_flops(jax.devices()[0]),
    "ms": ms if on_gpu else None,
    "tokens_per_s": rate if on_gpu else None,
    "peak_bytes": stats.get("peak_bytes_in_use"),
    "rate": rate,
  }


def change(config, changes: dict):
  """Returns a config with other values; a dict changes a config in it."""
  values = {
    name: change(getattr(config, name), value)
    if isinstance(value, dict)
    else value
    for name, value in changes.items()
  }
  return dataclasses.replace(config, **values)


def main():
  """Measures every variant and prints the table."""
  flags = harness.arguments(
    __doc__.split("\n", maxsplit=1)[0],
    lambda parser: parser.add_argument(
      "--variants", default="", help="names of rows, with ; between: not all"
    ),
  )
  on_gpu = jax.default_backend() == "gpu"
  name = "small" if on_gpu else "tiny"
  base = TrainConfig(
    model=PRESETS[name](),
    data=DataConfig(seq_len=2048 if on_gpu else 256),
    optimizer=OptimizerConfig(name="muon", warmup_steps=1),
    mesh=MeshConfig(),
    batch_size=32 if on_gpu else 4 if flags.quick else 16,
    num_steps=1000,
  )
  rows, base_rate = [], None
  variants = GPU_VARIANTS if on_gpu else CPU_VARIANTS
  for label in flags.variants.split(";") if flags.variants else variants:
    model, run = variants[label]
    config = dataclasses.replace(base, model=change(base.model, model), **run)
    row = {"model": name, "variant": label}
    try:
      layer = LAYERS.get(label.rsplit(", ", maxsplit=1)[-1], moe.moe_ffn)
      with mock.patch.object(moe, "moe_ffn", layer):
        measured = measure(config, rounds=1 if flags.quick else 5)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
      # Out of memory, or a kernel that isn't for this GPU.
      rows.append(row | {"error": str(error).split("\n")[0][:60]})
      continue
    rate = measured.pop("rate")
    base_rate = base_rate or rate
    rows.append(row | {"speed_to_base": rate / base_rate} | measured)
  harness.report(rows, as_json=flags.json)


if __name__ == "__main__":
  main()
