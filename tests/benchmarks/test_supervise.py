"""A benchmark's worker may crash or hang; the other jobs are still measured."""

import json
import pathlib
import sys

from benchmarks import moe_stages, supervise

WORKER = [sys.executable, str(pathlib.Path(__file__).with_name("worker.py"))]


def run(*does, seconds=60.0, job_seconds=2.0, monkeypatch):
  monkeypatch.setattr(supervise, "START_SECONDS", 10)
  rows, jobs = [], [{"does": d} for d in does]
  left = supervise.run(
    WORKER, jobs, rows.append, seconds=seconds, job_seconds=job_seconds
  )
  return rows, left


def test_goes_on_after_errors_and_crashes(monkeypatch):
  rows, left = run("run", "fail", "crash", "run", monkeypatch=monkeypatch)
  assert not left
  does = [row["does"] for row in rows]
  assert does == ["run", "run", "fail", "crash", "run", "run"]
  assert [row.get("ms") for row in rows] == [1.5, 2.5, None, None, 1.5, 2.5]
  assert "ValueError: no | such | tiles [worker.py:" in rows[2]["error"]
  assert "died (7): illegal address" in rows[3]["error"]


def test_gives_up_a_job_that_hangs(monkeypatch):
  rows, left = run("run", "hang", "run", job_seconds=1, monkeypatch=monkeypatch)
  assert not left
  assert [row["does"] for row in rows] == ["run"] * 2 + ["hang"] + ["run"] * 2
  assert "nothing for 1 s" in rows[2]["error"]


def test_stops_when_time_is_up(monkeypatch):
  rows, left = run(
    "run", "hang", "run", seconds=2, job_seconds=50, monkeypatch=monkeypatch
  )
  assert [row["does"] for row in rows] == ["run"] * 2
  assert left == [{"does": "hang"}, {"does": "run"}]


def test_rows_are_aligned_or_json(capsys, tmp_path):
  path = tmp_path / "rows"
  columns = {"stage": 6, "tiles": 8, "ms": 5}
  row = {"stage": "down", "tiles": {"columns": 64, "band": 4}, "ms": 1.234567}
  supervise.Table(columns, as_json=False, path=str(path)).show(row)
  lines = capsys.readouterr().out.splitlines()
  assert lines == ["stage   tiles     ms", "down    c64 b4    1.23"]
  supervise.Table(columns, as_json=True).show(row)
  out = capsys.readouterr().out
  assert json.loads(out) == json.loads(path.read_text()) == row


def test_the_table_of_tiles_takes_what_is_faster_and_right():
  def row(ms, tiles, error=1e-3, key="matmul_1x2_r128", bitwise=True):
    return {
      "ms": ms, "tiles": tiles, "relative_error": error, "bitwise": bitwise,
      "key": key, "chip": "H200", "chosen": {"columns": 256, "band": 4},
    }  # fmt: skip

  rows = [row(2.0, {}), row(1.0, {"band": 4})]
  assert moe_stages.best_tiles(rows, {}) == {
    "H200": {"matmul_1x2_r128": {"columns": 256, "band": 4}}
  }
  for wrong in ({"error": float("nan")}, {"bitwise": False}, {"key": ""}):
    rows = [row(2.0, {}), row(1.0, {"band": 4}, **wrong)]
    assert not any(moe_stages.best_tiles(rows, {}).values())
  key = "swiglu_gradient_1x2_r128"
  rows = [row(2.0, {}, key=key), row(1.0, {"columns": 64}, key=key)]
  assert not any(moe_stages.best_tiles(rows, {}).values())
  rows = [row(2.0, {}), row(1.99, {"band": 4}), {"error": "crash"}]
  assert not any(moe_stages.best_tiles(rows, {}).values())


def test_combinations_begin_with_the_rule():
  found = moe_stages.combinations("columns=256,128 band=4")
  assert found == [
    {}, {"columns": 256, "band": 4}, {"columns": 128, "band": 4}
  ]  # fmt: skip
  assert moe_stages.combinations("") == [{}]
  found = moe_stages.combinations("band=4 movers=8,16")
  assert moe_stages.of_stage("down", found) == [{}, {"band": 4}]
  assert moe_stages.of_stage("gather+gate_up", found) == found
  assert moe_stages.of_stage("combine", found) == [{}]
