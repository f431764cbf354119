#!/bin/sh
# Prints the path of a Python >= 3.12 that can make a virtual environment.
# Obtains one (by Debian's packages or by uv) where the machine has none.
set -eu

usable() {
  "$1" -c 'import sys, venv, ensurepip
sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  for candidate in "${PYTHON:-python3}" python3.12 python3.13 python3.14 \
      "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python \
      "$HOME"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3; do
    if usable "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  return 1
}

find_python && exit 0

# Debian splits ensurepip into a package of its own.
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update && apt-get install -y python3-venv; } >&2 || true
  find_python && exit 0
fi

# An older Python can still install uv, which brings a newer one.
if ! command -v uv >/dev/null && command -v python3 >/dev/null; then
  { python3 -m venv .uv && .uv/bin/pip install uv; } >&2 || true
  PATH="$PWD/.uv/bin:$PATH"
fi
if command -v uv >/dev/null; then
  uv python install 3.12 >&2 && uv python find 3.12 && exit 0
fi

echo "No Python >= 3.12 found, and none could be obtained." \
  "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
