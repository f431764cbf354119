#!/bin/sh
# Debian, as root: QEMU, and a kernel for composer_jax/envs/microvm.py. The
# kernel is unpacked into the cache, not installed: nothing else boots it.
set -eu
kernel=/var/cache/composer-jax/kernel
if ! command -v qemu-system-x86_64 > /dev/null || [ ! -d "$kernel" ]; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends qemu-system-x86
  package=$(apt-cache depends linux-image-cloud-amd64 |
    awk '$1 == "Depends:" { print $2; exit }')
  folder=$(mktemp -d)
  # Its user _apt writes there.
  chmod 777 "$folder"
  (cd "$folder" && apt-get download -qq "$package")
  mkdir -p "${kernel%/*}"
  dpkg -x "$folder"/*.deb "$folder/kernel"
  chmod -R a+rX "$folder/kernel"
  mv "$folder/kernel" "$kernel"
  rm -r "$folder"
fi
