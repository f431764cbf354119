"""How near to the floor does a device find and compact its changes?

  python -m benchmarks.device_diff [--quick] [--json]

Two BF16 arrays on one device; a share of the elements differs, at random
places, which is the worst case: no block stays unchanged. The floor is to read
both arrays once at the bandwidth of a plain copy (`copy`, which reads and
writes as many bytes). `gb_s` is those bytes over the time taken, `of_copy` that
over the copy's. The aim is 0.6 or more on an H200.

  find           marks and counts alone
  ours           find and compact, at a capacity that is known
  fetch          all of it, to an array on the host: the count is read back,
                 then positions and values; beside `whole`, the array itself
  prefix sums    one `cumsum` over all elements, then a scatter
  jnp.nonzero    with `size=`, then a gather

Every result is first compared with NumPy's. Predictions for an H200, before any
run there: XLA compiles `find` to one pass over the arrays (its other kernels
touch 1/32 of the bytes), so 0.75..0.9 of copy if reductions of 32 lanes come
near bandwidth; `ours` 0.7 at 0.2 %, 0.6 at 1 %, 0.3 at 5 %; the peers 0.15.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from composer_jax.shipping import device

DENSITIES = (0.002, 0.01, 0.05)
SIZE = 2**28  # Elements.


def ours(new, base, capacity):
  """Both halves in one program."""
  return device.compact(new, device.find(new, base), capacity)


def prefix_sums(new, base, capacity):
  """Each change is scattered to the number of changes before it."""
  changed = _differ(new, base)
  ranks = jnp.cumsum(changed, dtype=jnp.int32)
  slots = jnp.where(changed, ranks - 1, capacity)
  places = jnp.arange(new.size, dtype=jnp.int32)
  positions = jnp.zeros(capacity, jnp.int32).at[slots].set(places, mode="drop")
  return ranks[-1], positions, new[positions]


def nonzero(new, base, capacity):
  """What JAX has for it."""
  changed = _differ(new, base)
  (positions,) = jnp.nonzero(changed, size=capacity, fill_value=0)
  return changed.sum(dtype=jnp.int32), positions, new[positions]


def _differ(new, base):
  new, base = (
    jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (new, base)
  )
  return new != base


PEERS = {"ours": ours, "prefix sums": prefix_sums, "jnp.nonzero": nonzero}


def measure(size: int, density: float) -> list[dict]:
  """Rows of one density."""
  keys = jax.random.split(jax.random.key(0))
  base = jax.random.normal(keys[0], size, jnp.bfloat16)
  flips = jax.random.bernoulli(keys[1], density, (size,))
  units = jax.lax.bitcast_convert_type(base, jnp.uint16) ^ flips
  new = jax.lax.bitcast_convert_type(units, jnp.bfloat16)
  old, bits = np.asarray(base), np.asarray(units)
  places = np.flatnonzero(np.asarray(flips))
  capacity = device.capacity_for(len(places))
  del flips

  # By words of 32 bits: XLA copies shorter ones at three quarters of the speed.
  words = jax.lax.bitcast_convert_type(units.reshape(-1, 2), jnp.uint32)
  copy = jax.jit(lambda array: array ^ jnp.uint32(1))

  find = jax.jit(device.find)
  on_device = {
    "copy": lambda: copy(words),
    "find": lambda: find(new, base),
  }
  for name, peer in PEERS.items():
    program = jax.jit(peer, static_argnums=2)
    count, positions, values = program(new, base, capacity)
    assert count == len(places), name
    np.testing.assert_array_equal(positions[: len(places)], places)
    np.testing.assert_array_equal(
      np.asarray(values[: len(places)]).view(np.uint16), bits[places]
    )
    on_device[name] = lambda program=program: program(new, base, capacity)

  def fetch():
    changes = device.fetch(new, base)
    return np.array(new) if changes is None else device.apply(old, changes)

  np.testing.assert_array_equal(fetch().view(np.uint16), bits)
  # A JAX array keeps what it once brought to the host: a new one each time.
  to_host = {"fetch": fetch, "whole": lambda: np.asarray(copy(words))}

  # Apart: a card that waits for its host slows down its memory.
  times = {}
  for calls in (on_device, to_host):
    for call in calls.values():
      jax.block_until_ready(call())
    times |= harness.median_ms(calls, seconds=0.2)
  moved = 2 * new.nbytes
  return [
    {
      "case": f"{density:.1%} of {size / 1e6:.0f}M",
      "method": name,
      "device": jax.devices()[0].device_kind,
      "ms": ms,
      "gb_s": moved / ms / 1e6,
      "of_copy": times["copy"] / ms,
    }
    for name, ms in times.items()
  ]


def main() -> None:
  """Prints the table."""
  args = harness.arguments(__doc__.split("\n", maxsplit=1)[0])
  size = 2**20 if args.quick else SIZE
  rows = [row for density in DENSITIES for row in measure(size, density)]
  harness.report(rows, as_json=args.json)


if __name__ == "__main__":
  main()
