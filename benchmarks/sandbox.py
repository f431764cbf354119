"""How fast sandboxes start and answer, and which attacks they survive.

    python -m benchmarks.sandbox [--provider=microvm] [--quick] [--json]

`load`: the machine's, over the last minute, before anything starts; figures of
a busy machine say little beyond their ratio to the peer's. `starts_per_s`:
sandboxes made, asked to read a file and destroyed, two at a time; no pool.
`host_cpu_ms`: what a start takes of this process. `peer`: the same by
bubblewrap alone, running `true` once, no agent, limits or system call filter.
`exec_ms`: `true`, and `python -c pass`, in a running sandbox. `fork_ms`: a
sandbox from a snapshot of 100 files of 1 kB. Attacks: see
`composer_jax.envs.attacks`. `boot_s`: making the provider, which boots a
microVM.
"""

import asyncio
import dataclasses
import os
import shutil
import statistics
import subprocess
import time

from benchmarks.harness import arguments, report
from composer_jax.envs.attacks import ATTACKS, LIMITS, survives
from composer_jax.envs.bubblewrap import Bubblewrap
from composer_jax.envs.microvm import Microvm
from composer_jax.envs.sandbox import Pool

_PROVIDERS = {"bubblewrap": Bubblewrap, "microvm": Microvm}
# How much longer programs may take on an emulated processor, while others are
# busy, before an attack counts as not survived.
_PATIENCE = 60.0


def main() -> None:
  """Prints all rows."""
  args = arguments(__doc__.splitlines()[0], _add_flags)
  rows = [{"what": "load", "value": os.getloadavg()[0]}]
  began = time.perf_counter()
  provider = _PROVIDERS[args.provider](LIMITS)
  rows.append({"what": "boot_s", "value": time.perf_counter() - began})
  kind = getattr(provider, "accelerator", "")
  count, patience = 40 if args.quick else 300, 1.0
  if kind == "tcg":
    count, patience = count // 10, _PATIENCE
  provider.limits = dataclasses.replace(LIMITS, wall_s=patience * LIMITS.wall_s)
  rows += asyncio.run(_rows(provider, count, patience))
  name = f"{args.provider} {kind}".strip()
  report([{"provider": name, **row} for row in rows], as_json=args.json)


def _add_flags(parser):
  parser.add_argument(
    "--provider", choices=list(_PROVIDERS), default="bubblewrap"
  )


async def _rows(provider, count, patience):
  rows = await _starts_and_peer(provider, count)
  async with Pool(provider, 8) as pool:
    await asyncio.sleep(1.0 if patience == 1.0 else 20.0)  # Until it is full.
    _, times = await _starts(pool, 8, lanes=1)
    rows.append({"what": "pool_start_min_ms", "value": min(times)})
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
  for name in ATTACKS:
    held = await survives(provider, name, patience)
    value = "held" if held else "BROKEN"
    rows.append({"what": f"attack {name}", "value": value})
  return rows


async def _starts_and_peer(provider, count):
  # In turns, so that both see the same load.
  rates, peers, times, host_s = [], [], [], 0.0
  for _ in range(4):
    before = time.process_time()
    rate, some = await _starts(provider, max(2, count // 4))
    host_s += time.process_time() - before
    rates.append(rate)
    times += some
    peers.append(_peer(max(2, count // 4)))
  rate, peer = statistics.harmonic_mean(rates), statistics.harmonic_mean(peers)
  return [
    {"what": "starts_per_s", "value": rate},
    {"what": "peer_starts_per_s", "value": peer},
    {"what": "starts / peer's", "value": rate / peer},
    {"what": "start_p50_ms", "value": statistics.median(times)},
    {"what": "start_p99_ms", "value": sorted(times)[int(0.99 * len(times))]},
    {"what": "host_cpu_ms", "value": 1000 * host_s / len(times)},
  ]


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
