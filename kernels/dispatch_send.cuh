// Dispatch, the sending phase: routing into META, rows into the inboxes of the ranks that need them.
#pragma once
#include "context.cuh"

namespace ty {

// Shared memory of a dispatch block, 43 KiB.
struct DispatchShared {
  u32 bitmap[TY_BITMAP_WORDS];         // sending: tokens of a tile, one row a local expert and one for the rank
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // sending: rows counted so far; receiving: first row of each segment
  u32 scan[TY_MAX_BLOCK_THREADS];
  u32 source_tokens[TY_MAX_NODE_RANKS];
  u32 source_start[TY_MAX_NODE_RANKS]; // token layout: first row of each source
};
static_assert(sizeof(DispatchShared) == TY_DISPATCH_SHARED_BYTES, "layout.h tells the launcher");

// ---- input -------------------------------------------------------------------------------------------------

TY_DEVICE i64 choice_at(const ty_dispatch_args &a, u64 index) {
  if (a.tokens.index_bytes == 8) return load(pointer<const i64>(a.tokens.topk_idx) + index);
  return load(pointer<const i32>(a.tokens.topk_idx) + index);
}

struct ExpertHome {
  u32 rank;
  u32 local;
};

TY_DEVICE ExpertHome home_of(const ty_context &c, i64 expert) {
  u64 packed = load(pointer<const u64>(c.expert_home) + expert);
  return {static_cast<u32>(packed), static_cast<u32>(packed >> 32)};
}

TY_DEVICE bool is_expert(const ty_context &c, i64 expert) {
  return expert >= 0 && expert < static_cast<i64>(c.experts);
}

// The ranks that token's row goes to, a bit each. Unusable experts are left out; META tells of them.
TY_DEVICE u64 ranks_of_token(const ty_dispatch_args &a, u32 token) {
  const ty_context &c = a.context;
  u64 mask = 0;
  for (u32 k = 0; k < c.top_k; ++k) {
    i64 expert = choice_at(a, static_cast<u64>(token) * c.top_k + k);
    if (is_expert(c, expert)) mask |= 1ull << home_of(c, expert).rank;
  }
  return mask;
}

struct TokenCount {
  u32 tokens; // 0 if unusable
  bool bad;
  i32 found;
};

TY_DEVICE TokenCount token_count(const ty_dispatch_args &a) {
  i32 found = a.tokens.count_ptr ? load(pointer<const i32>(a.tokens.count_ptr)) : static_cast<i32>(a.tokens.count);
  bool bad = found < 0 || static_cast<u32>(found) > a.context.max_tokens;
  return {bad ? 0u : static_cast<u32>(found), bad, found};
}

// ---- send: META --------------------------------------------------------------------------------------------

// What is wrong with choice k of a token: TY_ERROR_NONE, or the kind.
TY_DEVICE u32 fault_of_choice(const ty_dispatch_args &a, u32 token, u32 k, i64 expert) {
  if (expert == -1) return TY_ERROR_NONE;
  if (!is_expert(a.context, expert)) return TY_ERROR_ROUTING_RANGE;
  for (u32 j = 0; j < k; ++j)
    if (choice_at(a, static_cast<u64>(token) * a.context.top_k + j) == expert) return TY_ERROR_ROUTING_DUPLICATE;
  return TY_ERROR_NONE;
}

// Finds the first faulty choice again, slowly, and reports it. One thread of the rank.
TY_DEVICE void report_routing(const ty_dispatch_args &a, u64 epoch, u32 tokens) {
  const ty_context &c = a.context;
  for (u32 token = 0; token < tokens; ++token)
    for (u32 k = 0; k < c.top_k; ++k) {
      i64 expert = choice_at(a, static_cast<u64>(token) * c.top_k + k);
      u32 fault = fault_of_choice(a, token, k, expert);
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

// Where META for one destination is written.
struct MetaOut {
  u32 *counts;
  i32 *rows, *slots, *experts, *positions;
  float *weights;
};

TY_DEVICE MetaOut meta_of(const ty_context &c, u32 owner, u32 source, u64 epoch) {
  const ty_regions &r = c.regions;
  return {in_arena<u32>(c, owner, r.meta_counts, epoch, source),
          in_arena<i32>(c, owner, r.meta_rows, epoch, source),
          in_arena<i32>(c, owner, r.meta_slots, epoch, source),
          in_arena<i32>(c, owner, r.meta_experts, epoch, source),
          in_arena<i32>(c, owner, r.meta_positions, epoch, source),
          in_arena<float>(c, owner, r.meta_weights, epoch, source)};
}

// One tile of tokens [first, first + count): marks them in the bitmap. True if a choice is faulty.
TY_DEVICE bool mark_tile(const ty_dispatch_args &a, DispatchShared &shared, u32 destination, u32 experts_there,
                         u32 first, u32 count, u32 words) {
  const ty_context &c = a.context;
  bool faulty = false;
  for (u32 i = thread_index(); i < count * c.top_k; i += block_threads()) {
    u32 token = i / c.top_k, k = i % c.top_k;
    i64 expert = choice_at(a, static_cast<u64>(first + token) * c.top_k + k);
    faulty |= fault_of_choice(a, first + token, k, expert) != TY_ERROR_NONE;
    if (!is_expert(c, expert)) continue;
    ExpertHome home = home_of(c, expert);
    if (home.rank != destination) continue;
    atomic_or_block(&shared.bitmap[home.local * words + token / 32], 1u << (token % 32));
    atomic_or_block(&shared.bitmap[experts_there * words + token / 32], 1u << (token % 32));
  }
  return faulty;
}

// The same tile: writes per choice its local expert, position and weight, per token its row and the home's slot.
TY_DEVICE void write_tile(const ty_dispatch_args &a, DispatchShared &shared, const MetaOut &meta, u32 destination,
                          u32 experts_there, u32 first, u32 count, u32 words) {
  const ty_context &c = a.context;
  const float *weights = pointer<const float>(a.tokens.topk_weight);
  for (u32 i = thread_index(); i < count * c.top_k; i += block_threads()) {
    u32 token = i / c.top_k;
    u64 index = static_cast<u64>(first) * c.top_k + i;
    i64 expert = choice_at(a, index);
    ExpertHome home = is_expert(c, expert) ? home_of(c, expert) : ExpertHome{~0u, 0};
    bool there = home.rank == destination;
    store(meta.experts + index, there ? static_cast<i32>(home.local) : -1);
    if (!there) continue;
    u32 position = load(&shared.start[home.local]) + earlier_in_row(&shared.bitmap[home.local * words], token);
    store(meta.positions + index, static_cast<i32>(position));
    store(meta.weights + index, weights ? load(weights + index) : 1.0f);
  }
  const u32 *present = &shared.bitmap[experts_there * words];
  for (u32 token = thread_index(); token < count; token += block_threads()) {
    bool there = (load(present + token / 32) >> (token % 32)) & 1;
    i32 row = there ? static_cast<i32>(load(&shared.start[experts_there]) + earlier_in_row(present, token)) : -1;
    store(meta.rows + first + token, row);
    if (!there) continue;
    u64 below = ranks_of_token(a, first + token) & ((1ull << destination) - 1);
    store(meta.slots + first + token, static_cast<i32>(popcount64(below)));
  }
}

// META for one destination, its flag last. By a whole block. Every destination's META is built from all tokens, so
// that a single fault anywhere makes all of them say "nothing".
TY_DEVICE void publish_meta(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch, u32 destination) {
  const ty_context &c = a.context;
  TokenCount input = token_count(a);
  u32 experts_there = load(pointer<const u32>(c.local_count) + destination);
  MetaOut meta = meta_of(c, destination, c.rank, epoch);
  u32 most_words = TY_BITMAP_WORDS / (experts_there + 1);
  u32 all_words = (input.tokens + 31) / 32;
  u32 words = all_words < most_words ? all_words : most_words;
  for (u32 e = thread_index(); e <= experts_there; e += block_threads()) store(&shared.start[e], 0u);

  bool faulty = input.bad;
  for (u32 first = 0; first < input.tokens; first += words * 32) {
    u32 left = input.tokens - first;
    u32 count = left < words * 32 ? left : words * 32;
    for (u32 i = thread_index(); i < (experts_there + 1) * words; i += block_threads()) store(&shared.bitmap[i], 0u);
    block_barrier();
    faulty |= mark_tile(a, shared, destination, experts_there, first, count, words);
    block_barrier();
    write_tile(a, shared, meta, destination, experts_there, first, count, words);
    block_barrier();
    for (u32 e = thread_index(); e <= experts_there; e += block_threads())
      store(&shared.start[e], load(&shared.start[e]) + earlier_in_row(&shared.bitmap[e * words], words * 32 - 1) +
                                  ((load(&shared.bitmap[e * words + words - 1]) >> 31) & 1));
    block_barrier();
  }
  faulty = block_any(faulty);

  for (u32 e = thread_index(); e <= experts_there; e += block_threads())
    store(meta.counts + (e < experts_there ? e : c.max_local_experts), faulty ? 0u : load(&shared.start[e]));
  if (thread_index() == 0) store(meta.counts + c.max_local_experts + 1, faulty ? 0u : input.tokens);
  if (destination == c.rank && thread_index() == 0) {
    ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
    store(&head->state, static_cast<u32>(TY_HANDLE_EMPTY));
    store(&head->own_tokens, input.tokens);
    store(&head->own_bad, faulty ? 1u : 0u);
    if (input.bad)
      report(c, TY_DIRECTION_DISPATCH, TY_ERROR_TOKEN_COUNT, 0, c.rank, epoch,
             static_cast<u64>(static_cast<i64>(input.found)), c.max_tokens, 0);
    else if (faulty) report_routing(a, epoch, input.tokens);
  }
  block_barrier();
  // E7: the block's META stores happen before this release through the barrier; wait_flag(TY_SITE_META) acquires.
  if (thread_index() == 0)
    store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags, epoch, c.rank),
                      flag_value(epoch, faulty ? TY_STATUS_BAD_INPUT : TY_STATUS_OK));
}

// ---- send: rows --------------------------------------------------------------------------------------------

// Pushes one token's row, read once, to every rank in its mask, then raises its tags. By a whole block.
TY_DEVICE void push_row(const ty_dispatch_args &a, u64 epoch, u32 token) {
  const ty_context &c = a.context;
  u64 mask = ranks_of_token(a, token);
  u64 slot = static_cast<u64>(token) * c.slot_bytes;
  u64 x = a.tokens.x + token * a.tokens.x_pitch;
  for (u32 v = thread_index(); v < c.row_bytes / 16; v += block_threads()) {
    Vec16 data = load16(pointer<const void>(x + v * 16));
    for (u64 left = mask; left; left &= left - 1) {
      char *inbox = in_arena<char>(c, lowest_bit(left), c.regions.rows, epoch, c.rank);
      store16(inbox + slot + v * 16, data);
    }
  }
  const u32 *scales = pointer<const u32>(a.tokens.scales) + token * a.tokens.scale_row_stride;
  for (u32 w = thread_index(); w < c.scale_words; w += block_threads()) {
    u32 scale = load(scales + w * a.tokens.scale_column_stride);
    for (u64 left = mask; left; left &= left - 1) {
      char *inbox = in_arena<char>(c, lowest_bit(left), c.regions.rows, epoch, c.rank);
      store(reinterpret_cast<u32 *>(inbox + slot + c.row_bytes) + w, scale);
    }
  }
  if (thread_index() == 0) store(pointer<u64>(a.handle.rank_mask) + token, mask);
  block_barrier();
  // E7: as in publish_meta; wait_tag(TY_SITE_ROW) acquires.
  for (u32 rank = thread_index(); rank < c.ranks; rank += block_threads())
    if ((mask >> rank) & 1) store_release_sys(in_arena<u64>(c, rank, c.regions.row_tags, epoch, c.rank) + token, epoch);
}

TY_DEVICE void dispatch_send(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  for (u32 rank = block_index(); rank < c.ranks; rank += block_count()) publish_meta(a, shared, epoch, rank);
  // Rows from the far end of the grid, so that the blocks busy with META get their rows last.
  u32 tokens = token_count(a).tokens;
  for (u32 token = block_count() - 1 - block_index(); token < tokens; token += block_count()) push_row(a, epoch, token);
}

} // namespace ty
