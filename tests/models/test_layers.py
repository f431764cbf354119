"""Rotary positions, and the embedding's gradient on both of its paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export

from composer_jax.models.attention import attend
from composer_jax.models.layers import lookup, rotate


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

  def score(i, j):
    def at(x, position):
      return rotate(x, jnp.asarray([[position]]), 100.0)

    return float((at(q, i) * at(k, j)).sum())

  assert score(3, 1) == pytest.approx(score(13, 11), abs=1e-4)
  assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2)
  rotated = rotate(q, jnp.asarray([[9]]), 100.0)
  assert float(jnp.linalg.norm(rotated)) == pytest.approx(
    float(jnp.linalg.norm(q)), rel=1e-5
  )


def test_lookup_gradient_adds_the_rows_of_equal_ids():
  ids = jnp.asarray([[3, 1, 3], [3, 0, 1]])
  d_rows = jax.random.normal(jax.random.key(0), (2, 3, 4))
  _, vjp = jax.vjp(lambda table: lookup(table, ids), jnp.zeros((5, 4)))
  want = np.zeros((5, 4))
  for i, row in zip(np.ravel(ids), d_rows.reshape(-1, 4), strict=True):
    want[i] += np.asarray(row, np.float64)
  np.testing.assert_allclose(vjp(d_rows)[0], want, atol=1e-6)


def test_lookup_gradient_for_gpus_has_no_scatter():
  def grad(table, ids):
    return jax.grad(lambda t: jnp.square(lookup(t, ids)).sum())(table)

  arguments = (
    jax.ShapeDtypeStruct((64, 8), jnp.float32),
    jax.ShapeDtypeStruct((2, 16), jnp.int32),
  )
  programs = {
    platform: export(jax.jit(grad), platforms=[platform])(
      *arguments
    ).mlir_module()
    for platform in ("cpu", "cuda")
  }
  assert "stablehlo.scatter" in programs["cpu"]
  assert "stablehlo.scatter" not in programs["cuda"]
  assert "stablehlo.dot_general" in programs["cuda"]


def test_cudnn_attention_refuses_what_it_cannot_do():
  q = jnp.zeros((1, 4, 2, 8))
  with pytest.raises(ValueError, match="use 'xla'"):
    attend(q, q, q, jnp.ones((1, 4, 4), bool), "cudnn")
