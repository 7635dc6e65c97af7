// What every kernel of the data path shares: addresses in arenas, error records, statistics, and the begin and end of a
// launch. Runs on the device; never traps.
#pragma once
#include "common/specialised.cuh"

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
TY_DEVICE ty_progress *progress_of(const Context auto &c, u32 direction) {
  return pointer<ty_progress>(c.state + sizeof(ty_state)) + direction * c.blocks + block_index();
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

// What a block keeps for the end of its launch: at the start of shared memory, so that nothing is fetched from far away
// when all else is done. Errors by whether they close the context, and by warp.
struct alignas(16) LaunchShared {
  u64 epoch;                                       // of the launch's phases; 0 (no epoch): the launch may do nothing
  u32 launches;                                    // that ended before
  u32 call;                                        // of a guarded launch: as Progress
  u32 faults[2][TY_MAX_BLOCK_THREADS / warp_size]; // how often a warp came upon one
  Fault first[2][TY_MAX_BLOCK_THREADS / warp_size];
  u64 sent, received; // of a guarded launch: as Progress
  u32 closed;
  i32 found; // of dispatch: the caller's token count
  // Where ranks may be absent, a bit for each rank of the world, as the launch began or the block found out since:
  u32 masked;
  u32 cut; // those that are masked, or whose rail is
};

// Keeps an error until the launch ends: code that reports it here would be stepped over at every wait of every launch.
TY_DEVICE void keep_fault(const Fault &found) {
  LaunchShared &shared = block_shared<LaunchShared>();
  u32 kind = found.kind;
  bool closes = kind == TY_ERROR_TIMEOUT || kind == TY_ERROR_PEER_LOST;
  u32 fatal = closes || kind == TY_ERROR_OVERLAP || kind == TY_ERROR_PAIRING || kind == TY_ERROR_FORMAT ? 1 : 0;
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

// Writes an error record, once a launch: by whichever block claims it first. A record of an error that closes the
// context is written once for good, since overlapping launches would write together. The host reads the record under
// its sequence, so a record is seen whole or not at all.
TY_DEVICE void report(const Context auto &c, u32 direction, u32 fatal, const Fault &found) {
  u32 number = fatal * TY_CALL_DIRECTIONS + direction;
  ty_state *state = state_of(c);
  u32 launch = fatal ? 1 : load(&progress_of(c, direction)->launches) + 1;
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

// Reports the errors that warps of the block kept: of either kind that of the first warp with one. By warp 0, after a
// barrier of the block.
TY_DEVICE void report_faults(const Context auto &c, u32 direction) {
  const LaunchShared &shared = block_shared<LaunchShared>();
  TY_ROLLED
  for (u32 fatal = 0; fatal < 2; ++fatal) {
    u32 there = warp_ballot(lane_index() < block_warps() && load(&shared.faults[fatal][lane_index()]) != 0);
    if (there && lane_index() == 0) report(c, direction, fatal, shared.first[fatal][lowest_bit(there)]);
  }
}

// Records that a source's routing was unusable: news for the host, not an error of this rank. By one thread.
TY_DEVICE void note_refused(const Context auto &c, u32 source, u64 call) {
  store_relaxed_sys(pointer<u64>(c.refused) + source, call);
}

// ---- work of a block --------------------------------------------------------------------------------------

// Takes the next item, counted from 0, for the calling warp alone: of its block's items, ...
TY_DEVICE u32 take_next(u32 *taken) { return shuffle(lane_index() == 0 ? atomic_add_block(taken, 1) : 0, 0); }
// ... or of all blocks' items, counted in global memory: in lane 0, so that the answer can be waited for later.
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

// ---- rounds -----------------------------------------------------------------------------------------------

// A launch's part of its call. Metadata belongs to the call, rows to the round. Computed once a launch: divisions of 64
// bits take long.
struct Round {
  u64 epoch;  // of the launch
  u64 call;   // epoch that metadata words bear
  u32 number; // of the round in its call
};

TY_DEVICE Round round_of(const Context auto &c, u64 epoch) {
  if (c.rounds == 1) return {epoch, epoch, 0};
  u64 launches = epoch - c.first_epoch;
  return {epoch, c.first_epoch + launches / c.rounds, static_cast<u32>(launches % c.rounds)};
}

TY_DEVICE bool is_last(const Context auto &c, const Round &round) { return round.number + 1 == c.rounds; }

// A round's part of a run of rows or tokens.
struct Range {
  u32 first;
  u32 end;
};

// A round's part of a rank's own tokens.
TY_DEVICE Range own_range(const Context auto &c, const Round &round, u32 tokens) {
  u32 first = round.number * c.round_tokens, end = first + c.round_tokens;
  return {first < tokens ? first : tokens, end < tokens ? end : tokens};
}

// Where rounds begin in row `i` of a handle's table: uint32 [..][rounds + 1].
TY_DEVICE u32 *round_starts(const Context auto &c, u64 table, u32 i) {
  return pointer<u32>(table) + i * (c.rounds + 1);
}

// A round's part of row `i` of such a table. The first start is 0 by definition, so lookups by it need not wait. Starts
// that stem from two overlapping calls make an empty part.
TY_DEVICE Range round_range(const Context auto &c, u64 table, u32 i, const Round &round) {
  const u32 *starts = round_starts(c, table, i) + round.number;
  Range range{round.number == 0 ? 0 : load(starts), load(starts + 1)};
  if (c.rounds > 1 && range.end - range.first > c.round_tokens) range.end = range.first;
  return range;
}

// All rows that row `i` of the table counts.
TY_DEVICE u32 all_rows(const Context auto &c, u64 table, u32 i) { return load(round_starts(c, table, i) + c.rounds); }

// Masks of this node's ranks.
struct RankMasks {
  u64 first; // address; 0: none
  bool narrow;

  TY_DEVICE u64 at(u32 i) const {
    return narrow ? load(pointer<const u8>(first) + i) : load(pointer<const u64>(first) + i);
  }
  TY_DEVICE void keep(u32 i, u64 mask) const {
    if (narrow) store(pointer<u8>(first) + i, static_cast<u8>(mask));
    else store(pointer<u64>(first) + i, mask);
  }
};

// For each own token: the ranks of this node that the token went to.
TY_DEVICE RankMasks own_masks(const ty_handle &handle) { return {handle.rank_mask, false}; }

// For each row of the call from served source j: the ranks of this node that the row goes to.
TY_DEVICE RankMasks rail_masks(const Context auto &c, const ty_handle &handle, u32 j) {
  bool narrow = c.node_ranks <= TY_NARROW_RANKS;
  return {handle.rail_mask + static_cast<u64>(j) * c.max_tokens * (narrow ? 1 : 8), narrow};
}

// An entry of a handle's slots: -1, or
//
//   31 30...............5 4....0
//    0   1 + first row     slot      where a compact handle lists the token's choices; 0 in other handles, and for none
//
// A compact handle's list of a token's choices at this rank, in the order of choices, as an entry for each output row:
//
//   63......32 31.............5 4......0
//     weight     1 + next row    choice     next row: 0 in the last
//
constexpr u32 handle_slot_bits = 5;
static_assert(TY_MAX_TOP_K <= 1 << handle_slot_bits, "slots and choices");
static_assert(TY_MAX_COMPACT_ROWS < 1 << (31 - handle_slot_bits), "rows");

struct RowChoice {
  u32 choice;
  u32 next; // 1 + the row of the token's next choice at this rank; 0: none
  float weight;

  TY_DEVICE u64 packed() const {
    return static_cast<u64>(same_bits<u32>(weight)) << 32 | next << handle_slot_bits | choice;
  }
  TY_DEVICE static RowChoice of(u64 packed) {
    u32 low = static_cast<u32>(packed);
    return {low & ((1u << handle_slot_bits) - 1), low >> handle_slot_bits,
            same_bits<float>(static_cast<u32>(packed >> 32))};
  }
};

// ---- statistics ------------------------------------------------------------------------------------------
// Where statistics are off, each costs a test of a word. Stores to host memory do not hold a thread up.

TY_DEVICE void note(const Context auto &c, u64 word, u64 value) {
  store_relaxed_sys(pointer<u64>(c.stats) + word, value);
}

// Notes that a block has finished a stage. By any number of its threads, of which one leads.
TY_DEVICE void note_stage(const Context auto &c, u32 direction, u32 stage, bool leads) {
  if (c.stats && leads) note(c, (direction * c.blocks + block_index()) * TY_STAGES + stage, now_ns());
}

TY_DEVICE void note_notified(const Context auto &c, u32 direction, u32 peer) {
  if (c.stats && block_index() == 0) note(c, 2 * c.blocks * TY_STAGES + direction * TY_MAX_RANKS + peer, now_ns());
}

TY_DEVICE void note_rows(const Context auto &c, u32 peer, u32 rows) {
  if (c.stats) note(c, 2 * c.blocks * TY_STAGES + 2 * TY_MAX_RANKS + peer, static_cast<u64>(rows) * c.slot_bytes);
}

// How long a launch waits for each rank, added to what is there. `times`: null where nobody asks.
struct WaitTimes {
  u64 *times;
  u64 began;

  // Once what is awaited of the rank is here. By one thread.
  TY_DEVICE void add(u32 rank) const {
    if (times) store(times + rank, load(times + rank) + now_ns() - began);
  }
};

TY_DEVICE WaitTimes begin_waits(u64 times) { return {pointer<u64>(times), times ? now_ns() : 0}; }

// Counts the calling block as done with its launch. True if it is the last of `blocks`, unless the context is closed.
// By thread 0.
TY_DEVICE bool is_last_done(const Context auto &c, u32 direction, u32 blocks) {
  ty_state *state = state_of(c);
  // N8, N15: all that the other blocks did happens before, as their counts are acquired.
  if (atomic_add_gpu(&state->blocks_done[direction], 1u) + 1 != blocks) return false;
  store(&state->blocks_done[direction], 0u);
  return load_relaxed_gpu(&state->closed) == 0;
}

// Closes the context of this rank: waits end, and launches do nothing.
TY_DEVICE void close(const Context auto &c) {
  // N7: seen by every wait loop and every kernel's start.
  store_release_gpu(&state_of(c)->closed, 1u);
}

// ---- begin and end of a launch -----------------------------------------------------------------------------

// By thread 0.
TY_DEVICE void keep_epoch(u64 epoch) { store(&block_shared<LaunchShared>().epoch, epoch); }

// The words that a launch begins with, a trip to memory: loaded first, used after whatever does not depend on them.
struct Progress {
  u64 sent, received; // as the calling block's own
  u32 launches, call; // likewise
  u32 closed;         // or launch_overlaps, of a guarded launch
};
constexpr u32 launch_overlaps = 2;

TY_DEVICE Progress ask_progress(const Context auto &c, u32 direction) {
  const ty_progress *own = progress_of(c, direction);
  return {load(&own->sent), load(&own->received), load(&own->launches), load(&own->call),
          load_relaxed_gpu(&state_of(c)->closed)};
}

// Counts a block of a guarded launch, and loads the words again, once for all its threads: other launches may change
// them meanwhile, and warps that decided differently would wait for each other at barriers for ever. The launch
// overlaps another one unless as many launches have ended on this block as have begun, and as many on all other blocks
// ("Calls that overlap" in docs/failure.md). By a whole block.
TY_DEVICE Progress enter_guarded(const Context auto &c, u32 direction) {
  LaunchShared &shared = block_shared<LaunchShared>();
  if (thread_index() == 0) {
    ty_progress *own = progress_of(c, direction);
    u32 begun = atomic_next_gpu(&own->begun, 1), before = load_relaxed_gpu(&own->ended);
    u32 ended = load_relaxed_gpu(&state_of(c)->ended[direction]);
    Progress progress = ask_progress(c, direction);
    bool others = static_cast<i32>(ended - before * block_count()) < 0;
    u32 overlaps = begun == before && !others ? 0 : launch_overlaps;
    store(&shared.sent, progress.sent);
    store(&shared.received, progress.received);
    store(&shared.launches, progress.launches);
    store(&shared.call, progress.call);
    store(&shared.closed, progress.closed != 0 ? 1 : overlaps);
  }
  block_barrier();
  return {load(&shared.sent), load(&shared.received), load(&shared.launches), load(&shared.call), load(&shared.closed)};
}

// Closes the context at once if a guarded launch overlaps another one, whose waits then end. By a block, after
// begin_faults.
TY_DEVICE void refuse_overlap(const Context auto &c, const Progress &progress, u32 direction) {
  if (!c.guarded || progress.closed != launch_overlaps || thread_index() != 0) return;
  keep_fault({TY_ERROR_OVERLAP, 0, c.rank, progress.sent, direction, progress.sent, progress.received});
  close(c);
}

// The words that all threads of a block act on. Launches that run beside this one, or other blocks of it, may close the
// context meanwhile, and threads that decided differently would wait for each other at barriers for ever. By a whole
// block.
TY_DEVICE Progress agree_progress(const Context auto &c, Progress progress, u32 direction) {
  if (c.guarded) return enter_guarded(c, direction);
  if (!agrees_late(c)) progress.closed = block_any(progress.closed != 0) ? 1 : 0;
  return progress;
}

// Whether a team whose wait failed goes on all the same: the rank that it waited for may be absent, and the context is
// open. By the team.
TY_DEVICE bool goes_without(const Context auto &c, const Team &team) {
  if (!tolerates_absence(c)) return false;
  return !team_any(team, team_thread(team) == 0 && load_relaxed_gpu(&state_of(c)->closed) != 0);
}

// Whether a thread found the context closed and the block has yet to agree on that.
TY_DEVICE bool finds_closed(const Context auto &c, const Progress &progress) {
  return agrees_late(c) && progress.closed != 0;
}

// A meeting of a team. True if the team goes on: false for all if one of its threads found the context closed.
TY_DEVICE bool meet_open(const Context auto &c, const Team &team, bool closed) {
  if (agrees_late(c)) return !team_any(team, closed);
  team_barrier(team);
  return true;
}

// Why a launch may do nothing: TY_ORDER_*.
TY_DEVICE u32 order_problem(u32 direction, bool follows, bool in_round, bool sends) {
  bool dispatches = direction == TY_DIRECTION_DISPATCH;
  if (!follows && sends) return dispatches ? TY_ORDER_DISPATCH_SEND : TY_ORDER_COMBINE_SEND;
  if (!follows) return dispatches ? TY_ORDER_DISPATCH_RECEIVE : TY_ORDER_COMBINE_RECEIVE;
  if (!in_round) return TY_ORDER_ROUND;
  return dispatches ? TY_ORDER_DISPATCH_CALL : TY_ORDER_COMBINE_CALL;
}

// The epoch whose phases a launch may do; 0: none. (The round is computed again: kept, it is a register too many.)
//
// Grammar: receive(e) before send(e+1). A launch with the send phase starts epoch sent + 1 once all that was sent has
// been received; one with the receive phase alone finishes the epoch in flight. The launch must be of the next round,
// and every launch of a call but the first must be of the same call as the launch before: rounds of a call whose first
// launch was refused report nothing. All blocks decide alike, each by its own words: a launch that one block ends, all
// end, unless the context is closed. A closed context has no epoch, unless the block agrees late (finds_closed).
TY_DEVICE u64 begin_launch(const Context auto &c, Progress &progress, u32 direction, u32 phases, u32 round, u32 call) {
  progress = agree_progress(c, progress, direction);
  u64 sent = progress.sent, received = progress.received;
  bool closed = progress.closed != 0, sends = (phases & TY_PHASE_SEND) != 0;
  bool follows = sends == (sent == received), leads = thread_index() == 0;
  Round next = round_of(c, sends ? sent + 1 : sent);
  bool in_round = c.rounds == 1 || next.number == round, own = (sends && next.number == 0) || progress.call == call;
  if ((closed && !agrees_late(c)) || !follows || !in_round || !own) next.epoch = 0;
  begin_faults();
  refuse_overlap(c, progress, direction);
  if (leads) {
    keep_epoch(next.epoch);
    store(&block_shared<LaunchShared>().launches, progress.launches);
  }
  u32 order = order_problem(direction, follows, in_round, sends);
  // The first launch of a call reports for all: later launches are refused for the same reason.
  if (!closed && next.epoch == 0 && round == 0 && leads && block_index() == 0)
    keep_fault({TY_ERROR_ORDER, 0, c.rank, sent, order, sent, received});
  return next.epoch;
}

// Counts a block of a launch that has ended. False for a launch that overlapped another: the block's words must stay as
// they are. By thread 0.
TY_DEVICE bool leave_launch(const Context auto &c, u32 direction) {
  if (!c.guarded) return true;
  if (load(&block_shared<LaunchShared>().closed) == launch_overlaps) return false;
  ty_progress *own = progress_of(c, direction);
  store_relaxed_gpu(&own->ended, load_relaxed_gpu(&own->ended) + 1);
  (void)atomic_next_gpu(&state_of(c)->ended[direction], 1);
  return true;
}

// Ends a block's launch. Returns, in thread 0, the epoch whose phases are over; 0 in the block's other threads, and if
// the launch might do nothing.
TY_DEVICE u64 end_launch(const Context auto &c, u32 direction, u32 phases, u32 call) {
  block_barrier();
  if (warp_index() == 0) report_faults(c, direction);
  if (thread_index() != 0) return 0;
  note_stage(c, direction, TY_STAGE_DONE, true);
  if (!leave_launch(c, direction)) return 0;
  const LaunchShared &kept = block_shared<LaunchShared>();
  ty_progress *own = progress_of(c, direction);
  store(&own->launches, load(&kept.launches) + 1);
  u64 epoch = load(&kept.epoch);
  if (epoch == 0) return 0;
  // Of a context that was closed meanwhile, nobody reads these words.
  store(&own->sent, epoch);
  if (c.rounds > 1 || phases != (TY_PHASE_SEND | TY_PHASE_RECEIVE)) store(&own->call, call);
  if (phases & TY_PHASE_RECEIVE) store(&own->received, epoch);
  return epoch;
}

} // namespace ty
