"""Parameter counts of the real shapes, and FLOPs against a count by hand."""

import pytest

from composer_jax.models import PRESETS, count_params, train_flops_per_token


@pytest.mark.parametrize(
  ("name", "total", "active"),
  [
    ("kimi_k2_5", 1026.4, 32.9),
    ("deepseek_v3", 671.0, 37.6),
    ("qwen3_30b_a3b", 30.5, 3.35),
  ],
)
def test_published_sizes(name, total, active):
  count = count_params(PRESETS[name]())
  assert count.total / 1e9 == pytest.approx(total, abs=0.05)
  assert count.active / 1e9 == pytest.approx(active, abs=0.05)


def test_flops_of_qwen3_by_hand():
  # Per layer: q and o 2048 x 4096, k and v 2048 x 512, router 2048 x 128,
  # eight experts of three 2048 x 768 matrices; the unembedding once.
  layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768
  attention = 32 * (128 + 128) * 4096 / 2
  want = 6 * (48 * (layer + attention) + 2048 * 151_936)
  got = train_flops_per_token(PRESETS["qwen3_30b_a3b"](), seq_len=4096)
  assert got == pytest.approx(want, rel=1e-12)
