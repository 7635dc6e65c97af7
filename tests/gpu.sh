#!/usr/bin/env bash
# GPU checks and figures from binaries built beforehand, for machines that have GPUs and no Rust.
#
#   tests/gpu.sh build DIR                    on the build machine: the program and the test programs, stripped, and
#                                             the Python wheel, into DIR
#   tests/gpu.sh run DIR [OUT [SECTION...]]   on the GPU machine: the sections (default: all), with JSON and logs in
#                                             OUT, then one table of their rows, which OUT keeps too
#   tests/gpu.sh program DIR [TREE]           on the build machine: the program alone, and its kernels' registers, into
#                                             DIR; of another checkout of this repository if TREE names one
#   tests/gpu.sh pair A B [PAIR...]           on the GPU machine: the programs of two such folders alternately, A's
#                                             twice, then a table that compares them; the folder that the variable OUT
#                                             names (default: B/pair) keeps it, and JSON and logs in runs.tgz
#
# Sections:  checks     the test programs; every dtype and layout, processes, ranks that share GPUs
#            verify     random configurations, and models' full sizes
#            decode     1, 16 and 128 tokens, on 1, 2, 4 and all GPUs
#            prefill    4096 tokens likewise, and with 24 SMs
#            modes      128 tokens: graph, split, types, layouts, weights, processes; and the stages of calls
#            shapes     128 tokens of each model; skewed and recorded routing
#            sweep      1 to 8192 tokens, with a plot
#            sms        large calls with 8 to all multiprocessors
#            nodes      GPUs as two nodes, and as nodes of one: correctness in several ways, then figures; a GPU that is
#                       alone is shared by four ranks
#            copies     what blocks can move at all, in two ways, and what a poll of host memory takes
#            long       many iterations, small and large
#            libfabric  nodes of one rank over libfabric's tcp, arenas in host memory: two ranks and four, which share a
#                       GPU that is alone
#            sanitizer  compute-sanitizer's memcheck and racecheck on small shapes
#            python     the Python package: its tests, on a GPU that ranks share, under compute-sanitizer, too, and what
#                       its calls cost; needs python3 with pip, torch, numpy and pytest
#            python-nodes  DeepEP's interfaces, of ranks that share a GPU, as two nodes over the simulated network;
#                       needs as much
#            engines    vLLM's and SGLang's own classes over the package, of two ranks, which share a GPU that is alone;
#                       needs as much, the engines' files in the folders that TOKENYARD_VLLM_FOLDER and
#                       TOKENYARD_SGLANG_FOLDER name (`tests/all.sh python` unpacks them into target/engines), and the
#                       packages that they import
#            figures    decode, prefill, modes, shapes and sweep
#
# Pairs:     decode     1 and 128 tokens on all GPUs, eager and in a graph
#            prefill    4096 tokens on all GPUs
#            nodes      1 and 128 tokens between two nodes of one rank each, with emulated NICs; a GPU that is alone has
#                       both
#
# pair's status is 0 if B's p50 is at most 1 % above A's (decode, prefill) or above A's by no more than A differs from
# itself (nodes), and no kernel of B takes more registers or spills more. ROUNDS=N: alternations (7 by default, and at
# least). Their order is mirrored each time, and each build is first, second and third equally often. All rounds have
# SECTION_LIMIT seconds (540; two H100s take 470, of which decode 195: most of it is CUDA's start). DEVICE=cpu: tiny
# calls on the CPU device, to try the script itself.
#
# RANKS=N: ranks of the figures (default: the number of GPUs). A row has at most LIMIT seconds (240), and a section
# SECTION_LIMIT (by section, below); what a section has no time left for fails. SEEDS=N, SEED=S: most configurations of
# verify (200), and the first one's seed (1).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tests/rows.sh
source "$root/tests/rows.sh"

FIGURES=(decode prefill modes shapes sweep)
SECTIONS=(checks verify "${FIGURES[@]}" sms nodes copies long libfabric sanitizer python python-nodes engines)
# Seconds: each fits in ten minutes.
declare -A LIMITS=(
  [checks]=585 [verify]=540 [decode]=400 [prefill]=400 [modes]=480 [shapes]=480 [sweep]=480 [sms]=200 [nodes]=480 [copies]=60 [long]=540
  [libfabric]=240 [sanitizer]=480 [python]=540 [python-nodes]=240 [engines]=540
)

program() {
  local dir=${1:?the folder of the program} tree=${2:-$root} target
  mkdir -p "$dir"
  (cd "$tree" && cargo build --release)
  target=${CARGO_TARGET_DIR:-$tree/target}
  strip -o "$dir/tokenyard" "$target/release/tokenyard"
  rm -f "$dir/ptxas.txt"
  made=$(made_by "$tree")
  [ ! -e "$made/ptxas.txt" ] || cp "$made/ptxas.txt" "$dir/ptxas.txt"
  with_libfabric "$dir/lib"
}

# Copies libfabric and what it needs, but for the C library, where this machine has it: the GPU machine may have none.
with_libfabric() {
  local library
  library=$(/sbin/ldconfig -p | sed -n 's/.*libfabric\.so\.1 .*=> //p' | head -n 1)
  [ -n "$library" ] || return 0
  mkdir -p "$1"
  cp -L "$library" "$1/libfabric.so.1"
  ldd "$library" | awk '$3 ~ "^/" { print $3 }' | grep -v -E '/lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so' |
    xargs -r cp -L -t "$1"
}

# The folder of what build.rs made for a tree's release build, which cargo names; folders of former ones stay beside it.
made_by() {
  (cd "$1" && cargo build --release --message-format=json 2>/dev/null) |
    sed -n 's/.*"static=tokenyard_cpu".*"out_dir":"\([^"]*\)".*/\1/p'
}

build() {
  local dir=${1:?the folder of the binaries} name
  program "$dir"
  rm -f "$dir/calls" "$dir/transport" "$dir/verbs"
  (cd "$root" && cargo test --no-run --test calls --test transport --test verbs 2>&1) |
    sed -n 's/.*Executable tests\/\(.*\)\/main\.rs (\(.*\))/\1 \2/p' |
    while read -r name path; do strip -o "$dir/$name" "$path"; done
  for name in calls transport verbs; do
    if [ ! -x "$dir/$name" ]; then
      echo "tests/gpu.sh: cargo named no test program $name, so none is in $dir" >&2
      return 1
    fi
  done
  wheel
  local nvcc="" commit
  # The nvcc that the kernels were built with, as build.rs noted it.
  [ ! -e "$made/kernels.key" ] || nvcc=$(cut -d ' ' -f 2- "$made/kernels.key")
  commit=$(git -C "$root" rev-parse --short=12 HEAD)
  rm -f "$dir/copies" "$dir/polls"
  if [ -z "$nvcc" ]; then
    echo "tests/gpu.sh: copies and polls are left out, as the kernels were built without nvcc" >&2
    return
  fi
  for name in copies polls; do
    "$nvcc" -O3 -std=c++20 -arch=sm_90a "-DCOMMIT=\"$commit\"" -L "$(dirname "$nvcc")/../lib" \
      -o "$dir/$name" "$root/benches/$name.cu"
  done
}

# Builds the Python package's wheel into DIR, as tests/all.sh does.
wheel() {
  local maturin=$root/.venv-python/bin/maturin folder
  folder=$(realpath "$dir")
  rm -f "$dir"/tokenyard-*.whl
  [ -x "$maturin" ] || maturin=$(command -v maturin) || {
    echo "tests/gpu.sh: the wheel is left out, as maturin is neither in .venv-python nor on PATH" >&2
    return 0
  }
  (cd "$root" && "$maturin" build --release --out "$folder")
}

# A bench whose results are compared in every iteration.
checked() {
  local name=$1
  shift
  check "$name" "$dir/tokenyard" bench --device cuda --check all "$@"
}

# One figure: bench with JSON; a row for each of its results.
figure() {
  local name=$1 status=passed lines
  shift
  rm -f "$out/$name.json"
  bounded "$name" "$dir/tokenyard" bench --device cuda --json "$out/$name.json" "$@" || status=FAILED
  lines=$(python3 "$root/benches/figures.py" lines "$out/$name.json" 2>/dev/null) || lines=$(last_line "$name")
  while read -r line; do note "$name" "$status" "$line"; done <<<"$lines"
}

# The same under one of compute-sanitizer's tools, whose summary must report that nothing was found.
sanitized() {
  local name=$1 tool=$2 summary=$3 start=$SECONDS status=passed
  shift 3
  bounded "$name" "$sanitizer" --tool "$tool" "$dir/tokenyard" bench --device cuda --tokens 16 --hidden 512 --experts 16 \
    --top-k 4 --iters 3 --warmup 1 --check all --timeout-ms 60000 "$@" || status=FAILED
  grep -q "$summary" "$out/$name.log" || status=FAILED
  note "$name" "$status" "$((SECONDS - start)) s  $(grep -a 'SUMMARY' "$out/$name.log" | tail -n 1 || true)"
}

# Worlds to measure: 1, 2, 4 and all, as far as there are GPUs.
worlds() { printf '%s\n' 1 2 4 "$ranks" | sort -nu | while read -r n; do [ "$n" -gt "$gpus" ] || echo "$n"; done; }

section_checks() {
  check device "$dir/transport" device:: --test-threads=4
  # Those of gpu_memory build doubles of libraries, for which a GPU machine may lack headers.
  check memory "$dir/transport" memory:: --skip gpu_memory:: --test-threads=4
  check conformance "$dir/transport" conformance::
  check faults "$dir/calls" faults:: --test-threads=1
  check arena "$dir/calls" arena:: --test-threads=1
  # Ranks that share a GPU need a hardware queue for each of their streams.
  if [ "$gpus" -ge 2 ]; then
    check wide env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" wide::
  else
    note wide skipped "needs 2 GPUs: one has fewer queues than the test has ranks"
  fi
  check contexts env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" contexts:: --test-threads=1
  check aliasing env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" aliasing:: --test-threads=1
  check in_place env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" in_place:: --test-threads=1
  # Those of one node: the simulated network of the others reaches no GPU's memory.
  check counts env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" counts::outputs_have counts::counts_wait \
    counts::a_rank_that counts::unusable counts::an_output counts::counts_that --test-threads=1
  check again env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" again::rows_go_where again::handles_that \
    again::what_cannot --test-threads=1
  check formats env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" one_context::calls_of one_context::any_number \
    one_context::a_format --test-threads=1
  check missing env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" missing:: --skip stops_anywhere --skip nothing_is_stored --skip missing::nodes --test-threads=1
  check payload env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" payload:: --skip between_nodes --skip formats_and_words \
    --test-threads=1
  check ownership env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/calls" ownership:: --test-threads=1
  check overlap "$dir/calls" overlap::graphs_of_another_library
  check gpu_nic env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/transport" gpu_nic::contexts gpu_nic::arenas --test-threads=1
  if [ "$gpus" -ge 3 ]; then check kills "$dir/calls" kills:: --test-threads=1; else note kills skipped "needs 3 GPUs"; fi
  local dtype layout shared=$((2 * gpus))
  for dtype in fp8 bf16 fp16 fp32; do
    for layout in contiguous masked token; do
      checked "bench-$dtype-$layout" --world "$ranks" --dtype "$dtype" --layout "$layout" --tokens 64 --iters 20 --warmup 2
    done
  done
  for dtype in bf16 fp16 fp32; do
    checked "bench-partial-$dtype" --world "$ranks" --combine-dtype "$dtype" --partial fp8 --tokens 64 --iters 20 --warmup 2
  done
  checked processes --world "$gpus" --launch processes --tokens 128 --iters 50 --warmup 5
  # A run on GPUs has at most 16 ranks.
  [ "$shared" -le 16 ] || shared=16
  # Few blocks and many ranks: some blocks are dedicated senders.
  CUDA_DEVICE_MAX_CONNECTIONS=32 checked dedicated-senders --world 8 --sms 12 --tokens 256 --iters 10 --warmup 2
  CUDA_DEVICE_MAX_CONNECTIONS=32 checked in-place --world 8 --sms 12 --tokens 256 --in-place --iters 10 --warmup 2
  checked shared --world "$shared" --tokens 128 --iters 20 --warmup 2
}

section_verify() {
  row_limit=${LIMIT:-440}
  # A configuration takes some 3 s on four GPUs, which twelve ranks share.
  check verify "$dir/tokenyard" verify --device cuda --seed "${SEED:-1}" --seeds "${SEEDS:-200}" \
    --seconds $((row_limit - 30))
  check verify-full "$dir/tokenyard" verify --device cuda --seeds 1 --full
}

section_decode() {
  local n
  for n in $(worlds); do figure "decode-$n" --world "$n" --tokens 1,16,128; done
}

section_prefill() {
  local n
  for n in $(worlds); do figure "prefill-$n" --world "$n" --tokens 4096 --iters 100 --warmup 10; done
  figure "prefill-sms24-$ranks" --world "$ranks" --tokens 4096 --sms 24 --iters 100 --warmup 10
  figure "prefill-sms24-own-$ranks" --world "$ranks" --tokens 4096 --sms 24 --in-place --iters 100 --warmup 10
  # All that an H100 or H200 has: by itself the library takes what is as fast.
  figure "prefill-sms132-$ranks" --world "$ranks" --tokens 4096 --sms 132 --iters 100 --warmup 10
}

section_modes() {
  local decode=(--world "$ranks" --tokens 128)
  figure "decode-graph-$ranks" "${decode[@]}" --mode graph
  figure "decode-split-$ranks" "${decode[@]}" --mode split
  figure "decode-bf16-$ranks" "${decode[@]}" --dtype bf16
  figure "decode-masked-$ranks" "${decode[@]}" --layout masked
  figure "decode-token-$ranks" "${decode[@]}" --layout token
  figure "decode-weights-$ranks" "${decode[@]}" --weights combine
  figure "decode-quantize-$ranks" "${decode[@]}" --quantize
  figure "decode-mixed-$ranks" "${decode[@]}" --mixed
  figure "decode-missing-$ranks" "${decode[@]}" --missing able
  figure "decode-payload-$ranks" "${decode[@]}" --payload 1
  figure "decode-gathered-$ranks" "${decode[@]}" --payload 1 --gather
  figure "decode-dispatch-payload-$ranks" "${decode[@]}" --dispatch-payload 8
  figure "decode-partial-fp8-$ranks" --world "$ranks" --tokens 1,16,128 --partial fp8
  figure "prefill-partial-fp8-$ranks" --world "$ranks" --tokens 4096 --iters 100 --warmup 10 --partial fp8
  figure "decode-processes-$ranks" "${decode[@]}" --launch processes
  figure "stages-$ranks" --world "$ranks" --tokens 1,128,4096 --iters 40 --stages
}

section_shapes() {
  local preset trace=$root/tests/data/text-256x8-excerpt.safetensors
  # v3 at 4096 tokens is prefill's.
  for preset in v3 kimi-k2 qwen3-235b gpt-oss-120b mixtral-8x22b; do
    figure "decode-$preset-$ranks" --world "$ranks" --tokens 128 --preset "$preset"
  done
  figure "decode-zipf-$ranks" --world "$ranks" --tokens 128 --routing zipf:1.0
  figure "decode-text-$ranks" --world "$ranks" --tokens 128 --routing "file:$trace"
}

# Buffers are those of the largest call throughout, and comparing takes seconds.
section_sweep() {
  figure "sweep-$ranks" --world "$ranks" --tokens 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192 --iters 100 --warmup 10 \
    --check first --plot "$out/sweep-$ranks.svg"
}

# Of one rank, with all choices of a token and with as few as a rank of eight has of it. What is kept is one file.
section_sms() {
  local sms large=(--world 1 --iters 60 --warmup 10 --check first) parts=()
  for sms in 8 16 24 48 96 132; do
    figure "sms$sms-v3" "${large[@]}" --tokens 4096 --sms "$sms"
    figure "sms$sms-few" "${large[@]}" --tokens 16384 --experts 32 --top-k 2 --sms "$sms"
    parts+=("$out/sms$sms-v3.json" "$out/sms$sms-few.json")
  done
  python3 "$root/benches/figures.py" merge "$out/sms-1.json" "${parts[@]}" && rm -f "${parts[@]}"
}

section_nodes() {
  # Four ranks share a GPU that is alone.
  local world=$((gpus < 2 ? 4 : gpus)) place
  local halves=(--world "$world" --ranks-per-node "$((world / 2)),$((world - world / 2))")
  local alone=(--world "$world" --ranks-per-node 1)
  # The processor moves what goes between them, then emulated NICs do.
  for place in host device; do
    checked "nodes-$place" "${halves[@]}" --arena "$place" --tokens 64 --iters 20 --warmup 2
  done
  # Rows between nodes kept once, as in large arenas; ranks that are alone in their node.
  checked nodes-single "${halves[@]}" --single-buffer --tokens 64 --iters 20 --warmup 2
  checked nodes-alone "${alone[@]}" --tokens 64 --iters 20 --warmup 2
  checked nodes-missing "${halves[@]}" --missing one --tokens 64 --iters 20 --warmup 2
  checked nodes-able "${halves[@]}" --missing able --link cx7 --tokens 64 --iters 20 --warmup 2
  checked rounds "${halves[@]}" --tokens 500 --round-tokens 150 --iters 10 --warmup 2
  figure "decode-nodes-$world" "${halves[@]}" --tokens 1,16,128
  figure "decode-nodes-cx7-$world" "${halves[@]}" --tokens 1,16,128 --link cx7
  figure "decode-nodes-missing-$world" "${halves[@]}" --tokens 128 --link cx7 --missing able
  figure "decode-${world}x1-cx7" "${alone[@]}" --tokens 1,16,128 --link cx7
  figure "stages-nodes-cx7-$world" "${halves[@]}" --tokens 1,128 --iters 40 --link cx7 --stages
}

section_copies() {
  local program name
  for program in copies polls; do
    name=$program-$gpus
    if [ ! -x "$dir/$program" ]; then
      note "$name" skipped "needs the program $program, which is built where nvcc is"
    elif rm -f "$out/$name.json" && bounded "$name" "$dir/$program" && grep -q '"way"' "$out/$name.log"; then
      cp "$out/$name.log" "$out/$name.json"
      note "$name" passed "$(grep -c '"way"' "$out/$name.json") rows in $name.json"
    else
      note "$name" FAILED "$(last_line "$name")"
    fi
  done
}

section_long() {
  row_limit=${LIMITS[long]}
  figure "long-ragged-$ranks" --world "$ranks" --ragged --hidden 256 --tokens 32 --iters 100000 --check 16
  figure "long-v3-$ranks" --world "$ranks" --tokens 128 --iters 5000 --check 16
}

section_libfabric() {
  local world
  # Ranks that share a GPU need a hardware queue for each of their streams.
  export CUDA_DEVICE_MAX_CONNECTIONS=32
  [ ! -e "$dir/lib/libfabric.so.1" ] || export LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  for world in 2 4; do
    local alone=(--world "$world" --ranks-per-node 1 --transport libfabric:tcp --arena host)
    checked "libfabric-tcp-$world" "${alone[@]}" --tokens 64 --ragged --iters 20 --warmup 2
    # Processes share no GPU.
    [ "$gpus" -lt "$world" ] ||
      checked "libfabric-processes-$world" "${alone[@]}" --launch processes --tokens 64 --iters 20 --warmup 2
    figure "decode-${world}x1-tcp" "${alone[@]}" --tokens 1,16,128 --iters 200
  done
}

section_sanitizer() {
  local sanitizer
  if ! sanitizer=$(PATH="$PATH:/usr/local/cuda/bin" command -v compute-sanitizer); then
    note sanitizer skipped "needs compute-sanitizer, of the CUDA toolkit"
    return
  fi
  row_limit=${LIMITS[sanitizer]}
  sanitized memcheck-1 memcheck "ERROR SUMMARY: 0 errors" --world 1
  sanitized racecheck-1 racecheck "RACECHECK SUMMARY: 0 hazards" --world 1
  if [ "$gpus" -ge 2 ]; then
    sanitized memcheck-2 memcheck "ERROR SUMMARY: 0 errors" --world 2
  else
    note memcheck-2 skipped "needs 2 GPUs"
  fi
}

# Installs the wheel for a section, by its name; `run` and `pytest` are then the beginnings of its commands. The
# GPU machine may have no network, so the wheel is installed into a folder, without what it needs.
install_wheel() {
  local wheel missing
  wheel=$(printf '%s\n' "$dir"/tokenyard-*.whl | head -n 1)
  if [ ! -e "$wheel" ]; then
    note "$1" skipped "needs the wheel, which build makes where maturin is"
    return 1
  fi
  if ! missing=$(python3 -c 'import numpy, pip, pytest, torch; assert torch.cuda.is_available(), "torch sees no GPU"' 2>&1); then
    note "$1" skipped "needs python3 with pip, torch, numpy and pytest: $(tail -n 1 <<<"$missing")"
    return 1
  fi
  row_limit=${LIMIT:-300}
  site=$(mktemp -d)
  check install python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheel"
  # Ranks share a GPU, as in tests/python/test_gpu.py.
  run=(env PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER)
  pytest=("${run[@]}" python3 -m pytest -q -rs -p no:cacheprovider --rootdir "$root")
}

section_python() {
  local site sanitizer run pytest
  install_wheel python || return 0
  check tests-gpu "${pytest[@]}" "$root/tests/python/test_gpu.py"
  check tests env TOKENYARD_TEST_DEVICE=cpu "${pytest[@]}" "$root/tests/python" --ignore "$root/tests/python/test_gpu.py"
  # Operators and DeepEP's interface on the GPU, too.
  check tests-on-gpu env TOKENYARD_TEST_DEVICE=cuda "${pytest[@]}" "$root"/tests/python/test_{ops,eager,low_latency,deep_ep,elastic,hybrid}.py
  check compare "${run[@]}" python3 "$root/benches/compare.py" --world 1 --experts 8 --tokens 16 --hidden 1024 --top-k 2 --rounds 2 \
    --json "$out/compare.json"
  check cost "${run[@]}" python3 "$root/benches/python_cost.py" --json "$out/python-cost.json"
  if sanitizer=$(PATH="$PATH:/usr/local/cuda/bin" command -v compute-sanitizer); then
    # Each tensor is an allocation of its own, so that stores beside it are found. Kernels of torch load when used.
    check memcheck env PYTHONPATH="$site" TOKENYARD_TEST_DEVICE=cuda CUDA_MODULE_LOADING=LAZY PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool memcheck \
      --error-exitcode 9 --kernel-name kernel_substring=ty_ python3 -m pytest -q -p no:cacheprovider --rootdir "$root" \
      -k "test_sanitized and (cuda or drop)" "$root/tests/python/test_gpu.py" "$root/tests/python/test_drop.py"
  else
    note memcheck skipped "needs compute-sanitizer, of the CUDA toolkit"
  fi
  rm -rf "$site"
}

section_python-nodes() {
  local site run pytest
  install_wheel python-nodes || return 0
  check tests-on-gpu-nodes env TOKENYARD_TEST_DEVICE=cuda TOKENYARD_TEST_THREADS_OF_NODES=2 TOKENYARD_NETWORK=simulated \
    "${pytest[@]}" "$root"/tests/python/test_{deep_ep,elastic,hybrid}.py
}

section_engines() {
  local site run pytest engine folder
  install_wheel engines || return 0
  for engine in vllm vllm_native sglang; do
    folder=TOKENYARD_$(tr '[:lower:]' '[:upper:]' <<<"${engine%_native}")_FOLDER
    if [ -d "${!folder:-$root/target/engines/${engine%_native}}" ]; then
      check "$engine" env TOKENYARD_TEST_DEVICE=cuda TOKENYARD_STRICT=1 "${pytest[@]}" "$root/tests/python/test_$engine.py"
    else
      note "$engine" skipped "needs the engine's files in a folder that $folder names"
    fi
  done
  rm -rf "$site"
}

# The options of a pair's rows, a line each after the row's name.
pair_rows() {
  local small="" many=4096 prefill="--iters 60 --warmup 10"
  if [ "$device" = cpu ]; then small="--hidden 128 --experts 8 --top-k 2 --iters 3" many=64 prefill=""; fi
  local decode="--tokens 1,128 --check first $small" name
  for name in "$@"; do
    case $name in
      decode)
        echo "decode-$ranks --world $ranks $decode"
        echo "decode-graph-$ranks --world $ranks --mode graph $decode"
        ;;
      prefill) echo "prefill-$ranks --world $ranks --tokens $many --check first $prefill $small" ;;
      nodes) echo "nodes-2x1-cx7 --world 2 --ranks-per-node 1 --link cx7 $decode" ;;
      *)
        echo "tests/gpu.sh: there is no pair $name; give some of decode, prefill, nodes" >&2
        return 1
        ;;
    esac
  done
}

# Two builds alternately, so that whatever drifts meanwhile is the same for both. Alternations are the outer loop.
pair() {
  local a=${1:?the folder of build A} b=${2:?the folder of build B} device=${DEVICE:-cuda} rounds=${ROUNDS:-7}
  local orders=("a b e" "e b a" "b e a" "a e b" "e a b" "b a e") round row name options build from status=0
  local section=pair deadline row_limit=${LIMIT:-60} gpus=2 ranks rows
  shift 2
  [ $# -gt 0 ] || set -- decode prefill nodes
  if [ "$device" = cuda ]; then
    if [ "$rounds" -lt 7 ]; then
      echo "tests/gpu.sh: ROUNDS is $rounds: fewer than 7 alternations show too little; leave it, or set DEVICE=cpu" >&2
      return 2
    fi
    gpus=$(nvidia-smi -L | wc -l)
  fi
  ranks=${RANKS:-$gpus}
  rows=$(pair_rows "$@")
  out=${OUT:-$b/pair}
  mkdir -p "$out"
  rm -f "$out"/*.[abe].json "$out"/*.[abe].log "$out/table-pair.txt" "$out/runs.tgz"
  LIMITS[pair]=${SECTION_LIMIT:-540}
  deadline=$((SECONDS + LIMITS[pair]))
  # Ranks that share a GPU need a hardware queue for each of their streams.
  export CUDA_DEVICE_MAX_CONNECTIONS=32
  for round in $(seq "$rounds"); do
    while read -r name options; do
      for build in ${orders[$(((round - 1) % 6))]}; do
        from=$a
        [ "$build" != b ] || from=$b
        row=$name.$round.$build
        # shellcheck disable=SC2086
        bounded "$row" "$from/tokenyard" bench --device "$device" --json "$out/$row.json" $options </dev/null ||
          echo "$row FAILED: $(last_line "$row")"
      done
    done <<<"$rows"
  done
  {
    echo "A: $a  B: $b  $rounds alternations, $SECONDS s"
    [ "$device" != cuda ] || echo "$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
    # The CPU device's kernels have no registers to count.
    if [ "$device" = cuda ]; then set -- "$a/ptxas.txt" "$b/ptxas.txt"; else set --; fi
    python3 "$root/benches/pairs.py" "$out" "$rounds" "$(cut -d ' ' -f 1 <<<"$rows" | paste -sd ,)" "$@"
  } >"$out/table-pair.txt" || status=$?
  cat "$out/table-pair.txt"
  # What brings results back may take few files.
  (cd "$out" && tar -czf runs.tgz -- *.[abe].* && rm -f -- *.[abe].json *.[abe].log)
  return "$status"
}

# The sections that were asked for, groups spelt out; all of them by default.
chosen() {
  local name
  [ $# -gt 0 ] || set -- "${SECTIONS[@]}"
  for name in "$@"; do
    if [ "$name" = figures ]; then
      printf '%s\n' "${FIGURES[@]}"
    elif [ -n "${LIMITS[$name]:-}" ]; then
      echo "$name"
    else
      echo "tests/gpu.sh: there is no section $name; give some of ${SECTIONS[*]}, or figures" >&2
      return 1
    fi
  done
}

run() {
  local names section table deadline row_limit tables=()
  dir=${1:?the folder of the binaries}
  out=${2:-$dir/out}
  [ $# -lt 2 ] || shift
  shift
  names=$(chosen "$@")
  mkdir -p "$out"
  gpus=$(nvidia-smi -L | wc -l)
  ranks=${RANKS:-$gpus}
  export TOKENYARD_TEST_DEVICE=cuda
  for section in $names; do
    LIMITS[$section]=${SECTION_LIMIT:-${LIMITS[$section]}}
    deadline=$((SECONDS + LIMITS[$section]))
    row_limit=${LIMIT:-240}
    table=$out/table-$section.txt
    tables+=("$table")
    : >"$table"
    "section_$section"
  done
  printf '\n%s x %s\n' "$gpus" "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
  cat "${tables[@]}"
  # 1: there is none in all of the tables. 2: one of them cannot be read.
  local status=0
  grep -q ' FAILED ' "${tables[@]}" || status=$?
  [ "$status" -eq 1 ]
}

case ${1:-} in
  build | run | program | pair)
    mode=$1
    shift
    "$mode" "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/p;}' "$0" >&2
    exit 2
    ;;
esac
