"""What the Mosaic kernels alone promise on a GPU; see test_layer_gpu.py."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.moe import mosaic
from pallas_kernels.moe.mosaic import tiles
from pallas_kernels.moe.mosaic.gather import Movers
from tests.pallas_kernels.moe import test_layer_gpu as shared

pytestmark = pytest.mark.gpu


def test_any_number_of_sms_gives_the_same_bits(monkeypatch):
  arguments, dy = shared.inputs()
  first = shared.bits(shared.compiled(mosaic.apply)(arguments, dy))
  for sms in (1, 17, 100):
    monkeypatch.setattr(tiles, "sm_count", lambda sms=sms: sms)
    result = shared.compiled(mosaic.apply)(arguments, dy)
    assert shared.bits(result) == first


@pytest.mark.parametrize("tokens", [100, shared.T, 8 * shared.T])
def test_gathering_beside_multiplications_changes_no_bit(tokens):
  (x, ids, *rest), dy = shared.inputs(tokens=tokens)
  x, dy = (a.at[0].set(jnp.nan) for a in (x, dy))  # A token that is nobody's.
  arguments = (x, ids.at[0].set(-1), *rest)
  assert (tiles.tile_rows(ids.size, shared.E, shared.I, shared.H) == 64) == (
    tokens == 100
  )
  alone = functools.partial(mosaic.apply, in_loads=False)
  expected = shared.bits(shared.compiled(alone)(arguments, dy))
  for movers in (Movers(12, 2), Movers(5, 32)):
    layer = functools.partial(mosaic.apply, overlap=movers)
    call = shared.compiled(layer)
    for _ in range(5):
      assert shared.bits(call(arguments, dy)) == expected
