"""Outcomes of rollouts by the harness: a transcript's counts, changed files."""

import io
import tarfile
from collections.abc import Mapping

from composer_jax.envs.harness import Transcript
from composer_jax.envs.outcome import Edit, Outcome
from composer_jax.envs.tasks.verify import Verdict

_MAX_BYTES = 1 << 20


def observe(
  transcript: Transcript,
  verdict: Verdict,
  task: str = "",
  edits: Mapping[str, Edit] | None = None,
) -> Outcome:
  """What happened in a rollout.

  The transcript doesn't part thoughts from calls: all sampled tokens before the
  last reply count as those of calls. A call that could not even be read is bad,
  but isn't among its calls, so that beside such ones as many good calls are
  taken for bad.

  Args:
    transcript: of the rollout.
    verdict: of the hidden test on what it left behind.
    task: what the policy was told.
    edits: files that it changed; see `changed`.
  """
  starts = [start for start, _ in transcript.samples]
  sampled = transcript.loss_mask
  # Before the first reply is the prompt, which the policy didn't choose.
  observed = ~sampled[starts[0] :] if starts else sampled[:0]
  final = int(sampled[starts[-1] :].sum()) if starts else 0
  return Outcome(
    task=task,
    final_text=transcript.final_text,
    finished=transcript.stop_reason in ("finish", "answer"),
    tests_passed=verdict.passed,
    tests_total=verdict.total,
    calls_ok=max(transcript.calls - transcript.bad_calls, 0),
    calls_bad=transcript.bad_calls,
    tool_call_tokens=int(sampled.sum()) - final,
    tool_output_tokens=int(observed.sum()),
    final_tokens=final,
    turns=transcript.turns,
    edits=edits or {},
  )


def changed(
  before: bytes, after: bytes, max_bytes: int = _MAX_BYTES
) -> dict[str, Edit]:
  """Path -> what changed between two snapshots of a sandbox.

  Args:
    before: a tar archive, see `Sandbox.snapshot`.
    after: another.
    max_bytes: of a file; larger ones, links and devices are not looked at.

  Raises:
    ValueError: one of them is no tar archive.
  """
  old, new = _files(before, max_bytes), _files(after, max_bytes)
  return {
    path: Edit(old.get(path), new.get(path))
    for path in sorted(old | new)
    if old.get(path) != new.get(path)
  }


def _files(snapshot: bytes, max_bytes: int) -> dict[str, bytes]:
  files = {}
  try:
    with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as archive:
      for entry in archive:
        # Of a sparse file, too, this is the size that reading it would have.
        if entry.isreg() and entry.size <= max_bytes:
          path = entry.name.removeprefix("./")
          files[path] = archive.extractfile(entry).read()
  except tarfile.TarError as error:
    raise ValueError(f"The snapshot is no tar archive: {error}.") from None
  return files
