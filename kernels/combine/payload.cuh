// Combine, the side payload: fp32 words beside each of the experts' rows, which come to the token's source with its
// partial rows. They lie behind the elements of a partial row, or of a row of a message between nodes.
//
//   summed     [K]           the sum of the words of all rows of the token, in the order in which rows are added
//   gathered   [top_k][K]    the words of each choice's row; a rank leaves 0 for choices elsewhere, so that words of
//                            several ranks are or-ed and keep their bits
//
// Behind a tagged row, and in a message, a word has 4 bytes, and the row's tag, or its chunk, announces it. Behind an
// LL row it has 8 bytes, stored at once (N4):
//
//   63......................32 31......................0
//   1: has arrived, 0: has not      the word, of any bits
//
// The source leaves 0 there, as in all of an LL row.
#pragma once
#include "common/numbers.cuh"
#include "common/wire.cuh"

namespace ty {

// Words of a token.
TY_DEVICE u32 payload_of_token(const CombineArgs auto &a) {
  return a.payload_gathered ? a.context.top_k * a.payload_words : a.payload_words;
}

TY_DEVICE u64 payload_in(const CombineArgs auto &a, u64 partial) { return partial + a.payload_offset; }

constexpr u64 present_word = u64{1} << 32;
TY_DEVICE bool is_present(u64 word) { return word >> 32 != 0; }

// A warp carries words of several rows at once, a word a lane: 2^shift words of each row.
struct WordShare {
  u32 shift;

  TY_DEVICE u32 at_once() const { return 1u << shift; }
  TY_DEVICE u32 row() const { return lane_index() >> shift; }
  TY_DEVICE u32 word() const { return lane_index() & (at_once() - 1); }
};

// As many words of each of `rows` rows as there are lanes for.
TY_DEVICE WordShare share_words(u32 rows) {
  static_assert(TY_MAX_TOP_K <= warp_size, "a lane a row at least");
  u32 shift = 0;
  for (u32 i = 1; i <= 5; ++i) shift += rows << i <= warp_size;
  return {shift};
}

// ---- at an expert rank -------------------------------------------------------------------------------------------

// The words of this rank's rows of a token, on their way behind a partial row. Rows are the token's choices.
struct SentWords {
  i32 row;         // of this lane's choice; negative for none
  u32 word;        // this lane's next one
  u32 first = ~0u; // words of each row that are sent, or more where none are to be sent
};

TY_DEVICE void load_words(const CombineArgs auto &a, SentWords &sent) {
  u32 w = sent.first + share_words(a.context.top_k).word();
  bool there = sent.row >= 0 && w < a.payload_words;
  const u32 *words = pointer<const u32>(a.payload) + static_cast<u64>(there ? sent.row : 0) * a.payload_words;
  sent.word = there ? load(words + w) : 0;
}

// Loads the first words. `row`: of choice number lane_index(). By a warp.
TY_DEVICE SentWords take_words(const CombineArgs auto &a, i32 row) {
  // As many rows as the payload has: the handle may be written meanwhile.
  if (static_cast<u32>(row) >= a.handle.output_rows) row = -1;
  SentWords sent{shuffle(row, share_words(a.context.top_k).row()), 0, 0};
  load_words(a, sent);
  return sent;
}

// Stores what the loaded words come to in a partial row, and loads the next ones. By a warp. `ll`: an LL row.
TY_DEVICE void send_words(const CombineArgs auto &a, SentWords &sent, u64 partial, bool ll) {
  WordShare share = share_words(a.context.top_k);
  u32 w = sent.first + share.word(), place = w, word = sent.word;
  bool stores = w < a.payload_words && share.row() < (a.payload_gathered ? a.context.top_k : 1);
  if (a.payload_gathered) {
    place += share.row() * a.payload_words;
  } else {
    // In the order of choices, from +0. Adding 0 for a choice without a row would change no bit.
    float sum = 0.0f;
    u32 left = warp_ballot(sent.row >= 0 && share.word() == 0);
    TY_ROLLED
    for (; left; left &= left - 1) sum = add_rn(sum, same_bits<float>(shuffle(word, lowest_bit(left) + share.word())));
    word = same_bits<u32>(sum);
  }
  u64 to = payload_in(a, partial);
  // N4 of LL rows: the word is all that is read.
  if (stores && ll) store_relaxed_sys(pointer<u64>(to) + place, present_word | word);
  if (stores && !ll) store(pointer<u32>(to) + place, word);
  sent.first += share.at_once();
  load_words(a, sent);
}

// ---- where partial rows are added ----------------------------------------------------------------------------------

// Looks at this lane's share of words `first` and on behind the `count` rows of a list: a word as it is behind an LL
// row, present for lanes without any. `row(n)`: address of row n.
template <typename Row> TY_DEVICE u64 look_at_word(const CombineArgs auto &a, u32 count, u32 first, bool ll, Row row) {
  WordShare share = share_words(count);
  u32 w = first + share.word();
  if (share.row() >= count || w >= payload_of_token(a)) return present_word;
  u64 at = payload_in(a, row(share.row()));
  // N4 of LL rows: the word is all that is read.
  if (ll) return load_relaxed_sys(pointer<const u64>(at) + w);
  return present_word | load(pointer<const u32>(at) + w);
}

// Stores what the words behind `count` rows come to, of which numbers [own, after) are those of the token's own node.
// `seen`: what the lane saw of its first word. Waits for the words of LL rows, by wait_of(number of the row), and
// leaves 0 there. By a warp. False once a deadline passed.
template <typename Row, typename WaitOf>
TY_DEVICE bool add_words(const CombineArgs auto &a, u64 seen, u32 *to, u32 count, u32 own, u32 after, bool ll, Row row,
                         WaitOf wait_of) {
  u32 all = payload_of_token(a);
  WordShare share = share_words(count);
  TY_ROLLED
  for (u32 first = 0; first < all; first += share.at_once()) {
    if (first != 0) seen = look_at_word(a, count, first, ll, row);
    bool failed = false;
    u64 start = 0;
    TY_ROLLED
    for (u32 poll = 1; ll && !failed && !is_present(seen); ++poll) {
      spin_pause("payload of a partial row");
      seen = look_at_word(a, count, first, ll, row);
      if (poll % polls_between_checks != 0) continue;
      Wait wait = wait_of(share.row());
      failed = !may_wait(a.context, wait, poll, start, wait.epoch, 0);
    }
    if (ll && warp_ballot(failed) != 0) return false;
    u32 w = first + share.word(), word = static_cast<u32>(seen), bits = 0;
    if (ll && share.row() < count && w < all) store(pointer<u64>(payload_in(a, row(share.row()))) + w, u64{0});
    // In the order of rows, from +0; rows of the own node by themselves first.
    float sum = 0.0f, inner = 0.0f;
    TY_ROLLED
    for (u32 n = 0; n < count; ++n) {
      u32 term = shuffle(word, n << share.shift | share.word());
      bits |= term;
      if (n == after) sum = add_rn(sum, inner);
      if (n >= own && n < after) inner = add_rn(inner, same_bits<float>(term));
      else sum = add_rn(sum, same_bits<float>(term));
    }
    if (after == count) sum = add_rn(sum, inner);
    if (share.row() == 0 && w < all) store(to + w, a.payload_gathered ? bits : same_bits<u32>(sum));
  }
  return true;
}

} // namespace ty
