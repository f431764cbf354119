"""A small corpus in a temporary folder."""

import pytest
from made_up_code import module


@pytest.fixture
def code(tmp_path):
  """A folder of forty small modules."""
  folder = tmp_path / "code"
  (folder / "sub").mkdir(parents=True)
  for seed in range(40):
    where = folder / "sub" if seed % 3 else folder
    (where / f"m{seed}.py").write_text(module(seed), encoding="utf-8")
  return folder
