// All kernels, one translation unit, built twice: by nvcc for GPUs, by the host compiler for the CPU device.
#include "common/barrier.cuh"
#include "bench/bench.cuh"
#include "combine/combine.cuh"
#include "bench/conformance.cuh"
#include "dispatch/dispatch.cuh"
#include "nic/nic.cuh"

TY_KERNEL_TABLE_BEGIN
#include "kernels.inc"
TY_KERNEL_TABLE_END
