// Combine: what Cs and Cr share, and the expert ranks' part of Cs: flags, weights sent ahead, partial rows.
#pragma once
#include "combine/payload.cuh"
#include "common/numbers.cuh"

namespace ty {

// Rows of a block whose parts can be counted, so that several warps may make one row. Where a block may have more rows,
// each goes whole to a warp.
constexpr u32 counted_rows = 256;

// A block's progress with its rows of one kind.
struct Counts {
  u32 taken;               // pieces that some warp has taken
  u32 parts[counted_rows]; // stored parts of each row, by the block's number of the row
};

// A warp's list of rows to add up, in the order of addition.
struct Terms {
  u64 senders;           // ranks of the node: the list has one row of each, in the order of bits
  u64 row[TY_MAX_TOP_K]; // addresses
  float weight[TY_MAX_TOP_K];
};

// Numbers the rows of several lists: `run` rows of the first list, as many of the next, and so on, then the next rows
// of the first.
struct RowOrder {
  u32 lists;
  u32 run;                                       // rows of a list that follow one another
  u32 lists_inverse, run_inverse, cycle_inverse; // of lists, run, and their product, as divide() takes them

  struct Place {
    u32 list;
    u32 row;
  };

  TY_DEVICE Place at(u32 n) const {
    Quotient cycle = divide(n, lists * run, cycle_inverse);
    if (run == 1) return {cycle.rest, cycle.whole};
    Quotient list = divide(cycle.rest, run, run_inverse);
    return {list.whole, cycle.whole * run + list.rest};
  }

  // List number `list` + `by`, where the first follows the last. Each is below 2^30.
  TY_DEVICE u32 rotated(u32 list, u32 by) const { return divide(list + by, lists, lists_inverse).rest; }

  // So many numbers, where no list has more than `most` rows.
  TY_DEVICE u32 numbers(u32 most) const {
    return run == 1 ? most * lists : divide(most + run - 1, run, run_inverse).whole * run * lists;
  }
};

// Shared memory of a combine block.
struct CombineShared {
  LaunchShared launch;
  u32 missing[TY_MAX_NODE_RANKS / warp_size];    // ranks of this node that send no rows, a bit each: see missing_ranks
  u32 absent;                                    // ranks that take no part in the call: see absent_ranks
  u32 dropped;                                   // ranks whose partial rows did not all come
  Terms terms[TY_MAX_BLOCK_THREADS / warp_size]; // by warp
  RowOrder order[TY_MAX_BLOCK_THREADS / warp_size]; // the same, between nodes
  u32 helped;                                       // 1: warps that have sent help to sum own tokens
  u32 taken;                                        // pieces of own tokens that are taken
  Counts inter_node, intra_node, sums; // of partial rows for other nodes, of those for the own one, of the rail's sums
  ty_handle_head head;                 // the handle's, where the block keeps it
};
static_assert(sizeof(CombineShared) <= TY_COMBINE_SHARED_BYTES, "layout.h sizes the launch");

TY_DEVICE const ty_handle_head *live_head_of(const CombineArgs auto &a) {
  return pointer<const ty_handle_head>(a.handle.head);
}

// Copies the head where the handle_may_change: what teams, their barriers and ballots depend on must be one value for
// all threads of a block. Visible after begin_launch. By thread 0.
TY_DEVICE void keep_head(const CombineArgs auto &a) {
  const ty_handle_head *live = live_head_of(a);
  ty_handle_head &kept = block_shared<CombineShared>().head;
  u64 epoch = load(&live->epoch);
  u32 state = load(&live->state), incomplete = load(&live->incomplete), own_tokens = load(&live->own_tokens);
  u32 own_bad = load(&live->own_bad), most_tokens = load(&live->most_tokens);
  store(&kept.epoch, epoch);
  store(&kept.state, state);
  store(&kept.incomplete, incomplete);
  store(&kept.own_tokens, own_tokens);
  store(&kept.own_bad, own_bad);
  store(&kept.most_tokens, most_tokens);
}

// The handle's head, after begin_launch.
TY_DEVICE const ty_handle_head *head_of(const CombineArgs auto &a) {
  return handle_may_change(a.context) ? &block_shared<CombineShared>().head : live_head_of(a);
}

// This rank's tokens. Never more than the call has room for: where another library's graphs overlap, the head may be
// that of another dispatch into the same memory.
TY_DEVICE u32 own_tokens_of(const CombineArgs auto &a) {
  u32 tokens = load(&head_of(a)->own_tokens);
  return handle_may_change(a.context) ? smaller(tokens, a.tokens) : tokens;
}

// A mask of ranks in a handle, one value for all lanes, which list rows by it. By a warp.
TY_DEVICE u64 mask_for_warp(const Context auto &c, const RankMasks &masks, u32 i) {
  if (!handle_may_change(c)) return masks.at(i);
  return shuffle(lane_index() == 0 ? masks.at(i) : 0, 0);
}

// ---- flags of the node's ranks ---------------------------------------------------------------------------------

// A combine flag, and what is in its low half (combine_status):
//
//   63.........32 31...............................1 0
//       epoch      number of the combined dispatch   1: rows are missing
//                  ^ number of the format
//
TY_DEVICE u32 dispatch_number(const CombineArgs auto &a) {
  return (static_cast<u32>(load(&head_of(a)->epoch)) << 1 ^ a.context.format) >> 1;
}
TY_DEVICE u32 combine_status(const CombineArgs auto &a) {
  return dispatch_number(a) << 1 | (load(&head_of(a)->incomplete) ? 1 : 0);
}

// Closes the context if a rank of the node combines another dispatch: rows of another token would be added. Only once
// the own flag is raised, so that every rank is notified: a closed launch raises none. By a thread.
TY_DEVICE void refuse_pairing(const CombineArgs auto &a, u64 epoch) {
  const auto &c = a.context;
  auto flag_of = [&](u32 rank) {
    return load_relaxed_sys(in_arena<const u64>(c, c.local, c.regions.combine_flags, epoch, rank));
  };
  if (flag_of(c.local) >> 32 != (epoch & 0xffffffffu)) return;
  TY_ROLLED
  for (u32 rank = 0; rank < c.node_ranks; ++rank) {
    u64 flag = flag_of(rank);
    u32 theirs = static_cast<u32>(flag) >> 1;
    if (flag >> 32 != (epoch & 0xffffffffu) || theirs == dispatch_number(a)) continue;
    keep_fault({TY_ERROR_PAIRING, 0, world_rank(c, rank), epoch, load(&head_of(a)->epoch), theirs ^ c.format >> 1, 0});
    return close(c);
  }
}

// Waits for the flag of a rank of the node, unless the rank takes no part in the call: that is decided here at the
// latest. By a thread. False also once the context is closed.
TY_DEVICE bool flag_comes(const Context auto &c, const u64 *flag, u64 epoch, u32 local) {
  u32 rank = world_rank(c, local), *decided = part_word(c, TY_DIRECTION_COMBINE, rank);
  u32 seen = load_relaxed_gpu(decided);
  bool here = !is_left_out(c, local) && wait_flag(c, flag, epoch, TY_SITE_COMBINE_FLAG, rank, "combine flag");
  if (!here && is_closed(c)) return false;
  Part part = decide_part(decided, seen, epoch, here ? Part::present : Part::absent);
  if (part == Part::absent || here) return part == Part::present;
  // Another block has seen it.
  return wait_flag(c, flag, epoch, TY_SITE_COMBINE_FLAG, c.rank, "combine flag");
}

// Waits for the flag of every rank of the node. By a team. False once a deadline passed, or if a rank combines another
// dispatch. `closed`: as finds_closed.
TY_DEVICE bool wait_flags(const CombineArgs auto &a, CombineShared &shared, const Team &team, u64 epoch, bool closed) {
  const auto &c = a.context;
  WaitTimes waits = begin_waits(block_index() == 0 ? a.wait_times : 0);
  bool failed = closed;
  u32 own = dispatch_number(a);
  for (u32 first = team_warp(team) * warp_size; first < c.node_ranks; first += team_threads(team)) {
    u32 rank = first + lane_index();
    bool incomplete = false, comes = true;
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.combine_flags, epoch, rank);
    if (tolerates_absence(c)) {
      comes = rank >= c.node_ranks || flag_comes(c, flag, epoch, rank);
      failed |= fails(c, comes);
      u32 absent = warp_ballot(!comes);
      if (lane_index() == 0) store(&shared.absent, absent);
      if (!comes) waits.add(world_rank(c, rank));
    }
    if (rank < c.node_ranks && comes) {
      if (!tolerates_absence(c))
        failed |= !wait_flag(c, flag, epoch, TY_SITE_COMBINE_FLAG, world_rank(c, rank), "combine flag");
      note_notified(c, TY_DIRECTION_COMBINE, world_rank(c, rank));
      waits.add(world_rank(c, rank));
      u32 status = static_cast<u32>(load_relaxed_sys(flag));
      incomplete = (status & 1) != 0;
      failed |= status >> 1 != own;
    }
    u32 missing = warp_ballot(incomplete);
    if (lane_index() == 0) store(&shared.missing[first / warp_size], missing);
  }
  if (!team_any(team, failed)) return true;
  if (team_thread(team) == 0) refuse_pairing(a, epoch);
  return false;
}

// The ranks of this node that send no rows, a bit each, after wait_flags.
TY_DEVICE u64 missing_ranks(const Context auto &c, const CombineShared &shared) {
  static_assert(TY_MAX_NODE_RANKS == 2 * warp_size, "two words");
  u64 missing = load(&shared.missing[0]);
  if (c.node_ranks > warp_size) missing |= static_cast<u64>(load(&shared.missing[1])) << warp_size;
  return missing;
}

// The ranks of this node that take no part in the call, likewise.
TY_DEVICE u64 absent_ranks(const Context auto &c, const CombineShared &shared) {
  return tolerates_absence(c) ? load(&shared.absent) : 0;
}

// The first rank of this node that sends no rows though one of `count` masks has it; node_ranks for none. By a warp.
TY_DEVICE u32 first_missing(const Context auto &c, const CombineShared &shared, const RankMasks &masks, u32 count) {
  u64 missing = missing_ranks(c, shared);
  for (u32 rank = 0; rank < c.node_ranks; ++rank) {
    if (!((missing >> rank) & 1)) continue;
    bool found = false;
    for (u32 i = lane_index(); i < count; i += warp_size) found |= ((masks.at(i) >> rank) & 1) != 0;
    if (warp_ballot(found) != 0) return rank;
  }
  return c.node_ranks;
}

// ---- flags and weights -----------------------------------------------------------------------------------------

// Notifies every rank of the node that this epoch's rows are coming or missing. By a team of one block.
TY_DEVICE void announce(const CombineArgs auto &a, const Team &team, u64 epoch) {
  const auto &c = a.context;
  u32 status = combine_status(a);
  // N3: acquired by wait_flags.
  for (u32 rank = team_thread(team); rank < c.node_ranks; rank += team_threads(team))
    if (!is_left_out(c, rank))
      store_release_sys(in_arena<u64>(c, rank, c.regions.combine_flags, epoch, c.local), flag_value(epoch, status));
}

// Sends a source's weights to all ranks of the node: block b serves ranks b, b + workers, ... `row(i)` is where the
// weights of its token i begin. By a team.
template <typename Row>
TY_DEVICE void push_weights(const CombineArgs auto &a, const Team &team, u64 call, u32 source, u32 count, Row row) {
  const auto &c = a.context;
  for (u32 rank = block_index(); rank < c.node_ranks; rank += worker_count(c)) {
    float *ahead = in_arena<float>(c, rank, c.regions.ahead_weights, call, source);
    bool gone = is_left_out(c, rank);
    for (u32 i = team_thread(team); !gone && i < count * c.top_k; i += team_threads(team))
      store(ahead + i, load(row(i / c.top_k) + i % c.top_k));
    team_barrier(team);
    // N10: the weights happen before this release; wait_tag(TY_SITE_AHEAD_WEIGHTS) acquires.
    if (team_thread(team) == 0 && !gone)
      store_release_sys(in_arena<u64>(c, rank, c.regions.ahead_flags, call, source), call);
  }
}

// Waits until the weights of a source are here. By a warp. False once a deadline passed.
TY_DEVICE bool wait_weights(const Context auto &c, u64 call, u32 source) {
  if (!weighs_late(c)) return true;
  bool failed = false;
  if (lane_index() == 0) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.ahead_flags, call, source);
    failed = !wait_tag(c, flag, call, TY_SITE_AHEAD_WEIGHTS, source, "weights");
  }
  // Lane 0 acquired; the barrier orders the other lanes' loads after that.
  warp_barrier();
  return warp_ballot(failed) == 0;
}

// The weights that apply to one (source, token), after wait_weights.
TY_DEVICE const float *weights_of(const CombineArgs auto &a, u64 call, u32 source, u32 token) {
  const auto &c = a.context;
  if (weighs_late(c))
    return in_arena<const float>(c, c.local, c.regions.ahead_weights, call, source) + static_cast<u64>(token) * c.top_k;
  return pointer<const float>(a.handle.weights) + (static_cast<u64>(source) * c.max_tokens + token) * c.top_k;
}

// ---- shares of the work ------------------------------------------------------------------------------------------

// Parts of a row: as many as a block has warps at the most.
constexpr u32 row_parts = TY_MAX_BLOCK_THREADS / warp_size;
static_assert((row_parts & (row_parts - 1)) == 0, "halved to pieces");

// Consecutive parts of a row, which a warp carries at once.
struct Piece {
  u32 first;
  u32 parts;
};

// The position of set bit number n, counted from 0. By a warp.
TY_DEVICE u32 nth_bit(u32 mask, u32 n) {
  u32 before = popcount(mask & ((1u << lane_index()) - 1));
  return lowest_bit(warp_ballot(((mask >> lane_index()) & 1) != 0 && before == n));
}

// How often `rows` rows are halved for `warps` warps: as long as pieces do not outnumber the warps, or two. A piece
// costs its warp trips to memory besides its bytes.
TY_DEVICE u32 cut_of_pieces(u32 rows, u32 warps) {
  u32 cut = 0, most = warps < 2 ? 2 : warps;
  TY_ROLLED
  while (row_parts >> cut > 1 && rows << (cut + 1) <= most) ++cut;
  return cut;
}

// Before rows are counted. By a team, whose members meet afterwards.
TY_DEVICE void clear_counts(const Team &team, Counts &counts) {
  for (u32 row = team_thread(team); row < counted_rows; row += team_threads(team)) store(&counts.parts[row], 0u);
  if (team_thread(team) == 0) store(&counts.taken, 0u);
}

// Counts a stored piece of row number `row` of this block. By a warp. True for the warp that completes the row: the
// stores of all pieces happen before (N12).
TY_DEVICE bool is_row_whole(Counts &counts, u32 row, const Piece &piece) {
  warp_barrier();
  if (piece.parts == row_parts) return true;
  u32 before = lane_index() == 0 ? atomic_count_block(&counts.parts[row], piece.parts) : 0;
  // Lane 0 acquired; the barrier orders the other lanes after that.
  warp_barrier();
  return shuffle(before, 0) + piece.parts == row_parts;
}

// Shares rows out: number n to block n mod blocks, and there piece by piece to whichever of `warps` warps takes the
// next; `taken` counts the pieces taken. A warp looks at 32 of its block's numbers at once, a lane each, and finds out
// for itself which are there(n). carry(n, lane, row, piece) is called in the order of numbers, with the lane that found
// the number, which is the block's row number `row`. By warps, each for itself. False once carry returned false.
//
// `row_by_row`: one row after the other, each by all these warps, so that the first rows are done first. If rows
// outnumber those that can be counted, or if `whole`, each goes whole to a warp.
template <typename There, typename Carry>
TY_DEVICE bool share_out(const Context auto &c, u32 *taken, u32 warps, u32 numbers, bool row_by_row, There there,
                         Carry carry, bool whole = false) {
  u32 blocks = worker_count(c), before = 0; // pieces of the numbers before
  bool counted = !whole && numbers <= blocks * counted_rows;
  u32 next = take_next(taken);
  TY_ROLLED
  for (u32 row = 0; block_index() + row * blocks < numbers; row += warp_size) {
    u32 mine = block_index() + (row + lane_index()) * blocks;
    u32 rows = warp_ballot(mine < numbers && there(mine));
    u32 cut = counted ? cut_of_pieces(row_by_row ? 1 : popcount(rows), warps) : 0, pieces = popcount(rows) << cut;
    TY_ROLLED
    for (; next - before < pieces; next = take_next(taken)) {
      u32 i = next - before, lane = nth_bit(rows, i >> cut), parts = row_parts >> cut;
      Piece piece{(i & ((1u << cut) - 1)) * parts, parts};
      if (!carry(block_index() + (row + lane) * blocks, lane, row + lane, piece)) return false;
    }
    before += pieces;
  }
  return true;
}

// Row by row of `lists` lists.
TY_DEVICE RowOrder row_by_row(u32 lists, u32 inverse) { return {lists, 1, inverse, ~0u, inverse}; }

// Most rows of a list that follow one another: they go to one rank, while other blocks have rows for others.
constexpr u32 longest_run = 32;

// Chunk by chunk of `messages` messages of sums, none of more than `most` rows, so that the first chunk of a message is
// soon whole; row by row within runs where chunks are longer than a run.
TY_DEVICE RowOrder chunk_by_chunk(const Context auto &c, u32 messages, u32 most) {
  u32 run = smaller(smaller(layout_of(c, TY_DIRECTION_COMBINE).chunk_rows, longest_run), most);
  if (messages == 0 || most == 0) return {0, 1, 0, 0, 0};
  return {messages, run, ~0u / messages, ~0u / run, ~0u / (messages * run)};
}

// Keeps an order in shared memory, since registers are few. By a warp.
TY_DEVICE void keep_order(RowOrder &kept, const RowOrder &order) {
  warp_barrier();
  if (lane_index() == 0) {
    store(&kept.lists, order.lists);
    store(&kept.run, order.run);
    store(&kept.lists_inverse, order.lists_inverse);
    store(&kept.run_inverse, order.run_inverse);
    store(&kept.cycle_inverse, order.cycle_inverse);
  }
  warp_barrier();
}

TY_DEVICE RowOrder load_order(const RowOrder &kept) {
  return {load(&kept.lists), load(&kept.run), load(&kept.lists_inverse), load(&kept.run_inverse),
          load(&kept.cycle_inverse)};
}

// Groups [begin, end) of a row.
struct Columns {
  u32 begin;
  u32 end;
};

// The columns of a piece, in groups of partial rows: whole blocks of them.
template <typename Partial> TY_DEVICE Columns columns_of(const Context auto &c, const Piece &piece) {
  constexpr u32 groups = Partial::block / Partial::group;
  u32 blocks = (c.hidden + Partial::block - 1) / Partial::block;
  return {blocks * piece.first / row_parts * groups, blocks * (piece.first + piece.parts) / row_parts * groups};
}

// Whether lanes make a block of a partial row together, so that none may leave before the others.
template <typename Partial> constexpr bool lanes_share_blocks = Partial::block > Partial::group;

// Where a warp's passes over the columns of a partial row end: past the last column; where lanes share blocks, for all
// lanes in the same pass.
template <typename Partial> TY_DEVICE u32 last_pass(const Columns &columns) {
  if (!lanes_share_blocks<Partial>) return columns.end;
  return columns.begin + (columns.end - columns.begin + warp_size - 1) / warp_size * warp_size;
}

// ---- sums of rows ------------------------------------------------------------------------------------------------

// 16-byte loads that a thread has under way when it adds rows up, as many as its registers allow, and over how many
// rows at once: a token has two or three rows on an expert rank, and more partial rows at its source.
constexpr u32 loads_at_expert = 8, rows_at_expert = 2;
constexpr u32 loads_at_source = 8, rows_at_source = 4;
// A rail has one or two partial rows of most tokens: fewer, the more nodes there are.
constexpr u32 loads_at_rail = 8, rows_at_rail = 2;
// Columns whose sums a thread holds: fewer where it then quantises them; at the source twice, the sum of all nodes and
// that of its own node.
template <typename Partial> constexpr u32 columns_at_expert = lanes_share_blocks<Partial> ? 16 : 32;
constexpr u32 columns_at_source = 16;

// Groups of each row in those loads: as many as fit of an expert's row and of the partial row, whichever is larger.
template <typename Row, typename Partial>
constexpr u32 groups_at_expert = smaller(
    loads_at_expert / (rows_at_expert * larger(vectors_of<Row, Partial::group>, vectors_of<Partial, Partial::group>)),
    columns_at_expert<Partial> / Partial::group);
template <typename Partial>
constexpr u32 groups_at_rail = smaller(loads_at_rail / (rows_at_rail * vectors_of<Partial, Partial::group>),
                                       columns_at_expert<Partial> / Partial::group);
template <typename Partial>
constexpr u32 groups_at_source = smaller(loads_at_source / (rows_at_source * vectors_of<Partial, Partial::group>),
                                         columns_at_source / Partial::group);

// Whether partial rows are LL rows; between nodes they are not.
template <bool inter_node> TY_DEVICE bool ll_rows(const Context auto &c) { return !inter_node && partials_are_ll(c); }

// The groups present in a batch of `rows` rows: a bit for each of groups g, g + 32, ... below g_end, row by row.
template <u32 rows_at_once, u32 groups> TY_DEVICE u32 batch_of(u32 rows, u32 g, u32 g_end) {
  u32 here = 0, batch = 0;
  for (u32 i = 0; i < groups; ++i) here |= static_cast<u32>(g + i * warp_size < g_end) << i;
  for (u32 r = 0; r < rows_at_once; ++r) batch |= r < rows ? here << r * groups : 0;
  return batch;
}

// Groups g, g + 32, ... below g_end of up to rows_at_once rows of a list, from number `first` on.
struct TermBatch {
  u32 first;
  u32 rows; // from `first` to the end of the list
  u32 g;
  u32 g_end;
};

// What a warp does while the loads of a batch are under way.
struct Nothing {
  TY_DEVICE void operator()() const {}
};

// The wait for row number n of a list of LL rows.
TY_DEVICE Wait wait_of_term(const Context auto &c, const Terms &terms, u32 n) {
  u64 left = load(&terms.senders), epoch = load(&block_shared<LaunchShared>().epoch);
  TY_ROLLED
  for (u32 i = 0; i < n; ++i) left &= left - 1;
  return {TY_SITE_PARTIAL, world_rank(c, lowest_bit(left)), epoch, 0};
}

// Waits for a batch of LL rows and loads it; absent groups are all ones. False once a deadline passed.
template <typename T, u32 rows_at_once, u32 groups, u32 n, typename Meanwhile>
TY_DEVICE bool await_terms(const Context auto &c, const Terms &terms, const TermBatch &batch,
                           Raw<T, n> (&data)[rows_at_once][groups], Meanwhile meanwhile) {
  auto [first, rows, g, g_end] = batch;
  constexpr u32 row_bits = (1u << groups) - 1;
  for (u32 r = 0; r < rows_at_once; ++r)
    for (u32 i = 0; i < groups; ++i) data[r][i] = all_ones<T, n>();
  u32 missing = batch_of<rows_at_once, groups>(rows, g, g_end), wanted = missing;
  u64 start = 0;
  TY_ROLLED
  for (u32 poll = 1;; ++poll) {
    for (u32 r = 0; r < rows_at_once; ++r) {
      u32 of_row = wanted >> r * groups & row_bits;
      const char *row = pointer<const char>(load(&terms.row[first + (of_row ? r : 0)]));
      for (u32 i = 0; i < groups; ++i)
        if (of_row >> i & 1) data[r][i] = look_at_raw<T, n>(row, g + i * warp_size, c.hidden);
    }
    meanwhile();
    // One condition for the whole batch: with more, the last loads would wait until predicates are free again.
    u32 least = ~0u, was_missing = missing;
    for (u32 r = 0; r < rows_at_once; ++r)
      for (u32 i = 0; i < groups; ++i) least = smaller(least, least_word<T, n>(data[r][i]));
    if (least != 0) return true;
    missing = 0;
    for (u32 r = 0; r < rows_at_once; ++r)
      for (u32 i = 0; i < groups; ++i)
        missing |= static_cast<u32>(least_word<T, n>(data[r][i]) == 0) << (r * groups + i);
    // The first missing row is polled alone until it is there; then all rows that are still missing.
    u32 row = lowest_bit(missing) / groups;
    wanted = missing != was_missing ? missing : missing & row_bits << row * groups;
    spin_pause("partial row");
    if (poll % polls_between_checks != 0) continue;
    Wait wait = wait_of_term(c, terms, first + row);
    if (!may_wait(c, wait, poll, start, wait.epoch, 0)) return false;
  }
}

// Adds the rows of a list, up to `end`, to sums of groups g, g + 32, ...: one after the other, loaded rows_at_once
// together, by add(i, group g + 32 i of a row, its number in the list). Waits for LL rows, one of each of the list's
// senders: false once a deadline passed, in the lane that saw it. Calls meanwhile() while loads are under way.
template <typename T, u32 rows_at_once, u32 groups, u32 n, typename Add, typename Meanwhile = Nothing>
TY_DEVICE bool add_terms(const Context auto &c, const Terms &terms, u32 end, u32 g, u32 g_end, bool ll, Add add,
                         Meanwhile meanwhile = {}) {
  bool well = true;
  for (u32 first = 0; first < end; first += rows_at_once) {
    Raw<T, n> data[rows_at_once][groups];
    for (u32 r = 0; r < rows_at_once; ++r) {
      const char *row = pointer<const char>(load(&terms.row[first + r < end ? first + r : first]));
      for (u32 i = 0; i < groups; ++i) {
        bool there = !ll && first + r < end && g + i * warp_size < g_end;
        data[r][i] = there ? load_raw<T, n>(row, g + i * warp_size, c.hidden) : Raw<T, n>{};
      }
    }
    if (ll) well &= await_terms<T, rows_at_once, groups, n>(c, terms, {first, end - first, g, g_end}, data, meanwhile);
    else meanwhile();
    for (u32 r = 0; r < rows_at_once && first + r < end; ++r)
      for (u32 i = 0; i < groups; ++i) add(i, widen<T, n>(data[r][i]), first + r);
  }
  return well;
}

// Leaves zeros in groups g, g + 32, ... of a list of LL rows that have arrived. By a warp.
template <typename T, u32 groups, u32 n>
TY_DEVICE void clear_terms(const Context auto &c, const Terms &terms, u32 count, u32 g, u32 g_end) {
  // Only after all lanes that share a scale have read it.
  if (lanes_share_blocks<T>) warp_barrier();
  TY_ROLLED
  for (u32 r = 0; r < count; ++r) {
    char *row = pointer<char>(load(&terms.row[r]));
    for (u32 i = 0; i < groups; ++i)
      if (g + i * warp_size < g_end) clear_raw<T, n>(row, g + i * warp_size, c.hidden);
  }
}

// ---- a rail's messages of sums -----------------------------------------------------------------------------------

// A round's rows of served source j, among those of the call.
TY_DEVICE Range rail_rows(const CombineArgs auto &a, const Round &round, u32 j) {
  return round_range(a.context, a.handle.rail_rows, j, round);
}

// Whether partial rows for other nodes are already the node's sums, since the node has no other rank. They then go
// directly into the message.
TY_DEVICE bool sends_sums(const CombineArgs auto &a) {
  return a.context.node_ranks == 1 && !load(&head_of(a)->incomplete);
}

// Where the node's sum of a round's row of served source j goes, after wait_stagings.
TY_DEVICE char *sum_in_message(const Context auto &c, const Round &round, u32 j, u32 row) {
  return staging_of(c, TY_DIRECTION_COMBINE, round.epoch, j) + row_offset(layout_of(c, TY_DIRECTION_COMBINE), row);
}

// Counts a stored sum in its chunk of a message of `rows` rows. By a warp, after is_row_whole.
TY_DEVICE void count_sum(const Context auto &c, const Round &round, u32 j, u32 rows, u32 row) {
  u32 chunk = chunk_of_row(layout_of(c, TY_DIRECTION_COMBINE), row);
  if (lane_index() == 0) count_packed(c, TY_DIRECTION_COMBINE, round.epoch, j, {rows, 0}, chunk, packed_row);
}

// ---- partial rows ------------------------------------------------------------------------------------------------

struct Owner {
  u32 node;
  u32 rank; // of this node
  u32 part;
};

// Where the partial rows of a source's tokens go.
TY_DEVICE Owner owner_of(const Context auto &c, u32 source) {
  if (c.nodes == 1) return {0, source, 0};
  u64 packed = load(pointer<const u64>(c.source_owner) + source);
  return {static_cast<u32>(packed & 0xffffu), static_cast<u32>(packed >> 16 & 0xffffu), static_cast<u32>(packed >> 32)};
}

// As list_rows, from a compact handle, where `next` is 1 + the first row. One choice after the other: large worlds,
// whose handles are compact, seldom bring a rank more than one.
TY_DEVICE u32 list_compact(const CombineArgs auto &a, Terms &terms, u64 call, u32 source, u32 token, u32 next,
                           u32 bytes, i32 &own) {
  const auto &c = a.context;
  u32 count = 0;
  own = -1;
  // Never more or other rows, also if the handle is written meanwhile. Without a row `next` - 1 is beyond all.
  TY_ROLLED
  for (; next - 1 < a.handle.output_rows && count < c.top_k; ++count) {
    u64 seen =
        !handle_may_change(c) || lane_index() == 0 ? load(pointer<const u64>(a.handle.row_choices) + next - 1) : 0;
    RowChoice row = RowChoice::of(handle_may_change(c) ? shuffle(seen, 0) : seen);
    if (lane_index() == 0) {
      u64 at = a.rows + static_cast<u64>(next - 1) * a.rows_pitch;
      store(&terms.row[count], at);
      store(&terms.weight[count], weighs_late(c) ? load(weights_of(a, call, source, token) + row.choice) : row.weight);
      if (bytes) prefetch(pointer<const void>(at), bytes);
    }
    if (row.choice == lane_index()) own = static_cast<i32>(next - 1);
    next = row.next;
  }
  warp_barrier();
  return count;
}

// Lists this rank's rows of a token, in top-k order, a choice a lane, and prefetches the first `bytes` of each.
// `entry`: of the token among the handle's slots. By a warp. Returns how many there are; `own`: the row of the lane's
// choice, or negative.
TY_DEVICE u32 list_rows(const CombineArgs auto &a, Terms &terms, u64 call, u32 source, u32 token, u32 entry, u32 bytes,
                        i32 &own) {
  const auto &c = a.context;
  if (a.handle.row_choices) return list_compact(a, terms, call, source, token, entry >> handle_slot_bits, bytes, own);
  u64 choices = (static_cast<u64>(source) * c.max_tokens + token) * c.top_k;
  u32 k = lane_index();
  i32 row = k < c.top_k ? load(pointer<const i32>(a.handle.rows) + choices + k) : -1;
  own = row;
  float weight = k < c.top_k ? load(weights_of(a, call, source, token) + k) : 0.0f;
  u32 here = warp_ballot(row >= 0);
  if (row >= 0) {
    u32 place = popcount64(bits_below(here, k));
    store(&terms.row[place], a.rows + static_cast<u64>(row) * a.rows_pitch);
    store(&terms.weight[place], weight);
    if (bytes) prefetch(pointer<const void>(a.rows + static_cast<u64>(row) * a.rows_pitch), bytes);
  }
  warp_barrier();
  return popcount(here);
}

// Stores the sums of groups g, g + 32, ... of a partial row, as an LL row (`ll`) or a tagged row. By a warp.
template <typename Partial, u32 groups>
TY_DEVICE void store_partials(const Context auto &c, char *out, u32 g, u32 g_end,
                              const Floats<Partial::group> (&sums)[groups], bool ll) {
  for (u32 i = 0; i < groups; ++i) {
    bool there = g + i * warp_size < g_end;
    if (!there && !lanes_share_blocks<Partial>) return;
    store_partial<Partial>(out, g + i * warp_size, there, c.hidden, sums[i], ll);
  }
}

// Stores the sum of a list of this rank's rows at `out`, as an LL row (`ll`) or a tagged row. By a warp.
template <typename Row, typename Partial>
TY_DEVICE void sum_rows(const CombineArgs auto &a, const Terms &terms, u32 count, const Columns &columns, char *out,
                        bool ll) {
  const auto &c = a.context;
  constexpr u32 groups = groups_at_expert<Row, Partial>;
  using Group = Floats<Partial::group>;
  u32 end = last_pass<Partial>(columns);
  for (u32 g = columns.begin + lane_index(); g < end; g += groups * warp_size) {
    Group sums[groups] = {};
    auto add = [&](u32 i, const Group &y, u32 n) {
      if (a.layout == TY_LAYOUT_TOKEN) {
        sums[i] = y; // the caller has applied the weights, and the row is the sum
      } else {
        float weight = load(&terms.weight[n]);
        for (u32 j = 0; j < Partial::group; ++j) sums[i].v[j] = fma_rn(weight, y.v[j], sums[i].v[j]);
      }
    };
    add_terms<Row, rows_at_expert, groups, Partial::group>(c, terms, count, g, columns.end, false, add);
    store_partials<Partial>(c, out, g, columns.end, sums, ll);
  }
}

// A token's entry among the handle's slots, which has the slot of this rank's partial row at the owner; negative for
// none.
TY_DEVICE i32 slot_entry(const CombineArgs auto &a, u32 source, u32 token) {
  return load(pointer<const i32>(a.handle.slots) + static_cast<u64>(source) * a.context.max_tokens + token);
}

// Tags of partial rows that a warp holds back, a lane each, so that several share one fence.
struct HeldTags {
  u64 *own; // this lane's
  u32 count;
};

// Of whole rows; the best as measured (docs/notebook.md, "Large calls").
constexpr u32 most_held_tags = 2;

// Raises the tags that a warp holds, after is_row_whole of each row. LL rows have no tags, and the fence orders nothing
// for them; but a warp that waits for a fence sends nothing, so its multiprocessor has no more under way than the links
// take. By a warp.
template <bool inter_node> TY_DEVICE void raise_tags(const Context auto &c, HeldTags &held, u64 epoch) {
  if (held.count == 0) return;
  // N4: all pieces' stores happen before this fence; the wait for TY_SITE_PARTIAL acquires.
  fence_acq_rel_sys();
  if (!ll_rows<inter_node>(c) && lane_index() < held.count) store_relaxed_sys(held.own, epoch);
  held.count = 0;
}

// A partial row that a warp sends.
struct PartialRow {
  u32 source;
  u32 token; // as numbered here, of the source's
  u32 entry; // of the token among the handle's slots
  u32 place; // of the token among the round's
  u32 row;   // the block's number of it, by which pieces are counted
};

// Sends a piece of one partial row to its owner, or into the message if it is the node's sum. Its tag may be held back.
// By a warp. False once a deadline passed.
template <typename Row, typename Partial, bool inter_node>
TY_DEVICE bool send_partial(const CombineArgs auto &a, CombineShared &shared, Counts &counts, const Round &round,
                            const PartialRow &partial, const Piece &piece, HeldTags &held) {
  const auto &c = a.context;
  auto [source, token, entry, n, row] = partial;
  u64 call = round.call;
  // No tag of a finished row may wait for another rank's weights.
  if (weighs_late(c)) raise_tags<inter_node>(c, held, round.epoch);
  if (was_cut_off(c, source)) return true;
  if (!wait_weights(c, call, source)) return tolerates_absence(c) && !closed_for_warp(c);
  Owner owner = owner_of(c, source);
  Terms &terms = shared.terms[warp_index()];
  // A part of a row is loaded at once; a whole row takes several passes, each of which would wait for memory. With many
  // blocks memory is busy enough, and prefetched bytes are evicted again.
  u32 bytes = piece.parts == row_parts && has_few_blocks(c) ? c.hidden * Row::bytes / 16 * 16 : 0;
  i32 own = -1;
  u32 count = list_rows(a, terms, call, source, token, entry, bytes, own);
  u32 slot = a.handle.row_choices ? entry & ((1u << handle_slot_bits) - 1) : entry;
  u32 place = n * c.slots + slot; // fits: TY_MAX_TOKENS * TY_MAX_TOP_K
  char *out = in_arena<char>(c, owner.rank, c.regions.partials, round.epoch, owner.part) +
              static_cast<u64>(place) * c.partial_bytes;
  bool sums = inter_node && owner.part != 0 && sends_sums(a);
  u32 rows = 0; // of the message
  if (sums) {
    out = sum_in_message(c, round, owner.part - 1, n);
    Range range = rail_rows(a, round, owner.part - 1);
    rows = range.end - range.first;
  }
  Columns columns = columns_of<Partial>(c, piece);
  bool ll = ll_rows<inter_node>(c);
  // Known by the type: a branch that is merely never taken would cost other kernels registers.
  if constexpr (requires { a.brings_words; }) {
    // Words are loaded before the rows. A row does not wait for them where there are registers to keep them in until
    // the row is sent (docs/notebook-calls.md, "Words after rows").
    bool after = has_spare_registers(c);
    SentWords words{};
    if (piece.first == 0) words = take_words(a, own);
    auto send_all = [&] {
      TY_ROLLED
      while (words.first < a.payload_words) send_words(a, words, reinterpret_cast<u64>(out), ll);
    };
    if (!after) send_all();
    sum_rows<Row, Partial>(a, terms, count, columns, out, ll);
    if (after) send_all();
  } else {
    sum_rows<Row, Partial>(a, terms, count, columns, out, ll);
  }
  if (ll) {
    warp_barrier(); // the list is read
    if (piece.parts == row_parts && ++held.count == most_held_tags) raise_tags<inter_node>(c, held, round.epoch);
    return true;
  }
  if (!is_row_whole(counts, row, piece)) return true;
  if (sums) return count_sum(c, round, owner.part - 1, rows, n), true;
  if (lane_index() == held.count)
    held.own = in_arena<u64>(c, owner.rank, c.regions.partial_tags, round.epoch, owner.part) + place;
  ++held.count;
  if (piece.parts != row_parts || held.count == most_held_tags) raise_tags<inter_node>(c, held, round.epoch);
  return true;
}

// The result of a lane's lookup of a number: which partial row it is, and whether there is such a row.
struct Looked {
  u32 source;
  u32 token;
  u32 place; // of the round's tokens
  u32 end;   // of them
  i32 entry; // as slot_entry

  TY_DEVICE bool there() const { return token < end && entry >= 0; }
};

// Looks up number n. `own`: of partial rows for the own node. Partial rows for other nodes go to sources of the next
// nodes first, so that nodes do not all send to the same one.
TY_DEVICE Looked look_up(const CombineArgs auto &a, const Round &round, const RowOrder &order, bool own, u32 n) {
  const auto &c = a.context;
  RowOrder::Place at = order.at(n);
  // In the own node each token begins with another source, so that a block's rows do not all go to one.
  u32 rotated = order.rotated(at.list, own ? at.row : c.node_first);
  u32 source = own ? c.node_first + rotated : rotated < c.node_first ? rotated : rotated + c.node_ranks;
  Range range = round_range(c, a.handle.source_tokens, source, round);
  u32 token = range.first + at.row;
  // Slots are loaded even if there is no such token, so that both loads are under way together.
  return {source, token, at.row, range.end, token < c.max_tokens ? slot_entry(a, source, token) : -1};
}

// Looks up a lane's first number as a launch begins, beside the launch's own words. In specialised calls of one node.
TY_DEVICE Looked look_ahead(const CombineArgs auto &a) {
  const auto &c = a.context;
  u32 n = block_index() + lane_index() * worker_count(c);
  return look_up(a, {0, 0, 0}, row_by_row(c.node_ranks, c.ranks_inverse), true, n);
}

// Sends this rank's partial rows: for sources of its node, token by token; or for all others, chunk by chunk, so that
// what the source needs first is sent first. Rows that cross the network are made one after the other: the network
// takes long, and can begin with the first. `ahead`: look_ahead's. By a team's warps, each for itself. False once a
// deadline passed.
template <typename Row, typename Partial, bool inter_node>
TY_DEVICE bool send_partials(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Round &round,
                             bool own, const Looked &ahead) {
  const auto &c = a.context;
  const ty_handle_head *head = head_of(a);
  u32 sources = own ? c.node_ranks : c.ranks - c.node_ranks;
  if (sources == 0 || load(&head->incomplete)) return true;
  RowOrder &kept = shared.order[warp_index()];
  u32 most = load(&head->most_tokens);
  if (inter_node) keep_order(kept, own ? row_by_row(sources, ~0u / sources) : chunk_by_chunk(c, sources, most));
  auto load_own = [&] { return inter_node ? load_order(kept) : row_by_row(sources, c.ranks_inverse); };
  // The lookup of the lane's number.
  Looked looked = ahead;
  auto there = [&](u32 n) {
    if (!looks_ahead(c) || n >= worker_count(c) * warp_size) looked = look_up(a, round, load_own(), own, n);
    return looked.there();
  };
  // Cannot overflow: metadata of a token takes more than 24 bytes a source, twice.
  u32 numbers = load_own().numbers(most);
  Counts &counts = own ? shared.intra_node : shared.inter_node;
  HeldTags held{nullptr, 0};
  auto carry = [&](u32, u32 lane, u32 row, const Piece &piece) {
    PartialRow partial{shuffle(looked.source, lane), shuffle(looked.token, lane),
                       static_cast<u32>(shuffle(looked.entry, lane)), shuffle(looked.place, lane), row};
    return send_partial<Row, Partial, inter_node>(a, shared, counts, round, partial, piece, held);
  };
  if (!share_out(c, &counts.taken, team.warps, numbers, !own, there, carry)) return false;
  if (!ll_rows<inter_node>(c)) raise_tags<inter_node>(c, held, round.epoch);
  return true;
}

// ---- partial rows at their owner -----------------------------------------------------------------------------------

// The ranks of this node that a token went to, and those among them that send its rows.
struct Parts {
  u64 ranks;
  u64 present;
};

// Lists the partial rows of a round's token in rank order, from place `at` on, a rank a lane, and waits for them,
// unless they are LL rows: the calling lane's share. `part`: 0 for own tokens, else 1 + the number of the served source
// whose token it is. True once a deadline passed.
template <bool inter_node>
TY_DEVICE bool partials_fail(const Context auto &c, Terms &terms, u32 at, u64 epoch, u32 part, u32 token,
                             const Parts &parts) {
  bool failed = false;
  u32 served = inter_node && tolerates_absence(c) && part != 0 ? served_source(c, part - 1) : Wait::nobody;
  if (ll_rows<inter_node>(c) && lane_index() == 0) store(&terms.senders, parts.present);
  TY_ROLLED
  for (u32 first = 0; first < c.node_ranks; first += warp_size) {
    u32 rank = first + lane_index();
    if (!((parts.present >> rank) & 1)) continue;
    const char *rows = in_arena<const char>(c, c.local, c.regions.partials, epoch, part);
    u64 place = static_cast<u64>(token) * c.slots + slot_of_rank(c, parts.ranks, rank);
    store(&terms.row[at + popcount64(bits_below(parts.present, rank))],
          reinterpret_cast<u64>(rows + place * c.partial_bytes));
    if (ll_rows<inter_node>(c)) continue;
    const u64 *tag = in_arena<const u64>(c, c.local, c.regions.partial_tags, epoch, part) + place;
    Wait wait{TY_SITE_PARTIAL, world_rank(c, rank), epoch, 0, TY_DIRECTION_COMBINE, served};
    bool here = wait_word(c, wait, tag, 0, epoch, "partial row");
    failed |= fails(c, here);
    // The token is summed again without the rank, when all else is done; a sum for a missing rank is for nothing.
    bool dropped = tolerates_absence(c) && !here && !is_for_nothing(c, wait);
    if (dropped) drop_rank(c, TY_DIRECTION_COMBINE, epoch, world_rank(c, rank));
  }
  return failed;
}

// After a warp's waiting and listing. Its lanes acquired tags of their own; the barrier orders the loads of all lanes
// after that. False if one failed.
TY_DEVICE bool gathered(bool failed) {
  warp_barrier();
  return warp_ballot(failed) == 0;
}

} // namespace ty
