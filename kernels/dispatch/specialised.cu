// Kernels of dispatches of the usual kinds (common/specialised.cuh).
#include "dispatch/dispatch.cuh"

namespace ty {
TY_KERNEL(ty_dispatch_again_specialised, SpecialisedAgainArgs<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_again_specialised_nodes, SpecialisedAgainArgs<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_counts_specialised, SpecialisedCountsArgs<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_counts_specialised_nodes, SpecialisedCountsArgs<true>) { dispatch<true>(a); }

// By layout of the output.
template <bool inter_node>
using SpecialisedContiguous = SpecialisedDispatchArgs<inter_node, Specialised::nothing_else, TY_LAYOUT_CONTIGUOUS>;
template <bool inter_node>
using SpecialisedMasked = SpecialisedDispatchArgs<inter_node, Specialised::nothing_else, TY_LAYOUT_MASKED>;
template <bool inter_node>
using SpecialisedToken = SpecialisedDispatchArgs<inter_node, Specialised::nothing_else, TY_LAYOUT_TOKEN>;
using RepeatsContiguous = SpecialisedDispatchArgs<false, Specialised::repeats_experts, TY_LAYOUT_CONTIGUOUS>;
using RepeatsMasked = SpecialisedDispatchArgs<false, Specialised::repeats_experts, TY_LAYOUT_MASKED>;
using RepeatsToken = SpecialisedDispatchArgs<false, Specialised::repeats_experts, TY_LAYOUT_TOKEN>;
template <bool inter_node>
using AnyRoutingContiguous = SpecialisedDispatchArgs<inter_node, Specialised::any_routing, TY_LAYOUT_CONTIGUOUS>;
template <bool inter_node>
using AnyRoutingMasked = SpecialisedDispatchArgs<inter_node, Specialised::any_routing, TY_LAYOUT_MASKED>;
template <bool inter_node>
using AnyRoutingToken = SpecialisedDispatchArgs<inter_node, Specialised::any_routing, TY_LAYOUT_TOKEN>;
template <bool inter_node>
using QuantizeContiguous = SpecialisedDispatchArgs<inter_node, Specialised::quantizes, TY_LAYOUT_CONTIGUOUS>;
template <bool inter_node>
using QuantizeMasked = SpecialisedDispatchArgs<inter_node, Specialised::quantizes, TY_LAYOUT_MASKED>;
template <bool inter_node> using PayloadContiguous = SpecialisedPayloadDispatchArgs<inter_node, TY_LAYOUT_CONTIGUOUS>;
template <bool inter_node> using PayloadToken = SpecialisedPayloadDispatchArgs<inter_node, TY_LAYOUT_TOKEN>;
TY_KERNEL(ty_dispatch_payload_specialised_contiguous, PayloadContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_payload_specialised_contiguous_nodes, PayloadContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_payload_specialised_token, PayloadToken<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_payload_specialised_token_nodes, PayloadToken<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_specialised_contiguous, SpecialisedContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_specialised_contiguous_nodes, SpecialisedContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_specialised_masked, SpecialisedMasked<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_specialised_masked_nodes, SpecialisedMasked<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_specialised_token, SpecialisedToken<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_specialised_token_nodes, SpecialisedToken<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_repeats_contiguous, RepeatsContiguous) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_repeats_masked, RepeatsMasked) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_repeats_token, RepeatsToken) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_any_routing_contiguous, AnyRoutingContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_any_routing_contiguous_nodes, AnyRoutingContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_any_routing_masked, AnyRoutingMasked<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_any_routing_masked_nodes, AnyRoutingMasked<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_any_routing_token, AnyRoutingToken<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_any_routing_token_nodes, AnyRoutingToken<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_quantize_contiguous, QuantizeContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_quantize_contiguous_nodes, QuantizeContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_quantize_masked, QuantizeMasked<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_quantize_masked_nodes, QuantizeMasked<true>) { dispatch<true>(a); }
} // namespace ty
