// What every kernel of the data path shares: addresses in arenas, named waits with deadlines, error
// records, and the begin and end of a phase. Runs on the device; never traps, never waits without a deadline.
#pragma once
#include "layout.h"
#include "prim.cuh"

namespace ty {

// ---- addresses -------------------------------------------------------------------------------------------

// Start of `region` for `source` in the arena of the node's rank `owner`, for the parity of `epoch`.
template <typename T>
TY_DEVICE T *in_arena(const ty_context &c, u32 owner, const ty_region &region, u64 epoch, u32 source) {
  return reinterpret_cast<T *>(c.peer_base[owner] + region.offset + (epoch & 1) * region.parity_stride +
                               source * region.source_stride);
}

template <typename T> TY_DEVICE T *pointer(u64 address) { return reinterpret_cast<T *>(address); }

TY_DEVICE ty_state *state_of(const ty_context &c) { return pointer<ty_state>(c.state); }

// The rank in the world of a rank of this node.
TY_DEVICE u32 world_rank(const ty_context &c, u32 local) { return c.node_first + local; }

// Bits below `bit`.
TY_DEVICE u64 bits_below(u64 mask, u32 bit) { return mask & ((1ull << bit) - 1); }

TY_DEVICE u32 lowest_bit(u64 mask) { return popcount64((mask & (~mask + 1)) - 1); }

// ---- errors ----------------------------------------------------------------------------------------------

// Writes the error record of `direction`, once a kernel: whoever claims it first. The host reads it under the
// record's sequence, so a record is seen whole or not at all.
TY_DEVICE void report(const ty_context &c, u32 direction, u32 kind, u32 site, u32 peer, u64 epoch, u64 a, u64 b,
                      u64 d) {
  ty_state *state = state_of(c);
  if (atomic_cas_gpu(&state->error_claim[direction], 0u, 1u) != 0) return;
  ty_error_record *record = pointer<ty_error_record>(c.errors) + direction;
  u64 sequence = load(&state->error_sequence[direction]);
  store_relaxed_sys(&record->sequence, sequence + 1);
  fence_acq_rel_sys();
  store_relaxed_sys(&record->kind, kind);
  store_relaxed_sys(&record->site, site);
  store_relaxed_sys(&record->peer, peer);
  store_relaxed_sys(&record->epoch, epoch);
  store_relaxed_sys(&record->a, a);
  store_relaxed_sys(&record->b, b);
  store_relaxed_sys(&record->c, d);
  store_release_sys(&record->sequence, sequence + 2);
  store(&state->error_sequence[direction], sequence + 2);
}

// ---- waits -----------------------------------------------------------------------------------------------

// Turns of a wait loop between two looks at the clock and at the closed word.
constexpr u32 turns_between_checks = 32;

// What a wait is for: who is named when its deadline passes.
struct Wait {
  u32 direction;
  u32 site;
  u32 peer;
  u64 epoch;
};

// Looks at deadline and closed word in the given turn of a wait loop that began at `start`. False, and the context
// closed, once the deadline passed here or anywhere else on this rank.
TY_DEVICE bool may_wait(const ty_context &c, const Wait &wait, u32 turn, u64 start, u64 expected, u64 seen) {
  if (turn % turns_between_checks != 0) return true;
  ty_state *state = state_of(c);
  if (load_relaxed_gpu(&state->closed) != 0) return false;
  u64 waited = now_ns() - start;
  if (waited <= c.timeout_ns) return true;
  report(c, wait.direction, TY_ERROR_TIMEOUT, wait.site, wait.peer, wait.epoch, expected, seen, waited);
  store_release_gpu(&state->closed, 1u);
  return false;
}

// Waits until the word's bits above `shift` equal `expected`; acquires at system scope. False once a deadline passed.
TY_DEVICE bool wait_word(const ty_context &c, const Wait &wait, const u64 *word, u32 shift, u64 expected,
                         const char *name) {
  u64 seen = load_acquire_sys(word);
  if ((seen >> shift) == expected) return true;
  u64 start = now_ns();
  for (u32 turn = 1;; ++turn) {
    spin_pause(name);
    seen = load_acquire_sys(word);
    if ((seen >> shift) == expected) return true;
    if (!may_wait(c, wait, turn, start, expected, seen >> shift)) return false;
  }
}

// A flag is {epoch, 32 bits; status, 32 bits}. Equality suffices: a peer cannot be two epochs ahead (the grammar),
// and the slot's former value is older by an even number of epochs.
TY_DEVICE bool wait_flag(const ty_context &c, u32 direction, const u64 *flag, u64 epoch, u32 site, u32 peer,
                         const char *name) {
  return wait_word(c, Wait{direction, site, peer, epoch}, flag, 32, epoch & 0xffffffffu, name);
}

// A tag is the whole 64-bit epoch: a slot may stay unwritten for any number of epochs and still never be taken
// for a new one.
TY_DEVICE bool wait_tag(const ty_context &c, u32 direction, const u64 *tag, u64 epoch, u32 site, u32 peer,
                        const char *name) {
  return wait_word(c, Wait{direction, site, peer, epoch}, tag, 0, epoch, name);
}

// Waits until a word that only grows has reached `least`.
TY_DEVICE bool wait_least(const ty_context &c, const Wait &wait, const u64 *word, u64 least, const char *name) {
  u64 seen = load_acquire_sys(word);
  if (seen >= least) return true;
  u64 start = now_ns();
  for (u32 turn = 1;; ++turn) {
    spin_pause(name);
    seen = load_acquire_sys(word);
    if (seen >= least) return true;
    if (!may_wait(c, wait, turn, start, least, seen)) return false;
  }
}

TY_DEVICE u64 flag_value(u64 epoch, u32 status) { return (epoch << 32) | status; }

// ---- reuse of regions that exist once ------------------------------------------------------------------------

// Before the first store of `epoch` into node peers' inboxes: waits until they have read the epoch before. By a whole
// block. False once a deadline passed.
TY_DEVICE bool wait_free(const ty_context &c, u32 direction, const ty_region &region, u64 epoch) {
  if (!c.single || epoch == c.first_epoch) return true;
  bool failed = false;
  for (u32 peer = thread_index(); peer < c.node_ranks; peer += block_threads()) {
    const u64 *word = in_arena<const u64>(c, c.local, region, epoch, peer);
    failed |= !wait_least(c, Wait{direction, TY_SITE_FREE, world_rank(c, peer), epoch}, word, epoch - 1, "free flag");
  }
  return !block_any(failed);
}

// Tells node peers that this rank has read its inbox of `epoch`. By thread 0 of the last block, in whose acquire all
// loads of the kernel happened before.
TY_DEVICE void publish_free(const ty_context &c, const ty_region &region, u64 epoch) {
  if (!c.single) return;
  // N8: acquired by wait_free.
  for (u32 peer = 0; peer < c.node_ranks; ++peer)
    store_release_sys(in_arena<u64>(c, peer, region, epoch, c.local), epoch);
}

// ---- begin and end of a phase ------------------------------------------------------------------------------

// What a launch may do: nothing (`go` false), or its phases of `epoch`.
struct Turn {
  bool go;
  u64 epoch;
};

// Grammar: receive(e) before send(e+1). A launch with the send phase starts epoch sent + 1 once all that was
// sent has been received; one with only the receive phase finishes the epoch in flight. All blocks read the same
// words, because only the last block to finish writes them.
TY_DEVICE Turn begin_turn(const ty_context &c, u32 direction, u32 phases, u64 sent, u64 received, u32 order_send,
                          u32 order_receive) {
  if (load_relaxed_gpu(&state_of(c)->closed) != 0) return {false, 0};
  bool sends = (phases & TY_PHASE_SEND) != 0;
  if (sends == (sent == received)) return {true, sends ? sent + 1 : sent};
  if (block_index() == 0 && thread_index() == 0)
    report(c, direction, TY_ERROR_ORDER, 0, c.rank, sent, sends ? order_send : order_receive, sent, received);
  return {false, 0};
}

// True in thread 0 of the last block to come here: everything the other blocks did happened before.
TY_DEVICE bool last_block(const ty_context &c, u32 direction) {
  block_barrier();
  if (thread_index() != 0) return false;
  ty_state *state = state_of(c);
  if (atomic_add_gpu(&state->blocks_done[direction], 1u) + 1 != block_count()) return false;
  store(&state->blocks_done[direction], 0u);
  store(&state->error_claim[direction], 0u);
  return true;
}

} // namespace ty
