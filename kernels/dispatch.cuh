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
    if (i >= links) publish_own_meta(a, in, shared, wave, pair % c.node_ranks, tiles - 1 - pair / c.node_ranks);
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

// Whether this rank has so few tokens that its warps have a part of one row each at the most.
TY_DEVICE bool has_few(const ty_context &c, u32 tokens) {
  return tokens * c.ranks <= worker_count(c) * block_warps() / 8;
}

// Who does what in a block. Sending and receiving go on side by side, each by warps of its own.
struct Teams {
  Team send;
  Team hear;  // that waits for counts
  Team place; // and then places rows
};

// Few rows are cut finer, and leave sooner, by more warps, which then place rows with the others; many are held up by
// the links, and their receivers by memory.
template <bool far> TY_DEVICE Teams teams_of(const ty_context &c, u32 phases, u32 tokens) {
  u32 warps = block_warps();
  if (!(phases & TY_PHASE_RECEIVE) || (!(phases & TY_PHASE_SEND) && !far) || warps < 2)
    return {whole_block(), whole_block(), whole_block()};
  bool few = has_few(c, tokens);
  u32 sending = few ? warps / 2 : warps < 4 ? 1 : warps / 4;
  Team receivers{2, sending, warps - sending};
  return {Team{1, 0, sending}, receivers, few && !far ? whole_block() : receivers};
}

template <bool far> TY_DEVICE void work_dispatch(const ty_dispatch_args &a, const Wave &wave) {
  const ty_context &c = a.context;
  DispatchShared &shared = block_shared<DispatchShared>();
  bool sends = (a.phases & TY_PHASE_SEND) != 0, receives = (a.phases & TY_PHASE_RECEIVE) != 0;
  Choices in{};
  if (sends) in = own_choices(a);
  if (sends && !publish<far>(a, in, shared.meta, wave)) return;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_PUBLISHED, sends && thread_index() == 0);
  Teams teams = teams_of<far>(c, a.phases, in.tokens);
  if (is_member(teams.send)) send_dispatch<far>(a, teams.send, in, shared.meta, wave);
  if (!receives) return;
  bool failed = is_member(teams.hear) && !wait_counts(c, teams.hear, shared.place, wave);
  if (is_member(teams.place) && !team_any(teams.place, failed))
    dispatch_receive(a, teams.place, shared.place, wave, sends ? busy_blocks(c, wave, in.tokens) : 0);
}

// `far`: there are several nodes. Kernels of one node are without what goes on between nodes: code that is not there is
// not fetched either.
template <bool far> TY_DEVICE void dispatch(const ty_dispatch_args &a) {
  const ty_context &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_BEGIN, thread_index() == 0);
  Turn turn = begin_turn(c, TY_DIRECTION_DISPATCH, a.phases, TY_ORDER_DISPATCH_SEND, TY_ORDER_DISPATCH_RECEIVE);
  Wave wave = wave_of(c, turn.epoch);
  if (far && turn.go && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, wave);
  } else if (turn.go) {
    work_dispatch<far>(a, wave);
  }
  if (!end_turn(c, TY_DIRECTION_DISPATCH, a.phases, turn) || !(a.phases & TY_PHASE_RECEIVE)) return;
  if (far) publish_free(c, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, turn.epoch);
  if (block_index() == 0 && is_last(c, wave))
    store(&pointer<ty_handle_head>(a.handle.head)->state, static_cast<u32>(TY_HANDLE_RECEIVED));
}

TY_KERNEL(ty_dispatch, ty_dispatch_args) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_nodes, ty_dispatch_args) { dispatch<true>(a); }

} // namespace ty
