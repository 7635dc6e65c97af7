// Combine, the side payload: fp32 words beside each of the experts' rows, which come to the token's source with its
// partial rows. They lie behind the elements of a partial row, or of a row of a message between nodes, and its tag, or
// its chunk, announces them, too. LL rows have none.
//
//   summed     [K]           the sum of the words of all rows of the token, in the order in which rows are added
//   gathered   [top_k][K]    the words of each choice's row; a rank leaves 0 for choices elsewhere, so that words of
//                            several ranks are or-ed and keep their bits
//
#pragma once
#include "common/wire.cuh"

namespace ty {

// Words of a token.
TY_DEVICE u32 payload_of_token(const CombineArgs auto &a) {
  return a.payload_gathered ? a.context.top_k * a.payload_words : a.payload_words;
}

TY_DEVICE u32 *payload_in(const CombineArgs auto &a, u64 partial) { return pointer<u32>(partial + a.payload_offset); }

// The output row of this lane's choice of a token at this rank; -1 for none. `entry`: of the token among the handle's
// slots. By a warp.
TY_DEVICE i32 row_of_lane(const CombineArgs auto &a, u32 source, u32 token, u32 entry) {
  const auto &c = a.context;
  i32 row = -1;
  if (!a.handle.row_choices) {
    u64 choices = (static_cast<u64>(source) * c.max_tokens + token) * c.top_k;
    if (lane_index() < c.top_k) row = load(pointer<const i32>(a.handle.rows) + choices + lane_index());
  } else {
    u32 next = entry >> handle_slot_bits;
    TY_ROLLED
    for (u32 count = 0; next - 1 < a.handle.output_rows && count < c.top_k; ++count) {
      // One value for all lanes, since the handle may be written meanwhile.
      u64 seen = lane_index() == 0 ? load(pointer<const u64>(a.handle.row_choices) + next - 1) : 0;
      RowChoice choice = RowChoice::of(shuffle(seen, 0));
      if (choice.choice == lane_index()) row = static_cast<i32>(next - 1);
      next = choice.next;
    }
  }
  return static_cast<u32>(row) < a.handle.output_rows ? row : -1;
}

// Few words are loaded row by row, a row a lane, and so many at once: a trip to memory for all of them. Many words are
// loaded a word a lane.
constexpr u32 words_at_once = 4;
TY_DEVICE bool are_few_words(u32 words) { return words <= 2 * words_at_once; }

// Bits of floats that are added in the order of lanes, from +0: adding 0 for lanes without a row changes no bit. The
// lanes [own, after) are summed by themselves first. By a warp.
TY_DEVICE u32 sum_lanes(u32 word, u32 count, u32 own, u32 after) {
  float sum = 0.0f, inner = 0.0f;
  TY_ROLLED
  for (u32 n = 0; n < count; ++n) {
    float term = same_bits<float>(shuffle(word, n));
    if (n == after) sum = add_rn(sum, inner);
    if (n >= own && n < after) inner = add_rn(inner, term);
    else sum = add_rn(sum, term);
  }
  return same_bits<u32>(after == count ? add_rn(sum, inner) : sum);
}

// Stores what this rank's rows of a token bring at the end of a partial row. By a warp.
TY_DEVICE void send_payload(const CombineArgs auto &a, u32 source, u32 token, u32 entry, const char *partial) {
  const u32 *words = pointer<const u32>(a.payload);
  u32 *to = payload_in(a, reinterpret_cast<u64>(partial)), all = payload_of_token(a), each = a.payload_words;
  i32 mine = row_of_lane(a, source, token, entry);
  bool by_row = !a.payload_gathered && are_few_words(all);
  const u32 *own = words + static_cast<u64>(mine < 0 ? 0 : mine) * each;
  TY_ROLLED
  for (u32 first = 0; by_row && first < all; first += words_at_once) {
    u32 word[words_at_once];
    TY_UNROLL
    for (u32 i = 0; i < words_at_once; ++i) word[i] = mine >= 0 && first + i < all ? load(own + first + i) : 0;
    TY_UNROLL
    for (u32 i = 0; i < words_at_once; ++i) {
      u32 sum = sum_lanes(word[i], a.context.top_k, 0, a.context.top_k);
      if (first + i < all && lane_index() == i) store(to + first + i, sum);
    }
  }
  TY_ROLLED
  for (u32 first = 0; !by_row && first < all; first += warp_size) {
    u32 w = first + lane_index(), found = 0;
    float sum = 0.0f;
    if (a.payload_gathered) {
      i32 row = shuffle(mine, w / each % warp_size);
      if (w < all && row >= 0) found = load(words + static_cast<u64>(row) * each + w % each);
    } else {
      TY_ROLLED
      for (u32 k = 0; k < a.context.top_k; ++k) {
        i32 row = shuffle(mine, k);
        if (w < all && row >= 0) sum = add_rn(sum, same_bits<float>(load(words + static_cast<u64>(row) * each + w)));
      }
      found = same_bits<u32>(sum);
    }
    if (w < all) store(to + w, found);
  }
}

// Stores what `count` listed rows bring, of which numbers [own, after) are those of the token's own node. By a warp.
// `row(n)`: address of row n.
template <typename Row>
TY_DEVICE void add_payloads(const CombineArgs auto &a, u32 *to, u32 count, u32 own, u32 after, Row row) {
  u32 all = payload_of_token(a);
  bool by_row = are_few_words(all);
  const u32 *mine = by_row && lane_index() < count ? payload_in(a, row(lane_index())) : nullptr;
  TY_ROLLED
  for (u32 first = 0; by_row && first < all; first += words_at_once) {
    u32 word[words_at_once];
    TY_UNROLL
    for (u32 i = 0; i < words_at_once; ++i) word[i] = mine && first + i < all ? load(mine + first + i) : 0;
    TY_UNROLL
    for (u32 i = 0; i < words_at_once; ++i) {
      u32 found = a.payload_gathered ? warp_or(word[i]) : sum_lanes(word[i], count, own, after);
      if (first + i < all && lane_index() == i) store(to + first + i, found);
    }
  }
  TY_ROLLED
  for (u32 w = lane_index(); !by_row && w < all; w += warp_size) {
    float sum = 0.0f, inner = 0.0f;
    u32 bits = 0;
    TY_ROLLED
    for (u32 n = 0; n < count; ++n) {
      u32 word = load(payload_in(a, row(n)) + w);
      bits |= word;
      if (n == after) sum = add_rn(sum, inner);
      if (n >= own && n < after) inner = add_rn(inner, same_bits<float>(word));
      else sum = add_rn(sum, same_bits<float>(word));
    }
    if (after == count) sum = add_rn(sum, inner);
    store(to + w, a.payload_gathered ? bits : same_bits<u32>(sum));
  }
}

} // namespace ty
