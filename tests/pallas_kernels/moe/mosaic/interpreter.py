"""Runs Hopper kernels on a CPU, and fails if their threads race."""

import contextlib

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu


def run(function, *args):
  """Calls function(*args) in the GPU interpreter; kernels inside must not race.

  Outputs start as NaN, so what a kernel leaves unwritten shows.
  """
  params = plgpu.InterpretGPUParams(detect_races=True)
  with contextlib.ExitStack() as stack:
    stack.callback(interpret_pallas_call.reset_gpu_interpret_mode_state)
    stack.enter_context(plgpu.force_gpu_interpret_mode(params))
    result = jax.block_until_ready(jax.jit(function)(*args))
    assert not interpret_pallas_call.get_races().races_found
  return result
