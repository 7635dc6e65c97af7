// Dispatch. Inside a node: Ds publishes META and pushes every token's row once to each rank that holds one of its
// experts; Dr places the rows expert by expert.
//
//   Ds  block b: META of (tile, rank) pairs b, b + blocks, ... -> META words     a quarter of the warps, or half where
//       rows are few: rows -> inbox[me][token] on each rank -> tags (release, N2)
//   Dr  the other warps: counts of all sources -> starts of all segments
//       warp per (source, token), or a part of its row: META words, tag (acquire) -> copies to final positions ->
//       handle
//
// In one launch both go on side by side. Between nodes: dispatch_wire.cuh, by the sending warps. Rows leave without
// waiting for counts: a row's inbox slot is (source, token), and counts decide only its final position. Receive order
// is (source rank, token) within each expert.
#pragma once
#include "dispatch_receive.cuh"

namespace ty {

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_dispatch(const ty_dispatch_args &a, const Wave &wave) {
  const ty_context &c = a.context;
  if ((a.phases & TY_PHASE_SEND) && !relay_staging(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, wave.epoch)) return;
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, wave.epoch,
                 [&](u32 j) { return landed_wave(c, wave.epoch, j).shape.rows; });
}

// Heads of messages first, since their way is the longest; both on other blocks, where there are enough. By a whole
// block. False once a deadline passed.
template <bool far>
TY_DEVICE bool publish(const ty_dispatch_args &a, const Choices &in, MetaShared &shared, const Wave &wave) {
  const ty_context &c = a.context;
  u32 links = far ? lane_of(c, TY_LANE_DISPATCH).targets : 0;
  u32 tiles = wave.number == 0 ? tile_count(c, in.tokens) : 0;
  for (u32 i = block_index(); i < links + tiles * c.node_ranks; i += worker_count(c)) {
    // The last tile first: with it go the counts.
    u32 pair = i - links;
    if (i >= links) publish_own_meta(a, in, shared, wave.call, pair % c.node_ranks, tiles - 1 - pair / c.node_ranks);
    else if (far && !pack_head(a, in, shared, wave, i)) return false;
    block_barrier();
  }
  return true;
}

// The sending team: rows for other nodes, rows for the own one, and then what other nodes sent for it.
template <bool far>
TY_DEVICE void send_dispatch(const ty_dispatch_args &a, const Team &team, const Choices &in, MetaShared &shared,
                             const Wave &wave) {
  const ty_context &c = a.context;
  if (a.phases & TY_PHASE_SEND) {
    if (far && !pack_rows(a, team, in, wave)) return;
    note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_FAR, team_thread(team) == 0);
    if (!wait_free(c, team, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, wave.epoch)) return;
    push_rows(a, team, in, wave);
    if (block_index() == 0) raise_round(c, team, wave.epoch);
    note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_NEAR, team_thread(team) == 0);
  }
  if (!far || !(a.phases & TY_PHASE_RECEIVE)) return;
  if (!wait_free(c, team, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, wave.epoch)) return;
  if (forward(a, team, shared, wave)) note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_RAIL, team_thread(team) == 0);
}

// Warps of a block that send where the others receive. Few rows are cut finer, and leave sooner, by more of them; many
// are held up by the links, and their receivers by memory.
TY_DEVICE u32 senders_of(const ty_context &c, u32 tokens) {
  u32 warps = block_warps(), few = worker_count(c) * warps / 8;
  u32 sending = tokens * c.ranks <= few ? warps / 2 : warps / 4;
  return sending == 0 ? 1 : sending;
}

template <bool far> TY_DEVICE void work_dispatch(const ty_dispatch_args &a, const Wave &wave) {
  const ty_context &c = a.context;
  DispatchShared &shared = block_shared<DispatchShared>();
  bool sends = (a.phases & TY_PHASE_SEND) != 0, receives = (a.phases & TY_PHASE_RECEIVE) != 0;
  Choices in{};
  if (sends) in = own_choices(a);
  if (sends && !publish<far>(a, in, shared.meta, wave)) return;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_PUBLISHED, sends && thread_index() == 0);
  // Sending and receiving side by side, each by warps of its own.
  bool both = receives && (sends || far) && block_warps() > 1;
  u32 sending = senders_of(c, in.tokens);
  Team senders = both ? Team{1, 0, sending} : whole_block();
  Team receivers = both ? Team{2, sending, block_warps() - sending} : whole_block();
  if (is_member(senders)) send_dispatch<far>(a, senders, in, shared.meta, wave);
  if (receives && is_member(receivers))
    dispatch_receive(a, receivers, shared.place, wave, sends ? busy_blocks(c, wave, in.tokens) : 0);
}

// `far`: there are several nodes. Kernels of one node are without what goes on between nodes: code that is not there is
// not fetched either.
template <bool far> TY_DEVICE void dispatch(const ty_dispatch_args &a) {
  const ty_context &c = a.context;
  ty_state *state = state_of(c);
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_BEGIN, thread_index() == 0);
  Turn turn = begin_turn(c, TY_DIRECTION_DISPATCH, a.phases, load(&state->dispatch_sent),
                         load(&state->dispatch_received), TY_ORDER_DISPATCH_SEND, TY_ORDER_DISPATCH_RECEIVE);
  Wave wave = wave_of(c, turn.epoch);
  if (far && turn.go && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, wave);
  } else if (turn.go) {
    work_dispatch<far>(a, wave);
  }
  if (!last_block(c, TY_DIRECTION_DISPATCH) || !turn.go || load_relaxed_gpu(&state->closed) != 0) return;
  store(&state->dispatch_sent, turn.epoch);
  if (!(a.phases & TY_PHASE_RECEIVE)) return;
  publish_free(c, c.regions.dispatch_free, turn.epoch);
  store(&state->dispatch_received, turn.epoch);
  if (is_last(c, wave)) store(&pointer<ty_handle_head>(a.handle.head)->state, static_cast<u32>(TY_HANDLE_RECEIVED));
}

TY_KERNEL(ty_dispatch, ty_dispatch_args) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_nodes, ty_dispatch_args) { dispatch<true>(a); }

} // namespace ty
