// Combine, what Cs and Cr share, and the expert ranks' part of Cs: flags, weights sent ahead, partial rows.
#pragma once
#include "numbers.cuh"
#include "wire.cuh"

namespace ty {

// Shared memory of a combine block.
struct CombineShared {
  u32 incomplete[TY_MAX_NODE_RANKS]; // 1 where the rank of this node sends no rows
};
static_assert(sizeof(CombineShared) <= TY_COMBINE_SHARED_BYTES, "layout.h tells the launcher");

TY_DEVICE const ty_handle_head *head_of(const ty_combine_args &a) {
  return pointer<const ty_handle_head>(a.handle.head);
}

// ---- flags of the node's ranks ---------------------------------------------------------------------------------

// Waits for the flag of every rank of the node. False once a deadline passed.
TY_DEVICE bool wait_flags(const ty_context &c, CombineShared &shared, u64 epoch) {
  bool failed = false;
  for (u32 rank = thread_index(); rank < c.node_ranks; rank += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.combine_flags, epoch, rank);
    failed |=
        !wait_flag(c, TY_DIRECTION_COMBINE, flag, epoch, TY_SITE_COMBINE_FLAG, world_rank(c, rank), "combine flag");
    store(&shared.incomplete[rank], static_cast<u32>(load_relaxed_sys(flag)) == TY_STATUS_INCOMPLETE ? 1u : 0u);
  }
  return !block_any(failed);
}

// Ranks of this node that send no rows, a bit each, behind wait_flags.
TY_DEVICE u64 missing_ranks(const ty_context &c, const CombineShared &shared) {
  u64 missing = 0;
  for (u32 rank = 0; rank < c.node_ranks; ++rank) missing |= static_cast<u64>(load(&shared.incomplete[rank])) << rank;
  return missing;
}

// The first rank of this node that sends no rows though one of `count` masks has it; node_ranks for none. Every thread
// of the block gets the same answer.
TY_DEVICE u32 first_missing(const ty_context &c, const CombineShared &shared, const u64 *masks, u32 count) {
  u64 missing = missing_ranks(c, shared);
  for (u32 rank = 0; rank < c.node_ranks; ++rank) {
    if (!((missing >> rank) & 1)) continue;
    bool found = false;
    for (u32 i = thread_index(); i < count; i += block_threads()) found |= ((load(masks + i) >> rank) & 1) != 0;
    if (block_any(found)) return rank;
  }
  return c.node_ranks;
}

// ---- flags and weights -----------------------------------------------------------------------------------------

// Whether the source's rows come from this node, and which of its ranks it is then.
TY_DEVICE bool is_node_peer(const ty_context &c, u32 source) { return source - c.node_first < c.node_ranks; }

// Tells every rank of the node that this epoch's rows are coming or missing. By block 0.
TY_DEVICE void announce(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  u32 status = load(&head_of(a)->incomplete) ? TY_STATUS_INCOMPLETE : TY_STATUS_OK;
  // N3: acquired by wait_flags.
  for (u32 rank = thread_index(); rank < c.node_ranks; rank += block_threads())
    store_release_sys(in_arena<u64>(c, rank, c.regions.combine_flags, epoch, c.local), flag_value(epoch, status));
}

// Weights of a source, for all ranks of the node: block b serves ranks b, b + workers, ... `row(i)` is where those of
// its token i begin.
template <typename Row>
TY_DEVICE void push_weights(const ty_combine_args &a, u64 epoch, u32 source, u32 count, Row row) {
  const ty_context &c = a.context;
  for (u32 rank = block_index(); rank < c.node_ranks; rank += worker_count(c)) {
    float *ahead = in_arena<float>(c, rank, c.regions.ahead_weights, epoch, source);
    for (u32 i = thread_index(); i < count * c.top_k; i += block_threads())
      store(ahead + i, load(row(i / c.top_k) + i % c.top_k));
    block_barrier();
    // N10: the weights happen before this release; wait_flag(TY_SITE_AHEAD_WEIGHTS) acquires.
    if (thread_index() == 0)
      store_release_sys(in_arena<u64>(c, rank, c.regions.ahead_flags, epoch, source), flag_value(epoch, TY_STATUS_OK));
  }
}

// The weights that apply to one (source, token): where they lie, once they are there. Null once a deadline passed.
TY_DEVICE const float *weights_of(const ty_combine_args &a, u64 epoch, u32 source, u32 token) {
  const ty_context &c = a.context;
  if (c.weights != TY_WEIGHTS_COMBINE)
    return pointer<const float>(a.handle.weights) + (static_cast<u64>(source) * c.max_tokens + token) * c.top_k;
  bool failed = false;
  if (thread_index() == 0) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.ahead_flags, epoch, source);
    failed = !wait_flag(c, TY_DIRECTION_COMBINE, flag, epoch, TY_SITE_AHEAD_WEIGHTS, source, "weights");
  }
  if (block_any(failed)) return nullptr;
  return in_arena<const float>(c, c.local, c.regions.ahead_weights, epoch, source) + static_cast<u64>(token) * c.top_k;
}

// ---- partial rows ----------------------------------------------------------------------------------------------

struct Owner {
  u32 node;
  u32 rank; // of this node
  u32 part;
};

// Where the partial rows of a source's tokens go.
TY_DEVICE Owner owner_of(const ty_context &c, u32 source) {
  u64 packed = load(pointer<const u64>(c.source_owner) + source);
  return {static_cast<u32>(packed & 0xffffu), static_cast<u32>(packed >> 16 & 0xffffu), static_cast<u32>(packed >> 32)};
}

// Sum of this rank's rows of one token, in top-k order, of the columns of group g.
template <typename Row>
TY_DEVICE Floats partial_sum(const ty_combine_args &a, const i32 *rows, const float *weights, u32 g) {
  const ty_context &c = a.context;
  Floats sum = {};
  for (u32 k = 0; k < c.top_k; ++k) {
    i32 row = load(rows + k);
    if (row < 0) continue;
    Floats y = load_group<Row>(pointer<const char>(a.rows) + static_cast<u64>(row) * a.rows_pitch, g, c.hidden);
    // In the token layout the caller has applied the weights, and the row is the sum.
    if (a.layout == TY_LAYOUT_TOKEN) return y;
    float weight = load(weights + k);
    for (u32 i = 0; i < group; ++i) sum.v[i] = fma_rn(weight, y.v[i], sum.v[i]);
  }
  return sum;
}

// One partial row to its owner. By a whole block. False once a deadline passed.
template <typename Row, typename Partial>
TY_DEVICE bool send_partial(const ty_combine_args &a, u64 epoch, u32 source, u32 token, u32 slot) {
  const ty_context &c = a.context;
  const float *weights = weights_of(a, epoch, source, token);
  if (!weights) return false;
  const i32 *rows = pointer<const i32>(a.handle.rows) + (static_cast<u64>(source) * c.max_tokens + token) * c.top_k;
  Owner owner = owner_of(c, source);
  u64 place = static_cast<u64>(token) * c.slots + slot;
  char *out = in_arena<char>(c, owner.rank, c.regions.partials, epoch, owner.part) + place * c.partial_bytes;
  for (u32 g = thread_index(); g * group < c.hidden; g += block_threads())
    store_group<Partial>(out, g, c.hidden, partial_sum<Row>(a, rows, weights, g));
  block_barrier();
  // N4: the row happens before this release through the barrier; wait_tag(TY_SITE_PARTIAL) acquires.
  if (thread_index() == 0)
    store_release_sys(in_arena<u64>(c, owner.rank, c.regions.partial_tags, epoch, owner.part) + place, epoch);
  return true;
}

// This rank's partial rows for homes of its node, or for those of all others. False once a deadline passed.
template <typename Row, typename Partial> TY_DEVICE bool send_partials(const ty_combine_args &a, u64 epoch, bool own) {
  const ty_context &c = a.context;
  const ty_handle_head *head = head_of(a);
  u32 sources = own ? c.node_ranks : c.ranks - c.node_ranks;
  if (load(&head->incomplete) || sources == 0) return true;
  u64 items = static_cast<u64>(load(&head->most_tokens)) * sources;
  for (u64 i = block_index(); i < items; i += worker_count(c)) {
    u32 place = static_cast<u32>(i % sources), token = static_cast<u32>(i / sources);
    u32 source = own ? c.node_first + place : place < c.node_first ? place : place + c.node_ranks;
    if (token >= load(pointer<const u32>(a.handle.source_tokens) + source)) continue;
    i32 slot = load(pointer<const i32>(a.handle.slots) + static_cast<u64>(source) * c.max_tokens + token);
    if (slot < 0) continue;
    if (!send_partial<Row, Partial>(a, epoch, source, token, static_cast<u32>(slot))) return false;
  }
  return true;
}

// ---- sums of a node's partial rows -----------------------------------------------------------------------------

// The ranks of this node that a token went to, and those of them that send its rows.
struct Parts {
  u64 ranks;
  u64 present;
};

// The calling thread's share of waiting for a token's partial rows at their owner. True once a deadline passed.
TY_DEVICE bool partials_fail(const ty_context &c, u64 epoch, u32 part, u32 token, const Parts &parts) {
  bool failed = false;
  for (u32 rank = thread_index(); rank < c.node_ranks; rank += block_threads()) {
    if (!((parts.present >> rank) & 1)) continue;
    u64 place = static_cast<u64>(token) * c.slots + popcount64(bits_below(parts.ranks, rank));
    const u64 *tag = in_arena<const u64>(c, c.local, c.regions.partial_tags, epoch, part) + place;
    failed |= !wait_tag(c, TY_DIRECTION_COMBINE, tag, epoch, TY_SITE_PARTIAL, world_rank(c, rank), "partial row");
  }
  return failed;
}

// The sum of a token's partial rows, in rank order, of the columns of group g.
template <typename Partial>
TY_DEVICE Floats node_sum(const ty_context &c, u64 epoch, u32 part, u32 token, const Parts &parts, u32 g) {
  const char *rows = in_arena<const char>(c, c.local, c.regions.partials, epoch, part) +
                     static_cast<u64>(token) * c.slots * c.partial_bytes;
  Floats sum = {};
  for (u64 left = parts.ranks; left; left &= left - 1, rows += c.partial_bytes) {
    if (!((parts.present >> lowest_bit(left)) & 1)) continue;
    Floats row = load_group<Partial>(rows, g, c.hidden);
    for (u32 i = 0; i < group; ++i) sum.v[i] = add_rn(sum.v[i], row.v[i]);
  }
  return sum;
}

} // namespace ty
