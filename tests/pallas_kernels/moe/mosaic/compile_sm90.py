"""Compiles one kernel for sm_90a: python compile_sm90.py KERNEL DTYPE.

Run by test_mosaic_compiles.py, one process a kernel. Needs no GPU: the plugin
compiles for the target described in hopper.txtpb.
"""

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.moe import mosaic
from pallas_kernels.moe.mosaic import gather, tiles
from pallas_kernels.moe.mosaic.gate_up import gate_up
from pallas_kernels.moe.mosaic.gather import Movers
from pallas_kernels.moe.mosaic.matmul import matmul
from pallas_kernels.moe.mosaic.swiglu_gradient import swiglu_gradient
from pallas_kernels.moe.mosaic.weight_gradient import weight_gradient

# T=32768 H=4096 I=1024 E=128 K=8, in tiles of 128 rows.
T, H, I, E, K, COUNT = 32768, 4096, 1024, 128, 8, 2175  # noqa: E741
M = 128 * COUNT
FEW = 256  # Tokens of the layer whose tiles have 64 rows.


def kernels(dtype):
  """Returns each kernel, and the types of its arguments."""

  def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  int32 = functools.partial(array, dtype=jnp.int32)
  float32 = functools.partial(array, dtype=jnp.float32)
  table = (int32(COUNT), int32(1))
  groups = (int32(E), int32(E), int32(E))
  up, down = array(E, H, 2, I), array(E, I, H)

  def layer(tokens):
    routes = (tokens, K)
    x = array(tokens, H)
    return x, int32(*routes), float32(*routes), up, down, x

  def bound(kernel, choice, **static):
    return functools.partial(kernel, **choice.arguments(), **static)

  wide = tiles.weight_gradient(H, 2 * I)
  split = tiles.weight_gradient(64, 2 * I)
  return {
    "layer": (_forward_backward, layer(T)),
    "layer_few_rows": (
      functools.partial(_forward_backward, clamp=10.0),
      layer(FEW),
    ),
    "layer_checkpoint": (
      functools.partial(_forward_backward, checkpoint=True),
      layer(T),
    ),
    "layer_overlap": (
      functools.partial(_forward_backward, overlap=Movers(12, 32)),
      layer(T),
    ),
    "gather": (
      functools.partial(gather.rows, tile_rows=128, num_sms=132),
      (array(T, H), int32(M), int32(1)),
    ),
    "gate_up": (
      bound(gate_up, tiles.gate_up(H, I)),
      (array(M, H), *table, up),
    ),
    "down": (
      bound(matmul, tiles.matmul(I, H), transposed=False),
      (array(M, I), *table, down),
    ),
    "d_rows": (
      bound(matmul, tiles.matmul(2 * I, H), transposed=True),
      (array(M, 2 * I), *table, array(E, H, 2 * I)),
    ),
    "swiglu_gradient": (
      bound(swiglu_gradient, tiles.swiglu_gradient(H, I)),
      (array(M, H), float32(M), array(M, 2 * I), *table, down),
    ),
    "weight_gradient": (
      bound(weight_gradient, wide, out_dtype=dtype),
      (array(M, H), array(M, 2 * I), *groups),
    ),
    "weight_gradient_by_columns": (
      bound(weight_gradient, split, out_dtype=dtype),
      (array(M, 192), array(M, 2 * I), *groups),
    ),
    "weight_gradient_accumulated": (
      bound(weight_gradient, wide, out_dtype=jnp.float32),
      (array(M, H), array(M, 2 * I), *groups, float32(E, H, 2 * I)),
    ),
  }


def _forward_backward(
  x, expert_ids, gates, w_gate_up, w_down, dy, checkpoint=False, **options
):
  def layer(x, gates, w_gate_up, w_down):
    arrays = x, expert_ids, gates, w_gate_up, w_down
    return mosaic.apply(*arrays, in_loads=False, **options)

  if checkpoint:
    layer = jax.checkpoint(layer)
  y, pullback = jax.vjp(layer, x, gates, w_gate_up, w_down)
  return (y, *pullback(dy))


def main(name, dtype):
  """Compiles the kernel `name` and prints XLA's program round it."""
  target = pathlib.Path(__file__).with_name("hopper.txtpb").read_text()
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=target, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  everywhere = NamedSharding(mesh, PartitionSpec())
  kernel, types = kernels(jnp.dtype(dtype))[name]
  types = [
    jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=everywhere) for t in types
  ]
  with jax.default_device(topology.devices[0]):
    program = jax.jit(kernel).lower(*types).compile().as_text()
  print(re.sub(r"backend_config=.*", "", program))


if __name__ == "__main__":
  main(*sys.argv[1:])
