"""The MoE layer by torch._grouped_mm and torch.compile: a peer of ours.

Same shapes and the same routing as the JAX layers, random numbers of the same
distributions. It has a process of its own: JAX and torch would fight for the
GPU's memory.
"""

import statistics

import numpy as np
import torch

from benchmarks.moe_shapes import SHAPES, route

SAMPLED_TOKENS = 16


def layer(x, expert_ids, gates, w_gate_up, w_down):
  """The layer of `moe_ffn`; w_gate_up is [E, H, 2 I] here."""
  (tokens, top_k), experts = gates.shape, len(w_down)
  ids = expert_ids.reshape(-1)
  order = torch.argsort(ids, stable=True)
  ends = torch.searchsorted(
    ids[order], torch.arange(experts, device=x.device), right=True
  ).to(torch.int32)
  gate, up = torch._grouped_mm(x[order // top_k], w_gate_up, offs=ends).chunk(
    2, dim=1
  )
  act = torch.nn.functional.silu(gate) * up
  y = torch._grouped_mm(act, w_down, offs=ends)
  y = y[torch.argsort(order)].reshape(tokens, top_k, -1)
  return (y * gates[..., None]).sum(dim=1).to(x.dtype)


def measure(job):
  """Yields two rows: forward and backward."""
  import torch._functorch.config as functorch

  functorch.donated_buffer = False  # Backward runs more than once.
  device = "cuda" if torch.cuda.is_available() else "cpu"
  inputs, dy = _make_inputs(job, device)
  ids, *arrays = inputs[1], inputs[0], *inputs[2:]
  call = torch.compile(layer) if device == "cuda" else layer

  def forward():
    return call(inputs[0], ids, *inputs[2:])

  def both():
    y = forward()
    return (y, *torch.autograd.grad(y, arrays, dy))

  result = both()
  again = both()
  checks = {
    "relative_error": _error(result, inputs, dy),
    "bitwise": all(
      torch.equal(a, b) for a, b in zip(result, again, strict=True)
    ),
    "peak_bytes": None,
  }
  del again
  if device == "cpu":
    yield checks | {"direction": "forward"}
    yield checks | {"direction": "backward"}
    return
  size = sum(a.numel() * a.element_size() for a in result)
  del result
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  both()
  peak = torch.cuda.max_memory_allocated() - before - size
  checks["peak_bytes"] = peak
  T, H, I, _, K = SHAPES[job["shape"]]  # noqa: E741
  with torch.no_grad():
    ms = _milliseconds(forward)
  yield checks | _speed("forward", 6 * T * K * H * I, ms)
  y = forward()
  ms = _milliseconds(
    lambda: torch.autograd.grad(y, arrays, dy, retain_graph=True)
  )
  yield checks | _speed("backward", 12 * T * K * H * I, ms)


def measure_stage(job):
  """A row of `benchmarks.grouped_mm`."""
  device = "cuda" if torch.cuda.is_available() else "cpu"
  T, H, I, E, K = SHAPES[job["shape"]]  # noqa: E741
  sizes = np.bincount(route(SHAPES[job["shape"]], job["routing"]).reshape(-1))
  ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)
  generator = torch.Generator(device).manual_seed(0)

  def normal(*shape, scale=1.0):
    kind = {"device": device, "dtype": torch.bfloat16}
    return torch.randn(*shape, generator=generator, **kind) * scale

  deep, wide = {
    "gate_up": (H, 2 * I),
    "down": (I, H),
    "d_rows": (2 * I, H),
    "d_w_down": (I, H),
    "d_w_gate_up": (H, 2 * I),
  }[job["stage"]]
  rows = normal(T * K, deep)
  if job["stage"].startswith("d_w"):
    left, right = rows.T, normal(T * K, wide)
  elif job["stage"] == "d_rows":  # Weights as the model keeps them.
    left, right = rows, normal(E, wide, deep, scale=deep**-0.5).transpose(1, 2)
  else:
    left, right = rows, normal(E, deep, wide, scale=deep**-0.5)

  def call():
    return torch._grouped_mm(left, right, offs=ends)

  result = call()
  first = int(sizes[0])
  if job["stage"].startswith("d_w"):
    found = result[0].double()
    expected = left[:, :first].double() @ right[:first].double()
  else:
    found = result[:first].double()
    expected = left[:first].double() @ right[0].double()
  row = {
    "relative_error": ((found - expected).norm() / expected.norm()).item(),
    "bitwise": all(torch.equal(call(), result) for _ in range(3)),
  }
  if device == "cuda":
    ms = _milliseconds(call)
    flops = 2 * T * K * deep * wide
    row |= {"ms": ms, "tflops": flops / ms / 1e9}
  return row


def _speed(direction, flops, ms):
  return {"direction": direction, "ms": ms, "tflops": flops / ms / 1e9}


def _make_inputs(job, device):
  T, H, I, E, K = SHAPES[job["shape"]]  # noqa: E741
  generator = torch.Generator(device).manual_seed(0)

  def normal(*shape, scale=1.0, dtype=torch.bfloat16):
    array = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    return array * scale

  ids = torch.tensor(route(SHAPES[job["shape"]], job["routing"])).to(device)
  inputs = [
    normal(T, H),
    ids.long(),
    normal(T, K, dtype=torch.float32).softmax(dim=1),
    normal(E, H, 2 * I, scale=H**-0.5),
    normal(E, I, H, scale=I**-0.5),
  ]
  for n in (0, 2, 3, 4):
    inputs[n].requires_grad_()
  return inputs, normal(T, H)


def _error(result, inputs, dy):
  """Largest relative error of y, dx, d_gates at sampled tokens, to float64."""
  x, ids, gates, w_gate_up, w_down = (a.detach() for a in inputs)
  tokens = np.random.default_rng(1).integers(0, len(x), SAMPLED_TOKENS)
  squares = np.zeros((3, 2))
  for t in map(int, tokens):
    row = x[t].double().requires_grad_()
    weight = gates[t].double().requires_grad_()
    y = 0
    for k in range(ids.shape[1]):
      e = ids[t, k]
      gate, up = (row @ w_gate_up[e].double()).chunk(2)
      act = torch.nn.functional.silu(gate) * up
      y = y + weight[k] * (act @ w_down[e].double())
    expected = (y, *torch.autograd.grad(y, (row, weight), dy[t].double()))
    found = (result[0][t], result[1][t], result[2][t])
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
      squares[n] += (
        (a.double() - b).square().sum().item(),
        b.square().sum().item(),
      )
  return float(np.sqrt(squares[:, 0] / squares[:, 1]).max())


def _milliseconds(call, rounds=5, seconds=0.05):
  def once(repeats):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
      call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats

  for _ in range(3):
    first = once(1)
  repeats = max(1, round(1e3 * seconds / first))
  return statistics.median(once(repeats) for _ in range(rounds))
