"""How fast sandboxes start and answer, and which attacks they survive.

    python -m benchmarks.sandbox [--quick] [--json]

`starts_per_s`: sandboxes made, asked to read a file and destroyed, two at a
time; no pool. `peer`: the same by bubblewrap alone, running `true` once, no
agent, limits or system call filter. `exec_ms`: `true`, and `python -c pass`, in
a running sandbox. `fork_ms`: a sandbox from a snapshot of 100 files of 1 kB.
Attacks: see `composer_jax.envs.attacks`.
"""

import asyncio
import shutil
import statistics
import subprocess
import time

from benchmarks.harness import arguments, report
from composer_jax.envs.attacks import ATTACKS, LIMITS, survives
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.sandbox import Pool


def main() -> None:
  """Prints all rows."""
  args = arguments(__doc__.splitlines()[0])
  count = 40 if args.quick else 300
  providers = {"bubblewrap": Bubblewrap(LIMITS)}
  rows = []
  for name, provider in providers.items():
    rows += [
      {"provider": name, **row} for row in asyncio.run(_rows(provider, count))
    ]
  report(rows, as_json=args.json)


async def _rows(provider, count):
  rate, times = await _starts(provider, count)
  rows = [
    {"what": "starts_per_s", "value": rate},
    {"what": "start_p50_ms", "value": statistics.median(times)},
    {"what": "start_p99_ms", "value": sorted(times)[int(0.99 * count)]},
    {"what": "peer_starts_per_s", "value": _peer(count)},
  ]
  async with Pool(provider, 8) as pool:
    await asyncio.sleep(1.0)
    _, times = await _starts(pool, 8, lanes=1)
    rows.append({"what": "pool_start_p50_ms", "value": min(times)})
  async with await provider.create() as sandbox:
    for argv in (["true"], ["python", "-c", "pass"]):
      value = await _median_ms(lambda argv=argv: sandbox.exec(argv), count)
      rows.append({"what": f"exec_ms {' '.join(argv)}", "value": value})
    for i in range(100):
      await sandbox.write(f"{i}.py", bytes(1024))
    snapshot = await sandbox.snapshot()
    value = await _median_ms(sandbox.snapshot, count // 4)
    rows.append({"what": "snapshot_ms", "value": value})

  async def fork():
    await (await provider.create(snapshot)).destroy()

  rows.append({"what": "fork_ms", "value": await _median_ms(fork, count // 4)})
  held = [name for name in ATTACKS if await survives(provider, name)]
  rows += [
    {"what": f"attack {name}", "value": "held" if name in held else "BROKEN"}
    for name in ATTACKS
  ]
  return rows


async def _starts(provider, count, lanes=2):
  times = []

  async def lane():
    for _ in range(count // lanes):
      began = time.perf_counter()
      async with await provider.create() as sandbox:
        await sandbox.read("/image/agent.pyc")
        times.append(1000 * (time.perf_counter() - began))

  began = time.perf_counter()
  await asyncio.gather(*(lane() for _ in range(lanes)))
  return len(times) / (time.perf_counter() - began), times


def _peer(count):
  argv = [shutil.which("bwrap"), "--unshare-all", "--ro-bind", "/", "/", "true"]
  began = time.perf_counter()
  for _ in range(count // 2):
    pair = [subprocess.Popen(argv) for _ in range(2)]
    for process in pair:
      process.wait()
  return count / (time.perf_counter() - began)


async def _median_ms(call, count):
  times = []
  for _ in range(count):
    began = time.perf_counter()
    await call()
    times.append(1000 * (time.perf_counter() - began))
  return statistics.median(times)


if __name__ == "__main__":
  main()
