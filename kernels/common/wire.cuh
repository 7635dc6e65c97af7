// Messages between nodes: where they lie, doorbells, and the one thread that polls host memory.
//
//   packers ── rows ──▶ staging ── count of the chunk ──▶ the last one rings (E1) ──▶ proxy ──▶ network
//   network ──▶ receive buffer, proxy ──▶ arrival (E5) ──▶ relay (E6) ──▶ arrived word in device memory ──▶ all blocks
//
// The proxy lists all arrivals of an epoch, of whichever source, one after the other. The relay reads on where it
// stopped, so one trip over PCIe shows the arrivals of any number of sources.
//
// With several nodes the last block of every grid is the relay. Its thread 0 alone polls host memory, since every
// further poller slows the host's stores. The other blocks are workers.
#pragma once
#include "common/waits.cuh"

namespace ty {

// Words of host memory that a relay loads together, in one round trip over PCIe.
constexpr u32 relay_batch = 8;

// What the relay keeps of messages under way, in shared memory.
struct RelayShared {
  LaunchShared launch;
  // 31..16: chunks of the message, once its chunk 0 has arrived; 15..0: how many have arrived.
  u32 sources[TY_MAX_RANKS];
  u32 words[relay_batch];
  u32 entries[relay_batch]; // links of the words, or arrivals without their epoch
};
static_assert(TY_ARRIVAL_CHUNK_BITS < 16, "a source's chunks are counted in 16 bits");
static_assert(sizeof(RelayShared) <= TY_COMBINE_SHARED_BYTES, "layout.h sizes the launch");
static_assert(sizeof(RelayShared) <= TY_DISPATCH_SHARED_BYTES, "layout.h sizes the launch");
static_assert(sizeof(ty_wire_head) == TY_WIRE_HEAD_BYTES, "bindings/api/plan.rs computes with it");

TY_DEVICE u32 worker_count(const Context auto &c) { return block_count() - (spans_nodes(c) ? 1 : 0); }
TY_DEVICE bool is_relay(const Context auto &c) { return block_index() == worker_count(c); }

// Whether blocks are so few that a large call is limited by what a block's warps have under way, not by memory or
// links. Measured with 24 and 132 blocks (docs/notebook.md, "24 SMs"); the crossover between them is not known.
TY_DEVICE bool has_few_blocks(const Context auto &c) { return worker_count(c) <= TY_FEW_BLOCKS; }

TY_DEVICE const ty_wire_layout &layout_of(const Context auto &c, u32 direction) { return c.wire.layouts[direction]; }

// The node of a link: links are in node order, without the own node.
TY_DEVICE u32 node_of_link(const Context auto &c, u32 link) { return link + (link >= c.node ? 1 : 0); }
TY_DEVICE u32 link_of_node(const Context auto &c, u32 node) { return node - (node > c.node ? 1 : 0); }
TY_DEVICE u32 rail_of_link(const Context auto &c, u32 link) { return load(pointer<const u32>(c.wire.rails) + link); }
TY_DEVICE u32 served_source(const Context auto &c, u32 j) { return load(pointer<const u32>(c.wire.served) + j); }

// The rank at the other end of a source, or of a link, of a direction: a rail on one side, the source it serves on the
// other.
TY_DEVICE u32 peer_of_source(const Context auto &c, u32 direction, u32 source) {
  return direction == TY_DIRECTION_COMBINE ? rail_of_link(c, source) : served_source(c, source);
}
TY_DEVICE u32 peer_of_link(const Context auto &c, u32 direction, u32 link) {
  return direction == TY_DIRECTION_COMBINE ? served_source(c, link) : rail_of_link(c, link);
}

// Whether the rank at the other end of a link, or of a source, gets nothing of this launch.
TY_DEVICE bool is_link_out(const Context auto &c, u32 direction, u32 link) {
  return tolerates_absence(c) && was_masked(c, peer_of_link(c, direction, link));
}
TY_DEVICE bool is_source_out(const Context auto &c, u32 direction, u32 source) {
  return tolerates_absence(c) && was_masked(c, peer_of_source(c, direction, source));
}

// ---- where messages lie ------------------------------------------------------------------------------------------

TY_DEVICE char *staging_of(const Context auto &c, u32 direction, u64 epoch, u32 link) {
  const ty_wire_layout &l = layout_of(c, direction);
  return pointer<char>(c.peer_base[c.local] + l.staging + (epoch & 1) * l.staging_parity + link * l.staging_link);
}

TY_DEVICE const char *recv_buffer_of(const Context auto &c, u32 direction, u64 epoch, u32 source) {
  const ty_wire_layout &l = layout_of(c, direction);
  return pointer<const char>(c.peer_base[c.local] + l.recv_buffer + (epoch & 1) * l.recv_buffer_parity +
                             source * l.recv_buffer_source);
}

// The chunk of a row. Rows of messages with headers begin with chunk 1, so that chunk 0, the metadata, is under way
// before any row is packed.
TY_DEVICE u32 chunk_of_row(const ty_wire_layout &l, u32 row) {
  return divide(row + l.chunk_shift, l.chunk_rows, l.chunk_inverse).whole;
}

// Chunks of a message of `rows` rows; a head alone is one.
TY_DEVICE u32 chunks_of(const ty_wire_layout &l, u32 rows) {
  return rows == 0 || l.row_bytes == 0 ? 1 : chunk_of_row(l, rows - 1) + 1;
}

// Of a message's `rows` rows, how many come before a chunk.
TY_DEVICE u32 rows_before_chunk(const ty_wire_layout &l, u32 rows, u32 chunk) {
  return chunk == 0 ? 0 : smaller(chunk * l.chunk_rows - l.chunk_shift, rows);
}

// Bytes from the start of a message to one of its rows.
TY_DEVICE u64 row_offset(const ty_wire_layout &l, u32 row) {
  return l.rows_offset + static_cast<u64>(row) * l.row_bytes;
}

// ---- sending -----------------------------------------------------------------------------------------------------

TY_DEVICE u32 link_word(const ty_wire_layout &l, u64 epoch, u32 link) {
  return l.first_link_word + static_cast<u32>(epoch & 1) * l.links + link;
}

// Waits until the network has read the previous message of this parity; where the peer may be absent, leaves it out of
// the launch if it is, unless the message is of weights. By a thread. False once a deadline passed.
TY_DEVICE bool wait_staging(const Context auto &c, u32 direction, u64 epoch, u32 link) {
  if (epoch - c.first_epoch < 2) return true;
  const u64 *word = pointer<const u64>(c.wire.free) + link_word(layout_of(c, direction), epoch, link);
  // E10. Mostly the network already has.
  if (load_acquire_sys(word) == epoch - 2) return true;
  if (is_link_out(c, direction, link)) return true;
  u32 peer = peer_of_link(c, direction, link);
  if (wait_tag(c, word, epoch - 2, TY_SITE_STAGING, peer, "wire staging", direction)) return true;
  if (fails(c, false)) return false;
  // Others of the block may be adding rows up: who sends weights decides for itself, and sums with rows of the peer's
  // node and without are made again without.
  if (direction == TY_DIRECTION_WEIGHTS) return true;
  if (direction == TY_DIRECTION_COMBINE) drop_rank(c, direction, epoch, peer);
  leave_out(c, peer);
  return true;
}

// The same of links `first`, first + step, ...: a thread's share of all.
TY_DEVICE bool wait_staging_share(const Context auto &c, u32 direction, u64 epoch, u32 first, u32 step) {
  bool stuck = false;
  for (u32 link = first; link < layout_of(c, direction).targets; link += step)
    stuck |= !wait_staging(c, direction, epoch, link);
  return !stuck;
}

// The same of all links. By a team.
TY_DEVICE bool wait_stagings(const Context auto &c, const Team &team, u32 direction, u64 epoch) {
  return !team_any(team, !wait_staging_share(c, direction, epoch, team_thread(team), team_threads(team)));
}

// How many rows and row headers a message has.
struct WireRows {
  u32 rows;
  u32 headers;
};

// Units in which packed things are counted: a row counts its slices, which dispatch packs one by one; the head is 1.
constexpr u32 packed_row = TY_SLICES, packed_head = 1;

// Publishes to the proxy how many chunks a message has; the proxy reads the word with chunk 0's doorbell. By one
// thread, after wait_staging and before it counts the head. The earlier the better: the fence that follows waits for
// stores that are still on their way to host memory.
TY_DEVICE void publish_chunks(const Context auto &c, u32 direction, u64 epoch, u32 link, u32 rows) {
  const ty_wire_layout &l = layout_of(c, direction);
  store_relaxed_sys(pointer<u64>(c.wire.chunk_counts) + link_word(l, epoch, link),
                    static_cast<u64>(chunks_of(l, rows)));
}

// Counts `packed` units of a chunk as packed. By one thread, after the barrier that follows the packing. The thread
// that counts the last unit rings for the chunk.
TY_DEVICE void count_packed(const Context auto &c, u32 direction, u64 epoch, u32 link, const WireRows &message,
                            u32 chunk, u32 packed) {
  u32 rows = message.rows;
  const ty_wire_layout &l = layout_of(c, direction);
  u32 rows_here = l.row_bytes == 0 ? 0 : rows_before_chunk(l, rows, chunk + 1) - rows_before_chunk(l, rows, chunk);
  u32 all = rows_here * packed_row + (chunk == 0 ? packed_head : 0);
  u32 *counter = pointer<u32>(c.wire.counters) + l.first_counter + link * l.chunks + chunk;
  // E1: the last packer's count comes after all others'.
  if (atomic_add_gpu(counter, packed) + packed != all) return;
  store(counter, 0u);
  u32 bytes = rows_here * l.row_bytes + (chunk == 0 ? TY_WIRE_HEAD_BYTES + message.headers * l.header_bytes : 0);
  u32 doorbell = l.first_doorbell + (static_cast<u32>(epoch & 1) * l.chunks + chunk) * l.links + link;
  // E1: all packers' stores happen before their counts, and so before this; the proxy acquires, then the NIC reads.
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

TY_DEVICE u32 arrived_word(const ty_wire_layout &l, u64 epoch, u32 source, u32 chunk) {
  return l.first_arrived + (static_cast<u32>(epoch & 1) * l.recv_buffers + source) * l.chunks + chunk;
}

// The source and chunk in an arrival, without its epoch.
TY_DEVICE u32 source_of_arrival(u32 name) { return name >> TY_ARRIVAL_CHUNK_BITS; }
TY_DEVICE u32 chunk_of_arrival(u32 name) { return name & ((1u << TY_ARRIVAL_CHUNK_BITS) - 1); }

// Waits until the relay has seen a chunk. By a thread. False once a deadline passed, or if the source is masked.
TY_DEVICE bool wait_arrived(const Context auto &c, u32 direction, u64 epoch, u32 source, u32 chunk) {
  const u64 *word = pointer<const u64>(c.wire.arrived) + arrived_word(layout_of(c, direction), epoch, source, chunk);
  if (is_source_out(c, direction, source)) return false;
  return wait_tag(c, word, epoch, TY_SITE_ARRIVED, peer_of_source(c, direction, source), "chunk", direction);
}

TY_DEVICE const ty_wire_head *wire_head(const Context auto &c, u32 direction, u64 epoch, u32 source) {
  return reinterpret_cast<const ty_wire_head *>(recv_buffer_of(c, direction, epoch, source));
}

// ---- the relay ---------------------------------------------------------------------------------------------------

// A word of host memory that is polled.
TY_DEVICE const u64 *polled_word(u64 host, u32 word) {
  return pointer<const u64>(host) + static_cast<u64>(word) * TY_POLLED_PITCH;
}

// As may_wait, and looks whether the proxy has lost a peer; where ranks may be absent, the peer that is waited for, or
// itself. By the relay's thread 0.
TY_DEVICE bool may_relay(const Context auto &c, const Wait &wait, u32 poll, u64 &start, u64 expected, u64 seen) {
  if (poll % polls_between_checks != 0) return true;
  u64 lost = load_relaxed_sys(polled_word(c.wire.host_lost, 0));
  if (lost == 0 && !tolerates_absence(c)) return may_wait(c, wait, poll, start, expected, seen);
  u32 peer = static_cast<u32>(lost - 1);
  if (tolerates_absence(c)) {
    const u32 *names = pointer<const u32>(c.rank_names);
    u32 own = names ? load(names + c.rank) : c.rank, name = names ? load(names + wait.peer) : wait.peer;
    u64 sign = load_relaxed_sys(polled_word(c.wire.host_lost, 1 + name));
    if (lost == 0 || peer != own) {
      if (sign != ~0ull || is_masked(c, wait.peer)) return may_wait(c, wait, poll, start, expected, seen, sign);
      if (c.absences.masks_silent) return mask_silent(c, direction_of(wait), wait.peer, wait.epoch), false;
      peer = name;
    }
  }
  keep_fault({TY_ERROR_PEER_LOST, wait.site, peer, wait.epoch, 0, 0, now_ns() - start});
  close(c);
  return false;
}

// Looks at up to relay_batch words and passes on those that equal `expected`; returns which, one bit each. E6: acquires
// at system scope, releases to this device. By the relay's thread 0.
TY_DEVICE u32 relay_words(u64 host, u64 device, const u32 *words, u32 count, u64 expected) {
  u64 seen[relay_batch];
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i)
    seen[i] = i < count ? load_relaxed_sys(polled_word(host, load(words + i))) : ~expected;
  u32 there = 0;
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) there |= (seen[i] == expected ? 1u : 0u) << i;
  if (there == 0) return 0;
  // E6, E10: what the words announce is visible to whoever sees the words stored after this fence.
  fence_acq_rel_sys();
  for (u32 i = 0; i < count; ++i)
    if ((there >> i) & 1) store_relaxed_gpu(pointer<u64>(device) + load(words + i), expected);
  return there;
}

// Lists up to relay_batch links, from `link` on, whose free staging is not passed on yet; returns how many. The proxy's
// word of a link that was passed on may have changed since: the link's next message may already be sent.
TY_DEVICE u32 list_staging(const Context auto &c, RelayShared &shared, u32 direction, u64 epoch, u32 &link) {
  const ty_wire_layout &l = layout_of(c, direction);
  u32 count = 0;
  for (; link < l.targets && count < relay_batch; ++link) {
    u32 word = link_word(l, epoch, link);
    if (load_relaxed_gpu(pointer<const u64>(c.wire.free) + word) == epoch - 2) continue;
    if (is_link_out(c, direction, link)) continue;
    store(&shared.entries[count], link);
    store(&shared.words[count++], word);
  }
  return count;
}

// Passes on that staging is free, for every link of a direction; with `ahead`, looks once, before the epoch begins, so
// that its launch need not wait for a trip over PCIe. By the relay's thread 0. False once a deadline passed.
TY_DEVICE bool relay_staging(const Context auto &c, u32 direction, u64 epoch, bool ahead = false) {
  const ty_wire_layout &l = layout_of(c, direction);
  if (l.chunks == 0 || epoch - c.first_epoch < 2) return true;
  RelayShared &shared = block_shared<RelayShared>();
  for (u32 link = 0; link < l.targets;) {
    u32 count = list_staging(c, shared, direction, epoch, link);
    u64 start = now_ns();
    // A link that was passed on stays so: its message may be sent by now, and its word then holds this epoch.
    u32 missing = (1u << count) - 1;
    for (u32 poll = 1; missing != 0; ++poll) {
      missing &= ~relay_words(c.wire.host_free, c.wire.free, shared.words, count, epoch - 2);
      if (missing == 0 || ahead) break;
      spin_pause("wire staging");
      u32 first = lowest_bit(missing), peer = peer_of_link(c, direction, load(&shared.entries[first]));
      bool waits = may_relay(c, Wait{TY_SITE_STAGING, peer, epoch, 0, direction}, poll, start, epoch - 2, 0);
      if (fails(c, waits)) return false;
      if (!waits) missing &= ~(1u << first);
    }
  }
  return true;
}

// Looks at up to `wide` arrivals of an epoch from number `next` on, and passes on those that are there, in order: to
// the arrived words that all blocks poll, and to the shared entries. Returns how many. E6, as relay_words. By the
// relay's thread 0.
TY_DEVICE u32 relay_arrivals(const Context auto &c, RelayShared &shared, u32 direction, u64 epoch, u32 next, u32 wide) {
  constexpr u32 name_bits = TY_ARRIVAL_CHUNK_BITS + TY_ARRIVAL_SOURCE_BITS;
  const ty_wire_layout &l = layout_of(c, direction);
  u32 most = l.recv_buffers * l.chunks;
  u32 first = l.first_arrived + static_cast<u32>(epoch & 1) * most + next;
  u32 words = smaller(most - next, wide);
  u64 names[relay_batch];
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i)
    names[i] = (i < words ? load_relaxed_sys(polled_word(c.wire.host_arrivals, first + i)) : ~(epoch << name_bits)) ^
               (epoch << name_bits);
  u32 there = 0;
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) there |= (names[i] >> name_bits == 0 ? 1u : 0u) << i;
  // Loads are not made in order: arrivals after a gap are left for the next time.
  u32 count = lowest_bit(~there);
  if (count == 0) return 0;
  // E6: arrived rows are visible to whoever sees the words stored after this fence.
  fence_acq_rel_sys();
  TY_UNROLL
  for (u32 i = 0; i < relay_batch; ++i) store(&shared.entries[i], static_cast<u32>(names[i]));
  TY_ROLLED
  for (u32 i = 0; i < count; ++i) {
    u32 name = load(&shared.entries[i]), word = arrived_word(l, epoch, source_of_arrival(name), chunk_of_arrival(name));
    store_relaxed_gpu(pointer<u64>(c.wire.arrived) + word, epoch);
  }
  return count;
}

// Whether as many chunks of a source have arrived as its message has.
TY_DEVICE bool has_arrived(u32 source) { return source >> 16 != 0 && (source & 0xffff) >= source >> 16; }

// What the relay keeps of a source from which it expects nothing more.
constexpr u32 source_absent = 1u << 16 | 1;

// Passes on all chunks of an epoch. `rows_of(source)` returns how many rows a message has, once its chunk 0 has
// arrived. By the relay's thread 0. False once a deadline passed.
template <typename RowsOf>
TY_DEVICE bool relay_arrived(const Context auto &c, u32 direction, u64 epoch, RowsOf rows_of) {
  const ty_wire_layout &l = layout_of(c, direction);
  if (l.chunks == 0) return true;
  RelayShared &shared = block_shared<RelayShared>();
  for (u32 source = 0; source < l.sources; ++source)
    store(&shared.sources[source], is_source_out(c, direction, source) ? source_absent : 0u);
  // While the first chunks are on their way.
  (void)relay_staging(c, direction, epoch + 1, true);
  u64 start = now_ns();
  // About now one chunk of each source may arrive; any number may follow later. Each further word takes time.
  u32 narrow = smaller(l.sources, relay_batch), wide = narrow, next = 0, missing = 0;
  for (u32 poll = 1;; ++poll) {
    u32 count = relay_arrivals(c, shared, direction, epoch, next, wide);
    TY_ROLLED
    for (u32 i = 0; i < count; ++i) {
      u32 name = load(&shared.entries[i]), source = source_of_arrival(name);
      u32 chunks = chunk_of_arrival(name) == 0 ? chunks_of(l, rows_of(source)) : 0;
      store(&shared.sources[source], (load(&shared.sources[source]) | chunks << 16) + 1);
    }
    next += count;
    wide = count == wide ? relay_batch : narrow;
    while (missing < l.sources && has_arrived(load(&shared.sources[missing]))) ++missing;
    if (missing == l.sources) return true;
    spin_pause("chunk");
    Wait wait{TY_SITE_ARRIVED, peer_of_source(c, direction, missing), epoch, 0, direction};
    bool waits = may_relay(c, wait, poll, start, epoch, load(&shared.sources[missing]) & 0xffff);
    if (fails(c, waits)) return false;
    if (!waits) store(&shared.sources[missing], source_absent);
  }
}

} // namespace ty
