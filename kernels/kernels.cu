// All kernels, one translation unit, built twice: by nvcc for GPUs, by the host compiler for the CPU device.
#include "barrier.cuh"
#include "bench.cuh"
#include "combine.cuh"
#include "conformance.cuh"
#include "dispatch.cuh"
#include "nic.cuh"

TY_KERNEL_TABLE(ty_dispatch, ty_dispatch_nodes, ty_dispatch_in_place, ty_dispatch_plain_contiguous,
                ty_dispatch_plain_contiguous_nodes, ty_dispatch_plain_masked, ty_dispatch_plain_masked_nodes,
                ty_dispatch_plain_token, ty_dispatch_plain_token_nodes, ty_dispatch_quantize_contiguous,
                ty_dispatch_quantize_contiguous_nodes, ty_dispatch_quantize_masked, ty_dispatch_quantize_masked_nodes,
                ty_combine_plain_late, ty_combine_plain_tagged, ty_combine_plain_token_tagged,
                ty_combine_plain_late_tagged, ty_combine_plain_late_nodes, ty_combine_plain, ty_combine_plain_nodes,
                ty_combine_plain_token, ty_combine_plain_token_nodes, ty_combine_bf16, ty_combine_bf16_nodes,
                ty_combine_fp16, ty_combine_fp16_nodes, ty_combine_fp32, ty_combine_fp32_nodes, ty_combine_bf16_fp32,
                ty_combine_bf16_fp32_nodes, ty_combine_fp16_fp32, ty_combine_fp16_fp32_nodes, ty_combine_bf16_fp8,
                ty_combine_bf16_fp8_nodes, ty_combine_fp16_fp8, ty_combine_fp16_fp8_nodes, ty_combine_fp32_fp8,
                ty_combine_fp32_fp8_nodes, ty_barrier, ty_bench_expert, ty_bench_push, ty_bench_hold, ty_bench_meet,
                ty_nic, ty_conformance)
