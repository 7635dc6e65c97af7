// Combine: every rank sums its own experts' rows of a token, pushes one partial row to the token's home, or to the
// home's rail in this node, and home adds.
//
//   Cs  flag to every rank of the node (and the weights, if they come with combine)
//       block per (source, token): sum over this rank's choices, top-k order, fp32 fmaf -> owner's slot (N4)
//       rail, block per (served home, row): the node's partial rows in rank order -> a row in wire staging -> doorbell
//       (a rank that is alone in its node: its partial row is that sum, and goes there at once)
//   Cr  every block: flags of the node's ranks
//       block per own token: sum over nodes in order, each the sum of its ranks in order -> out
//       block 0: what the heads of the rails' messages say
//
// A block has many rows, or one, whose pieces its warps come for (share_out). In a fused call, and between nodes, two
// teams of a block work side by side: one sends partial rows, which waits for nothing that the other does anywhere; the
// other does what waits for partial rows, and is helped by the first once that has sent.
//
// A flag goes both ways between every pair of node peers, and a message between every linked pair, in every epoch, rows
// or none: buffer reuse rests on it.
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

// Reports what every rail says of its node, once a call: whose rows are missing, and that it combines another dispatch,
// which closes the context. By a team of block 0.
TY_DEVICE void report_rails(const CombineArgs auto &a, const Team &team, const Wave &wave) {
  const auto &c = a.context;
  if (!is_last(c, wave)) return;
  for (u32 link = team_thread(team); link < lane_of(c, TY_LANE_COMBINE).sources; link += team_threads(team)) {
    if (!wait_landed(c, TY_LANE_COMBINE, wave.epoch, link, 0)) return;
    const ty_wire_head *head = wire_head(c, TY_LANE_COMBINE, wave.epoch, link);
    u32 dispatch = load(&head->dispatch), peer = peer_of_source(c, TY_LANE_COMBINE, link), own = dispatch_number(a);
    if (dispatch == own && load(&head->status) != TY_STATUS_INCOMPLETE) continue;
    u32 rank = load(&head->rank);
    if (dispatch != own || rank >= c.ranks) rank = peer;
    u32 kind = dispatch == own ? TY_ERROR_INCOMPLETE : TY_ERROR_PAIRING;
    keep_fault({kind, 0, rank, wave.epoch, load(&head_of(a)->epoch), dispatch, 0});
    if (dispatch != own) close(c);
  }
}

// Reports own tokens' ranks of this node that send no rows, once a call. By a warp of block 0.
TY_DEVICE void report_missing(const CombineArgs auto &a, const CombineShared &shared, const Wave &wave) {
  const auto &c = a.context;
  const ty_handle_head *head = head_of(a);
  if (missing_ranks(c, shared) == 0 || load(&head->own_bad) || !is_last(c, wave)) return;
  u32 rank = first_missing(c, shared, pointer<const u64>(a.handle.rank_mask), own_tokens_of(a));
  if (lane_index() == 0 && rank < c.node_ranks)
    keep_fault({TY_ERROR_INCOMPLETE, 0, world_rank(c, rank), wave.epoch, 0, 0, 0});
}

// Which row of the call's messages to a node an own token is; -1 for none.
TY_DEVICE i32 wire_row_of(const CombineArgs auto &a, u32 link, u32 token) {
  return load(pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * a.context.max_tokens + token);
}

// The rows of an own token in its list: sums of other nodes, and at the own node's place the partial rows of its ranks,
// which are numbers [own, after).
struct HomeRows {
  u32 own;
  u32 after;
  u32 count;
};

// Which row of the wave's message from a link is a token's sum, if it is a row of the call's.
TY_DEVICE u32 row_of_sum(const CombineArgs auto &a, const Wave &wave, u32 link, i32 row) {
  const auto &c = a.context;
  u32 n = static_cast<u32>(row) - wave_range(c, a.handle.wire_rows, link, wave).first;
  // Else of another call's handle: see "Calls that overlap" in docs/design.md.
  return c.waves == 1 ? n : smaller(n, c.wave_tokens - 1);
}

// Lists the sums of other nodes, a link a lane, around the partial rows of the own one. By a warp.
TY_DEVICE HomeRows list_sums(const CombineArgs auto &a, Terms &terms, const Wave &wave, u32 token, u32 own_rows) {
  const auto &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  HomeRows list{0, own_rows, own_rows};
  for (u32 first = 0; first < l.sources; first += warp_size) {
    u32 link = first + lane_index();
    i32 row = link < l.sources ? wire_row_of(a, link, token) : -1;
    u32 there = warp_ballot(row >= 0);
    u32 before = first < c.node ? c.node - first : 0; // links of earlier nodes
    u32 earlier = popcount64(bits_below(there, before));
    if (row >= 0) {
      u32 n = row_of_sum(a, wave, link, row);
      u32 place = list.count + popcount64(bits_below(there, lane_index())) - (lane_index() < before ? own_rows : 0);
      if (place < TY_MAX_TOP_K)
        store(&terms.row[place],
              reinterpret_cast<u64>(inbox_of(c, TY_LANE_COMBINE, wave.epoch, link) + row_offset(l, n)));
    }
    list.own += earlier;
    list.count += popcount(there);
  }
  // More than there are only if the handle is written meanwhile; what is listed then is known to be rows.
  list.own = smaller(list.own, TY_MAX_TOP_K - own_rows);
  list.after = list.own + own_rows;
  list.count = smaller(list.count, TY_MAX_TOP_K);
  return list;
}

// The calling lane's share of waiting for them. True once a deadline passed.
TY_DEVICE bool sums_fail(const CombineArgs auto &a, const Wave &wave, u32 token) {
  const auto &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  bool failed = false;
  for (u32 link = lane_index(); link < l.sources; link += warp_size) {
    i32 row = wire_row_of(a, link, token);
    if (row < 0) continue;
    failed |= !wait_landed(c, TY_LANE_COMBINE, wave.epoch, link, chunk_of_row(l, row_of_sum(a, wave, link, row)));
  }
  return failed;
}

// Everything of one own token, listed once it is here. By a warp. False once a deadline passed.
template <bool far>
TY_DEVICE bool gather_token(const CombineArgs auto &a, Terms &terms, const Wave &wave, u32 token, u32 n,
                            const Parts &parts, HomeRows &list) {
  const auto &c = a.context;
  u32 own_rows = popcount64(parts.present);
  list = {0, own_rows, own_rows};
  if (far) list = list_sums(a, terms, wave, token, own_rows);
  bool failed = partials_fail<far>(c, terms, list.own, wave.epoch, 0, n, parts);
  // What comes last is waited for last, so that nothing but the sum is left to do behind it.
  if (far) failed |= sums_fail(a, wave, token);
  return gathered(failed);
}

// A token's sum over nodes, in node order: of listed rows, stored in the output. By a warp. False once a deadline
// passed.
template <typename Partial, bool far>
TY_DEVICE bool sum_token(const CombineArgs auto &a, const Terms &terms, const HomeRows &list, u32 token,
                         const Columns &columns) {
  const auto &c = a.context;
  constexpr u32 groups = groups_at_home<Partial>;
  using Group = Floats<Partial::group>;
  char *out = pointer<char>(a.out) + token * a.out_pitch;
  bool arrives = arrive<far>(c), well = true;
  // Lanes meet in clear_terms.
  u32 end = arrives ? last_turn<Partial>(columns) : columns.end;
  for (u32 g = columns.begin + lane_index(); g < end; g += groups * warp_size) {
    Group sums[groups] = {}, own[groups] = {};
    auto add = [&](u32 i, const Group &row, u32 n) {
      if (far && n == list.after) add_to(sums[i], own[i]);
      if (!far || (n >= list.own && n < list.after)) add_to(own[i], row);
      else add_to(sums[i], row);
    };
    // One run over all nodes' rows, so that those of several are loaded together.
    well &=
        add_terms<Partial, rows_at_home, groups, Partial::group>(c, terms, list.count, g, columns.end, arrives, add);
    for (u32 i = 0; list.after == list.count && i < groups; ++i) add_to(sums[i], own[i]);
    for (u32 i = 0; a.accumulate && i < groups && g + i * warp_size < columns.end; ++i) {
      Group old = load_out<Partial::group>(a, out, g + i * warp_size);
      add_to(old, sums[i]);
      sums[i] = old;
    }
    for (u32 i = 0; i < groups && g + i * warp_size < columns.end; ++i) store_out(a, out, g + i * warp_size, sums[i]);
    if (arrives) clear_terms<Partial, groups, Partial::group>(c, terms, list.count, g, columns.end);
  }
  warp_barrier(); // the list is read
  return !arrives || warp_ballot(!well) == 0;
}

// Sums of all own tokens, behind begin_sums. By warps of a block, so many of them.
template <typename Partial, bool far>
TY_DEVICE void combine_receive(const CombineArgs auto &a, CombineShared &shared, u32 warps, const Wave &wave, bool bad,
                               const Range &range) {
  const auto &c = a.context;
  Terms &terms = shared.terms[warp_index()];
  auto there = [](u32) { return true; };
  share_out(c, &shared.taken, warps, range.end - range.first, false, there, [&](u32 n, u32, u32, const Piece &piece) {
    u32 token = range.first + n;
    HomeRows list{};
    if (!bad) {
      u64 ranks = mask_for_warp(c, pointer<const u64>(a.handle.rank_mask) + token);
      if (!gather_token<far>(a, terms, wave, token, n, Parts{ranks, ranks & ~missing_ranks(c, shared)}, list))
        return false;
    }
    return sum_token<Partial, far>(a, terms, list, token, columns_of<Partial>(c, piece));
  });
}

// ---- the kernels ---------------------------------------------------------------------------------------------

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_combine(const CombineArgs auto &a, const Wave &wave) {
  const auto &c = a.context;
  bool weighs = weighs_late(c) && wave.number == 0; // weights go ahead of the call's first wave
  if (a.phases & TY_PHASE_SEND) {
    if (weighs && !relay_staging(c, TY_LANE_WEIGHTS, wave.call)) return;
    if (!relay_staging(c, TY_LANE_COMBINE, wave.epoch)) return;
    if (weighs && !relay_landed(c, TY_LANE_WEIGHTS, wave.call, [](u32) { return 0u; })) return;
  }
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_LANE_COMBINE, wave.epoch, [&](u32 link) {
      Range range = wave_range(c, a.handle.wire_rows, link, wave);
      return range.end - range.first;
    });
}

// What comes before sums of own tokens, the rail's sums among it. By the summing team. False once a deadline passed.
// `closed`: as finds_closed.
template <typename Partial, bool far>
TY_DEVICE bool begin_sums(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Wave &wave,
                          bool closed) {
  const auto &c = a.context;
  bool receives = (a.phases & TY_PHASE_RECEIVE) != 0, leads = team_thread(team) == 0;
  bool serves = far && (a.phases & TY_PHASE_SEND) != 0;
  if (serves) clear_counts(team, shared.sums);
  // Ahead of the flags, which are waited for longer. Its members meet there.
  if (serves && !wait_stagings(c, team, TY_LANE_COMBINE, wave.epoch)) return false;
  if (!wait_flags(a, shared, team, wave.epoch, closed)) return false;
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_HEARD, leads);
  if (serves) {
    bool failed = !send_sums<Partial>(a, shared, team, wave);
    if (team_any(team, failed)) return false;
    note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_RAIL, leads);
  }
  if (receives && block_index() == 0 && team_warp(team) == 0) report_missing(a, shared, wave);
  return true;
}

// What waits for partial rows: the rail's sums, then those of own tokens, where the block's other warps help once they
// have sent. By all warps of a block, of which a team is for this alone.
template <typename Partial, bool far>
TY_DEVICE void sum_partials(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Wave &wave,
                            bool closed) {
  const auto &c = a.context;
  bool member = is_member(team), shares = is_one_of_two(team) && (a.phases & TY_PHASE_RECEIVE) != 0;
  // Before flags are acquired, behind which nothing is in caches.
  bool bad = load(&head_of(a)->own_bad) != 0;
  Range range = own_range(c, wave, own_tokens_of(a));
  if (member) {
    // Its members meet in begin_sums.
    if (team_thread(team) == 0) store(&shared.taken, 0u);
    bool well = begin_sums<Partial, far>(a, shared, team, wave, closed);
    if (team_thread(team) == 0) store(&shared.helped, well ? 1u : 0u);
    // For compute-sanitizer's racecheck, to which an arrival at a barrier orders nothing.
    if (shares) team_barrier(team);
    // N11: what was heard of node peers happens before; the other team takes over.
    if (shares) hand_over();
    if (!well) return;
  } else {
    if (!shares) return;
    take_over();
    if (!load(&shared.helped)) return;
  }
  if (a.phases & TY_PHASE_RECEIVE) {
    combine_receive<Partial, far>(a, shared, shares ? block_warps() : team.warps, wave, bad, range);
    // Behind the sums, each of which waits for its own chunks. The relay waits for every message, one without rows too.
    if (far && member && block_index() == 0) report_rails(a, team, wave);
  }
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_ROWS, member && team_thread(team) == 0);
}

// Warps of a block that send where others sum at the same time: three of four, but half where rows are so few that more
// would have none. A block has two warps at least.
TY_DEVICE u32 senders_of(const CombineArgs auto &a) {
  const auto &c = a.context;
  u32 rows = load(&head_of(a)->most_tokens) * c.ranks;
  return rows <= 2 * worker_count(c) ? block_warps() / 2 : block_warps() * 3 / 4;
}

template <typename Row, typename Partial, bool far>
TY_DEVICE void work_combine(const CombineArgs auto &a, const Wave &wave, u64 freed, const Looked &ahead, bool closed) {
  const auto &c = a.context;
  CombineShared &shared = block_shared<CombineShared>();
  bool sends = (a.phases & TY_PHASE_SEND) != 0, sums = far || (a.phases & TY_PHASE_RECEIVE) != 0;
  if (far && sends && !wait_free(c, whole_block(), c.regions.combine_free, wave.epoch, freed)) return;
  u32 sending = sends && sums ? senders_of(a) : block_warps();
  u32 first = sends && sums ? sending : 0; // that sums
  bool two = sends && sums;
  Team senders{two ? 1u : 0u, 0, sending}, summers{two ? 2u : 0u, first, block_warps() - first};
  if (sends && is_member(senders)) combine_send<Row, Partial, far>(a, shared, senders, wave, ahead, closed);
  if (sums) sum_partials<Partial, far>(a, shared, summers, wave, closed);
}

// `far` as in dispatch.
template <typename Row, typename Partial, bool far> TY_DEVICE void combine(const CombineArgs auto &a) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_BEGIN, thread_index() == 0);
  u64 freed = far ? ask_free(c, c.regions.combine_free) : 0;
  TurnWords turn = ask_turn(c, TY_DIRECTION_COMBINE);
  u32 handle_state = load(&live_head_of(a)->state);
  Looked ahead{};
  if (looks_ahead(c)) ahead = look_ahead(a);
  if (handle_may_change(c) && thread_index() == 0) keep_head(a);
  u64 epoch = begin_turn(c, turn, TY_DIRECTION_COMBINE, a.phases, a.wave, a.handle.call);
  if (handle_may_change(c)) handle_state = load(&head_of(a)->state);
  // The memory may hold what an earlier handle's dispatch left there, if this one's never ran.
  if (epoch != 0 && handle_state != a.handle.serial) {
    if (block_index() == 0 && thread_index() == 0 && turn.closed == 0)
      keep_fault({TY_ERROR_ORDER, 0, c.rank, epoch, TY_ORDER_HANDLE_EMPTY, 0, 0});
    epoch = 0;
    if (thread_index() == 0) keep_turn(epoch);
  }
  Wave wave = wave_of(c, epoch);
  if (far && wave.epoch != 0 && is_relay(c)) {
    if (thread_index() == 0) relay_combine(a, wave);
  } else if (wave.epoch != 0) {
    work_combine<Row, Partial, far>(a, wave, freed, ahead, finds_closed(c, turn));
  }
  u64 ended = end_turn(c, TY_DIRECTION_COMBINE, a.phases, a.handle.call);
  if (far && ended != 0 && (a.phases & TY_PHASE_RECEIVE))
    publish_free(c, TY_DIRECTION_COMBINE, c.regions.combine_free, ended);
}

// Named by the dtype of the expert rows, and by that of the partial rows where it differs.
TY_KERNEL(ty_combine_bf16, ty_combine_args) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_bf16_nodes, ty_combine_args) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_fp16, ty_combine_args) { combine<Fp16, Fp16, false>(a); }
TY_KERNEL(ty_combine_fp16_nodes, ty_combine_args) { combine<Fp16, Fp16, true>(a); }
TY_KERNEL(ty_combine_fp32, ty_combine_args) { combine<Fp32, Fp32, false>(a); }
TY_KERNEL(ty_combine_fp32_nodes, ty_combine_args) { combine<Fp32, Fp32, true>(a); }
TY_KERNEL(ty_combine_bf16_fp32, ty_combine_args) { combine<Bf16, Fp32, false>(a); }
TY_KERNEL(ty_combine_bf16_fp32_nodes, ty_combine_args) { combine<Bf16, Fp32, true>(a); }
TY_KERNEL(ty_combine_fp16_fp32, ty_combine_args) { combine<Fp16, Fp32, false>(a); }
TY_KERNEL(ty_combine_fp16_fp32_nodes, ty_combine_args) { combine<Fp16, Fp32, true>(a); }
TY_KERNEL(ty_combine_bf16_fp8, ty_combine_args) { combine<Bf16, Fp8, false>(a); }
TY_KERNEL(ty_combine_bf16_fp8_nodes, ty_combine_args) { combine<Bf16, Fp8, true>(a); }
TY_KERNEL(ty_combine_fp16_fp8, ty_combine_args) { combine<Fp16, Fp8, false>(a); }
TY_KERNEL(ty_combine_fp16_fp8_nodes, ty_combine_args) { combine<Fp16, Fp8, true>(a); }
TY_KERNEL(ty_combine_fp32_fp8, ty_combine_args) { combine<Fp32, Fp8, false>(a); }
TY_KERNEL(ty_combine_fp32_fp8_nodes, ty_combine_args) { combine<Fp32, Fp8, true>(a); }

// Plain calls, by what the experts' rows are, one a choice, or in the token layout one a token; and in one node by
// whether partial rows arrive.
enum class Way { arrive, tagged, nodes };
template <Way way, Plain does, u32 layout>
using PlainArgs = PlainCombineArgs<way == Way::nodes, does, layout, way == Way::arrive>;
template <Way way> using PlainChoices = PlainArgs<way, Plain::nothing_else, TY_LAYOUT_CONTIGUOUS>;
template <Way way> using PlainTokens = PlainArgs<way, Plain::nothing_else, TY_LAYOUT_TOKEN>;
template <Way way> using LateChoices = PlainArgs<way, Plain::weighs_late, TY_LAYOUT_CONTIGUOUS>;
TY_KERNEL(ty_combine_plain, PlainChoices<Way::arrive>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_tagged, PlainChoices<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_nodes, PlainChoices<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_plain_token, PlainTokens<Way::arrive>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_token_tagged, PlainTokens<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_token_nodes, PlainTokens<Way::nodes>) { combine<Bf16, Bf16, true>(a); }
TY_KERNEL(ty_combine_plain_late, LateChoices<Way::arrive>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_late_tagged, LateChoices<Way::tagged>) { combine<Bf16, Bf16, false>(a); }
TY_KERNEL(ty_combine_plain_late_nodes, LateChoices<Way::nodes>) { combine<Bf16, Bf16, true>(a); }

} // namespace ty
