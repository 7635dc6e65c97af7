// Kernels of combines of any kind.
#include "combine/combine.cuh"

namespace ty {
// Named by the dtype of the expert rows, which partial rows have, too.
TY_KERNEL(ty_combine_bf16, ty_combine_args) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_bf16_nodes, ty_combine_args) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_fp16, ty_combine_args) { combine<Fp16, Fp16, false>(a); }
TY_KERNEL(ty_combine_fp16_nodes, ty_combine_args) { combine<Fp16, Fp16, true>(a); }
TY_KERNEL(ty_combine_fp32, ty_combine_args) { combine<Fp32, Fp32, false>(a); }
TY_KERNEL(ty_combine_fp32_nodes, ty_combine_args) { combine<Fp32, Fp32, true>(a); }

// Calls that go on without missing ranks.
TY_KERNEL(ty_combine_absence_bf16, AbsenceCombineArgs<false>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL_OF(ty_combine_absence_bf16_nodes, AbsenceCombineArgs<true>, TY_ABSENCE_BLOCK_THREADS) {
  combine<Bf16, Bf16, true>(a);
}
TY_KERNEL(ty_combine_absence_fp16, AbsenceCombineArgs<false>) { combine<Fp16, Fp16, false>(a); }
TY_KERNEL_OF(ty_combine_absence_fp16_nodes, AbsenceCombineArgs<true>, TY_ABSENCE_BLOCK_THREADS) {
  combine<Fp16, Fp16, true>(a);
}
TY_KERNEL(ty_combine_absence_fp32, AbsenceCombineArgs<false>) { combine<Fp32, Fp32, false>(a); }
TY_KERNEL_OF(ty_combine_absence_fp32_nodes, AbsenceCombineArgs<true>, TY_ABSENCE_BLOCK_THREADS) {
  combine<Fp32, Fp32, true>(a);
}

// Calls with a side payload.
TY_KERNEL(ty_combine_payload_bf16, PayloadArgs) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_payload_bf16_nodes, PayloadArgs) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_payload_fp16, PayloadArgs) { combine<Fp16, Fp16, false>(a); }
TY_KERNEL(ty_combine_payload_fp16_nodes, PayloadArgs) { combine<Fp16, Fp16, true>(a); }
TY_KERNEL(ty_combine_payload_fp32, PayloadArgs) { combine<Fp32, Fp32, false>(a); }
TY_KERNEL(ty_combine_payload_fp32_nodes, PayloadArgs) { combine<Fp32, Fp32, true>(a); }
} // namespace ty
