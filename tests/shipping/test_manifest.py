"""Entries have one spelling; anything else is refused."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.shipping.errors import ChainError
from composer_jax.shipping.manifest import (
  Delivery,
  Entry,
  Manifest,
  Retired,
  Shard,
  from_bytes,
  to_bytes,
)

ENTRY = Entry(
  7,
  "version",
  2,
  "me",
  "ab",
  Manifest(
    "cd",
    (
      Delivery(None, "", (Shard("data/1", 5, "ef"), Shard("data/2", 6, "01"))),
      Delivery(3, "23", ()),
    ),
    "CJXD/1",
    {"step": 40, "run": "long ∞", "nested": {"b": [1, 2.5, None]}},
  ),
)
RETIREMENT = Entry(8, "retirement", 2, "me", "", None, (Retired(3, None),))
DATA = to_bytes(ENTRY)


@pytest.mark.parametrize("entry", [ENTRY, RETIREMENT])
def test_round_trip(entry):
  assert from_bytes(to_bytes(entry)) == entry
  assert b" " not in to_bytes(RETIREMENT)


def test_sizes_add_up():
  assert [way.size for way in ENTRY.manifest.deliveries] == [11, 0]


@given(place=st.integers(0, len(DATA)), junk=st.binary(max_size=5))
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_another_entry(place, junk):
  damaged = DATA[:place] + junk + DATA[place + len(junk) :]
  try:
    entry = from_bytes(damaged)
  except ChainError:
    return
  assert to_bytes(entry) == damaged  # the hash in the next entry tells


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"[]",
    b"7",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"position":0}',
    json.dumps(dataclasses.asdict(ENTRY)).encode(),
    DATA.replace(b'"kind":"version"', b'"kind":"mutiny"'),
    DATA.replace(b'"position":7', b'"position":"7"'),
    DATA.replace(b'"size":5', b'"size":null'),
    DATA[:-1] + b',"zz":1}',
  ],
)
def test_what_is_not_an_entry(data):
  with pytest.raises(ChainError):
    from_bytes(data)


def test_metadata_must_be_json():
  for metadata in ({"x": float("nan")}, {"x": object()}, {"x": b""}):
    manifest = dataclasses.replace(ENTRY.manifest, metadata=metadata)
    with pytest.raises(ChainError, match="metadata"):
      to_bytes(dataclasses.replace(ENTRY, manifest=manifest))
