"""Runs hidden tests inside a sandbox, each in a process of its own.

A script of the standard library alone: `verify.py` passes its text to the
sandbox's Python. It reads a request, and prints a line for each job as soon as
that is done: the request's mark, the job's number and what it gave, as JSON.
Jobs are forked off this process, which never imports what they test, so each
imports the repository anew; what lies outside of it may be imported before.
"""

# ruff: noqa: PTH103, PTH108, PTH109, PTH116, PTH118, PTH120, PTH123, PTH207, PTH208
import contextlib
import glob
import importlib
import importlib.util
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time

WORK = "/work"
# That jobs may want of the repository's disk.
_ROOM_BYTES = 2 << 20


def main():
  """Answers the request on standard input."""
  request = json.load(sys.stdin)
  sys.dont_write_bytecode = True
  if request["warm"]:
    _warm(request["jobs"])
  for number, job in enumerate(request["jobs"]):
    with _in_place(job["files"], number):
      given = _apart(lambda job=job: _KINDS[job["kind"]](job), job["wall_s"])
    line = f"\n{request['mark']} [{number}, {given or 'null'}]\n".encode()
    while line:
      line = line[os.write(1, line) :]
  os._exit(0)


def _warm(jobs):
  """Compiles what jobs import, and imports what isn't the repository's."""
  suites = [job for job in jobs if job["kind"] == "suite"]
  nodes = dict.fromkeys(node for job in suites for node in job["nodes"])
  files = dict.fromkeys(node.split("::")[0] for node in nodes)
  modules = {(job["kind"], job.get("module")): job for job in jobs}
  works = [lambda job=job: _entered(job) for job in modules.values()]
  if suites:
    works.append(lambda: _pytest(suites[0], [*files, "--collect-only"]))
  names = []
  for work in works:

    def imported(work=work):
      sys.dont_write_bytecode = False
      with contextlib.suppress(BaseException):
        work()
      return [n for n, m in list(sys.modules.items()) if not _inside(m)]

    names += json.loads(_apart(imported, jobs[0]["wall_s"]) or "[]")
    place = os.statvfs(WORK)
    if place.f_bavail * place.f_bsize < _ROOM_BYTES:
      for folder in glob.glob(f"{WORK}/**/__pycache__", recursive=True):
        shutil.rmtree(folder)
  for name in dict.fromkeys(names):
    # A module may only work where the repository can be imported, too.
    with contextlib.suppress(BaseException):
      importlib.import_module(name)


def _entered(job):
  """Imports what a job will import first."""
  if job["kind"] == "probe" and job["module"]:
    _enter(job)
    importlib.import_module(job["module"])
  elif job["kind"] == "score":
    importlib.import_module("reasoning_gym")


def _inside(module):
  """Whether a module is the repository's, or can't be told."""
  file = getattr(module, "__file__", None)
  return file.startswith(WORK) if file else hasattr(module, "__path__")


def _apart(work, wall_s):
  """What `work` returns in a forked process, as JSON; "" if it fails."""
  read_end, write_end = os.pipe()
  pid = os.fork()
  if not pid:
    try:
      os.close(read_end)
      os.setsid()
      null = os.open(os.devnull, os.O_RDWR)
      for standard in range(3):
        os.dup2(null, standard)
      limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
      # So that this process outlives one that eats all memory.
      if limit != resource.RLIM_INFINITY:
        limit = 7 * limit // 8
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
      os.chdir(tempfile.mkdtemp(dir="/tmp"))
      given = json.dumps(work()).encode()
      while given:
        given = given[os.write(write_end, given) :]
    finally:
      os._exit(0)
  os.close(write_end)
  given = bytearray()
  deadline = time.monotonic() + wall_s
  while (left := deadline - time.monotonic()) > 0:
    if not select.select([read_end], [], [], left)[0]:
      break
    chunk = os.read(read_end, 1 << 16)
    if not chunk:
      break
    given += chunk
  os.close(read_end)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  for name in os.listdir("/tmp"):
    if name.startswith("tmp"):
      shutil.rmtree(os.path.join("/tmp", name), ignore_errors=True)
  try:
    json.loads(given)
  except ValueError:
    return ""
  return given.decode()


@contextlib.contextmanager
def _in_place(files, number):
  """Files in the repository for one job alone."""
  before = {}
  for name, text in files.items():
    path = os.path.join(WORK, name)
    try:
      with open(path, "rb") as file:
        before[path] = file.read(), os.stat(path).st_mtime_ns
    except FileNotFoundError:
      before[path] = None
    # Compiled files are told apart by time and size.
    _write(path, text.encode(), (number + 1) * 10**9 + 10**18)
  try:
    yield
  finally:
    for path, content in before.items():
      if content:
        _write(path, *content)
      else:
        os.unlink(path)


def _write(path, content, time_ns):
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "wb") as file:
    file.write(content)
  os.utime(path, ns=(time_ns, time_ns))


def _enter(job):
  """Makes the repository's modules those that are imported."""
  root = os.path.join(WORK, job.get("root", ""))
  own = {entry.split(".")[0] for entry in os.listdir(root)}
  if job["kind"] == "suite":
    # What was put beside the repository's own modules must hide no library.
    sys.path.append(root)
    own = {name for name in own if not _installed(name)}
  else:
    sys.path.insert(0, root)
  for name in [m for m in sys.modules if m.split(".")[0] in own]:
    del sys.modules[name]
  importlib.invalidate_caches()


def _installed(name):
  file = getattr(sys.modules.get(name), "__file__", None) or ""
  return "site-packages" in file


@contextlib.contextmanager
def _within(cpu_s):
  """Raises TimeoutError after so long, or five times as long on the clock.

  Another process may have the processor: that is no fault of the code.
  """

  def late(*_):
    raise TimeoutError

  signal.signal(signal.SIGPROF, late)
  signal.signal(signal.SIGALRM, late)
  signal.setitimer(signal.ITIMER_PROF, cpu_s)
  signal.setitimer(signal.ITIMER_REAL, 5 * cpu_s)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _probe(job):
  """What each line gives; stops where that isn't what `until` says."""
  _enter(job)
  names = {}
  problem = ""
  if job["module"]:

    def imported():
      names.update(vars(importlib.import_module(job["module"])))

    told = _told(imported, job["job_s"])
    problem = "" if names else told
  deadline = time.process_time() + job["job_s"]
  answers = []
  for number, line in enumerate(job["lines"]):
    if problem or time.process_time() > deadline:
      answer = problem or "! TimeoutError"
    else:
      answer = _told(lambda line=line: _value(line, names), job["line_s"])
    answers.append(answer[:4000])
    if job["until"] and answers[-1] != job["until"][number]:
      break
  return answers


def _told(work, line_s):
  """What some work prints, and then what it returns or raises."""
  printed = io.StringIO()
  try:
    with _within(line_s), contextlib.redirect_stdout(printed):
      answer = work() or "="
  except BaseException as error:
    answer = "! " + type(error).__name__
  return printed.getvalue() + answer


def _value(line, names):
  try:
    code = compile(line, "<line>", "eval")
  except SyntaxError:
    exec(line, names)
    return "="
  return "= " + repr(eval(code, names))


def _suite(job):
  """The outcome of each test; with `trace`, its seconds and what it called."""
  import pytest

  tests = {}

  class Observer:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
      trace = _traced() if job["trace"] else contextlib.nullcontext(set())
      with _within(job["line_s"]), trace as seen:
        tests[item.nodeid] = ["", 0.0, seen]
        return (yield)

    def pytest_runtest_logreport(self, report):
      test = tests.setdefault(report.nodeid, ["", 0.0, set()])
      if report.when == "call" or report.outcome != "passed":
        test[0] = report.outcome if report.when == "call" else report.when
        test[1] = report.duration

  _pytest(job, job["nodes"], Observer())
  return {node: [*told, sorted(seen)] for node, (*told, seen) in tests.items()}


def _pytest(job, arguments, *plugins):
  import pytest

  _enter(job)
  settings = os.path.join(os.getcwd(), "pytest.ini")
  with open(settings, "w") as file:
    file.write("[pytest]\n")
  os.chdir(WORK)
  pytest.main(
    [
      *("-q", "-c", settings, "--rootdir", WORK, "--import-mode=append"),
      *("--assert=plain", "-W", "ignore", "-p", "no:cacheprovider"),
      # Collects garbage, which takes longer than most tests.
      *("-p", "no:unraisableexception", *arguments),
    ],
    plugins=plugins,
  )


@contextlib.contextmanager
def _traced():
  """A set that collects the functions of the repository that are called."""
  seen = set()
  events = sys.monitoring

  def called(code, _):
    if code.co_filename.startswith(WORK):
      path = os.path.relpath(code.co_filename, WORK)
      seen.add(f"{path}:{code.co_qualname}")
    return events.DISABLE

  tool = events.PROFILER_ID
  events.use_tool_id(tool, "tasks")
  events.register_callback(tool, events.events.PY_START, called)
  events.set_events(tool, events.events.PY_START)
  events.restart_events()
  try:
    yield seen
  finally:
    events.set_events(tool, 0)
    events.free_tool_id(tool)


def _score(job):
  """The score of the answer that lies in a file, from 0 to 1."""
  import reasoning_gym

  score = reasoning_gym.get_score_answer_fn(job["dataset"])
  with open(os.path.join(WORK, job["path"]), "rb") as file:
    answer = file.read(1 << 16).decode(errors="replace").strip()
  return float(score(answer, json.loads(job["entry"])))


_KINDS = {"probe": _probe, "suite": _suite, "score": _score}

if __name__ == "__main__":
  main()
