// Dispatch, routing metadata: what every rank of a node needs of the tokens that others send to it, in words that need
// no flag.
//
//   block (tile of tokens, rank):  choices ──▶ bitmap in shared memory, a row an expert ──▶ words of the tile
//                                  rows of the tile ──N9──▶ blocks of later tiles ──▶ the last: counts
#pragma once
#include "common/wire.cuh"

namespace ty {

// Shared memory for building metadata.
struct MetaShared {
  // Tokens of a tile, one row a local expert and one for the rank. A token has bitmap_bits of a row: 1 if it goes
  // there, or how often, where a token may name an expert several times. Behind them rows_before_groups.
  u32 bitmap[TY_BITMAP_WORDS];
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // rows in the tiles before
};

// ---- input -------------------------------------------------------------------------------------------------

// Choices of some tokens: the caller's, or those that came from another node.
struct Choices {
  u64 idx;
  u64 weights;    // 0: all 1
  u32 idx_pitch;  // bytes from token to token
  u32 idx_stride; // bytes from choice to choice
  u32 weight_pitch;
  u32 weight_stride;
  u32 index_bytes;
  u32 choices; // of each token, as ty_tokens
  u32 tokens;  // 0 if unusable
  u32 source;  // whose tokens they are
  bool bad;    // the caller's token count is unusable, or a source refused its routing
  bool own;    // the caller's: to be checked, and reported
  i32 found;   // the token count as found
};

// Which of an expert's replicas a token's choices take: replica_bits bits of a hash of its number, so that no pattern
// of tokens meets a pattern of replicas. Fibonacci hashing: Knuth, The Art of Computer Programming 3, 6.4.
TY_DEVICE u32 replica_slot(const Context auto &c, u32 token) {
  return static_cast<u32>(static_cast<u64>(token * 2654435769u) << c.replica_bits >> 32);
}

// An expert's number, or -1; any other number, however wide, becomes unusable_expert.
constexpr i32 unusable_expert = -2;
TY_DEVICE i32 choice_at(const Context auto &c, const Choices &in, u32 token, u32 k) {
  if (takes_any_routing(c) && k >= in.choices) return -1;
  u64 at = in.idx + static_cast<u64>(token) * in.idx_pitch + static_cast<u64>(k) * in.idx_stride;
  if (takes_any_routing(c) && in.own && in.index_bytes == 1)
    return load(pointer<const u8>(at)) ? load(pointer<const i32>(c.rank_experts) + k) : -1;
  i32 low = load(pointer<const i32>(at));
  // The same code for both widths: the upper half, or the same word again.
  i32 high = load(pointer<const i32>(at + in.index_bytes - 4));
  bool fits = in.index_bytes != 8 || high == low >> 31;
  i32 expert = fits && low >= -1 ? low : unusable_expert;
  if (!takes_any_routing(c) || !in.own || !c.replicas || expert < 0) return expert;
  if (static_cast<u32>(expert) >= c.logical_experts) return unusable_expert;
  u64 row = static_cast<u64>(expert) << c.replica_bits;
  return load(pointer<const i32>(c.replicas) + row + replica_slot(c, token));
}

TY_DEVICE float weight_at(const Context auto &c, const Choices &in, u32 token, u32 k) {
  if (!in.weights || (takes_any_routing(c) && k >= in.choices)) return 1.0f;
  u64 at = in.weights + static_cast<u64>(token) * in.weight_pitch + static_cast<u64>(k) * in.weight_stride;
  return load(pointer<const float>(at));
}

// The caller's choices, without their number.
TY_DEVICE Choices caller_choices(const DispatchArgs auto &a) {
  const auto &t = a.tokens;
  return {t.topk_idx,
          t.topk_weight,
          t.index_pitch,
          t.index_stride,
          t.weight_pitch,
          t.weight_stride,
          t.index_bytes,
          t.choices,
          0,
          a.context.rank,
          false,
          true,
          0};
}

// The caller's token count.
TY_DEVICE i32 find_count(const DispatchArgs auto &a) {
  const auto &t = a.tokens;
  return t.count_ptr ? load(pointer<const i32>(t.count_ptr)) : static_cast<i32>(t.count);
}

// The count that thread 0 found, in all threads: a count in memory may change meanwhile, and warps that count
// differently would wait for each other at barriers for ever. By a whole block.
TY_DEVICE i32 agree_count(const DispatchArgs auto &a, i32 found) {
  if (!a.tokens.count_ptr) return found;
  i32 &kept = block_shared<LaunchShared>().found;
  if (thread_index() == 0) store(&kept, found);
  block_barrier();
  return load(&kept);
}

// The caller's choices, for a token count as found.
TY_DEVICE Choices own_choices(const DispatchArgs auto &a, i32 found) {
  Choices in = caller_choices(a);
  in.found = found;
  in.bad = found < 0 || static_cast<u32>(found) > a.context.max_tokens;
  in.tokens = in.bad ? 0u : static_cast<u32>(found);
  return in;
}

struct ExpertOwner {
  u32 place; // node, and rank within it, 16 bits each
  u32 local;
  TY_DEVICE u32 node() const { return place & 0xffffu; }
  TY_DEVICE u32 rank() const { return place >> 16; }
};

TY_DEVICE ExpertOwner owner_of(const Context auto &c, i32 expert) {
  if (is_even(c)) {
    // Computed: the table would be a second trip to memory after the choice itself.
    u32 rank = static_cast<u32>(static_cast<u64>(expert) * c.even_inverse >> 32);
    u32 node = static_cast<u32>(static_cast<u64>(rank) * c.even_nodes >> 32);
    return {(rank - node * c.node_ranks) << 16 | node, static_cast<u32>(expert) - rank * c.even_experts};
  }
  u64 packed = load(pointer<const u64>(c.expert_owner) + expert);
  return {static_cast<u32>(packed), static_cast<u32>(packed >> 32)};
}

TY_DEVICE bool is_expert(const Context auto &c, i32 expert) { return static_cast<u32>(expert) < c.experts; }

// The rank of this node that choice k leads to, as a bit. Unusable experts lead nowhere; the metadata reports them.
TY_DEVICE u64 rank_of(const Context auto &c, const Choices &in, u32 token, u32 k) {
  i32 expert = choice_at(c, in, token, k);
  if (!is_expert(c, expert)) return 0;
  ExpertOwner owner = owner_of(c, expert);
  return owner.node() == c.node ? 1ull << owner.rank() : 0;
}

// The OR of the lanes' masks, of which only the lowest `bits` may be set.
TY_DEVICE u64 warp_or_mask(u64 mask, u32 bits) {
  u64 low = warp_or(static_cast<u32>(mask));
  return bits <= 32 ? low : static_cast<u64>(warp_or(static_cast<u32>(mask >> 32))) << 32 | low;
}

// The ranks of this node that a token goes to. By a warp, a lane a choice.
TY_DEVICE u64 warp_ranks_of(const Context auto &c, const Choices &in, u32 token) {
  u32 k = lane_index();
  return warp_or_mask(k < c.top_k ? rank_of(c, in, token, k) : 0, c.node_ranks);
}

// ---- routing metadata ------------------------------------------------------------------------------------

// What is wrong with choice k of a token: TY_ERROR_NONE, or the kind.
TY_DEVICE u32 fault_of_choice(const Context auto &c, const Choices &in, u32 token, u32 k, i32 expert) {
  if (expert == -1 || !in.own) return TY_ERROR_NONE;
  if (!is_expert(c, expert)) return TY_ERROR_ROUTING_RANGE;
  if (repeats_experts(c)) return TY_ERROR_NONE;
  bool twice = false;
  for (u32 j = 0; j < k; ++j) twice |= choice_at(c, in, token, j) == expert;
  return twice ? TY_ERROR_ROUTING_DUPLICATE : TY_ERROR_NONE;
}

// Finds the first faulty choice again, slowly, and reports it. By one thread of the rank.
TY_DEVICE void report_routing(const Context auto &c, const Choices &in, u64 epoch) {
  for (u32 token = 0; token < in.tokens; ++token)
    for (u32 k = 0; k < c.top_k; ++k) {
      u32 kind = fault_of_choice(c, in, token, k, choice_at(c, in, token, k));
      if (kind == TY_ERROR_NONE) continue;
      u64 at = in.idx + static_cast<u64>(token) * in.idx_pitch + static_cast<u64>(k) * in.idx_stride;
      i64 expert = in.index_bytes == 8 ? load(pointer<const i64>(at)) : load(pointer<const i32>(at));
      keep_fault({kind, 0, c.rank, epoch, token, k, static_cast<u64>(expert)});
      return;
    }
}

// Where metadata of one source lies.
struct Meta {
  u64 *counts, *tokens, *source_tokens, *choices, *weights;
};

TY_DEVICE Meta meta_of(const Context auto &c, u32 owner, u32 source, u64 epoch) {
  const ty_regions &r = c.regions;
  return {in_arena<u64>(c, owner, r.meta_counts, epoch, source), in_arena<u64>(c, owner, r.meta_tokens, epoch, source),
          in_arena<u64>(c, owner, r.meta_source_tokens, epoch, source),
          in_arena<u64>(c, owner, r.meta_choices, epoch, source),
          in_arena<u64>(c, owner, r.meta_weights, epoch, source)};
}

// The values in metadata words of tokens and choices, whose upper half is the epoch (meta_word). 0: not to this rank.
//
//   meta_choices   63..............32 31...................11 10.............0
//                       epoch          position in the expert  local expert      + 1 + 1
//   meta_tokens    63..............32 31...................5 4...............0
//                       epoch          row of this source     slot at the owner  + 1 + 1
//
// One is added for "here", and one more by meta_word for "written". A position is below 2^20: a rank has at most so
// many tokens, or, where tokens may name an expert several times, choices. Launches that mix may add half as many
// (docs/failure.md), which end in the same 32 bits.
constexpr u32 meta_expert_bits = 11, meta_slot_bits = 5;
static_assert(TY_MAX_LOCAL_EXPERTS < 1 << meta_expert_bits && TY_MAX_TOP_K <= 1 << meta_slot_bits,
              "fields of a metadata word");
static_assert(static_cast<u64>(TY_MAX_TOKENS) << meta_expert_bits <= 1u << 31, "fields of a metadata word");

// A weight as a metadata word carries it: all ones has no successor, so these bits become another NaN.
TY_DEVICE u32 weight_bits(float weight) {
  u32 bits = same_bits<u32>(weight);
  return bits == ~0u ? bits - 1 : bits;
}

// A tile: a run of tokens whose bitmap fits in shared memory, for one destination rank.
struct Tile {
  u32 place;   // node and rank of the destination, as in ExpertOwner
  u32 experts; // of a rank at the most; the bitmap row after theirs is the rank's
  u32 first;
  u32 count;
  u32 words; // groups of 32 tokens: words of a row, where each token has a bit

  TY_DEVICE u32 destination() const { return place >> 16; }
};

// How a warp's lanes take choices: a lane a choice, of as many whole tokens as there are lanes for.
struct ChoiceLane {
  u32 tokens; // of the warp
  u32 token;  // this lane's, counted from 0; `tokens`: none
  u32 k;
};

TY_DEVICE ChoiceLane choice_lane(const Context auto &c) {
  u32 tokens = warp_size * c.choice_inverse >> 16, token = lane_index() * c.choice_inverse >> 16;
  return {tokens, token, lane_index() - token * c.top_k};
}

// A choice and its owner; the owner belongs to no node where there is no such expert.
struct Choice {
  bool there; // false: the lane has none
  u32 token;  // of the tile
  u32 k;
  i32 expert;
  ExpertOwner owner;
  float weight; // if it was asked for
};

TY_DEVICE void find_owner(const Context auto &c, Choice &choice) {
  if (is_expert(c, choice.expert)) choice.owner = owner_of(c, choice.expert);
}

// Calls use(choice) for all choices of a tile. Warps alternate from warp `first` of the team on; a warp takes whole
// tokens, a lane a choice. All lanes of a warp call use together, lanes without a choice too. Calls ready() once
// before, while the first choices are being loaded. `weighed`: with the weights, loaded beside the choices. `ahead`:
// choices are loaded while those before are used.
template <bool weighed, typename Ready, typename Use>
TY_DEVICE void for_choices(const Context auto &c, const Team &team, const Choices &in, const Tile &tile, u32 first,
                           bool ahead, Ready ready, Use use) {
  ChoiceLane lane = choice_lane(c);
  u32 begin = team_warp(team) < first ? team_warp(team) + team.warps - first : team_warp(team) - first;
  Choice before{};
  TY_ROLLED
  for (u32 token = begin * lane.tokens;; token += team.warps * lane.tokens) {
    Choice choice{
        lane.token < lane.tokens && token + lane.token < tile.count, token + lane.token, lane.k, -1, {~0u, 0}, 0.0f};
    if (weighed && choice.there) choice.weight = weight_at(c, in, tile.first + choice.token, choice.k);
    if (choice.there) choice.expert = choice_at(c, in, tile.first + choice.token, choice.k);
    if (!ahead) find_owner(c, choice);
    bool begins = token == begin * lane.tokens;
    if (begins) ready();
    if (ahead && !begins) {
      find_owner(c, before);
      use(before);
    }
    if (token >= tile.count) return;
    if (!ahead) use(choice);
    before = choice;
  }
}

// Choices that one pass of unrolled code compares.
constexpr u32 group_choices = 8;

TY_DEVICE bool is_there(const Tile &tile, const ExpertOwner &owner) { return owner.place == tile.place; }

// How often a lane's choice, from for_choices, is among the choices of its token before it. By a warp.
TY_DEVICE u32 times_before(const Context auto &c, const Choice &choice) {
  u32 times = 0;
  TY_ROLLED
  for (u32 first = 0; first < c.top_k; first += group_choices) {
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) {
      u32 k = first + j;
      bool same = shuffle(choice.expert, lane_index() - choice.k + k) == choice.expert;
      times += same && k < choice.k ? 1 : 0;
    }
  }
  return times;
}

// Whether a lane's choice, from for_choices, is unusable; only the caller's choices are checked. As fault_of_choice. By
// a warp.
TY_DEVICE bool is_choice_faulty(const Context auto &c, const Choices &in, const Choice &choice) {
  if (!in.own) return false;
  bool twice = false;
  TY_ROLLED
  for (u32 first = repeats_experts(c) ? c.top_k : 1; first < c.top_k; first += group_choices) {
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) {
      i32 before = shuffle(choice.expert, lane_index() - (first + j));
      twice |= first + j <= choice.k && before == choice.expert;
    }
  }
  return choice.expert != -1 && (twice || !is_expert(c, choice.expert));
}

// Bits of each token in a row of the bitmap.
TY_DEVICE u32 token_bits(const Context auto &c) { return repeats_experts(c) ? c.bitmap_bits : 1; }

// Where a row of the bitmap begins: of a local expert, or of the rank. An odd number of words apart, so that lanes that
// go through a row each meet different banks of shared memory.
TY_DEVICE u32 bitmap_row(const Context auto &c, const Tile &tile, u32 e) {
  return e * (tile.words * token_bits(c) | 1);
}

// Words of a bitmap row that are loaded together. A group of 32 tokens has a multiple of as many, if each has 4 or 8
// bits.
constexpr u32 row_words_ahead = 4;

// The rows of the first `tokens` tokens of a group of 32.
TY_DEVICE u32 rows_of_group(const Context auto &c, const u32 *group, u32 tokens) {
  if (!repeats_experts(c)) return popcount(load(group) & (tokens < 32 ? (1u << tokens) - 1 : ~0u));
  u32 bits = c.bitmap_bits, end = tokens * bits, low = bits == 4 ? 0x0f0f0f0fu : ~0u, high = ~low >> 4, rows = 0;
  TY_ROLLED
  for (u32 first = 0; first < end; first += row_words_ahead * 32) {
    TY_UNROLL
    for (u32 j = 0; j < row_words_ahead; ++j) {
      u32 at = first + j * 32, left = at < end ? end - at : 0;
      u32 times = load(group + at / 32) & (left < 32 ? (1u << left) - 1 : ~0u);
      rows = add_bytes(times >> 4 & high, add_bytes(times & low, rows));
    }
  }
  return rows;
}

// The rows of a local expert, or the tokens of the rank, in the groups of 32 tokens of a tile before each group.
TY_DEVICE u32 *rows_before_groups(const Context auto &c, MetaShared &shared, const Tile &tile, u32 e) {
  return &shared.bitmap[bitmap_row(c, tile, tile.experts + 1) + e * (tile.words | 1)];
}

// The same in all of a marked tile. Keeps those before each group.
TY_DEVICE u32 rows_of_tile(const Context auto &c, MetaShared &shared, const Tile &tile, u32 e) {
  const u32 *row = &shared.bitmap[bitmap_row(c, tile, e)];
  u32 *before = rows_before_groups(c, shared, tile, e), rows = 0;
  TY_ROLLED
  for (u32 group = 0; group < tile.words; ++group) {
    store(before + group, rows);
    rows += rows_of_group(c, row + group * token_bits(c), 32);
  }
  return rows;
}

// The same before `token`, once rows_of_tile has kept what it keeps.
TY_DEVICE u32 rows_before_token(const Context auto &c, MetaShared &shared, const Tile &tile, u32 e, u32 token) {
  const u32 *row = &shared.bitmap[bitmap_row(c, tile, e)];
  u32 group = token / 32;
  return load(rows_before_groups(c, shared, tile, e) + group) +
         rows_of_group(c, row + group * token_bits(c), token % 32);
}

// Marks a tile's tokens in the bitmap. By a team, whose members meet at the end. Returns whether a choice is faulty.
// `closed`: as finds_closed; on return as agreed. `ahead`: as for_choices's.
TY_DEVICE bool mark_tile(const Context auto &c, const Team &team, const Choices &in, MetaShared &shared,
                         const Tile &tile, bool ahead, bool &closed) {
  bool faulty = false;
  auto clear = [&] {
    for (u32 i = team_thread(team); i < bitmap_row(c, tile, tile.experts + 1); i += team_threads(team))
      store(&shared.bitmap[i], 0u);
    closed = !meet_open(c, team, closed);
  };
  for_choices<false>(c, team, in, tile, 0, ahead, clear, [&](const Choice &choice) {
    faulty |= is_choice_faulty(c, in, choice);
    if (!is_there(tile, choice.owner)) return;
    u32 at = choice.token * token_bits(c), word = at / 32, one = 1u << (at % 32);
    u32 *expert = &shared.bitmap[bitmap_row(c, tile, choice.owner.local) + word];
    if (repeats_experts(c)) (void)atomic_add_block(expert, one);
    else atomic_or_block(expert, one);
    atomic_or_block(&shared.bitmap[bitmap_row(c, tile, tile.experts) + word], one);
  });
  return team_any(team, faulty);
}

// ---- what in-place output needs besides -------------------------------------------------------------------------

// Metadata words, in the arena of `owner`: a source's rows for each expert of `rank`, and for all of them.
TY_DEVICE u64 *all_counts(const Context auto &c, u32 owner, u32 source, u32 rank, u64 epoch) {
  return in_arena<u64>(c, owner, c.regions.all_counts, epoch, source) + rank * (c.max_local_experts + 1);
}

// The metadata word of an own choice, whichever rank it leads to.
TY_DEVICE u64 *own_choice(const Context auto &c, u64 place) {
  return in_arena<u64>(c, c.local, c.regions.in_place_choices, 0, 0) + place;
}

// Words that no routing has used for long must not come to look new: each epoch rewrites those of one token,
// cyclically. 31 bits of the epoch suffice: a cycle is over long before they wrap, and then starts again.
TY_DEVICE u32 refreshed_token(const Context auto &c, u64 epoch) { return static_cast<u32>(epoch) / 2 % c.most_tokens; }

// The ranks of this node that a lane's token goes to, by choices from for_choices. By a warp.
TY_DEVICE u64 token_ranks(const Context auto &c, const Choice &choice) {
  u64 own = choice.owner.node() == c.node ? 1ull << choice.owner.rank() : 0, ranks = 0;
  // In halves of 32 ranks, of which most nodes have one.
  TY_ROLLED
  for (u32 shift = 0; shift < c.node_ranks; shift += 32) {
    u32 half = static_cast<u32>(own >> shift), all = 0;
    TY_ROLLED
    for (u32 first = 0; first < c.top_k; first += group_choices) {
      TY_UNROLL
      for (u32 j = 0; j < group_choices; ++j) {
        u32 other = shuffle(half, lane_index() - choice.k + first + j);
        if (first + j < c.top_k) all |= other;
      }
    }
    ranks |= static_cast<u64>(all) << shift;
  }
  return ranks;
}

// A team that publishes tiles of a source's choices in an epoch.
struct Publisher {
  const Team &team;
  const Choices &in;
  MetaShared &shared;
  u64 epoch;
};

// Writes the words of a marked tile's tokens and choices, and the ranks of each token if `masks` is given. By a team.
TY_DEVICE void write_tile(const Context auto &c, const Publisher &by, const Meta &meta, const Tile &tile,
                          const RankMasks &masks) {
  const auto &[team, in, shared, epoch] = by;
  u32 refreshed = refreshed_token(c, epoch) - tile.first;
  const u32 *present = &shared.bitmap[bitmap_row(c, tile, tile.experts)];
  // From the last warp on: where choices are few, the first warps have other work.
  for_choices<true>(
      c, team, in, tile, team.warps - 1, false, [] {},
      [&](const Choice &choice) {
        u64 ranks = token_ranks(c, choice);
        u32 before = repeats_experts(c) ? times_before(c, choice) : 0;
        if (!choice.there) return;
        bool there = is_there(tile, choice.owner);
        u32 value = 0, local = choice.owner.local, token = choice.token;
        u64 place = static_cast<u64>(tile.first + token) * c.top_k + choice.k;
        if (there) {
          u32 position = load(&shared.start[local]) + rows_before_token(c, shared, tile, local, token) + before;
          value = 1 + (position << meta_expert_bits | local);
        }
        store_relaxed_sys(meta.choices + place, meta_word(epoch, value));
        // Some block writes every choice's word in every epoch, so that none grows old; the own rank's block writes
        // that of a choice that leads to no rank of the node.
        if (in_place(c) && (there || (choice.owner.node() != c.node && tile.destination() == c.local)))
          store_relaxed_gpu(own_choice(c, place), meta_word(epoch, value));
        if (there || token == refreshed)
          store_relaxed_sys(meta.weights + place, meta_word(epoch, weight_bits(choice.weight)));
        if (choice.k != 0) return;
        if (masks.first) masks.keep(tile.first + token, ranks);
        u32 slot = slot_of_rank(c, ranks, tile.destination());
        value = 0;
        // Both are checked: the caller's choices may have changed since the tile was marked, and slots would not fit.
        u32 at = token * token_bits(c);
        if ((load(present + at / 32) >> (at % 32)) & (ranks >> tile.destination()) & 1) {
          u32 row = load(&shared.start[tile.experts]) + rows_before_token(c, shared, tile, tile.experts, token);
          value = 1 + (row << meta_slot_bits | slot);
        }
        store_relaxed_sys(meta.tokens + tile.first + token, meta_word(epoch, value));
      });
}

// Rewrites the words of refreshed_token, if it has none of this epoch.
TY_DEVICE void refresh_words(const Context auto &c, const Team &team, const Meta &meta, u64 epoch, u32 tokens) {
  u32 token = refreshed_token(c, epoch);
  if (token < tokens) return;
  u64 first = static_cast<u64>(token) * c.top_k;
  for (u32 k = team_thread(team); k < c.top_k; k += team_threads(team)) {
    store_relaxed_sys(meta.choices + first + k, meta_word(epoch, 0));
    store_relaxed_sys(meta.weights + first + k, meta_word(epoch, 0));
    if (in_place(c)) store_relaxed_gpu(own_choice(c, first + k), meta_word(epoch, 0));
  }
  if (team_thread(team) == 0) store_relaxed_sys(meta.tokens + token, meta_word(epoch, 0));
}

// Groups of 32 tokens of a tile, where the call has `tokens` tokens: of a tile that is alone, all. Of several in one
// node, half as many as fit, if they are no more than there are blocks (docs/notebook.md, "Smaller tiles"). A rail goes
// through as many tiles as a call may have, and so has few.
TY_DEVICE u32 tile_words(const Context auto &c, u32 tokens) {
  u32 all = (tokens + 31) / 32, half = (c.tile_words + 1) / 2;
  if (all <= c.tile_words) return all;
  if (spans_nodes(c)) return c.tile_words;
  return (all + half - 1) / half * c.node_ranks <= block_count() ? half : c.tile_words;
}

// Tiles of `tokens` tokens; no tokens make one tile, too, which publishes that.
TY_DEVICE u32 tile_count(const Context auto &c, u32 tokens) {
  u32 all = (tokens + 31) / 32;
  if (all <= c.tile_words) return 1;
  u32 words = tile_words(c, tokens);
  return (all + words - 1) / words;
}

TY_DEVICE Tile tile_at(const Context auto &c, const Choices &in, u32 destination, u32 number) {
  u32 words = tile_words(c, in.tokens), first = number * words * 32, left = in.tokens - first;
  u32 count = left < words * 32 ? left : words * 32;
  return {destination << 16 | c.node, c.max_local_experts, first, count, words};
}

// Publishes the counts of a source for one rank of this node, and where its rounds end, once all tokens are marked. By
// a team.
TY_DEVICE void publish_counts(const Context auto &c, const Publisher &by, const Meta &meta, const Tile &last,
                              bool faulty) {
  const auto &[team, in, shared, epoch] = by;
  u32 experts = last.experts;
  // N13: what this rank's stream did with its output happens before these words.
  if (in_place(c)) fence_acq_rel_sys();
  for (u32 e = team_thread(team); e <= experts; e += team_threads(team)) {
    u32 rows = load(&shared.start[e]);
    if (in.tokens != 0) rows += rows_of_tile(c, shared, last, e);
    if (faulty) rows = 0;
    u64 word = meta_word(epoch, faulty && e == experts ? meta_refused : rows);
    store_relaxed_sys(meta.counts + e, word);
    for (u32 rank = 0; in_place(c) && rank < c.node_ranks; ++rank)
      store_relaxed_sys(all_counts(c, rank, in.source, last.destination(), epoch) + e, word);
    if (in.own && e == experts) note_rows(c, world_rank(c, last.destination()), rows);
  }
  // Ends of rounds are known here for own tokens; a rail publishes those of other sources as their messages arrive.
  u32 tokens = faulty ? 0 : in.tokens;
  for (u32 round = team_thread(team); in.own && round < c.rounds; round += team_threads(team)) {
    u32 end = (round + 1) * c.round_tokens;
    store_relaxed_sys(meta.counts + experts + 1 + round, meta_word(epoch, end < tokens ? end : tokens));
  }
  refresh_words(c, team, meta, epoch, tokens);
}

// Whose tile, and which of them.
struct TileOf {
  u32 part; // 0: own tokens; 1 + j: those of served source j
  u32 number;
};

// The rows of each expert in a tile, kept for later tiles: uint32 [max_local_experts + 1], the last word being the
// rank's, and a tag. `part`: as in TileOf.
struct TileRows {
  u32 *rows;
  u64 *tag;
};

TY_DEVICE TileRows tile_rows(const Context auto &c, u32 part, u32 destination, u32 number) {
  u64 tile = static_cast<u64>(part * c.node_ranks + destination) * c.max_tiles + number;
  return {pointer<u32>(c.tile_rows) + tile * (c.max_local_experts + 1), pointer<u64>(c.tile_tags) + tile};
}

// Rows of earlier tiles that a thread loads together.
constexpr u32 tile_rows_ahead = 4;

// Keeps a tile's rows for later tiles, and adds those of earlier tiles, which other blocks or this block marked, into
// `start`, which is zero. By a team, whose members have marked the tile. Sets `faulty` if a choice in an earlier tile
// is faulty. False once a deadline passed.
TY_DEVICE bool add_tiles(const Context auto &c, const Publisher &by, const Tile &tile, const TileOf &of, bool &faulty) {
  const auto &[team, in, shared, epoch] = by;
  auto [part, number] = of;
  u32 words = tile.experts + 1;
  TileRows own = tile_rows(c, part, tile.destination(), number);
  for (u32 e = team_thread(team); e < words; e += team_threads(team))
    store(own.rows + e, faulty && e == tile.experts ? meta_refused : rows_of_tile(c, shared, tile, e));
  team_barrier(team);
  // N9: the rows happen before; add_tiles of later tiles acquires.
  if (team_thread(team) == 0) store_release_gpu(own.tag, epoch);
  bool failed = false;
  // The block of an earlier tile may wait for a peer, and its error, which names the peer, must come first.
  Wait wait{TY_SITE_TILE, tolerates_absence(c) ? in.source : c.rank, epoch, c.timeout_ns / 16};
  for (u32 before = team_thread(team); before < number; before += team_threads(team))
    failed |= !wait_word(c, wait, tile_rows(c, part, tile.destination(), before).tag, 0, epoch, "tile");
  if (team_any(team, failed)) return false;
  // Tiles lie one behind the other, each with its rows by expert.
  const u32 *rows = tile_rows(c, part, tile.destination(), 0).rows;
  u32 step = team_threads(team), e = team_thread(team) % words, next = step % words;
  bool refused = false;
  TY_ROLLED
  for (u32 first = team_thread(team); first < number * words; first += tile_rows_ahead * step) {
    u32 earlier[tile_rows_ahead];
    TY_UNROLL
    for (u32 j = 0; j < tile_rows_ahead; ++j)
      earlier[j] = first + j * step < number * words ? load(rows + first + j * step) : 0;
    TY_UNROLL
    for (u32 j = 0; j < tile_rows_ahead; ++j) {
      refused |= earlier[j] == meta_refused;
      if (earlier[j] != 0) (void)atomic_add_block(&shared.start[e], earlier[j]);
      e = e + next < words ? e + next : e + next - words;
    }
  }
  faulty |= team_any(team, refused);
  return true;
}

// Whether no tokens follow a tile.
TY_DEVICE bool is_last_tile(const Choices &in, const Tile &tile) { return tile.first + tile.count == in.tokens; }

// Publishes metadata of one marked tile of a source for one rank of this node, and with the last tile its counts;
// positions continue from the earlier tiles. By a team. `faulty`: whether a choice of the tile is faulty; on return, of
// any tile up to this one. Every destination's counts come from all tokens, so one fault anywhere makes all counts
// zero and refused; words of tiles are then not looked at. `masks`: as in write_tile. False once a deadline passed.
TY_DEVICE bool publish_tile(const Context auto &c, const Publisher &by, const Tile &tile, const TileOf &of,
                            bool &faulty, const RankMasks &masks) {
  bool last = is_last_tile(by.in, tile);
  if (of.number != 0 || !last) {
    if (!add_tiles(c, by, tile, of, faulty)) return false;
  }
  if (is_left_out(c, tile.destination())) return true;
  Meta meta = meta_of(c, tile.destination(), by.in.source, by.epoch);
  // Counts first: all receivers wait for them.
  if (last) {
    publish_counts(c, by, meta, tile, faulty);
    team_barrier(by.team); // rows before groups
  }
  if (!faulty) write_tile(c, by, meta, tile, masks);
  return true;
}

// Keeps or reports what concerns this rank alone, after the last tile for itself, whose block has found faults in all
// tiles. By a thread.
TY_DEVICE void keep_own(const DispatchArgs auto &a, const Choices &in, const Round &round, bool faulty) {
  const auto &c = a.context;
  ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
  // In a launch that also receives the whole call, another block sets the state at the end.
  if (!(a.phases & TY_PHASE_RECEIVE) || !is_last(c, round)) store(&head->state, static_cast<u32>(TY_HANDLE_EMPTY));
  store(&head->own_tokens, in.tokens);
  store(&head->own_bad, faulty ? 1u : 0u);
  if (in.bad)
    keep_fault(
        {TY_ERROR_TOKEN_COUNT, 0, c.rank, round.call, static_cast<u64>(static_cast<i64>(in.found)), c.max_tokens, 0});
  else if (faulty) report_routing(c, in, round.call);
}

} // namespace ty
