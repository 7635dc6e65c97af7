// Combine: every rank sums its own experts' rows of a token, pushes one partial row to the token's source, or to the
// source's rail in this node, and the source adds.
//
//   Cs  flag to every rank of the node (and the weights, if they come with combine)
//       block per (source, token): sum over this rank's choices, top-k order, fp32 fmaf -> owner's slot (N4)
//       rail, block per (served source, row): the node's partial rows in rank order -> a row in wire staging ->
//       doorbell (a rank that is alone in its node: its partial row is that sum, and goes there at once)
//   Cr  every block: flags of the node's ranks
//       block per own token: sum over nodes in order, each the sum of its ranks in order -> out
//       block 0: the status in the heads of the rails' messages
//
// A block has many rows, or one, whose pieces its warps take (share_out). In a fused call, and between nodes, two teams
// of a block work side by side. One sends partial rows, which waits for nothing that the other does on any rank. The
// other does what waits for partial rows, and the first helps it after sending.
//
// A flag goes both ways between every pair of node peers, and a message between every linked pair, in every epoch, rows
// or none: buffer reuse relies on it.
#pragma once
#include "combine/wire.cuh"

namespace ty {

// ---- receive -------------------------------------------------------------------------------------------------

template <u32 n> TY_DEVICE void store_out(const CombineArgs auto &a, char *row, u64 g, const Floats<n> &sum) {
  u32 columns = a.context.hidden;
  if (a.out_dtype == TY_BF16) store_group<Bf16, n>(row, g, columns, sum);
  else if (a.out_dtype == TY_FP16) store_group<Fp16, n>(row, g, columns, sum);
  else store_group<Fp32, n>(row, g, columns, sum);
}

template <u32 n> TY_DEVICE Floats<n> load_out(const CombineArgs auto &a, const char *row, u64 g) {
  u32 columns = a.context.hidden;
  if (a.out_dtype == TY_BF16) return load_group<Bf16, n>(row, g, columns);
  if (a.out_dtype == TY_FP16) return load_group<Fp16, n>(row, g, columns);
  return load_group<Fp32, n>(row, g, columns);
}

// Where ranks may be absent: whether the sums of a link's node count for no token of this launch.
TY_DEVICE bool is_node_out(const Context auto &c, u32 link) {
  if (!tolerates_absence(c)) return false;
  u32 rank = peer_of_source(c, TY_DIRECTION_COMBINE, link);
  return was_masked(c, rank) || ((load(&block_shared<CombineShared>().dropped) >> rank) & 1) != 0;
}

// Reports the status in every rail's head, once a call: whose rows are missing, or that the rail's node combines
// another dispatch, which closes the context. By a team of block 0.
TY_DEVICE void report_rails(const CombineArgs auto &a, const Team &team, const Round &round) {
  const auto &c = a.context;
  if (!is_last(c, round)) return;
  for (u32 link = team_thread(team); link < layout_of(c, TY_DIRECTION_COMBINE).sources; link += team_threads(team)) {
    if (!wait_arrived(c, TY_DIRECTION_COMBINE, round.epoch, link, 0)) {
      if (fails(c, false)) return;
      continue;
    }
    const ty_wire_head *head = wire_head(c, TY_DIRECTION_COMBINE, round.epoch, link);
    u32 dispatch = load(&head->dispatch), peer = peer_of_source(c, TY_DIRECTION_COMBINE, link),
        own = dispatch_number(a);
    if (dispatch == own && load(&head->status) != TY_STATUS_INCOMPLETE) continue;
    u32 rank = load(&head->rank);
    if (dispatch != own || rank >= c.ranks) rank = peer;
    u32 kind = dispatch == own ? TY_ERROR_INCOMPLETE : TY_ERROR_PAIRING;
    keep_fault({kind, 0, rank, round.epoch, load(&head_of(a)->epoch), dispatch ^ c.format >> 1, 0});
    if (dispatch != own) close(c);
  }
}

// Reports a rank of this node that sends no rows though own tokens went there, once a call. By a warp of block 0.
TY_DEVICE void report_missing(const CombineArgs auto &a, const CombineShared &shared, const Round &round) {
  const auto &c = a.context;
  const ty_handle_head *head = head_of(a);
  if (missing_ranks(c, shared) == 0 || load(&head->own_bad) || !is_last(c, round)) return;
  u32 rank = first_missing(c, shared, own_masks(a.handle), own_tokens_of(a));
  if (lane_index() == 0 && rank < c.node_ranks)
    keep_fault({TY_ERROR_INCOMPLETE, 0, world_rank(c, rank), round.epoch, 0, 0, 0});
}

// Which row of the call's messages to a node an own token is; -1 for none, or if no sums of the node count.
TY_DEVICE i32 wire_row_of(const CombineArgs auto &a, u32 link, u32 token) {
  if (is_node_out(a.context, link)) return -1;
  return load(pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * a.context.max_tokens + token);
}

// The list of an own token: sums of other nodes, and at the own node's place the partial rows of its ranks, which are
// numbers [own, after).
struct SourceRows {
  u32 own;
  u32 after;
  u32 count;
};

// The row of the round's message from a link that is a token's sum; `row` is its number in the call.
TY_DEVICE u32 row_of_sum(const CombineArgs auto &a, const Round &round, u32 link, i32 row) {
  const auto &c = a.context;
  u32 n = static_cast<u32>(row) - round_range(c, a.handle.wire_rows, link, round).first;
  // Out of range only in another call's handle: see "Calls that overlap" in docs/failure.md.
  return c.rounds == 1 ? n : smaller(n, c.round_tokens - 1);
}

// Lists the sums of other nodes, a link a lane, around the partial rows of the own node. By a warp.
TY_DEVICE SourceRows list_sums(const CombineArgs auto &a, Terms &terms, const Round &round, u32 token, u32 own_rows) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_COMBINE);
  SourceRows list{0, own_rows, own_rows};
  for (u32 first = 0; first < l.sources; first += warp_size) {
    u32 link = first + lane_index();
    i32 row = link < l.sources ? wire_row_of(a, link, token) : -1;
    u32 there = warp_ballot(row >= 0);
    u32 before = first < c.node ? c.node - first : 0; // links of earlier nodes
    u32 earlier = popcount64(bits_below(there, before));
    if (row >= 0) {
      u32 n = row_of_sum(a, round, link, row);
      u32 place = list.count + popcount64(bits_below(there, lane_index())) - (lane_index() < before ? own_rows : 0);
      if (place < TY_MAX_TOP_K)
        store(&terms.row[place],
              reinterpret_cast<u64>(recv_buffer_of(c, TY_DIRECTION_COMBINE, round.epoch, link) + row_offset(l, n)));
    }
    list.own += earlier;
    list.count += popcount(there);
  }
  // More than fit only if the handle is written meanwhile; every row that is listed then is still a row of a message.
  list.own = smaller(list.own, TY_MAX_TOP_K - own_rows);
  list.after = list.own + own_rows;
  list.count = smaller(list.count, TY_MAX_TOP_K);
  return list;
}

// The calling lane's share of waiting for a token's sums of other nodes. True once a deadline passed.
TY_DEVICE bool sums_fail(const CombineArgs auto &a, const Round &round, u32 token) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_COMBINE);
  bool failed = false;
  for (u32 link = lane_index(); link < l.sources; link += warp_size) {
    i32 row = wire_row_of(a, link, token);
    if (row < 0) continue;
    bool here =
        wait_arrived(c, TY_DIRECTION_COMBINE, round.epoch, link, chunk_of_row(l, row_of_sum(a, round, link, row)));
    failed |= fails(c, here);
    // The token is summed again without the node, when all else is done.
    if (tolerates_absence(c) && !here)
      drop_rank(c, TY_DIRECTION_COMBINE, round.epoch, peer_of_source(c, TY_DIRECTION_COMBINE, link));
  }
  return failed;
}

// Lists and awaits all rows of one own token. By a warp. False once a deadline passed.
template <bool inter_node>
TY_DEVICE bool gather_token(const CombineArgs auto &a, Terms &terms, const Round &round, u32 token, u32 n,
                            const Parts &parts, SourceRows &list) {
  const auto &c = a.context;
  u32 own_rows = popcount64(parts.present);
  list = {0, own_rows, own_rows};
  if (inter_node) list = list_sums(a, terms, round, token, own_rows);
  bool failed = partials_fail<inter_node>(c, terms, list.own, round.epoch, 0, n, parts);
  // The last arrivals are awaited last, so that only the sum is left to do after them.
  if (inter_node) failed |= sums_fail(a, round, token);
  return gathered(failed);
}

// Stores a token's sum in the output: of listed rows, over nodes in node order. Calls meanwhile() while loads are under
// way. By a warp. False once a deadline passed.
template <typename Partial, bool inter_node, typename Meanwhile = Nothing>
TY_DEVICE bool sum_token(const CombineArgs auto &a, const Terms &terms, const SourceRows &list, u32 token,
                         const Columns &columns, Meanwhile meanwhile = {}) {
  const auto &c = a.context;
  constexpr u32 groups = groups_at_source<Partial>;
  using Group = Floats<Partial::group>;
  char *out = pointer<char>(a.out) + token * a.out_pitch;
  bool ll = ll_rows<inter_node>(c), well = true;
  // Lanes meet in clear_terms.
  u32 end = ll ? last_pass<Partial>(columns) : columns.end;
  for (u32 g = columns.begin + lane_index(); g < end; g += groups * warp_size) {
    Group sums[groups] = {}, own[groups] = {};
    auto add = [&](u32 i, const Group &row, u32 n) {
      if (inter_node && n == list.after) add_to(sums[i], own[i]);
      if (!inter_node || (n >= list.own && n < list.after)) add_to(own[i], row);
      else add_to(sums[i], row);
    };
    // One loop over all nodes' rows, so that rows of several nodes are loaded together.
    well &= add_terms<Partial, rows_at_source, groups, Partial::group>(c, terms, list.count, g, columns.end, ll, add,
                                                                       meanwhile);
    for (u32 i = 0; list.after == list.count && i < groups; ++i) add_to(sums[i], own[i]);
    for (u32 i = 0; a.accumulate && i < groups && g + i * warp_size < columns.end; ++i) {
      Group old = load_out<Partial::group>(a, out, g + i * warp_size);
      add_to(old, sums[i]);
      sums[i] = old;
    }
    for (u32 i = 0; i < groups && g + i * warp_size < columns.end; ++i) store_out(a, out, g + i * warp_size, sums[i]);
    if (ll) clear_terms<Partial, groups, Partial::group>(c, terms, list.count, g, columns.end);
  }
  warp_barrier(); // the list is read
  return !ll || warp_ballot(!well) == 0;
}

// Makes a piece of an own token: its sum, and with the first piece its payload, in the same order of rows. Words of LL
// rows are looked at beside the rows until they have arrived. By a warp. False once a deadline passed.
template <typename Partial, bool inter_node>
TY_DEVICE bool sum_piece(const CombineArgs auto &a, const Terms &terms, const SourceRows &list, u32 token,
                         const Piece &piece) {
  const auto &c = a.context;
  bool ll = ll_rows<inter_node>(c), brings = carries_payload(a) && piece.first == 0;
  auto row = [&](u32 n) { return load(&terms.row[n]); };
  u64 seen = brings ? look_at_word(a, list.count, 0, ll, row) : present_word;
  auto look = [&] {
    if (carries_payload(a) && ll && !is_present(seen)) seen = look_at_word(a, list.count, 0, ll, row);
  };
  if (!sum_token<Partial, inter_node>(a, terms, list, token, columns_of<Partial>(c, piece), look)) return false;
  if (!brings) return true;
  u32 *out = pointer<u32>(a.payload_out) + static_cast<u64>(token) * payload_of_token(a);
  auto wait_of = [&](u32 n) { return wait_of_term(c, terms, n); };
  if (!add_words(a, seen, out, list.count, list.own, list.after, ll, row, wait_of)) return false;
  warp_barrier(); // the list is read
  return true;
}

// Sums all own tokens, after begin_sums. By `warps` warps of a block.
template <typename Partial, bool inter_node>
TY_DEVICE void combine_receive(const CombineArgs auto &a, CombineShared &shared, u32 warps, const Round &round,
                               bool bad, const Range &range) {
  const auto &c = a.context;
  Terms &terms = shared.terms[warp_index()];
  auto there = [](u32) { return true; };
  share_out(c, &shared.taken, warps, range.end - range.first, false, there, [&](u32 n, u32, u32, const Piece &piece) {
    u32 token = range.first + n;
    SourceRows list{};
    if (!bad) {
      u64 ranks = mask_for_warp(c, own_masks(a.handle), token);
      Parts parts{ranks, ranks & ~missing_ranks(c, shared) & ~absent_ranks(c, shared)};
      if (!gather_token<inter_node>(a, terms, round, token, n, parts, list)) return false;
    }
    return sum_piece<Partial, inter_node>(a, terms, list, token, piece);
  });
}

// Whether a token went to a node whose sums did not all come, by bits of the dropped ranks of the world.
TY_DEVICE bool went_to_dropped(const CombineArgs auto &a, u32 token, u32 dropped) {
  const auto &c = a.context;
  bool went = false;
  for (u32 link = 0; link < layout_of(c, TY_DIRECTION_COMBINE).sources; ++link) {
    i32 row = load(pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens + token);
    went |= row >= 0 && ((dropped >> peer_of_source(c, TY_DIRECTION_COMBINE, link)) & 1) != 0;
  }
  return went;
}

// Where ranks may be absent: sums the tokens of ranks whose partial rows did not all come again, without those ranks,
// and those of nodes whose sums did not all come without these nodes, once all other blocks have ended; rows of the
// others are all here. By a whole block; `ended`: as is_last_worker's, whose answer it returns.
template <typename Partial, bool inter_node>
TY_DEVICE bool sum_without_dropped(const CombineArgs auto &a, const Round &round, u64 ended) {
  const auto &c = a.context;
  if (!is_last_worker(c, TY_DIRECTION_COMBINE, ended)) return false;
  CombineShared &shared = block_shared<CombineShared>();
  // Other blocks may have left out more nodes than this one, whose sums nobody has waited for.
  keep_masked(c);
  u32 found = dropped_ranks(c, TY_DIRECTION_COMBINE, round.epoch);
  if (thread_index() == 0) store(&shared.dropped, found);
  block_barrier();
  if (found == 0 || load(&head_of(a)->own_bad)) return true;
  Terms &terms = shared.terms[warp_index()];
  u64 dropped = bits_below(static_cast<u64>(found) >> c.node_first, c.node_ranks);
  u64 out = missing_ranks(c, shared) | absent_ranks(c, shared) | dropped;
  for (u32 token = warp_index(); token < own_tokens_of(a); token += block_warps()) {
    u64 ranks = mask_for_warp(c, own_masks(a.handle), token);
    SourceRows list{};
    if ((ranks & dropped) == 0 && !(inter_node && went_to_dropped(a, token, found))) continue;
    if (!gather_token<inter_node>(a, terms, round, token, token, Parts{ranks, ranks & ~out}, list)) break;
    sum_token<Partial, inter_node>(a, terms, list, token, columns_of<Partial>(c, Piece{0, row_parts}));
  }
  return true;
}

// ---- the kernels ---------------------------------------------------------------------------------------------

// The relay's work while the others work. By its thread 0.
TY_DEVICE void relay_combine(const CombineArgs auto &a, const Round &round) {
  const auto &c = a.context;
  bool weighs = weighs_late(c) && round.number == 0; // weights go ahead of the call's first round
  WaitTimes waits = begin_waits(a.wait_times);
  if (a.phases & TY_PHASE_SEND) {
    if (weighs && !relay_staging(c, TY_DIRECTION_WEIGHTS, round.call)) return;
    if (!relay_staging(c, TY_DIRECTION_COMBINE, round.epoch)) return;
    if (weighs && !relay_arrived(c, TY_DIRECTION_WEIGHTS, round.call, [](u32) { return 0u; })) return;
  }
  if (a.phases & TY_PHASE_RECEIVE)
    relay_arrived(c, TY_DIRECTION_COMBINE, round.epoch, [&](u32 link) {
      waits.add(peer_of_source(c, TY_DIRECTION_COMBINE, link));
      Range range = round_range(c, a.handle.wire_rows, link, round);
      return range.end - range.first;
    });
}

// Before sums of own tokens; makes the rail's sums. By the summing team. False once a deadline passed. `closed`: as
// finds_closed.
template <typename Partial, bool inter_node>
TY_DEVICE bool begin_sums(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Round &round,
                          bool closed) {
  const auto &c = a.context;
  bool receives = (a.phases & TY_PHASE_RECEIVE) != 0, leads = team_thread(team) == 0;
  bool serves = inter_node && (a.phases & TY_PHASE_SEND) != 0;
  if (serves) clear_counts(team, shared.sums);
  // Before the flags, which take longer to come. The team meets there.
  if (serves && !wait_stagings(c, team, TY_DIRECTION_COMBINE, round.epoch)) return false;
  if (!wait_flags(a, shared, team, round.epoch, closed)) return false;
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_NOTIFIED, leads);
  if (serves) {
    bool failed = !send_sums<Partial>(a, shared, team, round);
    if (team_any(team, failed)) return false;
    note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_RAIL, leads);
  }
  if (receives && block_index() == 0 && team_warp(team) == 0) report_missing(a, shared, round);
  return true;
}

// All work that waits for partial rows: the rail's sums, then those of own tokens, where the block's other warps help
// after sending. By all warps of a block; the team does this alone.
template <typename Partial, bool inter_node>
TY_DEVICE void sum_partials(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Round &round,
                            bool closed) {
  const auto &c = a.context;
  bool member = is_member(team), shares = is_one_of_two(team) && (a.phases & TY_PHASE_RECEIVE) != 0;
  // Before flags are acquired: afterwards nothing is in caches.
  bool bad = load(&head_of(a)->own_bad) != 0;
  Range range = own_range(c, round, own_tokens_of(a));
  if (member) {
    // The team meets in begin_sums.
    if (team_thread(team) == 0) store(&shared.taken, 0u);
    bool well = begin_sums<Partial, inter_node>(a, shared, team, round, closed);
    if (team_thread(team) == 0) store(&shared.helped, well ? 1u : 0u);
    // For compute-sanitizer's racecheck, which does not count an arrival at a barrier as ordering.
    if (shares) team_barrier(team);
    // N11: what node peers notified happens before; the other team takes over.
    if (shares) hand_over();
    if (!well) return;
  } else {
    if (!shares) return;
    // N11: what node peers notified, which the other team has handed over.
    take_over();
    if (!load(&shared.helped)) return;
  }
  if (a.phases & TY_PHASE_RECEIVE) {
    combine_receive<Partial, inter_node>(a, shared, shares ? block_warps() : team.warps, round, bad, range);
    // After the sums, which wait for their own chunks. The relay waits for all messages, even those without rows.
    if (inter_node && member && block_index() == 0) report_rails(a, team, round);
  }
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_ROWS, member && team_thread(team) == 0);
}

// Warps of a block that send where others sum at the same time: three of four, but half where rows are so few that more
// senders would have none. A block has two warps at least.
TY_DEVICE u32 senders_of(const CombineArgs auto &a) {
  const auto &c = a.context;
  u32 rows = load(&head_of(a)->most_tokens) * c.ranks;
  return rows <= 2 * worker_count(c) ? block_warps() / 2 : block_warps() * 3 / 4;
}

template <typename Row, typename Partial, bool inter_node>
TY_DEVICE void work_combine(const CombineArgs auto &a, const Round &round, u64 freed, const Looked &ahead,
                            bool closed) {
  const auto &c = a.context;
  CombineShared &shared = block_shared<CombineShared>();
  bool sends = (a.phases & TY_PHASE_SEND) != 0, sums = inter_node || (a.phases & TY_PHASE_RECEIVE) != 0;
  if (inter_node && sends && !wait_free(c, whole_block(), TY_DIRECTION_COMBINE, round.epoch, freed)) return;
  u32 sending = sends && sums ? senders_of(a) : block_warps();
  u32 first = sends && sums ? sending : 0; // that sums
  bool two = sends && sums;
  Team senders{two ? 1u : 0u, 0, sending}, summers{two ? 2u : 0u, first, block_warps() - first};
  if (sends && is_member(senders)) combine_send<Row, Partial, inter_node>(a, shared, senders, round, ahead, closed);
  if (sums) sum_partials<Partial, inter_node>(a, shared, summers, round, closed);
}

// `inter_node` as in dispatch.
template <typename Row, typename Partial, bool inter_node> TY_DEVICE void combine(const CombineArgs auto &a) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_BEGIN, thread_index() == 0);
  u64 freed = inter_node ? ask_free(c, TY_DIRECTION_COMBINE) : 0;
  Progress progress = ask_progress(c, TY_DIRECTION_COMBINE);
  u32 handle_state = load(&live_head_of(a)->state);
  Looked ahead{};
  if (looks_ahead(c)) ahead = look_ahead(a);
  if (handle_may_change(c) && thread_index() == 0) keep_head(a);
  keep_masked(c);
  if (tolerates_absence(c) && thread_index() == 0) store(&block_shared<CombineShared>().dropped, 0u);
  u64 epoch = begin_launch(c, progress, TY_DIRECTION_COMBINE, a.phases, a.round, a.handle.call);
  if (handle_may_change(c)) handle_state = load(&head_of(a)->state);
  // The memory may hold what an earlier handle's dispatch left there, if this handle's dispatch never ran.
  if (epoch != 0 && handle_state != a.handle.serial) {
    if (block_index() == 0 && thread_index() == 0 && progress.closed == 0)
      keep_fault({TY_ERROR_ORDER, 0, c.rank, epoch, TY_ORDER_HANDLE_EMPTY, 0, 0});
    epoch = 0;
    if (thread_index() == 0) keep_epoch(epoch);
  }
  Round round = round_of(c, epoch);
  if (inter_node && round.epoch != 0 && is_relay(c)) {
    if (thread_index() == 0) relay_combine(a, round);
  } else if (round.epoch != 0) {
    work_combine<Row, Partial, inter_node>(a, round, freed, ahead, finds_closed(c, progress));
  }
  u64 ended = end_launch(c, TY_DIRECTION_COMBINE, a.phases, a.handle.call);
  bool receives = (a.phases & TY_PHASE_RECEIVE) != 0;
  bool last = !tolerates_absence(c) || (receives && sum_without_dropped<Partial, inter_node>(a, round, ended));
  if (inter_node && ended != 0 && receives && last) publish_free(c, TY_DIRECTION_COMBINE, ended);
}

} // namespace ty
