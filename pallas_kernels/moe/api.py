"""`moe_ffn`, the one public entry to the MoE feed-forward layer.

It checks the arguments once, picks an implementation, and leaves the router to
the caller: expert ids and float32 gates come in. Implementations are modules of
this package, imported when first used, each with two functions: `apply`, and
`cannot_run`, which says why not.
"""

import functools
import importlib
import logging

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.moe import expert_parallel

# Fastest first; the reference, which is for comparing, only by name.
_AUTOMATIC = ("mosaic", "triton", "xla")
IMPLEMENTATIONS = (*_AUTOMATIC, "reference")

_log = logging.getLogger(__name__)


def moe_ffn(
  x: Float[Array, "T H"],
  expert_ids: Int[Array, "T K"],
  gates: Float[Array, "T K"],
  w_gate_up: Float[Array, "E H 2 I"],
  w_down: Float[Array, "E I H"],
  *,
  implementation: str | None = None,
  axis_name: str | None = None,
  out_dtype: DTypeLike | None = None,
  clamp: float | None = None,
  grad_totals: tuple[Array, Array] | None = None,
) -> Float[Array, "T H"]:
  """A mixture of SwiGLU experts, dropless and deterministic.

  y[t] = sum_k gates[t, k] * (silu(x[t] Wg) * (x[t] Wu)) Wd with the weights of
  expert expert_ids[t, k]. Gates and the sum over k are applied in float32, in k
  order. Differentiable in x, gates and both weights; works under jit, grad,
  checkpoint, scan, vmap and shard_map. SwiGLU: https://arxiv.org/abs/2002.05202;
  top-k experts: https://arxiv.org/abs/1701.06538.

  Args:
    x: tokens, float32, bfloat16 or float16.
    expert_ids: experts of each token; they may repeat. An id outside [0, E)
      contributes exactly zero, and its gate gets a zero gradient.
    gates: weight of each expert's output, float32.
    w_gate_up: gate projection at [:, :, 0], up projection at [:, :, 1], in the
      dtype of x.
    w_down: down projections, in the dtype of x.
    implementation: one of `IMPLEMENTATIONS`; None takes the fastest that can
      run here.
    axis_name: inside shard_map, the mesh axis over whose ranks the experts are
      spread, in blocks of E in rank order; `expert_ids` then are global ids.
    out_dtype: dtype of the result, that of x by default.
    clamp: if given, gate pre-activations count as `clamp` at most and up ones
      as -clamp to clamp, and have no gradient beyond: DeepSeek-V4's SwiGLU.
    grad_totals: float32 arrays like w_gate_up and w_down, to sum the weights'
      gradients over microbatches in float32. y doesn't depend on them; their
      cotangents are themselves plus this call's gradients, unrounded, and those
      of the weights are zero. So differentiate in the totals, and pass what
      comes out to the next microbatch. The loss must depend on y.

  Returns:
    [T, H]. A row's bits don't depend on the other rows, as long as shapes
    are the same.

  Raises:
    ValueError: shapes or dtypes don't fit, or the implementation is unknown or
      can't run here.
  """
  _check(x, expert_ids, gates, w_gate_up, w_down)
  _check_options(clamp, grad_totals, w_gate_up, w_down)
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  if expert_ids.size == 0:  # Nothing to group.
    implementation = "reference"
  apply = _pick(implementation, x=x, w_gate_up=w_gate_up, w_down=w_down)
  arrays = _vary_alike(x, expert_ids, gates, w_gate_up, w_down)
  _check_totals_vary(grad_totals, arrays[0])
  apply = functools.partial(apply, clamp=clamp, grad_totals=grad_totals)
  if axis_name is None:
    return apply(*arrays, out_dtype=out_dtype)
  return expert_parallel.apply(
    apply, *arrays, axis_name=axis_name, out_dtype=out_dtype
  )


def _pick(name, **arrays):
  if name is None:
    return _fastest(**arrays)
  choices = f"choose one of {', '.join(IMPLEMENTATIONS)}, or None"
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"There is no moe_ffn implementation {name!r}: {choices}.")
  module = _load(name)
  if reason := module.cannot_run(**arrays):
    raise ValueError(
      f"moe_ffn implementation {name!r} can't run here, since {reason}:"
      f" {choices}."
    )
  return module.apply


def _fastest(**arrays):
  for name in _AUTOMATIC[:-1]:
    module = _load(name)
    if not (reason := module.cannot_run(**arrays)):
      return module.apply
    _say_once(name, reason)
  return _load(_AUTOMATIC[-1]).apply


@functools.cache
def _say_once(name, reason):
  _log.info("moe_ffn goes without %r, since %s.", name, reason)


def _load(name):
  return importlib.import_module(f"pallas_kernels.moe.{name}")


def _check(x, expert_ids, gates, w_gate_up, w_down):
  """Raises ValueError for the first mistake in shapes or dtypes."""
  for name, array, layout in (
    ("x", x, "[T, H]"),
    ("expert_ids", expert_ids, "[T, K]"),
    ("gates", gates, "[T, K]"),
    ("w_gate_up", w_gate_up, "[E, H, 2, I]"),
    ("w_down", w_down, "[E, I, H]"),
  ):
    _require(
      array.ndim == len(layout.split(",")),
      f"{name} must be {layout}, not {array.shape}.",
    )
  (tokens, width), (experts, inner, _) = x.shape, w_down.shape
  _require(
    w_gate_up.shape == (experts, width, 2, inner)
    and w_down.shape[2] == width
    and experts > 0,
    f"The weights must be w_gate_up [E, H, 2, I] and w_down [E, I, H] with"
    f" H = {width} as in x {x.shape} and E > 0, not {w_gate_up.shape} and"
    f" {w_down.shape}.",
  )
  _require(
    expert_ids.shape == gates.shape and len(expert_ids) == tokens,
    f"expert_ids and gates must both be [T, K] with T = {tokens} as in x"
    f" {x.shape}, not {expert_ids.shape} and {gates.shape}.",
  )
  _require(
    jnp.issubdtype(expert_ids.dtype, jnp.integer),
    f"expert_ids must be integers, not {expert_ids.dtype}.",
  )
  _require(
    gates.dtype == jnp.float32,
    f"gates must be float32, not {gates.dtype}: cast them with"
    f" gates.astype(jnp.float32).",
  )
  _require(
    jnp.issubdtype(x.dtype, jnp.floating)
    and x.dtype == w_gate_up.dtype == w_down.dtype,
    f"x, w_gate_up and w_down must share one floating dtype, not {x.dtype},"
    f" {w_gate_up.dtype} and {w_down.dtype}: cast the weights to that of x.",
  )


def _check_options(clamp, grad_totals, *weights):
  _require(
    clamp is None or clamp > 0,
    f"clamp must be positive or None, not {clamp}.",
  )
  if grad_totals is None:
    return
  given = [(a.shape, str(a.dtype)) for a in grad_totals]
  wanted = [(w.shape, "float32") for w in weights]
  _require(
    given == wanted,
    f"grad_totals must be like w_gate_up and w_down, in float32: {wanted}, not"
    f" {given}.",
  )


def _check_totals_vary(grad_totals, x):
  """A total that ranks share would be summed over them with the gradients."""
  axes = jax.typeof(x).manual_axis_type.varying
  _require(
    all(
      axes <= jax.typeof(total).manual_axis_type.varying
      for total in grad_totals or ()
    ),
    f"Inside shard_map, grad_totals must differ from rank to rank along"
    f" {sorted(axes)}, as the arrays do: give each rank totals of its own.",
  )


def _require(condition, message):
  if not condition:
    raise ValueError(message)


def _vary_alike(*arrays):
  """Inside shard_map, lets every array vary over the axes that any varies over.

  The backward pass computes gradients on each rank by itself; the transpose of
  this cast then sums those of an array that was the same on all ranks.
  """
  varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
  missing = [tuple(frozenset().union(*varying) - v) for v in varying]
  return [
    lax.pcast(a, axes, to="varying") if axes else a
    for a, axes in zip(arrays, missing, strict=True)
  ]
