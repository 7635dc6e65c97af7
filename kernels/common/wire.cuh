// What travels between nodes: where messages lie, doorbells, and the one thread that looks at host memory.
//
//   packers ── rows ──▶ staging ── count of the chunk ──▶ the last one rings (E1) ──▶ proxy ──▶ network
//   network ──▶ inbox, proxy ──▶ landing (E5) ──▶ relay (E6) ──▶ landed word in device memory ──▶ all blocks
//
// The proxy lists what has landed in an epoch, of whichever source, one landing behind the other: the relay reads on
// where it stopped, and so has news of any number of sources in one trip over PCIe.
//
// With several nodes the last block of every grid is the relay: its thread 0 alone polls host memory, since every
// further poller slows the host's stores. The other blocks are workers.
#pragma once
#include "common/context.cuh"

namespace ty {

// Words of host memory that a relay looks at together: one round trip over PCIe for all of them.
constexpr u32 relay_batch = 8;

// Messages under way that a relay looks at, in shared memory.
struct RelayShared {
  LaunchShared turn;
  u32 sources[TY_MAX_RANKS]; // chunks of a message << 16, once its chunk 0 has landed | how many have landed
  u32 words[relay_batch];
  u32 entries[relay_batch]; // links behind the words, or landings without their epoch
};
static_assert(TY_LANDING_CHUNK_BITS < 16, "a source's chunks are counted in 16 bits");
static_assert(sizeof(RelayShared) <= TY_COMBINE_SHARED_BYTES, "layout.h tells the launcher");
static_assert(sizeof(RelayShared) <= TY_DISPATCH_SHARED_BYTES, "layout.h tells the launcher");
static_assert(sizeof(ty_wire_head) == TY_WIRE_HEAD_BYTES, "bindings/api/plan.rs reckons with it");

TY_DEVICE u32 worker_count(const Context auto &c) { return block_count() - (spans_nodes(c) ? 1 : 0); }
TY_DEVICE bool is_relay(const Context auto &c) { return block_index() == worker_count(c); }

// Whether they are so few that what a block's warps have under way, and not memory or links, holds up a large call.
// Measured with 24 and 132 blocks (docs/performance.md, "24 SMs"); where between them it turns is not known.
TY_DEVICE bool has_few_blocks(const Context auto &c) { return worker_count(c) <= TY_FEW_BLOCKS; }

TY_DEVICE const ty_lane &lane_of(const Context auto &c, u32 lane) { return c.wire.lanes[lane]; }

// The node behind a link: links are in node order, without the own.
TY_DEVICE u32 node_of_link(const Context auto &c, u32 link) { return link + (link >= c.node ? 1 : 0); }
TY_DEVICE u32 link_of_node(const Context auto &c, u32 node) { return node - (node > c.node ? 1 : 0); }
TY_DEVICE u32 rail_of_link(const Context auto &c, u32 link) { return load(pointer<const u32>(c.wire.rails) + link); }
TY_DEVICE u32 served_home(const Context auto &c, u32 j) { return load(pointer<const u32>(c.wire.served) + j); }

// Who is behind a source, or a link, of a lane: rails on one side, the homes they serve on the other.
TY_DEVICE u32 peer_of_source(const Context auto &c, u32 lane, u32 source) {
  return lane == TY_LANE_COMBINE ? rail_of_link(c, source) : served_home(c, source);
}
TY_DEVICE u32 peer_of_link(const Context auto &c, u32 lane, u32 link) {
  return lane == TY_LANE_COMBINE ? served_home(c, link) : rail_of_link(c, link);
}

// ---- where messages lie ------------------------------------------------------------------------------------------

TY_DEVICE char *staging_of(const Context auto &c, u32 lane, u64 epoch, u32 link) {
  const ty_lane &l = lane_of(c, lane);
  return pointer<char>(c.peer_base[c.local] + l.staging + (epoch & 1) * l.staging_parity + link * l.staging_link);
}

TY_DEVICE const char *inbox_of(const Context auto &c, u32 lane, u64 epoch, u32 source) {
  const ty_lane &l = lane_of(c, lane);
  return pointer<const char>(c.peer_base[c.local] + l.inbox + (epoch & 1) * l.inbox_parity + source * l.inbox_source);
}

// The chunk of a row: those of messages with headers begin with chunk 1, so that META is under way before any is
// packed.
TY_DEVICE u32 chunk_of_row(const ty_lane &l, u32 row) {
  return divide(row + l.chunk_shift, l.chunk_rows, l.chunk_inverse).whole;
}

// Chunks of a message of `rows` rows; a head alone is one.
TY_DEVICE u32 chunks_of(const ty_lane &l, u32 rows) {
  return rows == 0 || l.row_bytes == 0 ? 1 : chunk_of_row(l, rows - 1) + 1;
}

// How many of so many rows of a message are before a chunk.
TY_DEVICE u32 rows_before_chunk(const ty_lane &l, u32 rows, u32 chunk) {
  return chunk == 0 ? 0 : smaller(chunk * l.chunk_rows - l.chunk_shift, rows);
}

// Bytes from the start of a message to one of its rows.
TY_DEVICE u64 row_offset(const ty_lane &l, u32 row) { return l.rows_offset + static_cast<u64>(row) * l.row_bytes; }

// ---- sending -----------------------------------------------------------------------------------------------------

TY_DEVICE u32 link_word(const ty_lane &l, u64 epoch, u32 link) {
  return l.first_link_word + static_cast<u32>(epoch & 1) * l.links + link;
}

// Waits until the network has read this parity's former message. By a thread. False once a deadline passed.
TY_DEVICE bool wait_staging(const Context auto &c, u32 lane, u64 epoch, u32 link) {
  if (epoch - c.first_epoch < 2) return true;
  const u64 *word = pointer<const u64>(c.wire.free) + link_word(lane_of(c, lane), epoch, link);
  // E10. Mostly it has.
  if (load_acquire_sys(word) == epoch - 2) return true;
  return wait_tag(c, word, epoch - 2, TY_SITE_STAGING, peer_of_link(c, lane, link), "wire staging");
}

// The same of links `first`, first + step, ...: a thread's share of all.
TY_DEVICE bool wait_staging_share(const Context auto &c, u32 lane, u64 epoch, u32 first, u32 step) {
  bool stuck = false;
  for (u32 link = first; link < lane_of(c, lane).targets; link += step) stuck |= !wait_staging(c, lane, epoch, link);
  return !stuck;
}

// The same of all links. By a team.
TY_DEVICE bool wait_stagings(const Context auto &c, const Team &team, u32 lane, u64 epoch) {
  return !team_any(team, !wait_staging_share(c, lane, epoch, team_thread(team), team_threads(team)));
}

// How many rows and row headers a message has.
struct WireRows {
  u32 rows;
  u32 headers;
};

// What a count of packed things is made of: a row counts its slices, which dispatch packs one by one, the head one.
constexpr u32 packed_row = TY_SLICES, packed_head = 1;

// Tells the proxy how many chunks a message has, which it reads with chunk 0's doorbell. By one thread, behind
// wait_staging and before it counts the head: the earlier the better, since the fence behind waits for what is still on
// its way to host memory.
TY_DEVICE void tell_chunks(const Context auto &c, u32 lane, u64 epoch, u32 link, u32 rows) {
  const ty_lane &l = lane_of(c, lane);
  store_relaxed_sys(pointer<u64>(c.wire.chunk_counts) + link_word(l, epoch, link),
                    static_cast<u64>(chunks_of(l, rows)));
}

// `packed` of a chunk's things are packed. By one thread, behind the barrier that follows the packing. Whoever packed
// the last rings for the chunk.
TY_DEVICE void count_packed(const Context auto &c, u32 lane, u64 epoch, u32 link, const WireRows &message, u32 chunk,
                            u32 packed) {
  u32 rows = message.rows;
  const ty_lane &l = lane_of(c, lane);
  u32 rows_here = l.row_bytes == 0 ? 0 : rows_before_chunk(l, rows, chunk + 1) - rows_before_chunk(l, rows, chunk);
  u32 all = rows_here * packed_row + (chunk == 0 ? packed_head : 0);
  u32 *counter = pointer<u32>(c.wire.counters) + l.first_counter + link * l.chunks + chunk;
  // E1: the last packer's count follows all others'.
  if (atomic_add_gpu(counter, packed) + packed != all) return;
  store(counter, 0u);
  u32 bytes = rows_here * l.row_bytes + (chunk == 0 ? TY_WIRE_HEAD_BYTES + message.headers * l.header_bytes : 0);
  u32 doorbell = l.first_doorbell + (static_cast<u32>(epoch & 1) * l.chunks + chunk) * l.links + link;
  // E1: all packers' stores happen before their count, and so before this; the proxy acquires, then the NIC reads.
  fence_acq_rel_sys();
  store_relaxed_sys(pointer<u64>(c.wire.doorbells) + doorbell, (epoch << 32) | bytes);
}

// Writes the head of a message. By one thread.
TY_DEVICE void write_wire_head(char *message, u64 epoch, u32 status, const WireRows &shape, u32 rank) {
  ty_wire_head *head = reinterpret_cast<ty_wire_head *>(message);
  store(&head->epoch, epoch);
  store(&head->status, status);
  store(&head->rows, shape.rows);
  store(&head->headers, shape.headers);
  store(&head->rank, rank);
}

// ---- receiving ---------------------------------------------------------------------------------------------------

TY_DEVICE u32 landed_word(const ty_lane &l, u64 epoch, u32 source, u32 chunk) {
  return l.first_landed + (static_cast<u32>(epoch & 1) * l.inboxes + source) * l.chunks + chunk;
}

// What a landing names, without its epoch.
TY_DEVICE u32 source_of_landing(u32 name) { return name >> TY_LANDING_CHUNK_BITS; }
TY_DEVICE u32 chunk_of_landing(u32 name) { return name & ((1u << TY_LANDING_CHUNK_BITS) - 1); }

// Waits until the relay has seen a chunk. By a thread. False once a deadline passed.
TY_DEVICE bool wait_landed(const Context auto &c, u32 lane, u64 epoch, u32 source, u32 chunk) {
  const u64 *word = pointer<const u64>(c.wire.landed) + landed_word(lane_of(c, lane), epoch, source, chunk);
  return wait_tag(c, word, epoch, TY_SITE_LANDED, peer_of_source(c, lane, source), "chunk");
}

TY_DEVICE const ty_wire_head *wire_head(const Context auto &c, u32 lane, u64 epoch, u32 source) {
  return reinterpret_cast<const ty_wire_head *>(inbox_of(c, lane, epoch, source));
}

// ---- the relay ---------------------------------------------------------------------------------------------------

// As may_wait, and looks whether the proxy has lost a peer. By the relay's thread 0.
TY_DEVICE bool may_relay(const Context auto &c, const Wait &wait, u32 turn, u64 &start, u64 expected, u64 seen) {
  if (turn % turns_between_checks != 0) return true;
  u64 lost = load_relaxed_sys(pointer<const u64>(c.wire.host_lost));
  if (lost == 0) return may_wait(c, wait, turn, start, expected, seen);
  u32 peer = static_cast<u32>(lost - 1);
  keep_fault({TY_ERROR_PEER_LOST, wait.site, peer, wait.epoch, 0, 0, now_ns() - start});
  close(c);
  return false;
}

// A word of host memory that is polled.
TY_DEVICE const u64 *polled_word(u64 host, u32 word) {
  return pointer<const u64>(host) + static_cast<u64>(word) * TY_POLLED_PITCH;
}

// Looks at up to relay_batch words and passes on those that show `expected`; answers which, a bit each. E6: acquires at
// system scope, releases to this device. By the relay's thread 0.
TY_DEVICE u32 relay_words(u64 host, u64 device, const u32 *words, u32 count, u64 expected) {
  u64 seen[relay_batch];
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i)
    seen[i] = i < count ? load_relaxed_sys(polled_word(host, load(words + i))) : ~expected;
  u32 there = 0;
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) there |= (seen[i] == expected ? 1u : 0u) << i;
  if (there == 0) return 0;
  // E6, E10: what the words announce is visible to whoever sees the words that follow.
  fence_acq_rel_sys();
  for (u32 i = 0; i < count; ++i)
    if ((there >> i) & 1) store_relaxed_gpu(pointer<u64>(device) + load(words + i), expected);
  return there;
}

// Lists up to relay_batch links, from `link` on, whose free staging is not passed on yet; answers how many. A word that
// is may be another by now where the proxy writes: its link's blocks waited for nothing, and the message may be sent.
TY_DEVICE u32 list_staging(const Context auto &c, RelayShared &shared, const ty_lane &l, u64 epoch, u32 &link) {
  u32 count = 0;
  for (; link < l.targets && count < relay_batch; ++link) {
    u32 word = link_word(l, epoch, link);
    if (load_relaxed_gpu(pointer<const u64>(c.wire.free) + word) == epoch - 2) continue;
    store(&shared.entries[count], link);
    store(&shared.words[count++], word);
  }
  return count;
}

// Passes on that staging is free, for every link of a lane; or looks once, `ahead` of the epoch, so that its launch
// need not wait for a trip over PCIe. By the relay's thread 0. False once a deadline passed.
TY_DEVICE bool relay_staging(const Context auto &c, u32 lane, u64 epoch, bool ahead = false) {
  const ty_lane &l = lane_of(c, lane);
  if (l.chunks == 0 || epoch - c.first_epoch < 2) return true;
  RelayShared &shared = block_shared<RelayShared>();
  for (u32 link = 0; link < l.targets;) {
    u32 count = list_staging(c, shared, l, epoch, link);
    u64 start = now_ns();
    // What was passed on stays so: its message may be sent by now, and its word be of this epoch.
    u32 missing = (1u << count) - 1;
    for (u32 turn = 1; missing != 0; ++turn) {
      missing &= ~relay_words(c.wire.host_free, c.wire.free, shared.words, count, epoch - 2);
      if (missing == 0 || ahead) break;
      spin_pause("wire staging");
      u32 peer = peer_of_link(c, lane, load(&shared.entries[lowest_bit(missing)]));
      if (!may_relay(c, Wait{TY_SITE_STAGING, peer, epoch, 0}, turn, start, epoch - 2, 0)) return false;
    }
  }
  return true;
}

// Looks at up to `wide` landings of an epoch behind the first `next`, and passes on those that are there, in their
// order: to the landed words that all blocks look at, and to the shared entries. Answers how many. E6, as relay_words.
// By the relay's thread 0.
TY_DEVICE u32 relay_landings(const Context auto &c, RelayShared &shared, u32 lane, u64 epoch, u32 next, u32 wide) {
  constexpr u32 name_bits = TY_LANDING_CHUNK_BITS + TY_LANDING_SOURCE_BITS;
  const ty_lane &l = lane_of(c, lane);
  u32 most = l.inboxes * l.chunks;
  u32 first = l.first_landed + static_cast<u32>(epoch & 1) * most + next;
  u32 words = smaller(most - next, wide);
  u64 names[relay_batch];
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i)
    names[i] = (i < words ? load_relaxed_sys(polled_word(c.wire.host_landed, first + i)) : ~(epoch << name_bits)) ^
               (epoch << name_bits);
  u32 there = 0;
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) there |= (names[i] >> name_bits == 0 ? 1u : 0u) << i;
  // Loads are not made in their order: what stands behind a gap is left for the next time.
  u32 count = lowest_bit(~there);
  if (count == 0) return 0;
  // E6: rows that landed are visible to whoever sees the words that follow.
  fence_acq_rel_sys();
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) store(&shared.entries[i], static_cast<u32>(names[i]));
  TY_ROLLED
  for (u32 i = 0; i < count; ++i) {
    u32 name = load(&shared.entries[i]), word = landed_word(l, epoch, source_of_landing(name), chunk_of_landing(name));
    store_relaxed_gpu(pointer<u64>(c.wire.landed) + word, epoch);
  }
  return count;
}

// Whether as many chunks of a source have landed as its message has.
TY_DEVICE bool has_landed(u32 source) { return source >> 16 != 0 && (source & 0xffff) >= source >> 16; }

// Passes on all chunks of an epoch. `rows_of(source)` says how many rows a message has, once its chunk 0 has landed.
// By the relay's thread 0. False once a deadline passed.
template <typename RowsOf> TY_DEVICE bool relay_landed(const Context auto &c, u32 lane, u64 epoch, RowsOf rows_of) {
  const ty_lane &l = lane_of(c, lane);
  if (l.chunks == 0) return true;
  RelayShared &shared = block_shared<RelayShared>();
  for (u32 source = 0; source < l.sources; ++source) store(&shared.sources[source], 0u);
  // While the first chunks are on their way.
  (void)relay_staging(c, lane, epoch + 1, true);
  u64 start = now_ns();
  // A chunk of each source may land about now, and behind as many of them any number: each further word takes time.
  u32 narrow = smaller(l.sources, relay_batch), wide = narrow, next = 0, missing = 0;
  for (u32 turn = 1;; ++turn) {
    u32 count = relay_landings(c, shared, lane, epoch, next, wide);
    TY_ROLLED
    for (u32 i = 0; i < count; ++i) {
      u32 name = load(&shared.entries[i]), source = source_of_landing(name);
      u32 chunks = chunk_of_landing(name) == 0 ? chunks_of(l, rows_of(source)) : 0;
      store(&shared.sources[source], (load(&shared.sources[source]) | chunks << 16) + 1);
    }
    next += count;
    wide = count == wide ? relay_batch : narrow;
    while (missing < l.sources && has_landed(load(&shared.sources[missing]))) ++missing;
    if (missing == l.sources) return true;
    spin_pause("chunk");
    Wait wait{TY_SITE_LANDED, peer_of_source(c, lane, missing), epoch, 0};
    if (!may_relay(c, wait, turn, start, epoch, load(&shared.sources[missing]) & 0xffff)) return false;
  }
}

} // namespace ty
