"""Modules that no one wrote: small, varied, and always the same."""

import random

_VERBS = ["read", "write", "open", "close", "parse", "split", "join", "merge"]
_NOUNS = ["tree", "row", "file", "token", "page", "block", "cache", "stream"]


def module(seed: int, functions: int = 6) -> str:
  """A made-up module that resembles no other seed's."""
  rng = random.Random(seed)
  lines = [f'"""Module {seed}: caf\u00e9 \u2192 na\u00efve."""\n']
  for _ in range(functions):
    verb, noun, other = rng.choice(_VERBS), *rng.sample(_NOUNS, 2)
    number = rng.randrange(10_000)
    lines += [
      f"def {verb}_{noun}_{number}({noun}, {other}=None):",
      f"  if {other} is None or {noun} > {rng.randrange(999)}:",
      f"    {other} = [{rng.random():.5f}, {noun}, {number}]",
      f"  return {rng.choice(_VERBS)}({noun}) + len({other})\n\n",
    ]
  return "\n".join(lines)
