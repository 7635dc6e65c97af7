// Dispatch between nodes: packing for the rails of other nodes, and what a rail does with what arrives.
//
//   home   every block: which tokens go to each node; one block a link: head and headers ──▶ rows by all workers
//          ──▶ doorbell a chunk
//   rail   landed chunk ──▶ META and rows to the ranks of the node, as if the source were one of them
#pragma once
#include "dispatch/send.cuh"

namespace ty {

// ---- home: packing -------------------------------------------------------------------------------------------

// Header of a row: {token, experts [top_k], weights [top_k] if they come with dispatch}, padded to 16 bytes.
TY_DEVICE i32 *row_header(const ty_lane &l, char *message, u32 row) {
  return reinterpret_cast<i32 *>(message + TY_WIRE_HEAD_BYTES + static_cast<u64>(row) * l.header_bytes);
}

// Which own tokens go to each node, in shared memory of kernels of several nodes: rows of words, one a node, and one
// word more in each than tokens may need.
struct NodesShared {
  DispatchShared own;
  u32 bitmap[TY_NODES_BITMAP_WORDS];
  u32 before[TY_NODES_BITMAP_WORDS];           // tokens of the words before
  Kept kept[TY_MAX_BLOCK_THREADS / warp_size]; // by warp
};
static_assert(sizeof(NodesShared) <= TY_DISPATCH_NODES_SHARED_BYTES, "layout.h tells the launcher");

TY_DEVICE u32 nodes_word(const Context auto &c, u32 node, u32 token) {
  return node * (c.max_tokens / 32 + 1) + token / 32;
}

TY_DEVICE bool goes_to(const Context auto &c, u32 node, u32 token) {
  return (load(&block_shared<NodesShared>().bitmap[nodes_word(c, node, token)]) >> (token % 32)) & 1;
}

// Rows to a node of the tokens before one, which may be the one behind the last.
TY_DEVICE u32 rows_before(const Context auto &c, u32 node, u32 token) {
  const NodesShared &shared = block_shared<NodesShared>();
  u32 word = nodes_word(c, node, token);
  return load(&shared.before[word]) + popcount(load(&shared.bitmap[word]) & ((1u << (token % 32)) - 1));
}

// Choices [first, first + group_choices) of a token, and where they lead. Loaded without branches: a load behind a
// branch waits for the one before it.
struct ChoiceGroup {
  u32 first;
  i32 experts[group_choices];
  ExpertHome homes[group_choices];
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
      loaded.experts[j] = choice_at(in, there ? token : 0, first + j < c.top_k ? first + j : 0);
  }
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    if (!there || first + j >= c.top_k) loaded.experts[j] = -1;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    loaded.homes[j] = home_of(c, is_expert(c, loaded.experts[j]) ? loaded.experts[j] : 0);
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j)
    if (!is_expert(c, loaded.experts[j])) loaded.homes[j] = {~0u, 0};
  return loaded;
}

// Whether a choice of the group is unusable; only the caller's are looked at. As fault_of_choice.
TY_DEVICE bool is_faulty(const Context auto &c, const Choices &in, u32 token, const ChoiceGroup &loaded) {
  if (!in.own) return false;
  bool faulty = false;
  TY_UNROLL
  for (u32 j = 0; j < group_choices; ++j) {
    i32 expert = loaded.experts[j];
    bool twice = false;
    TY_UNROLL
    for (u32 i = 0; i < j; ++i) twice |= loaded.experts[i] == expert;
    faulty |= expert != -1 && (twice || !is_expert(c, expert));
  }
  // Against the groups before.
  TY_ROLLED
  for (u32 k = 0; token < in.tokens && k < loaded.first; ++k) {
    i32 before = choice_at(in, token, k);
    TY_UNROLL
    for (u32 j = 0; j < group_choices; ++j) faulty |= before != -1 && loaded.experts[j] == before;
  }
  return faulty;
}

// Finds out which own tokens go to each node: every block for itself, so that none waits for another before it packs
// rows. If a choice is faulty, which is the answer, no token goes anywhere. By a whole block, a thread a token: a lane
// a choice, as META does, would be eight times the instructions, of all tokens of a call in every block. Its threads
// meet behind it.
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
        if (loaded.homes[j].node() < c.nodes) nodes |= 1ull << loaded.homes[j].node();
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

// What combine and its rails need to know of the messages to a node: which row of theirs each token of the call is, and
// where waves begin among them. By a whole block.
TY_DEVICE void number_rows(const DispatchArgs auto &a, const Choices &in, u32 link) {
  const auto &c = a.context;
  u32 node = node_of_link(c, link);
  u32 *starts = wave_starts(c, a.handle.wire_rows, link);
  for (u32 wave = thread_index(); wave <= c.waves; wave += block_threads()) {
    u64 token = static_cast<u64>(wave) * c.wave_tokens;
    store(starts + wave, rows_before(c, node, token < in.tokens ? static_cast<u32>(token) : in.tokens));
  }
  i32 *wire_row = pointer<i32>(a.handle.wire_row) + static_cast<u64>(link) * c.max_tokens;
  for (u32 token = thread_index(); token < in.tokens; token += block_threads())
    store(wire_row + token, goes_to(c, node, token) ? static_cast<i32>(rows_before(c, node, token)) : -1);
}

// The headers of the rows to a node. By a whole block.
TY_DEVICE void write_headers(const DispatchArgs auto &a, const Choices &in, char *message, u32 link) {
  const auto &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  u32 node = node_of_link(c, link);
  for_choices<true>(
      c, whole_block(), in, Tile{0, 0, 0, in.tokens, 0}, 0, [] {},
      [&](const Choice &choice) {
        if (!choice.there || !goes_to(c, node, choice.token)) return;
        i32 *header = row_header(l, message, rows_before(c, node, choice.token));
        if (choice.k == 0) store(header, static_cast<i32>(choice.token));
        // Experts of other nodes, too: to tell them apart here would be a trip to memory more, and the node knows its
        // own.
        store(header + 1 + choice.k, choice.expert);
        if (c.weights == TY_WEIGHTS_DISPATCH)
          store(reinterpret_cast<float *>(header + 1 + c.top_k + choice.k), choice.weight);
      });
}

// A wave's rows of the messages to a node, and how many rows and headers its own has.
struct WireWave {
  Range rows;
  WireRows shape;
};

// Of so many own tokens.
TY_DEVICE WireWave wire_wave(const Context auto &c, u32 node, const Wave &wave, u32 tokens) {
  Range range = own_range(c, wave, tokens);
  Range rows{rows_before(c, node, range.first), rows_before(c, node, range.end)};
  return {rows, {rows.end - rows.first, wave.number == 0 ? rows_before(c, node, tokens) : 0}};
}

// Head of the message to one node, with the headers where it is the call's first. By a whole block, behind
// begin_messages.
TY_DEVICE void pack_head(const DispatchArgs auto &a, const Choices &in, const Wave &wave, u32 link, bool faulty) {
  const auto &c = a.context;
  bool begins = wave.number == 0;
  char *message = staging_of(c, TY_LANE_DISPATCH, wave.epoch, link);
  WireWave own = wire_wave(c, node_of_link(c, link), wave, in.tokens);
  if (thread_index() == 0) tell_chunks(c, TY_LANE_DISPATCH, wave.epoch, link, own.shape.rows);
  if (begins) write_headers(a, in, message, link);
  block_barrier();
  if (thread_index() == 0) {
    u32 status = faulty ? TY_STATUS_BAD_INPUT : TY_STATUS_OK;
    write_wire_head(message, wave.epoch, status, own.shape, c.rank);
    if (begins) note_rows(c, rail_of_link(c, link), own.shape.headers);
    count_packed(c, TY_LANE_DISPATCH, wave.epoch, link, own.shape, 0, packed_head);
  }
  if (begins) number_rows(a, in, link);
}

// Nodes that a token's row is packed for. By a warp.
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

// A token's row in a wave's message to a node.
struct WirePlace {
  WireRows shape; // of the message
  u32 row;
};

// Of so many own tokens.
TY_DEVICE WirePlace wire_place(const Context auto &c, const Wave &wave, u32 tokens, u32 token, u32 node) {
  WireWave own = wire_wave(c, node, wave, tokens);
  return {own.shape, rows_before(c, node, token) - own.rows.first};
}

// Where it goes.
TY_DEVICE RowTo staging_row(const Context auto &c, const Wave &wave, u32 tokens, u32 token, u32 node) {
  WirePlace at = wire_place(c, wave, tokens, token, node);
  return row_to(c, staging_of(c, TY_LANE_DISPATCH, wave.epoch, link_of_node(c, node)) +
                       row_offset(lane_of(c, TY_LANE_DISPATCH), at.row));
}

// Counts slices of a token's row in the messages to all nodes of the mask, behind the packing. By a warp.
TY_DEVICE void count_row(const Context auto &c, const Wave &wave, u32 tokens, u32 token, u64 nodes,
                         const Slices &slices) {
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  warp_barrier();
  for (u32 link = lane_index(); link < l.targets; link += warp_size) {
    u32 node = node_of_link(c, link);
    if (!((nodes >> node) & 1)) continue;
    WirePlace at = wire_place(c, wave, tokens, token, node);
    count_packed(c, TY_LANE_DISPATCH, wave.epoch, link, at.shape, chunk_of_row(l, at.row), slices.end - slices.first);
  }
}

// ---- rail: forwarding ------------------------------------------------------------------------------------------

// What the head of a message says, once its chunk 0 has landed. What a peer wrote is not trusted to fit.
TY_DEVICE WireRows landed_rows(const Context auto &c, u64 epoch, u32 j) {
  const ty_wire_head *head = wire_head(c, TY_LANE_DISPATCH, epoch, j);
  u32 rows = load(&head->rows), headers = load(&head->headers);
  return {rows < c.wave_tokens ? rows : c.wave_tokens, headers < c.max_tokens ? headers : c.max_tokens};
}

// The same wave among the rows of its call: it begins where the one before ended, of which an earlier launch took note.
TY_DEVICE WireWave landed_wave(const DispatchArgs auto &a, const Wave &wave, u32 j) {
  const auto &c = a.context;
  WireRows shape = landed_rows(c, wave.epoch, j);
  u32 first = wave.number == 0 ? 0 : load(wave_starts(c, a.handle.rail_rows, j) + wave.number);
  u32 left = c.max_tokens - first;
  if (shape.rows > left) shape.rows = left;
  return {{first, first + shape.rows}, shape};
}

// The choices that came with a call's first message; unusable, if the home says so.
TY_DEVICE Choices wire_choices(const Context auto &c, u64 epoch, u32 j) {
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  u64 headers = reinterpret_cast<u64>(inbox_of(c, TY_LANE_DISPATCH, epoch, j)) + TY_WIRE_HEAD_BYTES;
  u64 weights = c.weights == TY_WEIGHTS_DISPATCH ? headers + 4 + 4 * c.top_k : 0;
  return {headers + 4,
          weights,
          l.header_bytes,
          l.header_bytes,
          4,
          landed_rows(c, epoch, j).headers,
          served_home(c, j),
          load(&wire_head(c, TY_LANE_DISPATCH, epoch, j)->status) == TY_STATUS_BAD_INPUT,
          false,
          0};
}

// Waits until the head of source j's message is here. By a team. False once a deadline passed.
TY_DEVICE bool wait_head(const Context auto &c, const Team &team, const Wave &wave, u32 j) {
  bool failed = team_thread(team) == 0 && !wait_landed(c, TY_LANE_DISPATCH, wave.epoch, j, 0);
  return !team_any(team, failed);
}

// What goes with META of a tile of source j's rows for one rank of this node, behind wait_head: where the wave ends,
// and with the call's first message the rows' numbers at their home. By a team.
TY_DEVICE void forward_numbers(const DispatchArgs auto &a, const Team &team, const Wave &wave, const Choices &in, u32 j,
                               u32 destination, u32 tile) {
  const auto &c = a.context;
  Range rows = landed_wave(a, wave, j).rows;
  u32 source = served_home(c, j);
  Meta meta = meta_of(c, destination, source, wave.call);
  bool leads = team_thread(team) == 0 && tile == 0, keeps = destination == c.local;
  if (leads) store_relaxed_sys(meta.counts + c.max_local_experts + 1 + wave.number, meta_word(wave.call, rows.end));
  if (leads && keeps) store(wave_starts(c, a.handle.rail_rows, j) + wave.number + 1, rows.end);
  if (wave.number != 0) return;
  Tile own = tile_at(c, in, destination, tile);
  for (u32 row = own.first + team_thread(team); row < own.first + own.count; row += team_threads(team)) {
    u32 token = load(pointer<const u32>(in.idx - 4 + static_cast<u64>(row) * in.idx_pitch));
    // Callers may use it as an index.
    store_relaxed_sys(meta.homes + row, meta_word(wave.call, token < c.max_tokens ? token : 0));
  }
  u32 refreshed = refreshed_token(c, wave.call);
  if (leads && refreshed >= in.tokens) store_relaxed_sys(meta.homes + refreshed, meta_word(wave.call, 0));
}

// Waits for a chunk of a wave from source j. By a warp. False once a deadline passed.
TY_DEVICE bool wait_chunk(const Context auto &c, const Wave &wave, u32 j, u32 chunk) {
  bool failed = lane_index() == 0 && !wait_landed(c, TY_LANE_DISPATCH, wave.epoch, j, chunk);
  warp_barrier();
  return warp_ballot(failed) == 0;
}

// One row of a wave from source j, as it landed.
TY_DEVICE RowAt landed_row(const Context auto &c, const Wave &wave, u32 j, u32 row) {
  u64 from = reinterpret_cast<u64>(inbox_of(c, TY_LANE_DISPATCH, wave.epoch, j)) +
             row_offset(lane_of(c, TY_LANE_DISPATCH), row);
  return {from, from + c.row_bytes, 1, TY_QUANTIZE_NONE};
}

// Whether rows of other nodes' sources are placed from where they landed: the node has no other rank to forward to.
TY_DEVICE bool places_landed(const Context auto &c) { return c.node_ranks == 1; }

// Which of the sources that then send to this rank another rank is: all of them do, in order.
TY_DEVICE u32 served_source(const Context auto &c, u32 source) { return source - (source > c.rank ? 1 : 0); }

// Ranks of this node that need it; it is number `call_row` among the call's. By a warp.
TY_DEVICE u64 landed_ranks(const DispatchArgs auto &a, const Wave &wave, u32 j, u32 row, u32 call_row) {
  // Headers come once; the masks of later waves were kept.
  if (wave.number != 0) return load(rail_masks(a.context, a.handle, j) + call_row);
  return warp_ranks_of(a.context, wire_choices(a.context, wave.epoch, j), row);
}

// The sources whose rows this warp forwards, first, first + step, ...: where there are more warps than sources, several
// share one.
struct Served {
  u32 first;
  u32 step;    // all warps
  u32 sharing; // the calling one's number among the warps that share a source
};

TY_DEVICE Served served_by(const Context auto &c, const Team &team) {
  u32 sources = lane_of(c, TY_LANE_DISPATCH).sources;
  auto [warps, warp] = share_of(c, team, 0, ~0u);
  if (sources == 0 || warps < sources) return {warp, warps, 0};
  return {warp % sources, warps, warp / sources};
}

// The rows of one of them.
TY_DEVICE Work served_rows(const Context auto &c, const Served &served, u32 j, u32 rows) {
  u32 sources = lane_of(c, TY_LANE_DISPATCH).sources, warps = served.step;
  u32 shared_by = warps < sources ? 1 : (warps - j + sources - 1) / sources;
  u32 cut = cut_for(rows, shared_by);
  return {served.sharing, rows << cut, shared_by, cut};
}

} // namespace ty
