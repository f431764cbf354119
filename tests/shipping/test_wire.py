"""The model of the wire by hand, at its limits; and the link that tests it."""

import concurrent.futures
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.shipping import FolderStore
from composer_jax.shipping.wire import (
  Prediction,
  Readers,
  Service,
  Trainers,
  delta_bytes,
  pipeline_s,
  predict,
  publish_s,
  receive_s,
)
from composer_jax.shipping.wrappers import Counted, Throttled

TRAINERS = Trainers(
  hosts=4,
  upload_bytes_per_s=10.0,
  cores=2,
  encode_bytes_per_s=100.0,
  object_bytes=50.0,
)
READERS = Readers(
  hosts=6,
  download_bytes_per_s=20.0,
  cores=4,
  apply_bytes_per_s=50.0,
  share=0.5,
  regions=2,
  group_bytes=25.0,
)
SERVICE = Service(latency_s=0.25, commit_s=0.5, poll_s=3.0)


def test_delta_by_hand():
  # 1,000 bytes are 500 elements; 40 change, 6 bits each.
  assert delta_bytes(1000.0, changed_share=0.08, bits_per_change=6.0) == 30
  assert (
    delta_bytes(
      1000.0, changed_share=0.5, bits_per_change=8.0, bytes_per_element=4.0
    )
    == 125
  )


def test_version_by_hand():
  # A trainer encodes 4,000 bytes at 200 a second, 20 s, and uploads 100 bytes,
  # 10 s, the last object holding a fifth: 20 + 2, three requests of 0.25, a
  # commit of 0.5.
  # A reader downloads 200 bytes at 20 a second, 10 s, in eight groups, and
  # applies 8,000 bytes at 50 a second on four cores, 40 s: 40 + 1.25, and four
  # requests.
  assert predict(16e3, 400.0, TRAINERS, READERS, SERVICE) == Prediction(
    publish_s=23.25,
    wait_s=1.5,
    receive_s=42.25,
    uploaded_bytes=400.0,
    egress_bytes=1200.0,
  )
  total = predict(16e3, 400.0, TRAINERS, READERS, SERVICE).total_s
  assert total == 23.25 + 1.5 + 42.25


def test_link_bound_by_hand():
  # 20 s of upload, after the first object, a sixteenth of a quarter of it all,
  # encoded in 0.25 / 64 s.
  assert publish_s(200.0, 800.0, TRAINERS, Service()) == 0.25 / 64 + 20
  # 20 s of download, then the last of 16 groups: 400 / 16 / 50 s.
  assert receive_s(800.0, 800.0, READERS, Service()) == 20 + 0.5


def test_few_groups_leave_cores_idle():
  # One group of 25 bytes: a single core applies 800 bytes.
  assert receive_s(1600.0, 50.0, READERS, Service()) == 25 / 20 + 16


def test_region_link_is_shared():
  # 3 hosts a region share 30 bytes a second.
  shared = dataclasses.replace(READERS, region_bytes_per_s=30.0)
  assert shared.bytes_per_s == 10
  wide = dataclasses.replace(READERS, region_bytes_per_s=300.0)
  assert wide.bytes_per_s == 20


def test_infinite_link_leaves_the_cores():
  fast = dataclasses.replace(TRAINERS, upload_bytes_per_s=math.inf)
  assert publish_s(16e3, 400.0, fast, Service()) == 16_000 / 4 / 2 / 100
  near = dataclasses.replace(READERS, download_bytes_per_s=math.inf)
  assert receive_s(16e3, 400.0, near, Service()) == 8000 / 50 / 4


def test_infinite_cores_leave_the_link():
  fast = dataclasses.replace(TRAINERS, encode_bytes_per_s=math.inf)
  assert publish_s(16e3, 400.0, fast, Service()) == 10
  near = dataclasses.replace(READERS, apply_bytes_per_s=math.inf)
  assert receive_s(16e3, 400.0, near, Service()) == 10


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("times", [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_pipeline_is_that_of_a_simulation(parts, times):
  """Two machines, jobs in order, each by hand."""
  first, second = times
  free = done = 0.0
  for _ in range(parts):
    free += first
    done = max(done, free) + second
  assert pipeline_s(first * parts, second * parts, first, second) == done


SIZES = st.floats(1.0, 1e13)
FACTORS = st.integers(1, 1000)
# Each of these can only help, or only cost.
HELP = [
  ("trainers", "hosts"),
  ("trainers", "upload_bytes_per_s"),
  ("trainers", "cores"),
  ("trainers", "encode_bytes_per_s"),
  ("readers", "download_bytes_per_s"),
  ("readers", "cores"),
  ("readers", "apply_bytes_per_s"),
  ("readers", "region_bytes_per_s"),
]
COST = [
  ("trainers", "object_bytes"),
  ("readers", "hosts"),
  ("readers", "share"),
  ("service", "latency_s"),
  ("service", "commit_s"),
  ("service", "poll_s"),
]


@pytest.mark.parametrize(
  ("part", "field", "sign"),
  [(*where, 1) for where in HELP] + [(*where, -1) for where in COST],
)
@given(contents=SIZES, wire=SIZES, factor=FACTORS)
def test_each_figure_helps_or_costs(part, field, sign, contents, wire, factor):
  parts = {
    "trainers": TRAINERS,
    "readers": dataclasses.replace(
      READERS, share=1e-3, region_bytes_per_s=40.0
    ),
    "service": SERVICE,
  }
  before = predict(contents, wire, **parts).total_s
  value = getattr(parts[part], field)
  parts[part] = dataclasses.replace(parts[part], **{field: value * factor})
  after = predict(contents, wire, **parts).total_s
  assert sign * (before - after) >= -1e-9 * before


@given(contents=SIZES, wire=SIZES, factor=FACTORS)
def test_fewer_bytes_are_never_later(contents, wire, factor):
  """One core: fewer groups may leave cores idle, and apply for longer."""
  readers = dataclasses.replace(READERS, cores=1)
  more = predict(contents, wire * factor, TRAINERS, readers, SERVICE)
  less = predict(contents, wire, TRAINERS, readers, SERVICE)
  # One part more or less of an encoder or of a core's work: see the pipeline.
  assert less.total_s <= (1 + 1e-9) * more.total_s + contents * (
    1 / 800 + 1 / 100
  )
  assert less.egress_bytes <= more.egress_bytes


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: dataclasses.replace(TRAINERS, hosts=0), "hosts is 0"),
    (lambda: dataclasses.replace(READERS, share=1.5), "at most 1"),
    (lambda: dataclasses.replace(READERS, cores=-1), "cores is -1"),
    (lambda: Service(latency_s=-1.0), "latency_s is -1"),
    (lambda: Service(poll_s=math.nan), "poll_s is nan"),
    (
      lambda: delta_bytes(1.0, changed_share=12.0, bits_per_change=4.0),
      "from 0 to 1",
    ),
  ],
)
def test_nonsense_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("threads", [4, 16])
def test_throttle_keeps_its_rate(tmp_path, threads):
  """Both ways at once, each its own rate, however many threads share it."""
  rate, size, count = 4e6, 100_000, 24
  store = FolderStore(tmp_path)
  data = np.random.default_rng(0).bytes(size)
  store.put("there", data)
  link = Counted(Throttled(store, rate))
  with (
    concurrent.futures.ThreadPoolExecutor(threads) as up,
    concurrent.futures.ThreadPoolExecutor(threads) as down,
  ):
    for number in range(count):
      up.submit(link.put, f"new/{number}", data)
      down.submit(link.get, "there")
  ideal_s = size * count / rate
  for meter in (link.up, link.down):
    assert meter.bytes == size * count
    # Never faster; a little slower, as files are written behind the link.
    assert ideal_s <= meter.seconds < 1.1 * ideal_s
