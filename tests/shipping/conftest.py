"""One S3 server a test process; each test has a bucket of its own."""

import uuid

import pytest

from benchmarks import s3_server


@pytest.fixture(scope="session")
def s3_address():
  with s3_server.serve() as address:
    yield address


@pytest.fixture
def s3_url(s3_address, monkeypatch):
  """What `open_store` takes, with the environment that it needs."""
  bucket = f"b{uuid.uuid4().hex}"
  s3_server.make_bucket(s3_address, bucket)
  for name, value in s3_server.environment(s3_address).items():
    monkeypatch.setenv(name, value)
  return f"s3://{bucket}/folder"
