// What travels between nodes: where messages lie, doorbells, and the one thread that looks at host memory.
//
//   packers ── rows ──▶ staging ── count of the chunk ──▶ the last one rings (E1) ──▶ proxy ──▶ network
//   network ──▶ inbox, proxy ──▶ landed word (E5) ──▶ relay (E6) ──▶ landed word in device memory ──▶ all blocks
//
// With several nodes the last block of every grid is the relay: its thread 0 alone polls host memory, since every
// further poller slows the host's stores. The other blocks are workers.
#pragma once
#include "context.cuh"

namespace ty {

// Messages under way that a relay looks at, in shared memory.
struct RelayShared {
  u32 next[TY_MAX_RANKS];   // by source: chunks before this one have landed
  u32 beyond[TY_MAX_RANKS]; // bit i: chunk next + 1 + i has landed, too
};
static_assert(sizeof(RelayShared) <= TY_COMBINE_SHARED_BYTES, "layout.h tells the launcher");
static_assert(sizeof(RelayShared) <= TY_DISPATCH_SHARED_BYTES, "layout.h tells the launcher");
static_assert(sizeof(ty_wire_head) == TY_WIRE_HEAD_BYTES, "proxy/plan.rs reckons with it");

TY_DEVICE bool spans_nodes(const ty_context &c) { return c.nodes > 1; }
TY_DEVICE u32 worker_count(const ty_context &c) { return block_count() - (spans_nodes(c) ? 1 : 0); }
TY_DEVICE bool is_relay(const ty_context &c) { return block_index() == worker_count(c); }

TY_DEVICE const ty_lane &lane_of(const ty_context &c, u32 lane) { return c.wire.lanes[lane]; }

// The node behind a link: links are in node order, without the own.
TY_DEVICE u32 node_of_link(const ty_context &c, u32 link) { return link + (link >= c.node ? 1 : 0); }
TY_DEVICE u32 link_of_node(const ty_context &c, u32 node) { return node - (node > c.node ? 1 : 0); }
TY_DEVICE u32 rail_of_link(const ty_context &c, u32 link) { return load(pointer<const u32>(c.wire.rails) + link); }
TY_DEVICE u32 served_home(const ty_context &c, u32 j) { return load(pointer<const u32>(c.wire.served) + j); }

// Who is behind a source, or a link, of a lane: rails on one side, the homes they serve on the other.
TY_DEVICE u32 peer_of_source(const ty_context &c, u32 lane, u32 source) {
  return lane == TY_LANE_COMBINE ? rail_of_link(c, source) : served_home(c, source);
}
TY_DEVICE u32 peer_of_link(const ty_context &c, u32 lane, u32 link) {
  return lane == TY_LANE_COMBINE ? served_home(c, link) : rail_of_link(c, link);
}

// ---- where messages lie ------------------------------------------------------------------------------------------

TY_DEVICE char *staging_of(const ty_context &c, u32 lane, u64 epoch, u32 link) {
  const ty_lane &l = lane_of(c, lane);
  return pointer<char>(c.peer_base[c.local] + l.staging + (epoch & 1) * l.staging_parity + link * l.staging_link);
}

TY_DEVICE const char *inbox_of(const ty_context &c, u32 lane, u64 epoch, u32 source) {
  const ty_lane &l = lane_of(c, lane);
  return pointer<const char>(c.peer_base[c.local] + l.inbox + (epoch & 1) * l.inbox_parity + source * l.inbox_source);
}

TY_DEVICE u32 chunk_of_row(const ty_lane &l, u32 row) { return row / l.chunk_rows; }

// Chunks of a message of `rows` rows; a head alone is one.
TY_DEVICE u32 chunks_of(const ty_lane &l, u32 rows) {
  return rows == 0 || l.row_bytes == 0 ? 1 : (rows + l.chunk_rows - 1) / l.chunk_rows;
}

// Bytes before the rows of chunk 0.
TY_DEVICE u32 head_and_headers(const ty_lane &l, u32 rows) { return TY_WIRE_HEAD_BYTES + rows * l.header_bytes; }

// Bytes from the start of a message of `rows` rows to one of them.
TY_DEVICE u64 row_offset(const ty_lane &l, u32 rows, u32 row) {
  u32 chunk = chunk_of_row(l, row);
  u64 start = chunk == 0 ? head_and_headers(l, rows) : l.head_bytes + static_cast<u64>(chunk) * l.chunk_bytes;
  return start + static_cast<u64>(row % l.chunk_rows) * l.row_bytes;
}

// ---- sending -----------------------------------------------------------------------------------------------------

TY_DEVICE u32 link_word(const ty_lane &l, u64 epoch, u32 link) {
  return l.first_link_word + static_cast<u32>(epoch & 1) * l.links + link;
}

// Waits until the network has read this parity's former message. By a thread. False once a deadline passed.
TY_DEVICE bool wait_staging(const ty_context &c, u32 direction, u32 lane, u64 epoch, u32 link) {
  if (epoch - c.first_epoch < 2) return true;
  const u64 *word = pointer<const u64>(c.wire.free) + link_word(lane_of(c, lane), epoch, link);
  return wait_tag(c, direction, word, epoch - 2, TY_SITE_STAGING, peer_of_link(c, lane, link), "wire staging");
}

// One thing of a chunk is packed: a row, or the head in chunk 0. By one thread, behind the barrier that follows the
// packing. Whoever packed the last rings for the chunk.
TY_DEVICE void count_packed(const ty_context &c, u32 lane, u64 epoch, u32 link, u32 rows, u32 chunk) {
  const ty_lane &l = lane_of(c, lane);
  u32 left = rows - chunk * l.chunk_rows;
  u32 rows_here = l.row_bytes == 0 ? 0 : left < l.chunk_rows ? left : l.chunk_rows;
  u32 *counter = pointer<u32>(c.wire.counters) + l.first_counter + link * l.chunks + chunk;
  if (atomic_add_gpu(counter, 1u) + 1 != rows_here + (chunk == 0 ? 1 : 0)) return;
  store(counter, 0u);
  u32 bytes = rows_here * l.row_bytes + (chunk == 0 ? head_and_headers(l, rows) : 0);
  if (chunk == 0)
    store_relaxed_sys(pointer<u64>(c.wire.chunk_counts) + link_word(l, epoch, link),
                      static_cast<u64>(chunks_of(l, rows)));
  u32 doorbell = l.first_doorbell + (static_cast<u32>(epoch & 1) * l.chunks + chunk) * l.links + link;
  // E1: all packers' stores happen before their count, and so before this; the proxy acquires, then the NIC reads.
  fence_acq_rel_sys();
  store_release_sys(pointer<u64>(c.wire.doorbells) + doorbell, (epoch << 32) | bytes);
}

// Writes the head of a message. By one thread.
TY_DEVICE void write_wire_head(char *message, u64 epoch, u32 status, u32 rows, u32 rank) {
  ty_wire_head *head = reinterpret_cast<ty_wire_head *>(message);
  store(&head->epoch, epoch);
  store(&head->status, status);
  store(&head->rows, rows);
  store(&head->rank, rank);
}

// ---- receiving ---------------------------------------------------------------------------------------------------

TY_DEVICE u32 landed_word(const ty_lane &l, u64 epoch, u32 source, u32 chunk) {
  return l.first_landed + (static_cast<u32>(epoch & 1) * l.inboxes + source) * l.chunks + chunk;
}

// Waits until the relay has seen a chunk. By a thread. False once a deadline passed.
TY_DEVICE bool wait_landed(const ty_context &c, u32 direction, u32 lane, u64 epoch, u32 source, u32 chunk) {
  const u64 *word = pointer<const u64>(c.wire.landed) + landed_word(lane_of(c, lane), epoch, source, chunk);
  return wait_tag(c, direction, word, epoch, TY_SITE_LANDED, peer_of_source(c, lane, source), "chunk");
}

TY_DEVICE const ty_wire_head *wire_head(const ty_context &c, u32 lane, u64 epoch, u32 source) {
  return reinterpret_cast<const ty_wire_head *>(inbox_of(c, lane, epoch, source));
}

// ---- the relay ---------------------------------------------------------------------------------------------------

// As may_wait, and looks whether the proxy has lost a peer. By the relay's thread 0.
TY_DEVICE bool may_relay(const ty_context &c, const Wait &wait, u32 turn, u64 start, u64 expected, u64 seen) {
  if (turn % turns_between_checks != 0) return true;
  u64 lost = load_relaxed_sys(pointer<const u64>(c.wire.host_lost));
  if (lost == 0) return may_wait(c, wait, turn, start, expected, seen);
  u32 peer = static_cast<u32>(lost - 1);
  report(c, wait.direction, TY_ERROR_PEER_LOST, wait.site, peer, wait.epoch, 0, 0, now_ns() - start);
  store_release_gpu(&state_of(c)->closed, 1u);
  return false;
}

// Passes on one word once it shows `expected`. E6: acquires at system scope, releases to this device.
TY_DEVICE bool relay_word(const u64 *host, u64 *device, u64 expected) {
  if (load_relaxed_sys(host) != expected) return false;
  fence_acq_rel_sys();
  store_release_gpu(device, expected);
  return true;
}

// Passes on that staging is free, for every link of a lane. By the relay's thread 0. False once a deadline passed.
TY_DEVICE bool relay_staging(const ty_context &c, u32 direction, u32 lane, u64 epoch) {
  const ty_lane &l = lane_of(c, lane);
  if (l.chunks == 0 || epoch - c.first_epoch < 2) return true;
  for (u32 link = 0; link < l.targets; ++link) {
    u32 word = link_word(l, epoch, link);
    const u64 *host = pointer<const u64>(c.wire.host_free) + word;
    Wait wait{direction, TY_SITE_STAGING, peer_of_link(c, lane, link), epoch};
    u64 start = now_ns();
    for (u32 turn = 1; !relay_word(host, pointer<u64>(c.wire.free) + word, epoch - 2); ++turn) {
      spin_pause("wire staging");
      if (!may_relay(c, wait, turn, start, epoch - 2, load_relaxed_sys(host))) return false;
    }
  }
  return true;
}

// Chunks looked at for each source in a turn.
constexpr u32 relay_window = 8;

// One look at a source: passes on what has landed of the next chunks. True once all `chunks` are through.
TY_DEVICE bool relay_source(const ty_context &c, RelayShared &shared, u32 lane, u64 epoch, u32 source, u32 chunks) {
  const ty_lane &l = lane_of(c, lane);
  u32 next = load(&shared.next[source]), seen = load(&shared.beyond[source]) << 1;
  for (u32 i = 0; i < relay_window && next + i < chunks; ++i) {
    if ((seen >> i) & 1) continue;
    u32 word = landed_word(l, epoch, source, next + i);
    if (relay_word(pointer<const u64>(c.wire.host_landed) + word, pointer<u64>(c.wire.landed) + word, epoch))
      seen |= 1u << i;
  }
  for (; seen & 1; seen >>= 1) ++next;
  store(&shared.next[source], next);
  store(&shared.beyond[source], seen >> 1);
  return next >= chunks;
}

// Passes on all chunks of an epoch. `rows_of(source)` says how many rows a message has, once its chunk 0 has landed.
// By the relay's thread 0. False once a deadline passed.
template <typename RowsOf>
TY_DEVICE bool relay_landed(const ty_context &c, u32 direction, u32 lane, u64 epoch, RowsOf rows_of) {
  const ty_lane &l = lane_of(c, lane);
  if (l.chunks == 0) return true;
  RelayShared &shared = block_shared<RelayShared>();
  for (u32 source = 0; source < l.sources; ++source) {
    store(&shared.next[source], 0u);
    store(&shared.beyond[source], 0u);
  }
  u64 start = now_ns();
  for (u32 turn = 1;; ++turn) {
    u32 missing = l.sources;
    for (u32 source = l.sources; source-- > 0;) {
      bool whole = load(&shared.next[source]) > 0;
      u32 chunks = whole ? chunks_of(l, rows_of(source)) : 1;
      if (!relay_source(c, shared, lane, epoch, source, chunks) || !whole) missing = source;
    }
    if (missing == l.sources) return true;
    spin_pause("chunk");
    Wait wait{direction, TY_SITE_LANDED, peer_of_source(c, lane, missing), epoch};
    if (!may_relay(c, wait, turn, start, epoch, load(&shared.next[missing]))) return false;
  }
}

} // namespace ty
