"""Runs hidden tests on what a policy left behind.

Always in a fresh sandbox that gets the repository alone: no process, no file
outside `/work` and no changed tool of the policy's is there. The sandbox runs
the lines and says what they gave; only the host compares.
"""

import dataclasses
import json
import secrets

from composer_jax.envs.sandbox import Provider, Sandbox
from composer_jax.envs.tasks.types import Probe

_RUNNER = r"""
import contextlib, importlib, io, json, os, signal, sys
def late(*_): raise TimeoutError()
signal.signal(signal.SIGALRM, late)
request = json.load(sys.stdin)
for name in {entry.split(".")[0] for entry in os.listdir("/work")}:
  for module in [m for m in sys.modules if m.split(".")[0] == name]:
    del sys.modules[module]
sys.path.insert(0, "/work")
answers = []
def run(line, names):
  printed = io.StringIO()
  signal.setitimer(signal.ITIMER_REAL, request["line_s"])
  try:
    with contextlib.redirect_stdout(printed):
      try: code = compile(line, "<line>", "eval")
      except SyntaxError: exec(line, names); answer = "="
      else: answer = "= " + repr(eval(code, names))
  except BaseException as error: answer = "! " + type(error).__name__
  finally: signal.setitimer(signal.ITIMER_REAL, 0)
  return printed.getvalue() + answer
names = {}
problem = None
if request["module"]:
  first = run("module = __import__('importlib').import_module(%r)"
              % request["module"], names)
  if first == "=": names = dict(vars(names["module"]))
  else: problem = first
for line in request["lines"]: answers.append(problem or run(line, names)[:4000])
os.write(1, ("\n" + request["mark"] + json.dumps(answers)).encode())
os._exit(0)
"""
_LINE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Verdict:
  """How a repository did.

  Attributes:
    passed: lines that gave the right answer.
    total: lines.
    detail: why there were no answers at all, or "".
  """

  passed: int
  total: int
  detail: str = ""

  @property
  def ok(self) -> bool:
    """Whether every line gave the right answer."""
    return self.passed == self.total


async def answers(sandbox: Sandbox, probe: Probe) -> list[str] | str:
  """What each line gives in a sandbox; or, if none did, why.

  Raises:
    SandboxError: the sandbox failed.
  """
  mark = secrets.token_hex(16)
  request = {
    "module": probe.module,
    "lines": probe.lines,
    "mark": mark,
    "line_s": _LINE_S,
  }
  result = await sandbox.exec(
    ["python", "-I", "-c", _RUNNER],
    stdin=json.dumps(request).encode(),
    cwd="/tmp",
    output_bytes=1 << 20,
  )
  _, found, said = result.text.rpartition(mark)
  try:
    given = json.loads(said) if found else None
  except ValueError:
    given = None
  if not isinstance(given, list) or len(given) != len(probe.lines):
    return (
      f"{result.reason}, exit code {result.exit_code}: {result.text[-300:]}"
    )
  return given


async def verify(provider: Provider, snapshot: bytes, probe: Probe) -> Verdict:
  """Runs a hidden test on a snapshot of a repository.

  Raises:
    FileError: the snapshot can't be unpacked.
    SandboxError: the sandbox failed; nothing is known about the repository.
  """
  async with await provider.create(snapshot) as sandbox:
    given = await answers(sandbox, probe)
  total = len(probe.answers)
  if isinstance(given, str):
    return Verdict(0, total, given)
  right = zip(given, probe.answers, strict=True)
  return Verdict(sum(a == b for a, b in right), total)
