// A barrier of all ranks on their streams: no rank's stream goes on before every rank's stream came here.
//
// Node peers meet, then every linked pair of ranks of different nodes exchanges a message, then node peers meet again:
// whoever is through the last meeting knows that some rank of its node heard of every other node, whole.
#pragma once
#include "common/wire.cuh"

namespace ty {

// Node peers meet. By the block. A rank may be one meeting ahead, never two: flags alternate between two slots, and
// equality suffices.
TY_DEVICE bool meet(const Context auto &c, u64 meeting) {
  bool failed = false;
  // N14: acquired by wait_tag below, in the peer.
  for (u32 peer = thread_index(); peer < c.node_ranks; peer += block_threads())
    store_release_sys(in_arena<u64>(c, peer, c.regions.barrier_flags, meeting, c.local), meeting);
  for (u32 peer = thread_index(); peer < c.node_ranks; peer += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.barrier_flags, meeting, peer);
    failed |= !wait_tag(c, flag, meeting, TY_SITE_BARRIER, world_rank(c, peer), "barrier");
  }
  return !block_any(failed);
}

// Every linked pair exchanges a head. By thread 0, which polls host memory here. False once a deadline passed.
TY_DEVICE bool exchange(const Context auto &c, u64 epoch) {
  const ty_lane &l = lane_of(c, TY_LANE_BARRIER);
  if (!relay_staging(c, TY_LANE_BARRIER, epoch)) return false;
  for (u32 link = 0; link < l.targets; ++link) {
    tell_chunks(c, TY_LANE_BARRIER, epoch, link, 0);
    write_wire_head(staging_of(c, TY_LANE_BARRIER, epoch, link), epoch, TY_STATUS_OK, {0, 0}, c.rank);
    count_packed(c, TY_LANE_BARRIER, epoch, link, {0, 0}, 0, packed_head);
  }
  return relay_landed(c, TY_LANE_BARRIER, epoch, [](u32) { return 0u; });
}

// One block.
TY_KERNEL(ty_barrier, ty_barrier_args) {
  const auto &c = a.context;
  ty_turn *own = turn_of(c, TY_DIRECTION_BARRIER);
  // Ahead of a meeting, behind which warp 0 looks at all warps' faults.
  begin_faults();
  TurnWords turn = agree_turn(c, ask_turn(c, TY_DIRECTION_BARRIER), TY_DIRECTION_BARRIER);
  u64 number = turn.received + 1;
  refuse_overlap(c, turn, TY_DIRECTION_BARRIER);
  bool goes = turn.closed == 0;
  bool met = goes && meet(c, spans_nodes(c) ? 2 * number : number);
  if (goes && spans_nodes(c)) {
    bool failed = met && thread_index() == 0 && !exchange(c, c.first_epoch + number - 1);
    met = !block_any(failed || !met) && meet(c, 2 * number + 1);
  }
  // Meetings end with a barrier of the block, and what a launch begins with has one.
  if (warp_index() == 0) report_faults(c, TY_DIRECTION_BARRIER);
  if (thread_index() != 0 || !leave_turn(c, TY_DIRECTION_BARRIER)) return;
  store(&own->launches, turn.launches + 1);
  if (met) store(&own->received, number);
}

} // namespace ty
