// What kernels know of their launches when they are compiled. A call steps over all code that comes to nothing in it,
// and that costs it more than what it does (docs/performance.md, "Fewer jumps"). So calls of the usual kind have
// kernels of their own, without what other calls need; bindings/api/pick.rs says which calls are plain.
//
// A fact is a constant that hides the member of its name. Functions take a context, or arguments, of any such type, and
// so know what the kernel knows.
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

// What a plain call does that not all do.
enum class Plain { nothing_else, quantizes, weighs_late };

// Calls are one launch, of both phases. `far`: of a world of several nodes. `arrive`: as partials_arrive.
template <bool far, Plain does, bool arrive = false> struct PlainContext : ty_context {
  static constexpr u32 waves = 1, free_flags = 0, guarded = 0;
  static constexpr u64 stats = 0, rank_names = 0;
};
template <Plain does, bool arrive> struct PlainContext<false, does, arrive> : PlainContext<true, does, arrive> {
  static constexpr u32 nodes = 1, node = 0, node_first = 0;
};

template <u32 is_layout> struct PlainOutput : ty_output { static constexpr u32 layout = is_layout, zero_padding = 0; };

template <bool far, Plain does, u32 layout> struct PlainDispatchArgs {
  PlainContext<far, does> context;
  ty_handle handle;
  ty_tokens tokens;
  PlainOutput<layout> output;
  u32 unused[2];
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, wave = 0;
};
using SomeDispatchArgs = PlainDispatchArgs<false, Plain::nothing_else, 0>;
static_assert(sizeof(SomeDispatchArgs) == sizeof(ty_dispatch_args), "the same bytes");
static_assert(__builtin_offsetof(SomeDispatchArgs, output) == __builtin_offsetof(ty_dispatch_args, output),
              "the same bytes");

// Of bf16 rows and sums.
template <bool far, Plain does, u32 is_layout, bool arrive> struct PlainCombineArgs {
  PlainContext<far, does, arrive> context;
  ty_handle handle;
  u64 rows, rows_pitch, topk_weight, out, out_pitch;
  u32 tokens, unused[5];
  static constexpr u32 out_dtype = TY_BF16, accumulate = 0, layout = is_layout;
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, wave = 0;
};
using SomeCombineArgs = PlainCombineArgs<false, Plain::nothing_else, 0, true>;
static_assert(sizeof(SomeCombineArgs) == sizeof(ty_combine_args), "the same bytes");
static_assert(__builtin_offsetof(SomeCombineArgs, out_pitch) == __builtin_offsetof(ty_combine_args, out_pitch),
              "the same bytes");

// A world of one node whose ranks have their output in the arena: calls are as plain ones, of the contiguous layout.
struct InPlaceContext : ty_context {
  static constexpr u32 waves = 1, free_flags = 0, nodes = 1, node = 0, node_first = 0;
};
struct InPlaceOutput : ty_output {
  static constexpr u32 layout = TY_LAYOUT_CONTIGUOUS;
};
struct InPlaceDispatchArgs {
  InPlaceContext context;
  ty_handle handle;
  ty_tokens tokens;
  InPlaceOutput output;
  u32 unused[2];
  static constexpr u32 phases = TY_PHASE_SEND | TY_PHASE_RECEIVE, wave = 0;
};
static_assert(sizeof(InPlaceDispatchArgs) == sizeof(ty_dispatch_args), "the same bytes");

// Facts of which more is to be known than a value.

// Whether rows are stored where they belong, in the output that each rank has in its arena (dispatch_in_place.cuh).
TY_DEVICE constexpr bool in_place(const ty_context &) { return false; }
TY_DEVICE constexpr bool in_place(const InPlaceContext &) { return true; }

// Whether homes of experts are reckoned.
TY_DEVICE bool is_even(const ty_context &c) { return c.even_experts != 0; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool is_even(const PlainContext<true, does, arrive> &) {
  return true;
}

// What rows become as they are sent: TY_QUANTIZE_*.
TY_DEVICE u32 quantization(const ty_context &c) { return c.quantize; }
TY_DEVICE constexpr u32 quantization(const InPlaceContext &) { return TY_QUANTIZE_NONE; }
template <Plain does, bool arrive> TY_DEVICE u32 quantization(const PlainContext<true, does, arrive> &c) {
  if (does != Plain::quantizes) return TY_QUANTIZE_NONE;
  return c.quantize == TY_QUANTIZE_UE8M0 ? TY_QUANTIZE_UE8M0 : TY_QUANTIZE_F32;
}

// Whether weights come with combine.
TY_DEVICE bool weighs_late(const ty_context &c) { return c.weights == TY_WEIGHTS_COMBINE; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool weighs_late(const PlainContext<true, does, arrive> &) {
  return does == Plain::weighs_late;
}

// Whether partial rows arrive as they are stored (numbers.cuh): there are no tags for them then. In one node, of few
// tokens.
TY_DEVICE bool partials_arrive(const ty_context &c) { return c.regions.partial_tags.source_stride == 0; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool partials_arrive(const PlainContext<true, does, arrive> &) {
  return arrive;
}

TY_DEVICE bool spans_nodes(const ty_context &c) { return c.nodes > 1; }
TY_DEVICE constexpr bool spans_nodes(const InPlaceContext &) { return false; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool spans_nodes(const PlainContext<true, does, arrive> &) {
  return true;
}
template <Plain does, bool arrive> TY_DEVICE constexpr bool spans_nodes(const PlainContext<false, does, arrive> &) {
  return false;
}

// Whether combine looks up its first rows before it knows which epoch it is: there is nothing else that says which they
// are.
TY_DEVICE constexpr bool looks_ahead(const ty_context &) { return false; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool looks_ahead(const PlainContext<false, does, arrive> &) {
  return true;
}

// Whether the threads of a block agree on whether the context is closed where each team first meets, and until then
// send nothing by which a peer would go on: a meeting of the whole block takes 0.1 µs more (docs/performance.md, "A
// block agrees"). Else they agree as the launch begins.
TY_DEVICE constexpr bool agrees_late(const ty_context &) { return false; }
template <Plain does, bool arrive> TY_DEVICE constexpr bool agrees_late(const PlainContext<false, does, arrive> &) {
  return true;
}

// Whether a dispatch may write the handle of a combine meanwhile: it may where calls are guarded, and plain calls are
// not. Then thread 0 of a block reads the head for all threads, and lane 0 of a warp a mask for all lanes.
TY_DEVICE constexpr bool handle_may_change(const ty_context &) { return true; }
template <Plain does, bool arrive>
TY_DEVICE constexpr bool handle_may_change(const PlainContext<true, does, arrive> &) {
  return false;
}

// Whether a rank of the world is of this node.
TY_DEVICE bool is_node_peer(const ty_context &c, u32 rank) { return rank - c.node_first < c.node_ranks; }
TY_DEVICE constexpr bool is_node_peer(const InPlaceContext &, u32) { return true; }
template <Plain does, bool arrive>
TY_DEVICE constexpr bool is_node_peer(const PlainContext<false, does, arrive> &, u32) {
  return true;
}

} // namespace ty
