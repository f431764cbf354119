"""Outcomes of rollouts: by hand, and from task to reward."""

import asyncio
import dataclasses
import io
import itertools
import subprocess
import tarfile

import numpy as np
import pytest

from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.harness import Transcript
from composer_jax.envs.observe import changed, observe
from composer_jax.envs.outcome import Edit, Outcome
from composer_jax.envs.rewards import RewardConfig, score
from composer_jax.envs.tasks import micro
from composer_jax.envs.tasks.types import start
from composer_jax.envs.tasks.validate import build
from composer_jax.envs.tasks.verify import Verdict, verify


def transcript(**fields):
  mask = np.zeros(50, bool)
  mask[20:30] = mask[40:45] = True
  plain = Transcript(
    token_ids=np.arange(50, dtype=np.int32),
    loss_mask=mask,
    logprobs=np.zeros(50, np.float32),
    versions=np.zeros(50, np.int64),
    samples=((20, None), (40, None)),
    stop_reason="answer",
    turns=2,
    calls=4,
    bad_calls=1,
    final_text="Done.",
    wall_s=1.0,
  )
  return dataclasses.replace(plain, **fields)


def archive(files):
  data = io.BytesIO()
  with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as tar:
    for path, text in files.items():
      entry = tarfile.TarInfo(f"./{path}")
      entry.size = len(text)
      tar.addfile(entry, io.BytesIO(text))
  return data.getvalue()


def test_counts_by_hand():
  edits = {"a": Edit(None, b"x")}
  found = observe(transcript(), Verdict(3, 4), "Do it.", edits)
  # 10 tokens of calls, then 10 of their results; 5 at last, and 5 after them.
  assert found == Outcome(
    task="Do it.",
    final_text="Done.",
    finished=True,
    tests_passed=3,
    tests_total=4,
    calls_ok=3,
    calls_bad=1,
    tool_call_tokens=10,
    tool_output_tokens=15,
    final_tokens=5,
    turns=2,
    edits=edits,
  )
  assert not observe(transcript(stop_reason="turns"), Verdict(0, 1)).finished


def test_a_rollout_that_said_nothing_or_nothing_readable():
  silent = transcript(
    samples=(),
    loss_mask=np.zeros(50, bool),
    stop_reason="tokens",
    turns=0,
    calls=0,
    bad_calls=0,
    final_text="",
  )
  assert observe(silent, Verdict(0, 4, "exited")) == Outcome(tests_total=4)
  garbled = observe(transcript(calls=0, bad_calls=3), Verdict(0, 1))
  assert (garbled.calls_ok, garbled.calls_bad) == (0, 3)


def test_changed_files():
  before = archive({"same": b"1", "gone": b"2", "a/b.py": b"3"})
  after = archive({"same": b"1", "a/b.py": b"4", "new": b"", "big": b"55"})
  assert changed(before, after, max_bytes=1) == {
    "a/b.py": Edit(b"3", b"4"),
    "gone": Edit(b"2", None),
    "new": Edit(None, b""),
  }
  assert changed(before, before) == {}
  with pytest.raises(ValueError, match="no tar archive"):
    changed(before, b"x" * 2000)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_sparse_file_is_not_unpacked(tmp_path, form):
  with (tmp_path / "sparse").open("wb") as file:
    file.truncate(1 << 40)
  command = ["tar", f"--format={form}", "-cSf", "-", "-C", tmp_path, "."]
  data = subprocess.run(command, capture_output=True, check=True).stdout
  assert len(data) < 1 << 16
  assert changed(archive({}), data) == {}


@pytest.mark.sandbox
def test_a_solved_task_is_worth_more_than_an_untouched_one():
  async def test():
    provider = Bubblewrap(LIMITS)
    candidates = itertools.islice(micro.generate(5), 1)
    ((task,), _) = await build(provider, candidates)
    config = RewardConfig({"solved": 1.0, "format": 0.2, "compiles": 0.4})
    snapshots, rewards = [], []
    for solved in (False, True):
      async with await start(provider, task, solved) as sandbox:
        snapshots.append(await sandbox.snapshot())
      verdict = await verify(provider, snapshots[-1], task.probe)
      edits = changed(snapshots[0], snapshots[-1])
      outcome = observe(transcript(), verdict, task.prompt, edits)
      rewards.append((await score(outcome, config)).weighted)
    assert edits == {
      path: Edit(task.files[path].encode(), text.encode())
      for path, text in task.gold.items()
    }
    shared = {"format": pytest.approx(0.15), "compiles": 0.4}
    assert rewards == [shared | {"solved": 0.0}, shared | {"solved": 1.0}]

  asyncio.run(test())
