// Kernels of combines whose partial rows are of another dtype than the experts' rows, named by both.
#include "combine/combine.cuh"

namespace ty {
TY_KERNEL(ty_combine_bf16_fp32, ty_combine_args) { combine<Bf16, Fp32, false>(a); }
TY_KERNEL(ty_combine_bf16_fp32_nodes, ty_combine_args) { combine<Bf16, Fp32, true>(a); }
TY_KERNEL(ty_combine_fp16_fp32, ty_combine_args) { combine<Fp16, Fp32, false>(a); }
TY_KERNEL(ty_combine_fp16_fp32_nodes, ty_combine_args) { combine<Fp16, Fp32, true>(a); }
TY_KERNEL(ty_combine_bf16_fp8, ty_combine_args) { combine<Bf16, Fp8, false>(a); }
TY_KERNEL(ty_combine_bf16_fp8_nodes, ty_combine_args) { combine<Bf16, Fp8, true>(a); }
TY_KERNEL(ty_combine_fp16_fp8, ty_combine_args) { combine<Fp16, Fp8, false>(a); }
TY_KERNEL(ty_combine_fp16_fp8_nodes, ty_combine_args) { combine<Fp16, Fp8, true>(a); }
TY_KERNEL(ty_combine_fp32_fp8, ty_combine_args) { combine<Fp32, Fp8, false>(a); }
TY_KERNEL(ty_combine_fp32_fp8_nodes, ty_combine_args) { combine<Fp32, Fp8, true>(a); }
} // namespace ty
