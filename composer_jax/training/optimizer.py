"""What turns gradients into updates: schedule, clipping, AdamW or Muon.

Everything is optax. What is decided here is only which parameter gets which
treatment, and that follows from its `ParamSpec`: Muon takes the matrices inside
the layers, AdamW the rest; weight decay touches matrices only. The training
state and its step live in `composer_jax.training.state` and `.step`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from composer_jax.models.parameter import ParamSpec

# Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/.
_MUON_MOMENTUM = 0.95
# The root mean square of AdamW's updates, which Muon's are scaled to, so that
# learning rate and weight decay carry over: Liu et al. (2025), section 2.2.
_ADAMW_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Choice of optimizer and schedule.

  Attributes:
    name: "adamw", or "muon": Muon for the matrices inside the layers, AdamW for
      routers, embedding, unembedding, norms and biases.
    learning_rate: the peak, reached at the end of the warmup.
    schedule: what follows the warmup: "constant", "cosine", or "wsd"
      (warmup-stable-decay, Hu et al. 2024, https://arxiv.org/abs/2404.06395),
      which is constant and then falls linearly.
    warmup_steps: the learning rate rises linearly over this many steps.
    decay_fraction: "wsd" only: the part of all steps in which it falls.
    final_fraction: the learning rate of the last step, as a fraction of the
      peak. Not for "constant".
    weight_decay: decoupled, multiplied by the learning rate; matrices only.
    b1: decay rate of AdamW's first moment.
    b2: decay rate of AdamW's second moment.
    clip_norm: the largest allowed global norm of a gradient; 0 is no limit.
  """

  name: Literal["adamw", "muon"] = "adamw"
  learning_rate: float = 3e-4
  schedule: Literal["constant", "cosine", "wsd"] = "wsd"
  warmup_steps: int = 100
  decay_fraction: float = 0.2
  final_fraction: float = 0.1
  weight_decay: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  clip_norm: float = 1.0


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """The learning rate as a function of the number of updates already made.

  With t = 1 for the first update and t = `num_steps` for the last, the rate is
  `learning_rate * t / warmup_steps` up to `t = warmup_steps`, where it is the
  peak, and `final_fraction` of the peak at the last step: no update is wasted
  on a rate of zero.

  Args:
    config: the schedule's shape.
    num_steps: the number of updates of the whole run.

  Returns:
    A function from update count (0 for the first update) to learning rate.

  Raises:
    ValueError: warmup and decay don't fit into `num_steps`.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  match config.schedule:
    case "constant":
      decay_steps, decay = 0, optax.constant_schedule(peak)
    case "cosine":
      decay_steps = max(1, num_steps - warmup)
      decay = optax.cosine_decay_schedule(
        peak, decay_steps, alpha=config.final_fraction
      )
    case "wsd":
      decay_steps = max(1, round(config.decay_fraction * num_steps))
      decay = optax.linear_schedule(
        peak, config.final_fraction * peak, decay_steps
      )
    case _:
      raise ValueError(
        f"optimizer.schedule is {config.schedule!r}, not one of 'constant', "
        "'cosine', 'wsd'"
      )
  decay_start = num_steps - decay_steps
  if warmup > decay_start:
    raise ValueError(
      f"optimizer.warmup_steps={warmup} and {decay_steps} steps of "
      f"{config.schedule} decay don't fit into {num_steps} steps: lower "
      "optimizer.warmup_steps or train for longer"
    )
  rate_at = optax.join_schedules(
    [
      optax.linear_schedule(0.0, peak, max(1, warmup)),
      optax.constant_schedule(peak),
      decay,
    ],
    [warmup, decay_start],
  )
  return lambda count: rate_at(count + 1)


def make_optimizer(
  config: OptimizerConfig, specs: PyTree, num_steps: int
) -> optax.GradientTransformation:
  """Clipping, then AdamW or Muon, on the schedule of `make_schedule`.

  Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) gets
  each matrix separately: contracted axes are the rows, batch axes (layers,
  experts) stay apart. Its updates are scaled to AdamW's size, as by Liu et al.
  (2025, https://arxiv.org/abs/2502.16982).

  Args:
    config: which optimizer, and its numbers.
    specs: a `ParamSpec` for each parameter, in the parameters' structure.
    num_steps: the number of updates of the whole run.

  Returns:
    The transformation. `grad_norm` reads the gradient's norm from its state.

  Raises:
    ValueError: unknown name, or a schedule that doesn't fit.
  """
  schedule = make_schedule(config, num_steps)
  adamw = optax.adamw(
    schedule,
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
    mask=jax.tree.map(lambda spec: spec.is_matrix, specs),
  )
  match config.name:
    case "adamw":
      update = adamw
    case "muon":
      # `optax.contrib.muon` has an Adam of its own for the rest, but with
      # Nesterov momentum and no mask for the weight decay.
      dimensions = jax.tree.map(muon_dimensions, specs)
      update = optax.partition(
        {
          "muon": optax.contrib.muon(
            schedule,
            beta=_MUON_MOMENTUM,
            weight_decay=config.weight_decay,
            consistent_rms=_ADAMW_RMS,
            muon_weight_dimension_numbers=dimensions,
          ),
          "adamw": adamw,
        },
        jax.tree.map(
          lambda spec: "adamw" if muon_dimensions(spec) is None else "muon",
          specs,
        ),
      )
    case _:
      raise ValueError(
        f"optimizer.name is {config.name!r}, not one of 'adamw', 'muon'"
      )
  return optax.chain(_clip_by_global_norm(config.clip_norm), update)


def muon_dimensions(
  spec: ParamSpec,
) -> optax.contrib.MuonDimensionNumbers | None:
  """Which axes are the rows and columns of the matrices in a parameter.

  Args:
    spec: the parameter.

  Returns:
    Positions of the contracted and of the output axes, or None for what AdamW
    updates: no matrix, a router (float32), embedding and unembedding ("vocab").
  """
  if not spec.is_matrix or spec.float32 or "vocab" in spec.axes:
    return None
  rows, columns = [], []
  for position, axis in enumerate(spec.axes):
    if axis in spec.contract:
      rows.append(position)
    elif axis not in spec.batch:
      columns.append(position)
  return optax.contrib.MuonDimensionNumbers(tuple(rows), tuple(columns))


class ClipState(NamedTuple):
  """The global norm of the last gradient, before clipping."""

  grad_norm: Any


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """As `optax.clip_by_global_norm`, with the norm kept; 0 is no limit."""

  def init(params):
    del params
    return ClipState(grad_norm=jnp.zeros((), jnp.float32))

  def update(updates, state, params=None):
    del state, params
    norm = optax.tree.norm(updates)
    if max_norm > 0:
      scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, max_norm))
      updates = jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)
    return updates, ClipState(grad_norm=norm.astype(jnp.float32))

  return optax.GradientTransformation(init, update)


def grad_norm(state: PyTree) -> Float[Array, ""]:
  """The gradient's global norm at the last update, before clipping."""
  return optax.tree.get(state, "grad_norm")


def abstract_state(
  optimizer: optax.GradientTransformation, abstract_params: PyTree
) -> PyTree:
  """The optimizer's state as shapes, sharded as the parameters are.

  Moments are built from zeros, which carry no sharding for the compiler to
  follow: without being told, it would replicate them.

  Args:
    optimizer: from `make_optimizer`.
    abstract_params: a `jax.ShapeDtypeStruct` with a `NamedSharding` for each
      parameter.

  Returns:
    The structure of `optimizer.init(params)`, of `jax.ShapeDtypeStruct` with
    shardings; counts and other scalars are replicated.
  """
  of_params = {
    path: leaf.sharding
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params)
  }
  mesh = next(iter(of_params.values())).mesh
  replicated = jax.NamedSharding(mesh, jax.P())

  def with_sharding(path, leaf):
    tails = (path[start:] for start in range(len(path)))
    shardings = (of_params[tail] for tail in tails if tail in of_params)
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=next(shardings, replicated)
    )

  state = jax.eval_shape(optimizer.init, abstract_params)
  return jax.tree_util.tree_map_with_path(with_sharding, state)
