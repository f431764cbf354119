"""Measures fireworks-delta-compression on pairs that `delta_codec` left.

  PYTHON fireworks_worker.py FOLDER PAIRS

Runs in an environment of its own (`pip install torch
fireworks-delta-compression==0.1.0`), so it imports nothing of this project. One
JSON line for each of its formats; times are medians of three rounds, with one
thread for torch (arc_v3 starts threads of its own).
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from fireworks_delta_compression import delta_compress, delta_decompress

_COLUMNS = 4000  # arc_v3 also looks at rows, so it gets some


def main(folder: Path, num_pairs: int) -> None:
  """Prints the lines; fails if anything was lost."""
  torch.set_num_threads(1)
  pairs = [
    tuple(_tensor(folder / f"{i}.{part}") for part in ("base", "new"))
    for i in range(num_pairs)
  ]
  for codec in ("arc_v2", "arc_v3"):
    encode_s, decode_s = [], []
    for _ in range(3):
      began = time.perf_counter()
      coded = [
        delta_compress(src=base, dst=new, compression_format=codec)
        for base, new in pairs
      ]
      encode_s.append(time.perf_counter() - began)
      began = time.perf_counter()
      decoded = [
        delta_decompress(
          src=base,
          compressed_diff=delta,
          checksum=checksum,
          compression_format=codec,
        )
        for (base, _), (delta, checksum) in zip(pairs, coded, strict=True)
      ]
      decode_s.append(time.perf_counter() - began)
    for (_, new), back in zip(pairs, decoded, strict=True):
      if not torch.equal(new.view(torch.int16), back.view(torch.int16)):
        raise AssertionError(f"{codec} lost something")
    row = {
      "codec": codec,
      "bytes": sum(delta.numel() for delta, _ in coded),
      "encode_s": statistics.median(encode_s),
      "decode_s": statistics.median(decode_s),
    }
    print(json.dumps(row))


def _tensor(path):
  array = torch.from_numpy(np.fromfile(path, np.int16)).view(torch.bfloat16)
  return array.reshape(-1, _COLUMNS) if array.numel() % _COLUMNS == 0 else array


if __name__ == "__main__":
  main(Path(sys.argv[1]), int(sys.argv[2]))
