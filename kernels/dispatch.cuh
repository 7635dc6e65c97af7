// Dispatch. Inside a node: Ds pushes every token's row once to each rank that holds one of its experts and
// publishes META; Dr places the rows expert by expert.
//
//   Ds  block b: META for rank b, b + blocks, ...      rows -> inbox[me][token] on each rank -> tag (release, E7)
//   Dr  every block: META of all sources (acquire) -> starts of all segments
//       warp per (source, token): tag (acquire) -> copies to final positions -> handle for combine
//
// Between nodes: dispatch_wire.cuh. Rows leave without waiting for counts: a row's inbox slot is (source, token), and
// counts decide only its final position. Receive order is (source rank, token) within each expert.
#pragma once
#include "dispatch_receive.cuh"

namespace ty {

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_dispatch(const ty_dispatch_args &a, u64 epoch) {
  const ty_context &c = a.context;
  if ((a.phases & TY_PHASE_SEND) && !relay_staging(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch)) return;
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch, [&](u32 j) { return rows_landed(c, epoch, j); });
}

TY_DEVICE void work_dispatch(const ty_dispatch_args &a, u64 epoch) {
  DispatchShared &shared = block_shared<DispatchShared>();
  if (a.phases & TY_PHASE_SEND) dispatch_send(a, shared, epoch);
  block_barrier();
  if (a.phases & TY_PHASE_RECEIVE) dispatch_receive(a, shared, epoch);
}

TY_KERNEL(ty_dispatch, ty_dispatch_args) {
  const ty_context &c = a.context;
  ty_state *state = state_of(c);
  Turn turn = begin_turn(c, TY_DIRECTION_DISPATCH, a.phases, load(&state->dispatch_sent),
                         load(&state->dispatch_received), TY_ORDER_DISPATCH_SEND, TY_ORDER_DISPATCH_RECEIVE);
  if (turn.go && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, turn.epoch);
  } else if (turn.go) {
    work_dispatch(a, turn.epoch);
  }
  if (!last_block(c, TY_DIRECTION_DISPATCH) || !turn.go || load_relaxed_gpu(&state->closed) != 0) return;
  store(&state->dispatch_sent, turn.epoch);
  if (!(a.phases & TY_PHASE_RECEIVE)) return;
  publish_free(c, c.regions.dispatch_free, turn.epoch);
  store(&state->dispatch_received, turn.epoch);
  store(&pointer<ty_handle_head>(a.handle.head)->state, static_cast<u32>(TY_HANDLE_RECEIVED));
}

} // namespace ty
