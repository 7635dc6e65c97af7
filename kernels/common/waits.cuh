// Named waits, each with a deadline, and the words that are waited for. Runs on the device; never traps, never waits
// without a deadline.
#pragma once
#include "common/absence.cuh"

namespace ty {

// ---- waits -----------------------------------------------------------------------------------------------

// Polls of a wait loop between two checks of the clock and of the closed word.
constexpr u32 polls_between_checks = 32;

// What a wait is for: the site and peer that a Timeout names.
struct Wait {
  u32 site;
  u32 peer;
  u64 epoch;
  u64 grace_ns; // beyond the deadline, where others pass the words on: their waits, which name the peer, end first
  u32 direction = by_site; // of the call, where the site does not say it
  u32 served = nobody;     // the rank of another node whose tokens the wait is for: see is_for_nothing
  static constexpr u32 by_site = ~0u, nobody = ~0u;
};

// The direction of the call that has a wait: weights are sent ahead within a combine.
TY_DEVICE u32 direction_of(const Wait &wait) {
  if (wait.direction == TY_DIRECTION_WEIGHTS) return TY_DIRECTION_COMBINE;
  if (wait.direction != Wait::by_site) return wait.direction;
  u32 site = wait.site;
  if (site == TY_SITE_BARRIER) return TY_DIRECTION_BARRIER;
  bool combines = site == TY_SITE_COMBINE_FLAG || site == TY_SITE_PARTIAL || site == TY_SITE_AHEAD_WEIGHTS;
  return combines ? TY_DIRECTION_COMBINE : TY_DIRECTION_DISPATCH;
}

// Whether a node peer sends nothing for a served rank: that rank is masked here, or there.
TY_DEVICE bool is_for_nothing(const Context auto &c, const Wait &wait) {
  if (!tolerates_absence(c) || wait.served == Wait::nobody) return false;
  return is_masked(c, wait.served) || has_masked(c, wait.peer - c.node_first, wait.served);
}

// Checks deadline and closed word at the given poll of a wait loop. `start` is 0 before the first poll, which sets it:
// most waits are over before the clock is read. False, and the context closed, once the deadline passed here or
// anywhere else on this rank. Where ranks may be absent, also false without closing the context: if the peer is masked.
TY_DEVICE bool may_wait(const Context auto &c, const Wait &wait, u32 poll, u64 &start, u64 expected, u64 seen,
                        u64 sign = no_sign) {
  // A wait for a rank that is masked ends at once: there may be one for each row.
  bool linked = wait.site == TY_SITE_ARRIVED || wait.site == TY_SITE_STAGING, first = poll == 1;
  bool looks = tolerates_absence(c) && (first || poll % polls_between_checks == 0);
  if (looks && is_for_nothing(c, wait)) return false;
  if (looks && first && is_gone(c, wait.peer, linked)) return false;
  if (poll % polls_between_checks != 0) return true;
  ty_state *state = state_of(c);
  if (load_relaxed_gpu(&state->closed) != 0) return false;
  u64 now = now_ns();
  if (start == 0) start = now;
  u64 waited = now - start;
  if (tolerates_absence(c) && wait.peer != c.rank) {
    if (!is_awaited(c, direction_of(wait), wait.peer, linked, wait.epoch, now, waited, sign)) return false;
    if (c.absences.masks_silent) return true;
  }
  // What this rank is to do itself may be behind its waits for all others, one after the other.
  u64 timeouts = tolerates_absence(c) && wait.peer == c.rank ? u64{most_timeouts} * c.ranks : 1;
  if (waited / timeouts <= c.timeout_ns + wait.grace_ns) return true;
  keep_fault({TY_ERROR_TIMEOUT, wait.site, wait.peer, wait.epoch, expected, seen, waited});
  close(c);
  return false;
}

// Waits until the word's bits above `shift` equal `expected`, and loads it into `found`; acquires at system scope.
// False once a deadline passed.
TY_DEVICE bool wait_value(const Context auto &c, const Wait &wait, const u64 *word, u32 shift, u64 expected,
                          const char *name, u64 &found) {
  u64 seen = load_relaxed_sys(word), start = 0;
  for (u32 poll = 1;; ++poll) {
    // The caller's edge (N1 to N4, N9, N10, N14, E6), acquired once: each acquisition takes the multiprocessor's first
    // cache from all of its warps.
    if ((seen >> shift) == expected) return found = load_acquire_sys(word), true;
    spin_pause(name);
    seen = load_relaxed_sys(word);
    if (!may_wait(c, wait, poll, start, expected, seen >> shift)) return false;
  }
}

TY_DEVICE bool wait_word(const Context auto &c, const Wait &wait, const u64 *word, u32 shift, u64 expected,
                         const char *name) {
  u64 found = 0;
  return wait_value(c, wait, word, shift, expected, name, found);
}

// A flag is {epoch, 32 bits; status, 32 bits}. Equality suffices: a peer cannot be two epochs ahead (the grammar),
// and the slot's former value is older by an even number of epochs.
TY_DEVICE bool wait_flag(const Context auto &c, const u64 *flag, u64 epoch, u32 site, u32 peer, const char *name) {
  return wait_word(c, Wait{site, peer, epoch, 0}, flag, 32, epoch & 0xffffffffu, name);
}

// A tag is the whole 64-bit epoch: a slot may stay unwritten for any number of epochs and still never be taken
// for a new one.
TY_DEVICE bool wait_tag(const Context auto &c, const u64 *tag, u64 epoch, u32 site, u32 peer, const char *name,
                        u32 direction = Wait::by_site) {
  return wait_word(c, Wait{site, peer, epoch, 0, direction}, tag, 0, epoch, name);
}

// Waits until a word that only grows has reached `least`.
TY_DEVICE bool wait_least(const Context auto &c, const Wait &wait, const u64 *word, u64 least, const char *name) {
  // N8, the only edge by such words.
  u64 seen = load_acquire_sys(word);
  if (seen >= least) return true;
  u64 start = 0;
  for (u32 poll = 1;; ++poll) {
    spin_pause(name);
    // N8 again.
    seen = load_acquire_sys(word);
    if (seen >= least) return true;
    if (!may_wait(c, wait, poll, start, least, seen)) return false;
  }
}

TY_DEVICE u64 flag_value(u64 epoch, u32 status) { return (epoch << 32) | status; }

// A metadata word is {epoch, 32 bits; 1 + value}: it needs no flag, and so no fence, and zeroed memory holds none. A
// reader learns its value and nothing else. Words that an epoch does not use are rewritten before 2^32 epochs are over
// (refreshed_token), so that an old word is never taken for a new one.
TY_DEVICE u64 meta_word(u64 epoch, u32 value) { return (epoch << 32) | (value + 1); }

// In the place of a source's number of rows: the source sends none, since its routing was unusable.
constexpr u32 meta_refused = 1u << 31;
static_assert(TY_MAX_TOKENS < meta_refused, "a row a token at the most");

// The value of a metadata word as loaded; false if the word is not of this epoch.
TY_DEVICE bool meta_value(u64 epoch, u64 seen, u32 &value) {
  value = static_cast<u32>(seen) - 1;
  return (seen >> 32) == (epoch & 0xffffffffu) && static_cast<u32>(seen) != 0;
}

// The wait for metadata of a source. Metadata of other nodes' sources is passed on by rails.
TY_DEVICE Wait meta_wait(const Context auto &c, u64 epoch, u32 source) {
  return {TY_SITE_METADATA, source, epoch, is_node_peer(c, source) ? 0 : c.timeout_ns / 16};
}

// Waits for a metadata word and takes its value. False once a deadline passed.
TY_DEVICE bool wait_meta(const Context auto &c, u64 epoch, u32 source, const u64 *word, u32 &value) {
  u64 start = 0;
  TY_ROLLED
  for (u32 poll = 0;; ++poll) {
    u64 seen = load_relaxed_sys(word);
    if (meta_value(epoch, seen, value)) return true;
    if (poll != 0 && !may_wait(c, meta_wait(c, epoch, source), poll, start, epoch & 0xffffffffu, seen >> 32))
      return false;
    spin_pause("metadata");
  }
}

// ---- reuse of regions that exist once ------------------------------------------------------------------------

TY_DEVICE const ty_region &free_region(const Context auto &c, u32 direction) {
  return direction == TY_DIRECTION_COMBINE ? c.regions.combine_free : c.regions.dispatch_free;
}

// The last epoch in which a node peer has read the rows that this rank stored there.
TY_DEVICE const u64 *free_word(const Context auto &c, u32 direction, u32 peer) {
  return in_arena<const u64>(c, c.local, free_region(c, direction), 0, peer);
}

// The first look of wait_free of a whole block (N8), made ahead of it.
TY_DEVICE u64 ask_free(const Context auto &c, u32 direction) {
  return c.free_flags != 0 && thread_index() < c.node_ranks ? load_acquire_sys(free_word(c, direction, thread_index()))
                                                            : 0;
}

// Before the first store of `epoch` into node peers' receive buffers: waits until they have read the epoch before.
// `asked`: ask_free's answer for the thread's first peer, or 0. By a team. False once a deadline passed.
TY_DEVICE bool wait_free(const Context auto &c, const Team &team, u32 direction, u64 epoch, u64 asked = 0) {
  if (c.free_flags == 0 || epoch == c.first_epoch) return true;
  bool failed = false;
  for (u32 peer = team_thread(team); peer < c.node_ranks; peer += team_threads(team), asked = 0) {
    if (asked >= epoch - 1) continue;
    const u64 *word = free_word(c, direction, peer);
    Wait wait{TY_SITE_FREE, world_rank(c, peer), epoch, 0, direction};
    if (is_left_out(c, peer) || wait_least(c, wait, word, epoch - 1, "free flag")) continue;
    failed |= fails(c, false);
    // It may still read what would be stored next.
    if (tolerates_absence(c)) leave_out(c, wait.peer);
  }
  return !team_any(team, failed);
}

// Notifies node peers that this rank has read its receive buffer of `epoch`, if the calling block is the last to get
// here; where ranks may be absent, the caller knows that it is. By thread 0 of a block that reads no more.
TY_DEVICE void publish_free(const Context auto &c, u32 direction, u64 epoch) {
  if (c.free_flags == 0) return;
  if (!tolerates_absence(c) && !is_last_done(c, direction, block_count())) return;
  // N8: acquired by wait_free.
  for (u32 peer = 0; peer < c.node_ranks; ++peer)
    if (!is_left_out(c, peer))
      store_release_sys(in_arena<u64>(c, peer, free_region(c, direction), epoch, c.local), epoch);
}

} // namespace ty
