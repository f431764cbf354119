"""How providers start a process that has an agent in it."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from composer_jax.envs.sandbox import Limits, Sandbox, SandboxError

# A user that owns nothing, for whatever root starts.
UNPRIVILEGED = 64_999


async def start(
  argv: Sequence[str],
  limits: Limits,
  snapshot: bytes,
  *,
  setup: Mapping | None = None,
  payload: bytes = b"",
  fds: Sequence[int] = (),
  env: Mapping[str, str] | None = None,
  groups: Sequence[int] = (),
) -> Sandbox:
  """Starts a sandbox and fills it; one that is cancelled leaves nothing.

  Args:
    argv: what to run; its input and output are the agent's.
    limits: of the sandbox.
    snapshot: what to unpack, if anything.
    setup: the agent's first request, if it doesn't begin by itself.
    payload: the bytes that go with it.
    fds: open files that it inherits.
    env: its environment.
    groups: of the unprivileged user, where root starts it.

  Raises:
    SandboxError: it could not be started.
    FileError: the snapshot can't be unpacked.
  """

  async def begin():
    try:
      process = await asyncio.create_subprocess_exec(
        *as_nobody(argv, groups),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=fds,
        cwd="/",
        env=env or {},
      )
    except OSError as error:
      raise SandboxError(f"{argv[0]} could not be started: {error}.") from error
    sandbox = Sandbox(process, limits)
    try:
      await sandbox.ready(setup, payload)
    except SandboxError:
      await sandbox.destroy()
      raise
    return sandbox

  starting = asyncio.create_task(begin())
  try:
    # A bwrap that is killed while it starts leaves its child behind.
    sandbox = await asyncio.shield(starting)
  except asyncio.CancelledError:
    await (await starting).destroy()
    raise
  try:
    if snapshot:
      await sandbox.restore(snapshot)
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


def as_nobody(argv: Sequence[str], groups: Sequence[int] = ()) -> list[str]:
  """A command that root runs as a user who owns nothing.

  `subprocess.Popen(user=...)` would do it, but forks, which takes tens of
  milliseconds in a process of a gigabyte; without `user` it doesn't.
  """
  if os.geteuid() != 0:
    return list(argv)
  rest = (
    [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
  )
  user = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}"]
  return ["setpriv", *user, *rest, *argv]
