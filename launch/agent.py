"""A coding agent in a terminal, at work in a folder of your own.

    python launch/agent.py --server=http://localhost:8000
    python launch/agent.py --task="Make the tests pass." --test="pytest -q"
    python launch/agent.py --sandbox --folder=project

It asks before it writes or runs anything, and before it reads outside of the
folder: y, n, a (always, for that tool), or a sentence that says what to do
instead, which the model is told. `--yes` asks nothing. Nothing else confines
it: what you allow runs as you (see `composer_jax/envs/local.py`). With
`--sandbox` it works on a copy, without a network, asks nothing, and shows what
it changed in the end. Ctrl-C ends it, and what it runs, at once.

The server is `launch/serve.py`. Harness, tools, prompts and transcripts are
those that the policy was trained with: rollouts are clones of this program.
Each task is a conversation of its own. `--save` keeps transcripts for
`python -m composer_jax.rl.viewer`.
"""

import argparse
import asyncio
import dataclasses
import io
import json
import secrets
import shlex
import signal
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.data import Tokenizer
from composer_jax.envs import harness
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.local import LocalFolder
from composer_jax.envs.observe import changed
from composer_jax.envs.outcome import Edit
from composer_jax.envs.sandbox import FileError, Limits, Sandbox, SandboxError
from composer_jax.envs.tools import Approve, Toolbox
from composer_jax.rl.endpoints import HttpEndpoint, ServerError
from composer_jax.rl.rollout import to_trajectory
from composer_jax.rl.sessions import Pool
from composer_jax.rl.trajectory import Group, Sampling
from composer_jax.serving import RequestError
from composer_jax.serving.chat import HermesFormat
from composer_jax.serving.dialect import ChatDialect
from launch.flags import ConfigError, one_line_errors

try:
  import aiohttp

  from launch.agent_terminal import Approval, InterruptedWorkError, Terminal
except ModuleNotFoundError as error:
  raise ImportError(
    f"{error.name} is missing: pip install 'composer-jax[serve]'"
  ) from error

# People's tests take longer than a task's, and their folders hold more.
_LIMITS = Limits(
  wall_s=300.0,
  memory_bytes=4 << 30,
  processes=256,
  disk_bytes=512 << 20,
  file_bytes=128 << 20,
  files=200_000,
)
# What another kind of server's answer leads to.
_NO_SUCH = (LookupError, TypeError)
# A person may think for as long as they like.
_WALL_S = 7 * 86_400.0


def main(argv: Sequence[str], terminal: Terminal | None = None) -> int:
  """Runs the agent.

  Args:
    argv: without the program's name.
    terminal: where to show and to ask.

  Returns:
    The exit code, 0.

  Raises:
    SystemExit: for errors, told in one line on stderr; with code 130 if the
      person interrupts it; for --help.
  """
  args = _parser().parse_args(argv)
  terminal = terminal or Terminal()
  mistakes = one_line_errors(ConfigError, ValueError, OSError, FileError)
  failures = one_line_errors(ServerError, SandboxError, RequestError, code=1)
  with mistakes, failures:
    try:
      asyncio.run(_work(args, terminal))
    except (KeyboardInterrupt, asyncio.CancelledError, InterruptedWorkError):
      terminal.say("Interrupted.")
      raise SystemExit(130) from None
  return 0


async def _work(args: argparse.Namespace, terminal: Terminal) -> None:
  loop, this = asyncio.get_running_loop(), asyncio.current_task()
  for number in (signal.SIGTERM, signal.SIGHUP):
    # So that what runs ends with it, as after Ctrl-C.
    loop.add_signal_handler(number, this.cancel)
  folder = LocalFolder(args.folder, _LIMITS)
  sampling = Sampling(args.temperature)
  # No connection that grows old while a person thinks.
  connector = aiohttp.TCPConnector(force_close=True)
  async with aiohttp.ClientSession(connector=connector) as client:
    server = await _connect(client, args.server, args.tokenizer)
    pool = Pool([server.endpoint])
    budget = harness.Budget(
      turns=args.turns,
      tokens=min(harness.Budget.tokens, server.max_len),
      wall_s=_WALL_S,
    )
    terminal.say(f"{server.model} at {args.server}, in {folder.folder}")
    for number in range(1 if args.task else sys.maxsize):
      task = args.task or terminal.question("What is to be done? ")
      if not task:
        break
      seed = secrets.randbits(32) if args.seed is None else args.seed
      with pool.session(sampling, (seed, number)) as sampler:
        session = Session(
          _waiting(sampler, terminal),
          server.dialect,
          terminal,
          shlex.split(args.test),
          budget,
        )
        if args.sandbox:
          transcript = await _in_sandbox(session, folder, task, args.yes)
        else:
          approval = Approval(terminal, folder, yes=args.yes)
          transcript = await session.run(folder, task, approval)
      terminal.say(_summary(transcript), "bold")
      if args.save:
        _save(transcript, sampling, Path(args.save))


@dataclasses.dataclass(frozen=True)
class Session:
  """How tasks are worked on: the harness that a policy is trained in.

  Attributes:
    sampler: the policy.
    dialect: how it is spoken to.
    terminal: shows what happens.
    test_command: of `run_tests`; empty: there is no such tool.
    budget: of a task.
  """

  sampler: harness.Sampler
  dialect: harness.Dialect
  terminal: Terminal
  test_command: Sequence[str]
  budget: harness.Budget

  async def run(
    self, sandbox: Sandbox, task: str, approve: Approve | None = None
  ) -> harness.Transcript:
    """Works on a task; see `harness.run`."""
    return await harness.run(
      self.sampler,
      self.dialect,
      sandbox,
      Toolbox(self.test_command, approve),
      task,
      self.budget,
      self.terminal.watch,
    )


@dataclasses.dataclass(frozen=True)
class _Server:
  model: str
  max_len: int
  endpoint: HttpEndpoint
  dialect: ChatDialect


async def _connect(client: Any, url: str, tokenizer: str | None) -> _Server:
  """Asks a server what it serves, and how it speaks."""
  timeout = aiohttp.ClientTimeout(total=60.0)

  async def get(path):
    answer = client.get(url.rstrip("/") + path, timeout=timeout)
    async with answer as response:
      response.raise_for_status()
      return await response.text()

  try:
    (model,) = json.loads(await get("/v1/models"))["data"]
    name, max_len = model["id"], model["max_model_len"]
    text = None if tokenizer else await get("/tokenizer.json")
  except (aiohttp.ClientError, OSError, ValueError, *_NO_SUCH) as error:
    raise ConfigError(
      f"no server of this project answers at {url} ({error!r}): start"
      " launch/serve.py, or give its address as --server"
    ) from error
  spoken = Tokenizer.load(tokenizer) if text is None else Tokenizer(text)
  chat = HermesFormat(spoken)
  return _Server(
    name,
    max_len,
    HttpEndpoint(client, url, name, chat),
    ChatDialect(chat, spoken.spellings),
  )


def _waiting(sampler: harness.Sampler, terminal: Terminal) -> harness.Sampler:
  """The same, with a sign that something goes on."""

  async def sample(prompt, max_tokens):
    with terminal.console.status(f"{len(prompt)} tokens"):
      return await sampler(prompt, max_tokens)

  return sample


# ---- On a copy ---------------------------------------------------------------


async def _in_sandbox(
  session: Session, folder: LocalFolder, task: str, yes: bool
) -> harness.Transcript:
  """Works on a copy of the folder; what changed there is shown, then asked."""
  terminal = session.terminal
  before = await folder.snapshot()
  async with await Bubblewrap(_LIMITS).create(before) as sandbox:
    transcript = await session.run(sandbox, task)
    after = await sandbox.snapshot()
  edits = changed(before, after, _LIMITS.file_bytes)
  terminal.edits(edits)
  if not edits:
    terminal.say("No file was changed.")
  elif yes or terminal.agreed(f"Write this to {folder.folder}?"):
    await apply(edits, after, folder, terminal)
  return transcript


async def apply(
  edits: Mapping[str, Edit],
  snapshot: bytes,
  folder: LocalFolder,
  terminal: Terminal,
) -> None:
  """Does to a folder what was done to its copy.

  Files that aren't as they were copied are left alone, and so is what a link
  leads out of the folder.

  Args:
    edits: what was done.
    snapshot: of the copy afterwards, which has new files' modes.
    folder: the original.
    terminal: is told what is left alone, and why.
  """
  with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as archive:
    modes = {entry.name: entry.mode for entry in archive}
  for path, edit in edits.items():
    place = folder.place(path)
    try:
      if not place.is_relative_to(folder.folder):
        raise FileError("it leads out of the folder")
      if (place.read_bytes() if place.is_file() else None) != edit.before:
        raise FileError("it was changed meanwhile")
      if edit.after is None:
        place.unlink()
      else:
        mode = modes[f"./{path}"] & 0o777
        await folder.write(path, edit.after, mode)
    except (FileError, OSError) as error:
      terminal.say(f"{path} is left alone: {error}", "bold yellow")


# ---- Afterwards --------------------------------------------------------------


def _summary(transcript: harness.Transcript) -> str:
  sampled = int(transcript.loss_mask.sum())
  return (
    f"Ended by {transcript.stop_reason}: {transcript.turns} turns,"
    f" {transcript.calls} calls, {transcript.bad_calls} refused or bad,"
    f" {sampled} of {len(transcript.token_ids)} tokens sampled,"
    f" {transcript.wall_s:.0f} s."
  )


def _save(
  transcript: harness.Transcript, sampling: Sampling, folder: Path
) -> None:
  """Keeps a transcript as rollouts are kept; it has no reward."""
  folder.mkdir(parents=True, exist_ok=True)
  task_id = f"agent-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
  trajectory = to_trajectory(transcript, sampling, {}, task_id)
  Group(task_id, (trajectory,)).save(folder / f"{task_id}.npz")


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="launch/agent.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--server", default="http://localhost:8000", help="its address")
  add("--folder", default=".", help="where to work; by default here")
  add("--task", default="", help="what to do; by default it is asked for")
  add("--test", default="", help="a command that the model may run as tests")
  add("--yes", action="store_true", help="ask nothing, allow everything")
  add("--sandbox", action="store_true", help="work on a copy, in a sandbox")
  add("--save", metavar="FOLDER", help="keep transcripts there")
  add("--tokenizer", help="a tokenizer.json; by default the server's")
  add("--turns", type=int, default=harness.Budget.turns, help="replies at most")
  add("--temperature", type=float, default=1.0, help="of sampling")
  add("--seed", type=int, help="of sampling; by default any")
  return parser


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
