"""A host follows a store while it serves: every token is its version's."""

import concurrent.futures
import functools
import re
import threading

import jax
import numpy as np
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
