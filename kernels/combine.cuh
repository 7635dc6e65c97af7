// Combine: every rank sums its own experts' rows of a token, pushes one partial row to the token's home, or to the
// home's rail in this node, and home adds.
//
//   Cs  flag to every rank of the node (and the weights, if they come with combine)
//       block per (source, token): sum over this rank's choices, top-k order, fp32 fmaf -> owner's slot -> tag (N4)
//       rail, per (served home, row): partial rows of the node in rank order -> one row into wire staging -> doorbell
//   Cr  every block: flags of the node's ranks, heads of the rails' messages
//       block per own token: sum over nodes in order, each the sum of its ranks in order -> out
//
// A flag goes both ways between every pair of node peers, and a message between every linked pair, in every epoch, rows
// or none: buffer reuse rests on it.
#pragma once
#include "combine_wire.cuh"

namespace ty {

// ---- receive -------------------------------------------------------------------------------------------------

TY_DEVICE void store_out(const ty_combine_args &a, char *row, u32 g, const Floats &sum) {
  u32 columns = a.context.hidden;
  if (a.out_dtype == TY_BF16) store_group<Bf16>(row, g, columns, sum);
  else if (a.out_dtype == TY_FP16) store_group<Fp16>(row, g, columns, sum);
  else store_group<Fp32>(row, g, columns, sum);
}

TY_DEVICE Floats load_out(const ty_combine_args &a, const char *row, u32 g) {
  u32 columns = a.context.hidden;
  if (a.out_dtype == TY_BF16) return load_group<Bf16>(row, g, columns);
  if (a.out_dtype == TY_FP16) return load_group<Fp16>(row, g, columns);
  return load_group<Fp32>(row, g, columns);
}

// Waits for what every rail says of its node. By a whole block. False once a deadline passed.
TY_DEVICE bool wait_rails(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  bool failed = false;
  for (u32 link = thread_index(); link < lane_of(c, TY_LANE_COMBINE).sources; link += block_threads()) {
    bool landed = wait_landed(c, TY_DIRECTION_COMBINE, TY_LANE_COMBINE, epoch, link, 0);
    failed |= !landed;
    if (!landed || block_index() != 0) continue;
    const ty_wire_head *head = wire_head(c, TY_LANE_COMBINE, epoch, link);
    if (load(&head->status) == TY_STATUS_INCOMPLETE)
      report(c, TY_DIRECTION_COMBINE, TY_ERROR_INCOMPLETE, 0, load(&head->rank), epoch, 0, 0, 0);
  }
  return !block_any(failed);
}

// Reports own tokens' ranks of this node that send no rows. By block 0.
TY_DEVICE void report_missing(const ty_combine_args &a, const CombineShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  const ty_handle_head *head = head_of(a);
  if (missing_ranks(c, shared) == 0 || load(&head->own_bad)) return;
  const u64 *masks = pointer<const u64>(a.handle.rank_mask);
  u32 rank = first_missing(c, shared, masks, load(&head->own_tokens));
  if (thread_index() == 0 && rank < c.node_ranks)
    report(c, TY_DIRECTION_COMBINE, TY_ERROR_INCOMPLETE, 0, world_rank(c, rank), epoch, 0, 0, 0);
}

// Which row of the message to a node an own token is; -1 for none.
TY_DEVICE i32 wire_row_of(const ty_combine_args &a, u32 link, u32 token) {
  return load(pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * a.context.max_tokens + token);
}

// Waits for everything of one own token. By a whole block. False once a deadline passed.
TY_DEVICE bool wait_token(const ty_combine_args &a, u64 epoch, u32 token, const Parts &parts) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  bool failed = partials_fail(c, epoch, 0, token, parts);
  for (u32 link = thread_index(); link < l.sources; link += block_threads()) {
    i32 row = wire_row_of(a, link, token);
    if (row >= 0)
      failed |=
          !wait_landed(c, TY_DIRECTION_COMBINE, TY_LANE_COMBINE, epoch, link, chunk_of_row(l, static_cast<u32>(row)));
  }
  return !block_any(failed);
}

// A token's columns of group g: sums of the nodes, in node order.
template <typename Partial>
TY_DEVICE Floats home_sum(const ty_combine_args &a, u64 epoch, u32 token, const Parts &parts, u32 g) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_COMBINE);
  Floats sum = {};
  for (u32 node = 0; node < c.nodes; ++node) {
    Floats part;
    if (node == c.node) {
      part = node_sum<Partial>(c, epoch, 0, token, parts, g);
    } else {
      u32 link = link_of_node(c, node);
      i32 row = wire_row_of(a, link, token);
      if (row < 0) continue;
      u32 rows = load(pointer<const u32>(a.handle.wire_rows) + link);
      const char *message = inbox_of(c, TY_LANE_COMBINE, epoch, link);
      part = load_group<Partial>(message + row_offset(l, rows, static_cast<u32>(row)), g, c.hidden);
    }
    for (u32 i = 0; i < group; ++i) sum.v[i] = add_rn(sum.v[i], part.v[i]);
  }
  return sum;
}

template <typename Partial>
TY_DEVICE void sum_token(const ty_combine_args &a, u64 epoch, u32 token, const Parts &parts, bool bad) {
  const ty_context &c = a.context;
  char *out = pointer<char>(a.out) + token * a.out_pitch;
  for (u32 g = thread_index(); g * group < c.hidden; g += block_threads()) {
    Floats sum = {};
    if (!bad) sum = home_sum<Partial>(a, epoch, token, parts, g);
    if (a.accumulate) {
      Floats old = load_out(a, out, g);
      for (u32 i = 0; i < group; ++i) sum.v[i] = add_rn(old.v[i], sum.v[i]);
    }
    store_out(a, out, g, sum);
  }
}

template <typename Partial> TY_DEVICE void combine_receive(const ty_combine_args &a, CombineShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  const ty_handle_head *head = head_of(a);
  if (!wait_flags(c, shared, epoch) || !wait_rails(a, epoch)) return;
  if (block_index() == 0) report_missing(a, shared, epoch);
  bool bad = load(&head->own_bad) != 0;
  u32 tokens = load(&head->own_tokens);
  u64 missing = missing_ranks(c, shared);
  for (u32 token = block_index(); token < tokens; token += worker_count(c)) {
    u64 ranks = bad ? 0 : load(pointer<const u64>(a.handle.rank_mask) + token);
    Parts parts{ranks, ranks & ~missing};
    if (!bad && !wait_token(a, epoch, token, parts)) return;
    sum_token<Partial>(a, epoch, token, parts, bad);
  }
}

// ---- the kernels ---------------------------------------------------------------------------------------------

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_combine(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  if (a.phases & TY_PHASE_SEND) {
    if (!relay_staging(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch)) return;
    if (!relay_staging(c, TY_DIRECTION_COMBINE, TY_LANE_COMBINE, epoch)) return;
    if (!relay_landed(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch, [](u32) { return 0u; })) return;
  }
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_DIRECTION_COMBINE, TY_LANE_COMBINE, epoch,
                 [&](u32 link) { return load(pointer<const u32>(a.handle.wire_rows) + link); });
}

template <typename Row, typename Partial> TY_DEVICE void work_combine(const ty_combine_args &a, u64 epoch) {
  CombineShared &shared = block_shared<CombineShared>();
  if (a.phases & TY_PHASE_SEND) combine_send<Row, Partial>(a, shared, epoch);
  block_barrier();
  if (a.phases & TY_PHASE_RECEIVE) combine_receive<Partial>(a, shared, epoch);
}

template <typename Row, typename Partial> TY_DEVICE void combine(const ty_combine_args &a) {
  const ty_context &c = a.context;
  ty_state *state = state_of(c);
  u64 sent = load(&state->combine_sent), received = load(&state->combine_received);
  Turn turn =
      begin_turn(c, TY_DIRECTION_COMBINE, a.phases, sent, received, TY_ORDER_COMBINE_SEND, TY_ORDER_COMBINE_RECEIVE);
  if (turn.go && load(&head_of(a)->state) != TY_HANDLE_RECEIVED) {
    if (block_index() == 0 && thread_index() == 0)
      report(c, TY_DIRECTION_COMBINE, TY_ERROR_ORDER, 0, c.rank, turn.epoch, TY_ORDER_HANDLE_EMPTY, sent, received);
    turn.go = false;
  }
  if (turn.go && is_relay(c)) {
    if (thread_index() == 0) relay_combine(a, turn.epoch);
  } else if (turn.go) {
    work_combine<Row, Partial>(a, turn.epoch);
  }
  if (!last_block(c, TY_DIRECTION_COMBINE) || !turn.go || load_relaxed_gpu(&state->closed) != 0) return;
  store(&state->combine_sent, turn.epoch);
  if (!(a.phases & TY_PHASE_RECEIVE)) return;
  publish_free(c, c.regions.combine_free, turn.epoch);
  store(&state->combine_received, turn.epoch);
}

// Named by the dtype of the expert rows, and by that of the partial rows where it differs.
TY_KERNEL(ty_combine_bf16, ty_combine_args) { combine<Bf16, Bf16>(a); }
TY_KERNEL(ty_combine_fp16, ty_combine_args) { combine<Fp16, Fp16>(a); }
TY_KERNEL(ty_combine_fp32, ty_combine_args) { combine<Fp32, Fp32>(a); }
TY_KERNEL(ty_combine_bf16_fp32, ty_combine_args) { combine<Bf16, Fp32>(a); }
TY_KERNEL(ty_combine_fp16_fp32, ty_combine_args) { combine<Fp16, Fp32>(a); }

} // namespace ty
