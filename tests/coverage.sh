#!/usr/bin/env bash
# Line coverage of the Rust code that needs no GPU; fails below 85 %. Needs cargo-tarpaulin.
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo tarpaulin --engine llvm --follow-exec --skip-clean --no-default-features --target-dir target/coverage \
  --fail-under 85 --out Stdout --timeout 300 \
  --exclude-files 'build.rs' 'tests/*' 'bindings/ffi/*' 'bindings/cli/doctor_gpu.rs' \
  'kernels/cuda*.rs' 'kernels/base/cuda.rs' 'transport/memory/cuda.rs' 'target/*'
