"""The MoE layer by Triton kernels, for NVIDIA GPUs; Hopper takes one of them.

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


def apply_gate_up(
  x, token, tile_expert, num_tiles, w_gate_up, *, rows, clamp=None
):
  """Gate and up projections of tiles of `rows`, see `gate_up.gate_up`."""
  from pallas_kernels.moe.triton import gate_up, tiles

  return gate_up.gate_up(
    *(x, token, tile_expert, num_tiles, w_gate_up),
    tiles.gate_up(w_gate_up.shape[3], rows),
    clamp=clamp,
  )
