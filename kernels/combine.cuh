// Combine inside one node, the way back: Cs forms one partial row per (token, rank) and pushes it to the token's
// home; Cr adds the partial rows in rank order.
//
//   Cs  flags (and weights, if they come with combine) to every rank
//       block per (home, token): sum over this rank's choices, top-k order, fp32 fmaf -> home's slot -> tag (E7)
//   Cr  every block: flags of all ranks (acquire)
//       block per own token: tags (acquire) -> sum over ranks in order -> out
//
// A flag goes both ways between every pair in every epoch, rows or none: buffer reuse rests on it.
#pragma once
#include "context.cuh"
#include "numbers.cuh"

namespace ty {

// Shared memory of a combine block.
struct CombineShared {
  u32 incomplete[TY_MAX_NODE_RANKS]; // receiving: 1 where the rank's contributions are missing
};
static_assert(sizeof(CombineShared) == TY_COMBINE_SHARED_BYTES, "layout.h tells the launcher");

TY_DEVICE const ty_handle_head *head_of(const ty_combine_args &a) {
  return pointer<const ty_handle_head>(a.handle.head);
}

// ---- send ----------------------------------------------------------------------------------------------------

// Tells every rank that this epoch's rows are coming or missing, after the weights where those come with combine.
// Block b serves ranks b, b + blocks, ...
TY_DEVICE void announce(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  const ty_handle_head *head = head_of(a);
  const float *weights = pointer<const float>(a.topk_weight);
  u32 count = load(&head->own_bad) ? 0 : load(&head->own_tokens) * c.top_k;
  for (u32 rank = block_index(); rank < c.ranks; rank += block_count()) {
    if (c.weights == TY_WEIGHTS_COMBINE) {
      float *ahead = in_arena<float>(c, rank, c.regions.ahead_weights, epoch, c.rank);
      for (u32 i = thread_index(); i < count; i += block_threads()) store(ahead + i, load(weights + i));
    }
    bool missing = load(&head->incomplete) != 0 && load(&head->source_rows[rank]) != 0;
    block_barrier();
    // E7: the weights happen before this release; wait_flag(TY_SITE_COMBINE_FLAG) acquires.
    if (thread_index() == 0)
      store_release_sys(in_arena<u64>(c, rank, c.regions.combine_flags, epoch, c.rank),
                        flag_value(epoch, missing ? TY_STATUS_INCOMPLETE : TY_STATUS_OK));
  }
}

// The weights that apply to one (home, token): where they lie, once they are there. Null once a deadline passed.
TY_DEVICE const float *weights_of(const ty_combine_args &a, u64 epoch, u32 home, u32 token) {
  const ty_context &c = a.context;
  if (c.weights != TY_WEIGHTS_COMBINE)
    return pointer<const float>(a.handle.weights) + (static_cast<u64>(home) * c.max_tokens + token) * c.top_k;
  bool failed = false;
  if (thread_index() == 0) {
    const u64 *flag = in_arena<const u64>(c, c.rank, c.regions.combine_flags, epoch, home);
    failed = !wait_flag(c, TY_DIRECTION_COMBINE, flag, epoch, TY_SITE_COMBINE_FLAG, home, "combine flag");
  }
  if (block_any(failed)) return nullptr;
  return in_arena<const float>(c, c.rank, c.regions.ahead_weights, epoch, home) + static_cast<u64>(token) * c.top_k;
}

// Sum of this rank's rows of one token, in top-k order, of the columns of group g.
template <typename Row>
TY_DEVICE Floats partial_sum(const ty_combine_args &a, const i32 *rows, const float *weights, u32 g) {
  const ty_context &c = a.context;
  Floats sum = {};
  for (u32 k = 0; k < c.top_k; ++k) {
    i32 row = load(rows + k);
    if (row < 0) continue;
    Floats y = load_group<Row>(pointer<const char>(a.rows) + static_cast<u64>(row) * a.rows_pitch, g, c.hidden);
    // In the token layout the caller has applied the weights, and the row is the sum.
    if (a.layout == TY_LAYOUT_TOKEN) return y;
    float weight = load(weights + k);
    for (u32 i = 0; i < group; ++i) sum.v[i] = fma_rn(weight, y.v[i], sum.v[i]);
  }
  return sum;
}

// One partial row to its home. By a whole block. False once a deadline passed.
template <typename Row, typename Partial>
TY_DEVICE bool send_partial(const ty_combine_args &a, u64 epoch, u32 home, u32 token, u32 slot) {
  const ty_context &c = a.context;
  const float *weights = weights_of(a, epoch, home, token);
  if (!weights) return false;
  const i32 *rows = pointer<const i32>(a.handle.rows) + (static_cast<u64>(home) * c.max_tokens + token) * c.top_k;
  u64 place = static_cast<u64>(token) * c.slots + slot;
  char *out = in_arena<char>(c, home, c.regions.partials, epoch, 0) + place * c.partial_bytes;
  for (u32 g = thread_index(); g * group < c.hidden; g += block_threads())
    store_group<Partial>(out, g, c.hidden, partial_sum<Row>(a, rows, weights, g));
  block_barrier();
  // E7: the row happens before this release through the barrier; wait_tag(TY_SITE_PARTIAL) acquires.
  if (thread_index() == 0) store_release_sys(in_arena<u64>(c, home, c.regions.partial_tags, epoch, 0) + place, epoch);
  return true;
}

template <typename Row, typename Partial> TY_DEVICE void combine_send(const ty_combine_args &a, u64 epoch) {
  const ty_context &c = a.context;
  const ty_handle_head *head = head_of(a);
  announce(a, epoch);
  if (load(&head->incomplete)) return;
  u64 items = static_cast<u64>(load(&head->most_tokens)) * c.ranks;
  for (u64 i = block_index(); i < items; i += block_count()) {
    u32 home = static_cast<u32>(i % c.ranks), token = static_cast<u32>(i / c.ranks);
    if (token >= load(&head->source_tokens[home])) continue;
    i32 slot = load(pointer<const i32>(a.handle.slots) + static_cast<u64>(home) * c.max_tokens + token);
    if (slot < 0) continue;
    if (!send_partial<Row, Partial>(a, epoch, home, token, static_cast<u32>(slot))) return;
  }
}

// ---- receive -------------------------------------------------------------------------------------------------

// Waits for the flag of every rank. False once a deadline passed.
TY_DEVICE bool wait_flags(const ty_combine_args &a, CombineShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  bool failed = false;
  for (u32 rank = thread_index(); rank < c.ranks; rank += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.rank, c.regions.combine_flags, epoch, rank);
    failed |= !wait_flag(c, TY_DIRECTION_COMBINE, flag, epoch, TY_SITE_COMBINE_FLAG, rank, "combine flag");
    bool missing = static_cast<u32>(load_relaxed_sys(flag)) == TY_STATUS_INCOMPLETE;
    store(&shared.incomplete[rank], missing ? 1u : 0u);
    if (missing && block_index() == 0) report(c, TY_DIRECTION_COMBINE, TY_ERROR_INCOMPLETE, 0, rank, epoch, 0, 0, 0);
  }
  return !block_any(failed);
}

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

// Waits for the partial rows of one own token; answers which slots count. By a whole block.
TY_DEVICE bool wait_partials(const ty_combine_args &a, const CombineShared &shared, u64 epoch, u32 token, u64 mask) {
  const ty_context &c = a.context;
  bool failed = false;
  for (u32 rank = thread_index(); rank < c.ranks; rank += block_threads()) {
    if (!((mask >> rank) & 1) || load(&shared.incomplete[rank])) continue;
    u32 slot = popcount64(mask & ((1ull << rank) - 1));
    const u64 *tag =
        in_arena<const u64>(c, c.rank, c.regions.partial_tags, epoch, 0) + static_cast<u64>(token) * c.slots + slot;
    failed |= !wait_tag(c, TY_DIRECTION_COMBINE, tag, epoch, TY_SITE_PARTIAL, rank, "partial row");
  }
  return !block_any(failed);
}

template <typename Partial>
TY_DEVICE void sum_token(const ty_combine_args &a, const CombineShared &shared, u64 epoch, u32 token, u64 mask) {
  const ty_context &c = a.context;
  const char *partials = in_arena<const char>(c, c.rank, c.regions.partials, epoch, 0) +
                         static_cast<u64>(token) * c.slots * c.partial_bytes;
  char *out = pointer<char>(a.out) + token * a.out_pitch;
  for (u32 g = thread_index(); g * group < c.hidden; g += block_threads()) {
    Floats sum = {};
    u32 slot = 0;
    for (u64 left = mask; left; left &= left - 1, ++slot) {
      if (load(&shared.incomplete[lowest_bit(left)])) continue;
      Floats part = load_group<Partial>(partials + static_cast<u64>(slot) * c.partial_bytes, g, c.hidden);
      for (u32 i = 0; i < group; ++i) sum.v[i] = add_rn(sum.v[i], part.v[i]);
    }
    if (a.accumulate) {
      Floats old = load_out(a, out, g);
      for (u32 i = 0; i < group; ++i) sum.v[i] = add_rn(old.v[i], sum.v[i]);
    }
    store_out(a, out, g, sum);
  }
}

template <typename Partial> TY_DEVICE void combine_receive(const ty_combine_args &a, CombineShared &shared, u64 epoch) {
  const ty_handle_head *head = head_of(a);
  if (!wait_flags(a, shared, epoch)) return;
  bool bad = load(&head->own_bad) != 0;
  u32 tokens = load(&head->own_tokens);
  for (u32 token = block_index(); token < tokens; token += block_count()) {
    u64 mask = bad ? 0 : load(pointer<const u64>(a.handle.rank_mask) + token);
    if (!wait_partials(a, shared, epoch, token, mask)) return;
    sum_token<Partial>(a, shared, epoch, token, mask);
  }
}

// ---- the kernels ---------------------------------------------------------------------------------------------

template <typename Row, typename Partial> TY_DEVICE void combine(const ty_combine_args &a) {
  const ty_context &c = a.context;
  ty_state *state = state_of(c);
  CombineShared &shared = block_shared<CombineShared>();
  u64 sent = load(&state->combine_sent), received = load(&state->combine_received);
  Turn turn =
      begin_turn(c, TY_DIRECTION_COMBINE, a.phases, sent, received, TY_ORDER_COMBINE_SEND, TY_ORDER_COMBINE_RECEIVE);
  if (turn.go && load(&head_of(a)->state) != TY_HANDLE_RECEIVED) {
    if (block_index() == 0 && thread_index() == 0)
      report(c, TY_DIRECTION_COMBINE, TY_ERROR_ORDER, 0, c.rank, turn.epoch, TY_ORDER_HANDLE_EMPTY, sent, received);
    turn.go = false;
  }
  if (turn.go && (a.phases & TY_PHASE_SEND)) combine_send<Row, Partial>(a, turn.epoch);
  if (turn.go && (a.phases & TY_PHASE_RECEIVE)) combine_receive<Partial>(a, shared, turn.epoch);
  if (!last_block(c, TY_DIRECTION_COMBINE) || !turn.go || load_relaxed_gpu(&state->closed) != 0) return;
  store(&state->combine_sent, turn.epoch);
  if (a.phases & TY_PHASE_RECEIVE) store(&state->combine_received, turn.epoch);
}

// Named by the dtype of the expert rows, and by that of the partial rows where it differs.
TY_KERNEL(ty_combine_bf16, ty_combine_args) { combine<Bf16, Bf16>(a); }
TY_KERNEL(ty_combine_fp16, ty_combine_args) { combine<Fp16, Fp16>(a); }
TY_KERNEL(ty_combine_fp32, ty_combine_args) { combine<Fp32, Fp32>(a); }
TY_KERNEL(ty_combine_bf16_fp32, ty_combine_args) { combine<Bf16, Fp32>(a); }
TY_KERNEL(ty_combine_fp16_fp32, ty_combine_args) { combine<Fp16, Fp32>(a); }

} // namespace ty
