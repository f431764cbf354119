"""The MoE layer by Triton kernels, for NVIDIA GPUs other than Hopper.

Triton itself is imported when the layer is first called: see the extra
`triton` of this package.
"""

import importlib.util
import re

import jax.numpy as jnp

from pallas_kernels.moe import target


def cannot_run(*, x, w_gate_up, w_down, **_) -> str:
  """Returns why this implementation can't run here, or an empty string."""
  del w_gate_up
  _, inner, width = w_down.shape
  if x.dtype not in (jnp.bfloat16, jnp.float16):
    return f"it computes in bfloat16 or float16, not in {x.dtype}"
  if width % 64 or inner % 64:
    return f"H = {width} and I = {inner} are not both multiples of 64"
  device = target.device()
  capability = str(getattr(device, "compute_capability", None))
  if not re.fullmatch(r"([89]|\d\d)\.\d", capability):
    return f"it needs an NVIDIA GPU, Ampere or newer, not {device.device_kind}"
  if not importlib.util.find_spec("jax_triton"):
    return "jax-triton is not installed (pip install 'composer-jax[triton]')"
  return ""


def apply(*arguments, **options):
  """The layer of `moe_ffn`, see `layer.apply`."""
  from pallas_kernels.moe.triton import layer

  return layer.apply(*arguments, **options)
