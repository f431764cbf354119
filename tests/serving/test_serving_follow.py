"""A host follows a store while it serves: every token is its version's."""

import concurrent.futures
import functools
import re
import threading
import time

import jax
import numpy as np
import pytest
from serving_rig import KEY, NAME, model, serving, wait_until, weights

from composer_jax import shipping
from composer_jax.serving.follow import (
  FollowConfig,
  Follower,
  weights_digest,
)
from composer_jax.serving.weights import weight_shapes

AUTH = {"Authorization": f"Bearer {KEY}"}
VERSIONS = 20
CLIENTS = 3
NEW_TOKENS = 12
PADDED = 64


def test_twenty_versions_come_while_clients_ask(tmp_path):
  store = shipping.open_store(str(tmp_path))
  published = {}  # version -> its weights.
  done = threading.Event()
  with (
    serving(version=-1) as rig,
    shipping.Publisher(store) as publisher,
    concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
  ):
    version = publisher.publish(weights(0)).result()
    published[version] = weights(0)
    follower = Follower(
      shipping.Subscriber(store, like=_like()),
      rig.engine,
      FollowConfig(interval_s=0.02),
      observe=rig.server.metrics.swap,
    )
    rig.server.follower = follower
    try:
      wait_until(lambda: rig.engine.version == version)
      clients = [pool.submit(_ask, rig, k, done) for k in range(CLIENTS)]
      try:
        for seed in range(1, VERSIONS):
          version = publisher.publish(weights(seed)).result()
          published[version] = weights(seed)
          wait_until(lambda v=version: rig.engine.version == v)
          _, body = rig.json("GET", "/admin/weights?digest=1", headers=AUTH)
          assert body["version"] == version
          assert body["weights_digest"] == weights_digest(weights(seed))
      finally:
        done.set()
      answers = [client.result() for client in clients]
      text = rig.request("GET", "/metrics")[2].decode()
      assert (follower.swaps, follower.failures) == (VERSIONS, 0)
    finally:
      done.set()
      follower.close()
  (pause_s,) = re.findall(r"swap_pause_seconds_sum (\S+)", text)
  (swaps,) = re.findall(r"swap_pause_seconds_count (\S+)", text)
  assert float(swaps) == VERSIONS
  print(f"mean pause {1e3 * float(pause_s) / VERSIONS:.2f} ms")
  assert all(answers)
  for client in answers:
    # A client's requests follow each other, so its versions never go back.
    labels = [v for choice in client for v in choice["versions"]]
    assert labels == sorted(labels)
  choices = [choice for client in answers for choice in client]
  labels = {v for choice in choices for v in choice["versions"]}
  assert labels <= published.keys()
  # Else the load didn't overlap the swaps, and nothing was shown.
  assert len(labels) > VERSIONS // 2
  assert any(len(set(choice["versions"])) > 1 for choice in choices)
  for choice in choices:
    _check_tokens(choice, published)


@pytest.mark.parametrize(
  ("mode", "cache"),
  [("drain", "recompute"), ("in_flight", "keep"), ("in_flight", "recompute")],
)
def test_sampled_tokens_while_a_follower_swaps(
  tmp_path, monkeypatch, mode, cache
):
  """Each way to swap, in the middle of long requests."""
  store = shipping.open_store(str(tmp_path))
  with (
    serving(version=-1) as rig,
    shipping.Publisher(store) as publisher,
    concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
  ):
    published = {publisher.publish(weights(0)).result(): weights(0)}
    follower = Follower(
      shipping.Subscriber(store, like=_like()),
      rig.engine,
      FollowConfig(interval_s=0.02, mode=mode, cache=cache),
    )
    try:
      wait_until(lambda: rig.engine.version in published)
      # Steps so slow that no machine publishes after the requests' ends.
      step, first = rig.engine.step, rig.engine.version

      def slow_step():
        time.sleep(0.02 * (rig.engine.version == first))
        return step()

      monkeypatch.setattr(rig.engine, "step", slow_step)
      asking = [pool.submit(_sample, rig, k) for k in range(CLIENTS)]
      # In the middle, but for one that still reads its prompt.
      wait_until(lambda: rig.engine.stats().sampled_tokens > 30)
      later = publisher.publish(weights(1)).result()
      published[later] = weights(1)
      wait_until(lambda: rig.engine.version == later)
      answers = [future.result() for future in asking]
      after = _sample(rig, 99, max_tokens=8)
      assert (follower.swaps, follower.failures) == (2, 0)
    finally:
      follower.close()
  assert set(after["versions"]) == {later}
  assert not any(after["stale_cache"])
  _check_logprobs(after, published)
  labels = [answer["versions"] for answer in answers]
  if mode == "drain":
    assert all(set(found) == {min(published)} for found in labels)
  else:
    assert all(found == sorted(found) for found in labels)
    assert any(set(found) == set(published) for found in labels)
  for answer, found in zip(answers, labels, strict=True):
    mixed = [cache == "keep" and v == later and v != found[0] for v in found]
    assert answer["stale_cache"] == mixed
    _check_logprobs(answer, published)


def _sample(rig, client, max_tokens=150):
  body = {
    "model": NAME,
    "prompt_token_ids": np.random.default_rng(client)
    .integers(0, 280, 8)
    .tolist(),
    "max_tokens": max_tokens,
    "temperature": 0.7,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_versions": True,
  }
  status, answer = rig.json("POST", "/v1/completions", body)
  assert status == 200, answer
  (choice,) = answer["choices"]
  assert len(choice["token_ids"]) == max_tokens
  return choice


def _check_logprobs(choice, published):
  """Of tokens whose cache is their own version's, by plain forward passes.

  Tokens with a stale cache are left out: no plain pass has their logits, and
  `test_engine_swap` compares them with an oracle of mixed weights.
  """
  prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
  padded = np.zeros((1, 160), np.int32)
  padded[0, : len(prompt) + len(tokens)] = prompt + tokens
  logits = {v: _logits(tree, padded) for v, tree in published.items()}
  others = []
  for i, (token, version, stale) in enumerate(
    zip(tokens, choice["versions"], choice["stale_cache"], strict=True)
  ):
    if stale:
      continue
    for label, rows in logits.items():
      row = rows[len(prompt) + i - 1].astype(np.float64) / 0.7
      logprob = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
      away = abs(logprob - choice["sampled_logprobs"][i])
      if label == version:
        # Weights three times as large as at birth carry rounding far.
        assert away < 1e-2, (i, version)
      else:
        others.append(away)
  # Else nothing was shown: another version's would have done as well.
  assert np.median(others) > 1


def _ask(rig, client, done):
  """Choices of one request after another, each with another prompt."""
  rng, choices = np.random.default_rng(client), []
  while not done.is_set():
    prompt = rng.integers(0, 280, 8).tolist()
    body = {
      "model": NAME,
      "prompt_token_ids": prompt,
      "max_tokens": NEW_TOKENS,
      "temperature": 0,
      "ignore_eos": True,
      "return_token_ids": True,
      "return_versions": True,
    }
    status, answer = rig.json("POST", "/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
    assert len(choice["token_ids"]) == len(choice["versions"]) == NEW_TOKENS
    choices.append(choice)
  return choices


def _check_tokens(choice, published):
  """Each token is the likeliest under the version that it names.

  A swap recomputes the cache, so a plain forward over all tokens with that
  version's weights is what each token was taken from.
  """
  prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
  padded = np.zeros((1, PADDED), np.int32)
  padded[0, : len(prompt) + len(tokens)] = prompt + tokens
  for version in set(choice["versions"]):
    logits = _logits(published[version], padded)
    for i, (token, named) in enumerate(
      zip(tokens, choice["versions"], strict=True)
    ):
      if named == version:
        row = logits[len(prompt) + i - 1]
        assert row[token] >= row.max() - 1e-3, (version, i)


def _logits(tree, tokens):
  return np.asarray(_apply()(tree["params"], tree["balance"], tokens).logits)[0]


@functools.cache
def _apply():
  return jax.jit(model().apply)


def _like():
  where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    weight_shapes(model()),
  )
