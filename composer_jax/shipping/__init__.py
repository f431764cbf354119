"""Lossless deltas of arrays and a chain of versions; knows nothing of models.

Bytes: `encode` and `decode` (FORMAT.md). Places: `open_store`. Versions:
`Chain`, `plan` for what to download, `lease` and `collect` for what may go.
"""

from composer_jax.shipping.chain import Chain
from composer_jax.shipping.delta import Header, decode, encode, read_header
from composer_jax.shipping.errors import (
  ChainError,
  DeltaError,
  FencedError,
  MissingObjectError,
  StoreError,
)
from composer_jax.shipping.manifest import Delivery, Manifest, Shard
from composer_jax.shipping.planner import Step, plan, skip_distances
from composer_jax.shipping.retention import collect, lease, release, renew
from composer_jax.shipping.store import Store, open_store

__all__ = [
  "Chain",
  "ChainError",
  "Delivery",
  "DeltaError",
  "FencedError",
  "Header",
  "Manifest",
  "MissingObjectError",
  "Shard",
  "Step",
  "Store",
  "StoreError",
  "collect",
  "decode",
  "encode",
  "lease",
  "open_store",
  "plan",
  "read_header",
  "release",
  "renew",
  "skip_distances",
]
