#!/usr/bin/env bash
# Builds the shared and the static library of the C interface, and installs them with the header and a file for
# pkg-config. Needs Rust and a C++ compiler, and nvcc for the GPU part; what uses the libraries needs neither.
#
#   bindings/c/install.sh --prefix DIR [--features c,cuda] [--target-dir DIR] [--libraries DIR]
#
# Relative folders are of the caller's folder. --features c leaves the GPU part out. --libraries takes libtokenyard.so,
# libtokenyard.a and native-static-libs, the libraries that the static one needs, from DIR instead of building them.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/../.."

# A folder of the caller's as an absolute one.
from_here() {
  case $1 in
    '' | /*) echo "$1" ;;
    *) echo "$here/$1" ;;
  esac
}

prefix= features=c,cuda target=$PWD/target libraries=
while [ $# -gt 0 ]; do
  case $1:$# in
    --prefix:1 | --features:1 | --target-dir:1 | --libraries:1) echo "$1 needs a value" >&2 && exit 2 ;;
    --prefix:*) prefix=$2 ;;
    --features:*) features=$2 ;;
    --target-dir:*) target=$2 ;;
    --libraries:*) libraries=$2 ;;
    *)
      echo "unknown option $1: give --prefix DIR, and --features, --target-dir or --libraries if need be" >&2
      exit 2
      ;;
  esac
  shift 2
done
if [ -z "$prefix" ]; then
  echo "give --prefix DIR, the folder to install into" >&2
  exit 2
fi
prefix=$(from_here "$prefix") target=$(from_here "$target") libraries=$(from_here "$libraries")

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
# Until 1.0 every minor version may break the interface.
soname=libtokenyard.so.0

if [ -z "$libraries" ]; then
  libraries=$target/release
  mkdir -p "$target" # for the log: cargo makes it later than that
  # One build for both. The flags behind -- are for the shared library alone.
  cargo rustc --release --lib --no-default-features --features "$features" --target-dir "$target" \
    --crate-type cdylib,staticlib -- -C "link-arg=-Wl,-soname,$soname" --print native-static-libs 2>&1 |
    tee "$target/install.log"
  sed -n 's/^note: native-static-libs: //p' "$target/install.log" | tail -1 >"$libraries/native-static-libs"
fi
private=$(cat "$libraries/native-static-libs")
if [ -z "$private" ]; then
  echo "the compiler named no libraries that libtokenyard.a needs: touch lib.rs, and run this again" >&2
  exit 1
fi

install -d "$prefix/include" "$prefix/lib/pkgconfig"
prefix=$(cd "$prefix" && pwd)
install -m 644 bindings/c/tokenyard.h "$prefix/include/"
install -m 644 "$libraries/libtokenyard.a" "$prefix/lib/"
install -m 755 "$libraries/libtokenyard.so" "$prefix/lib/libtokenyard.so.$version"
ln -sf "libtokenyard.so.$version" "$prefix/lib/$soname"
ln -sf "$soname" "$prefix/lib/libtokenyard.so"
cat >"$prefix/lib/pkgconfig/tokenyard.pc" <<END
prefix=$prefix
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: tokenyard
Description: Expert-parallel dispatch and combine
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -ltokenyard
Libs.private: $private
END
echo "installed tokenyard $version in $prefix"
