"""The layers of the design hold: imports point one way."""

import subprocess
import sys
from pathlib import Path


def test_import_layers():
  linter = Path(sys.executable).with_name("lint-imports")
  result = subprocess.run([linter], capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stdout
