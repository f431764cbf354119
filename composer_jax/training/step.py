"""One update, and one evaluation: pure functions of state and batch.

Both weigh every target token alike, wherever it lies: sums are taken over the
whole batch, all devices and all micro-batches, and divided once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import LanguageModel
from composer_jax.models.moe import balance, imbalance
from composer_jax.training.config import TrainConfig
from composer_jax.training.optimizer import grad_norm
from composer_jax.training.state import TrainState


class Batch(NamedTuple):
  """Packed sequences, as `composer_jax.data.make_loader` yields them.

  Attributes:
    tokens: inputs.
    targets: the token after each input, inside its own document.
    positions: in the document.
    segment_ids: which document of the row; 0 is padding.
    loss_mask: False on padding.
  """

  tokens: Int[Array, "B S"]
  targets: Int[Array, "B S"]
  positions: Int[Array, "B S"]
  segment_ids: Int[Array, "B S"]
  loss_mask: Bool[Array, "B S"]


class Sums(NamedTuple):
  """What is added up over tokens.

  Attributes:
    nats: negative log-likelihood of the targets.
    tokens: targets.
    bytes: of UTF-8 that the targets stand for.
    z_loss: of all routers.
    load: tokens an expert, `[moe_layers, experts]`; None if there are none.
  """

  nats: Float[Array, ""]
  tokens: Float[Array, ""]
  bytes: Float[Array, ""]
  z_loss: Float[Array, ""]
  load: Int[Array, "L E"] | None


def forward(
  model: LanguageModel,
  params: Any,
  balance_state: Any,
  batch: Batch,
  token_bytes: Int[np.ndarray, " V"],
) -> Sums:
  """Runs the model on a batch.

  Args:
    model: whose functions.
    params: in the compute dtype.
    balance_state: the routers' selection bias.
    batch: packed sequences.
    token_bytes: UTF-8 bytes of each token.
  """
  out = model.apply(
    params, balance_state, batch.tokens, batch.positions, batch.segment_ids
  )
  nats = optax.softmax_cross_entropy_with_integer_labels(
    out.logits, batch.targets
  )
  mask = batch.loss_mask
  return Sums(
    nats=jnp.where(mask, nats, 0.0).sum(),
    tokens=mask.sum(dtype=jnp.float32),
    bytes=jnp.where(mask, jnp.asarray(token_bytes)[batch.targets], 0).sum(
      dtype=jnp.float32
    ),
    z_loss=jnp.zeros(()) if out.routing is None else out.routing.z_loss.sum(),
    load=None if out.routing is None else out.routing.load,
  )


def make_train_step(
  model: LanguageModel,
  optimizer: optax.GradientTransformation,
  config: TrainConfig,
  token_bytes: Int[np.ndarray, " V"],
):
  """Makes `(state, batch) -> (state, metrics)`, to be jitted.

  Metrics are scalars on the device: `loss` (nats a token), `bits_per_byte`,
  `tokens`, `grad_norm`, `param_norm` (after the update), and for MoE models
  `z_loss`, `imbalance` (of the worst layer) and `load`, tokens an expert and
  layer.
  """
  moe_layers = max(1, model.config.num_moe_layers)

  def loss_fn(compute_params, balance_state, batch, num_tokens):
    sums = forward(model, compute_params, balance_state, batch, token_bytes)
    z_loss = sums.z_loss / moe_layers
    return (sums.nats + config.z_loss * z_loss) / num_tokens, sums

  grad_fn = jax.grad(loss_fn, has_aux=True)

  def train_step(state: TrainState, batch: Batch):
    num_tokens = jnp.maximum(batch.loss_mask.sum(dtype=jnp.float32), 1.0)
    params = model.compute_copy(state.params)
    if config.accumulate == 1:
      grads, sums = grad_fn(params, state.balance, batch, num_tokens)
    else:

      def add(carry, micro_batch):
        new = grad_fn(params, state.balance, micro_batch, num_tokens)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, new), ()

      micro_batches = jax.tree.map(
        lambda x: _split_batch(x, config.accumulate), batch
      )
      first = jax.tree.map(lambda x: x[0], micro_batches)
      # Gradients of many micro-batches are added up in float32.
      zeros = jax.tree.map(
        lambda x: (
          jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
          if jnp.issubdtype(x.dtype, jnp.floating)
          else jnp.zeros(x.shape, x.dtype)
        ),
        jax.eval_shape(grad_fn, params, state.balance, first, num_tokens),
      )
      (grads, sums), _ = jax.lax.scan(add, zeros, micro_batches)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new_params = optax.apply_updates(state.params, updates)
    balance_state = jax.tree.map(
      lambda bias: balance(bias, sums.load, config.balance_rate), state.balance
    )
    metrics = {
      "loss": sums.nats / num_tokens,
      "bits_per_byte": sums.nats / jnp.log(2.0) / jnp.maximum(sums.bytes, 1.0),
      "tokens": sums.tokens,
      "grad_norm": grad_norm(opt_state),
      "param_norm": optax.tree.norm(new_params),
    }
    if sums.load is not None:
      metrics |= {
        "z_loss": sums.z_loss / moe_layers / num_tokens,
        "imbalance": imbalance(sums.load).max(),
        "load": sums.load,
      }
    state = TrainState(
      step=state.step + 1,
      params=new_params,
      balance=balance_state,
      opt_state=opt_state,
    )
    return state, metrics

  return train_step


def make_eval_step(model: LanguageModel, token_bytes: Int[np.ndarray, " V"]):
  """Makes `(state, batch) -> Sums`, to be jitted."""

  def eval_step(state: TrainState, batch: Batch) -> Sums:
    params = model.compute_copy(state.params)
    return forward(model, params, state.balance, batch, token_bytes)

  return eval_step


def _split_batch(x: Array, parts: int) -> Array:
  """`[B, ...]` to `[parts, B / parts, ...]`, every device keeping its rows."""
  return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
