// Combine between nodes: weights sent ahead to the expert ranks of other nodes, and what a rail does for the homes it
// serves: the sum of its node's partial rows, one row a token, into the message home.
#pragma once
#include "combine_send.cuh"

namespace ty {

// ---- weights sent ahead ------------------------------------------------------------------------------------------

// Home: the weights of the tokens that went to a node, in the order of the dispatch's message. By a whole block. False
// once a deadline passed.
TY_DEVICE bool pack_weights(const ty_combine_args &a, u64 epoch, u32 link) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_WEIGHTS);
  bool stuck = thread_index() == 0 && !wait_staging(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch, link);
  if (block_any(stuck)) return false;
  u32 rows = load(pointer<const u32>(a.handle.wire_rows) + link);
  const i32 *wire_row = pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens;
  const float *weights = pointer<const float>(a.topk_weight);
  char *message = staging_of(c, TY_LANE_WEIGHTS, epoch, link);
  u32 choices = rows == 0 ? 0 : load(&head_of(a)->own_tokens) * c.top_k;
  for (u32 i = thread_index(); i < choices; i += block_threads()) {
    i32 row = load(wire_row + i / c.top_k);
    if (row < 0) continue;
    char *header = message + TY_WIRE_HEAD_BYTES + static_cast<u64>(row) * l.header_bytes;
    store(reinterpret_cast<float *>(header) + i % c.top_k, load(weights + i));
  }
  if (thread_index() == 0) write_wire_head(message, epoch, TY_STATUS_OK, rows, c.rank);
  block_barrier();
  if (thread_index() == 0) count_packed(c, TY_LANE_WEIGHTS, epoch, link, rows, 0);
  return true;
}

// Rail: the weights of a served home, to every rank of the node. By a whole block. False once a deadline passed.
TY_DEVICE bool forward_weights(const ty_combine_args &a, u64 epoch, u32 j) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_WEIGHTS);
  bool failed = thread_index() == 0 && !wait_landed(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch, j, 0);
  if (block_any(failed)) return false;
  const char *headers = inbox_of(c, TY_LANE_WEIGHTS, epoch, j) + TY_WIRE_HEAD_BYTES;
  push_weights(a, epoch, served_home(c, j), load(pointer<const u32>(a.handle.rail_rows) + j), [&](u32 row) {
    return reinterpret_cast<const float *>(headers + static_cast<u64>(row) * l.header_bytes);
  });
  return true;
}

// Weights that come with combine, all their ways. False once a deadline passed.
TY_DEVICE bool send_weights(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_WEIGHTS);
  for (u32 link = block_index(); link < l.targets; link += worker_count(c))
    if (!pack_weights(a, epoch, link)) return false;
  const ty_handle_head *head = head_of(a);
  u32 tokens = load(&head->own_bad) ? 0 : load(&head->own_tokens);
  push_weights(a, epoch, c.rank, tokens,
               [&](u32 token) { return pointer<const float>(a.topk_weight) + static_cast<u64>(token) * c.top_k; });
  for (u32 j = 0; j < l.sources; ++j)
    if (!forward_weights(a, epoch, j)) return false;
  return true;
}

// ---- rail: sums of the node ----------------------------------------------------------------------------------------

TY_DEVICE const u64 *rail_masks(const ty_combine_args &a, u32 j) {
  return pointer<const u64>(a.handle.rail_mask) + static_cast<u64>(j) * a.context.max_tokens;
}

// Head of the message to served home j. By a whole block, behind wait_flags of the whole node: no message of an epoch
// may leave before, since it lets the home go on to overwrite what a slower rank of this node still reads.
TY_DEVICE void pack_sum_head(const ty_combine_args &a, const CombineShared &shared, u64 epoch, u32 j) {
  const ty_context &c = a.context;
  u32 rows = load(pointer<const u32>(a.handle.rail_rows) + j);
  u32 rank = first_missing(c, shared, rail_masks(a, j), rows);
  if (thread_index() != 0) return;
  bool missing = rank < c.node_ranks;
  write_wire_head(staging_of(c, TY_LANE_COMBINE, epoch, j), epoch, missing ? TY_STATUS_INCOMPLETE : TY_STATUS_OK, rows,
                  missing ? world_rank(c, rank) : 0);
  count_packed(c, TY_LANE_COMBINE, epoch, j, rows, 0);
}

// One row of the message to served home j. By a whole block. False once a deadline passed.
template <typename Partial> TY_DEVICE bool pack_sum(const ty_combine_args &a, u64 missing, u64 epoch, u32 j, u32 row) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  u64 ranks = load(rail_masks(a, j) + row);
  Parts parts{ranks, ranks & ~missing};
  if (block_any(partials_fail(c, epoch, 1 + j, row, parts))) return false;
  u32 rows = load(pointer<const u32>(a.handle.rail_rows) + j);
  char *out = staging_of(c, TY_LANE_COMBINE, epoch, j) + row_offset(l, rows, row);
  for (u32 g = thread_index(); g * group < c.hidden; g += block_threads())
    store_group<Partial>(out, g, c.hidden, node_sum<Partial>(c, epoch, 1 + j, row, parts, g));
  block_barrier();
  if (thread_index() == 0) count_packed(c, TY_LANE_COMBINE, epoch, j, rows, chunk_of_row(l, row));
  return true;
}

// Everything for the homes that this rank serves. False once a deadline passed.
template <typename Partial> TY_DEVICE bool send_sums(const ty_combine_args &a, CombineShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  if (!wait_flags(c, shared, epoch)) return false;
  u64 missing = missing_ranks(c, shared);
  bool stuck = false;
  for (u32 j = thread_index(); j < l.targets; j += block_threads())
    stuck |= !wait_staging(c, TY_DIRECTION_COMBINE, TY_LANE_COMBINE, epoch, j);
  if (block_any(stuck)) return false;
  for (u32 turn = 0; turn < l.targets; ++turn) {
    u32 j = (turn + block_index()) % l.targets;
    if (j % worker_count(c) == block_index()) pack_sum_head(a, shared, epoch, j);
    u32 rows = load(pointer<const u32>(a.handle.rail_rows) + j);
    for (u32 row = worker_count(c) - 1 - block_index(); row < rows; row += worker_count(c))
      if (!pack_sum<Partial>(a, missing, epoch, j, row)) return false;
  }
  return true;
}

// ---- the sending phase ---------------------------------------------------------------------------------------------

template <typename Row, typename Partial>
TY_DEVICE void combine_send(const ty_combine_args &a, CombineShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  if (block_index() == 0) announce(a, epoch);
  if (c.weights == TY_WEIGHTS_COMBINE && !send_weights(a, epoch)) return;
  if (!wait_free(c, TY_DIRECTION_COMBINE, c.regions.combine_free, epoch)) return;
  // What crosses the wire goes first, and so do the sums that wait for it: nothing in them waits for the rest.
  if (!send_partials<Row, Partial>(a, epoch, false)) return;
  if (spans_nodes(c) && !send_sums<Partial>(a, shared, epoch)) return;
  send_partials<Row, Partial>(a, epoch, true);
}

} // namespace ty
