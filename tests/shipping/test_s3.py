"""Over S3's protocol, through a proxy that fails as networks do."""

import contextlib
import http.client
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from composer_jax import shipping
from composer_jax.shipping.errors import (
  FencedError,
  MissingObjectError,
  StoreError,
)
from composer_jax.shipping.manifest import Delivery, Shard, sha256
from composer_jax.shipping.store import open_store

MIB = 2**20


class Proxy(http.server.ThreadingHTTPServer):
  """Forwards requests; `fate` says what becomes of each.

  Fates: "" (nothing happens); before the server heard of it, "refused" (the
  connection closes), "503", "hung" (it stays open); after that, "lost" (no
  answer), "500", "silence" (the connection stays open), "half" (an answer).
  """

  daemon_threads = True
  request_queue_size = 64

  def __init__(self, address, fate):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.target = urllib.parse.urlsplit(address).netloc
    self.fate = fate
    self.lock = threading.Lock()
    self.seen = []  # (method, query, Range header)
    self.parts_now = self.parts_most = 0
    self.closing = threading.Event()

  def handle_error(self, *_):
    """A client that gave up is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
  def _handle(self):
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    proxy, query = self.server, urllib.parse.urlsplit(self.path).query
    is_part = "partNumber" in query
    with proxy.lock:
      proxy.seen.append((self.command, query, self.headers.get("Range")))
      fate = proxy.fate(self.command, query)
      proxy.parts_now += is_part
      proxy.parts_most = max(proxy.parts_most, proxy.parts_now)
    try:
      self._answer(fate, body)
    finally:
      with proxy.lock:
        proxy.parts_now -= is_part
      self.close_connection = True

  def _answer(self, fate, body):
    if fate == "refused":
      return
    if fate == "hung":
      self.server.closing.wait()
      return
    if fate == "503":
      self.send_error(503)
      return
    server = http.client.HTTPConnection(self.server.target)
    server.request(self.command, self.path, body, dict(self.headers))
    answer = server.getresponse()
    data = answer.read()
    server.close()
    if fate == "lost":
      return
    if fate == "500":
      self.send_error(500)
      return
    if fate == "silence":
      self.server.closing.wait()
      return
    self.send_response(answer.status)
    for name, value in answer.getheaders():
      if name.lower() not in ("connection", "date", "server"):
        self.send_header(name, value)
    self.end_headers()
    self.wfile.write(data[: len(data) // 2] if fate == "half" else data)

  do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

  def log_message(self, *_):
    pass


@pytest.fixture
def proxy_to(s3_address, s3_url, monkeypatch):
  """Starts a proxy that `open_store` goes through."""
  with contextlib.ExitStack() as stack:

    def start(fate):
      proxy = stack.enter_context(Proxy(s3_address, fate))
      stack.callback(proxy.shutdown)
      stack.callback(proxy.closing.set)
      threading.Thread(target=proxy.serve_forever, args=[0.05]).start()
      address = f"http://127.0.0.1:{proxy.server_port}"
      monkeypatch.setenv("AWS_ENDPOINT_URL", address)
      return proxy

    yield start


@pytest.fixture
def small_parts(monkeypatch):
  monkeypatch.setattr("composer_jax.shipping.object_store.PART_BYTES", 5 * MIB)
  return random.Random(0).randbytes(18 * MIB)  # four parts


def unfinished_uploads(s3_address, s3_url):
  bucket = urllib.parse.urlsplit(s3_url).netloc
  with urllib.request.urlopen(f"{s3_address}/{bucket}?uploads") as answer:
    return answer.read().count(b"<UploadId>")


def parts_sent(proxy):
  queries = [urllib.parse.parse_qs(query) for _, query, _ in proxy.seen]
  return Counter(q["partNumber"][0] for q in queries if "partNumber" in q)


class Fates:
  """Given ones for the first requests that match, then none."""

  def __init__(self, method, query, *fates):
    self.method, self.query, self.fates = method, query, list(fates)

  def __call__(self, method, query):
    if method == self.method and self.query in query and self.fates:
      return self.fates.pop(0)
    return ""


def test_a_cut_upload_repeats_only_the_part(proxy_to, s3_url, small_parts):
  proxy = proxy_to(Fates("PUT", "partNumber=3", "refused", "503", "lost"))
  store = open_store(s3_url)
  store.put("data/large", small_parts)
  assert parts_sent(proxy) == {"1": 1, "2": 1, "3": 4, "4": 1}
  assert store.get("data/large") == small_parts


def test_an_upload_that_fails_for_good_leaves_nothing(
  proxy_to, s3_url, s3_address, small_parts
):
  proxy = proxy_to(Fates("PUT", "partNumber=3", *["503"] * 99))
  objects = open_store(s3_url)._store  # tried once
  with pytest.raises(StoreError, match="data/large"):
    objects.put("data/large", small_parts)
  assert parts_sent(proxy)["3"] == 4  # bounded
  assert unfinished_uploads(s3_address, s3_url) == 0  # aborted
  assert list(objects.list("data")) == []
  with pytest.raises(MissingObjectError):
    objects.get("data/large")


@pytest.mark.parametrize("fate", ["lost", "500"])
def test_the_answer_to_completing_is_lost(proxy_to, s3_url, small_parts, fate):
  proxy = proxy_to(Fates("POST", "uploadId", fate))
  store = open_store(s3_url)
  store.put("data/large", small_parts)
  assert set(parts_sent(proxy).values()) == {1}
  assert store.get("data/large") == small_parts


def test_eight_parts_at_once(proxy_to, s3_url, small_parts):
  proxy = proxy_to(lambda method, query: "")
  open_store(s3_url).put("data/large", small_parts * 4)  # 15 parts
  assert sum(parts_sent(proxy).values()) == 15
  assert 2 <= proxy.parts_most <= 8


def test_a_killed_upload_is_never_seen(
  proxy_to, s3_url, s3_address, small_parts
):
  proxy = proxy_to(Fates("PUT", "partNumber=3", "silence"))
  program = (
    "from composer_jax.shipping import object_store, store\n"
    "object_store.PART_BYTES = 5 * 2**20\n"
    f"store.open_store({s3_url!r}).put('data/large', bytes(18 * 2**20))\n"
  )
  with subprocess.Popen([sys.executable, "-c", program]) as process:
    while sum(parts_sent(proxy).values()) < 4:
      assert process.poll() is None
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert (
    unfinished_uploads(s3_address, s3_url) == 1
  )  # the bucket's rule ends it
  store = open_store(s3_url)
  assert list(store.list("data")) == []
  store.put("data/large", small_parts)
  assert store.get("data/large") == small_parts


def test_a_broken_download_continues(proxy_to, s3_url):
  data = random.Random(0).randbytes(4 * MIB)
  proxy = proxy_to(Fates("GET", "", "half"))
  store = open_store(s3_url)
  store.put("data/k", data)
  assert store.get("data/k") == data
  first, second = [asked for method, _, asked in proxy.seen if method == "GET"]
  assert first is None and second == f"bytes={2 * MIB}-{4 * MIB - 1}"


@pytest.mark.parametrize(
  "method, operation",
  [
    ("GET", lambda store: store.get("data/k")),
    ("GET", lambda store: list(store.list("data"))),
    ("PUT", lambda store: store.put_if_absent("data/new", b"new")),
    ("PUT", lambda store: store.put("data/new", b"new")),
    ("POST", lambda store: store.delete("data/k")),
  ],
  ids=["get", "list", "create", "put", "delete"],
)
def test_a_hung_connection_is_an_error_and_tried_again(
  proxy_to, s3_url, method, operation
):
  open_store(s3_url).put("data/k", b"data")
  fates = Fates(method, "", *["hung"] * 6)
  proxy_to(fates)
  store = open_store(s3_url, timeout_s=0.2)
  with pytest.raises(StoreError):
    operation(store._store)  # tried once, or four times by obstore
  operation(store)
  assert fates.fates == []


WORKERS = 8
TURNS = 130


def test_a_thousand_operations_over_a_bad_network(
  proxy_to, s3_url, small_parts
):
  """Each worker knows what its keys hold; some keys they fight for."""
  rng = random.Random(0)
  counts = Counter()

  def fate(method, query):
    counts["requests"] += 1
    kinds = ["refused", "503", "lost", "500"] + ["half"] * (method == "GET")
    draw = rng.random()
    chosen = (
      "silence" if draw < 0.005 else rng.choice(kinds) if draw < 0.2 else ""
    )
    counts[chosen or "passed"] += 1
    return chosen

  proxy_to(fate)
  store = open_store(s3_url, timeout_s=1.0)

  def work(name):
    own = random.Random(name)
    truth, won, done = {}, [], Counter()
    for turn in range(TURNS):
      key = f"own-{name}/{own.randrange(12)}"
      data = own.randbytes(own.choice([0, 10, 1000, 50_000]))
      action = own.choice(["put", "create", "get", "range", "list", "delete"])
      done[action] += 1
      if action == "put" and key not in truth:
        store.put(key, data)
        truth[key] = data
      elif action == "create":
        created = store.put_if_absent(key, data)
        assert created == (truth.setdefault(key, data) == data)
      elif action == "list":
        assert list(store.list(f"own-{name}")) == sorted(truth)
      elif action == "delete":
        store.delete(key)
        truth.pop(key, None)
      elif key not in truth:
        with pytest.raises(MissingObjectError):
          store.get(key)
      elif action == "range":
        start = own.randrange(len(truth[key]) + 1)
        size = own.randrange(len(truth[key]) - start + 1)
        assert store.get(key, start, size) == truth[key][start:][:size]
      else:
        assert store.get(key) == truth[key]
      if turn % 5 == 0:
        done["race"] += 1
        won.append(store.put_if_absent(f"race/{turn:03d}", b"%d" % name))
      if turn % 65 == 0:
        done["large put"] += 1
        store.put(f"large-{name}/{turn}", small_parts[turn : 6 * MIB + turn])
    return truth, won, done

  with ThreadPoolExecutor(WORKERS) as pool:
    results = list(pool.map(work, range(WORKERS)))
  for name, (truth, won, done) in enumerate(results):
    counts.update(done)
    for key, data in truth.items():
      assert store.get(key) == data
    for turn in range(0, TURNS, 65):
      data = small_parts[turn : 6 * MIB + turn]
      assert store.get(f"large-{name}/{turn}") == data
    for i, mine in enumerate(won):
      assert mine == (store.get(f"race/{5 * i:03d}") == b"%d" % name)
  for i in range(TURNS // 5):
    assert sum(won[i] for _, won, _ in results) == 1
  assert WORKERS * TURNS > 1000
  assert all(counts[f] > 20 for f in ["refused", "503", "lost", "500", "half"])
  assert counts["silence"] > 3
  print(dict(counts))


def publish(chain, base):
  key = chain.new_key()
  data = os.urandom(100)
  chain.store.put(key, data)
  digest = "" if base is None else chain.versions[base].digest
  delivery = Delivery(base, digest, (Shard(key, len(data), sha256(data)),))
  return chain.commit(digest=sha256(data), deliveries=[delivery], codec="test")


def test_two_publishers_on_s3(s3_url):
  """They take over from each other, again and again."""

  def run(_):
    chain = shipping.Chain(open_store(s3_url))
    done, fenced = [], 0
    for _ in range(10):
      try:
        chain.take_over()
        done.append(publish(chain, None))
        done.append(publish(chain, done[-1]))
      except FencedError:
        fenced += 1
    return done, fenced

  with ThreadPoolExecutor(2) as pool:
    (a, fenced_a), (b, fenced_b) = pool.map(run, range(2))
  chain = shipping.Chain(open_store(s3_url))
  assert chain.epoch == 20
  assert sorted(a + b) == list(chain.versions)
  assert not set(a) & set(b)
  assert len(a) + len(b) >= 40 - 2 * (fenced_a + fenced_b)
  (old, new) = (shipping.Chain(open_store(s3_url)) for _ in range(2))
  old.take_over()
  version = publish(old, None)
  new.take_over()
  with pytest.raises(FencedError):
    publish(old, version)
  assert publish(new, version) == shipping.Chain(open_store(s3_url)).head
  shipping.collect(new)
  assert len(list(new.store.list("data"))) >= 1
