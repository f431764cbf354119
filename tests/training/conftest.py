"""What tests of training share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
  """Leaves out most of XLA's optimisations: a quarter less time to compile.

  Not for tests that compare bits of computations.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
