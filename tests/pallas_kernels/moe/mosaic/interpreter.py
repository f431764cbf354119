"""Runs Hopper kernels on a CPU, and fails if their threads race."""

import contextlib
from unittest import mock

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


def run(function, *args):
  """Calls function(*args) in the GPU interpreter; kernels inside must not race.

  Outputs start as NaN, so what a kernel leaves unwritten shows.
  """
  params = plgpu.InterpretGPUParams(detect_races=True)
  detectors = []  # The interpreter makes one a kernel, and keeps the last.

  def detector(*args, **kwargs):
    detectors.append(kind(*args, **kwargs))
    return detectors[-1]

  kind = gpu_callbacks.GPURaceDetectionState
  with contextlib.ExitStack() as stack:
    stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
    stack.enter_context(plgpu.force_gpu_interpret_mode(params))
    stack.enter_context(
      mock.patch.object(gpu_callbacks, "GPURaceDetectionState", detector)
    )
    result = jax.block_until_ready(jax.jit(function)(*args))
  assert detectors, "No kernel ran in the interpreter."
  assert not any(d.races_found for d in detectors), "Threads race."
  return result
