// A barrier of all ranks on their streams: no rank's stream goes on before every rank's stream came here.
#pragma once
#include "context.cuh"

namespace ty {

// One block. A rank may be one barrier ahead, never two: flags alternate between two slots, and equality suffices.
TY_KERNEL(ty_barrier, ty_barrier_args) {
  const ty_context &c = a.context;
  ty_state *state = state_of(c);
  u64 number = load(&state->barriers) + 1;
  if (load_relaxed_gpu(&state->closed) != 0) return;
  bool failed = false;
  for (u32 rank = thread_index(); rank < c.ranks; rank += block_threads())
    store_release_sys(in_arena<u64>(c, rank, c.regions.barrier_flags, number, c.rank), number);
  for (u32 rank = thread_index(); rank < c.ranks; rank += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.rank, c.regions.barrier_flags, number, rank);
    failed |= !wait_tag(c, TY_DIRECTION_BARRIER, flag, number, TY_SITE_BARRIER, rank, "barrier");
  }
  failed = block_any(failed);
  if (thread_index() != 0) return;
  store(&state->error_claim[TY_DIRECTION_BARRIER], 0u);
  if (!failed) store(&state->barriers, number);
}

} // namespace ty
