// Dispatch, the sending phase inside a node: routing into META, rows into the inboxes of the ranks that need them.
#pragma once
#include "quantize.cuh"
#include "wire.cuh"

namespace ty {

// Shared memory of a dispatch block, 92 KiB: what builds META, and what places rows, side by side.
struct MetaShared {
  u32 bitmap[TY_BITMAP_WORDS];         // tokens of a tile, one row a local expert and one for the rank
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // rows counted so far
};
struct PlaceShared {
  u32 before[TY_MAX_COUNTS];           // [source][local expert]: rows of the expert from sources before
  u32 rows[TY_MAX_LOCAL_EXPERTS + 1];  // of each local expert
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // first output row of each local expert's segment, and the end of all
  u32 source_rows[TY_MAX_RANKS];
  u32 source_start[TY_MAX_RANKS]; // token layout: first output row of each source
  u32 source_first[TY_MAX_RANKS]; // tokens [first, end) of each source are of this wave
  u32 source_end[TY_MAX_RANKS];
  u32 needed;
  u32 used;
  u32 most;   // tokens of a source in this wave
  u32 tokens; // of all sources
};
// Items that a team's warps carry, parts of rows: this warp's are first, first + step, ... below end.
struct Work {
  u32 first;
  u32 end;
  u32 step;
  u32 cut; // rows are in 2^cut parts
};

// What a warp carries in a pass.
struct Pass {
  Work work;
  u32 first;   // number of the wave's first row among the call's: own tokens, or those of the source that is forwarded
  u32 served;  // which source that is
  u32 headers; // of its message
};
struct DispatchShared {
  MetaShared meta;
  PlaceShared place;
  Pass pass[TY_MAX_BLOCK_THREADS / warp_size]; // by warp; here, since registers are few
};
static_assert(sizeof(DispatchShared) <= TY_DISPATCH_SHARED_BYTES, "layout.h tells the launcher");

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
  bool bad;   // the caller's token count is unusable, or a home refused its routing
  bool own;   // the caller's: to be checked, and reported
  i32 found;  // the token count as found
};

// An expert's number, or -1; any other number, however wide, is unusable_expert.
constexpr i32 unusable_expert = -2;
TY_DEVICE i32 choice_at(const Choices &in, u32 token, u32 k) {
  u64 at = in.idx + token * in.idx_pitch + static_cast<u64>(k) * in.index_bytes;
  i32 low = load(pointer<const i32>(at));
  // One way for both widths.
  i32 high = in.index_bytes == 8 ? load(pointer<const i32>(at) + 1) : low >> 31;
  return high == low >> 31 && low >= -1 ? low : unusable_expert;
}

TY_DEVICE float weight_at(const Choices &in, u32 token, u32 k) {
  return in.weights ? load(pointer<const float>(in.weights + token * in.weight_pitch) + k) : 1.0f;
}

// The caller's, but for how many they are.
TY_DEVICE Choices caller_choices(const ty_dispatch_args &a) {
  const ty_tokens &t = a.tokens;
  u64 row = static_cast<u64>(a.context.top_k);
  return {t.topk_idx, row * t.index_bytes, t.topk_weight, row * 4, t.index_bytes, 0, a.context.rank, false, true, 0};
}

TY_DEVICE Choices own_choices(const ty_dispatch_args &a) {
  const ty_tokens &t = a.tokens;
  Choices in = caller_choices(a);
  in.found = t.count_ptr ? load(pointer<const i32>(t.count_ptr)) : static_cast<i32>(t.count);
  in.bad = in.found < 0 || static_cast<u32>(in.found) > a.context.max_tokens;
  in.tokens = in.bad ? 0u : static_cast<u32>(in.found);
  return in;
}

struct ExpertHome {
  u32 place; // node, and rank within it, 16 bits each
  u32 local;
  TY_DEVICE u32 node() const { return place & 0xffffu; }
  TY_DEVICE u32 rank() const { return place >> 16; }
};

TY_DEVICE ExpertHome home_of(const ty_context &c, i32 expert) {
  if (c.even_experts != 0) {
    // Reckoned, since the table would be a second trip to memory behind the choice itself.
    u32 rank = static_cast<u32>(static_cast<u64>(expert) * c.even_inverse >> 32);
    return {rank << 16, static_cast<u32>(expert) - rank * c.even_experts};
  }
  u64 packed = load(pointer<const u64>(c.expert_home) + expert);
  return {static_cast<u32>(packed), static_cast<u32>(packed >> 32)};
}

TY_DEVICE bool is_expert(const ty_context &c, i32 expert) { return static_cast<u32>(expert) < c.experts; }

// Where a token goes, a bit each: ranks of this node, and other nodes.
struct Targets {
  u64 ranks;
  u64 nodes;
};

// Where choice k leads. Unusable experts lead nowhere; META tells of them.
TY_DEVICE Targets target_of(const ty_context &c, const Choices &in, u32 token, u32 k) {
  i32 expert = choice_at(in, token, k);
  if (!is_expert(c, expert)) return {0, 0};
  ExpertHome home = home_of(c, expert);
  if (home.node() == c.node) return {1ull << home.rank(), 0};
  return {0, home.node() < c.nodes ? 1ull << home.node() : 0};
}

// The OR of the lanes' masks, of which only the lowest `bits` may be set.
TY_DEVICE u64 warp_or_mask(u64 mask, u32 bits) {
  u64 low = warp_or(static_cast<u32>(mask));
  return bits <= 32 ? low : static_cast<u64>(warp_or(static_cast<u32>(mask >> 32))) << 32 | low;
}

// By a warp, a lane a choice.
TY_DEVICE u64 warp_ranks_of(const ty_context &c, const Choices &in, u32 token) {
  u32 k = lane_index();
  return warp_or_mask(k < c.top_k ? target_of(c, in, token, k).ranks : 0, c.node_ranks);
}
TY_DEVICE u64 warp_nodes_of(const ty_context &c, const Choices &in, u32 token) {
  u32 k = lane_index();
  return warp_or_mask(k < c.top_k ? target_of(c, in, token, k).nodes : 0, c.nodes);
}

// ---- send: META --------------------------------------------------------------------------------------------

// What is wrong with choice k of a token: TY_ERROR_NONE, or the kind.
TY_DEVICE u32 fault_of_choice(const ty_context &c, const Choices &in, u32 token, u32 k, i32 expert) {
  if (expert == -1 || !in.own) return TY_ERROR_NONE;
  if (!is_expert(c, expert)) return TY_ERROR_ROUTING_RANGE;
  bool twice = false;
  for (u32 j = 0; j < k; ++j) twice |= choice_at(in, token, j) == expert;
  return twice ? TY_ERROR_ROUTING_DUPLICATE : TY_ERROR_NONE;
}

// Finds the first faulty choice again, slowly, and reports it. One thread of the rank.
TY_DEVICE void report_routing(const ty_context &c, const Choices &in, u64 epoch) {
  for (u32 token = 0; token < in.tokens; ++token)
    for (u32 k = 0; k < c.top_k; ++k) {
      u32 fault = fault_of_choice(c, in, token, k, choice_at(in, token, k));
      if (fault == TY_ERROR_NONE) continue;
      u64 row = in.idx + token * in.idx_pitch;
      i64 expert = in.index_bytes == 8 ? load(pointer<const i64>(row) + k) : load(pointer<const i32>(row) + k);
      report(c, TY_DIRECTION_DISPATCH, fault, 0, c.rank, epoch, token, k, static_cast<u64>(expert));
      return;
    }
}

// Tokens before `token` in the tile's bitmap row.
TY_DEVICE u32 earlier_in_row(const u32 *row, u32 token) {
  u32 count = 0;
  TY_ROLLED
  for (u32 word = 0; word < token / 32; ++word) count += popcount(load(row + word));
  return count + popcount(load(row + token / 32) & ((1u << (token % 32)) - 1));
}

// Tokens in a bitmap row.
TY_DEVICE u32 all_in_row(const u32 *row, u32 words) {
  return earlier_in_row(row, words * 32 - 1) + ((load(row + words - 1) >> 31) & 1);
}

// Where META of one source lies.
struct Meta {
  u64 *counts, *tokens, *homes, *choices, *weights;
};

TY_DEVICE Meta meta_of(const ty_context &c, u32 owner, u32 source, u64 epoch) {
  const ty_regions &r = c.regions;
  return {in_arena<u64>(c, owner, r.meta_counts, epoch, source), in_arena<u64>(c, owner, r.meta_tokens, epoch, source),
          in_arena<u64>(c, owner, r.meta_homes, epoch, source), in_arena<u64>(c, owner, r.meta_choices, epoch, source),
          in_arena<u64>(c, owner, r.meta_weights, epoch, source)};
}

constexpr u32 meta_expert_bits = 11, meta_slot_bits = 5;
static_assert(TY_MAX_LOCAL_EXPERTS < 1 << meta_expert_bits && TY_MAX_TOP_K <= 1 << meta_slot_bits, "fields of META");
static_assert(static_cast<u64>(TY_MAX_TOKENS) << meta_expert_bits <= 1u << 31, "fields of META");

// A weight as a META word carries it: bits that are all ones have no successor, and become another NaN.
TY_DEVICE u32 weight_bits(float weight) {
  u32 bits = same_bits<u32>(weight);
  return bits == ~0u ? bits - 1 : bits;
}

// A tile: a run of tokens whose bitmap fits in shared memory, `words` words a row.
struct Tile {
  u32 destination; // rank of this node
  u32 experts;     // of a rank at the most; the bitmap row behind theirs is the rank's
  u32 first;
  u32 count;
  u32 words;
};

// Choices that a thread looks up at once.
constexpr u32 choices_ahead = 2;

// A choice, and where it leads; home is of no node where there is no such expert.
struct Choice {
  u32 token;
  u32 k;
  i32 expert;
  ExpertHome home;
  float weight;
};

// Calls use(i, choice) for all choices of a tile, the calling member's share of them: from the team's last member on,
// since where choices are few its first have other things to do.
template <typename Use>
TY_DEVICE void for_choices(const ty_context &c, const Team &team, const Choices &in, const Tile &tile, Use use) {
  u32 all = tile.count * c.top_k, step = team_threads(team), i = step - 1 - team_thread(team);
  // Where the next choice stands, and how far on from there the one behind it.
  u32 token = i / c.top_k, k = i % c.top_k, tokens = step / c.top_k, choices = step % c.top_k;
  TY_ROLLED
  while (i < all) {
    Choice batch[choices_ahead];
    TY_UNROLL
    for (u32 j = 0; j < choices_ahead; ++j) {
      bool there = i + j * step < all;
      i32 expert = there ? choice_at(in, tile.first + token, k) : -1;
      batch[j] = {token, k, expert, {~0u, 0}, there ? weight_at(in, tile.first + token, k) : 0.0f};
      k += choices;
      token += tokens + (k >= c.top_k ? 1 : 0);
      if (k >= c.top_k) k -= c.top_k;
    }
    TY_UNROLL
    for (u32 j = 0; j < choices_ahead; ++j)
      if (is_expert(c, batch[j].expert)) batch[j].home = home_of(c, batch[j].expert);
    TY_UNROLL
    for (u32 j = 0; j < choices_ahead; ++j, i += step)
      if (i < all) use(i, batch[j]);
  }
}

// Choices of one token that a thread looks up at once.
constexpr u32 group_choices = 8;

// Choices [first, first + group_choices) of a token, and where they lead.
struct ChoiceGroup {
  u32 first;
  i32 experts[group_choices];
  ExpertHome homes[group_choices];
};

TY_DEVICE ChoiceGroup look_up(const ty_context &c, const Choices &in, u32 token, u32 first) {
  ChoiceGroup loaded;
  loaded.first = first;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    loaded.experts[j] = token < in.tokens && first + j < c.top_k ? choice_at(in, token, first + j) : -1;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    loaded.homes[j] = is_expert(c, loaded.experts[j]) ? home_of(c, loaded.experts[j]) : ExpertHome{~0u, 0};
  return loaded;
}

// Whether a choice of the group is unusable; only the caller's are looked at. As fault_of_choice.
TY_DEVICE bool is_faulty(const ty_context &c, const Choices &in, u32 token, const ChoiceGroup &loaded) {
  if (!in.own) return false;
  bool faulty = false;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j) {
    i32 expert = loaded.experts[j];
    bool twice = false;
    TY_UNROLL
    for (u32 i = 0; i < j; ++i) twice |= loaded.experts[i] == expert;
    faulty |= expert != -1 && (twice || !is_expert(c, expert));
  }
  // Against the groups before.
  TY_ROLLED
  for (u32 k = 0; token < in.tokens && k < loaded.first; ++k) {
    i32 before = choice_at(in, token, k);
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) faulty |= before != -1 && loaded.experts[j] == before;
  }
  return faulty;
}

// Calls use(token, group) for all choices of a tile, a thread a token, and marks in `present` the tokens that it says
// true of. Calls ready() once before, while the first are being loaded. By a team; a warp's lanes stay together, and
// those behind the last token are given no choices.
template <typename Ready, typename Use>
TY_DEVICE void for_tokens(const ty_context &c, const Team &team, const Choices &in, const Tile &tile, u32 *present,
                          Ready ready, Use use) {
  u32 token = team_thread(team), first = 0;
  bool there = false;
  TY_ROLLED
  for (bool begins = true;; begins = false) {
    ChoiceGroup loaded = look_up(c, in, token < tile.count ? tile.first + token : in.tokens, first);
    if (begins) ready();
    if (token - lane_index() >= tile.count) return;
    there |= use(token, loaded);
    first += group_choices;
    if (first < c.top_k) continue;
    u32 word = warp_ballot(there);
    if (lane_index() == 0) store(present + token / 32, word);
    token += team_threads(team);
    first = 0;
    there = false;
  }
}

TY_DEVICE bool is_there(const ty_context &c, const Tile &tile, const ExpertHome &home) {
  return home.node() == c.node && home.rank() == tile.destination;
}

// Marks a tile's tokens in the bitmap. By a team, whose members meet behind it. Whether a choice is faulty.
TY_DEVICE bool mark_tile(const ty_context &c, const Team &team, const Choices &in, MetaShared &shared,
                         const Tile &tile) {
  bool faulty = false;
  auto clear = [&] {
    for (u32 i = team_thread(team); i < (tile.experts + 1) * tile.words; i += team_threads(team))
      store(&shared.bitmap[i], 0u);
    team_barrier(team);
  };
  u32 *present = &shared.bitmap[tile.experts * tile.words];
  for_tokens(c, team, in, tile, present, clear, [&](u32 token, const ChoiceGroup &loaded) {
    faulty |= is_faulty(c, in, tile.first + token, loaded);
    bool there = false;
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) {
      if (!is_there(c, tile, loaded.homes[j])) continue;
      there = true;
      atomic_or_block(&shared.bitmap[loaded.homes[j].local * tile.words + token / 32], 1u << (token % 32));
    }
    return there;
  });
  return team_any(team, faulty);
}

// Ranks of this node that a token goes to. By a thread.
TY_DEVICE u64 ranks_of(const ty_context &c, const Choices &in, u32 token) {
  u64 ranks = 0;
  TY_ROLLED
  for (u32 first = 0; first < c.top_k; first += group_choices) {
    ChoiceGroup loaded = look_up(c, in, token, first);
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j)
      if (loaded.homes[j].node() == c.node) ranks |= 1ull << loaded.homes[j].rank();
  }
  return ranks;
}

// Words that no routing has used for long must not come to look new: each epoch writes those of one token, in turn.
// 31 bits of the epoch do: a turn is over long before they begin anew, and then it begins anew.
TY_DEVICE u32 refreshed_token(const ty_context &c, u64 epoch) { return static_cast<u32>(epoch) / 2 % c.max_tokens; }

// The same tile, marked: words of its tokens and choices.
TY_DEVICE void write_tile(const ty_context &c, const Team &team, const Choices &in, MetaShared &shared,
                          const Meta &meta, u64 epoch, const Tile &tile) {
  u64 first_choice = static_cast<u64>(tile.first) * c.top_k;
  u32 refreshed = refreshed_token(c, epoch) - tile.first;
  for_choices(c, team, in, tile, [&](u32 i, const Choice &choice) {
    bool there = is_there(c, tile, choice.home);
    u32 value = 0, local = choice.home.local;
    if (there) {
      u32 position = load(&shared.start[local]) + earlier_in_row(&shared.bitmap[local * tile.words], choice.token);
      value = 1 + (position << meta_expert_bits | local);
    }
    store_relaxed_sys(meta.choices + first_choice + i, meta_word(epoch, value));
    if (there || choice.token == refreshed)
      store_relaxed_sys(meta.weights + first_choice + i, meta_word(epoch, weight_bits(choice.weight)));
  });
  const u32 *present = &shared.bitmap[tile.experts * tile.words];
  // Again by others.
  u32 threads = team_threads(team), half = threads / 2, thread = team_thread(team);
  for (u32 token = thread < half ? thread + half : thread - half; token < tile.count; token += threads) {
    u32 value = 0;
    if ((load(present + token / 32) >> (token % 32)) & 1) {
      u64 ranks = ranks_of(c, in, tile.first + token);
      u32 row = load(&shared.start[tile.experts]) + earlier_in_row(present, token);
      value = 1 + (row << meta_slot_bits | popcount64(bits_below(ranks, tile.destination)));
    }
    store_relaxed_sys(meta.tokens + tile.first + token, meta_word(epoch, value));
  }
}

// Words of the token in turn, if it has none of this epoch.
TY_DEVICE void refresh_words(const ty_context &c, const Team &team, const Meta &meta, u64 epoch, u32 tokens) {
  u32 token = refreshed_token(c, epoch);
  if (token < tokens) return;
  u64 first = static_cast<u64>(token) * c.top_k;
  for (u32 k = team_thread(team); k < c.top_k; k += team_threads(team)) {
    store_relaxed_sys(meta.choices + first + k, meta_word(epoch, 0));
    store_relaxed_sys(meta.weights + first + k, meta_word(epoch, 0));
  }
  if (team_thread(team) == 0) store_relaxed_sys(meta.tokens + token, meta_word(epoch, 0));
}

// Words of a tile, of so many tokens.
TY_DEVICE u32 tile_words(const ty_context &c, u32 tokens) {
  u32 all = (tokens + 31) / 32;
  return all < c.tile_words ? all : c.tile_words;
}

// Tiles of so many tokens; no tokens make one, too, which says so.
TY_DEVICE u32 tile_count(const ty_context &c, u32 tokens) {
  u32 tile = c.tile_words * 32, count = 1;
  TY_ROLLED
  for (u32 end = tile; end < tokens; end += tile) ++count;
  return count;
}

TY_DEVICE Tile tile_at(const ty_context &c, const Choices &in, u32 destination, u32 number) {
  u32 words = tile_words(c, in.tokens), first = number * words * 32, left = in.tokens - first;
  return {destination, c.max_local_experts, first, left < words * 32 ? left : words * 32, words};
}

// Counts of a source for one rank of this node, and where its waves end, all tokens being marked. By a team.
TY_DEVICE void publish_counts(const ty_context &c, const Team &team, const Choices &in, const MetaShared &shared,
                              const Meta &meta, u64 epoch, const Tile &last, bool faulty) {
  u32 experts = last.experts;
  for (u32 e = team_thread(team); e <= experts; e += team_threads(team)) {
    u32 rows = load(&shared.start[e]);
    if (in.tokens != 0) rows += all_in_row(&shared.bitmap[e * last.words], last.words);
    if (faulty) rows = 0;
    store_relaxed_sys(meta.counts + e, meta_word(epoch, faulty && e == experts ? meta_refused : rows));
    if (in.own && e == experts) note_rows(c, world_rank(c, last.destination), rows);
  }
  // Where waves end is known for own tokens; a rail says it of others' as their messages land.
  u32 tokens = faulty ? 0 : in.tokens;
  for (u32 wave = team_thread(team); in.own && wave < c.waves; wave += team_threads(team)) {
    u32 end = (wave + 1) * c.wave_tokens;
    store_relaxed_sys(meta.counts + experts + 1 + wave, meta_word(epoch, end < tokens ? end : tokens));
  }
  refresh_words(c, team, meta, epoch, tokens);
}

// META of one tile of a source for one rank of this node, and with the last tile its counts. By a team. Positions go on
// from the tiles before, which are counted here again: each tile is some block's, and none waits for another. Answers
// whether a choice up to this tile's end is faulty. Every destination's counts come from all tokens, so that a single
// fault anywhere makes all of them say "nothing"; words of tiles are then not looked at.
TY_DEVICE bool publish_meta(const ty_context &c, const Team &team, const Choices &in, MetaShared &shared, u64 epoch,
                            u32 destination, u32 number) {
  Meta meta = meta_of(c, destination, in.source, epoch);
  Tile tile = tile_at(c, in, destination, number);
  for (u32 e = team_thread(team); e <= tile.experts; e += team_threads(team)) store(&shared.start[e], 0u);
  bool faulty = in.bad;
  TY_ROLLED
  for (u32 marked = 0;; ++marked) {
    faulty |= mark_tile(c, team, in, shared, tile_at(c, in, destination, marked));
    if (marked == number) break;
    // A thread counts the same rows each time.
    for (u32 e = team_thread(team); e <= tile.experts; e += team_threads(team))
      store(&shared.start[e], load(&shared.start[e]) + all_in_row(&shared.bitmap[e * tile.words], tile.words));
    team_barrier(team);
  }
  // Counts first: all receivers wait for them.
  if (number + 1 == tile_count(c, in.tokens)) publish_counts(c, team, in, shared, meta, epoch, tile, faulty);
  if (!faulty) write_tile(c, team, in, shared, meta, epoch, tile);
  team_barrier(team);
  return faulty;
}

// META of a tile of this rank's tokens of the call for one rank of its node. By a whole block.
TY_DEVICE void publish_own_meta(const ty_dispatch_args &a, const Choices &in, MetaShared &shared, const Wave &wave,
                                u32 destination, u32 tile) {
  const ty_context &c = a.context;
  u64 epoch = wave.call;
  bool faulty = publish_meta(c, whole_block(), in, shared, epoch, destination, tile);
  // The last tile's block has seen all tokens.
  if (thread_index() != 0 || destination != c.local || tile + 1 != tile_count(c, in.tokens)) return;
  ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
  // A launch that also receives the whole call says so as it ends, by another block.
  if (!(a.phases & TY_PHASE_RECEIVE) || !is_last(c, wave)) store(&head->state, static_cast<u32>(TY_HANDLE_EMPTY));
  store(&head->own_tokens, in.tokens);
  store(&head->own_bad, faulty ? 1u : 0u);
  if (in.bad)
    report(c, TY_DIRECTION_DISPATCH, TY_ERROR_TOKEN_COUNT, 0, c.rank, epoch,
           static_cast<u64>(static_cast<i64>(in.found)), c.max_tokens, 0);
  else if (faulty) report_routing(c, in, epoch);
}

// ---- send: rows --------------------------------------------------------------------------------------------

// A row as it lies somewhere: payload, and scale words `scale_stride` apart.
struct RowAt {
  u64 payload;
  u64 scales;
  u64 scale_stride;
  u32 quantize; // TY_QUANTIZE_*; with any the payload is bf16, and there are no scales
};

// A row of as many parts as it has slices.
constexpr u32 most_cuts = 3;
static_assert(TY_SLICES == 1u << most_cuts, "parts are made of whole slices");

// Slices [first, end) of a row: what a warp carries at once.
struct Slices {
  u32 first;
  u32 end;
};

// How often rows are halved, each part being carried by a warp: where rows are few, so often that no warp gets more
// than one part, since each has trips to memory of its own. Parts of all rows are numbered with 32 bits: rows fit in
// 31, and are cut only where they are few.
TY_DEVICE u32 cut_for(u64 rows, u64 warps) {
  u32 cut = most_cuts;
  TY_ROLLED
  while (cut > 0 && (rows << cut) > warps) --cut;
  return cut;
}

// The slices of a part: parts of a row follow one another in the numbers of all.
TY_DEVICE Slices part_of_row(u32 part, u32 cut) {
  u32 slices = TY_SLICES >> cut, first = (part & ((1u << cut) - 1)) * slices;
  return {first, first + slices};
}

// Where slice s of `units` units begins: at a multiple of `grain`.
TY_DEVICE u32 slice_begin(u32 units, u32 s, u32 grain) {
  return s == TY_SLICES ? units : units * s / TY_SLICES / grain * grain;
}

// Vectors [begin, end) of a row, this lane's of a batch of vectors_ahead a lane.
struct Batch {
  Vec16 data[vectors_ahead];
};

TY_DEVICE Batch load_batch(u64 from, u32 first, u32 end) {
  Batch batch;
  TY_UNROLL
  for (u32 i = 0; i < vectors_ahead; ++i) {
    u32 v = first + i * warp_size;
    if (v < end) batch.data[i] = load16(pointer<const void>(from + v * 16));
  }
  return batch;
}

TY_DEVICE void store_batch(char *to, const Batch &batch, u32 first, u32 end) {
  TY_UNROLL
  for (u32 i = 0; i < vectors_ahead; ++i) {
    u32 v = first + i * warp_size;
    if (v < end) store16(to + v * 16, batch.data[i]);
  }
}

// Where the scale words of slice s begin: those of its vectors.
TY_DEVICE u32 scale_begin(const ty_context &c, u32 s) {
  return s == TY_SLICES ? c.scale_words : slice_begin(c.row_bytes / 16, s, warp_size) >> c.scale_shift;
}

// Where a row goes.
struct RowTo {
  u64 payload;
  u64 scales; // of word 0
};

// A row with its scales behind it.
TY_DEVICE RowTo row_to(const ty_context &c, const char *at) {
  u64 payload = reinterpret_cast<u64>(at);
  return {payload, payload + c.row_bytes};
}

// The slot of a source's row at a rank of this node.
TY_DEVICE RowTo inbox_row(const ty_context &c, u32 owner, u64 epoch, u32 source, u32 slot) {
  return row_to(c,
                in_arena<const char>(c, owner, c.regions.rows, epoch, source) + static_cast<u64>(slot) * c.slot_bytes);
}

// Copies slices of a row, read once, to place_of(bit) for every bit of the mask that mask_of() gives, called once while
// the first loads are under way; answers the mask. Scale words of a place are `to_stride` apart. By a warp.
//
// A kernel has one call of it: rows are packed, pushed, forwarded and placed by the same code, which the first to come
// fetches for all.
template <typename MaskOf, typename PlaceOf>
TY_DEVICE u64 carry_row(const ty_context &c, const RowAt &from, const Slices &slices, u64 to_stride, MaskOf mask_of,
                        PlaceOf place_of) {
  u32 vectors = c.row_bytes / 16, end = slice_begin(vectors, slices.end, warp_size);
  u32 begin = slice_begin(vectors, slices.first, warp_size);
  u32 scale_end = scale_begin(c, slices.end), first_scale = scale_begin(c, slices.first);
  bool raw = from.quantize == TY_QUANTIZE_NONE;
  auto load_payload = [&](u32 v) { return load_batch(from.payload, v + lane_index(), raw ? end : 0); };
  auto load_scale = [&](u32 w) {
    bool there = raw && w + lane_index() < scale_end;
    return there ? load(pointer<const u32>(from.scales) + (w + lane_index()) * from.scale_stride) : 0;
  };
  Batch batch = load_payload(begin);
  u32 scale = load_scale(first_scale);
  u64 mask = mask_of();
  // A lane knows one place; more than there are lanes take the row twice.
  TY_ROLLED
  for (u32 base = 0; base < 64 && (mask >> base) != 0; base += warp_size) {
    u32 here = static_cast<u32>(mask >> base);
    RowTo own{0, 0};
    if ((here >> lane_index()) & 1) own = place_of(base + lane_index());
    auto payload_of = [&](u32 left) { return pointer<char>(shuffle(own.payload, lowest_bit(left))); };
    auto scale_of = [&](u32 left, u32 w) {
      return pointer<u32>(shuffle(own.scales, lowest_bit(left))) + w * to_stride;
    };
    if (!raw) {
      quantize_row(
          from.quantize, from.payload, begin, end,
          [&](u32 v, Vec16 data, bool there) {
            TY_ROLLED
            for (u32 left = here; left; left &= left - 1) {
              char *to = payload_of(left);
              if (there) store16(to + v * 16, data);
            }
          },
          [&](u32 w, u32 word, bool there) {
            TY_ROLLED
            for (u32 left = here; left; left &= left - 1) {
              u32 *to = scale_of(left, w);
              if (there) store(to, word);
            }
          });
      continue;
    }
    TY_ROLLED
    for (u32 v = begin; v < end; v += vectors_ahead * warp_size) {
      if (base + v != begin) batch = load_payload(v);
      TY_ROLLED
      for (u32 left = here; left; left &= left - 1) store_batch(payload_of(left), batch, v + lane_index(), end);
    }
    TY_ROLLED
    for (u32 w = first_scale; w < scale_end; w += warp_size) {
      if (base + w != first_scale) scale = load_scale(w);
      TY_ROLLED
      for (u32 left = here; left; left &= left - 1) {
        u32 *to = scale_of(left, w + lane_index());
        if (w + lane_index() < scale_end) store(to, scale);
      }
    }
  }
  return mask;
}

// Raises the tags of slices of a source's row at every rank of the mask, behind the row. By a warp.
TY_DEVICE void raise_tags(const ty_context &c, u64 mask, u64 epoch, u32 source, u32 slot, const Slices &slices) {
  warp_barrier();
  // N2: the warp's stores happen before this fence; wait_row acquires.
  if (mask) fence_acq_rel_sys();
  u32 carried = slices.end - slices.first;
  for (u32 i = lane_index(); i < c.node_ranks * carried; i += warp_size) {
    u32 rank = i / carried, slice = slices.first + i % carried;
    if (!((mask >> rank) & 1)) continue;
    store_relaxed_sys(in_arena<u64>(c, rank, c.regions.row_tags, epoch, source) + slot * TY_SLICES + slice, epoch);
  }
}

TY_DEVICE RowAt own_row(const ty_dispatch_args &a, u32 token) {
  const ty_tokens &t = a.tokens;
  return {t.x + token * t.x_pitch, t.scales + 4 * token * t.scale_row_stride, t.scale_column_stride,
          a.context.quantize};
}

// Tells every node peer that this rank's reads of the epoch before are over. By the team of one block.
TY_DEVICE void raise_round(const ty_context &c, const Team &team, u64 epoch) {
  // N1: acquired by wait_round.
  for (u32 rank = team_thread(team); rank < c.node_ranks; rank += team_threads(team))
    store_release_sys(in_arena<u64>(c, rank, c.regions.meta_flags, epoch, c.local), flag_value(epoch, TY_STATUS_OK));
}

// Blocks that build META and heads of messages for a call of so many tokens: the first of the grid.
TY_DEVICE u32 busy_blocks(const ty_context &c, const Wave &wave, u32 tokens) {
  u32 links = spans_nodes(c) ? lane_of(c, TY_LANE_DISPATCH).targets : 0;
  return links + (wave.number == 0 ? tile_count(c, tokens) * c.node_ranks : 0);
}

// The warps that share rows out among them, and the calling one's number.
struct Share {
  u32 warps;
  u32 own; // `warps` or more: it is none of them
};

// A team's warps on all workers; but where rows are few, on those that are not busy with something else. Neighbours are
// in different blocks, from the far end of the grid, so that busy blocks get their rows last.
TY_DEVICE Share share_of(const ty_context &c, const Team &team, u32 busy, u32 rows) {
  u32 workers = worker_count(c), block = block_index();
  if (2 * busy <= workers && rows <= (workers - busy) * team.warps) {
    workers -= busy;
    if (block < busy) return {workers * team.warps, ~0u};
    block -= busy;
  }
  return {workers * team.warps, team_warp(team) * workers + workers - 1 - block};
}

// By a warp, which has done with the pass before.
TY_DEVICE void keep_pass(Pass &kept, const Pass &pass) {
  warp_barrier();
  if (lane_index() == 0) {
    store(&kept.work.first, pass.work.first);
    store(&kept.work.end, pass.work.end);
    store(&kept.work.step, pass.work.step);
    store(&kept.work.cut, pass.work.cut);
    store(&kept.first, pass.first);
    store(&kept.served, pass.served);
    store(&kept.headers, pass.headers);
  }
  warp_barrier();
}

// So many rows, shared out.
TY_DEVICE Work share_rows(const ty_context &c, const Team &team, u32 busy, u32 rows) {
  Share share = share_of(c, team, busy, rows);
  u32 cut = cut_for(rows, share.warps);
  return {share.own, rows << cut, share.warps, cut};
}

} // namespace ty
