"""How long does a version take to arrive? A model of the wire.

    delta = delta_bytes(1e12, changed_share=0.01, bits_per_change=4.4)
    predict(1e12, delta, Trainers(...), Readers(...), Service(...)).total_s

Two pipelines with a commit between them: trainers encode objects and upload
them, readers download groups of chunks and apply them. Each takes as long as
the slower of its two stages, and one part of the other, before its first or
after its last. `benchmarks/ship_wire.py` compares this with measured runs.

One delivery is counted. A version that has skip deltas, too, encodes and
uploads each of them; no reader downloads more than one. Not modelled: links
that slow down under load, retries, stragglers, and what a device needs to take
the arrays.
"""

import dataclasses
import math

from composer_jax.shipping.packing import FIRST, GROWTH
from composer_jax.shipping.publisher import PublisherConfig
from composer_jax.shipping.reader import GROUP_BYTES

# Requests that wait for one another. A publisher: last object, index, the index
# read back. A reader: log, lease, index, first group.
PUBLISHER_REQUESTS = 3
READER_REQUESTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainers:
  """Hosts that publish, each an equal part.

  Attributes:
    hosts: how many.
    upload_bytes_per_s: of each.
    cores: that encode, of each.
    encode_bytes_per_s: of contents, a core.
    object_bytes: how large an uploaded object gets, after the first ones.
  """

  hosts: int
  upload_bytes_per_s: float
  cores: int
  encode_bytes_per_s: float
  object_bytes: float = float(PublisherConfig.object_bytes)

  def __post_init__(self):
    _check_positive(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readers:
  """Hosts that follow, evenly spread over regions.

  Attributes:
    hosts: how many, in all.
    download_bytes_per_s: of each.
    cores: that apply, of each.
    apply_bytes_per_s: of contents, a core.
    share: of the model that a host needs, 0 to 1.
    regions: how many.
    region_bytes_per_s: from the store to all hosts of a region together.
    group_bytes: downloaded and applied at once by a thread.
  """

  hosts: int
  download_bytes_per_s: float
  cores: int
  apply_bytes_per_s: float
  share: float = 1.0
  regions: int = 1
  region_bytes_per_s: float = math.inf
  group_bytes: float = float(GROUP_BYTES)

  def __post_init__(self):
    _check_positive(self)
    if self.share > 1:
      raise ValueError(f"share is {self.share}; a host needs at most 1")

  @property
  def bytes_per_s(self) -> float:
    """What a host downloads while all do."""
    return min(
      self.download_bytes_per_s,
      self.region_bytes_per_s * self.regions / self.hosts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """The object store and how it is watched.

  Attributes:
    latency_s: of a request, to its first byte.
    commit_s: of the create-if-absent that makes a version.
    poll_s: between a reader's looks at the log.
  """

  latency_s: float = 0.0
  commit_s: float = 0.0
  poll_s: float = 0.0

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if not value >= 0:
        raise ValueError(f"{name} is {value}; give seconds, at least 0")


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Seconds and bytes of one version.

  Attributes:
    publish_s: from the arrays to the committed version.
    wait_s: until a reader looks, on average.
    receive_s: from there until every host has it.
    uploaded_bytes: by all trainers.
    egress_bytes: from the store to all readers.
  """

  publish_s: float
  wait_s: float
  receive_s: float
  uploaded_bytes: float
  egress_bytes: float

  @property
  def total_s(self) -> float:
    """From the arrays to the last host."""
    return self.publish_s + self.wait_s + self.receive_s


def delta_bytes(
  model_bytes: float,
  *,
  changed_share: float,
  bits_per_change: float,
  bytes_per_element: float = 2.0,
) -> float:
  """Bytes of a delta.

  Args:
    model_bytes: of contents.
    changed_share: of the elements, 0 to 1 (the density).
    bits_per_change: of the delta, for each element that changed.
    bytes_per_element: 2 for bfloat16.

  Raises:
    ValueError: if the share is none.
  """
  if not 0 <= changed_share <= 1:
    raise ValueError(f"changed_share is {changed_share}; it is from 0 to 1")
  return model_bytes / bytes_per_element * changed_share * bits_per_change / 8


def publish_s(
  contents_bytes: float,
  wire_bytes: float,
  trainers: Trainers,
  service: Service,
) -> float:
  """Seconds from the arrays to the committed version.

  Args:
    contents_bytes: of the model, all of it.
    wire_bytes: to upload; as many as the contents for a plain copy.
    trainers: who uploads.
    service: where to.
  """
  encode = contents_bytes / trainers.hosts / trainers.cores
  encode /= trainers.encode_bytes_per_s
  mine = wire_bytes / trainers.hosts
  upload = mine / trainers.upload_bytes_per_s
  # Shares of the first object and of the last one.
  first = 1 / max(1.0, mine * FIRST / trainers.object_bytes)
  last = 1 / max(1.0 + GROWTH, mine / trainers.object_bytes)
  busy = pipeline_s(encode, upload, encode * first, upload * max(first, last))
  return busy + PUBLISHER_REQUESTS * service.latency_s + service.commit_s


def receive_s(
  contents_bytes: float,
  wire_bytes: float,
  readers: Readers,
  service: Service,
) -> float:
  """Seconds from a look at the log until every host has the version.

  Args:
    contents_bytes: of the model, all of it.
    wire_bytes: of the delivery, all of it.
    readers: who downloads.
    service: where from.
  """
  mine = wire_bytes * readers.share
  download = mine / readers.bytes_per_s
  groups = max(1.0, mine / readers.group_bytes)
  # One thread applies a group, so few groups leave cores idle.
  apply = contents_bytes * readers.share / readers.apply_bytes_per_s
  busy = pipeline_s(
    download,
    apply / min(readers.cores, groups),
    download / groups,
    apply / groups,
  )
  return busy + READER_REQUESTS * service.latency_s


def predict(
  contents_bytes: float,
  wire_bytes: float,
  trainers: Trainers,
  readers: Readers,
  service: Service,
) -> Prediction:
  """The whole way of a version, delta or full copy; see its two halves."""
  return Prediction(
    publish_s(contents_bytes, wire_bytes, trainers, service),
    service.poll_s / 2,
    receive_s(contents_bytes, wire_bytes, readers, service),
    wire_bytes,
    wire_bytes * readers.share * readers.hosts,
  )


def pipeline_s(
  first_s: float, second_s: float, first_part_s: float, second_part_s: float
) -> float:
  """Seconds of two stages that work on the same parts, one behind the other.

  Either the second stage waits for the first part and is busy from then on, or
  the first is busy all along and its last part goes through the second.

  Args:
    first_s: of the first stage for all parts.
    second_s: of the second.
    first_part_s: of the first for the first part.
    second_part_s: of the second for the last part.
  """
  return max(first_part_s + second_s, first_s + second_part_s)


def _check_positive(config) -> None:
  for name, value in dataclasses.asdict(config).items():
    if not value > 0:
      raise ValueError(f"{name} is {value}; it must be above 0")
