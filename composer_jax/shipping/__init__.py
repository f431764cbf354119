"""Lossless deltas of arrays and a chain of versions; knows nothing of models.

To send: `Publisher`. To receive: `Subscriber`. Below them: bytes, `encode` and
`decode` (FORMAT.md); places, `open_store`; versions, `Chain`, `plan` for what
to download, `lease` and `collect` for what may go.
"""

from composer_jax.shipping.chain import Chain
from composer_jax.shipping.delta import Header, decode, encode, read_header
from composer_jax.shipping.errors import (
  ChainError,
  DeltaError,
  FencedError,
  MisfitError,
  MissingObjectError,
  RangeError,
  StoreError,
)
from composer_jax.shipping.folder_store import FolderStore
from composer_jax.shipping.manifest import Delivery, Manifest, Shard
from composer_jax.shipping.object_store import ObjectStore
from composer_jax.shipping.planner import Step, plan, skip_distances
from composer_jax.shipping.presence import Reader, readers
from composer_jax.shipping.publisher import Publisher, PublisherConfig
from composer_jax.shipping.retention import collect, lease, release, renew
from composer_jax.shipping.source import Source, from_checkpoint, from_tree
from composer_jax.shipping.store import Store, open_store
from composer_jax.shipping.subscriber import Subscriber, Weights

__all__ = [
  "Chain",
  "ChainError",
  "Delivery",
  "DeltaError",
  "FencedError",
  "FolderStore",
  "Header",
  "Manifest",
  "MisfitError",
  "MissingObjectError",
  "ObjectStore",
  "Publisher",
  "PublisherConfig",
  "RangeError",
  "Reader",
  "Shard",
  "Source",
  "Step",
  "Store",
  "StoreError",
  "Subscriber",
  "Weights",
  "collect",
  "decode",
  "encode",
  "from_checkpoint",
  "from_tree",
  "lease",
  "open_store",
  "plan",
  "read_header",
  "readers",
  "release",
  "renew",
  "skip_distances",
]
