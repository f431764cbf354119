"""The product: what it does, what it asks, and that rollouts are its clones."""

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from composer_jax.envs import harness
from composer_jax.envs.attacks import LIMITS
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.local import LocalFolder
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.rollout import Rollouts
from composer_jax.rl.trajectory import Group
from launch import agent
from launch.agent_terminal import Approval, Terminal
from tests.rl.rollout_rig import DIALECT, FakeServer, call, pool_of

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {"f.py": "def f(x):\n  return x - 1\n", "sub/notes.txt": "nothing\n"}
TASK = "f must add one."
TEST = ("sh", "-c", "grep -n 'x + 1' f.py")
REPLIES = (
  "I look. " + call("list_files") + call("read_file", path="f.py"),
  call("search", pattern="return", path="f.py") + call("run_tests"),
  call("read_file", path="none.py") + call("read_file", path="sub"),
  call("read_file", path="../none") + call("read_file", path="f.py/x"),
  call("edit_file", path="f.py", old="x * 1", new="x + 1"),
  call("write_file", path="sub", content="?") + call("no_such_tool"),
  "<tool_call>{'oops'}</tool_call>",
  call("edit_file", path="f.py", old="x - 1", new="x + 1") + call("run_tests"),
  call("run_command", command="seq 3000; echo no >&2; exit 3"),
  call("write_file", path="new/g.py", content="y = '\u00e9'\n"),
  call("read_file", path="new/g.py") + call("list_files", path="new"),
  call("finish", message="Done."),
)


@contextlib.contextmanager
def in_a_thread(server):
  """Runs a fake server beside a program that has its own event loop."""
  loop, started = asyncio.new_event_loop(), threading.Event()
  ended = asyncio.Event()

  async def serve():
    async with server.running():
      started.set()
      await ended.wait()

  thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
  thread.start()
  try:
    assert started.wait(20)
    yield server
  finally:
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


class Person(Terminal):
  """Answers what they are asked, in order, and sees all that is shown."""

  def __init__(self, *answers):
    self.asked, self._answers = [], list(answers)
    self._paper = io.StringIO()
    console = Console(file=self._paper, width=80, highlight=False)
    super().__init__(console, self._answer)

  def _answer(self, question):
    self.asked.append(question)
    answer = self._answers.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return answer

  @property
  def saw(self):
    return self._paper.getvalue()


def fill(folder, files=None):
  for path, text in (FILES if files is None else files).items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
  return folder


def work(folder, person, *flags, replies=REPLIES, task=TASK):
  """One run of the product."""
  with in_a_thread(FakeServer(replies=replies)) as server:
    flags = [f"--server={server.url}", f"--folder={folder}", *flags]
    if task:
      flags.append(f"--task={task}")
    assert agent.main(flags, person) == 0
  return server


def trajectory_of(folder):
  (path,) = folder.iterdir()
  (trajectory,) = Group.load(path).trajectories
  return trajectory


def rollout():
  """The same task as training does it."""

  async def play(sampler):
    async with await Bubblewrap(LIMITS).create() as sandbox:
      for path, text in FILES.items():
        await sandbox.write(path, text.encode())
      transcript = await harness.run(
        sampler, DIALECT, sandbox, Toolbox(TEST), TASK
      )
      return transcript, {}

  async def body():
    async with pool_of(FakeServer(replies=REPLIES)) as pool:
      return await Rollouts(pool).rollout("task", play, (1,))

  return asyncio.run(body())


@pytest.mark.sandbox
@pytest.mark.parametrize("where", ["folder", "sandbox"])
def test_product_and_rollout_make_the_same_transcript(tmp_path, where):
  folder = fill(tmp_path / "project")
  person = Person(*["y"] * 8)
  test = "--test=sh -c \"grep -n 'x + 1' f.py\""
  flags = ["--sandbox"] if where == "sandbox" else []
  work(folder, person, test, f"--save={tmp_path / 'kept'}", *flags)
  product, training = trajectory_of(tmp_path / "kept"), rollout()
  for name in ("token_ids", "loss_mask", "logprobs", "versions", "routes"):
    np.testing.assert_array_equal(
      getattr(product, name), getattr(training, name), name
    )
  assert product.stop_reason == training.stop_reason == "finish"
  assert product.sampling == training.sampling
  assert (folder / "f.py").read_text() == "def f(x):\n  return x + 1\n"
  assert (folder / "new/g.py").read_text() == "y = '\u00e9'\n"
  # A file outside, tests twice, two edits (of which one fails), a command, two
  # files; of a copy, once whether to keep it all.
  assert len(person.asked) == (1 if where == "sandbox" else 8)


def test_what_is_refused_is_not_done_and_the_policy_is_told(tmp_path):
  folder = fill(tmp_path)
  replies = (
    call("write_file", path="f.py", content="bad"),
    call("run_command", command="touch ran"),
    call("run_command", command="touch ran, too"),
    call("edit_file", path="f.py", old="x - 1", new="x + 1"),
    call("edit_file", path="f.py", old="x + 1", new="x + 2"),
    "I give up.",
  )
  person = Person("n", "", "Use python instead.", "NO", "a")
  server = work(folder, person, replies=replies)
  assert (folder / "f.py").read_text() == "def f(x):\n  return x + 2\n"
  assert not list(folder.glob("ran*"))
  assert len(person.asked) == 5  # An empty answer is none.
  text = "".join(
    DIALECT._spellings[i].decode("latin-1")
    for i in server.bodies[-1]["prompt_token_ids"]
  )
  assert text.count("Error: The user refused this call.\n") == 2
  assert "refused this call, and says: Use python instead." in text
  assert text.count("Edited f.py.") == 2
  assert "I give up." in person.saw and "Ended by answer" in person.saw


def test_reading_inside_needs_no_question_and_outside_does(tmp_path):
  folder = fill(tmp_path / "project")
  (tmp_path / "secret").write_text("a secret")
  (folder / "link").symlink_to("../secret")
  replies = (
    call("read_file", path="f.py")
    + call("list_files")
    + call("search", pattern="x"),
    call("read_file", path="../secret"),
    call("read_file", path=str(tmp_path / "secret")),
    call("read_file", path="link"),
    call("list_files", path=".."),
    call("search", pattern="secret", path="sub/../.."),
    call("read_file", path=str(folder / "f.py")),
    call("write_file", path="../other", content=""),
    call("finish"),
  )
  person = Person(*["n"] * 6)
  server = work(folder, person, replies=replies)
  assert [q.split()[1].rstrip("?") for q in person.asked] == [
    *["read_file"] * 3,
    "list_files",
    "search",
    "write_file",
  ]
  assert person.saw.count("Outside of the folder: ") == 6
  said = bytes(
    b"".join(
      DIALECT._spellings[i] for i in server.bodies[-1]["prompt_token_ids"]
    )
  )
  assert b"a secret" not in said and not (tmp_path / "other").exists()


def test_all_of_a_call_is_shown_before_it_is_allowed(tmp_path):
  folder = fill(tmp_path)
  long = "echo " + "a" * 300 + "; rm -r /\x1b[2K\x1b[1A \u202e"
  replies = (
    call("run_command", command=long),
    call("write_file", path="f.py", content="def f(x):\n  return 7\n"),
    call("finish"),
  )
  person = Person("n", "n")
  work(folder, person, replies=replies)
  shown = long.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
  assert f"$ {shown}" in person.saw.replace("\n", "")
  assert "\x1b" not in person.saw and "\u202e" not in person.saw
  assert "-  return x - 1\n+  return 7\n" in person.saw


def test_yes_asks_nothing(tmp_path):
  folder = fill(tmp_path)
  person = Person()
  replies = REPLIES[:2] + REPLIES[4:]
  work(folder, person, "--yes", "--test=true", replies=replies)
  assert (folder / "new/g.py").exists() and "$ seq 3000" in person.saw


def test_tasks_come_one_after_the_other(tmp_path):
  person = Person("The first.", "y", "The second.", "y", "")
  replies = (call("write_file", path="a", content="x"), "ok")
  server = work(fill(tmp_path), person, replies=replies, task="")
  assert person.asked.count("What is to be done? ") == 3
  assert len(server.bodies) == 4 and person.saw.count("Ended by answer") == 2
  seeds = [body["seed"] for body in server.bodies]
  assert len(set(seeds)) == 4


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), EOFError()])
def test_leaving_at_a_question(tmp_path, stop):
  folder = fill(tmp_path)
  before = signal.getsignal(signal.SIGINT)
  with pytest.raises(SystemExit) as caught:
    replies = (call("write_file", path="f.py", content=""),)
    work(folder, Person(stop), replies=replies)
  assert caught.value.code == 130
  assert (folder / "f.py").read_text() == FILES["f.py"]
  assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_what_it_runs(tmp_path, number):
  command = "echo $$ > begun; sleep 60"
  server = FakeServer(replies=(call("run_command", command=command),))
  with in_a_thread(server):
    process = subprocess.Popen(
      [
        *(sys.executable, str(REPOSITORY / "launch/agent.py")),
        *(f"--server={server.url}", "--task=x", "--yes"),
      ],
      cwd=tmp_path,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    begun, deadline = tmp_path / "begun", time.monotonic() + 60
    while not (begun.exists() and begun.read_text()):
      assert time.monotonic() < deadline and process.poll() is None
      time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
  assert process.returncode == 130
  assert output.endswith("Interrupted.\n") and "Traceback" not in output
  with pytest.raises(ProcessLookupError):
    os.kill(int(begun.read_text()), 0)


@pytest.mark.sandbox
def test_a_copy_is_only_written_back_if_wanted_and_where_it_fits(tmp_path):
  folder = fill(
    tmp_path / "project",
    {"same": "1\n", "gone": "2\n", "mine": "3\n", "away/x": "4\n"},
  )
  (folder / "run.sh").write_text("echo 1\n")
  (folder / "run.sh").chmod(0o755)
  (tmp_path / "outside").mkdir()
  (folder / "out").symlink_to("../outside")
  command = (
    "rm gone; echo 9 > mine; echo 'echo 2' > run.sh; printf '\\377' > binary;"
    " rm out; mkdir out; echo 5 > out/evil; echo 6 > tool; chmod +x tool"
  )
  replies = (call("run_command", command=command), call("finish"))
  before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
  person = Person("what?", "n")
  work(folder, person, "--sandbox", replies=replies)
  after = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
  assert before == after
  assert "gone: deleted" in person.saw and "+echo 2" in person.saw
  assert "binary: not a text" in person.saw

  class Hasty(Person):
    def _answer(self, question):
      (folder / "mine").write_text("changed by hand\n")
      return super()._answer(question)

  person = Hasty("y")
  work(folder, person, "--sandbox", replies=replies)
  assert not (folder / "gone").exists()
  assert (folder / "binary").read_bytes() == b"\xff"
  assert (folder / "run.sh").read_text() == "echo 2\n"
  assert os.access(folder / "run.sh", os.X_OK)
  assert os.access(folder / "tool", os.X_OK)
  assert "mine is left alone: it was changed meanwhile" in person.saw
  assert (folder / "mine").read_text() == "changed by hand\n"
  assert "out/evil is left alone: it leads out of the folder" in person.saw
  assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize(
  "flags, code, message",
  [
    (["--server=http://127.0.0.1:9"], 2, "no server of this project answers"),
    (["--folder=/no/such"], 2, "/no/such is not a folder"),
    (["--temperature=-1"], 2, "temperature=-1.0 must be finite"),
    (["--turns=0"], 2, "turns=0 must be above 0"),
  ],
)
def test_mistakes_get_a_sentence(tmp_path, capsys, flags, code, message):
  with in_a_thread(FakeServer()) as server:
    given = [f"--server={server.url}", f"--folder={tmp_path}", "--task=x"]
    with pytest.raises(SystemExit) as caught:
      agent.main([*given, *flags], Person())
  assert caught.value.code == code
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_a_server_for_short_texts_only(tmp_path, capsys):
  with in_a_thread(FakeServer(max_len=100)) as server:
    flags = [f"--server={server.url}", f"--folder={tmp_path}", "--task=x"]
    with pytest.raises(SystemExit) as caught:
      agent.main(flags, Person())
  assert caught.value.code == 2
  assert "the budget is 100" in capsys.readouterr().err


def test_a_server_that_fails_is_told_in_a_sentence(tmp_path, capsys):
  class Refuses(FakeServer):
    async def _answer(self, request, body):
      self.script = ["400"]
      return await super()._answer(request, body)

  with in_a_thread(Refuses()) as server, pytest.raises(SystemExit) as caught:
    flags = [f"--server={server.url}", f"--folder={tmp_path}", "--task=x"]
    agent.main(flags, Person())
  assert caught.value.code == 1
  assert "refused a request: 400" in capsys.readouterr().err


def test_approval_is_for_one_tool_only(tmp_path):
  folder = LocalFolder(fill(tmp_path))
  person = Person("a", "n")
  approval = Approval(person, folder)
  tools = Toolbox()._tools

  async def body():
    for command in ("true", "false"):
      arguments = {"command": command}
      assert await approval(tools["run_command"], arguments) is None
    arguments = {"path": "a", "content": "x"}
    return await approval(tools["write_file"], arguments)

  assert asyncio.run(body()) == "The user refused this call."
  assert len(person.asked) == 2
