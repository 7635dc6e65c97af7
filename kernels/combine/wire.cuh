// Combine between nodes: weights sent ahead to the expert ranks of other nodes, and a rail's work for the sources it
// serves: the sum of its node's partial rows, one row a token, in a message to the source.
#pragma once
#include "combine/send.cuh"

namespace ty {

// ---- weights sent ahead ------------------------------------------------------------------------------------------

// Source: the weights of the tokens that went to a node, in the order of the dispatch's message; none to a rail that is
// masked. By a team. False once a deadline passed.
TY_DEVICE bool pack_weights(const CombineArgs auto &a, const Team &team, u64 call, u32 link) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_WEIGHTS);
  bool stuck = team_thread(team) == 0 && !wait_staging(c, TY_DIRECTION_WEIGHTS, call, link);
  if (team_any(team, stuck)) return false;
  // Now: the wait ends for a rail that is masked in between.
  bool out = team_thread(team) == 0 && is_masked(c, peer_of_link(c, TY_DIRECTION_WEIGHTS, link));
  if (tolerates_absence(c) && team_any(team, out)) return true;
  u32 rows = all_rows(c, a.handle.wire_rows, link);
  const i32 *wire_row = pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens;
  const float *weights = pointer<const float>(a.topk_weight);
  char *message = staging_of(c, TY_DIRECTION_WEIGHTS, call, link);
  u32 choices = rows == 0 ? 0 : own_tokens_of(a) * c.top_k;
  for (u32 i = team_thread(team); i < choices; i += team_threads(team)) {
    i32 row = load(wire_row + i / c.top_k);
    if (row < 0) continue;
    char *header = message + TY_WIRE_HEAD_BYTES + static_cast<u64>(row) * l.header_bytes;
    store(reinterpret_cast<float *>(header) + i % c.top_k, load(weights + i));
  }
  if (team_thread(team) == 0) {
    publish_chunks(c, TY_DIRECTION_WEIGHTS, call, link, rows);
    write_wire_head(message, call, TY_STATUS_OK, {rows, rows}, c.rank);
  }
  team_barrier(team);
  if (team_thread(team) == 0) count_packed(c, TY_DIRECTION_WEIGHTS, call, link, {rows, rows}, 0, packed_head);
  return true;
}

// Rail: the weights of a served source, to every rank of the node; of a source that is masked nobody waits for any. By
// a team. False once a deadline passed.
TY_DEVICE bool forward_weights(const CombineArgs auto &a, const Team &team, u64 call, u32 j) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_WEIGHTS);
  bool came = team_thread(team) != 0 || wait_arrived(c, TY_DIRECTION_WEIGHTS, call, j, 0);
  if (team_any(team, fails(c, came))) return false;
  if (tolerates_absence(c) && team_any(team, !came)) return true;
  const char *headers = recv_buffer_of(c, TY_DIRECTION_WEIGHTS, call, j) + TY_WIRE_HEAD_BYTES;
  push_weights(a, team, call, served_source(c, j), all_rows(c, a.handle.rail_rows, j), [&](u32 row) {
    return reinterpret_cast<const float *>(headers + static_cast<u64>(row) * l.header_bytes);
  });
  return true;
}

// Sends weights that come with combine, all their ways. By a team. False once a deadline passed.
TY_DEVICE bool send_weights(const CombineArgs auto &a, const Team &team, u64 call) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_WEIGHTS);
  for (u32 link = block_index(); link < l.targets; link += worker_count(c))
    if (!pack_weights(a, team, call, link)) return false;
  const ty_handle_head *head = head_of(a);
  u32 tokens = load(&head->own_bad) ? 0 : own_tokens_of(a);
  push_weights(a, team, call, c.rank, tokens,
               [&](u32 token) { return pointer<const float>(a.topk_weight) + static_cast<u64>(token) * c.top_k; });
  for (u32 j = 0; j < l.sources; ++j)
    if (!forward_weights(a, team, call, j)) return false;
  return true;
}

// ---- rail: sums of the node ----------------------------------------------------------------------------------------

// Packs the head of the message to served source j. By a warp, after wait_flags of the whole node: no message of an
// epoch may leave earlier, since it lets the source go on and overwrite what a slower rank of this node still reads.
// Later chunks may be rung for before, as the proxy posts a link's chunks in order.
TY_DEVICE void pack_sum_head(const CombineArgs auto &a, const CombineShared &shared, const Round &round, u32 j) {
  const auto &c = a.context;
  Range range = rail_rows(a, round, j);
  u32 rows = range.end - range.first;
  if (lane_index() == 0) publish_chunks(c, TY_DIRECTION_COMBINE, round.epoch, j, rows);
  // For the whole call, since the source reports it once.
  u32 rank = first_missing(c, shared, rail_masks(c, a.handle, j), all_rows(c, a.handle.rail_rows, j));
  if (lane_index() != 0) return;
  bool missing = rank < c.node_ranks;
  char *message = staging_of(c, TY_DIRECTION_COMBINE, round.epoch, j);
  store(&reinterpret_cast<ty_wire_head *>(message)->dispatch, dispatch_number(a));
  write_wire_head(message, round.epoch, missing ? TY_STATUS_INCOMPLETE : TY_STATUS_OK, {rows, 0},
                  missing ? world_rank(c, rank) : 0);
  count_packed(c, TY_DIRECTION_COMBINE, round.epoch, j, {rows, 0}, 0, packed_head);
}

// Packs the heads of all messages of sums, by the last warps of the last blocks, which get rows last where rows are
// few. By a team.
TY_DEVICE void pack_sum_heads(const CombineArgs auto &a, const CombineShared &shared, const Team &team,
                              const Round &round) {
  const auto &c = a.context;
  if (team_warp(team) + 1 != team.warps) return;
  u32 targets = layout_of(c, TY_DIRECTION_COMBINE).targets;
  for (u32 j = worker_count(c) - 1 - block_index(); j < targets; j += worker_count(c))
    if (!is_link_out(c, TY_DIRECTION_COMBINE, j)) pack_sum_head(a, shared, round, j);
}

// Packs a piece of one row of the message to served source j, the block's number `counted`. By a warp. False once a
// deadline passed.
template <typename Partial>
TY_DEVICE bool pack_sum(const CombineArgs auto &a, CombineShared &shared, const Round &round, u32 j, u32 row,
                        u32 counted, const Piece &piece) {
  const auto &c = a.context;
  Range range = rail_rows(a, round, j);
  u32 rows = range.end - range.first;
  u64 ranks = mask_for_warp(c, rail_masks(c, a.handle, j), range.first + row);
  Parts parts{ranks, ranks & ~missing_ranks(c, shared) & ~absent_ranks(c, shared)};
  Terms &terms = shared.terms[warp_index()];
  if (!gathered(partials_fail<true>(c, terms, 0, round.epoch, 1 + j, row, parts))) return false;
  if (tolerates_absence(c)) {
    // Sums that have left cannot be made again: a rank is left out of those that are made since it was dropped, or has
    // masked the source.
    u64 out = dropped_ranks(c, TY_DIRECTION_COMBINE, round.epoch) >> c.node_first;
    out |= warp_ballot(lane_index() < c.node_ranks && has_masked(c, lane_index(), served_source(c, j)));
    bool lacks = (parts.present & out) != 0;
    parts.present &= ~out;
    if (lacks && !gathered(partials_fail<true>(c, terms, 0, round.epoch, 1 + j, row, parts))) return false;
    // For a masked source nobody waited. The sum is left out, and with it the node, if that rank goes on.
    bool masked = lane_index() == 0 && is_masked(c, served_source(c, j));
    if (warp_ballot(masked) != 0) return true;
  }
  u32 count = popcount64(parts.present);
  char *out = sum_in_message(c, round, j, row);
  constexpr u32 groups = groups_at_rail<Partial>;
  using Group = Floats<Partial::group>;
  Columns columns = columns_of<Partial>(c, piece);
  u32 end = last_pass<Partial>(columns);
  for (u32 g = columns.begin + lane_index(); g < end; g += groups * warp_size) {
    Group sums[groups] = {};
    auto add = [&](u32 i, const Group &part, u32) { add_to(sums[i], part); };
    add_terms<Partial, rows_at_rail, groups, Partial::group>(c, terms, count, g, columns.end, false, add);
    store_partials<Partial>(c, out, g, columns.end, sums, false);
  }
  if (carries_payload(a) && piece.first == 0) {
    auto row = [&](u32 n) { return load(&terms.row[n]); };
    u32 *to = pointer<u32>(payload_in(a, reinterpret_cast<u64>(out)));
    u64 seen = look_at_word(a, count, 0, false, row);
    add_words(a, seen, to, count, 0, count, false, row, [](u32) { return Wait{}; });
  }
  if (is_row_whole(shared.sums, counted, piece)) count_sum(c, round, j, rows, row);
  return true;
}

// Packs everything for the sources that this rank serves, after wait_stagings and wait_flags, except sums that are
// already there. Chunk by chunk of all messages, in the order in which partial rows are sent. By a team. False once a
// deadline passed, in some warps perhaps.
template <typename Partial>
TY_DEVICE bool send_sums(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Round &round) {
  const auto &c = a.context;
  u32 targets = layout_of(c, TY_DIRECTION_COMBINE).targets;
  pack_sum_heads(a, shared, team, round);
  if (sends_sums(a)) return true;
  u32 most = 0, begin = 0;
  auto rows_of = [&](u32 j) {
    if (is_link_out(c, TY_DIRECTION_COMBINE, j)) return 0u;
    Range range = rail_rows(a, round, j);
    return range.end - range.first;
  };
  // Sources of the next nodes first, so that rails do not all send to the same one.
  for (u32 first = 0; first < targets; first += warp_size) {
    u32 j = first + lane_index(), rows = warp_max(j < targets ? rows_of(j) : 0);
    most = rows > most ? rows : most;
    begin += popcount(warp_ballot(j < targets && served_source(c, j) < c.node_first));
  }
  RowOrder &kept = shared.order[warp_index()];
  keep_order(kept, chunk_by_chunk(c, targets, most));
  // The lookup of the lane's number.
  u32 target = 0, row = 0;
  auto there = [&](u32 n) {
    RowOrder order = load_order(kept);
    RowOrder::Place at = order.at(n);
    row = at.row;
    target = order.rotated(at.list, begin);
    return row < rows_of(target);
  };
  return share_out(
      c, &shared.sums.taken, team.warps, load_order(kept).numbers(most), true, there,
      [&](u32, u32 lane, u32 counted, const Piece &piece) {
        return pack_sum<Partial>(a, shared, round, shuffle(target, lane), shuffle(row, lane), counted, piece);
      },
      // Pieces of one row might differ in which ranks they are sums of.
      tolerates_absence(c));
}

// ---- the sending phase ---------------------------------------------------------------------------------------------

// Everything but the rail's sums; a rank that is alone in its node makes those here, too. Rows that cross the wire go
// first. Nothing here waits for partial rows. By a team. `closed`: as finds_closed.
template <typename Row, typename Partial, bool inter_node>
TY_DEVICE void combine_send(const CombineArgs auto &a, CombineShared &shared, const Team &team, const Round &round,
                            const Looked &ahead, bool closed) {
  const auto &c = a.context;
  if (inter_node) clear_counts(team, shared.inter_node);
  clear_counts(team, shared.intra_node);
  if (!meet_open(c, team, closed)) return;
  // By a block that mostly gets no rows where rows are few.
  if (block_index() + 1 == worker_count(c)) announce(a, team, round.epoch);
  if (weighs_late(c) && round.number == 0 && !send_weights(a, team, round.call)) return;
  if (inter_node && sends_sums(a) && !wait_stagings(c, team, TY_DIRECTION_COMBINE, round.epoch)) return;
  bool leads = team_thread(team) == 0;
  note_stage(c, TY_DIRECTION_COMBINE, TY_STAGE_PUBLISHED, leads);
  // Rows that cross the network first, by the same code.
  TY_ROLLED
  for (u32 stage = inter_node ? TY_STAGE_INTER_NODE : TY_STAGE_INTRA_NODE; stage <= TY_STAGE_INTRA_NODE; ++stage) {
    bool failed = !send_partials<Row, Partial, inter_node>(a, shared, team, round, stage == TY_STAGE_INTRA_NODE, ahead);
    // The block's fences wait for all its stores: the own node's rows come after the last of the others'.
    if (stage == TY_STAGE_INTER_NODE) failed = team_any(team, failed);
    if (failed) return;
    note_stage(c, TY_DIRECTION_COMBINE, stage, leads);
  }
}

} // namespace ty
