// Dispatch, the sending phase: routing into META, rows into the inboxes of the ranks that need them, and into wire
// staging for the nodes that do.
#pragma once
#include "wire.cuh"

namespace ty {

// Shared memory of a dispatch block, 46 KiB.
struct DispatchShared {
  u32 bitmap[TY_BITMAP_WORDS];         // sending: tokens of a tile, one row a local expert and one for the rank
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // sending: rows counted so far; receiving: first row of each segment
  u32 scan[TY_MAX_BLOCK_THREADS];
  u32 source_tokens[TY_MAX_RANKS];
  u32 source_start[TY_MAX_RANKS]; // token layout: first row of each source
};
static_assert(sizeof(DispatchShared) == TY_DISPATCH_SHARED_BYTES, "layout.h tells the launcher");

// ---- input -------------------------------------------------------------------------------------------------

// Choices of some tokens: the caller's, or those that came from another node.
struct Choices {
  u64 idx;
  u64 idx_pitch; // bytes from token to token
  u64 weights;   // 0: all 1
  u64 weight_pitch;
  u32 index_bytes;
  u32 tokens; // 0 if unusable
  u32 source; // whose tokens they are
  bool bad;   // the caller's token count is unusable
  bool own;   // the caller's: to be checked, and reported
  i32 found;  // the token count as found
};

TY_DEVICE i64 choice_at(const Choices &in, u32 token, u32 k) {
  u64 row = in.idx + token * in.idx_pitch;
  if (in.index_bytes == 8) return load(pointer<const i64>(row) + k);
  return load(pointer<const i32>(row) + k);
}

TY_DEVICE float weight_at(const Choices &in, u32 token, u32 k) {
  return in.weights ? load(pointer<const float>(in.weights + token * in.weight_pitch) + k) : 1.0f;
}

TY_DEVICE Choices own_choices(const ty_dispatch_args &a) {
  const ty_tokens &t = a.tokens;
  u64 row = static_cast<u64>(a.context.top_k);
  i32 found = t.count_ptr ? load(pointer<const i32>(t.count_ptr)) : static_cast<i32>(t.count);
  bool bad = found < 0 || static_cast<u32>(found) > a.context.max_tokens;
  return {t.topk_idx,     row * t.index_bytes,
          t.topk_weight,  row * 4,
          t.index_bytes,  bad ? 0u : static_cast<u32>(found),
          a.context.rank, bad,
          true,           found};
}

struct ExpertHome {
  u32 node;
  u32 rank;
  u32 local;
};

TY_DEVICE ExpertHome home_of(const ty_context &c, i64 expert) {
  u64 packed = load(pointer<const u64>(c.expert_home) + expert);
  return {static_cast<u32>(packed & 0xffffu), static_cast<u32>(packed >> 16 & 0xffffu), static_cast<u32>(packed >> 32)};
}

TY_DEVICE bool is_expert(const ty_context &c, i64 expert) {
  return expert >= 0 && expert < static_cast<i64>(c.experts);
}

// Where a token goes, a bit each: ranks of this node, and other nodes.
struct Targets {
  u64 ranks;
  u64 nodes;
};

// Unusable experts are left out; META tells of them.
TY_DEVICE Targets targets_of(const ty_context &c, const Choices &in, u32 token) {
  Targets targets{0, 0};
  for (u32 k = 0; k < c.top_k; ++k) {
    i64 expert = choice_at(in, token, k);
    if (!is_expert(c, expert)) continue;
    ExpertHome home = home_of(c, expert);
    if (home.node == c.node) targets.ranks |= 1ull << home.rank;
    else if (home.node < c.nodes) targets.nodes |= 1ull << home.node;
  }
  return targets;
}

// ---- send: META --------------------------------------------------------------------------------------------

// What is wrong with choice k of a token: TY_ERROR_NONE, or the kind.
TY_DEVICE u32 fault_of_choice(const ty_context &c, const Choices &in, u32 token, u32 k, i64 expert) {
  if (expert == -1 || !in.own) return TY_ERROR_NONE;
  if (!is_expert(c, expert)) return TY_ERROR_ROUTING_RANGE;
  for (u32 j = 0; j < k; ++j)
    if (choice_at(in, token, j) == expert) return TY_ERROR_ROUTING_DUPLICATE;
  return TY_ERROR_NONE;
}

// Finds the first faulty choice again, slowly, and reports it. One thread of the rank.
TY_DEVICE void report_routing(const ty_context &c, const Choices &in, u64 epoch) {
  for (u32 token = 0; token < in.tokens; ++token)
    for (u32 k = 0; k < c.top_k; ++k) {
      i64 expert = choice_at(in, token, k);
      u32 fault = fault_of_choice(c, in, token, k, expert);
      if (fault == TY_ERROR_NONE) continue;
      report(c, TY_DIRECTION_DISPATCH, fault, 0, c.rank, epoch, token, k, static_cast<u64>(expert));
      return;
    }
}

// Tokens before `token` in the tile's bitmap row.
TY_DEVICE u32 earlier_in_row(const u32 *row, u32 token) {
  u32 count = 0;
  for (u32 word = 0; word < token / 32; ++word) count += popcount(load(row + word));
  return count + popcount(load(row + token / 32) & ((1u << (token % 32)) - 1));
}

// Tokens in a bitmap row.
TY_DEVICE u32 all_in_row(const u32 *row, u32 words) {
  return earlier_in_row(row, words * 32 - 1) + ((load(row + words - 1) >> 31) & 1);
}

// Where META for one destination is written.
struct MetaOut {
  u32 *counts;
  i32 *rows, *slots, *tokens, *experts, *positions;
  float *weights;
};

TY_DEVICE MetaOut meta_of(const ty_context &c, u32 owner, u32 source, u64 epoch) {
  const ty_regions &r = c.regions;
  return {
      in_arena<u32>(c, owner, r.meta_counts, epoch, source),   in_arena<i32>(c, owner, r.meta_rows, epoch, source),
      in_arena<i32>(c, owner, r.meta_slots, epoch, source),    in_arena<i32>(c, owner, r.meta_tokens, epoch, source),
      in_arena<i32>(c, owner, r.meta_experts, epoch, source),  in_arena<i32>(c, owner, r.meta_positions, epoch, source),
      in_arena<float>(c, owner, r.meta_weights, epoch, source)};
}

// A run of tokens whose bitmap fits in shared memory, `words` words a row.
struct Tile {
  u32 destination; // rank of this node
  u32 experts;     // of the destination; the bitmap row behind theirs is the rank's
  u32 first;
  u32 count;
  u32 words;
};

// Marks a tile's tokens in the bitmap. True if a choice is faulty.
TY_DEVICE bool mark_tile(const ty_context &c, const Choices &in, DispatchShared &shared, const Tile &tile) {
  bool faulty = false;
  for (u32 i = thread_index(); i < tile.count * c.top_k; i += block_threads()) {
    u32 token = i / c.top_k, k = i % c.top_k;
    i64 expert = choice_at(in, tile.first + token, k);
    faulty |= fault_of_choice(c, in, tile.first + token, k, expert) != TY_ERROR_NONE;
    if (!is_expert(c, expert)) continue;
    ExpertHome home = home_of(c, expert);
    if (home.node != c.node || home.rank != tile.destination) continue;
    atomic_or_block(&shared.bitmap[home.local * tile.words + token / 32], 1u << (token % 32));
    atomic_or_block(&shared.bitmap[tile.experts * tile.words + token / 32], 1u << (token % 32));
  }
  return faulty;
}

// The same tile: writes per choice its local expert, position and weight, per token its row and slot.
TY_DEVICE void write_tile(const ty_context &c, const Choices &in, DispatchShared &shared, const MetaOut &meta,
                          const Tile &tile) {
  for (u32 i = thread_index(); i < tile.count * c.top_k; i += block_threads()) {
    u32 token = i / c.top_k, k = i % c.top_k;
    u64 index = static_cast<u64>(tile.first) * c.top_k + i;
    i64 expert = choice_at(in, tile.first + token, k);
    ExpertHome home = is_expert(c, expert) ? home_of(c, expert) : ExpertHome{~0u, 0, 0};
    bool there = home.node == c.node && home.rank == tile.destination;
    store(meta.experts + index, there ? static_cast<i32>(home.local) : -1);
    if (!there) continue;
    u32 position = load(&shared.start[home.local]) + earlier_in_row(&shared.bitmap[home.local * tile.words], token);
    store(meta.positions + index, static_cast<i32>(position));
    store(meta.weights + index, weight_at(in, tile.first + token, k));
  }
  const u32 *present = &shared.bitmap[tile.experts * tile.words];
  for (u32 token = thread_index(); token < tile.count; token += block_threads()) {
    bool there = (load(present + token / 32) >> (token % 32)) & 1;
    u32 earlier = load(&shared.start[tile.experts]);
    store(meta.rows + tile.first + token, there ? static_cast<i32>(earlier + earlier_in_row(present, token)) : -1);
    if (!there) continue;
    u64 ranks = targets_of(c, in, tile.first + token).ranks;
    store(meta.slots + tile.first + token, static_cast<i32>(popcount64(bits_below(ranks, tile.destination))));
  }
}

// META of a source for one rank of this node, all but its flag. By a whole block. True if a choice is faulty. Every
// destination's META is built from all tokens, so that a single fault anywhere makes all of them say "nothing".
TY_DEVICE bool build_meta(const ty_context &c, const Choices &in, DispatchShared &shared, u64 epoch, u32 destination) {
  u32 experts_there = load(pointer<const u32>(c.local_count) + world_rank(c, destination));
  MetaOut meta = meta_of(c, destination, in.source, epoch);
  u32 most_words = TY_BITMAP_WORDS / (experts_there + 1);
  u32 all_words = (in.tokens + 31) / 32;
  u32 words = all_words < most_words ? all_words : most_words;
  for (u32 e = thread_index(); e <= experts_there; e += block_threads()) store(&shared.start[e], 0u);

  bool faulty = in.bad;
  for (u32 first = 0; first < in.tokens; first += words * 32) {
    u32 left = in.tokens - first;
    Tile tile{destination, experts_there, first, left < words * 32 ? left : words * 32, words};
    for (u32 i = thread_index(); i < (experts_there + 1) * words; i += block_threads()) store(&shared.bitmap[i], 0u);
    block_barrier();
    faulty |= mark_tile(c, in, shared, tile);
    block_barrier();
    write_tile(c, in, shared, meta, tile);
    block_barrier();
    for (u32 e = thread_index(); e <= experts_there; e += block_threads())
      store(&shared.start[e], load(&shared.start[e]) + all_in_row(&shared.bitmap[e * words], words));
    block_barrier();
  }
  faulty = block_any(faulty);
  for (u32 e = thread_index(); e <= experts_there; e += block_threads())
    store(meta.counts + (e < experts_there ? e : c.max_local_experts), faulty ? 0u : load(&shared.start[e]));
  if (thread_index() == 0) store(meta.counts + c.max_local_experts + 1, faulty ? 0u : in.tokens);
  return faulty;
}

// The flag behind META. By a whole block.
TY_DEVICE void raise_meta_flag(const ty_context &c, u64 epoch, u32 destination, u32 source, u32 status) {
  block_barrier();
  // N1: the block's META stores happen before this release through the barrier; wait_flag(TY_SITE_META) acquires.
  if (thread_index() == 0)
    store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags, epoch, source), flag_value(epoch, status));
}

// META of this rank's tokens for one rank of its node. By a whole block.
TY_DEVICE void publish_meta(const ty_dispatch_args &a, const Choices &in, DispatchShared &shared, u64 epoch,
                            u32 destination) {
  const ty_context &c = a.context;
  bool faulty = build_meta(c, in, shared, epoch, destination);
  if (destination == c.local && thread_index() == 0) {
    ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
    store(&head->state, static_cast<u32>(TY_HANDLE_EMPTY));
    store(&head->own_tokens, in.tokens);
    store(&head->own_bad, faulty ? 1u : 0u);
    if (in.bad)
      report(c, TY_DIRECTION_DISPATCH, TY_ERROR_TOKEN_COUNT, 0, c.rank, epoch,
             static_cast<u64>(static_cast<i64>(in.found)), c.max_tokens, 0);
    else if (faulty) report_routing(c, in, epoch);
  }
  raise_meta_flag(c, epoch, destination, c.rank, faulty ? TY_STATUS_BAD_INPUT : TY_STATUS_OK);
}

// ---- send: rows --------------------------------------------------------------------------------------------

// A row as it lies somewhere: payload, and scale words `scale_stride` apart.
struct RowAt {
  u64 payload;
  u64 scales;
  u64 scale_stride;
};

// Copies a row, read once, to the place of every bit of a mask: the calling thread's share of it.
template <typename Place> TY_DEVICE void copy_to_all(const ty_context &c, const RowAt &row, u64 mask, Place place) {
  for (u32 v = thread_index(); v < c.row_bytes / 16; v += block_threads()) {
    Vec16 data = load16(pointer<const void>(row.payload + v * 16));
    for (u64 left = mask; left; left &= left - 1) store16(place(lowest_bit(left)) + v * 16, data);
  }
  for (u32 w = thread_index(); w < c.scale_words; w += block_threads()) {
    u32 scale = load(pointer<const u32>(row.scales) + w * row.scale_stride);
    for (u64 left = mask; left; left &= left - 1)
      store(reinterpret_cast<u32 *>(place(lowest_bit(left)) + c.row_bytes) + w, scale);
  }
}

// Pushes a source's row, read once, to every rank of this node in the mask, then raises its tags. By a whole block.
TY_DEVICE void push_row(const ty_context &c, const RowAt &row, u64 epoch, u32 source, u32 token, u64 mask) {
  u64 slot = static_cast<u64>(token) * c.slot_bytes;
  copy_to_all(c, row, mask, [&](u32 rank) { return in_arena<char>(c, rank, c.regions.rows, epoch, source) + slot; });
  block_barrier();
  // N2: as N1; wait_tag(TY_SITE_ROW) acquires.
  for (u32 rank = thread_index(); rank < c.node_ranks; rank += block_threads())
    if ((mask >> rank) & 1) store_release_sys(in_arena<u64>(c, rank, c.regions.row_tags, epoch, source) + token, epoch);
}

TY_DEVICE RowAt own_row(const ty_dispatch_args &a, u32 token) {
  const ty_tokens &t = a.tokens;
  return {t.x + token * t.x_pitch, t.scales + 4 * token * t.scale_row_stride, t.scale_column_stride};
}

} // namespace ty
