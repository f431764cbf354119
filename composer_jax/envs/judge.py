"""A language model grades what no test can: style, communication, and the like.

    async with Judge(JudgeConfig("http://localhost:8000/v1", "judge")) as judge:
      reward = await score(outcome, config, judge)

Any endpoint of OpenAI's chat completions will do. The rubric is split into
aspects, each graded by itself. Grades are kept on disk under a hash of all that
the model was shown, so the same work gets the same grades. A judge that can't
be reached or understood gives no grade, which is not a grade of 0. Needs the
extra `rewards`.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from composer_jax.envs.outcome import InfrastructureError, Outcome
from composer_jax.envs.rubric import conversation, read_grades

_MAX_BYTES = 1 << 20
_MAX_WAIT_S = 60.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
  """Which model judges, and how it is asked.

  Attributes:
    base_url: up to "/v1".
    model: its name there. Kept grades are found by it whatever the address, so
      another model needs another name.
    cache: a folder for grades; "" keeps none. Processes may share it.
    key_variable: the environment variable that holds the API key, if any.
    attempts: for one trajectory, at least 1.
    backoff_s: the first wait before trying again, seconds; then twice as long
      each time, up to a minute. A wait that the server asks for is granted, up
      to a minute, too.
    timeout_s: of one attempt, seconds.
    concurrency: requests in flight.
    max_tokens: of an answer.
    work_chars: shown of the work; the middle of longer work is left out.

  Raises:
    ValueError: a field is out of its range.
  """

  base_url: str
  model: str
  cache: str = ""
  key_variable: str = "OPENAI_API_KEY"
  attempts: int = 6
  backoff_s: float = 1.0
  timeout_s: float = 120.0
  concurrency: int = 16
  max_tokens: int = 1024
  work_chars: int = 40_000

  def __post_init__(self):
    if not self.base_url.startswith(("http://", "https://")):
      raise ValueError(
        f"base_url must begin with http:// or https://, got {self.base_url!r}."
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (int, float) and not 0 < value < math.inf:
        raise ValueError(f"{field.name} must be above 0, got {value}.")


class _RetryError(Exception):
  """What may go better next time, and how long the server wants us to wait."""

  def __init__(self, problem: str, wait_s: float = 0.0):
    super().__init__(problem)
    self.wait_s = wait_s


class Judge:
  """Grades by a language model; an asynchronous context manager."""

  def __init__(self, config: JudgeConfig):
    """Opens the cache; the connection opens on entering."""
    self._config = config
    self._url = config.base_url.rstrip("/") + "/chat/completions"
    self._cache = Path(config.cache) if config.cache else None
    if self._cache:
      self._cache.mkdir(parents=True, exist_ok=True)
    self._gate = asyncio.Semaphore(config.concurrency)
    self._session: aiohttp.ClientSession | None = None

  async def __aenter__(self) -> "Judge":
    key = os.environ.get(self._config.key_variable)
    self._session = aiohttp.ClientSession(
      headers={"Authorization": f"Bearer {key}"} if key else {},
      timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
    )
    return self

  async def __aexit__(self, *_) -> None:
    await self._session.close()

  async def grade(
    self, outcome: Outcome, rubric: Mapping[str, str]
  ) -> dict[str, float]:
    """Grades one trajectory.

    Args:
      outcome: of which the judge sees task, edits and last message.
      rubric: aspect -> what to look at.

    Returns:
      Aspect -> a grade from 0 to 1.

    Raises:
      InfrastructureError: the endpoint refuses, or every attempt failed.
      RuntimeError: outside of `async with`.
    """
    if self._session is None:
      raise RuntimeError("Use the judge within `async with`.")
    request = {
      "model": self._config.model,
      "messages": conversation(outcome, rubric, self._config.work_chars),
      "temperature": 0,
      "max_tokens": self._config.max_tokens,
    }
    content = json.dumps(request, sort_keys=True).encode()
    path = None
    if self._cache:
      path = self._cache / f"{hashlib.sha256(content).hexdigest()}.txt"
      if path.exists():
        try:
          return read_grades(path.read_text(encoding="utf-8"), rubric)
        except ValueError as error:
          _log.warning("%s is damaged and is asked for again: %s", path, error)
    answer, grades = await self._ask(request, rubric)
    if path:
      _keep(path, answer)
    return grades

  async def _ask(self, request, rubric):
    attempts = self._config.attempts
    messages = request["messages"]
    for attempt in range(1, attempts + 1):
      try:
        async with self._gate:
          answer = await self._post(request)
        try:
          return answer, read_grades(answer, rubric)
        except ValueError as error:
          # At temperature 0 the same question has the same answer.
          request = request | {
            "messages": [
              *messages,
              {"role": "assistant", "content": answer[:2000]},
              {"role": "user", "content": f"{error} Answer again, with JSON."},
            ]
          }
          raise _RetryError(str(error)) from None
      except _RetryError as error:
        problem, wait_s = str(error), error.wait_s
        _log.info("Attempt %d of %d: %s", attempt, attempts, problem)
      if attempt < attempts:
        longest = min(self._config.backoff_s * 2 ** (attempt - 1), _MAX_WAIT_S)
        # Rollouts that failed together should not come back together.
        await asyncio.sleep(max(wait_s, longest * random.uniform(0.5, 1)))
    raise InfrastructureError(
      "judge",
      f"{self._url} gave no grades in {attempts} attempts; the last: {problem}",
    )

  async def _post(self, request) -> str:
    """The text of one answer."""
    try:
      async with self._session.post(self._url, json=request) as response:
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
          body += chunk
          if len(body) > _MAX_BYTES:
            raise _RetryError(f"the answer is longer than {_MAX_BYTES} bytes")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
      raise _RetryError(f"{type(error).__name__} {error}".rstrip()) from None
    if response.status != 200:
      said = f"status {response.status}: {bytes(body[:300]).decode('latin-1')}"
      if response.status in (408, 425, 429) or response.status >= 500:
        raise _RetryError(said, _wait_s(response.headers))
      raise InfrastructureError("judge", f"{self._url} refused, {said}")
    try:
      answer = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
      answer = None
    if not isinstance(answer, str):
      raise _RetryError(f"no chat completion: {bytes(body[:300])!r}")
    return answer


def _wait_s(headers) -> float:
  """What the server asks for, in seconds; dates are not understood."""
  asked = headers.get("Retry-After", "")
  return min(float(asked), _MAX_WAIT_S) if asked.isdecimal() else 0.0


def _keep(path: Path, answer: str) -> None:
  """Writes a file that is whole whenever it is seen."""
  try:
    with tempfile.NamedTemporaryFile(
      "w", encoding="utf-8", errors="replace", dir=path.parent, delete=False
    ) as file:
      file.write(answer)
    Path(file.name).replace(path)
  except OSError as error:
    _log.warning("Grades could not be kept in %s: %s", path.parent, error)
