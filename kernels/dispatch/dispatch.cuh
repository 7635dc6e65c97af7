// Dispatch. Inside a node: Ds publishes metadata and pushes every token's row once to each rank that holds one of its
// experts; Dr places the rows expert by expert.
//
//   Ds  block b: metadata of (tile, rank) pairs b, b + blocks, ... -> metadata words
//       a quarter of the warps, or half where rows or blocks are few, or rows are quantised (teams_of):
//       rows -> receive buffer, slot [me][token], on each other rank -> tags (release, N2)
//   Dr  the other warps, and with many rows those that have sent: counts of all sources -> starts of all segments
//       warp per (source, token), or a part of its row: metadata words, tag (acquire) -> copies to final positions ->
//       handle
//
// In one launch Ds and Dr go on side by side, or in blocks of their own (dedicated_senders), and own rows are placed
// from the caller's memory. In two launches own rows go through the own receive buffer. Between nodes the sending warps
// also do what dispatch/wire.cuh describes. A warp goes through its passes one after the other; the same code
// (carry_row) carries the rows of each. Rows leave without waiting for counts: a row's slot is (source, token), and
// counts decide only its final position. With in-place output rows wait for counts, and there is no receive buffer:
// dispatch/in_place.cuh. Receive order is (source rank, token) within each expert.
#pragma once
#include "dispatch/again.cuh"
#include "dispatch/in_place.cuh"

namespace ty {

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_dispatch(const DispatchArgs auto &a, const Round &round) {
  const auto &c = a.context;
  if ((a.phases & TY_PHASE_SEND) && !relay_staging(c, TY_DIRECTION_DISPATCH, round.epoch)) return;
  // For counts, chunk 0 of each source is enough. The receiving half reads the list again.
  if ((a.phases & TY_PHASE_RECEIVE) || takes_counts(a))
    relay_arrived(c, TY_DIRECTION_DISPATCH, round.epoch,
                  [&](u32 j) { return takes_counts(a) ? 0 : arrived_rows(c, round.epoch, j).rows; });
}

// Whether this rank has so few tokens that each warp has at most a part of one row.
TY_DEVICE bool has_few(const Context auto &c, u32 tokens) {
  return tokens * c.ranks <= worker_count(c) * block_warps() / 8;
}

// Which warps send and which receive. Both go on side by side, each by warps or blocks of its own.
struct Teams {
  u32 sending;   // warps of a block; 0: all warps do one after the other
  u32 dedicated; // as dedicated_senders

  TY_DEVICE Team send() const { return sending ? Team{1, 0, sending} : whole_block(); }
  TY_DEVICE Team receive() const { return sending ? Team{2, sending, block_warps() - sending} : whole_block(); }
};

// Dedicated sender blocks: how many blocks, the last, send the rows of a large call first, while all others place rows;
// 0: every block does both. Stores to other GPUs go at the links' pace and hold up stores of the same multiprocessor to
// its own memory. Where blocks are few and ranks many, both take long, and neither should wait for the other. A third
// of the blocks fills the links (docs/notebook.md, "Large calls").
template <bool inter_node> TY_DEVICE u32 dedicated_senders(const Context auto &c, u32 phases, u32 tokens) {
  if (inter_node || phases != (TY_PHASE_SEND | TY_PHASE_RECEIVE) || !has_few_blocks(c) || c.node_ranks <= 4) return 0;
  return tokens > worker_count(c) * block_warps() / 2 ? worker_count(c) / 3 : 0;
}

// Few rows leave sooner from many warps. Many rows are limited by the links, and placing by memory; but with few blocks
// both are limited by what a block can store, unless ranks are so many that the links are the limit again. Quantising
// rows takes warps longer than any link.
template <bool inter_node> TY_DEVICE Teams teams_of(const DispatchArgs auto &a, u32 tokens) {
  const auto &c = a.context;
  u32 phases = a.phases, warps = block_warps();
  bool receives = (phases & TY_PHASE_RECEIVE) || takes_counts(a);
  if (!receives || (!(phases & TY_PHASE_SEND) && !inter_node) || warps < 2) return {0, 0};
  if (u32 dedicated = dedicated_senders<inter_node>(c, phases, tokens)) return {0, dedicated};
  if (has_few(c, tokens)) {
    // The other warps receive: all wait for the counts, which come soonest with a thread for each word.
    u32 listening = (counted_words(c) * c.ranks + warp_size - 1) / warp_size;
    return {warps - smaller(larger(listening, warps / 2), warps - larger(warps / 4, 1)), 0};
  }
  if (takes_counts(a)) return {warps - larger(warps / 4, 1), 0};
  bool half = quantization(c) != TY_QUANTIZE_NONE || (has_few_blocks(c) && (inter_node || c.node_ranks <= 2));
  return {half ? warps / 2 : larger(warps / 4, 1), 0};
}

// The warps that go through a pass.
TY_DEVICE Teams teams_in(const Kept &kept) { return {load(&kept.sending), load(&kept.dedicated)}; }
TY_DEVICE Team team_in(const Kept &kept, u32 kind) {
  Teams teams = teams_in(kept);
  return kind == pass_announce ? whole_block() : kind == pass_place ? teams.receive() : teams.send();
}

// The rank of the node that gets part i first, different for the parts that a warp's lanes hold at once, so that ranks
// do not all store to the same rank at once. In one node only: the kernel of several nodes has no register left, and
// waits for the wire anyway. Fibonacci hashing: Knuth, The Art of Computer Programming 3, 6.4.
TY_DEVICE u32 first_peer(const Context auto &c, u32 i) {
  return (i * 2654435769u >> 16) * (c.node_ranks < warp_size ? c.node_ranks : warp_size) >> 16;
}

// A pass's items, of rows `from` somewhere, are carried `to` some places:
//
//   pass      from                                to                                       then
//   pack      the caller's tokens                 staging of each node's message           count_row (E1)
//   push      the caller's tokens                 receive buffer, or in-place output, of   raise_tags (N2)
//                                                 each rank of this node
//   forward   messages of other nodes' sources    as push, for the source                  raise_tags (N2)
//   place     the receive buffer, the message     the output, at each choice that is here  -
//             (a rank alone in its node), or the
//             caller's tokens (own rows)
//
// All passes run one piece of code, carry_row, since a launch waits for each piece of code that it fetches anew: a copy
// for each pass took dispatch 2 us longer (docs/notebook.md, "One piece of code for all rows").

// The item that number `slot` of a placing pass is: number slot / ranks of source slot % ranks. False if the source has
// no such token in the round.
TY_DEVICE bool name_to_place(const Context auto &c, const PlaceShared &shared, Item &item) {
  Quotient place = divide(item.slot, c.ranks, c.ranks_inverse);
  item.source = place.rest;
  item.slot = place.whole;
  if (item.slot >= round_tokens_of(shared, item.source)) return false;
  item.token = load(&shared.source_first[item.source]) + item.slot;
  return true;
}

// Where a row is placed from.
template <bool inter_node> TY_DEVICE RowFrom placed_from(const DispatchArgs auto &a, u32 source) {
  const auto &c = a.context;
  if (places_own(a) && source == c.rank) return RowFrom::own;
  return inter_node && places_arrived(c) && source != c.rank ? RowFrom::arrived : RowFrom::recv_buffer;
}

// The row itself, once it is here.
TY_DEVICE RowAt row_to_place(const DispatchArgs auto &a, const Kept &kept, const Item &item, RowFrom where) {
  const auto &c = a.context;
  RowTo at = recv_buffer_row(c, c.local, load(&kept.epoch), item.source, item.slot);
  RowAt from = {at.payload, at.scales, 1, TY_QUANTIZE_NONE};
  if (where == RowFrom::own) from = own_row(a, item.token);
  if (where == RowFrom::arrived) from = arrived_row(c, round_in(kept), link_of_source(c, item.source), item.slot);
  return from;
}

// The ranks of this node that an own token's row is pushed to, a bit each. `stuck`: a deadline passed.
TY_DEVICE u64 find_peers(const DispatchArgs auto &a, const Kept &kept, const Item &item, bool &stuck) {
  const auto &c = a.context;
  if (goes_again(a)) {
    u64 mask = mask_again(a, item.token);
    return places_own(a) ? mask & ~(1ull << c.local) : mask;
  }
  u64 ranks = warp_ranks_of(c, caller_choices(a), item.token) & ~masked_ranks(c);
  if (item.slices.first == 0 && lane_index() == 0) own_masks(a.handle).keep(item.token, ranks);
  if (in_place(c)) ranks &= find_targets(a, load(&kept.epoch), item.token, stuck);
  return places_own(a) ? ranks & ~(1ull << c.local) : ranks;
}

// Carries the items of a pass. By a warp. False once a deadline passed.
template <bool inter_node>
TY_DEVICE bool carry_items(const DispatchArgs auto &a, PlaceShared &shared, u32 kind, const Kept &kept) {
  const auto &c = a.context;
  const Pass &pass = kept.pass;
  bool places = !takes_counts(a) && kind == pass_place, packs = inter_node && kind == pass_pack,
       forwards = inter_node && kind == pass_forward;
  u32 *placed = &state_of(c)->placed[load(&kept.epoch) & 1];
  u32 dedicated = inter_node ? 0 : load(&kept.dedicated), blocks = dedicated ? dedicated : worker_count(c);
  bool of_all = places && dedicated;
  u32 next = of_all ? ask_next_of_all(placed) : load(&pass.work.first);
  TY_ROLLED
  for (;;) {
    u32 step = load(&pass.work.step), i = of_all ? shuffle(next, 0) : next;
    if (step == 0 && !of_all) i += take_next(&shared.taken[kind]) * blocks;
    if (i >= load(&pass.work.end)) return true;
    // The next item is asked for while this one is carried.
    if (of_all) next = ask_next_of_all(placed);
    else next += step;
    u32 cut = load(&pass.work.cut), slot = i >> cut;
    Item item{c.rank, load(&pass.first) + slot, slot, part_of_row(i, cut), {}};
    RowAt from;
    i32 found = -1; // by an earlier handle: output row of this lane's choice
    // By an earlier handle: nothing is sent.
    bool absent = goes_again(a) && !places && !forwards && load(&kept.refused) != 0;
    if (places) {
      if (!name_to_place(c, shared, item)) continue;
      RowFrom where = placed_from<inter_node>(a, item.source);
      Arrival arrival = goes_again(a) ? wait_again(a, kept, item, where, fits(a, shared), found)
                                      : wait_row(a, round_in(kept), item, where, fits(a, shared));
      if (arrival == Arrival::failed) return false;
      if (arrival == Arrival::absent) continue;
      from = row_to_place(a, kept, item, where);
    } else if (forwards) {
      item.source = served_source(c, load(&pass.served));
      u32 chunk = chunk_of_row(layout_of(c, TY_DIRECTION_DISPATCH), item.slot);
      if (!wait_chunk(c, round_in(kept), load(&pass.served), chunk)) return tolerates_absence(c) && !closed_for_warp(c);
      from = arrived_row(c, round_in(kept), load(&pass.served), item.slot);
      if (goes_again(a)) absent = !comes_again(a, round_in(kept), load(&pass.served));
    } else {
      from = own_row(a, item.token);
    }
    i32 mine = goes_again(a) ? found : -1; // output row of this lane's choice
    auto find_rows = [&]() -> u64 {
      if (goes_again(a)) return warp_ballot(mine >= 0);
      mine = row_of_choice(a, shared, item.source, item.meta);
      if (item.slices.first == 0) describe_choice(a, item.source, item.token, item.meta, mine);
      return warp_ballot(mine >= 0);
    };
    // In place, a peer's row already lies at its first place.
    bool lies = in_place(c) && places && item.source != c.rank, stuck = false;
    u64 others = 0;
    if (lies) {
      u64 all = find_rows();
      others = all & (all - 1);
      if (others == 0) continue;
      RowTo first = output_row(a, static_cast<u64>(shuffle(mine, lowest_bit(all))));
      from = {first.payload, first.scales, 1, TY_QUANTIZE_NONE};
    }
    auto find_places = [&]() -> u64 {
      if (forwards)
        return arrived_ranks(a, round_in(kept), load(&pass.served), item.slot, item.token) & ~masked_ranks(c);
      if (packs) return packed_nodes(c, item.token);
      if (!places) return find_peers(a, kept, item, stuck);
      return lies ? others : find_rows();
    };
    Slices carried = absent ? Slices{0, 0} : item.slices;
    // Where the words of a side payload are read, and the first of them.
    bool brings = carries_payload(a) && !absent && item.slices.end == TY_SLICES;
    u64 words = 0;
    u32 word = 0;
    if (carries_payload(a)) {
      bool own = !forwards && (!places || placed_from<inter_node>(a, item.source) == RowFrom::own);
      words = own ? payload_of_token(a, item.token) : payload_behind(c, from.scales);
      if (brings) word = load_payload(a, words);
    }
    u64 mask = carry_row(c, from, carried, places ? scale_stride(a) : 1,
                         places || inter_node ? 0 : first_peer(c, item.slot * TY_SLICES + item.slices.first),
                         find_places, [&](u32 bit) {
                           if (places) return output_row(a, static_cast<u64>(mine));
                           if (in_place(c)) return target_row(c, bit);
                           return packs ? staging_row(c, round_in(kept), load(&kept.tokens), item.token, bit)
                                        : recv_buffer_row(c, bit, load(&kept.epoch), item.source, item.slot);
                         });
    if (stuck) return false;
    if (brings)
      carry_payload(a, words, word, mask, [&](u32 bit) {
        if (places) return payload_of_row(a, static_cast<u64>(mine));
        RowTo to = packs ? staging_row(c, round_in(kept), load(&kept.tokens), item.token, bit)
                         : recv_buffer_row(c, bit, load(&kept.epoch), item.source, item.slot);
        return payload_behind(c, to.scales);
      });
    if (packs) count_row(c, round_in(kept), load(&kept.tokens), item.token, mask, item.slices);
    else if (!places)
      raise_tags(c, mask, load(&kept.epoch), item.source, item.slot, item.slices, absent ? tag_absent : 0);
  }
}

// What a team announces.
struct Announcement {
  bool forwards; // as a rail: what arrived for this node; else: own tokens
  i32 found;     // the caller's token count
  bool refused;  // a choice is faulty (between nodes)
  u32 dedicated; // as dedicated_senders: blocks that announce nothing
};

// Whether metadata of what arrived was forwarded by the launch that took the call's counts.
TY_DEVICE bool forwarded_before(const DispatchArgs auto &a, const Round &round) {
  return !takes_counts(a) && a.first_counts != 0 && round.number == 0;
}

// Announcements ahead of rows: heads of messages, whose way is the longest, and metadata of own tokens; as a rail,
// metadata of what arrived, of all sources side by side. Each goes to some block, tile by tile: a tile waits for
// earlier tiles, which other blocks have begun by then or this block has finished. By a team. False once a deadline
// passed. `closed`: as mark_tile's.
template <bool inter_node>
TY_DEVICE bool announce(const DispatchArgs auto &a, const Team &team, MetaShared &shared, const Round &round,
                        const Announcement &what, bool &closed) {
  const auto &c = a.context;
  auto [forwards, found, refused, dedicated] = what;
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  bool begins = round.number == 0;
  u32 links = inter_node && !forwards ? l.targets : 0, pairs = forwards ? l.sources * c.node_ranks : c.node_ranks;
  // Tiles past the end of a message are skipped.
  u32 tiles = goes_again(a) ? (forwards ? 1 : 0)
              : forwards    ? (begins ? c.max_tiles : 1)
              : begins      ? tile_count(c, own_choices(a, found).tokens)
                            : 0;
  u32 all = links + tiles * pairs;
  TY_ROLLED
  for (u32 i = block_index(); i < all; i += worker_count(c) - dedicated) {
    bool heads = inter_node && i < links;
    u32 number = 0, pair = i - links, j = 0;
    TY_ROLLED
    for (; !heads && pair >= pairs; pair -= pairs) ++number;
    TY_ROLLED
    for (; !heads && pair >= c.node_ranks; pair -= c.node_ranks) ++j;
    if (inter_node && forwards && !wait_head(a, team, round, j)) {
      if (goes_without(c, team)) continue;
      return false;
    }
    if (inter_node && forwards && goes_again(a)) {
      publish_sent(c, team, round, pair, served_source(c, j));
      team_barrier(team);
      continue;
    }
    Choices in = inter_node && forwards ? wire_choices(c, round.epoch, j) : own_choices(a, found);
    if (goes_again(a)) in.tokens = tokens_sent(a);
    if (inter_node && forwards) {
      if (number >= tile_count(c, in.tokens)) continue;
      forward_numbers(a, team, round, in, j, pair, number);
      if (!begins) continue;
    }
    if (heads) {
      pack_head(a, in, round, i, refused);
    } else {
      Tile tile = tile_at(c, in, pair, number);
      for (u32 e = team_thread(team); e <= tile.experts; e += team_threads(team)) store(&shared.start[e], 0u);
      // Counts come sooner so. Plain dispatches of one token take longer, and kernels between nodes have no registers
      // for it (docs/notebook-calls.md, "Choices ahead"). Where experts repeat, marking takes longest.
      bool ahead = !inter_node && (takes_counts(a) || repeats_experts(c)),
           faulty = mark_tile(c, team, in, shared, tile, ahead, closed) || in.bad;
      if (closed) return false;
      RankMasks masks = inter_node && forwards && pair == c.local ? rail_masks(c, a.handle, j) : RankMasks{};
      Publisher by{team, in, shared, round.call};
      if (!publish_tile(c, by, tile, {forwards ? 1 + j : 0, number}, faulty, masks)) {
        if (inter_node && forwards && goes_without(c, team)) continue;
        return false;
      }
      if (in.own && pair == c.local && is_last_tile(in, tile) && team_thread(team) == 0) keep_own(a, in, round, faulty);
    }
    team_barrier(team);
  }
  return true;
}

// Before messages to other nodes: waits until staging is free, and marks which tokens go to each node. `refused` is set
// if a choice is faulty. By a whole block. False once a deadline passed.
TY_DEVICE bool begin_messages(const DispatchArgs auto &a, const Round &round, i32 found, u32 &refused) {
  const auto &c = a.context;
  // By the last warp, while the others mark tokens.
  bool stuck = warp_index() + 1 == block_warps() &&
               !wait_staging_share(c, TY_DIRECTION_DISPATCH, round.epoch, lane_index(), warp_size);
  if (goes_again(a)) mark_nodes_again(a, tokens_sent(a));
  else refused = mark_nodes(c, own_choices(a, found)) ? 1 : 0;
  if (block_any(stuck)) return false;
  leave_out_nodes(c, own_choices(a, found).tokens);
  return true;
}

// Before the items of a sending pass. By a team. False if there is nothing to do, or a deadline passed.
template <bool inter_node>
TY_DEVICE bool begin_sending(const Context auto &c, const Team &team, const Round &round, u32 kind) {
  if (!inter_node || kind == pass_announce || kind == pass_pack) return true;
  if (!wait_free(c, team, TY_DIRECTION_DISPATCH, round.epoch)) return false;
  return kind != pass_forward || layout_of(c, TY_DIRECTION_DISPATCH).sources != 0;
}

static_assert(TY_STAGE_INTER_NODE == TY_STAGE_PUBLISHED + pass_pack &&
                  TY_STAGE_INTRA_NODE == TY_STAGE_PUBLISHED + pass_push &&
                  TY_STAGE_RAIL == TY_STAGE_PUBLISHED + pass_forward,
              "by pass");

// After the items of a sending pass. By a team.
TY_DEVICE void end_sending(const Context auto &c, const Team &team, u32 kind) {
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_PUBLISHED + kind, team_thread(team) == 0);
}

// Whether a launch has a pass.
template <bool inter_node> TY_DEVICE bool has_pass(const DispatchArgs auto &a, u32 kind) {
  if (kind == pass_place || kind == pass_forward)
    return (inter_node || kind == pass_place) && ((a.phases & TY_PHASE_RECEIVE) != 0 || takes_counts(a));
  return (inter_node || kind != pass_pack) && (a.phases & TY_PHASE_SEND) != 0;
}

// The passes of a launch, of which each team of a block's warps goes through its own, in this order:
//
//   pass      team                                waits first for                         items, in carry_items
//   announce  whole block                         staging that is free (between nodes)    none: see announce
//   pack      senders (between nodes)             -                                       own tokens of the round
//   push      senders                             peers that have read (between nodes)    own tokens of the round
//   forward   senders (between nodes)             the same; each source's first chunk     rows of each served source
//   place     placers, and senders that help      counts of all sources                   each (token, source)
//
// A launch that takes counts forwards metadata without rows, and one block gives the counts to the host instead of
// placing; the receiving half then forwards rows alone.
//
// In one node the announcing pass stands before the loop. A sender that has nothing to send, or whose wait failed, goes
// on with the last pass. The body is one: with the entry of the placing pass in a function of its own, two kernels
// between nodes spilled registers on sm_100a. `closed`: as finds_closed.
template <bool inter_node>
TY_DEVICE void work_dispatch(const DispatchArgs auto &a, const Round &round, i32 found, const Teams &teams,
                             bool closed) {
  const auto &c = a.context;
  DispatchShared &shared = block_shared<DispatchShared>();
  u32 tokens = goes_again(a) ? tokens_sent(a) : own_choices(a, found).tokens;
  u32 dedicated = inter_node ? 0 : teams.dedicated;
  u32 first_sender = dedicated ? worker_count(c) - dedicated : 0;
  bool is_dedicated = dedicated && block_index() >= first_sender;
  // In one node nothing else is announced, and this is all of that code. It comes first in the kernel, so that blocks
  // with nothing to announce get past it soonest.
  if (!inter_node && !goes_again(a) && !is_dedicated && (a.phases & TY_PHASE_SEND)) {
    if (!announce<inter_node>(a, whole_block(), shared.meta, round, {false, found, false, dedicated}, closed)) return;
    end_sending(c, whole_block(), pass_announce);
  }
  if (in_place(c) && (!dedicated || is_dedicated) && !plan_targets(a, round.epoch)) return;
  u32 busy = busy_blocks(a, round, tokens), refused = 0;
  bool begins = inter_node && (a.phases & TY_PHASE_SEND) != 0;
  if (goes_again(a) && (a.phases & TY_PHASE_SEND)) refused = differs_in_tokens(a, round, found, closed) ? 1 : 0;
  if (begins && !begin_messages(a, round, found, refused)) return;
  // Most blocks have nothing to announce, and start carrying rows at once.
  bool skips = begins && block_index() >= busy;
  if (skips) end_sending(c, whole_block(), pass_announce);
  Kept own{{}, found, tokens, busy, dedicated, refused, teams.sending, round.number, round.epoch, round.call};
  Kept &kept = inter_node ? block_shared<NodesShared>().kept[warp_index()] : own;
  if (inter_node) {
    if (lane_index() == 0) store_kept(kept, own);
    warp_barrier();
  }
  TY_ROLLED
  for (u32 kind = !inter_node ? pass_push : skips ? pass_pack : pass_announce; kind <= pass_place; ++kind) {
    if (!has_pass<inter_node>(a, kind) || (kind == pass_push && dedicated && !is_dedicated)) continue;
    bool announces = inter_node && kind == pass_announce, places = kind == pass_place,
         forwards = inter_node && kind == pass_forward;
    Team team = team_in(kept, kind);
    bool member = is_member(team);
    if (takes_counts(a) && places) {
      if (member && is_describer(c)) give_counts(a, team, shared.place, round_in(kept), closed);
      return;
    }
    if (places) {
      if (member && !begin_placing(a, team, shared.place, round_in(kept), closed)) return;
      // N11: the plan, which the other team has handed over.
      if (!member) take_over();
      // By the warps that have sent where there are two teams, as the others wait for rows.
      if (!(member && is_one_of_two(team)) && load(&shared.place.planned))
        describe_output(a, member ? team : teams_in(kept).send(), shared.place, round_in(kept));
      if (!member && !load(&shared.place.helped)) return;
    } else if (!member) {
      continue;
    } else if (!begin_sending<inter_node>(c, team, round_in(kept), kind)) {
      kind = pass_forward;
      continue;
    }
    if (announces || (forwards && !forwarded_before(a, round_in(kept)))) {
      Announcement what{forwards, load(&kept.found), load(&kept.refused) != 0, 0};
      bool announced = announce<inter_node>(a, team, shared.meta, round_in(kept), what, closed);
      if (!announced && announces) return;
      if (!announced) continue;
    }
    Pass pass{};
    Served served{0, 1, 0};
    u32 sources = announces ? 0 : 1;
    if (places) {
      pass.work = place_work(c, team, shared.place, kept);
    } else if (forwards) {
      served = served_by(c, team);
      sources = places_arrived(c) || takes_counts(a) ? 0 : layout_of(c, TY_DIRECTION_DISPATCH).sources;
    } else {
      Range range = own_range(c, round_in(kept), load(&kept.tokens));
      pass.first = range.first;
      pass.work = share_sent(c, team, shared.place, kind, kept, range.end - range.first, closed);
    }
    bool carried = !closed;
    TY_ROLLED
    for (u32 j = served.first; carried && j < sources; j += served.step) {
      if (forwards) {
        carried = wait_chunk(c, round_in(kept), j, 0);
        if (!carried && tolerates_absence(c) && !closed_for_warp(c)) {
          carried = true;
          continue;
        }
        if (!carried) break;
        Range arrived = goes_again(a) ? range_again(a, round_in(kept), j) : arrived_round(a, round_in(kept), j).rows;
        pass = {served_rows(c, served, j, arrived.end - arrived.first), arrived.first, j};
      }
      if (inter_node) keep_pass(kept.pass, pass);
      else kept.pass = pass;
      carried = carry_items<inter_node>(a, shared.place, kind, kept);
    }
    team = team_in(kept, kind);
    if (!places && carried) {
      if (kind == pass_push && block_index() == first_sender)
        raise_epoch(c, team, load(&kept.epoch), in_place(c) ? TY_STATUS_OK : dispatch_status(a));
      if (goes_again(a) && kind == pass_push && load(&kept.round) == 0)
        for (u32 rank = block_index() - first_sender; rank < c.node_ranks; rank += worker_count(c) - first_sender)
          publish_sent(c, team, round_in(kept), rank, c.rank);
      end_sending(c, team, kind);
    }
    if (places && is_member(team)) end_placing(a, team, round_in(kept), carried);
  }
}

// `inter_node`: there are several nodes. Kernels of one node lack the code for other nodes: absent code need not be
// fetched.
template <bool inter_node> TY_DEVICE void dispatch(const DispatchArgs auto &a) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_BEGIN, thread_index() == 0);
  Progress progress = ask_progress(c, TY_DIRECTION_DISPATCH);
  // Loads after an acquisition are trips to memory; this one is made before.
  i32 found = a.phases & TY_PHASE_SEND ? agree_count(a, find_count(a)) : 0;
  if (goes_again(a) && handle_may_change(c) && thread_index() == 0) keep_head(a);
  Teams teams{};
  if (!goes_again(a)) teams = teams_of<inter_node>(a, own_choices(a, found).tokens);
  keep_masked(c);
  u64 epoch = begin_launch(c, progress, TY_DIRECTION_DISPATCH, a.phases, a.round, a.handle.call);
  if (goes_again(a)) {
    epoch = check_handle(a, progress, epoch);
    teams = teams_of<inter_node>(a, tokens_sent(a));
  }
  Round round = round_of(c, epoch);
  if (inter_node && round.epoch != 0 && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, round);
  } else if (round.epoch != 0) {
    work_dispatch<inter_node>(a, round, found, teams, finds_closed(c, progress));
  }
  u64 ended = end_launch(c, TY_DIRECTION_DISPATCH, a.phases, a.handle.call);
  bool last = tolerates_absence(c) && !takes_counts(a) && (a.phases & TY_PHASE_RECEIVE) != 0 && drop_sources(a, ended);
  if (ended == 0 || !(a.phases & TY_PHASE_RECEIVE)) return;
  if (inter_node && (last || !tolerates_absence(c))) publish_free(c, TY_DIRECTION_DISPATCH, ended);
  // The count of the other parity: used by the epoch before, and by the next.
  if (!inter_node && block_index() == 0) store(&state_of(c)->placed[(ended + 1) & 1], 0u);
  if (!goes_again(a) && block_index() == 0 && is_last(c, round_of(c, ended)))
    store(&pointer<ty_handle_head>(a.handle.head)->state, a.handle.serial);
}

} // namespace ty
