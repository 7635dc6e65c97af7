// What kernels know of their launches at compile time. Stepping over code that does nothing in a call costs that call
// more than its own work (docs/notebook.md, "Fewer jumps"). So calls of the usual kind have specialised kernels,
// without what other calls need; all other calls take the general kernels. bindings/api/pick.rs chooses.
//
// A fact is a constant that hides the context's or arguments' member of the same name. Functions take a context, or
// arguments, of any such type, so the compiler sees the constants.
#pragma once
#include "ffi/layout.h"
#include "common/prim.cuh"

namespace ty {

template <typename T>
concept Context = __is_base_of(ty_context, T);
template <typename T>
concept DispatchArgs = requires(const T &a) {
  a.output.rows;
};
template <typename T>
concept CombineArgs = requires(const T &a) {
  a.out_pitch;
};

// What a specialised call does beyond what all specialised calls do.
enum class Specialised { nothing_else, repeats_experts, any_routing, quantizes, weighs_late };

// A call is one launch, of both phases. `inter_node`: the world has several nodes. `ll`: as partials_are_ll.
template <bool inter_node, Specialised does, bool ll = false> struct SpecialisedContext : ty_context {
  static constexpr u32 rounds = 1, free_flags = 0, guarded = 0;
  static constexpr u64 stats = 0, rank_names = 0;
};
template <Specialised does, bool ll> struct SpecialisedContext<false, does, ll> : SpecialisedContext<true, does, ll> {
  static constexpr u32 nodes = 1, node = 0, node_first = 0;
};

template <u32 is_layout> struct SpecialisedOutput : ty_output {
  static constexpr u32 layout = is_layout, zero_padding = 0, drop_overflow = 0;
  static constexpr u64 wait_times = 0;
};

// Of one node: never compact.
template <bool inter_node> struct SpecialisedHandle : ty_handle {};
template <> struct SpecialisedHandle<false> : ty_handle { static constexpr u64 row_choices = 0; };

template <bool inter_node, Specialised does, u32 layout> struct SpecialisedDispatchArgs {
  SpecialisedContext<inter_node, does> context;
  SpecialisedHandle<inter_node> handle;
  ty_tokens tokens;
  SpecialisedOutput<layout> output;
  u64 unused_counts;
  u32 counts_number, unused[3];
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, round = 0;
  static constexpr u64 first_counts = 0;
};
using SomeDispatchArgs = SpecialisedDispatchArgs<false, Specialised::nothing_else, 0>;
static_assert(sizeof(SomeDispatchArgs) == sizeof(ty_dispatch_args), "the same bytes");
static_assert(__builtin_offsetof(SomeDispatchArgs, output) == __builtin_offsetof(ty_dispatch_args, output),
              "the same bytes");

// Of bf16 rows and sums.
template <bool inter_node, Specialised does, u32 is_layout, bool ll> struct SpecialisedCombineArgs {
  SpecialisedContext<inter_node, does, ll> context;
  SpecialisedHandle<inter_node> handle;
  u64 rows, rows_pitch, topk_weight, out, out_pitch, unused_times;
  u32 tokens, unused[5];
  u64 unused_payload[4];
  static constexpr u64 wait_times = 0, payload = 0, payload_out = 0;
  static constexpr u32 payload_words = 0, payload_gathered = 0, payload_offset = 0;
  static constexpr u32 out_dtype = TY_BF16, accumulate = 0, layout = is_layout;
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, round = 0;
};
using SomeCombineArgs = SpecialisedCombineArgs<false, Specialised::nothing_else, 0, true>;
static_assert(sizeof(SomeCombineArgs) == sizeof(ty_combine_args), "the same bytes");
static_assert(__builtin_offsetof(SomeCombineArgs, out_pitch) == __builtin_offsetof(ty_combine_args, out_pitch),
              "the same bytes");

// A combine of rows with a side payload: of any kind, and of the usual kind, of bf16 rows and sums.
struct PayloadArgs : ty_combine_args {
  static constexpr bool brings_words = true;
};
template <bool inter_node, u32 is_layout, bool ll> struct SpecialisedPayloadArgs {
  SpecialisedContext<inter_node, Specialised::nothing_else, ll> context;
  SpecialisedHandle<inter_node> handle;
  u64 rows, rows_pitch, topk_weight, out, out_pitch, unused_times;
  u32 tokens, unused[5];
  u64 payload, payload_out;
  u32 payload_words, payload_gathered, payload_offset, reserved;
  static constexpr bool brings_words = true;
  static constexpr u64 wait_times = 0;
  static constexpr u32 out_dtype = TY_BF16, accumulate = 0, layout = is_layout;
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, round = 0;
};
static_assert(sizeof(SpecialisedPayloadArgs<true, 0, false>) == sizeof(ty_combine_args), "the same bytes");
using SomePayloadArgs = SpecialisedPayloadArgs<false, 0, true>;
static_assert(__builtin_offsetof(SomePayloadArgs, payload) == __builtin_offsetof(ty_combine_args, payload),
              "the same bytes");

// A world of one node with in-place output: calls are restricted as specialised calls are, in the contiguous layout.
struct InPlaceContext : ty_context {
  static constexpr u32 rounds = 1, free_flags = 0, nodes = 1, node = 0, node_first = 0;
};
struct InPlaceOutput : ty_output {
  static constexpr u32 layout = TY_LAYOUT_CONTIGUOUS, drop_overflow = 0;
};
struct InPlaceDispatchArgs {
  InPlaceContext context;
  ty_handle handle;
  ty_tokens tokens;
  InPlaceOutput output;
  u64 unused_counts;
  u32 counts_number, unused[3];
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, round = 0;
  static constexpr u64 first_counts = 0;
};
static_assert(sizeof(InPlaceDispatchArgs) == sizeof(ty_dispatch_args), "the same bytes");

// Calls that go on without ranks that are missing (common/absence.cuh). Of any kind.
template <bool inter_node> struct AbsenceContext;
template <> struct AbsenceContext<false> : ty_context {
  static constexpr u32 rounds = 1, free_flags = 0, nodes = 1, node = 0, node_first = 0;
};
template <> struct AbsenceContext<true> : ty_context { static constexpr u32 rounds = 1; };
template <bool inter_node> struct AbsenceDispatchArgs {
  AbsenceContext<inter_node> context;
  ty_handle handle;
  ty_tokens tokens;
  ty_output output;
  u64 first_counts;
  u32 counts_number, reserved, phases, round;
};
template <bool inter_node> struct AbsenceCombineArgs {
  AbsenceContext<inter_node> context;
  ty_handle handle;
  u64 rows, rows_pitch, topk_weight, out, out_pitch, wait_times;
  u32 tokens, out_dtype, unused_accumulate, layout, phases, round;
  u64 unused_payload[4];
  static constexpr u64 payload = 0, payload_out = 0;
  static constexpr u32 accumulate = 0, payload_words = 0, payload_gathered = 0, payload_offset = 0;
};
template <bool inter_node> struct AbsenceBarrierArgs { AbsenceContext<inter_node> context; };
static_assert(sizeof(AbsenceDispatchArgs<true>) == sizeof(ty_dispatch_args) &&
                  sizeof(AbsenceCombineArgs<true>) == sizeof(ty_combine_args) &&
                  sizeof(AbsenceBarrierArgs<true>) == sizeof(ty_barrier_args),
              "the same bytes");

// The sending half of a call whose counts come first: its launch also receives all counts, and gives them to the host.
template <typename C, typename H> struct CountsArgs {
  C context;
  H handle;
  ty_tokens tokens;
  SpecialisedOutput<TY_LAYOUT_TOKEN> output;
  u64 first_counts;
  u32 counts_number, unused[3];
  static constexpr u32 phases = TY_PHASE_SEND, round = 0;
};
using CountsDispatchArgs = CountsArgs<ty_context, ty_handle>;
template <bool inter_node> using AbsenceCountsArgs = CountsArgs<AbsenceContext<inter_node>, ty_handle>;
template <bool inter_node>
using SpecialisedCountsArgs =
    CountsArgs<SpecialisedContext<inter_node, Specialised::nothing_else>, SpecialisedHandle<inter_node>>;
static_assert(sizeof(SpecialisedCountsArgs<true>) == sizeof(CountsDispatchArgs), "the same bytes");
static_assert(sizeof(CountsDispatchArgs) == sizeof(ty_dispatch_args), "the same bytes");
static_assert(__builtin_offsetof(CountsDispatchArgs, first_counts) ==
                  __builtin_offsetof(ty_dispatch_args, first_counts),
              "the same bytes");

// A dispatch by an earlier handle (dispatch/again.cuh): of any kind, and of the usual kind.
struct AgainArgs {
  ty_context context;
  ty_handle handle;
  ty_tokens tokens;
  ty_output output;
  u64 unused_counts;
  u32 counts_number, reserved, phases, round;
  static constexpr u64 first_counts = 0;
};
template <bool inter_node> struct SpecialisedAgainArgs {
  SpecialisedContext<inter_node, Specialised::nothing_else> context;
  SpecialisedHandle<inter_node> handle;
  ty_tokens tokens;
  ty_output output;
  u64 unused_counts;
  u32 counts_number, unused[3];
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, round = 0;
  static constexpr u64 first_counts = 0;
};
static_assert(sizeof(AgainArgs) == sizeof(ty_dispatch_args) &&
                  sizeof(SpecialisedAgainArgs<true>) == sizeof(ty_dispatch_args),
              "the same bytes");

// A dispatch of rows with a side payload (dispatch/payload.cuh): of any kind, and of the usual kind.
struct PayloadDispatchArgs : ty_dispatch_args {};
struct PayloadCountsArgs : CountsDispatchArgs {};
struct PayloadAgainArgs : AgainArgs {};
template <bool inter_node, u32 layout>
struct SpecialisedPayloadDispatchArgs : SpecialisedDispatchArgs<inter_node, Specialised::nothing_else, layout> {};
static_assert(sizeof(PayloadCountsArgs) == sizeof(ty_dispatch_args) &&
                  sizeof(PayloadAgainArgs) == sizeof(ty_dispatch_args) &&
                  sizeof(SpecialisedPayloadDispatchArgs<true, 0>) == sizeof(ty_dispatch_args),
              "the same bytes");

// Facts that are more than the value of a member.

// Whether output is in place: senders store rows directly into the output in each rank's arena (dispatch/in_place.cuh).
TY_DEVICE constexpr bool in_place(const ty_context &) { return false; }
TY_DEVICE constexpr bool in_place(const InPlaceContext &) { return true; }

// Whether a launch receives all counts for the host, and places no rows.
TY_DEVICE constexpr bool takes_counts(const DispatchArgs auto &) { return false; }
template <typename C, typename H> TY_DEVICE constexpr bool takes_counts(const CountsArgs<C, H> &) { return true; }
TY_DEVICE constexpr bool takes_counts(const PayloadCountsArgs &) { return true; }

// Whether a dispatch goes by an earlier handle.
TY_DEVICE constexpr bool goes_again(const DispatchArgs auto &) { return false; }
TY_DEVICE constexpr bool goes_again(const AgainArgs &) { return true; }
TY_DEVICE constexpr bool goes_again(const PayloadAgainArgs &) { return true; }
template <bool inter_node> TY_DEVICE constexpr bool goes_again(const SpecialisedAgainArgs<inter_node> &) {
  return true;
}

// Whether calls go on without ranks that are missing.
TY_DEVICE constexpr bool tolerates_absence(const ty_context &) { return false; }
template <bool inter_node> TY_DEVICE constexpr bool tolerates_absence(const AbsenceContext<inter_node> &) {
  return true;
}

// Whether rows have a side payload.
TY_DEVICE constexpr bool carries_payload(const CombineArgs auto &) { return false; }
TY_DEVICE constexpr bool carries_payload(const PayloadArgs &) { return true; }
TY_DEVICE constexpr bool carries_payload(const DispatchArgs auto &) { return false; }
TY_DEVICE constexpr bool carries_payload(const PayloadDispatchArgs &) { return true; }
TY_DEVICE constexpr bool carries_payload(const PayloadCountsArgs &) { return true; }
TY_DEVICE constexpr bool carries_payload(const PayloadAgainArgs &) { return true; }
template <bool inter_node, u32 layout>
TY_DEVICE constexpr bool carries_payload(const SpecialisedPayloadDispatchArgs<inter_node, layout> &) {
  return true;
}
template <bool inter_node, u32 layout, bool ll>
TY_DEVICE constexpr bool carries_payload(const SpecialisedPayloadArgs<inter_node, layout, ll> &) {
  return true;
}

// Whether the owner of an expert is computed, not looked up.
TY_DEVICE bool is_even(const ty_context &c) { return c.even_experts != 0; }
template <Specialised does, bool ll> TY_DEVICE constexpr bool is_even(const SpecialisedContext<true, does, ll> &) {
  return true;
}

// Whether choices may be other than numbers of experts, top_k for each token, each named once: see the next.
TY_DEVICE constexpr bool takes_any_routing(const ty_context &) { return true; }
template <Specialised does, bool ll>
TY_DEVICE constexpr bool takes_any_routing(const SpecialisedContext<true, does, ll> &) {
  return does == Specialised::any_routing;
}

// Whether a token may name an expert several times, with a row for each.
TY_DEVICE bool repeats_experts(const ty_context &c) { return c.bitmap_bits > 1; }
template <Specialised does, bool ll> TY_DEVICE bool repeats_experts(const SpecialisedContext<true, does, ll> &c) {
  return does == Specialised::repeats_experts || (takes_any_routing(c) && c.bitmap_bits > 1);
}

// The quantisation of rows on sending: TY_QUANTIZE_*.
TY_DEVICE u32 quantization(const ty_context &c) { return c.quantize; }
TY_DEVICE constexpr u32 quantization(const InPlaceContext &) { return TY_QUANTIZE_NONE; }
template <Specialised does, bool ll> TY_DEVICE u32 quantization(const SpecialisedContext<true, does, ll> &c) {
  if (does != Specialised::quantizes) return TY_QUANTIZE_NONE;
  return c.quantize == TY_QUANTIZE_UE8M0 ? TY_QUANTIZE_UE8M0 : TY_QUANTIZE_F32;
}

// Whether weights come with combine.
TY_DEVICE bool weighs_late(const ty_context &c) { return c.weights == TY_WEIGHTS_COMBINE; }
template <Specialised does, bool ll> TY_DEVICE constexpr bool weighs_late(const SpecialisedContext<true, does, ll> &) {
  return does == Specialised::weighs_late;
}

// Whether partial rows are LL rows (numbers.cuh), which have no tags. Only in one node, in calls of few tokens.
TY_DEVICE bool partials_are_ll(const ty_context &c) { return c.regions.partial_tags.source_stride == 0; }
template <bool inter_node> TY_DEVICE constexpr bool partials_are_ll(const AbsenceContext<inter_node> &) {
  return false;
}
template <Specialised does, bool ll>
TY_DEVICE constexpr bool partials_are_ll(const SpecialisedContext<true, does, ll> &) {
  return ll;
}

TY_DEVICE bool spans_nodes(const ty_context &c) { return c.nodes > 1; }
TY_DEVICE constexpr bool spans_nodes(const InPlaceContext &) { return false; }
template <bool inter_node> TY_DEVICE constexpr bool spans_nodes(const AbsenceContext<inter_node> &) {
  return inter_node;
}
template <Specialised does, bool ll> TY_DEVICE constexpr bool spans_nodes(const SpecialisedContext<true, does, ll> &) {
  return true;
}
template <Specialised does, bool ll> TY_DEVICE constexpr bool spans_nodes(const SpecialisedContext<false, does, ll> &) {
  return false;
}

// Whether combine looks up its first rows before the epoch is known: only where the epoch does not decide which rows
// they are.
TY_DEVICE constexpr bool looks_ahead(const ty_context &) { return false; }
template <Specialised does, bool ll> TY_DEVICE constexpr bool looks_ahead(const SpecialisedContext<false, does, ll> &) {
  return true;
}

// Whether a warp keeps words of a side payload while it adds the rows that they belong to. Other kernels have no
// registers left for that.
TY_DEVICE constexpr bool has_spare_registers(const ty_context &) { return false; }
template <Specialised does, bool ll>
TY_DEVICE constexpr bool has_spare_registers(const SpecialisedContext<false, does, ll> &) {
  return true;
}

// Whether the threads of a block agree on whether the context is closed only where each team first meets, and until
// then send nothing that lets a peer go on. Otherwise they agree as the launch begins: a meeting of the whole block,
// which takes 0.1 µs more (docs/notebook.md, "A block agrees").
TY_DEVICE constexpr bool agrees_late(const ty_context &) { return false; }
template <Specialised does, bool ll> TY_DEVICE constexpr bool agrees_late(const SpecialisedContext<false, does, ll> &) {
  return true;
}

// Whether a dispatch may write the handle while a combine reads it: possible where calls are guarded, and specialised
// calls are not. Then thread 0 of a block reads the head for all threads, and lane 0 of a warp a mask for all lanes.
TY_DEVICE constexpr bool handle_may_change(const ty_context &) { return true; }
template <Specialised does, bool ll>
TY_DEVICE constexpr bool handle_may_change(const SpecialisedContext<true, does, ll> &) {
  return false;
}

// Whether a rank of the world belongs to this node.
TY_DEVICE bool is_node_peer(const ty_context &c, u32 rank) { return rank - c.node_first < c.node_ranks; }
TY_DEVICE constexpr bool is_node_peer(const InPlaceContext &, u32) { return true; }
TY_DEVICE constexpr bool is_node_peer(const AbsenceContext<false> &, u32) { return true; }
template <Specialised does, bool ll>
TY_DEVICE constexpr bool is_node_peer(const SpecialisedContext<false, does, ll> &, u32) {
  return true;
}

} // namespace ty
