"""The MoE layers that benchmarks measure, by name.

SonicMoE's shapes, Qwen3-30B-A3B's, one expert-parallel rank of Kimi K2.5 at EP
64 and EP 8, of GLM-5.2, Qwen3.5-397B and DeepSeek-V4-Pro at EP 64 (about 16,384
rows each), decoding, and one for CPUs.
"""

import numpy as np

# T, H, I, E, K.
SHAPES = {
  "sonic_i1024": (32768, 4096, 1024, 128, 8),
  "sonic_i512": (32768, 4096, 512, 128, 8),
  "sonic_i256": (32768, 4096, 256, 256, 16),
  "qwen3_30b": (32768, 2048, 768, 128, 8),
  "kimi_ep64": (4096, 7168, 2048, 6, 4),
  "kimi_ep8": (2048, 7168, 2048, 48, 8),
  "glm_ep64": (4096, 6144, 2048, 4, 4),
  "qwen35_ep64": (2048, 4096, 1024, 8, 8),
  "deepseek4_ep64": (4096, 7168, 3072, 6, 4),
  "decode_64": (64, 4096, 1024, 128, 8),
  "decode_256": (256, 4096, 1024, 128, 8),
  "decode_1024": (1024, 4096, 1024, 128, 8),
  "tiny": (64, 128, 128, 4, 2),
}


def named(names: str) -> list[str]:
  """Splits a flag's list of names; `gpu` stands for all but the CPU's.

  Raises:
    SystemExit: there is no such shape.
  """
  chosen = []
  for name in names.split(","):
    if name != "gpu" and name not in SHAPES:
      raise SystemExit(
        f"There is no shape {name!r}: choose from gpu, {', '.join(SHAPES)}."
      )
    chosen += [n for n in SHAPES if n != "tiny"] if name == "gpu" else [name]
  return chosen


def route(shape, routing) -> np.ndarray:
  """Returns expert ids [T, K]; the same on every call.

  Balanced: uniformly random. Skewed: log-normal popularity, and one expert ten
  times as popular.
  """
  T, _, _, E, K = shape
  rng = np.random.default_rng(0)
  score = rng.gumbel(size=(T, E))
  if routing == "skewed":
    score += rng.normal(scale=0.5, size=E) + np.log(10) * (np.arange(E) == 0)
  return np.argpartition(-score, K - 1, axis=1)[:, :K].astype(np.int32)
