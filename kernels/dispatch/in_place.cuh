// Dispatch with in-place output, in one node: a sender stores a row directly at its first place in the output in the
// receiver's arena. There is no receive buffer.
//
//   Ds  counts for all ranks of the node, of all sources ──▶ every block that sends: where segments start on each rank
//       warp per token: its positions (metadata words of other blocks) ──▶ row of its first choice on each rank ──▶ tag
//       (N2)
//   Dr  warp per (source, token): tag ──▶ copies for further experts, from where the row lies
//
// A receiver loads and stores a row only for its further experts. But no row leaves before the counts of all sources
// have arrived. That costs small calls time: they are better off with a receive buffer.
//
// Why an output may be overwritten: whoever stores into rank d's output in epoch e has seen d's counts of e (N13).
// d publishes these in the launch of e, after all that its stream did with the output before.
#pragma once
#include "dispatch/receive.cuh"

namespace ty {

// Shared memory of a block.
struct InPlaceShared {
  DispatchShared dispatch;
  u32 rows[TY_MAX_COUNTS]; // [local rank][expert of it]: first rows of all sources, then where the segment starts
  u32 base[TY_MAX_COUNTS]; // [local rank][expert of it]: row of this rank's first
  u32 target[TY_MAX_BLOCK_THREADS / warp_size][warp_size]; // by warp: a token's row on each rank
  u32 refused;                                             // 1: this rank's own routing is unusable
  u32 room;                                                // ranks whose output has room, a bit each; 0 if refused
};
static_assert(TY_MAX_IN_PLACE_RANKS <= warp_size, "a lane and a bit each");
static_assert(sizeof(InPlaceShared) <= TY_DISPATCH_IN_PLACE_SHARED_BYTES, "layout.h sizes the launch");

// Sums the rows of an expert of a rank of this node: of all sources, and of those before this rank. By a thread. False
// once a deadline passed.
TY_DEVICE bool sum_counts(const Context auto &c, u64 epoch, u32 rank, u32 e, u32 &all, u32 &before) {
  bool failed = false;
  all = before = 0;
  TY_ROLLED
  for (u32 first = 0; first < c.ranks; first += sources_ahead) {
    u64 seen[sources_ahead];
    TY_UNROLL
    for (u32 i = 0; i < sources_ahead; ++i)
      seen[i] = first + i < c.ranks ? load_relaxed_sys(all_counts(c, c.local, first + i, rank, epoch) + e) : 0;
    TY_UNROLL
    for (u32 i = 0; i < sources_ahead; ++i) {
      u32 source = first + i, value = 0;
      if (source >= c.ranks) continue;
      if (!meta_value(epoch, seen[i], value))
        failed |= !wait_meta(c, epoch, source, all_counts(c, c.local, source, rank, epoch) + e, value);
      all += value;
      before += source < c.rank ? value : 0;
    }
  }
  return !failed;
}

// Computes where this rank's rows begin for every expert of the node. By a whole block. False once a deadline passed.
TY_DEVICE bool plan_targets(const DispatchArgs auto &a, u64 epoch) {
  const auto &c = a.context;
  InPlaceShared &shared = block_shared<InPlaceShared>();
  u32 experts = c.max_local_experts, inverse = ~0u / experts;
  bool failed = false;
  TY_ROLLED
  for (u32 i = thread_index(); i < c.node_ranks * experts; i += block_threads()) {
    auto [rank, e] = divide(i, experts, inverse);
    u32 all = 0, before = 0;
    failed |= !sum_counts(c, epoch, rank, e, all, before);
    store(&shared.rows[i], all);
    store(&shared.base[i], before);
  }
  // One faulty choice refuses a source's counts for all ranks: one word shows whether this rank's own are.
  if (thread_index() + 1 == block_threads()) {
    u32 value = 0;
    failed |= !wait_meta(c, epoch, c.rank, all_counts(c, c.local, c.rank, c.local, epoch) + experts, value);
    store(&shared.refused, value == meta_refused ? 1u : 0u);
    store(&shared.room, 0u);
  }
  if (block_any(failed)) return false;
  TY_ROLLED
  for (u32 rank = warp_index(); rank < c.node_ranks; rank += block_warps()) {
    u32 *rows = &shared.rows[rank * experts], *base = &shared.base[rank * experts];
    u32 needed = scan(rows, rows, experts, a.output.align, a.output.align_inverse);
    warp_barrier();
    TY_ROLLED
    for (u32 e = lane_index(); e < experts; e += warp_size) store(base + e, load(base + e) + load(rows + e));
    bool room = load(&shared.refused) == 0 && needed <= a.output.capacity;
    if (lane_index() == 0 && room) (void)atomic_or_block(&shared.room, 1u << rank);
  }
  // N13: what peers did with their outputs happens before their counts, which happen before the rows stored there.
  fence_acq_rel_sys();
  block_barrier();
  return true;
}

// The ranks of this node where an own token's row is stored; keeps the row on each for target_row. By a warp. Sets
// `stuck` once a deadline passed. A rank whose output has no such row gets none: the caller's choices may have changed
// since they were counted.
TY_DEVICE u64 find_targets(const DispatchArgs auto &a, u64 epoch, u32 token, bool &stuck) {
  const auto &c = a.context;
  InPlaceShared &shared = block_shared<InPlaceShared>();
  u32 room = load(&shared.room), k = lane_index(), value = 0, rank = ~0u, local = 0;
  if (room == 0) return 0;
  i32 expert = k < c.top_k ? choice_at(c, caller_choices(a), token, k) : -1;
  bool failed = false;
  if (is_expert(c, expert)) {
    ExpertOwner owner = owner_of(c, expert);
    if (owner.node() == c.node) {
      rank = owner.rank(), local = owner.local;
      failed = !wait_meta(c, epoch, c.rank, own_choice(c, static_cast<u64>(token) * c.top_k + k), value);
    }
  }
  bool first = rank != ~0u;
  TY_ROLLED
  for (u32 j = 1; j < c.top_k; ++j) {
    u32 other = shuffle(rank, lane_index() - j);
    if (j <= k && other == rank) first = false;
  }
  u32 row = ~0u;
  if (first && value != 0)
    row = load(&shared.base[rank * c.max_local_experts + local]) + ((value - 1) >> meta_expert_bits);
  bool there = row < static_cast<u32>(a.output.capacity);
  if (there) store(&shared.target[warp_index()][rank], row);
  room &= warp_or(there ? 1u << rank : 0);
  stuck = warp_ballot(failed) != 0;
  warp_barrier();
  return stuck ? 0 : room;
}

// The row on a rank, as find_targets kept it.
TY_DEVICE RowTo target_row(const Context auto &c, u32 rank) {
  u64 row = load(&block_shared<InPlaceShared>().target[warp_index()][rank]);
  return {reinterpret_cast<u64>(in_arena<char>(c, rank, c.regions.in_place_rows, 0, 0)) + row * c.row_bytes,
          reinterpret_cast<u64>(in_arena<u32>(c, rank, c.regions.in_place_scales, 0, 0) + row * c.scale_words)};
}

} // namespace ty
