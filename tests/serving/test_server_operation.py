"""Weights, limits and clients that go away."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest
from serving_rig import (
  ENGINE,
  KEY,
  NAME,
  model,
  serving,
  wait_until,
  weights,
)

from composer_jax import shipping
from composer_jax.serving import StoppedError
from composer_jax.serving.follow import (
  FollowConfig,
  Follower,
  weights_digest,
)
from composer_jax.serving.weights import weight_shapes

AUTH = {"Authorization": f"Bearer {KEY}"}
LONG = {"max_tokens": 900, "model": NAME, "prompt": [5], "ignore_eos": True}


@pytest.fixture(scope="module")
def rig():
  with serving(dataclasses.replace(ENGINE, max_waiting=2)) as rig:
    yield rig


def test_admin_needs_its_key(rig):
  assert rig.json("GET", "/admin/weights")[0] == 401
  wrong = {"Authorization": "Bearer " + KEY[:-1]}
  assert rig.json("GET", "/admin/weights", headers=wrong)[0] == 401
  wrong = {"Authorization": "Bearer \xff"}  # not UTF-8
  assert rig.json("GET", "/admin/weights", headers=wrong)[0] == 401
  assert rig.json("GET", "/admin/weights", headers=AUTH)[0] == 409


def test_a_full_queue_is_429_and_a_lost_client_cancels(rig):
  before = rig.engine.stats().finished.get("cancelled", 0)
  streams = [
    rig.client.completions.create(
      model=NAME,
      prompt=[5],
      max_tokens=900,
      stream=True,
      extra_body={"ignore_eos": True},
    )
    for _ in range(ENGINE.max_rows)
  ]
  waiting = [
    threading.Thread(target=rig.request, args=("POST", "/v1/completions", LONG))
    for _ in range(2)
  ]
  for thread in waiting:
    thread.start()
  wait_until(lambda: rig.engine.stats().waiting == 2)
  status, headers, body = rig.request("POST", "/v1/completions", LONG)
  assert (status, headers["Retry-After"]) == (429, "1")
  assert b"queue_full" in body
  for stream in streams:
    stream.close()
  wait_until(
    lambda: rig.engine.stats().finished.get("cancelled", 0) >= before + 4
  )
  for thread in waiting:
    thread.join()


def test_a_body_too_large_is_413(rig):
  status, body = rig.json("POST", "/v1/completions", b" " * (5 << 20))
  assert (status, body["error"]["type"]) == (413, "invalid_request_error")


def test_an_order_is_answered_whatever_becomes_of_it(
  rig, tmp_path, monkeypatch
):
  subscriber = shipping.Subscriber(shipping.open_store(str(tmp_path)), like={})
  follower = Follower(subscriber, rig.engine, FollowConfig(interval_s=60.0))

  def fail(version):
    raise RuntimeError("no memory")

  monkeypatch.setattr(subscriber, "pin", fail)
  with pytest.raises(RuntimeError, match="no memory"):
    follower.order("pin", 1).result(5)
  # Nor does it end the follower if its sender goes away.
  assert not follower.order("status").cancel()
  status = follower.order("status").result(5)
  assert (status["failures"], status["failure"]) == (
    1,
    "RuntimeError: no memory",
  )
  follower.close()
  with pytest.raises(StoppedError, match="followed no more"):
    follower.order("status").result(5)


@pytest.mark.parametrize("interval_s", [0.0, float("nan"), float("inf")])
def test_intervals_that_no_clock_has_are_refused(interval_s):
  with pytest.raises(ValueError, match="above 0, and at most"):
    FollowConfig(interval_s=interval_s)


def test_follows_pins_rolls_back_and_survives_what_does_not_fit(rig, tmp_path):
  where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    weight_shapes(model()),
  )
  store = shipping.open_store(str(tmp_path))

  def order(verb, **body):
    path = f"/admin/weights/{verb}"
    status, body = rig.json("POST", path, body, headers=AUTH)
    return status, body

  with shipping.Publisher(store) as publisher:
    first = publisher.publish(weights(1)).result()
    follower = Follower(
      shipping.Subscriber(store, like=like),
      rig.engine,
      FollowConfig(interval_s=0.05),
      observe=rig.server.metrics.swap,
    )
    rig.server.follower = follower
    rig.server.metrics.follow(follower)
    try:
      wait_until(lambda: rig.engine.version == first)
      second = publisher.publish(weights(2)).result()
      wait_until(lambda: rig.engine.version == second)
      _, body = rig.json("GET", "/admin/weights?digest=1", headers=AUTH)
      assert body["weights_digest"] == weights_digest(weights(2))
      assert body["weights_digest"] != weights_digest(weights(1))
      status, body = order("roll_back")
      assert (status, body["version"], body["pinned"]) == (200, first, first)
      status, body = order("follow")
      assert (status, body["version"], body["pinned"]) == (200, second, None)
      status, body = order("pin", version=99)
      assert status == 409
      assert "version 99 is not in the chain" in body["error"]["message"]
      status, body = order("skip", version=second)
      assert (status, body["version"]) == (200, first)
      status, body = order("skip", version=first)
      assert (status, rig.engine.version) == (409, first)
      assert "publish another first" in body["error"]["message"]
      order("pin", version=first)
      status, body = order("skip", version=first)
      assert (status, rig.engine.version) == (409, first)
      assert "pin another first" in body["error"]["message"]
      status, body = order("follow")
      assert (body["version"], body["skipped"]) == (first, [second])
      publisher.publish({"x": jnp.zeros(3)}).result()
      wait_until(lambda: follower.failures)
      status, body = rig.json("GET", "/health")
      assert (status, body["version"]) == (200, first)
      assert "is missing in version" in body["failure"]
      text = rig.request("GET", "/metrics")[2].decode()
      assert "composer_weight_update_failures_total 1.0" in text
      rig.client.completions.create(model=NAME, prompt=[5], max_tokens=2)
    finally:
      follower.close()
