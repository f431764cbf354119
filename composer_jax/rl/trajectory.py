"""What a rollout leaves for the learner: trajectories, and groups of them.

Everything is aligned token for token with `token_ids`, which are the ids that
the sampler saw and gave: nothing was tokenised again. On disk a group is one
`.npz` file: arrays, and a JSON text for the rest; nothing is pickled.
"""

import dataclasses
import itertools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt

_FORMAT = 1
_DTYPES = {
  "token_ids": np.dtype(np.int32),
  "loss_mask": np.dtype(np.bool),
  "logprobs": np.dtype(np.float32),
  "versions": np.dtype(np.int32),
}
# What NumPy and the code below raise over files that are something else.
_DAMAGE = (
  *(KeyError, TypeError, AttributeError, ValueError),
  *(EOFError, NotImplementedError, RuntimeError),
)
# Rounding may lift the log of a probability of 1 above 0.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The distribution that tokens were drawn from.

  What the three do, and in which order: `composer_jax.serving.SamplingParams`.

  Attributes:
    temperature: 0 takes the likeliest token: for evaluation, not for learning.
    top_p: 1 keeps all.
    top_k: 0 keeps all.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0

  def __post_init__(self):
    for name, valid, rule in (
      ("temperature", 0 <= self.temperature < math.inf, "finite, 0 or more"),
      ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
      ("top_k", self.top_k >= 0, "0 (all) or more"),
    ):
      if not valid:
        raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
  """One rollout, in N tokens; its arrays can't be written to.

  Attributes:
    token_ids: prompt, replies and observations, as sampler and harness had
      them.
    loss_mask: True for exactly the sampled tokens.
    logprobs: of each sampled token, in nats, in the distribution sampled from;
      0 elsewhere.
    versions: of the weights that sampled each token; -1 elsewhere.
    routes: row i holds the experts of the sampler's pass over token i, which
      gave the logits of token i + 1; 0 where `routed` is False. None if they
      were not recorded.
    sampling: the distribution.
    segments: where each context window starts, rising from 0. A window is a
      sequence of its own: its first token attends to nothing before it.
    rewards: the reward's parts by name; they add up to `reward`.
    task_id: the task.
    stop_reason: why the rollout ended; see `composer_jax.envs.harness`.

  Raises:
    ValueError: the fields don't fit together; says how.
  """

  token_ids: Int32[np.ndarray, " N"]
  loss_mask: Bool[np.ndarray, " N"]
  logprobs: Float32[np.ndarray, " N"]
  versions: Int32[np.ndarray, " N"]
  routes: UInt[np.ndarray, "N L K"] | None
  sampling: Sampling
  rewards: Mapping[str, float]
  task_id: str
  stop_reason: str
  segments: tuple[int, ...] = (0,)

  def __post_init__(self):
    for name, dtype in _DTYPES.items():
      self._freeze(name, _is_array(getattr(self, name), dtype), str(dtype))
    if self.routes is not None:
      unsigned = getattr(self.routes, "dtype", np.dtype(int)).kind == "u"
      self._freeze("routes", unsigned and self.routes.ndim == 3, "unsigned, 3D")
    sampled, starts = self.loss_mask, self.segments
    _require(len(self) > 0, "A trajectory needs at least one token.")
    _require((self.token_ids >= 0).all(), "token_ids must not be below 0.")
    _require(
      ((self.versions >= 0) == sampled).all()
      and (self.versions[~sampled] == -1).all(),
      "versions must be 0 or more where loss_mask is True, and -1 elsewhere.",
    )
    _require(
      np.isfinite(self.logprobs).all()
      and (self.logprobs <= _ROUNDING).all()
      and (self.logprobs[~sampled] == 0).all(),
      "logprobs must be finite and at most 0, and 0 where loss_mask is False.",
    )
    _require(
      bool(starts)
      and starts[0] == 0
      and all(start < stop for start, stop in self.windows),
      f"segments={starts} must rise from 0 and stay below {len(self)} tokens.",
    )
    _require(
      all(math.isfinite(part) for part in self.rewards.values()),
      f"rewards={dict(self.rewards)} must be finite: a rollout that could not"
      " be scored is no trajectory.",
    )

  def __len__(self) -> int:
    return len(self.token_ids)

  @property
  def reward(self) -> float:
    """The sum of the parts."""
    return math.fsum(self.rewards.values())

  @property
  def routed(self) -> Bool[np.ndarray, " N"]:
    """Tokens whose pass was made: all before the last sampled of a window."""
    routed = np.zeros(len(self), bool)
    for start, stop in self.windows:
      sampled = np.flatnonzero(self.loss_mask[start:stop])
      routed[start : start + (sampled[-1] if sampled.size else 0)] = True
    return routed

  @property
  def windows(self) -> list[tuple[int, int]]:
    """Start and end of each context window."""
    return list(itertools.pairwise((*self.segments, len(self))))

  def _freeze(self, name, valid, kind):
    array = getattr(self, name)
    if not valid:
      shape = getattr(array, "shape", None)
      raise ValueError(
        f"{name} must be a NumPy array ({kind}), but is {type(array).__name__}"
        + (f" {array.dtype}{list(shape)}." if shape is not None else ".")
      )
    if len(array) != len(self.token_ids):
      raise ValueError(
        f"{name} has {len(array)} rows for {len(self.token_ids)} tokens."
      )
    view = array.view()
    view.flags.writeable = False
    object.__setattr__(self, name, view)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """The trajectories of one task.

  Attributes:
    task_id: the task.
    trajectories: of rollouts that ended; none, if all failed.
    failures: rollouts that the machinery failed, counted by what failed. They
      say nothing about the policy and have no reward.

  Raises:
    ValueError: a trajectory is of another task.
  """

  task_id: str
  trajectories: tuple[Trajectory, ...]
  failures: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for trajectory in self.trajectories:
      _require(
        trajectory.task_id == self.task_id,
        f"A trajectory of task {trajectory.task_id!r} is in the group of"
        f" {self.task_id!r}.",
      )

  def save(self, path: str | Path) -> None:
    """Writes a file; whoever reads it meanwhile finds the old one or all."""
    about = {
      "format": _FORMAT,
      "task_id": self.task_id,
      "failures": dict(self.failures),
      "trajectories": [_about(t) for t in self.trajectories],
    }
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for i, trajectory in enumerate(self.trajectories):
      for name in (*_DTYPES, "routes"):
        array = getattr(trajectory, name)
        if array is not None:
          arrays[f"{i}.{name}"] = array
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
      with scratch.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
      scratch.replace(path)
    finally:
      scratch.unlink(missing_ok=True)

  @classmethod
  def load(cls, path: str | Path) -> "Group":
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, or something else.
    """
    try:
      with (
        Path(path).open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
      ):
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != _FORMAT:
          raise ValueError(f"its format is {about['format']}, not {_FORMAT}")
        return cls(
          task_id=about["task_id"],
          trajectories=tuple(
            _trajectory(one, arrays, i)
            for i, one in enumerate(about["trajectories"])
          ),
          failures=about["failures"],
        )
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
      raise ValueError(
        f"{path} holds no group of trajectories: {error}."
      ) from error


def _about(trajectory: Trajectory) -> dict[str, Any]:
  return {
    "sampling": dataclasses.asdict(trajectory.sampling),
    "rewards": dict(trajectory.rewards),
    "task_id": trajectory.task_id,
    "stop_reason": trajectory.stop_reason,
    "segments": trajectory.segments,
    "has_routes": trajectory.routes is not None,
  }


def _trajectory(about, arrays, i) -> Trajectory:
  about = dict(about)
  has_routes = about.pop("has_routes")
  return Trajectory(
    **{name: arrays[f"{i}.{name}"] for name in _DTYPES},
    routes=arrays[f"{i}.routes"] if has_routes else None,
    sampling=Sampling(**about.pop("sampling")),
    segments=tuple(about.pop("segments")),
    **about,
  )


def _is_array(array, dtype):
  return (
    isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
  )


def _require(condition, message):
  if not condition:
    raise ValueError(message)
