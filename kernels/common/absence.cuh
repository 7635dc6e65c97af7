// Ranks that are missing, in contexts whose calls go on without them ("Missing ranks" in docs/calls.md): which ranks
// are masked, whether a rank takes part in a call, and how long a silent rank is waited for. In worlds of one node.
#pragma once
#include "common/context.cuh"

namespace ty {

TY_DEVICE ty_absence *absence_of(const Context auto &c, u32 rank) { return pointer<ty_absence>(c.absences) + rank; }

TY_DEVICE bool is_closed(const Context auto &c) { return load_relaxed_gpu(&state_of(c)->closed) != 0; }

// ---- masked ranks ------------------------------------------------------------------------------------------------

// What a rank shows another of the node, in the other's arena.
struct Sign {
  u64 count;  // of signs of life, modulo 2^16
  u64 masked; // 1: it has masked the other
};

TY_DEVICE Sign *sign_of(const Context auto &c, u32 owner, u32 from) {
  return in_arena<Sign>(c, owner, c.regions.signs, 0, from);
}

// Masks a rank for good, whatever the caller's tensor holds afterwards, and lets it know.
TY_DEVICE void mask_rank(const Context auto &c, u32 rank) {
  store_relaxed_gpu(&absence_of(c, rank)->masked, 1u);
  store_relaxed_gpu(pointer<u32>(c.mask) + rank, 1u);
  store_relaxed_sys(&sign_of(c, rank, c.local)->masked, u64{1});
}

// Whether a rank of the world gets nothing and is waited for by nobody here. Once true, true for good. A rank that has
// masked this one sends it nothing, and is masked, too.
TY_DEVICE bool is_masked(const Context auto &c, u32 rank) {
  if (!tolerates_absence(c) || rank == c.rank) return false;
  u32 masked = load_relaxed_gpu(&absence_of(c, rank)->masked);
  u32 by_caller = load_relaxed_gpu(pointer<const u32>(c.mask) + rank);
  u64 by_itself = load_relaxed_sys(&sign_of(c, c.local, rank)->masked);
  bool now = masked == 0 && (by_caller != 0 || by_itself != 0);
  if (now) mask_rank(c, rank);
  return now || masked != 0;
}

// Keeps which ranks of the node are masked as a launch begins. By a whole block, which meets afterwards.
TY_DEVICE void keep_masked(const Context auto &c) {
  if (!tolerates_absence(c) || warp_index() != 0) return;
  u32 masked = warp_ballot(lane_index() < c.node_ranks && is_masked(c, lane_index()));
  if (lane_index() == 0) store(&block_shared<LaunchShared>().masked, masked);
}

// The ranks of the node that get nothing of this launch, a bit each: one answer for all threads of a block.
TY_DEVICE u64 masked_ranks(const Context auto &c) {
  return tolerates_absence(c) ? load(&block_shared<LaunchShared>().masked) : 0;
}

// Whether one of them gets nothing of this launch.
TY_DEVICE bool is_left_out(const Context auto &c, u32 local) { return ((masked_ranks(c) >> local) & 1) != 0; }

// Whether a wait for a rank that did not come fails its team: not where the rank may be absent.
TY_DEVICE bool fails(const Context auto &c, bool came) { return !came && (!tolerates_absence(c) || is_closed(c)); }

// Whether the context is closed, one value for all lanes. By a warp.
TY_DEVICE bool closed_for_warp(const Context auto &c) { return warp_ballot(lane_index() == 0 && is_closed(c)) != 0; }

// ---- who takes part in a call ------------------------------------------------------------------------------------

// Whether a rank takes part in an epoch of dispatch or combine: one answer for all blocks and launches of the epoch, by
// whoever decides first. The word is {epoch, 30 bits; part, 2 bits}, and each epoch writes that of every rank.
enum class Part : u32 { present = 1, absent };

TY_DEVICE u32 *part_word(const Context auto &c, u32 direction, u32 rank) {
  return &absence_of(c, rank)->decided[direction];
}

// Decides, unless that is done; returns what was decided. `seen`: the word, loaded in this launch.
TY_DEVICE Part decide_part(u32 *word, u32 seen, u64 epoch, Part part) {
  u32 own = static_cast<u32>(epoch) << 2 | static_cast<u32>(part);
  if ((seen ^ own) >= 4 || (seen & 3) == 0) {
    // N16: the word is all that is read.
    u32 before = atomic_cas_gpu(word, seen, own);
    if (before == seen) return part;
    seen = before;
  }
  return static_cast<Part>(seen & 3);
}

// Notes that rows which a rank had announced in an epoch do not come: none of them counts then.
TY_DEVICE void drop_rank(const Context auto &c, u32 direction, u64 epoch, u32 rank) {
  store_relaxed_gpu(&absence_of(c, rank)->dropped[direction], epoch);
}

TY_DEVICE bool is_dropped(const Context auto &c, u32 direction, u64 epoch, u32 rank) {
  return load_relaxed_gpu(&absence_of(c, rank)->dropped[direction]) == epoch;
}

// Whether the calling block is the last of a launch to get here, so that all others have ended their work. By a whole
// block; `ended`: end_launch's answer.
TY_DEVICE bool is_last_block(const Context auto &c, u32 direction, u64 ended) {
  return block_any(thread_index() == 0 && ended != 0 && is_last_done(c, direction));
}

// The slot of a rank's partial row at the owner, of a token that goes to `ranks`. Where ranks may be absent, each has a
// slot of its own: a rank that is masked might still send a row of an earlier call, and another's must not lie there.
TY_DEVICE u32 slot_of_rank(const Context auto &c, u64 ranks, u32 rank) {
  return tolerates_absence(c) ? rank : popcount64(bits_below(ranks, rank));
}

// ---- silence -----------------------------------------------------------------------------------------------------

// A rank that itself waits for another one is not silent: it gives signs of life to all ranks, or each death would make
// ranks mask those that wait for the dead one. A sign is a count. The word `last_sign` of a rank is {when its count
// last changed, 48 bits; the count, 16 bits}, and the own rank's word is when it last gave a sign. By this device's
// clock.
constexpr u32 signs_per_timeout = 8;
// Signs do not prolong a wait beyond so many deadlines.
constexpr u32 most_timeouts = 8;
constexpr u32 tick_bits = 16; // a tick is 66 us

TY_DEVICE u64 ticks(u64 ns) { return (ns >> tick_bits) & ((1ull << 48) - 1); }

// Nanoseconds from the time in a word of `last_sign` until now; 0 if another thread has stored a later time.
TY_DEVICE u64 ns_since(u64 last_sign, u64 now) {
  u64 since = ticks(now - ((last_sign >> 16) << tick_bits));
  return (since >> 47) != 0 ? 0 : since << tick_bits;
}

// Shows all ranks that this one waits for another, if a sign is due. By a thread that has waited for `waited`.
TY_DEVICE void show_life(const Context auto &c, u64 now, u64 waited) {
  u64 every = c.timeout_ns / signs_per_timeout, *own = &absence_of(c, c.rank)->last_sign;
  u64 last = load_relaxed_gpu(own);
  if (waited < every || ns_since(last, now) < every) return;
  u64 count = (last + 1) & 0xffff;
  store_relaxed_gpu(own, ticks(now) << 16 | count);
  for (u32 rank = 0; rank < c.node_ranks; ++rank)
    if (!is_masked(c, rank)) store_relaxed_sys(&sign_of(c, rank, c.local)->count, count);
}

// How long ago a rank gave its last sign of life.
TY_DEVICE u64 silent_for(const Context auto &c, u32 rank, u64 now) {
  u64 count = load_relaxed_sys(&sign_of(c, c.local, rank)->count) & 0xffff;
  u64 *word = &absence_of(c, rank)->last_sign, last_sign = load_relaxed_gpu(word);
  if ((last_sign & 0xffff) == count) return ns_since(last_sign, now);
  store_relaxed_gpu(word, ticks(now) << 16 | count);
  return 0;
}

// Looks at a rank that has kept a thread waiting for `waited`. False if it is masked, perhaps from now on.
TY_DEVICE bool is_awaited(const Context auto &c, u32 direction, u32 rank, u64 epoch, u64 now, u64 waited) {
  show_life(c, now, waited);
  if (is_masked(c, rank)) return false;
  u64 silent = silent_for(c, rank, now);
  bool overdue = waited > c.timeout_ns && (silent > c.timeout_ns || waited / most_timeouts > c.timeout_ns);
  if (!overdue || !c.masks_silent) return true;
  store_relaxed_sys(pointer<u64>(c.silences) + rank, epoch << 2 | (direction + 1));
  mask_rank(c, rank);
  return false;
}

} // namespace ty
