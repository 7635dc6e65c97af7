// Dispatch between nodes: packing for the rails of other nodes, and a rail's handling of what arrives.
//
//   source every block: which tokens go to each node; one block a link: head and headers ──▶ rows by all workers
//          ──▶ doorbell a chunk
//   rail   arrived chunk ──▶ metadata and rows to the ranks of the node, as if the source were one of them
#pragma once
#include "dispatch/send.cuh"

namespace ty {

// ---- source: packing -------------------------------------------------------------------------------------------

// Header of a row: {token, experts [top_k], weights [top_k] if they come with dispatch}, padded to 16 bytes.
TY_DEVICE i32 *row_header(const ty_wire_layout &l, char *message, u32 row) {
  return reinterpret_cast<i32 *>(message + TY_WIRE_HEAD_BYTES + static_cast<u64>(row) * l.header_bytes);
}

// Which own tokens go to each node, in shared memory of kernels of several nodes: a row of words for each node, with
// one word more than tokens may need.
struct NodesShared {
  DispatchShared own;
  u32 bitmap[TY_NODES_BITMAP_WORDS];
  u32 before[TY_NODES_BITMAP_WORDS];           // tokens of the words before
  Kept kept[TY_MAX_BLOCK_THREADS / warp_size]; // by warp
};
static_assert(sizeof(NodesShared) <= TY_DISPATCH_NODES_SHARED_BYTES, "layout.h sizes the launch");

TY_DEVICE u32 nodes_word(const Context auto &c, u32 node, u32 token) {
  return node * (c.max_tokens / 32 + 1) + token / 32;
}

TY_DEVICE bool goes_to(const Context auto &c, u32 node, u32 token) {
  return (load(&block_shared<NodesShared>().bitmap[nodes_word(c, node, token)]) >> (token % 32)) & 1;
}

// The number of earlier tokens that go to a node; `token` may be one past the last.
TY_DEVICE u32 rows_before(const Context auto &c, u32 node, u32 token) {
  const NodesShared &shared = block_shared<NodesShared>();
  u32 word = nodes_word(c, node, token);
  return load(&shared.before[word]) + popcount(load(&shared.bitmap[word]) & ((1u << (token % 32)) - 1));
}

// Choices [first, first + group_choices) of a token, and their owners. Loaded without branches: a load after a branch
// waits for the load before it.
struct ChoiceGroup {
  u32 first;
  i32 experts[group_choices];
  ExpertOwner owners[group_choices];
};

TY_DEVICE ChoiceGroup look_up(const Context auto &c, const Choices &in, u32 token, u32 first) {
  ChoiceGroup loaded;
  loaded.first = first;
  bool there = token < in.tokens;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j) loaded.experts[j] = -1;
  if (in.tokens != 0) {
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j)
      loaded.experts[j] = choice_at(c, in, there ? token : 0, first + j < c.top_k ? first + j : 0);
  }
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    if (!there || first + j >= c.top_k) loaded.experts[j] = -1;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    loaded.owners[j] = owner_of(c, is_expert(c, loaded.experts[j]) ? loaded.experts[j] : 0);
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    if (!is_expert(c, loaded.experts[j])) loaded.owners[j] = {~0u, 0};
  return loaded;
}

// Whether a choice of the group is unusable; only the caller's choices are checked. As fault_of_choice.
TY_DEVICE bool is_faulty(const Context auto &c, const Choices &in, u32 token, const ChoiceGroup &loaded) {
  if (!in.own) return false;
  bool faulty = false, once = !repeats_experts(c);
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j) {
    i32 expert = loaded.experts[j];
    bool twice = false;
    TY_UNROLL
    for (u32 i = 0; i < j; ++i) twice |= once && loaded.experts[i] == expert;
    faulty |= expert != -1 && (twice || !is_expert(c, expert));
  }
  // Against the groups before.
  TY_ROLLED
  for (u32 k = 0; once && token < in.tokens && k < loaded.first; ++k) {
    i32 before = choice_at(c, in, token, k);
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) faulty |= before != -1 && loaded.experts[j] == before;
  }
  return faulty;
}

// Marks which own tokens go to each node. Every block does so for itself, so that none waits for another before it
// packs rows. Returns whether a choice is faulty; then no token goes anywhere. By a whole block, a thread a token: a
// lane a choice, as for metadata, would be eight times the instructions, for all tokens of a call in every block. The
// threads meet at the end.
TY_DEVICE bool mark_nodes(const Context auto &c, const Choices &in) {
  NodesShared &shared = block_shared<NodesShared>();
  u32 words = in.tokens / 32 + 1;
  bool faulty = in.bad;
  TY_ROLLED
  for (u32 first = warp_index() * warp_size; first < words * 32; first += block_threads()) {
    u32 token = first + lane_index();
    u64 nodes = 0;
    TY_ROLLED
    for (u32 k = 0; k < c.top_k; k += group_choices) {
      ChoiceGroup loaded = look_up(c, in, token, k);
      faulty |= is_faulty(c, in, token, loaded);
      TY_UNROLL
      for (u32 j = 0; j < group_choices; ++j)
        if (loaded.owners[j].node() < c.nodes) nodes |= 1ull << loaded.owners[j].node();
    }
    TY_ROLLED
    for (u32 node = 0; node < c.nodes; ++node) {
      u32 here = warp_ballot(((nodes >> node) & 1) != 0), word = nodes_word(c, node, first);
      if (lane_index() == 0) store(&shared.bitmap[word], here);
      if (lane_index() == 0) store(&shared.before[word], popcount(here));
    }
  }
  faulty = block_any(faulty);
  for (u32 node = warp_index(); node < c.nodes; node += block_warps()) {
    u32 row = nodes_word(c, node, 0);
    for (u32 word = lane_index(); faulty && word < words; word += warp_size) {
      store(&shared.bitmap[row + word], 0u);
      store(&shared.before[row + word], 0u);
    }
    warp_barrier();
    (void)scan(&shared.before[row], &shared.before[row], words);
  }
  return faulty;
}

// Where ranks may be absent: lets no token go to a node whose rail is masked. By a whole block, after mark_nodes.
TY_DEVICE void leave_out_nodes(const Context auto &c, u32 tokens) {
  if (!tolerates_absence(c)) return;
  NodesShared &shared = block_shared<NodesShared>();
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  for (u32 link = warp_index(); link < l.targets; link += block_warps()) {
    if (!is_link_out(c, TY_DIRECTION_DISPATCH, link)) continue;
    u32 row = nodes_word(c, node_of_link(c, link), 0);
    for (u32 word = lane_index(); word < tokens / 32 + 1; word += warp_size) {
      store(&shared.bitmap[row + word], 0u);
      store(&shared.before[row + word], 0u);
    }
  }
  block_barrier();
}

// Writes what combine and its rails need of the messages to a node: each token's row in them, and where rounds begin.
// By a whole block.
TY_DEVICE void number_rows(const DispatchArgs auto &a, const Choices &in, u32 link) {
  const auto &c = a.context;
  u32 node = node_of_link(c, link);
  u32 *starts = round_starts(c, a.handle.wire_rows, link);
  for (u32 round = thread_index(); round <= c.rounds; round += block_threads()) {
    u64 token = static_cast<u64>(round) * c.round_tokens;
    store(starts + round, rows_before(c, node, token < in.tokens ? static_cast<u32>(token) : in.tokens));
  }
  i32 *wire_row = pointer<i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens;
  for (u32 token = thread_index(); token < in.tokens; token += block_threads())
    store(wire_row + token, goes_to(c, node, token) ? static_cast<i32>(rows_before(c, node, token)) : -1);
}

// Whether an expert's rank was masked as the launch began. Nodes have equally many ranks.
TY_DEVICE bool is_owner_masked(const Context auto &c, const ExpertOwner &owner) {
  return owner.node() < c.nodes && was_masked(c, owner.node() * c.node_ranks + owner.rank());
}

// Writes the headers of the rows to a node. By a whole block.
TY_DEVICE void write_headers(const DispatchArgs auto &a, const Choices &in, char *message, u32 link) {
  const auto &c = a.context;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  u32 node = node_of_link(c, link);
  for_choices<true>(
      c, whole_block(), in, Tile{0, 0, 0, in.tokens, 0}, 0, false, [] {},
      [&](const Choice &choice) {
        if (!choice.there || !goes_to(c, node, choice.token)) return;
        i32 *header = row_header(l, message, rows_before(c, node, choice.token));
        if (choice.k == 0) store(header, static_cast<i32>(choice.token));
        // Experts of other nodes, too: sorting them out here would be one more trip to memory, and the node recognises
        // its own.
        store(header + 1 + choice.k, is_owner_masked(c, choice.owner) ? -1 : choice.expert);
        if (c.weights == TY_WEIGHTS_DISPATCH)
          store(reinterpret_cast<float *>(header + 1 + c.top_k + choice.k), choice.weight);
      });
}

// A round's range among the rows of the messages to a node, and how many rows and headers the round's message has.
struct WireRound {
  Range rows;
  WireRows shape;
};

// For `tokens` own tokens.
TY_DEVICE WireRound wire_round(const Context auto &c, u32 node, const Round &round, u32 tokens) {
  Range range = own_range(c, round, tokens);
  Range rows{rows_before(c, node, range.first), rows_before(c, node, range.end)};
  return {rows, {rows.end - rows.first, round.number == 0 ? rows_before(c, node, tokens) : 0}};
}

// Packs the head of the message to one node, with the headers if it is the call's first; nothing for a rail that is
// masked. By a whole block, after begin_messages.
TY_DEVICE void pack_head(const DispatchArgs auto &a, const Choices &in, const Round &round, u32 link, bool faulty) {
  const auto &c = a.context;
  bool begins = round.number == 0 && !goes_again(a);
  char *message = staging_of(c, TY_DIRECTION_DISPATCH, round.epoch, link);
  WireRound own = wire_round(c, node_of_link(c, link), round, in.tokens);
  if (goes_again(a)) own.shape.headers = 0;
  if (is_link_out(c, TY_DIRECTION_DISPATCH, link)) {
    if (begins) number_rows(a, in, link);
    return;
  }
  if (thread_index() == 0) publish_chunks(c, TY_DIRECTION_DISPATCH, round.epoch, link, own.shape.rows);
  if (begins) write_headers(a, in, message, link);
  block_barrier();
  if (thread_index() == 0) {
    u32 status = faulty ? TY_STATUS_BAD_INPUT : TY_STATUS_OK;
    write_wire_head(message, round.epoch, status, own.shape, c.rank);
    store(&reinterpret_cast<ty_wire_head *>(message)->dispatch, dispatch_status(a));
    if (begins) note_rows(c, rail_of_link(c, link), own.shape.headers);
    count_packed(c, TY_DIRECTION_DISPATCH, round.epoch, link, own.shape, 0, packed_head);
  }
  if (begins) number_rows(a, in, link);
}

// The nodes that a token's row is packed for. By a warp.
TY_DEVICE u64 packed_nodes(const Context auto &c, u32 token) {
  u64 nodes = 0;
  TY_ROLLED
  for (u32 first = 0; first < c.nodes; first += warp_size) {
    u32 node = first + lane_index();
    bool goes = node < c.nodes && node != c.node && goes_to(c, node, token);
    nodes |= static_cast<u64>(warp_ballot(goes)) << first;
  }
  return nodes;
}

// A token's row in a round's message to a node.
struct WirePlace {
  WireRows shape; // of the message
  u32 row;
};

// For `tokens` own tokens.
TY_DEVICE WirePlace wire_place(const Context auto &c, const Round &round, u32 tokens, u32 token, u32 node) {
  WireRound own = wire_round(c, node, round, tokens);
  return {own.shape, rows_before(c, node, token) - own.rows.first};
}

// Where the row is packed.
TY_DEVICE RowTo staging_row(const Context auto &c, const Round &round, u32 tokens, u32 token, u32 node) {
  WirePlace at = wire_place(c, round, tokens, token, node);
  return row_to(c, staging_of(c, TY_DIRECTION_DISPATCH, round.epoch, link_of_node(c, node)) +
                       row_offset(layout_of(c, TY_DIRECTION_DISPATCH), at.row));
}

// Counts slices of a token's row in the messages to all nodes of the mask, after packing them. By a warp.
TY_DEVICE void count_row(const Context auto &c, const Round &round, u32 tokens, u32 token, u64 nodes,
                         const Slices &slices) {
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  warp_barrier();
  for (u32 link = lane_index(); link < l.targets; link += warp_size) {
    u32 node = node_of_link(c, link);
    if (!((nodes >> node) & 1)) continue;
    WirePlace at = wire_place(c, round, tokens, token, node);
    count_packed(c, TY_DIRECTION_DISPATCH, round.epoch, link, at.shape, chunk_of_row(l, at.row),
                 slices.end - slices.first);
  }
}

// ---- rail: forwarding ------------------------------------------------------------------------------------------

// Rows and headers by the head of a message whose chunk 0 has arrived. Bounded: a peer's numbers are not trusted.
TY_DEVICE WireRows arrived_rows(const Context auto &c, u64 epoch, u32 j) {
  const ty_wire_head *head = wire_head(c, TY_DIRECTION_DISPATCH, epoch, j);
  u32 rows = load(&head->rows), headers = load(&head->headers);
  return {rows < c.round_tokens ? rows : c.round_tokens, headers < c.max_tokens ? headers : c.max_tokens};
}

// The round's range among the rows of its call. It begins where the round before ended, which an earlier launch
// recorded.
TY_DEVICE WireRound arrived_round(const DispatchArgs auto &a, const Round &round, u32 j) {
  const auto &c = a.context;
  WireRows shape = arrived_rows(c, round.epoch, j);
  u32 first = round.number == 0 ? 0 : load(round_starts(c, a.handle.rail_rows, j) + round.number);
  u32 left = c.max_tokens - first;
  if (shape.rows > left) shape.rows = left;
  return {{first, first + shape.rows}, shape};
}

// The choices that came with a call's first message; unusable, if the source reports so.
TY_DEVICE Choices wire_choices(const Context auto &c, u64 epoch, u32 j) {
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  u64 headers = reinterpret_cast<u64>(recv_buffer_of(c, TY_DIRECTION_DISPATCH, epoch, j)) + TY_WIRE_HEAD_BYTES;
  u64 weights = c.weights == TY_WEIGHTS_DISPATCH ? headers + 4 + 4 * c.top_k : 0;
  return {headers + 4,
          weights,
          l.header_bytes,
          4,
          l.header_bytes,
          4,
          4,
          c.top_k,
          arrived_rows(c, epoch, j).headers,
          served_source(c, j),
          load(&wire_head(c, TY_DIRECTION_DISPATCH, epoch, j)->status) == TY_STATUS_BAD_INPUT,
          false,
          0};
}

// Whether the head of source j's message shows that its call goes with this one; else closes the context. By a thread.
TY_DEVICE bool goes_with(const DispatchArgs auto &a, u64 epoch, u32 j) {
  u32 theirs = load(&wire_head(a.context, TY_DIRECTION_DISPATCH, epoch, j)->dispatch), own = dispatch_status(a);
  if (theirs != own) refuse_other(a, epoch, served_source(a.context, j), own, theirs);
  return theirs == own;
}

// Waits until the head of source j's message is here. By a team. False once a deadline passed, if the source is masked,
// or if the message is of another call: what came is then passed on to nobody, since the other ranks of the node have
// no other way to know.
TY_DEVICE bool wait_head(const DispatchArgs auto &a, const Team &team, const Round &round, u32 j) {
  bool failed = team_thread(team) == 0 &&
                (!wait_arrived(a.context, TY_DIRECTION_DISPATCH, round.epoch, j, 0) || !goes_with(a, round.epoch, j));
  return !team_any(team, failed);
}

// Publishes what accompanies the metadata of a tile of source j's rows for one rank of this node, after wait_head:
// where the round ends, and with the call's first message the rows' numbers at their source. By a team.
TY_DEVICE void forward_numbers(const DispatchArgs auto &a, const Team &team, const Round &round, const Choices &in,
                               u32 j, u32 destination, u32 tile) {
  const auto &c = a.context;
  Range rows = arrived_round(a, round, j).rows;
  u32 source = served_source(c, j);
  Meta meta = meta_of(c, destination, source, round.call);
  bool leads = team_thread(team) == 0 && tile == 0, keeps = destination == c.local;
  if (leads) store_relaxed_sys(meta.counts + c.max_local_experts + 1 + round.number, meta_word(round.call, rows.end));
  if (leads && keeps) store(round_starts(c, a.handle.rail_rows, j) + round.number + 1, rows.end);
  if (round.number != 0) return;
  Tile own = tile_at(c, in, destination, tile);
  for (u32 row = own.first + team_thread(team); row < own.first + own.count; row += team_threads(team)) {
    u32 token = load(pointer<const u32>(in.idx - 4 + static_cast<u64>(row) * in.idx_pitch));
    // Bounded, since callers may use it as an index.
    store_relaxed_sys(meta.source_tokens + row, meta_word(round.call, token < c.max_tokens ? token : 0));
  }
  u32 refreshed = refreshed_token(c, round.call);
  if (leads && refreshed >= in.tokens) store_relaxed_sys(meta.source_tokens + refreshed, meta_word(round.call, 0));
}

// Waits for a chunk of a round from source j. By a warp. False once a deadline passed.
TY_DEVICE bool wait_chunk(const Context auto &c, const Round &round, u32 j, u32 chunk) {
  bool failed = lane_index() == 0 && !wait_arrived(c, TY_DIRECTION_DISPATCH, round.epoch, j, chunk);
  warp_barrier();
  return warp_ballot(failed) == 0;
}

// One row of a round from source j, as it arrived.
TY_DEVICE RowAt arrived_row(const Context auto &c, const Round &round, u32 j, u32 row) {
  u64 from = reinterpret_cast<u64>(recv_buffer_of(c, TY_DIRECTION_DISPATCH, round.epoch, j)) +
             row_offset(layout_of(c, TY_DIRECTION_DISPATCH), row);
  return {from, from + c.row_bytes, 1, TY_QUANTIZE_NONE};
}

// Whether rows of other nodes' sources are placed from where they arrived: the node has no other rank to forward to.
TY_DEVICE bool places_arrived(const Context auto &c) { return c.node_ranks == 1; }

// The number of the link from another rank in a node of one: every other rank is a source, in order.
TY_DEVICE u32 link_of_source(const Context auto &c, u32 source) { return source - (source > c.rank ? 1 : 0); }

// The ranks of this node that need a row, which is number `call_row` of the call. By a warp.
TY_DEVICE u64 arrived_ranks(const DispatchArgs auto &a, const Round &round, u32 j, u32 row, u32 call_row) {
  // Headers come once; the masks of later rounds were kept.
  if (round.number != 0 || goes_again(a)) {
    RankMasks masks = rail_masks(a.context, a.handle, j);
    if (!goes_again(a) || !handle_may_change(a.context)) return masks.at(call_row);
    return shuffle(lane_index() == 0 ? masks.at(call_row) : 0, 0);
  }
  return warp_ranks_of(a.context, wire_choices(a.context, round.epoch, j), row);
}

// The sources whose rows this warp forwards: first, first + step, ... Where warps outnumber sources, several warps
// share a source.
struct Served {
  u32 first;
  u32 step;    // all warps
  u32 sharing; // the calling warp's number among those that share a source
};

TY_DEVICE Served served_by(const Context auto &c, const Team &team) {
  u32 sources = layout_of(c, TY_DIRECTION_DISPATCH).sources;
  auto [warps, warp] = share_of(c, team, 0, ~0u);
  if (sources == 0 || warps < sources) return {warp, warps, 0};
  return {warp % sources, warps, warp / sources};
}

// Source j's rows, shared out.
TY_DEVICE Work served_rows(const Context auto &c, const Served &served, u32 j, u32 rows) {
  u32 sources = layout_of(c, TY_DIRECTION_DISPATCH).sources, warps = served.step;
  u32 shared_by = warps < sources ? 1 : (warps - j + sources - 1) / sources;
  u32 cut = cut_for(rows, shared_by);
  return {served.sharing, rows << cut, shared_by, cut};
}

} // namespace ty
