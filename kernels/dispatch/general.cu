// Kernels of dispatches of any kind.
#include "dispatch/dispatch.cuh"

namespace ty {
TY_KERNEL(ty_dispatch, ty_dispatch_args) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_nodes, ty_dispatch_args) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_in_place, InPlaceDispatchArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_again, AgainArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_again_nodes, AgainArgs) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_counts, CountsDispatchArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_counts_nodes, CountsDispatchArgs) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_payload, PayloadDispatchArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_payload_nodes, PayloadDispatchArgs) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_payload_again, PayloadAgainArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_payload_again_nodes, PayloadAgainArgs) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_payload_counts, PayloadCountsArgs) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_payload_counts_nodes, PayloadCountsArgs) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_absence, AbsenceDispatchArgs<false>) { dispatch<false>(a); }
TY_KERNEL_OF(ty_dispatch_absence_nodes, AbsenceDispatchArgs<true>, TY_ABSENCE_BLOCK_THREADS) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_absence_counts, AbsenceCountsArgs<false>) { dispatch<false>(a); }
TY_KERNEL_OF(ty_dispatch_absence_counts_nodes, AbsenceCountsArgs<true>, TY_ABSENCE_BLOCK_THREADS) { dispatch<true>(a); }
} // namespace ty
