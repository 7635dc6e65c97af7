// Kernels that are neither dispatches nor combines. Every .cu file is a translation unit, built twice: by nvcc for
// GPUs, by the host compiler for the CPU device. kernels.inc lists the kernels of all.
#include "bench/bench.cuh"
#include "bench/conformance.cuh"
#include "common/barrier.cuh"
#include "nic/nic.cuh"
