#!/usr/bin/env bash
# GPU checks from binaries built beforehand, for machines that have GPUs and no Rust.
#
#   tests/gpu.sh build DIR          on the build machine: the program and the test programs, stripped, into DIR
#   tests/gpu.sh run DIR [OUT]      on the GPU machine: every check, then figures as JSON into OUT, then one table
#
# RANKS=N overrides the number of ranks of the figures (default: the number of GPUs).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mode=${1:?build or run}
dir=${2:?the folder of the binaries}

build() {
  mkdir -p "$dir"
  (cd "$root" && cargo build --release)
  (cd "$root" && cargo test --no-run --test device --test memory --test faults --test conformance --test kills \
    --test arena --test gpu_nic 2>&1) |
    sed -n 's/.*Executable tests\/\(.*\)\.rs (\(.*\))/\1 \2/p' |
    while read -r name path; do strip -o "$dir/$name" "$path"; done
  strip -o "$dir/tokenyard" "${CARGO_TARGET_DIR:-$root/target}/release/tokenyard"
}

rows=()
note() { rows+=("$(printf '%-52s %-8s %s' "$1" "$2" "$3")"); }

# One check by exit status, with its last line.
check() {
  local name=$1
  shift
  local start=$SECONDS status=passed
  timeout "${LIMIT:-240}" "$@" >"$out/$name.log" 2>&1 || status=FAILED
  note "$name" "$status" "$((SECONDS - start)) s  $(grep -v '^$' "$out/$name.log" | tail -n 1 | cut -c1-90)"
}

# One figure: bench with JSON; dispatch and combine p50 and floor.
figure() {
  local name=$1
  shift
  local status=passed
  timeout "${LIMIT:-240}" "$dir/tokenyard" bench --device cuda --json "$out/$name.json" "$@" >"$out/$name.log" 2>&1 || status=FAILED
  note "$name" "$status" "$(python3 - "$out/$name.json" <<'PY' 2>/dev/null || tail -n 1 "$out/$name.log"
import json, sys
found = json.load(open(sys.argv[1]))
for r in found.get("results", [found]):
    d, c, f = r["dispatch_us"], r["combine_us"], r["floor_us"]
    print(f"T={r['tokens']}: dispatch {d['p50']:.1f} (p99 {d['p99']:.1f}, floor {f['dispatch']:.1f})  "
          f"combine {c['p50']:.1f} (p99 {c['p99']:.1f}, floor {f['combine']:.1f})", end="  ")
PY
)"
}

run() {
  out=${3:-$dir/out}
  mkdir -p "$out"
  gpus=$(nvidia-smi -L | wc -l)
  ranks=${RANKS:-$gpus}
  export TOKENYARD_TEST_DEVICE=cuda
  check device "$dir/device" --test-threads=4
  check memory "$dir/memory" --test-threads=4
  check conformance "$dir/conformance"
  check faults "$dir/faults" --test-threads=1
  check arena "$dir/arena" --test-threads=1
  # Ranks that share a GPU need a hardware queue for each of their streams.
  check gpu_nic env CUDA_DEVICE_MAX_CONNECTIONS=32 "$dir/gpu_nic" contexts arenas --test-threads=1
  if [ "$gpus" -ge 3 ]; then check kills "$dir/kills" --test-threads=1; else note kills skipped "needs 3 GPUs"; fi
  check verify "$dir/tokenyard" verify --device cuda --seeds "${SEEDS:-200}"
  check verify-full "$dir/tokenyard" verify --device cuda --seeds 1 --full
  for dtype in fp8 bf16 fp16 fp32; do
    for layout in contiguous masked token; do
      check "bench-$dtype-$layout" "$dir/tokenyard" bench --device cuda --world "$ranks" --dtype $dtype --layout $layout \
        --tokens 64 --iters 20 --warmup 2 --check all
    done
  done
  for dtype in bf16 fp16 fp32; do
    check "bench-partial-$dtype" "$dir/tokenyard" bench --device cuda --world "$ranks" --combine-dtype $dtype --partial fp8 \
      --tokens 64 --iters 20 --warmup 2 --check all
  done
  check processes "$dir/tokenyard" bench --device cuda --world "$gpus" --launch processes --tokens 128 --iters 50 --warmup 5 --check all
  check shared "$dir/tokenyard" bench --device cuda --world $((2 * gpus)) --tokens 128 --iters 20 --warmup 2 --check all
  # GPUs as nodes: the processor moves what goes between them, then emulated NICs do.
  if [ "$gpus" -ge 2 ]; then
    for place in host device; do
      check "nodes-$place" "$dir/tokenyard" bench --device cuda --world "$gpus" --ranks-per-node $((gpus / 2)) --arena $place \
        --tokens 64 --iters 20 --warmup 2 --check all
    done
    check waves "$dir/tokenyard" bench --device cuda --world "$gpus" --ranks-per-node $((gpus / 2)) --tokens 500 --wave-tokens 150 \
      --iters 10 --warmup 2 --check all
    figure "decode-nodes-$gpus" --world "$gpus" --ranks-per-node $((gpus / 2)) --tokens 1,16,128
    figure "decode-nodes-cx7-$gpus" --world "$gpus" --ranks-per-node $((gpus / 2)) --tokens 1,16,128 --link cx7
  fi
  for n in 1 2 "$ranks"; do
    [ "$n" -le "$gpus" ] || continue
    figure "decode-$n" --world "$n" --tokens 1,16,128
    figure "prefill-$n" --world "$n" --tokens 4096 --iters 100 --warmup 10
  done
  figure "stages-$ranks" --world "$ranks" --tokens 1,128,4096 --iters 40 --stages
  figure "decode-quantize-$ranks" --world "$ranks" --tokens 128 --quantize
  figure "decode-partial-fp8-$ranks" --world "$ranks" --tokens 1,16,128 --partial fp8
  figure "prefill-partial-fp8-$ranks" --world "$ranks" --tokens 4096 --iters 100 --warmup 10 --partial fp8
  figure "decode-graph-$ranks" --world "$ranks" --tokens 128 --mode graph
  figure "decode-split-$ranks" --world "$ranks" --tokens 128 --mode split
  figure "decode-bf16-$ranks" --world "$ranks" --tokens 128 --dtype bf16
  figure "decode-masked-$ranks" --world "$ranks" --tokens 128 --layout masked
  figure "decode-token-$ranks" --world "$ranks" --tokens 128 --layout token
  figure "decode-processes-$ranks" --world "$ranks" --tokens 128 --launch processes
  printf '\n%s x %s\n' "$gpus" "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
  printf '%s\n' "${rows[@]}"
  ! printf '%s\n' "${rows[@]}" | grep -q FAILED
}

"$mode" "$@"
