"""Eight ranks that share the experts compute the same layer as one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.moe import moe_ffn
from tests.pallas_kernels.moe import cases

SPREAD, COPIED = PartitionSpec("expert"), PartitionSpec()


@functools.partial(jax.jit, static_argnums=0)
def forward_backward(layer, arguments, dy):
  x, ids, *rest = arguments
  y, pullback = jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *rest)
  return (y, *pullback(dy))


def problem():
  """64 tokens, 16 experts, some ids that name no expert of any rank."""
  rng = np.random.default_rng(0)
  T, H, I, E, K = 64, 16, 8, 16, 3  # noqa: E741
  ids = np.minimum(rng.integers(-1, E + 2, (T, K)), rng.integers(0, 99, (T, 1)))

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

  arguments = (
    normal(T, H),
    jnp.asarray(ids, jnp.int32),
    normal(T, K),
    normal(E, H, 2, I),
    normal(E, I, H),
  )
  return arguments, normal(T, H)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("experts", ["spread", "copied"])
def test_equals_one_device(experts, check_vma):
  arguments, dy = problem()
  mesh = Mesh(jax.devices()[:8], ("expert",), axis_types=(AxisType.Auto,))
  weights = SPREAD if experts == "spread" else COPIED
  layer = jax.shard_map(
    functools.partial(
      moe_ffn, axis_name="expert" if experts == "spread" else None
    ),
    mesh=mesh,
    in_specs=(SPREAD, SPREAD, SPREAD, weights, weights),
    out_specs=SPREAD,
    check_vma=check_vma,
  )
  result = jax.block_until_ready(forward_backward(layer, arguments, dy))
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < 2e-6, name
  again = jax.block_until_ready(forward_backward(layer, arguments, dy))
  for name, a, b in zip(cases.NAMES, result, again, strict=True):
    np.testing.assert_array_equal(a, b, err_msg=name)


def test_the_compiler_may_split_the_expert_width():
  (x, ids, gates, w_gate_up, w_down), dy = problem()
  mesh = Mesh(jax.devices()[:8], ("tensor",), axis_types=(AxisType.Auto,))
  split_up = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
  split_down = NamedSharding(mesh, PartitionSpec(None, "tensor"))
  arguments = (
    *jax.device_put((x, ids, gates), NamedSharding(mesh, COPIED)),
    jax.device_put(w_gate_up, split_up),
    jax.device_put(w_down, split_down),
  )
  result = jax.block_until_ready(forward_backward(moe_ffn, arguments, dy))
  expected = cases.oracle(arguments, dy)
  for name, a, b in zip(cases.NAMES, result, expected, strict=True):
    assert cases.relative_error(a, b) < 2e-6, name
