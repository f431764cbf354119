"""The MoE layers that JAX users can have, under one signature.

Each name gives a layer x, expert_ids, gates, w_gate_up, w_down -> y, or says
why it has none here. torch's is in `moe_torch.py`.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from benchmarks import xla_moe
from pallas_kernels.moe import moe_ffn, mosaic, triton
from pallas_kernels.moe.mosaic import gather


class UnavailableError(Exception):
  """A peer that can't run here; the message says why."""


def layer(name: str, inputs):
  """Returns the peer's layer for these inputs.

  Raises:
    UnavailableError: it can't run here.
  """
  return PEERS[name](inputs)


def _ours(implementation, inputs):
  x, _, _, w_gate_up, w_down = inputs
  kernels = {"mosaic": mosaic, "triton": triton}.get(implementation)
  if kernels and (
    reason := kernels.cannot_run(x=x, w_gate_up=w_gate_up, w_down=w_down)
  ):
    raise UnavailableError(reason)
  return functools.partial(moe_ffn, implementation=implementation)


def _alone(inputs):
  """Ours without Triton's gate/up."""
  _ours("mosaic", inputs)
  return functools.partial(mosaic.apply, in_loads=False)


def _overlapping(inputs):
  """Ours with gathers beside the multiplications, on 12 SMs."""
  _ours("mosaic", inputs)
  return functools.partial(mosaic.apply, overlap=gather.Movers(12, 32))


def _ragged_dot(inputs):
  x, expert_ids, _, w_gate_up, _ = inputs
  experts, width, _, inner = w_gate_up.shape
  masked = experts * expert_ids.size * max(width, 2 * inner) * x.dtype.itemsize
  if masked > xla_moe.PEER_BYTES:
    raise UnavailableError(
      f"off the TPU it copies its rows once an expert: {masked / 1e9:.0f} GB"
    )
  return xla_moe.ragged_dot_moe


def _shipped_pallas(_):
  """JAX's own Mosaic GPU kernels for Hopper; the backward rule is ours."""
  if jax.default_backend() != "gpu":
    raise UnavailableError("JAX's Pallas kernels need a Hopper GPU")
  return functools.partial(xla_moe.composed, pallas_dot)


@jax.custom_vjp
def pallas_dot(lhs, rhs, sizes):
  """lax.ragged_dot by jax.experimental.pallas.ops.gpu.ragged_dot_mgpu."""
  return _pallas_dot(lhs, rhs, sizes, transpose_rhs=False)


def _pallas_dot(lhs, rhs, sizes, transpose_rhs):
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

  return ragged_dot_mgpu.ragged_dot(
    lhs,
    rhs,
    group_sizes=sizes,
    transpose_rhs=transpose_rhs,
    grid_block_n=1,
    **_BLOCKS,
  )


def _pallas_pullback(saved, d_out):
  from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

  lhs, rhs, sizes = saved
  d_rhs = transposed_ragged_dot_mgpu.transposed_ragged_dot(
    lhs, d_out, group_sizes=sizes, grid_block_n=1, **_BLOCKS
  )
  return _pallas_dot(d_out, rhs, sizes, transpose_rhs=True), d_rhs, None


# The largest blocks that its one warpgroup has registers for.
_BLOCKS = {
  "block_m": 128,
  "block_n": 128,
  "block_k": 64,
  "max_concurrent_steps": 4,
}
pallas_dot.defvjp(
  lambda lhs, rhs, sizes: (pallas_dot(lhs, rhs, sizes), (lhs, rhs, sizes)),
  _pallas_pullback,
)


def _tokamax(implementation, _):
  if not importlib.util.find_spec("tokamax"):
    raise UnavailableError("tokamax is not installed: pip install tokamax")
  if implementation == "triton" and not importlib.util.find_spec("jax_triton"):
    raise UnavailableError("tokamax has no Triton kernels without jax-triton")
  import tokamax

  def dot(lhs, rhs, sizes):
    return tokamax.ragged_dot(
      lhs, rhs, sizes, implementation=implementation
    ).astype(jnp.bfloat16)

  return functools.partial(xla_moe.composed, dot)


PEERS = {
  "mosaic": functools.partial(_ours, "mosaic"),
  "mosaic_alone": _alone,
  "mosaic_overlap": _overlapping,
  "triton": functools.partial(_ours, "triton"),
  "xla": functools.partial(_ours, "xla"),
  "ragged_dot": _ragged_dot,
  "pallas": _shipped_pallas,
  "tokamax": functools.partial(_tokamax, None),
  "tokamax_triton": functools.partial(_tokamax, "triton"),
}
