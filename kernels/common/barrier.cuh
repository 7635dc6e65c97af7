// A barrier of all ranks on their streams: no rank's stream goes on before every rank's stream has reached the barrier.
//
// Node peers meet, then every linked pair of ranks of different nodes exchanges a message, then node peers meet again.
// A rank that leaves the second meeting has a node peer that received a message from every other node, whole.
#pragma once
#include "common/wire.cuh"

namespace ty {

// Node peers meet. By the block. A rank may be one meeting ahead, never two: flags alternate between two slots, and
// equality suffices.
TY_DEVICE bool meet(const Context auto &c, u64 meeting) {
  bool failed = false;
  // N14: acquired by wait_tag below, in the peer.
  for (u32 peer = thread_index(); peer < c.node_ranks; peer += block_threads())
    if (!is_masked(c, world_rank(c, peer)))
      store_release_sys(in_arena<u64>(c, peer, c.regions.barrier_flags, meeting, c.local), meeting);
  for (u32 peer = thread_index(); peer < c.node_ranks; peer += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.barrier_flags, meeting, peer);
    u32 rank = world_rank(c, peer);
    bool here = !is_masked(c, rank) && wait_tag(c, flag, meeting, TY_SITE_BARRIER, rank, "barrier");
    failed |= fails(c, here);
  }
  return !block_any(failed);
}

// Every linked pair exchanges a head. By thread 0, which polls host memory here. False once a deadline passed.
TY_DEVICE bool exchange(const Context auto &c, u64 epoch) {
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_BARRIER);
  if (!relay_staging(c, TY_DIRECTION_BARRIER, epoch)) return false;
  for (u32 link = 0; link < l.targets; ++link) {
    if (is_link_out(c, TY_DIRECTION_BARRIER, link)) continue;
    publish_chunks(c, TY_DIRECTION_BARRIER, epoch, link, 0);
    write_wire_head(staging_of(c, TY_DIRECTION_BARRIER, epoch, link), epoch, TY_STATUS_OK, {0, 0}, c.rank);
    count_packed(c, TY_DIRECTION_BARRIER, epoch, link, {0, 0}, 0, packed_head);
  }
  return relay_arrived(c, TY_DIRECTION_BARRIER, epoch, [](u32) { return 0u; });
}

// By one block.
TY_DEVICE void barrier(const Context auto &c) {
  ty_progress *own = progress_of(c, TY_DIRECTION_BARRIER);
  // Before a meeting, after which warp 0 looks at all warps' faults.
  keep_masked(c);
  begin_faults();
  Progress progress = agree_progress(c, ask_progress(c, TY_DIRECTION_BARRIER), TY_DIRECTION_BARRIER);
  u64 number = progress.received + 1;
  refuse_overlap(c, progress, TY_DIRECTION_BARRIER);
  bool goes = progress.closed == 0;
  bool met = goes && meet(c, spans_nodes(c) ? 2 * number : number);
  if (goes && spans_nodes(c)) {
    bool failed = met && thread_index() == 0 && !exchange(c, c.first_epoch + number - 1);
    met = !block_any(failed || !met) && meet(c, 2 * number + 1);
  }
  // A meeting ends with a barrier of the block, and the begin of a launch has one.
  if (warp_index() == 0) report_faults(c, TY_DIRECTION_BARRIER);
  if (thread_index() != 0 || !leave_launch(c, TY_DIRECTION_BARRIER)) return;
  store(&own->launches, progress.launches + 1);
  if (met) store(&own->received, number);
}

TY_KERNEL(ty_barrier, ty_barrier_args) { barrier(a.context); }
TY_KERNEL(ty_barrier_absence, AbsenceBarrierArgs<false>) { barrier(a.context); }
TY_KERNEL(ty_barrier_absence_nodes, AbsenceBarrierArgs<true>) { barrier(a.context); }

} // namespace ty
