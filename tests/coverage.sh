#!/usr/bin/env bash
# Runs the Rust tests and counts the lines of the crate that they reach without a GPU; fails below 85 %. Needs the LLVM
# tools of the Rust toolchain. With --build it builds them alone.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$PWD/target/coverage
tools=$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin
if [ ! -x "$tools/llvm-cov" ] && ! rustup component add llvm-tools; then
  echo "tests/coverage.sh needs llvm-cov of the Rust toolchain: install rustup, then its component llvm-tools" >&2
  exit 1
fi

mkdir -p "$target"
# Of the crate alone: what it depends on is built as ever, and integration tests need the counters' runtime alone. Tests
# that move no rows, but for the proxy's ten thousand seeds, are not optimised, since to build them takes longer than to
# run them.
wrapper=$target/instrumented
cat >"$wrapper" <<'END'
#!/bin/sh
case "$*" in
  *"--crate-name tokenyard "*" --test "*) exec "$@" -C instrument-coverage -C opt-level=0 ;;
  *"--crate-name tokenyard "*) exec "$@" -C instrument-coverage ;;
  *"--crate-name calls "* | *"--crate-name proxy "* | *"--crate-name transport "*) exec "$@" -C link-arg=-Wl,-u,__llvm_profile_runtime ;;
  *) exec "$@" -C link-arg=-Wl,-u,__llvm_profile_runtime -C opt-level=0 ;;
esac
END
chmod +x "$wrapper"
# Nobody debugs this build.
export CARGO_PROFILE_DEV_DEBUG=0
# Processes that end write what they counted into one of eight files a program.
export RUSTC_WORKSPACE_WRAPPER=$wrapper LLVM_PROFILE_FILE=$target/profiles/%8m.profraw
build=(cargo test --no-default-features --features cli,c --target-dir "$target" --lib --bins --tests --no-run)
if [ "${1:-}" = --build ]; then exec "${build[@]}"; fi
rm -rf "$target/profiles" "$target/logs"
mkdir "$target/logs"
"${build[@]}"
# The program itself stands elsewhere.
programs=$("${build[@]}" --message-format=json 2>/dev/null | sed -n 's/.*"executable":"\([^"]*\/deps\/[^"]*\)".*/\1/p')

# Status 77: this machine lacks something, which was printed.
lacks() {
  local status=0
  "$@" || status=$?
  [ "$status" -eq 77 ] || return "$status"
}
# Verbs, in a VM with soft-RoCE. Status 125: it does not get the VM to run.
in_vm() {
  local status=0
  VM_OUT=$target/profiles VM_TIMEOUT=900 lacks tests/verbs/vm.sh \
    env LLVM_PROFILE_FILE="$target/profiles/verbs-%p.profraw" "$1" --test-threads=1 || status=$?
  case $status in
    0) ;;
    125)
      echo "skipped: the VM does not run here, so that verbs is not tested"
      [ "${TOKENYARD_STRICT:-}" != 1 ]
      return
      ;;
    *)
      echo "tests/verbs failed with status $status; rdma-core's own tests tell whether the VM is to blame:"
      tests/verbs/vm.sh --health | tail -4 || true
      ;;
  esac
  return "$status"
}
# libfabric's part of the contract once more, over libfabric 2.x.
over_libfabric2() {
  LLVM_PROFILE_FILE=$target/profiles/libfabric2-%8m.profraw lacks tests/libfabric2.sh \
    "$1" libfabric::tcp:: libfabric::shm_between_processes
}
# The documentation's tests link with the crate as it was built above.
of_documentation() {
  RUSTDOCFLAGS='-C instrument-coverage' cargo test --no-default-features --features cli,c --target-dir "$1" --doc
}
# Runs a program in a way of this script; its output comes when it has ended, or has run for much longer than ever.
ended() {
  local log=$target/logs/$1-$(basename "$2").log status=0
  case $1 in
    alone) timeout -k 10 1200 "$2" ;;
    *) "$1" "$2" ;;
  esac >"$log" 2>&1 || status=$?
  grep -v "^test .* \.\.\. ok$" "$log" || true
  [ "$status" -eq 0 ] || echo "$2 ended with status $status"
  return "$status"
}
export -f lacks in_vm over_libfabric2 of_documentation ended
export target

# Two programs at a time, since most tests wait; those that take longest first.
ways() {
  local name
  for name in transport calls; do sed -n "/\/$name-[^/]*\$/s/^/alone /p" <<<"$programs"; done
  sed -n '/\/verbs-[^/]*$/s/^/in_vm /p' <<<"$programs"
  for name in program proxy tokenyard proxy_quiet; do sed -n "/\/$name-[^/]*\$/s/^/alone /p" <<<"$programs"; done
  sed -n '/\/transport-[^/]*$/s/^/over_libfabric2 /p' <<<"$programs"
  echo "of_documentation $target"
  grep -v -E '/(transport|calls|proxy|program|verbs|tokenyard|proxy_quiet)-[^/]*$' <<<"$programs" | sed 's/^/alone /'
}
# shellcheck disable=SC2016
ways | xargs -P 2 -d '\n' -n 1 bash -c 'set -euo pipefail; ended "${1%% *}" "${1#* }"' bash

objects=("$target/debug/tokenyard")
for program in $programs; do objects+=(--object "$program"); done
# Programs in C run this one.
objects+=(--object "$target/tmp/c/prefix/lib/libtokenyard.so")
"$tools/llvm-profdata" merge -sparse "$target"/profiles/*.profraw -o "$target/all.profdata"
"$tools/llvm-cov" export -format=lcov -instr-profile "$target/all.profdata" "${objects[@]}" >"$target/lines.info"
python3 tests/coverage.py "$target/lines.info" 85
