// Ranks that are missing, in contexts whose calls go on without them ("Missing ranks" in docs/calls.md): which ranks
// are masked, whether a rank takes part in a call, and how long a silent rank is waited for. In worlds of 32 ranks at
// the most: a bit for each rank of the world is a word.
#pragma once
#include "common/context.cuh"

namespace ty {

TY_DEVICE ty_absence *absence_of(const Context auto &c, u32 rank) {
  return pointer<ty_absence>(c.absences.ranks) + rank;
}

TY_DEVICE bool is_closed(const Context auto &c) { return load_relaxed_gpu(&state_of(c)->closed) != 0; }

// ---- masked ranks ------------------------------------------------------------------------------------------------

// Words that a rank shows another of the node, in the other's arena: the count of its signs of life, modulo 2^16, then
// for each rank of the world 1 if it has masked that rank, as far as this concerns the other (tell_masked).
TY_DEVICE u64 *signs_of(const Context auto &c, u32 owner, u32 from) {
  return in_arena<u64>(c, owner, c.regions.signs, 0, from);
}

TY_DEVICE u64 *masked_sign(const Context auto &c, u32 owner, u32 from, u32 rank) {
  return signs_of(c, owner, from) + 1 + rank;
}

// The rank of this node through which a rank's rows come: the rank itself, or its rail. Nodes have equally many ranks.
TY_DEVICE u32 carrier_of(const Context auto &c, u32 rank) { return spans_nodes(c) ? rank % c.node_ranks : rank; }

// Notifies those that a mask concerns: the masked rank itself; of a rank of another node its rail here, which waits for
// no partial rows for it, or if this rank is the rail all others, to which nothing of it comes then.
TY_DEVICE void tell_masked(const Context auto &c, u32 rank) {
  u32 carrier = carrier_of(c, rank);
  for (u32 local = 0; local < c.node_ranks; ++local)
    if (local == carrier || (carrier == c.local && local != c.local))
      store_relaxed_sys(masked_sign(c, local, c.local, rank), u64{1});
}

// Whether a rank of the node has masked a rank, as far as this one knows.
TY_DEVICE bool has_masked(const Context auto &c, u32 local, u32 rank) {
  return load_relaxed_sys(masked_sign(c, c.local, local, rank)) != 0;
}

// Masks a rank for good, whatever the caller's tensor holds afterwards.
TY_DEVICE void mask_rank(const Context auto &c, u32 rank) {
  store_relaxed_gpu(&absence_of(c, rank)->masked, 1u);
  store_relaxed_gpu(pointer<u32>(c.absences.mask) + rank, 1u);
  tell_masked(c, rank);
}

// Whether a rank of the world gets nothing and is waited for by nobody here. Once true, true for good. A rank that has
// masked this one sends it nothing, and is masked, too.
TY_DEVICE bool is_masked(const Context auto &c, u32 rank) {
  if (!tolerates_absence(c) || rank == c.rank) return false;
  u32 masked = load_relaxed_gpu(&absence_of(c, rank)->masked);
  u32 by_caller = load_relaxed_gpu(pointer<const u32>(c.absences.mask) + rank);
  bool by_itself = is_node_peer(c, rank) && has_masked(c, carrier_of(c, rank), c.rank);
  bool now = masked == 0 && (by_caller != 0 || by_itself);
  if (now) mask_rank(c, rank);
  return now || masked != 0;
}

// Whether nothing of a rank of another node comes from its rail in this node: the rail is masked, or has masked it.
TY_DEVICE bool is_behind_mask(const Context auto &c, u32 rank) {
  u32 carrier = carrier_of(c, rank);
  return carrier != c.local && (is_masked(c, world_rank(c, carrier)) || has_masked(c, carrier, rank));
}

// Whether nothing comes of a rank.
TY_DEVICE bool is_cut_off(const Context auto &c, u32 rank) {
  if (is_masked(c, rank)) return true;
  return tolerates_absence(c) && !is_node_peer(c, rank) && is_behind_mask(c, rank);
}

// Keeps which ranks are masked as a launch begins. By a whole block, which meets afterwards.
TY_DEVICE void keep_masked(const Context auto &c) {
  if (!tolerates_absence(c) || warp_index() != 0) return;
  // Lanes without a rank look at the own one, which is never masked. All words are loaded together.
  u32 rank = lane_index() < c.ranks ? lane_index() : c.rank, carrier = carrier_of(c, rank);
  bool foreign = spans_nodes(c) && !is_node_peer(c, rank);
  bool by_rail = foreign && carrier != c.local && has_masked(c, carrier, rank);
  u32 masked = warp_ballot(is_masked(c, rank));
  bool rail_is = foreign && ((masked >> world_rank(c, carrier)) & 1) != 0;
  u32 cut = masked | warp_ballot(by_rail || rail_is);
  if (lane_index() != 0) return;
  store(&block_shared<LaunchShared>().masked, masked);
  store(&block_shared<LaunchShared>().cut, cut);
}

// Leaves a rank that a wait gave up out of this launch, and those whose rail it is. By any thread of a block, before
// the block meets.
TY_DEVICE void leave_out(const Context auto &c, u32 rank) {
  u32 cut = 1u << rank;
  for (u32 other = 0; spans_nodes(c) && other < c.ranks; ++other)
    if (world_rank(c, carrier_of(c, other)) == rank) cut |= 1u << other;
  atomic_or_block(&block_shared<LaunchShared>().masked, 1u << rank);
  atomic_or_block(&block_shared<LaunchShared>().cut, cut);
}

// The ranks of the node that get nothing of this launch, a bit each: one answer for all threads of a block.
TY_DEVICE u64 masked_ranks(const Context auto &c) {
  if (!tolerates_absence(c)) return 0;
  u32 masked = load(&block_shared<LaunchShared>().masked) >> c.node_first;
  return spans_nodes(c) ? bits_below(masked, c.node_ranks) : masked;
}

// Whether one of them gets nothing of this launch.
TY_DEVICE bool is_left_out(const Context auto &c, u32 local) { return ((masked_ranks(c) >> local) & 1) != 0; }

// Whether a rank at the other end of a link gets nothing of this launch.
TY_DEVICE bool was_masked(const Context auto &c, u32 rank) {
  return tolerates_absence(c) && ((load(&block_shared<LaunchShared>().masked) >> rank) & 1) != 0;
}

// Whether nothing of a rank's counts in this launch.
TY_DEVICE bool was_cut_off(const Context auto &c, u32 rank) {
  return tolerates_absence(c) && ((load(&block_shared<LaunchShared>().cut) >> rank) & 1) != 0;
}

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

// Whether the calling block is the last worker of a launch to get here, so that all others have ended their work. By a
// whole block; `ended`: end_launch's answer.
TY_DEVICE bool is_last_worker(const Context auto &c, u32 direction, u64 ended) {
  u32 workers = block_count() - (spans_nodes(c) ? 1 : 0);
  bool works = thread_index() == 0 && ended != 0 && block_index() < workers;
  return block_any(works && is_last_done(c, direction, workers));
}

// The ranks of the world that are dropped from an epoch, a bit each. By a warp.
TY_DEVICE u32 dropped_ranks(const Context auto &c, u32 direction, u64 epoch) {
  return warp_ballot(lane_index() < c.ranks && is_dropped(c, direction, epoch, lane_index()));
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
// Signs of ranks of other nodes come with their proxies' heartbeats, some 100 ms later: so many deadlines are silence.
constexpr u32 network_silence = 2;
constexpr u64 no_sign = ~0ull; // not known
constexpr u32 tick_bits = 16;  // a tick is 66 us

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
    if (!is_masked(c, world_rank(c, rank))) store_relaxed_sys(signs_of(c, rank, c.local), count);
  // The proxies pass it on to the ranks of other nodes that are linked to this one.
  if (spans_nodes(c)) store_relaxed_sys(pointer<u64>(c.wire.chunk_counts) + c.absences.life_word, count);
}

// How long ago a rank gave its last sign of life, of which `count` is the number as seen now.
TY_DEVICE u64 silent_for(const Context auto &c, u32 rank, u64 count, u64 now) {
  count &= 0xffff;
  u64 *word = &absence_of(c, rank)->last_sign, last_sign = load_relaxed_gpu(word);
  if ((last_sign & 0xffff) == count) return ns_since(last_sign, now);
  store_relaxed_gpu(word, ticks(now) << 16 | count);
  return 0;
}

// Masks a rank that did not come, and notes that for the host.
TY_DEVICE void mask_silent(const Context auto &c, u32 direction, u32 rank, u64 epoch) {
  store_relaxed_sys(pointer<u64>(c.absences.silences) + rank, epoch << 2 | (direction + 1));
  mask_rank(c, rank);
}

// Whether nothing comes of a rank. `linked`: of its messages to this rank; else of its rows, by whichever way.
TY_DEVICE bool is_gone(const Context auto &c, u32 rank, bool linked) {
  return linked ? is_masked(c, rank) : is_cut_off(c, rank);
}

// Looks at a rank that has kept a thread waiting for `waited`. False if nothing comes of it, perhaps from now on: who
// is masked is the rank of this node that should have passed it on, or the rank itself if this one is linked to it.
// `sign`: of the signs of life of a rank that is linked to this one, or no_sign.
TY_DEVICE bool is_awaited(const Context auto &c, u32 direction, u32 rank, bool linked, u64 epoch, u64 now, u64 waited,
                          u64 sign) {
  show_life(c, now, waited);
  if (is_gone(c, rank, linked)) return false;
  u32 carrier = linked ? c.local : carrier_of(c, rank);
  u32 culprit = carrier == c.local ? rank : world_rank(c, carrier);
  u64 silence = 1;
  if (carrier != c.local) sign = load_relaxed_sys(signs_of(c, c.local, carrier));
  else silence = network_silence;
  // The relay looks at the signs of other nodes' ranks, and waits for all of them: other threads see whom it masks.
  u64 silent = sign == no_sign ? 0 : silent_for(c, culprit, sign, now) / silence;
  bool overdue = waited / silence > c.timeout_ns && silent > c.timeout_ns;
  if ((!overdue && waited / most_timeouts <= c.timeout_ns) || !c.absences.masks_silent) return true;
  mask_silent(c, direction, culprit, epoch);
  return false;
}

} // namespace ty
