"""The device that a layer is compiled for."""

import jax


def device() -> jax.Device:
  """Returns JAX's default device, which jit takes for inputs on no other."""
  default = jax.config.jax_default_device
  if isinstance(default, jax.Device):
    return default
  return jax.devices(default)[0]
