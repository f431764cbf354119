"""What is seen of a run from outside, and how it is shown."""

import http.server
import io
import json
import os
import threading
import time

import pytest
from rich.console import Console

from composer_jax.rl.watch import Sight, Watch, bars, cpu_s, host_facts
from composer_jax.rl.worker import read_json, write_json

METRICS = """# HELP composer_engine_running Requests that have a row.
composer_engine_running 3.0
composer_engine_waiting 1.0
composer_engine_prompt_tokens_total 900.0
composer_engine_cached_tokens_total 400.0
composer_engine_sampled_tokens_total 1200.0
composer_swap_pause_seconds_sum 0.02
composer_swap_pause_seconds_count 4.0
composer_swap_pause_seconds_bucket{le="0.001"} 4.0
"""


@pytest.fixture
def url():
  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      health = json.dumps({"status": "ok", "version": 9})
      body = {"/health": health, "/metrics": METRICS}[self.path].encode()
      self.send_response(200)
      self.send_header("Content-Length", str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *_):
      pass

  with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def test_a_hosts_facts(url):
  assert host_facts(url) == {
    "version": 9,
    "running": 3.0,
    "waiting": 1.0,
    "prompt_tokens": 900.0,
    "cached_tokens": 400.0,
    "sampled_tokens": 1200.0,
    "pause_s": 0.02,
    "swaps": 4.0,
  }
  assert host_facts("http://127.0.0.1:9") == {}


def test_processor_time_grows_with_work():
  before = cpu_s(os.getpid())
  deadline = time.process_time() + 0.1
  while time.process_time() < deadline:
    pass
  assert cpu_s(os.getpid()) >= before + 0.05
  assert cpu_s(None) == 0.0


def test_a_look_is_written_down_and_shown(tmp_path, url):
  write_json(
    tmp_path / "learner.json",
    {
      "step": 3,
      "steps": 40,
      "doing": "waiting",
      "version": 7,
      "outstanding": 6,
      "complete": 2,
      "counts": {"ordered": 50, "trained": 24, "equal_rewards": 8},
    },
  )
  (tmp_path / "status").mkdir()
  write_json(
    tmp_path / "status" / "worker-0.json",
    {"running": 5, "seconds": {"sampling": 1.0, "rollouts": 4.0}},
  )
  (tmp_path / "steps.jsonl").write_text(
    json.dumps({"step": 3, "lags": {"0": 30, "1": 10}}) + "\n"
  )
  (tmp_path / "metrics.jsonl").write_text(
    json.dumps({"step": 3, "reward/pass_rate": 0.25}) + "\n"
  )
  watch = Watch(tmp_path)
  pids = {"learner": os.getpid(), "host-0": None}
  sights = [
    watch.look({"host-0": place}, pids, {"host-0": 1}) for place in (None, url)
  ]
  console = Console(file=io.StringIO(), width=100)
  for sight in sights:
    console.print(watch.picture(sight))
  watch.close()
  shown = console.file.getvalue()
  for text in (
    "step 3 of 40",
    "6 on their way, 2 complete",
    "0: 75%, 1: 25%",
    "equal_rewards 8 (trained on 24)",
    "sampling 25%, tools and tests 75%",
    "down",
    "25%",
  ):
    assert text in shown, text
  lines = (tmp_path / "fleet.jsonl").read_text().splitlines()
  assert [json.loads(line)["hosts"] for line in lines] == [
    {"host-0": {}},
    {"host-0": host_facts(url)},
  ]
  assert Sight(**json.loads(lines[0])).restarts == {"host-0": 1}


def test_bars():
  assert bars([0.0, 0.5, 1.0, 7.0, -1.0]) == " ▄██ "


def test_small_files_are_whole_or_not_there(tmp_path):
  assert read_json(tmp_path / "a.json") is None
  write_json(tmp_path / "a.json", {"x": 1})
  assert read_json(tmp_path / "a.json") == {"x": 1}
  assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
