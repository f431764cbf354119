import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from composer_jax.training import metrics
from composer_jax.training.metrics import MetricWriter, TimeSplit, format_line


def read_lines(folder) -> list[dict]:
  def refuse(constant):
    raise ValueError(f"{constant} is not JSON")

  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line, parse_constant=refuse) for line in lines]


def test_values_of_every_kind_are_written(tmp_path):
  folder = tmp_path / "run" / "logs"
  with MetricWriter(folder, 0) as writer:
    writer.write(1, {"loss": jnp.float32(0.5), "eval/loss": np.float64(2)})
    writer.write(2, {"loss": jnp.bfloat16(1.5), "tokens": 12})
  first, second = read_lines(folder)
  assert first.pop("wall_time") <= second.pop("wall_time")
  assert first == {"step": 1, "loss": 0.5, "eval/loss": 2.0}
  assert second == {"step": 2, "loss": 1.5, "tokens": 12.0}


def test_what_is_not_finite_is_null(tmp_path):
  values = {"a": math.nan, "b": math.inf, "c": jnp.float32(-jnp.inf), "d": 1.0}
  with MetricWriter(tmp_path, 0) as writer:
    writer.write(1, values)
  (line,) = read_lines(tmp_path)
  assert [line[name] for name in "abcd"] == [None, None, None, 1.0]


def test_tensorboard_gets_the_same_scalars(tmp_path):
  with MetricWriter(tmp_path, 0) as writer:
    writer.write(7, {"loss": 0.25, "bad": math.nan})
  (path,) = tmp_path.glob("events.out.tfevents.*")
  scalars = []
  with path.open("rb") as file:
    while header := file.read(12):
      event = event_pb2.Event()
      event.ParseFromString(file.read(int.from_bytes(header[:8], "little")))
      file.read(4)
      scalars += [
        (event.step, value.tag, value.simple_value)
        for value in event.summary.value
      ]
  assert scalars == [(7, "loss", 0.25)]


def test_a_resumed_run_has_each_step_once(tmp_path):
  with MetricWriter(tmp_path, 0) as writer:
    for step in (1, 2, 3, 4):
      writer.write(step, {"run": 1})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 5, "los')  # Killed while writing.
  with MetricWriter(tmp_path, 0, resumed_step=2) as writer:
    writer.write(3, {"run": 2})
  lines = [(line["step"], line["run"]) for line in read_lines(tmp_path)]
  assert lines == [(1, 1), (2, 1), (3, 2)]
  # A run that starts anew has none of the old lines.
  MetricWriter(tmp_path, 0).close()
  assert read_lines(tmp_path) == []


def test_other_processes_write_nothing(tmp_path):
  with MetricWriter(tmp_path / "logs", 1) as writer:
    writer.write(1, {"loss": 1.0})
  assert list(tmp_path.iterdir()) == []


def test_time_split_adds_up_and_starts_again():
  times = iter([0.0, 1.0, 3.0, 4.0, 5.0, 5.0, 6.0, 10.0, 12.0])
  split = TimeSplit(clock=lambda: next(times))  # Starts at 0.
  with split.phase("data"):  # From 1 to 3,
    pass
  with split.phase("step"):  # from 4 to 5,
    pass
  with pytest.raises(RuntimeError), split.phase("data"):  # from 5 to 6.
    raise RuntimeError
  period, fractions = split.pop()  # At 10.
  assert period == 10
  assert fractions == pytest.approx({"data": 0.3, "step": 0.1, "other": 0.6})
  assert split.pop() == (2.0, {"other": 1.0})


def test_bits_per_byte():
  # A byte guessed among 256 costs 8 bits.
  assert metrics.bits_per_byte(3 * math.log(256), 3) == pytest.approx(8)


def test_format_line():
  line = format_line(
    40,
    1000,
    {
      "loss": jnp.float32(2.34567),
      "bits_per_byte": 0.81234,
      "tokens_per_second": 12345.6,
      "mfu": 0.4321,
      "learning_rate": 3e-4,
      "grad_norm": 0.5,
      "imbalance": 1.5,
      "time/data": 0.02,
      "time/step": 0.98,
      "seconds_per_step": 12.5,
      "not shown": 1.0,
    },
  )
  assert line == (
    "step   40/1000 | loss 2.3457 | 0.8123 bits/byte | 12.3k tokens/s"
    " | MFU 43.2% | lr 3.00e-04 | grad   0.5 | imbalance 1.50"
    " | time: data 2% step 98% | left 3h20m"
  )


def test_lines_of_a_run_are_aligned():
  def line(step, rate, norm):
    values = {"loss": 1.0, "tokens_per_second": rate, "grad_norm": norm}
    return format_line(step, 100, values)

  assert len(line(1, 987.0, 0.123)) == len(line(100, 1.25e6, 12.0))
  assert format_line(1, 2, {"loss": math.nan}) == "step 1/2 | loss nan"


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0.4, "0s"),
    (59.7, "1m00s"),
    (187, "3m07s"),
    (18120, "5h02m"),
    (183600, "2d03h"),
    (math.inf, "?"),
  ],
)
def test_time_left(seconds, text):
  line = format_line(1, 2, {"seconds_per_step": seconds})
  assert line.endswith(f"left {text}")


@pytest.mark.parametrize(
  ("kind", "teraflops"),
  [
    ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H200", 989),
    ("NVIDIA GH200 480GB", 989),
    ("NVIDIA H100 PCIe", 756),
    ("NVIDIA B200", 2250),
    ("NVIDIA GB200", 2500),
    ("NVIDIA B300 SXM6 AC", 2250),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362),
    ("NVIDIA GeForce RTX 4090", 165),
    ("TPU v5 lite", 197),
    ("TPU v5p", 459),
    ("TPU v5", 459),
    ("TPU v6 lite", 918),
  ],
)
def test_peak_of_known_devices(kind, teraflops):
  device = mock.Mock(spec=jax.Device, device_kind=kind)
  assert metrics.peak_flops(device) == teraflops * 1e12


def test_peak_of_a_cpu_is_measured_once():
  device = jax.devices("cpu")[0]
  peak = metrics.peak_flops(device)
  assert 1e8 < peak < 1e14
  assert metrics.peak_flops(device) == peak
