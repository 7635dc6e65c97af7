#!/usr/bin/env bash
# Everything: installs what it needs into .venv, then formatting, links, lints, builds, tests, seeded schedules,
# sanitizers, mutants and coverage. Needs Rust, a C++ compiler and Python 3. Options: names of steps to run alone.
#
# What the machine lacks for some tests is printed as skipped, and once more at the end. TOKENYARD_STRICT=1: it fails.
# TOKENYARD_STRICT=auto: it fails where setup found or installed all of it.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(format lint build driver doubles python unit model coverage verify sanitize mutants)
steps=("$@")
lacking=()
started=$SECONDS
# Nothing is built twice here, but for mutants, which set it themselves.
export CARGO_INCREMENTAL=0
export TOKENYARD_OBJECTS=$PWD/target/objects
# torch is compiled as it is imported for the first time, and hundreds of processes import it.
unset PYTHONDONTWRITEBYTECODE
lint_ahead=
ahead=
packages_ahead=
sanitized_ahead=
coverage_ahead=
for step in "${steps[@]}"; do
  if [[ " ${all[*]} " != *" $step "* ]]; then
    echo "tests/all.sh has no step $step: name some of ${all[*]}" >&2
    exit 2
  fi
done

say() { printf '\n== %s  [%d s]\n' "$*" $((SECONDS - started)); }

wanted() {
  local step
  for step in "${steps[@]}"; do [ "$step" = "$1" ] && return 0; done
  return 1
}

# Prints what is missing, or installs it where it may.
need() {
  local command=$1 package=$2
  command -v "$command" >/dev/null && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq "$package" >/dev/null
  fi
  if ! command -v "$command" >/dev/null; then
    echo "tests/all.sh needs $command: install Debian's package $package" >&2
    exit 1
  fi
}

# Gets what some tests need, by the rest of the arguments. Without it they are skipped, or fail if TOKENYARD_STRICT=1.
want() {
  local what=$1 status=0
  shift
  "$@" || status=$?
  [ "$status" -ne 0 ] || return 0
  [ "${TOKENYARD_STRICT:-}" != 1 ] || return 1
  lacking+=("$what")
}

# Installs a package of headers where it may.
header() {
  local header=$1 package=$2
  [ -e "$header" ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq "$package" >/dev/null; } || true
  fi
  [ -e "$header" ] && return 0
  echo "tests/all.sh lacks $header: install Debian's package $package" >&2
  return 1
}

# Installs a program where it may.
program() {
  local command=$1 package=$2
  command -v "$command" >/dev/null && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq "$package" >/dev/null; } || true
  fi
  command -v "$command" >/dev/null && return 0
  echo "tests/all.sh lacks $command: install Debian's package $package" >&2
  return 1
}

# Removes what no later step needs, where little room is left: all that this makes takes 10 GB.
room() {
  [ "$(df --output=avail -B 1G . | tail -1)" -ge 8 ] || rm -rf "$@"
}

# Makes the VM, and looks whether it runs here.
boots() { env -u TOKENYARD_STRICT tests/verbs/vm.sh --setup && env -u TOKENYARD_STRICT tests/verbs/vm.sh true; }

# What all steps need.
compilers() {
  need cargo cargo
  need g++ g++
  need python3 python3
}

setup() {
  say "setup"
  # Headers that bindings are compared with, and the libraries themselves.
  want "libfabric and its headers" header /usr/include/rdma/fabric.h libfabric-dev
  want "libibverbs and its headers" header /usr/include/infiniband/mlx5dv.h libibverbs-dev
  # Compilers of programs that use the C interface.
  want "clang" program clang clang
  want "pkg-config" program pkg-config pkg-config
  # QEMU and a kernel with soft-RoCE, in which the network over verbs is tested. What lacks is printed there.
  want "the VM with soft-RoCE" boots
  if [ ! -x .venv/bin/pip ]; then
    python3 -m venv .venv 2>/dev/null || { need pip3 python3-venv; python3 -m venv .venv; }
  fi
  # nvcc (the metapackage, since its parts alone do not fit each other), clang-format and libclang, all pinned.
  .venv/bin/pip install -q --disable-pip-version-check \
    'cuda-toolkit[nvcc,cudart,cccl]==13.0.*' 'clang-format==14.0.6' 'libclang==18.1.1'
  LIBCLANG_PATH=$(echo "$PWD"/.venv/lib/python3.*/site-packages/clang/native)
  export LIBCLANG_PATH
  want "libfabric 2.x" env -u TOKENYARD_STRICT tests/libfabric2.sh --setup
  case ${TOKENYARD_STRICT:-} in
    auto) if [ ${#lacking[@]} -eq 0 ]; then export TOKENYARD_STRICT=1; else unset TOKENYARD_STRICT; fi ;;
  esac
}

format() {
  say "formatting, links, and the table of mutants"
  python3 tests/links.py
  python3 tests/mutants.py --check
  python3 tests/python_mutants.py --check
  cargo fmt --all --check
  find kernels benches tests/c -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.cpp' -o -name '*.c' |
    xargs .venv/bin/clang-format --dry-run -Werror
}

# Clippy and rustdoc link nothing, so no kernels are built for them, and they need nothing of the setup.
lints() {
  local -x TOKENYARD_LINT=1
  cargo clippy --workspace --all-targets --features tokenyard/c -- -D warnings
  # Without GPUs the library and the program differ, tests do not.
  cargo clippy --no-default-features --features cli --lib --bins -- -D warnings
  # The library alone.
  cargo clippy --no-default-features --lib -- -D warnings
  local tree
  tree=$(cargo tree -e normal --no-default-features --prefix none)
  if grep -E '^(clap|serde|env_logger)' <<<"$tree"; then
    echo "the library by itself depends on what the program alone needs" >&2
    return 1
  fi
  RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --lib --features c
}

# Runs a command beside what follows, in a process group of its own. Arguments: the variable that keeps its number, the
# file in target/ for what it writes, and the command.
beside() {
  local number=$1 log=target/$2
  mkdir -p target
  set -m
  "${@:3}" </dev/null >"$log" 2>&1 &
  set +m
  printf -v "$number" %s $!
}

# Waits for what runs beside, if it was begun; its status is the command's.
ended() {
  local process=${!1}
  printf -v "$1" ''
  [ -z "$process" ] || wait "$process"
}

lint() {
  say "lints"
  local status=0
  ended lint_ahead || status=$?
  cat target/lints.log
  return "$status"
}

# The release build; where the Python package is made, too, with its crate, so that its wheel builds nothing of the
# library again. Symbols of the interpreter stay open, as in the wheel.
release=(env TOKENYARD_STRICT=1 PYO3_BUILD_EXTENSION_MODULE=1 cargo build --release)

# The release build, with its time, nvcc's, and the registers of the GPU kernels; fails if one spills, or none was
# built.
build() {
  say "release build"
  if [ -n "$ahead" ]; then
    # The tests that coverage counts, beside the release build, which keeps one core busy, and what follows.
    if wanted coverage; then beside coverage_ahead coverage-build.log nice -n 19 bash tests/coverage.sh --build; fi
    ended ahead || true # the next line says why
    cat target/release-build.log
  fi
  time "${release[@]}"
  local report
  # Cargo names the folder of this build; folders of former ones stay beside it.
  report=$("${release[@]}" --message-format=json 2>/dev/null |
    sed -n 's/.*"static=tokenyard_cpu".*"out_dir":"\([^"]*\)".*/\1/p')/ptxas.txt
  cat "$report"
  # Columns: kernel, architecture, registers, stack, spilled stores, spilled loads.
  awk 'NR > 1 && ($5 > 0 || $6 > 0) { print "spills: " $0; bad = 1 } END { exit bad || NR < 2 }' "$report"
}

unit() {
  say "Rust tests"
  cargo test --features c
}

# The flags between a proxy's thread and its callers, in all orders; coverage runs this test, too. Builds without GPUs
# share a folder, and so what they depend on.
model() {
  say "loom's model of the proxy's mailbox"
  CARGO_PROFILE_DEV_DEBUG=0 cargo test --no-default-features --target-dir target/coverage --test loom
}

# The release program with a driver that is too old: a C++ compiler makes a stand-in for the functions it needs.
driver() {
  say "a driver that is too old"
  local folder=target/old-driver
  mkdir -p "$folder"
  printf 'extern "C" int cuDriverGetVersion(int *version) { *version = 12080; return 0; }\n' |
    g++ -shared -fPIC -x c++ -o "$folder/libcuda.so.1" -
  LD_LIBRARY_PATH=$folder target/release/tokenyard doctor | grep "offers CUDA 12.8: .* update the driver to version 580"
}

# The doubles that networks are held to: each of their rules is shown to fire.
doubles() {
  local folder=target/doubles flags=(-std=c11 -O1 -g -Wall -Wextra -Werror)
  local shared=("${flags[@]}" -fvisibility=hidden -shared -fPIC)
  mkdir -p "$folder"
  say "the double of EFA"
  if [ -e /usr/include/rdma/fabric.h ]; then
    gcc "${shared[@]}" -o "$folder/libefa_double.so" \
      tests/doubles/efa{,_objects,_regions,_queues,_endpoint,_post,_link,_wire}.c
    gcc "${flags[@]}" -o "$folder/efa_rules" tests/doubles/efa_rules{,_memory,_rig}.c -ldl
    "$folder/efa_rules" "$folder/libefa_double.so"
  else
    echo "skipped: /usr/include/rdma/fabric.h is missing"
  fi
  say "the double of libibverbs"
  if [ ! -e /usr/include/infiniband/mlx5dv.h ]; then
    echo "skipped: /usr/include/infiniband/mlx5dv.h is missing"
    return
  fi
  local ibverbs=(tests/doubles/ibverbs{,_regions,_queues}.c) libraries
  libraries=("$folder"/{libibverbs_double,libmlx5_double,libibverbs_first_double,libmlx5_first_double}.so)
  gcc "${shared[@]}" -o "${libraries[0]}" "${ibverbs[@]}"
  gcc "${shared[@]}" -o "${libraries[1]}" tests/doubles/ibverbs_mlx5.c
  gcc "${shared[@]}" -DIBVERBS_1_1 -o "${libraries[2]}" "${ibverbs[@]}"
  gcc "${shared[@]}" -DMLX5_BEFORE_54 -o "${libraries[3]}" tests/doubles/ibverbs_mlx5.c
  gcc "${flags[@]}" -o "$folder/ibverbs_rules" tests/doubles/ibverbs_rules.c -ldl
  "$folder/ibverbs_rules" "${libraries[@]}"
}

# Installs packages into an environment of Python, which it makes. Files are compiled as they are imported, as few are.
from_pypi() {
  local environment=$1
  [ -x "$environment/bin/pip" ] || python3 -m venv "$environment"
  "$environment/bin/pip" install -q --no-compile --disable-pip-version-check "${@:2}"
}

# Installs torch into an environment: without its CUDA libraries, which take 4 GB, where there is no GPU to use them.
# Arguments: the environment, what pip is to install, and options of tests/torch_for_cpu.py.
torch() {
  local whole=()
  if [ ! -e /dev/nvidiactl ]; then
    "$1/bin/python" tests/torch_for_cpu.py "${@:2}" && return 0
    # What is there no longer names all that it requires.
    whole=(--force-reinstall)
  fi
  "$1/bin/pip" install -q --no-compile --disable-pip-version-check "${whole[@]}" "$2"
}

# The files of an engine's wheel but its libraries, without what it depends on, into target/engines/NAME. Wheels for
# several versions of Python have the same ones.
engine() {
  local name=$1 version=$2 platform=$3 folder=target/engines/$1
  [ "$(cat "$folder/version" 2>/dev/null)" != "$version" ] || return 0
  .venv-python/bin/pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 \
    --platform "$platform" -d "$folder-wheel" "$name==$version" || return
  rm -rf "$folder"
  .venv-python/bin/python - "$folder" "$folder-wheel/$name-$version"-*.whl <<'END' || return
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[2])
wheel.extractall(sys.argv[1], [name for name in wheel.namelist() if not name.endswith(".so")])
END
  rm -rf "$folder-wheel"
  echo "$version" >"$folder/version"
}

# SGLang, which is for Python 3.11 and later, and the packages that its import needs.
sglang() {
  from_pypi .venv-python dill msgspec orjson pillow psutil pydantic && engine sglang 0.5.23 manylinux_2_34_x86_64
}

# vLLM likewise.
vllm() {
  from_pypi .venv-python cloudpickle msgspec packaging psutil pydantic pyyaml regex tqdm urllib3 &&
    engine vllm 0.33.0 manylinux_2_28_x86_64
}

# What tests of the Python package need: the newest torch, and in an environment of its own the oldest that is
# supported; and engines whose layers run over the package. torch brings its own CUDA.
packages() {
  from_pypi .venv-python 'maturin>=1.9,<2' mypy numpy pytest 'setuptools>=70.1'
  want "torch from PyPI" torch .venv-python torch
  want "transformers from PyPI" from_pypi .venv-python transformers accelerate
  want "megatron-core from PyPI" from_pypi .venv-python 'megatron-core>=0.16.1,<0.20'
  if .venv-python/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    want "SGLang from PyPI" sglang
    want "vLLM from PyPI" vllm
  else
    lacking+=("SGLang, which is for Python 3.11 and later, and vLLM")
  fi
  from_pypi .venv-python-oldest numpy pytest
  want "torch 2.6 from PyPI" torch .venv-python-oldest 'torch==2.6.*' --without triton
}

# For downloads beside lints and builds.
packages_or_not() {
  unset TOKENYARD_STRICT
  packages
}

# Runs pytest, which ends with 5 where all tests of a file are skipped.
skippable() {
  local status=0
  "$@" || status=$?
  [ "$status" -eq 0 ] || { [ "$status" -eq 5 ] && [ "${TOKENYARD_STRICT:-}" != 1 ]; }
}
export -f skippable

# The Python tests in parts, a command each, of which the first takes longest.
parts() {
  local long=(hosts bench errors elastic vllm transformers comparisons deep_ep hybrid nodes sglang)
  local all rest name
  all=$(cd tests/python && printf '%s\n' test_*.py)
  rest=$(grep -v -x -F -f <(printf 'test_%s.py\n' "${long[@]}") <<<"$all" | sed 's#^#tests/python/#')
  echo "$1 $(tr '\n' ' ' <<<"$rest")"
  for name in "${long[@]}"; do echo "$1 tests/python/test_$name.py"; done
}

# The Python package: a wheel, its types, and its tests.
python() {
  say "the Python package"
  ended packages_ahead || true # what follows says why
  packages
  .venv-python/bin/pip list --disable-pip-version-check 2>/dev/null | grep -i -E '^(torch|transformers|megatron.core) ' || true
  if wanted sanitize; then
    beside sanitized_ahead sanitized-build.log nice -n 19 "${sanitized_build[@]}" --jobs 1
  fi
  rm -rf target/wheels
  TOKENYARD_STRICT=1 .venv-python/bin/maturin build --release -i .venv-python/bin/python --out target/wheels
  ls -l target/wheels
  .venv-python/bin/pip install -q --disable-pip-version-check --force-reinstall --no-deps target/wheels/tokenyard-*.whl
  # Two processes at a time, since most tests wait; those that take longest first. The last ones are engines between two
  # nodes, the oldest torch, and types. What is in single quotes is for the shell of each command.
  # shellcheck disable=SC2016
  local nodes='PYTHONPATH=$PWD/tests/python/nodes TOKENYARD_TEST_NODES=2 TOKENYARD_NETWORK=simulated'
  local pytest="skippable .venv-python/bin/python -m pytest -q -rs -p no:cacheprovider"
  {
    parts "$pytest"
    echo "TOKENYARD_TEST_THREADS_OF_NODES=2 TOKENYARD_NETWORK=simulated $pytest tests/python/test_{deep_ep,elastic,hybrid}.py"
    for engine in sglang vllm; do echo "$nodes $pytest tests/python/test_$engine.py"; done
    if .venv-python-oldest/bin/python -c 'import torch; print("torch", torch.__version__)' >&2; then
      .venv-python-oldest/bin/pip install -q --disable-pip-version-check --force-reinstall --no-deps target/wheels/tokenyard-*.whl
      echo ".venv-python-oldest/bin/python -m pytest -q -rs -p no:cacheprovider tests/python/test_{torch,ops,dlpack,formats}.py"
    fi
    # One after the other, as they share a cache.
    echo ".venv-python/bin/mypy && .venv-python/bin/python -m mypy.stubtest tokenyard._native"
  } | two_at_a_time
  # One of fourteen, since CI has little time; without options it runs all.
  python3 tests/python_mutants.py --one-in 14
}

# Runs the commands of stdin, a line each, of which each keeps about one core busy; prints what each wrote once it has
# ended.
two_at_a_time() {
  # shellcheck disable=SC2016
  xargs -P 2 -I '{}' bash -c 'status=0; text=$(exec 2>&1; {}) || status=$?; printf "%s\n%s\n" "{}" "$text"; exit $status'
}

# The CPU build of the kernels and the executor under AddressSanitizer and UndefinedBehaviorSanitizer. It is in a folder
# of its own, since it is built beside the Python package's tests: g++ takes most of the time, on one core. It optimises
# little, which takes half the time of a build that optimises more, and what runs takes as long.
sanitized_build=(env TOKENYARD_SANITIZE=address,undefined CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0
  cargo build --no-default-features --features cli --target-dir target/sanitized)
release_verify='target/release/tokenyard verify'
sanitized_verify='env ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 target/sanitized/debug/tokenyard verify'

# Random configurations with every pair of values, and full-size ones; a rank has a thread.
release_worlds() { printf "$release_verify %s\n" "--seeds 500" "--seeds 1 --full"; }
sanitized_worlds() { echo "$sanitized_verify --seeds 60"; }

# Seeded schedules of worlds of one thread: how many as they come, with output in place, and with messages that are
# tampered with.
schedules() {
  printf "$1 --schedules %s\n" "$2" "$3 --in-place" "$4 --forge --timeout-ms 1000"
}
release_schedules() { schedules "$release_verify" 2000 500 500; }

# The last three: more ranks of a node, and more nodes, than verify draws and a word has bits.
sanitized_schedules() {
  local world='hidden=16,sms=2,world_mode=one-thread,experts=48,top_k=3,tokens=2,max_tokens=2,iters=2'
  schedules "$sanitized_verify" 60 60 250
  printf "$sanitized_verify --timeout-ms 60000 --replay %s,$world\n" world=40 world=40,fault=overflow \
    "world=48,nodes=$(printf '1+%.0s' {1..46})2"
}

# What of all this is wanted. Commands run while those behind them are built.
worlds() {
  if wanted verify; then
    release_worlds
    release_schedules
  fi
  if wanted sanitize; then
    nice -n 19 "${sanitized_build[@]}" >&2
    sanitized_worlds
    sanitized_schedules
  fi
}

# The sanitizers run here, too: what takes long begins first, and no core waits for the other between the two steps.
verify() {
  say "verify, schedules, messages that are tampered with, and sanitizers"
  ended sanitized_ahead || true # what follows says why
  worlds | two_at_a_time
}

sanitize() { wanted verify || verify; }

# One of a hundred and forty-four, since CI has little time and each takes a minute; python3 tests/mutants.py runs all,
# and with --resume those that were not seen caught as they stand.
mutants() {
  say "mutants"
  python3 tests/mutants.py --one-in 144
}

# All Rust tests, with every line counted.
coverage() {
  say "Rust tests with coverage"
  ended coverage_ahead || true # what follows says why
  bash tests/coverage.sh
}

# The Rust tests run once: under coverage, unless they are asked for alone.
if [ ${#steps[@]} -eq 0 ]; then steps=(format lint build driver doubles python coverage verify sanitize mutants); fi
if wanted python; then release+=(--workspace); fi
compilers
# Beside the setup, which downloads, boots and uses one core at the most.
if wanted lint; then beside lint_ahead lints.log lints; fi
# What was begun ahead, and was not waited for yet, does not outlive a step that fails.
end_all() {
  local process
  for process in $lint_ahead $ahead $packages_ahead $sanitized_ahead $coverage_ahead; do
    kill -- "-$process" 2>/dev/null || true
  done
}
trap end_all EXIT
setup
# The release build uses one core for most of its time.
if wanted lint && wanted build; then beside ahead release-build.log "${release[@]}"; fi
if wanted lint && wanted python; then beside packages_ahead python-packages.log packages_or_not; fi
for step in "${all[@]}"; do
  if wanted "$step"; then "$step"; fi
  case $step in
    lint) room target/debug target/doc ;;
    python) room .venv-python-oldest target/python-mutants ;;
    sanitize) room target/sanitized ;;
  esac
done
for what in "${lacking[@]}"; do echo "skipped, since this machine lacks it: the tests that need $what"; done
say "all passed${TOKENYARD_STRICT:+, and none was skipped}"
