// What every kernel of the data path shares: addresses in arenas, named waits with deadlines, error
// records, and the begin and end of a phase. Runs on the device; never traps, never waits without a deadline.
#pragma once
#include "common/plain.cuh"

namespace ty {

// ---- addresses -------------------------------------------------------------------------------------------

// Start of `region` for `source` in the arena of the node's rank `owner`, for the parity of `epoch`.
template <typename T>
TY_DEVICE T *in_arena(const Context auto &c, u32 owner, const ty_region &region, u64 epoch, u32 source) {
  return reinterpret_cast<T *>(c.peer_base[owner] + region.offset + (epoch & 1) * region.parity_stride +
                               source * region.source_stride);
}

template <typename T> TY_DEVICE T *pointer(u64 address) { return reinterpret_cast<T *>(address); }

TY_DEVICE ty_state *state_of(const Context auto &c) { return pointer<ty_state>(c.state); }

// The calling block's words of a direction.
TY_DEVICE ty_turn *turn_of(const Context auto &c, u32 direction) {
  return pointer<ty_turn>(c.state + sizeof(ty_state)) + direction * c.blocks + block_index();
}

// The rank in the world of a rank of this node.
TY_DEVICE u32 world_rank(const Context auto &c, u32 local) { return c.node_first + local; }

// Bits below `bit`.
TY_DEVICE u64 bits_below(u64 mask, u32 bit) { return mask & ((1ull << bit) - 1); }

struct Quotient {
  u32 whole;
  u32 rest;
};

// n / d for n below 2^31, by floor((2^32 - 1) / d): the product is too small by one at the most.
TY_DEVICE Quotient divide(u32 n, u32 d, u32 inverse) {
  u32 whole = static_cast<u32>(static_cast<u64>(n) * inverse >> 32), rest = n - whole * d;
  return rest < d ? Quotient{whole, rest} : Quotient{whole + 1, rest - d};
}

TY_DEVICE constexpr u32 smaller(u32 x, u32 y) { return x < y ? x : y; }
TY_DEVICE constexpr u32 larger(u32 x, u32 y) { return x > y ? x : y; }

TY_DEVICE u32 lowest_bit(u64 mask) { return popcount64((mask & (~mask + 1)) - 1); }
TY_DEVICE u32 lowest_bit(u32 mask) { return popcount((mask & (~mask + 1)) - 1); }

// ---- errors ----------------------------------------------------------------------------------------------

// An error that a warp came upon.
struct Fault {
  u32 kind; // TY_ERROR_*
  u32 site;
  u32 peer;
  u64 epoch;
  u64 a, b, d;
};

// What a block keeps for the end of its launch: at the start of shared memory, so that nothing is looked up far away
// when all else is done. Errors by whether they close the context, and by warp.
struct alignas(16) LaunchShared {
  u64 epoch;                                       // of the launch's phases; 0, which no epoch is: it may do nothing
  u32 launches;                                    // that ended before
  u32 call;                                        // of a guarded launch: as TurnWords
  u32 faults[2][TY_MAX_BLOCK_THREADS / warp_size]; // how often a warp came upon one
  Fault first[2][TY_MAX_BLOCK_THREADS / warp_size];
  u64 sent, received; // of a guarded launch: as TurnWords
  u32 closed;
  i32 found; // of dispatch: tokens that the caller says there are
};

// Keeps an error until the launch ends: what reports it is code that all launches would step over at every wait.
TY_DEVICE void keep_fault(const Fault &found) {
  LaunchShared &shared = block_shared<LaunchShared>();
  u32 kind = found.kind;
  bool closes = kind == TY_ERROR_TIMEOUT || kind == TY_ERROR_PEER_LOST;
  u32 fatal = closes || kind == TY_ERROR_OVERLAP || kind == TY_ERROR_PAIRING ? 1 : 0;
  if (atomic_add_block(&shared.faults[fatal][warp_index()], 1) != 0) return;
  Fault &first = shared.first[fatal][warp_index()];
  store(&first.kind, found.kind);
  store(&first.site, found.site);
  store(&first.peer, found.peer);
  store(&first.epoch, found.epoch);
  store(&first.a, found.a);
  store(&first.b, found.b);
  store(&first.d, found.d);
}

// Before a warp's first fault.
TY_DEVICE void begin_faults() {
  if (lane_index() < 2) store(&block_shared<LaunchShared>().faults[lane_index()][warp_index()], 0u);
  warp_barrier();
}

// Writes an error record, once a launch: whoever claims it first. What closes the context is written once, since
// launches that overlap would write together. The host reads it under the record's sequence, so a record is seen whole
// or not at all.
TY_DEVICE void report(const Context auto &c, u32 direction, u32 fatal, const Fault &found) {
  u32 number = fatal * TY_DIRECTIONS + direction;
  ty_state *state = state_of(c);
  u32 launch = fatal ? 1 : load(&turn_of(c, direction)->launches) + 1;
  u32 last = load_relaxed_gpu(&state->error_claim[number]);
  // N6: one block of a launch reports. The host copies the record, and reads its sequence again.
  if (last == launch || atomic_cas_gpu(&state->error_claim[number], last, launch) != last) return;
  ty_error_record *record = pointer<ty_error_record>(c.errors) + number;
  u64 sequence = load(&state->error_sequence[number]);
  // N6: odd before any field is.
  store_relaxed_sys(&record->sequence, sequence + 1);
  fence_acq_rel_sys();
  store_relaxed_sys(&record->kind, load(&found.kind));
  store_relaxed_sys(&record->site, load(&found.site));
  store_relaxed_sys(&record->peer, load(&found.peer));
  store_relaxed_sys(&record->epoch, load(&found.epoch));
  store_relaxed_sys(&record->a, load(&found.a));
  store_relaxed_sys(&record->b, load(&found.b));
  store_relaxed_sys(&record->c, load(&found.d));
  // N6: all fields before; the host acquires.
  store_release_sys(&record->sequence, sequence + 2);
  store(&state->error_sequence[number], sequence + 2);
}

// Reports what warps of the block kept: of either kind that of the first warp with one. By warp 0, behind a barrier of
// the block.
TY_DEVICE void report_faults(const Context auto &c, u32 direction) {
  const LaunchShared &shared = block_shared<LaunchShared>();
  TY_ROLLED
  for (u32 fatal = 0; fatal < 2; ++fatal) {
    u32 there = warp_ballot(lane_index() < block_warps() && load(&shared.faults[fatal][lane_index()]) != 0);
    if (there && lane_index() == 0) report(c, direction, fatal, shared.first[fatal][lowest_bit(there)]);
  }
}

// Writes down that a source's routing was unusable: news for the host, and no error of this rank's. By one thread.
TY_DEVICE void note_refused(const Context auto &c, u32 source, u64 call) {
  store_relaxed_sys(pointer<u64>(c.refused) + source, call);
}

// ---- work of a block --------------------------------------------------------------------------------------

// The number of the next thing to do, counted from 0, which then is the calling warp's alone: of its block's, ...
TY_DEVICE u32 take_next(u32 *taken) { return shuffle(lane_index() == 0 ? atomic_add_block(taken, 1) : 0, 0); }
// ... or of all blocks', counted in global memory: in lane 0, so that the answer can be waited for later.
TY_DEVICE u32 ask_next_of_all(u32 *taken) { return lane_index() == 0 ? atomic_next_gpu(taken, 1) : 0; }

// Neighbours that a lane of scan adds up by itself.
constexpr u32 scan_run = 4;

// Exclusive sums of `in`, each rounded up to a multiple of `align`, into `out`; the sum of all in every lane. `inverse`
// is align's, as divide() takes it. By a warp.
TY_DEVICE u32 scan(u32 *out, const u32 *in, u32 count, u32 align = 1, u32 inverse = ~0u) {
  u32 carry = 0;
  TY_ROLLED
  for (u32 first = 0; first < count; first += scan_run * warp_size) {
    u32 begin = first + scan_run * lane_index(), own[scan_run], run = 0;
    TY_UNROLL
    for (u32 i = 0; i < scan_run; ++i) {
      own[i] = begin + i < count ? divide(load(in + begin + i) + align - 1, align, inverse).whole * align : 0;
      run += own[i];
    }
    u32 sum = run;
    TY_ROLLED
    for (u32 step = 1; step < warp_size && scan_run * step < count - first; step *= 2) {
      u32 other = shuffle(sum, lane_index() - step);
      if (lane_index() >= step) sum += other;
    }
    u32 at = carry + sum - run;
    TY_UNROLL
    for (u32 i = 0; i < scan_run; at += own[i], ++i)
      if (begin + i < count) store(out + begin + i, at);
    u32 lanes = (count - first + scan_run - 1) / scan_run;
    carry += shuffle(sum, (lanes < warp_size ? lanes : warp_size) - 1);
  }
  return carry;
}

// ---- waves -----------------------------------------------------------------------------------------------

// A launch's part of its call. META belongs to the call, rows to the wave. Reckoned once a launch: divisions of 64 bits
// take long.
struct Wave {
  u64 epoch;  // of the launch
  u64 call;   // epoch that META words bear
  u32 number; // of the wave in its call
};

TY_DEVICE Wave wave_of(const Context auto &c, u64 epoch) {
  if (c.waves == 1) return {epoch, epoch, 0};
  u64 launches = epoch - c.first_epoch;
  return {epoch, c.first_epoch + launches / c.waves, static_cast<u32>(launches % c.waves)};
}

TY_DEVICE bool is_last(const Context auto &c, const Wave &wave) { return wave.number + 1 == c.waves; }

// A wave's part of a run of rows or tokens.
struct Range {
  u32 first;
  u32 end;
};

// A wave's part of a rank's own tokens.
TY_DEVICE Range own_range(const Context auto &c, const Wave &wave, u32 tokens) {
  u32 first = wave.number * c.wave_tokens, end = first + c.wave_tokens;
  return {first < tokens ? first : tokens, end < tokens ? end : tokens};
}

// Where waves begin in row `i` of a handle's table: uint32 [..][waves + 1].
TY_DEVICE u32 *wave_starts(const Context auto &c, u64 table, u32 i) { return pointer<u32>(table) + i * (c.waves + 1); }

// A wave's part of it. The first start is known to be 0, so that what is looked up by it need not wait. Starts of two
// calls that overlap make no part.
TY_DEVICE Range wave_range(const Context auto &c, u64 table, u32 i, const Wave &wave) {
  const u32 *starts = wave_starts(c, table, i) + wave.number;
  Range range{wave.number == 0 ? 0 : load(starts), load(starts + 1)};
  if (c.waves > 1 && range.end - range.first > c.wave_tokens) range.end = range.first;
  return range;
}

// All rows that the same table counts.
TY_DEVICE u32 all_rows(const Context auto &c, u64 table, u32 i) { return load(wave_starts(c, table, i) + c.waves); }

// The ranks of the node that have rows of what served home j sent, by its rows of the call.
TY_DEVICE u64 *rail_masks(const Context auto &c, const ty_handle &handle, u32 j) {
  return pointer<u64>(handle.rail_mask) + static_cast<u64>(j) * c.max_tokens;
}

// ---- statistics ------------------------------------------------------------------------------------------
// Nothing but a test of a word where they are off. Stores to host memory do not hold a thread up.

TY_DEVICE void note(const Context auto &c, u64 word, u64 value) {
  store_relaxed_sys(pointer<u64>(c.stats) + word, value);
}

// A block is through with a stage. By any number of its threads, of which one leads.
TY_DEVICE void note_stage(const Context auto &c, u32 direction, u32 stage, bool leads) {
  if (c.stats && leads) note(c, (direction * c.blocks + block_index()) * TY_STAGES + stage, now_ns());
}

TY_DEVICE void note_heard(const Context auto &c, u32 direction, u32 peer) {
  if (c.stats && block_index() == 0) note(c, 2 * c.blocks * TY_STAGES + direction * TY_MAX_RANKS + peer, now_ns());
}

TY_DEVICE void note_rows(const Context auto &c, u32 peer, u32 rows) {
  if (c.stats) note(c, 2 * c.blocks * TY_STAGES + 2 * TY_MAX_RANKS + peer, rows);
}

// ---- waits -----------------------------------------------------------------------------------------------

// Turns of a wait loop between two looks at the clock and at the closed word.
constexpr u32 turns_between_checks = 32;

// Closes the context of this rank: waits end, and launches do nothing.
TY_DEVICE void close(const Context auto &c) {
  // N7: seen by every wait loop and every kernel's start.
  store_release_gpu(&state_of(c)->closed, 1u);
}

// What a wait is for: who is named when its deadline passes.
struct Wait {
  u32 site;
  u32 peer;
  u64 epoch;
  u64 grace_ns; // beyond the deadline: for what someone passes on who may be missing himself, and is then to be named
};

// Looks at deadline and closed word in the given turn of a wait loop. `start` is 0 before the first, which sets it:
// most waits are over before the clock is read. False, and the context closed, once the deadline passed here or
// anywhere else on this rank.
TY_DEVICE bool may_wait(const Context auto &c, const Wait &wait, u32 turn, u64 &start, u64 expected, u64 seen) {
  if (turn % turns_between_checks != 0) return true;
  ty_state *state = state_of(c);
  if (load_relaxed_gpu(&state->closed) != 0) return false;
  u64 now = now_ns();
  if (start == 0) start = now;
  u64 waited = now - start;
  if (waited <= c.timeout_ns + wait.grace_ns) return true;
  keep_fault({TY_ERROR_TIMEOUT, wait.site, wait.peer, wait.epoch, expected, seen, waited});
  close(c);
  return false;
}

// Waits until the word's bits above `shift` equal `expected`; acquires at system scope. False once a deadline passed.
TY_DEVICE bool wait_word(const Context auto &c, const Wait &wait, const u64 *word, u32 shift, u64 expected,
                         const char *name) {
  u64 seen = load_relaxed_sys(word), start = 0;
  for (u32 turn = 1;; ++turn) {
    // The caller's edge (N1 to N4, N9, N10, N14, E6), acquired once: each acquisition takes the multiprocessor's first
    // cache from all of its warps.
    if ((seen >> shift) == expected) return (void)load_acquire_sys(word), true;
    spin_pause(name);
    seen = load_relaxed_sys(word);
    if (!may_wait(c, wait, turn, start, expected, seen >> shift)) return false;
  }
}

// A flag is {epoch, 32 bits; status, 32 bits}. Equality suffices: a peer cannot be two epochs ahead (the grammar),
// and the slot's former value is older by an even number of epochs.
TY_DEVICE bool wait_flag(const Context auto &c, const u64 *flag, u64 epoch, u32 site, u32 peer, const char *name) {
  return wait_word(c, Wait{site, peer, epoch, 0}, flag, 32, epoch & 0xffffffffu, name);
}

// A tag is the whole 64-bit epoch: a slot may stay unwritten for any number of epochs and still never be taken
// for a new one.
TY_DEVICE bool wait_tag(const Context auto &c, const u64 *tag, u64 epoch, u32 site, u32 peer, const char *name) {
  return wait_word(c, Wait{site, peer, epoch, 0}, tag, 0, epoch, name);
}

// Waits until a word that only grows has reached `least`.
TY_DEVICE bool wait_least(const Context auto &c, const Wait &wait, const u64 *word, u64 least, const char *name) {
  // N8, the one edge by such words.
  u64 seen = load_acquire_sys(word);
  if (seen >= least) return true;
  u64 start = 0;
  for (u32 turn = 1;; ++turn) {
    spin_pause(name);
    // N8 again.
    seen = load_acquire_sys(word);
    if (seen >= least) return true;
    if (!may_wait(c, wait, turn, start, least, seen)) return false;
  }
}

TY_DEVICE u64 flag_value(u64 epoch, u32 status) { return (epoch << 32) | status; }

// A META word is {epoch, 32 bits; 1 + value}: it needs no flag, and so no fence, and zeroed memory holds none. Nothing
// but its value follows from it. Words that an epoch does not use are written anew before 2^32 epochs are over
// (refreshed_token), so that an old one is never taken for a new one.
TY_DEVICE u64 meta_word(u64 epoch, u32 value) { return (epoch << 32) | (value + 1); }

// In the place of a source's number of rows: it has none, since its routing was unusable.
constexpr u32 meta_refused = 1u << 31;
static_assert(TY_MAX_TOKENS < meta_refused, "a row a token at the most");

// The value of a META word as it was seen; false if it is not of this epoch.
TY_DEVICE bool meta_value(u64 epoch, u64 seen, u32 &value) {
  value = static_cast<u32>(seen) - 1;
  return (seen >> 32) == (epoch & 0xffffffffu) && static_cast<u32>(seen) != 0;
}

// Who is waited for at META of a source. Rails pass on that of other nodes' sources.
TY_DEVICE Wait meta_wait(const Context auto &c, u64 epoch, u32 source) {
  return {TY_SITE_META, source, epoch, is_node_peer(c, source) ? 0 : c.timeout_ns / 16};
}

// Waits for a META word and takes its value. False once a deadline passed.
TY_DEVICE bool wait_meta(const Context auto &c, u64 epoch, u32 source, const u64 *word, u32 &value) {
  u64 start = 0;
  TY_ROLLED
  for (u32 turn = 0;; ++turn) {
    u64 seen = load_relaxed_sys(word);
    if (meta_value(epoch, seen, value)) return true;
    if (turn != 0 && !may_wait(c, meta_wait(c, epoch, source), turn, start, epoch & 0xffffffffu, seen >> 32))
      return false;
    spin_pause("META");
  }
}

// ---- reuse of regions that exist once ------------------------------------------------------------------------

// The last epoch whose rows a node peer has read of what this rank stored.
TY_DEVICE const u64 *free_word(const Context auto &c, const ty_region &region, u32 peer) {
  return in_arena<const u64>(c, c.local, region, 0, peer);
}

// What wait_free of a whole block looks at first (N8), asked for ahead of it.
TY_DEVICE u64 ask_free(const Context auto &c, const ty_region &region) {
  return c.free_flags != 0 && thread_index() < c.node_ranks ? load_acquire_sys(free_word(c, region, thread_index()))
                                                            : 0;
}

// Before the first store of `epoch` into node peers' inboxes: waits until they have read the epoch before. `asked`: of
// the thread's first peer, if it was asked for. By a team. False once a deadline passed.
TY_DEVICE bool wait_free(const Context auto &c, const Team &team, const ty_region &region, u64 epoch, u64 asked = 0) {
  if (c.free_flags == 0 || epoch == c.first_epoch) return true;
  bool failed = false;
  for (u32 peer = team_thread(team); peer < c.node_ranks; peer += team_threads(team), asked = 0) {
    if (asked >= epoch - 1) continue;
    const u64 *word = free_word(c, region, peer);
    failed |= !wait_least(c, Wait{TY_SITE_FREE, world_rank(c, peer), epoch, 0}, word, epoch - 1, "free flag");
  }
  return !team_any(team, failed);
}

// Tells node peers that this rank has read its inbox of `epoch`, if the calling block is the last to come here. By
// thread 0 of a block that reads no more.
TY_DEVICE void publish_free(const Context auto &c, u32 direction, const ty_region &region, u64 epoch) {
  if (c.free_flags == 0) return;
  ty_state *state = state_of(c);
  // N8: all loads of the other blocks happened before, as their counts are acquired.
  if (atomic_add_gpu(&state->blocks_done[direction], 1u) + 1 != block_count()) return;
  store(&state->blocks_done[direction], 0u);
  if (load_relaxed_gpu(&state->closed) != 0) return;
  // N8: acquired by wait_free.
  for (u32 peer = 0; peer < c.node_ranks; ++peer)
    store_release_sys(in_arena<u64>(c, peer, region, epoch, c.local), epoch);
}

// ---- begin and end of a phase ------------------------------------------------------------------------------

// By thread 0.
TY_DEVICE void keep_turn(u64 epoch) { store(&block_shared<LaunchShared>().epoch, epoch); }

// What a launch begins with, a trip to memory: asked for first, and looked at behind what does not depend on it.
struct TurnWords {
  u64 sent, received; // as the calling block's own
  u32 launches, call; // likewise
  u32 closed;         // or launch_overlaps, of a guarded launch
};
constexpr u32 launch_overlaps = 2;

TY_DEVICE TurnWords ask_turn(const Context auto &c, u32 direction) {
  const ty_turn *own = turn_of(c, direction);
  return {load(&own->sent), load(&own->received), load(&own->launches), load(&own->call),
          load_relaxed_gpu(&state_of(c)->closed)};
}

// Counts a block of a guarded launch, and asks anew, once for all its threads: other launches may change these words
// meanwhile, and warps that decided differently would wait for each other at barriers for ever. The launch overlaps
// another unless as many have ended on this block as have begun, and as many on all others ("Calls that overlap" in
// docs/design.md). By a whole block.
TY_DEVICE TurnWords enter_turn(const Context auto &c, u32 direction) {
  LaunchShared &shared = block_shared<LaunchShared>();
  if (thread_index() == 0) {
    ty_turn *own = turn_of(c, direction);
    u32 begun = atomic_next_gpu(&own->begun, 1), before = load_relaxed_gpu(&own->ended);
    u32 ended = load_relaxed_gpu(&state_of(c)->ended[direction]);
    TurnWords turn = ask_turn(c, direction);
    bool others = static_cast<i32>(ended - before * block_count()) < 0;
    u32 overlaps = begun == before && !others ? 0 : launch_overlaps;
    store(&shared.sent, turn.sent);
    store(&shared.received, turn.received);
    store(&shared.launches, turn.launches);
    store(&shared.call, turn.call);
    store(&shared.closed, turn.closed != 0 ? 1 : overlaps);
  }
  block_barrier();
  return {load(&shared.sent), load(&shared.received), load(&shared.launches), load(&shared.call), load(&shared.closed)};
}

// Closes the context at once if a guarded launch overlaps another one, which then ends, too. By a block, behind
// begin_faults.
TY_DEVICE void refuse_overlap(const Context auto &c, const TurnWords &turn, u32 direction) {
  if (!c.guarded || turn.closed != launch_overlaps || thread_index() != 0) return;
  keep_fault({TY_ERROR_OVERLAP, 0, c.rank, turn.sent, direction, turn.sent, turn.received});
  close(c);
}

// The words that all threads of a block go by. The context may be closed while a launch begins, by one that runs beside
// it or by other blocks, and threads that decided differently would wait for each other at barriers for ever. By a
// whole block.
TY_DEVICE TurnWords agree_turn(const Context auto &c, TurnWords turn, u32 direction) {
  if (c.guarded) return enter_turn(c, direction);
  if (!agrees_late(c)) turn.closed = block_any(turn.closed != 0) ? 1 : 0;
  return turn;
}

// Whether a thread found the context closed of which that is still to be agreed.
TY_DEVICE bool finds_closed(const Context auto &c, const TurnWords &turn) { return agrees_late(c) && turn.closed != 0; }

// A meeting of a team, behind which none goes on if one of its threads found the context closed. Whether they go on.
TY_DEVICE bool meet_open(const Context auto &c, const Team &team, bool closed) {
  if (agrees_late(c)) return !team_any(team, closed);
  team_barrier(team);
  return true;
}

// Why a launch may do nothing: TY_ORDER_*.
TY_DEVICE u32 order_problem(u32 direction, bool follows, bool in_wave, bool sends) {
  bool dispatches = direction == TY_DIRECTION_DISPATCH;
  if (!follows && sends) return dispatches ? TY_ORDER_DISPATCH_SEND : TY_ORDER_COMBINE_SEND;
  if (!follows) return dispatches ? TY_ORDER_DISPATCH_RECEIVE : TY_ORDER_COMBINE_RECEIVE;
  if (!in_wave) return TY_ORDER_WAVE;
  return dispatches ? TY_ORDER_DISPATCH_CALL : TY_ORDER_COMBINE_CALL;
}

// The epoch whose phases a launch may do, or 0: nothing. (Its wave is reckoned anew: kept, it is a register too many.)
//
// Grammar: receive(e) before send(e+1). A launch with the send phase starts epoch sent + 1 once all that was
// sent has been received; one with only the receive phase finishes the epoch in flight. It has to be of the wave that
// comes next, and all launches of a call behind its first have to be of that call: nothing is said of the waves of a
// call whose first launch was refused. All blocks decide alike, each by its own words: a launch that one of them ends,
// all do, unless the context is closed. A closed context has none, but where that is agreed late (finds_closed).
TY_DEVICE u64 begin_turn(const Context auto &c, TurnWords &turn, u32 direction, u32 phases, u32 wave, u32 call) {
  turn = agree_turn(c, turn, direction);
  u64 sent = turn.sent, received = turn.received;
  bool closed = turn.closed != 0, sends = (phases & TY_PHASE_SEND) != 0;
  bool follows = sends == (sent == received), leads = thread_index() == 0;
  Wave next = wave_of(c, sends ? sent + 1 : sent);
  bool in_wave = c.waves == 1 || next.number == wave, own = (sends && next.number == 0) || turn.call == call;
  if ((closed && !agrees_late(c)) || !follows || !in_wave || !own) next.epoch = 0;
  begin_faults();
  refuse_overlap(c, turn, direction);
  if (leads) {
    keep_turn(next.epoch);
    store(&block_shared<LaunchShared>().launches, turn.launches);
  }
  u32 order = order_problem(direction, follows, in_wave, sends);
  // Of a call's launches the first is told of: later ones are refused for what befell it.
  if (!closed && next.epoch == 0 && wave == 0 && leads && block_index() == 0)
    keep_fault({TY_ERROR_ORDER, 0, c.rank, sent, order, sent, received});
  return next.epoch;
}

// Counts a block of a launch that has ended; of one that overlapped another no word is left. Whether there is one to
// leave. By thread 0.
TY_DEVICE bool leave_turn(const Context auto &c, u32 direction) {
  if (!c.guarded) return true;
  if (load(&block_shared<LaunchShared>().closed) == launch_overlaps) return false;
  ty_turn *own = turn_of(c, direction);
  store_relaxed_gpu(&own->ended, load_relaxed_gpu(&own->ended) + 1);
  (void)atomic_next_gpu(&state_of(c)->ended[direction], 1);
  return true;
}

// Ends a block's launch. In its thread 0 the epoch whose phases are over; 0 in the block's other threads, and if the
// launch might do nothing.
TY_DEVICE u64 end_turn(const Context auto &c, u32 direction, u32 phases, u32 call) {
  block_barrier();
  if (warp_index() == 0) report_faults(c, direction);
  if (thread_index() != 0) return 0;
  note_stage(c, direction, TY_STAGE_DONE, true);
  if (!leave_turn(c, direction)) return 0;
  const LaunchShared &kept = block_shared<LaunchShared>();
  ty_turn *own = turn_of(c, direction);
  store(&own->launches, load(&kept.launches) + 1);
  u64 epoch = load(&kept.epoch);
  if (epoch == 0) return 0;
  // Of a context that was closed meanwhile nobody asks.
  store(&own->sent, epoch);
  if (c.waves > 1 || phases != (TY_PHASE_SEND | TY_PHASE_RECEIVE)) store(&own->call, call);
  if (phases & TY_PHASE_RECEIVE) store(&own->received, epoch);
  return epoch;
}

} // namespace ty
