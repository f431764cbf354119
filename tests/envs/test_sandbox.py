"""Sandboxes: what they do, and that nothing gets out of them."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from composer_jax.envs.attacks import ATTACKS, LIMITS, survives
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.image import cache_folder
from composer_jax.envs.initramfs import find_kernel
from composer_jax.envs.microvm import Microvm
from composer_jax.envs.sandbox import (
  FileError,
  Limits,
  Pool,
  Sandbox,
  SandboxError,
)
from composer_jax.envs.seccomp import program

pytestmark = pytest.mark.sandbox


# An emulated processor, on a busy machine.
SLOWER = 60
QUICK_ATTACKS = ("devices", "host_files", "memory_many_processes")


@pytest.fixture(scope="module")
def bubblewrap():
  return Bubblewrap(LIMITS)


@pytest.fixture(scope="module")
def microvm():
  if lacking := what_microvms_lack():
    pytest.skip(lacking)
  patient = dataclasses.replace(LIMITS, wall_s=SLOWER * LIMITS.wall_s)
  return Microvm(patient)


def what_microvms_lack():
  if not shutil.which("qemu-system-x86_64"):
    return "needs QEMU: install the package qemu-system-x86"
  try:
    find_kernel(cache_folder() / "kernel", Path("/"))
  except FileNotFoundError as error:
    return str(error)
  return None


@pytest.fixture(params=["bubblewrap", "microvm"])
def provider(request):
  return request.getfixturevalue(request.param)


def run(test, provider):
  async def body():
    async with await provider.create() as sandbox:
      return await test(sandbox)

  return asyncio.run(body())


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_survived(bubblewrap, name):
  assert asyncio.run(survives(bubblewrap, name))


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_on_a_machine_is_survived(microvm, name):
  if microvm.accelerator == "tcg" and name not in QUICK_ATTACKS:
    pytest.skip(
      "slow without KVM; benchmarks.sandbox --provider=microvm has it"
    )
  patience = SLOWER if microvm.accelerator == "tcg" else 1
  assert asyncio.run(survives(microvm, name, patience))


def test_attacks_are_real():
  # Without a sandbox the harmless ones succeed, so their checks can fail.
  for name in ("memory_unseen", "host_files", "other_processes"):
    result = subprocess.run(
      ["python3", "-c", ATTACKS[name].source], capture_output=True, text=True
    )
    assert result.stdout.strip() != "denied", name


def test_what_a_command_does_is_told(provider):
  async def test(sandbox):
    script = "echo out; echo err >&2; cat; pwd; echo $X; exit 3"
    result = await sandbox.exec(
      ["sh", "-c", script], stdin=b"in\n", cwd="/tmp", env={"X": "7"}
    )
    assert (result.exit_code, result.reason) == (3, "exited")
    assert result.text == "out\nerr\nin\n/tmp\n7\n"
    assert not result.ok
    killed = await sandbox.exec(["sh", "-c", "kill -9 $$"])
    assert killed.exit_code == -9
    missing = await sandbox.exec(["no-such-command"])
    assert missing.exit_code == 127 and b"no-such-command" in missing.output

  run(test, provider)


def test_time_limit(provider):
  async def test(sandbox):
    began = time.monotonic()
    result = await sandbox.exec(["sleep", "60"], wall_s=0.3)
    assert result.reason == "timeout" and result.exit_code == -9
    assert time.monotonic() - began < 5

  run(test, provider)


def test_long_output_keeps_both_ends(bubblewrap):
  async def test(sandbox):
    code = "print('begin' + 'x' * 10**6 + 'end')"
    result = await sandbox.exec(["python", "-c", code], output_bytes=100)
    assert result.omitted_bytes == 1_000_009 - 100
    head, tail = result.output.split(b"\n[999909 bytes omitted]\n")
    assert (len(head), len(tail)) == (50, 50)
    assert head.startswith(b"beginx") and tail.endswith(b"xend\n")

  run(test, bubblewrap)


def test_stdin_larger_than_a_pipe_and_nobody_reading(provider):
  async def test(sandbox):
    data = os.urandom(1 << 20)
    result = await sandbox.exec(["cat"], stdin=data, output_bytes=4 << 20)
    assert result.output == data
    assert (await sandbox.exec(["true"], stdin=data)).ok

  run(test, provider)


def test_files(provider):
  async def test(sandbox):
    await sandbox.write("deep/er/f", b"\x00\xff" * 1000)
    await sandbox.write("deep/er/f", b"short", 0o755)
    assert await sandbox.read("/work/deep/er/f") == b"short"
    with pytest.raises(FileError, match="5 bytes, more than the 4"):
      await sandbox.read("deep/er/f", max_bytes=4)
    with pytest.raises(FileError, match="No such file"):
      await sandbox.read("nothing")
    with pytest.raises(FileError, match="is a directory"):
      await sandbox.read("deep")
    with pytest.raises(FileError, match="No space"):
      await sandbox.write("large", bytes(LIMITS.disk_bytes + 1))

  run(test, provider)


def test_files_that_are_traps(provider):
  async def test(sandbox):
    await sandbox.exec(
      ["sh", "-c", "mkfifo pipe; ln -s /proc/self/mem m; ln -s /etc etc"]
    )
    for path in ("pipe", "m", "/proc/self/environ", "/dev/urandom"):
      with pytest.raises(FileError):
        await sandbox.read(path)
      with pytest.raises(FileError):
        await sandbox.write(path, b"x")
    with pytest.raises(FileError, match=r"Permission|Read-only"):
      await sandbox.write("etc/passwd", b"x")
    with pytest.raises(FileError):
      await sandbox.read("../../root/.bashrc")

  run(test, provider)


def test_snapshot_fork_and_their_bytes(provider):
  async def test(sandbox):
    await sandbox.write("a/x", b"1", 0o755)
    await sandbox.exec(["sh", "-c", "ln -s x a/link; mkdir empty"])
    snapshot = await sandbox.snapshot()
    async with await provider.create(snapshot) as fork:
      assert await fork.snapshot() == snapshot
      await fork.write("a/x", b"2")
      assert await sandbox.read("a/link") == b"1"
      assert await fork.read("a/link") == b"2"
    with pytest.raises(FileError, match="unpacked"):
      await provider.create(b"not a tar archive")

  run(test, provider)


def test_a_snapshot_goes_on_under_another_provider(bubblewrap, microvm):
  async def test():
    async with await bubblewrap.create() as sandbox:
      await sandbox.write("a/x", b"1", 0o755)
      snapshot = await sandbox.snapshot()
    async with await microvm.create(snapshot) as fork:
      assert await fork.snapshot() == snapshot

  asyncio.run(test())


def test_snapshot_of_sparse_files_is_refused(bubblewrap):
  async def test(sandbox):
    await sandbox.exec(
      ["sh", "-c", "for i in $(seq 9); do truncate -s 8000000 $i; done"]
    )
    with pytest.raises(FileError, match="sparse"):
      await sandbox.snapshot()

  run(test, bubblewrap)


def test_too_many_files_can_be_removed(bubblewrap):
  async def test(sandbox):
    fill = "for i in range(9999): open(str(i), 'w').close()"
    assert (await sandbox.exec(["python", "-c", fill])).reason == "files"
    await sandbox.exec(["sh", "-c", "rm -f *; sleep 0.1; ls"])
    assert (await sandbox.exec(["ls"])).output == b""

  run(test, bubblewrap)


def test_sandboxes_do_not_see_each_other(provider):
  async def test(sandbox):
    async with await provider.create() as other:
      await other.write("secret", b"x")
      await other.write("/dev/shm/secret", b"x")
      found = await sandbox.exec(
        ["sh", "-c", "find /work /tmp /dev -name secret 2>/dev/null"]
      )
      assert found.output == b""

  run(test, provider)


def test_destroy_ends_a_running_command(provider):
  async def test():
    sandbox = await provider.create()
    daemon = "setsid sleep 60 & sleep 60"
    running = asyncio.create_task(sandbox.exec(["sh", "-c", daemon]))
    await asyncio.sleep(0.3)
    inside = below(sandbox._process.pid)
    assert inside
    running.cancel()
    await sandbox.destroy()
    await sandbox.destroy()
    await wait_until(
      lambda: not any(Path(f"/proc/{p}").exists() for p in inside)
    )
    with pytest.raises(SandboxError, match="is gone"):
      await sandbox.exec(["true"])

  asyncio.run(test())


def test_a_start_that_is_cancelled_leaves_nothing(provider):
  async def test():
    before = below(os.getpid())
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
      starting = asyncio.create_task(provider.create())
      await asyncio.sleep(delay)
      starting.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await (await starting).destroy()
    await wait_until(lambda: below(os.getpid()) <= before)

  asyncio.run(test())


def test_copies_of_a_machine_differ_where_they_must(microvm):
  async def draw():
    code = "import os, time; print(os.urandom(8).hex(), time.time())"
    async with await microvm.create() as sandbox:
      result = await sandbox.exec(["python", "-c", code])
      return result.text.split(), await sandbox.exec(["uname", "-r"])

  (one, then), _ = asyncio.run(draw())
  (other, now), kernel = asyncio.run(draw())
  assert one != other
  assert float(then) < float(now) <= time.time() + 1
  assert abs(float(now) - time.time()) < SLOWER
  assert kernel.ok and kernel.text.strip() != os.uname().release
  for shared in (microvm._memory, microvm._state):
    with pytest.raises(PermissionError):
      os.pwrite(shared, b"x", 0)


def below(pid):
  """Processes that descend from one."""
  found = set()
  for task in Path(f"/proc/{pid}/task").glob("*/children"):
    with contextlib.suppress(OSError):
      for child in task.read_text().split():
        found |= {child} | below(child)
  return found


async def wait_until(condition):
  for _ in range(200):
    if condition():
      return
    await asyncio.sleep(0.02)
  raise AssertionError("never happened")


def test_the_process_limit_counts_each_sandbox_alone(bubblewrap):
  async def test(sandbox):
    async with await bubblewrap.create() as other:
      script = "for i in $(seq 20); do sleep 0.5 & done; wait; echo done"
      results = await asyncio.gather(
        *(s.exec(["sh", "-c", script]) for s in (sandbox, other))
      )
      assert [r.text for r in results] == ["done\n"] * 2

  run(test, bubblewrap)


def test_a_sandbox_that_is_killed_is_not_the_command_s_fault(provider):
  async def test(sandbox):
    running = asyncio.create_task(sandbox.exec(["sleep", "2"]))
    await asyncio.sleep(0.2)
    sandbox._process.kill()
    with pytest.raises(SandboxError, match="no answer"):
      await running

  run(test, provider)


def test_pool_hands_out_fresh_sandboxes(provider):
  async def test():
    async with Pool(provider, 2) as pool:
      async with await pool.create() as first:
        await first.write("x", b"1")
        snapshot = await first.snapshot()
      async with await pool.create() as second:
        with pytest.raises(FileError):
          await second.read("x")
      async with await pool.create(snapshot) as third:
        assert await third.read("x") == b"1"

  asyncio.run(test())


def test_packages_can_be_imported_and_missing_ones_are_named():
  async def test(sandbox):
    result = await sandbox.exec(["python", "-c", "import iniconfig"])
    assert result.ok, result.text

  run(test, Bubblewrap(LIMITS, ["iniconfig"]))
  with pytest.raises(SandboxError, match="pip install no-such-thing"):
    Bubblewrap(LIMITS, ["no-such-thing"])


def test_an_agent_that_sends_too_much_is_not_listened_to():
  async def test():
    process = await asyncio.create_subprocess_exec(
      *("sh", "-c", r"printf '\0\0\0\2\377\0\0\0{}'; exec sleep 60"),
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
    )
    async with Sandbox(process, LIMITS) as sandbox:
      with pytest.raises(SandboxError, match="no answer"):
        await sandbox.ready()

  began = time.monotonic()
  asyncio.run(test())
  assert time.monotonic() - began < 10


def test_what_a_machine_needs_is_named(monkeypatch, tmp_path):
  with pytest.raises(SandboxError, match=f"no kernel .* under {tmp_path}"):
    Microvm(LIMITS, kernel_root=tmp_path)
  with pytest.raises(ValueError, match="use 'kvm' or 'tcg'"):
    Microvm(LIMITS, accelerator="xen")


def test_errors_say_what_is_wrong():
  with pytest.raises(ValueError, match=r"processes=0 must be above 0"):
    Limits(processes=0)
  with pytest.raises(ValueError, match="riscv64"):
    program("riscv64")
  assert len(program("aarch64")) == len(program("x86_64"))
