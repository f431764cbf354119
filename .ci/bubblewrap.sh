#!/usr/bin/env bash
# Gets bubblewrap, whose sandboxes rollouts and many tests need; root on Debian.
set -euo pipefail
command -v bwrap > /dev/null && exit
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "bubblewrap is missing: install it (the package is called bubblewrap)." >&2
  exit 1
fi
apt-get update -qq
apt-get install -y -qq bubblewrap
