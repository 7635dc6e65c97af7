// Kernels of combines of the usual kinds (common/specialised.cuh).
#include "combine/combine.cuh"

namespace ty {
// By the experts' rows (one a choice, or in the token layout one a token), and in one node by whether partial rows are
// LL rows.
enum class Way { ll, tagged, nodes };
template <Way way, Specialised does, u32 layout>
using SpecialisedArgs = SpecialisedCombineArgs<way == Way::nodes, does, layout, way == Way::ll>;
template <Way way> using SpecialisedChoices = SpecialisedArgs<way, Specialised::nothing_else, TY_LAYOUT_CONTIGUOUS>;
template <Way way> using SpecialisedTokens = SpecialisedArgs<way, Specialised::nothing_else, TY_LAYOUT_TOKEN>;
template <Way way> using LateChoices = SpecialisedArgs<way, Specialised::weighs_late, TY_LAYOUT_CONTIGUOUS>;
TY_KERNEL(ty_combine_specialised, SpecialisedChoices<Way::ll>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_tagged, SpecialisedChoices<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_nodes, SpecialisedChoices<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_specialised_token, SpecialisedTokens<Way::ll>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_token_tagged, SpecialisedTokens<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_token_nodes, SpecialisedTokens<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_specialised_late, LateChoices<Way::ll>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_late_tagged, LateChoices<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_specialised_late_nodes, LateChoices<Way::nodes>) { combine<Bf16, Bf16, true>(a); }

// Of rows with a side payload.
template <Way way, u32 layout> using PayloadWay = SpecialisedPayloadArgs<way == Way::nodes, layout, way == Way::ll>;
template <Way way> using PayloadChoices = PayloadWay<way, TY_LAYOUT_CONTIGUOUS>;
template <Way way> using PayloadTokens = PayloadWay<way, TY_LAYOUT_TOKEN>;
TY_KERNEL(ty_combine_payload_specialised, PayloadChoices<Way::ll>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_payload_specialised_tagged, PayloadChoices<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_payload_specialised_nodes, PayloadChoices<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_payload_specialised_token, PayloadTokens<Way::ll>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_payload_specialised_token_tagged, PayloadTokens<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_payload_specialised_token_nodes, PayloadTokens<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
} // namespace ty
