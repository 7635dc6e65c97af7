// Dispatch between nodes: packing for the rails of other nodes, and what a rail does with what arrives.
//
//   home   head and headers by one block a link ──▶ rows by all workers ──▶ doorbell a chunk
//   rail   landed chunk ──▶ META and rows to the ranks of the node, as if the source were one of them
#pragma once
#include "dispatch_send.cuh"

namespace ty {

// ---- home: packing -------------------------------------------------------------------------------------------

// Header of a row: {token, experts [top_k], weights [top_k] if they come with dispatch}, padded to 16 bytes.
TY_DEVICE i32 *row_header(const ty_lane &l, char *message, u32 row) {
  return reinterpret_cast<i32 *>(message + TY_WIRE_HEAD_BYTES + static_cast<u64>(row) * l.header_bytes);
}

TY_DEVICE u64 *packed_word(const ty_context &c, u32 lane, u32 link) {
  return pointer<u64>(c.wire.packed) + lane * TY_MAX_RANKS + link;
}

// Marks the tokens that have an expert on `node`. True if a choice is faulty.
TY_DEVICE bool mark_node(const ty_context &c, const Choices &in, DispatchShared &shared, u32 node) {
  bool faulty = false;
  for (u32 i = thread_index(); i < in.tokens * c.top_k; i += block_threads()) {
    u32 token = i / c.top_k, k = i % c.top_k;
    i64 expert = choice_at(in, token, k);
    faulty |= fault_of_choice(c, in, token, k, expert) != TY_ERROR_NONE;
    if (is_expert(c, expert) && home_of(c, expert).node == node)
      atomic_or_block(&shared.bitmap[token / 32], 1u << (token % 32));
  }
  return faulty;
}

// Header of one row: only experts of `node` are named. By a thread.
TY_DEVICE void write_header(const ty_context &c, const Choices &in, i32 *header, u32 token, u32 node) {
  store(header, static_cast<i32>(token));
  for (u32 k = 0; k < c.top_k; ++k) {
    i64 expert = choice_at(in, token, k);
    bool there = is_expert(c, expert) && home_of(c, expert).node == node;
    store(header + 1 + k, there ? static_cast<i32>(expert) : -1);
    if (c.weights == TY_WEIGHTS_DISPATCH)
      store(reinterpret_cast<float *>(header + 1 + c.top_k + k), weight_at(in, token, k));
  }
}

// Head and headers of the message to one node, and which row of it each token is. By a whole block. False once a
// deadline passed.
TY_DEVICE bool pack_head(const ty_dispatch_args &a, const Choices &in, DispatchShared &shared, u64 epoch, u32 link) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  u32 node = node_of_link(c, link), words = (in.tokens + 31) / 32;
  i32 *wire_row = pointer<i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens;
  for (u32 i = thread_index(); i < words; i += block_threads()) store(&shared.bitmap[i], 0u);
  bool stuck = thread_index() == 0 && !wait_staging(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch, link);
  if (block_any(stuck)) return false;
  bool faulty = block_any(mark_node(c, in, shared, node) || in.bad);
  u32 rows = faulty || words == 0 ? 0 : all_in_row(shared.bitmap, words);
  char *message = staging_of(c, TY_LANE_DISPATCH, epoch, link);
  for (u32 token = thread_index(); token < in.tokens; token += block_threads()) {
    bool there = !faulty && ((load(&shared.bitmap[token / 32]) >> (token % 32)) & 1);
    u32 row = there ? earlier_in_row(shared.bitmap, token) : 0;
    store(wire_row + token, there ? static_cast<i32>(row) : -1);
    if (there) write_header(c, in, row_header(l, message, row), token, node);
  }
  if (thread_index() == 0) {
    write_wire_head(message, epoch, faulty ? TY_STATUS_BAD_INPUT : TY_STATUS_OK, rows, c.rank);
    store(pointer<u32>(a.handle.wire_rows) + link, rows);
  }
  block_barrier();
  if (thread_index() != 0) return true;
  count_packed(c, TY_LANE_DISPATCH, epoch, link, rows, 0);
  // N9: the rows' numbers happen before; wait_tag(TY_SITE_PACKED) acquires.
  store_release_gpu(packed_word(c, TY_LANE_DISPATCH, link), epoch);
  return true;
}

// Packs one token's row, read once, into the messages to all nodes of the mask. By a whole block.
TY_DEVICE void pack_row(const ty_dispatch_args &a, u64 epoch, u32 token, u64 nodes) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  const u32 *wire_rows = pointer<const u32>(a.handle.wire_rows);
  auto row_at = [&](u32 link) {
    return load(pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens + token);
  };
  // A fault makes all messages empty.
  if (row_at(link_of_node(c, lowest_bit(nodes))) < 0) return;
  copy_to_all(c, own_row(a, token), nodes, [&](u32 node) {
    u32 link = link_of_node(c, node);
    return staging_of(c, TY_LANE_DISPATCH, epoch, link) +
           row_offset(l, load(wire_rows + link), static_cast<u32>(row_at(link)));
  });
  block_barrier();
  for (u32 link = thread_index(); link < l.targets; link += block_threads())
    if ((nodes >> node_of_link(c, link)) & 1)
      count_packed(c, TY_LANE_DISPATCH, epoch, link, load(wire_rows + link),
                   chunk_of_row(l, static_cast<u32>(row_at(link))));
}

// Waits until every message's head is packed. By a whole block. False once a deadline passed.
TY_DEVICE bool wait_packed(const ty_context &c, u32 direction, u32 lane, u64 epoch) {
  bool failed = false;
  for (u32 link = thread_index(); link < lane_of(c, lane).targets; link += block_threads())
    failed |= !wait_tag(c, direction, packed_word(c, lane, link), epoch, TY_SITE_PACKED, c.rank, "head");
  return !block_any(failed);
}

// Everything for other nodes. False once a deadline passed.
TY_DEVICE bool send_to_nodes(const ty_dispatch_args &a, const Choices &in, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  for (u32 link = block_index(); link < l.targets; link += worker_count(c)) {
    if (!pack_head(a, in, shared, epoch, link)) return false;
    block_barrier();
  }
  if (!wait_packed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch)) return false;
  for (u32 token = worker_count(c) - 1 - block_index(); token < in.tokens; token += worker_count(c)) {
    u64 nodes = targets_of(c, in, token).nodes;
    if (nodes) pack_row(a, epoch, token, nodes);
  }
  return true;
}

// ---- rail: forwarding ------------------------------------------------------------------------------------------

// Rows of the message from source j, once its chunk 0 has landed. What a peer wrote is not trusted to fit.
TY_DEVICE u32 rows_landed(const ty_context &c, u64 epoch, u32 j) {
  u32 rows = load(&wire_head(c, TY_LANE_DISPATCH, epoch, j)->rows);
  return rows < c.max_tokens ? rows : c.max_tokens;
}

// The choices that came with a message.
TY_DEVICE Choices wire_choices(const ty_context &c, u64 epoch, u32 j) {
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  u64 headers = reinterpret_cast<u64>(inbox_of(c, TY_LANE_DISPATCH, epoch, j)) + TY_WIRE_HEAD_BYTES;
  u64 weights = c.weights == TY_WEIGHTS_DISPATCH ? headers + 4 + 4 * c.top_k : 0;
  return {headers + 4, l.header_bytes, weights, l.header_bytes, 4, rows_landed(c, epoch, j), served_home(c, j),
          false,       false,          0};
}

// META of source j's rows for one rank of this node. By a whole block.
TY_DEVICE void forward_meta(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch, u32 j, u32 destination) {
  const ty_context &c = a.context;
  Choices in = wire_choices(c, epoch, j);
  build_meta(c, in, shared, epoch, destination);
  MetaOut meta = meta_of(c, destination, in.source, epoch);
  for (u32 row = thread_index(); row < in.tokens; row += block_threads())
    store(meta.tokens + row, load(pointer<const i32>(in.idx - 4 + row * in.idx_pitch)));
  if (destination == c.local && thread_index() == 0) store(pointer<u32>(a.handle.rail_rows) + j, in.tokens);
  raise_meta_flag(c, epoch, destination, in.source, load(&wire_head(c, TY_LANE_DISPATCH, epoch, j)->status));
}

// One row from source j to the ranks that need it. By a whole block. False once a deadline passed.
TY_DEVICE bool forward_row(const ty_dispatch_args &a, const Choices &in, u64 epoch, u32 j, u32 row) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  bool failed =
      thread_index() == 0 && !wait_landed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch, j, chunk_of_row(l, row));
  if (block_any(failed)) return false;
  u64 mask = targets_of(c, in, row).ranks;
  u64 from = reinterpret_cast<u64>(inbox_of(c, TY_LANE_DISPATCH, epoch, j)) + row_offset(l, in.tokens, row);
  push_row(c, RowAt{from, from + c.row_bytes, 1}, epoch, in.source, row, mask);
  if (thread_index() == 0) store(pointer<u64>(a.handle.rail_mask) + static_cast<u64>(j) * c.max_tokens + row, mask);
  return true;
}

// What this rank does as a rail. Source by source, from another one on each block. False once a deadline passed.
TY_DEVICE bool forward(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  for (u32 turn = 0; turn < l.sources; ++turn) {
    u32 j = (turn + block_index()) % l.sources;
    bool failed = thread_index() == 0 && !wait_landed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, epoch, j, 0);
    if (block_any(failed)) return false;
    for (u32 rank = block_index(); rank < c.node_ranks; rank += worker_count(c)) {
      forward_meta(a, shared, epoch, j, rank);
      block_barrier();
    }
    Choices in = wire_choices(c, epoch, j);
    for (u32 row = worker_count(c) - 1 - block_index(); row < in.tokens; row += worker_count(c))
      if (!forward_row(a, in, epoch, j, row)) return false;
  }
  return true;
}

// ---- the sending phase -----------------------------------------------------------------------------------------

// Other nodes first: their way is the longest. Rows from the far end of the grid, so that the blocks busy with META get
// their rows last.
TY_DEVICE void dispatch_send(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  Choices in = own_choices(a);
  if (spans_nodes(c) && !send_to_nodes(a, in, shared, epoch)) return;
  if (!wait_free(c, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, epoch)) return;
  u32 workers = worker_count(c);
  for (u32 rank = block_index(); rank < c.node_ranks; rank += workers) publish_meta(a, in, shared, epoch, rank);
  for (u32 token = workers - 1 - block_index(); token < in.tokens; token += workers) {
    u64 ranks = targets_of(c, in, token).ranks;
    push_row(c, own_row(a, token), epoch, c.rank, token, ranks);
    if (thread_index() == 0) store(pointer<u64>(a.handle.rank_mask) + token, ranks);
  }
}

} // namespace ty
