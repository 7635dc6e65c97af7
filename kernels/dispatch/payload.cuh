// Dispatch, the side payload: fp32 words of each token, which go with its row to every rank that gets the token.
// Nothing is computed of them: bits stay as they are.
//
//   caller: [tokens][words] ──▶ slot, or message between nodes: behind the row's scales ──▶ output: [rows][words]
//
// The warp that carries a row's last slice also carries its words, before that slice is announced. So the slice's tag
// (N2), or the chunk (E1), announces them, too.
#pragma once
#include "dispatch/send.cuh"

namespace ty {

// Behind a row whose scales are at `scales`, one after the other.
TY_DEVICE u64 payload_behind(const Context auto &c, u64 scales) { return scales + 4 * static_cast<u64>(c.scale_words); }

// Of an own token, in the caller's memory.
TY_DEVICE u64 payload_of_token(const DispatchArgs auto &a, u32 token) {
  return a.tokens.payload + 4 * static_cast<u64>(token) * a.tokens.payload_words;
}

// Of an output row.
TY_DEVICE u64 payload_of_row(const DispatchArgs auto &a, u64 row) {
  return a.output.payload + 4 * row * a.tokens.payload_words;
}

// Zeroes the words of an output row. By a warp.
TY_DEVICE void zero_payload(const DispatchArgs auto &a, u64 row) {
  u32 *words = pointer<u32>(payload_of_row(a, row));
  for (u32 w = lane_index(); w < a.tokens.payload_words; w += warp_size) store(words + w, 0u);
}

// This lane's word of the first that a warp carries: loaded before the row is carried, used after.
TY_DEVICE u32 load_payload(const DispatchArgs auto &a, u64 from) {
  return lane_index() < a.tokens.payload_words ? load(pointer<const u32>(from) + lane_index()) : 0;
}

// Copies the words of a row to place_of(bit) for every bit of the mask. `word`: from load_payload. By a warp.
template <typename PlaceOf>
TY_DEVICE void carry_payload(const DispatchArgs auto &a, u64 from, u32 word, u64 mask, PlaceOf place_of) {
  u32 words = a.tokens.payload_words;
  // A lane holds one place; a mask wider than the warp takes the words twice.
  TY_ROLLED
  for (u32 base = 0; base < 64 && (mask >> base) != 0; base += warp_size) {
    u32 here = static_cast<u32>(mask >> base);
    u64 own = (here >> lane_index()) & 1 ? place_of(base + lane_index()) : 0;
    TY_ROLLED
    for (u32 first = 0; first < words; first += warp_size) {
      u32 w = first + lane_index();
      if (base + first != 0) word = w < words ? load(pointer<const u32>(from) + w) : 0;
      TY_ROLLED
      for (u32 left = here; left; left &= left - 1) {
        u32 *to = pointer<u32>(shuffle(own, lowest_bit(left)));
        if (w < words) store(to + w, word);
      }
    }
  }
}

} // namespace ty
