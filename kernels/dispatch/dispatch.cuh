// Dispatch. Inside a node: Ds publishes META and pushes every token's row once to each rank that holds one of its
// experts; Dr places the rows expert by expert.
//
//   Ds  block b: META of (tile, rank) pairs b, b + blocks, ... -> META words     a quarter of the warps, or half where
//       rows or blocks are few, or rows are quantised (teams_of): rows -> inbox[me][token] on each other rank -> tags
//       (release, N2)
//   Dr  the other warps, and of many rows those that have sent: counts of all sources -> starts of all segments
//       warp per (source, token), or a part of its row: META words, tag (acquire) -> copies to final positions ->
//       handle
//
// In one launch both go on side by side, or in blocks of their own (senders_apart), and own rows are placed from where
// the caller has them; in two they go by the own inbox. Between nodes: dispatch_wire.cuh, by the sending warps. A warp
// goes through its passes one after the other, and carries what there is in each by the same code (carry_row). Rows
// leave without waiting for counts: a row's inbox slot is (source, token), and counts decide only its final position.
// With an output in the arena they wait, and there is no inbox: dispatch_in_place.cuh. Receive order is (source rank,
// token) within each expert.
#pragma once
#include "dispatch/in_place.cuh"

namespace ty {

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_dispatch(const DispatchArgs auto &a, const Wave &wave) {
  const auto &c = a.context;
  if ((a.phases & TY_PHASE_SEND) && !relay_staging(c, TY_LANE_DISPATCH, wave.epoch)) return;
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_LANE_DISPATCH, wave.epoch, [&](u32 j) { return landed_rows(c, wave.epoch, j).rows; });
}

// Whether this rank has so few tokens that its warps have a part of one row each at the most.
TY_DEVICE bool has_few(const Context auto &c, u32 tokens) {
  return tokens * c.ranks <= worker_count(c) * block_warps() / 8;
}

// Who does what. Sending and receiving go on side by side, each by warps of its own, or by blocks of its own.
struct Teams {
  u32 sending; // warps of a block; 0: all warps do one after the other
  u32 apart;   // as senders_apart

  TY_DEVICE Team send() const { return sending ? Team{1, 0, sending} : whole_block(); }
  TY_DEVICE Team receive() const { return sending ? Team{2, sending, block_warps() - sending} : whole_block(); }
};

// How many blocks, the last, send the rows of a large call and do nothing else until they are through, while all others
// place rows; 0: every block does both. What a multiprocessor stores to other GPUs, as fast as the links take it, holds
// up what it stores to its own memory; where blocks are few and ranks many, both take long, and none can be spared to
// wait. A third of the blocks fills the links (docs/performance.md, "Large calls").
template <bool far> TY_DEVICE u32 senders_apart(const Context auto &c, u32 phases, u32 tokens) {
  if (far || phases != (TY_PHASE_SEND | TY_PHASE_RECEIVE) || !has_few_blocks(c) || c.node_ranks <= 4) return 0;
  return tokens > worker_count(c) * block_warps() / 2 ? worker_count(c) / 3 : 0;
}

// Few rows leave sooner by many warps. Many are held up by the links, and their receivers by memory; but where blocks
// are few, both are held up by what a block can store, unless there are so many ranks that the links are scarce again.
// Rows that are quantised on the way take their warps longer than any link.
template <bool far> TY_DEVICE Teams teams_of(const Context auto &c, u32 phases, u32 tokens) {
  u32 warps = block_warps();
  if (!(phases & TY_PHASE_RECEIVE) || (!(phases & TY_PHASE_SEND) && !far) || warps < 2) return {0, 0};
  if (u32 apart = senders_apart<far>(c, phases, tokens)) return {0, apart};
  if (has_few(c, tokens)) {
    // Others listen: all wait for the counts, which come soonest with a thread for each word.
    u32 listening = (counted_words(c) * c.ranks + warp_size - 1) / warp_size;
    return {warps - smaller(larger(listening, warps / 2), warps - larger(warps / 4, 1)), 0};
  }
  bool half = quantization(c) != TY_QUANTIZE_NONE || (has_few_blocks(c) && (far || c.node_ranks <= 2));
  return {half ? warps / 2 : larger(warps / 4, 1), 0};
}

// Who goes through a pass.
TY_DEVICE Teams teams_in(const Kept &kept) { return {load(&kept.sending), load(&kept.apart)}; }
TY_DEVICE Team team_in(const Kept &kept, u32 kind) {
  Teams teams = teams_in(kept);
  return kind == pass_announce ? whole_block() : kind == pass_place ? teams.receive() : teams.send();
}

// Which rank of the node gets part i of all rows first, of those that a warp's lanes hold at once: each part's is
// another, lest all ranks store to the same one at once. In one node; the kernel of several has no register left for
// it, and waits for the wire. Fibonacci hashing: Knuth, The Art of Computer Programming 3, 6.4.
TY_DEVICE u32 first_peer(const Context auto &c, u32 i) {
  return (i * 2654435769u >> 16) * (c.node_ranks < warp_size ? c.node_ranks : warp_size) >> 16;
}

// Carries the items of a pass. By a warp. False once a deadline passed.
template <bool far>
TY_DEVICE bool carry_items(const DispatchArgs auto &a, PlaceShared &shared, u32 kind, const Kept &kept) {
  const auto &c = a.context;
  const Pass &pass = kept.pass;
  bool places = kind == pass_place, packs = far && kind == pass_pack, forwards = far && kind == pass_forward;
  bool direct = places_own(a);
  u32 *placed = &state_of(c)->placed[load(&kept.epoch) & 1];
  u32 apart = far ? 0 : load(&kept.apart), blocks = apart ? apart : worker_count(c);
  bool of_all = places && apart;
  u32 next = of_all ? ask_next_of_all(placed) : load(&pass.work.first);
  TY_ROLLED
  for (;;) {
    u32 step = load(&pass.work.step), i = of_all ? shuffle(next, 0) : next;
    if (step == 0 && !of_all) i += take_next(&shared.taken[kind]) * blocks;
    if (i >= load(&pass.work.end)) return true;
    // The next is asked for while this one is carried.
    if (of_all) next = ask_next_of_all(placed);
    else next += step;
    u32 cut = load(&pass.work.cut), slot = i >> cut, source = c.rank, token = load(&pass.first) + slot;
    Slices slices = part_of_row(i, cut);
    TokenMeta said;
    RowAt from;
    if (places) {
      Quotient place = divide(slot, c.ranks, c.ranks_inverse);
      source = place.rest;
      slot = place.whole;
      if (slot >= wave_tokens_of(shared, source)) continue;
      token = load(&shared.source_first[source]) + slot;
      RowFrom where = RowFrom::inbox;
      if (direct && source == c.rank) where = RowFrom::own;
      else if (far && places_landed(c) && source != c.rank) where = RowFrom::landed;
      Arrival arrival = wait_row(a, wave_in(kept), source, token, slot, slices, fits(a, shared), where, said);
      if (arrival == Arrival::failed) return false;
      if (arrival == Arrival::absent) continue;
      RowTo at = inbox_row(c, c.local, load(&kept.epoch), source, slot);
      from = {at.payload, at.scales, 1, TY_QUANTIZE_NONE};
      if (where == RowFrom::own) from = own_row(a, token);
      if (where == RowFrom::landed) from = landed_row(c, wave_in(kept), served_source(c, source), slot);
    } else if (forwards) {
      source = served_home(c, load(&pass.served));
      u32 chunk = chunk_of_row(lane_of(c, TY_LANE_DISPATCH), slot);
      if (!wait_chunk(c, wave_in(kept), load(&pass.served), chunk)) return false;
      from = landed_row(c, wave_in(kept), load(&pass.served), slot);
    } else {
      from = own_row(a, token);
    }
    i32 mine = -1; // output row of this lane's choice
    auto find_places = [&]() -> u64 {
      mine = row_of_choice(a, shared, source, said);
      if (slices.first == 0) describe_choice(a, source, token, said, mine);
      return warp_ballot(mine >= 0);
    };
    // The first place of a peer's row is where it lies.
    bool lies = in_place(c) && places && source != c.rank, stuck = false;
    u64 others = 0;
    if (lies) {
      u64 all = find_places();
      others = all & (all - 1);
      if (others == 0) continue;
      RowTo first = output_row(a, static_cast<u64>(shuffle(mine, lowest_bit(all))));
      from = {first.payload, first.scales, 1, TY_QUANTIZE_NONE};
    }
    u64 mask = carry_row(
        c, from, slices, places ? scale_stride(a) : 1,
        places || far ? 0 : first_peer(c, slot * TY_SLICES + slices.first),
        [&]() -> u64 {
          if (forwards) return landed_ranks(a, wave_in(kept), load(&pass.served), slot, token);
          if (packs) return packed_nodes(c, token);
          if (!places) {
            u64 ranks = warp_ranks_of(c, caller_choices(a), token);
            if (slices.first == 0 && lane_index() == 0) store(pointer<u64>(a.handle.rank_mask) + token, ranks);
            if (in_place(c)) ranks &= find_targets(a, load(&kept.epoch), token, stuck);
            return direct ? ranks & ~(1ull << c.local) : ranks;
          }
          return lies ? others : find_places();
        },
        [&](u32 bit) {
          if (places) return output_row(a, static_cast<u64>(mine));
          if (in_place(c)) return target_row(c, bit);
          return packs ? staging_row(c, wave_in(kept), load(&kept.tokens), token, bit)
                       : inbox_row(c, bit, load(&kept.epoch), source, slot);
        });
    if (stuck) return false;
    if (packs) count_row(c, wave_in(kept), load(&kept.tokens), token, mask, slices);
    else if (!places) raise_tags(c, mask, load(&kept.epoch), source, slot, slices);
  }
}

// What is said ahead of rows: heads of messages, whose way is the longest, and META of own tokens; as a rail, META of
// what landed, of all sources side by side. Each is some block's, tile by tile: a tile waits for those before it, which
// other blocks have in hand by then or this one has behind it. By a team. False once a deadline passed.
// `apart`: of the last blocks, which send rows and do not call this. `closed`: as mark_tile's.
template <bool far>
TY_DEVICE bool announce(const DispatchArgs auto &a, const Team &team, MetaShared &shared, const Wave &wave, i32 found,
                        bool refused, bool forwards, u32 apart, bool &closed) {
  const auto &c = a.context;
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  bool begins = wave.number == 0;
  u32 links = far && !forwards ? l.targets : 0, pairs = forwards ? l.sources * c.node_ranks : c.node_ranks;
  // Tiles that a message turns out not to have are nobody's work.
  u32 tiles = forwards ? (begins ? c.max_tiles : 1) : begins ? tile_count(c, own_choices(a, found).tokens) : 0;
  u32 all = links + tiles * pairs;
  TY_ROLLED
  for (u32 i = block_index(); i < all; i += worker_count(c) - apart) {
    bool heads = far && i < links;
    u32 number = 0, pair = i - links, j = 0;
    TY_ROLLED
    for (; !heads && pair >= pairs; pair -= pairs) ++number;
    TY_ROLLED
    for (; !heads && pair >= c.node_ranks; pair -= c.node_ranks) ++j;
    if (far && forwards && !wait_head(c, team, wave, j)) return false;
    Choices in = far && forwards ? wire_choices(c, wave.epoch, j) : own_choices(a, found);
    if (far && forwards) {
      if (number >= tile_count(c, in.tokens)) continue;
      forward_numbers(a, team, wave, in, j, pair, number);
      if (!begins) continue;
    }
    if (heads) {
      pack_head(a, in, wave, i, refused);
    } else {
      Tile tile = tile_at(c, in, pair, number);
      for (u32 e = team_thread(team); e <= tile.experts; e += team_threads(team)) store(&shared.start[e], 0u);
      bool faulty = mark_tile(c, team, in, shared, tile, closed) || in.bad;
      if (closed) return false;
      u64 *masks = far && forwards && pair == c.local ? rail_masks(c, a.handle, j) : nullptr;
      if (!publish_tile(c, team, in, shared, wave.call, tile, forwards ? 1 + j : 0, number, faulty, masks))
        return false;
      if (in.own && pair == c.local && is_last_tile(in, tile) && team_thread(team) == 0) keep_own(a, in, wave, faulty);
    }
    team_barrier(team);
  }
  return true;
}

// What comes before messages to other nodes: staging is free, and it is known which tokens go to each. `refused` is set
// if a choice is faulty. By a whole block. False once a deadline passed.
TY_DEVICE bool begin_messages(const DispatchArgs auto &a, const Wave &wave, i32 found, u32 &refused) {
  const auto &c = a.context;
  // By the warp that marks last, while the others do.
  bool stuck = warp_index() + 1 == block_warps() &&
               !wait_staging_share(c, TY_LANE_DISPATCH, wave.epoch, lane_index(), warp_size);
  refused = mark_nodes(c, own_choices(a, found)) ? 1 : 0;
  return !block_any(stuck);
}

// What comes before the items of a sending pass. By a team. False if there is nothing to do, or a deadline passed.
template <bool far> TY_DEVICE bool begin_sending(const Context auto &c, const Team &team, const Wave &wave, u32 kind) {
  if (!far || kind == pass_announce || kind == pass_pack) return true;
  if (!wait_free(c, team, c.regions.dispatch_free, wave.epoch)) return false;
  return kind != pass_forward || lane_of(c, TY_LANE_DISPATCH).sources != 0;
}

static_assert(TY_STAGE_FAR == TY_STAGE_PUBLISHED + pass_pack && TY_STAGE_NEAR == TY_STAGE_PUBLISHED + pass_push &&
                  TY_STAGE_RAIL == TY_STAGE_PUBLISHED + pass_forward,
              "by pass");

// What comes behind. By a team.
TY_DEVICE void end_sending(const Context auto &c, const Team &team, u32 kind) {
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_PUBLISHED + kind, team_thread(team) == 0);
}

// Whether a launch has a pass.
template <bool far> TY_DEVICE bool has_pass(u32 phases, u32 kind) {
  if (kind == pass_place) return (phases & TY_PHASE_RECEIVE) != 0;
  if (kind == pass_forward) return far && (phases & TY_PHASE_RECEIVE) != 0;
  return (far || kind != pass_pack) && (phases & TY_PHASE_SEND) != 0;
}

// `closed`: as finds_closed.
template <bool far>
TY_DEVICE void work_dispatch(const DispatchArgs auto &a, const Wave &wave, i32 found, const Teams &teams, bool closed) {
  const auto &c = a.context;
  DispatchShared &shared = block_shared<DispatchShared>();
  u32 tokens = own_choices(a, found).tokens, apart = far ? 0 : teams.apart;
  u32 first_sender = apart ? worker_count(c) - apart : 0;
  bool apart_sends = apart && block_index() >= first_sender;
  // With one node nothing else is announced, and this is all of that code; it comes first in the kernel, where blocks
  // that have nothing to announce get by soonest.
  if (!far && !apart_sends && (a.phases & TY_PHASE_SEND)) {
    if (!announce<far>(a, whole_block(), shared.meta, wave, found, false, false, apart, closed)) return;
    end_sending(c, whole_block(), pass_announce);
  }
  if (in_place(c) && (!apart || apart_sends) && !plan_targets(a, wave.epoch)) return;
  u32 busy = busy_blocks(c, wave, a.phases, tokens), refused = 0;
  bool begins = far && (a.phases & TY_PHASE_SEND) != 0;
  if (begins && !begin_messages(a, wave, found, refused)) return;
  // Most blocks have nothing to announce, and are soonest at what they carry.
  bool skips = begins && block_index() >= busy;
  if (skips) end_sending(c, whole_block(), pass_announce);
  Kept own{{}, found, tokens, busy, apart, refused, teams.sending, wave.number, wave.epoch, wave.call};
  Kept &kept = far ? block_shared<NodesShared>().kept[warp_index()] : own;
  if (far) {
    if (lane_index() == 0) store_kept(kept, own);
    warp_barrier();
  }
  TY_ROLLED
  for (u32 kind = !far ? pass_push : skips ? pass_pack : pass_announce; kind <= pass_place; ++kind) {
    if (!has_pass<far>(a.phases, kind) || (kind == pass_push && apart && !apart_sends)) continue;
    bool announces = far && kind == pass_announce, places = kind == pass_place, forwards = far && kind == pass_forward;
    Team team = team_in(kept, kind);
    bool member = is_member(team);
    if (places) {
      if (member && !begin_placing(a, team, shared.place, wave_in(kept), closed)) return;
      if (!member) take_over();
      // By those that have sent where there are two teams, as the others wait for rows.
      if (!(member && is_one_of_two(team)) && load(&shared.place.planned))
        describe_output(a, member ? team : teams_in(kept).send(), shared.place, wave_in(kept));
      if (!member && !load(&shared.place.helped)) return;
    } else if (!member) {
      continue;
    } else if (!begin_sending<far>(c, team, wave_in(kept), kind)) {
      kind = pass_forward;
      continue;
    }
    if (announces || forwards) {
      bool said = announce<far>(a, team, shared.meta, wave_in(kept), load(&kept.found), load(&kept.refused) != 0,
                                forwards, 0, closed);
      if (!said && announces) return;
      if (!said) continue;
    }
    Pass pass{};
    Served served{0, 1, 0};
    u32 sources = announces ? 0 : 1;
    if (places) {
      pass.work = place_work(c, team, shared.place, kept);
    } else if (forwards) {
      served = served_by(c, team);
      sources = places_landed(c) ? 0 : lane_of(c, TY_LANE_DISPATCH).sources;
    } else {
      Range range = own_range(c, wave_in(kept), load(&kept.tokens));
      pass.first = range.first;
      pass.work = share_sent(c, team, shared.place, kind, kept, range.end - range.first, closed);
    }
    bool carried = !closed;
    TY_ROLLED
    for (u32 j = served.first; carried && j < sources; j += served.step) {
      if (forwards) {
        carried = wait_chunk(c, wave_in(kept), j, 0);
        if (!carried) break;
        WireWave landed = landed_wave(a, wave_in(kept), j);
        pass = {served_rows(c, served, j, landed.shape.rows), landed.rows.first, j};
      }
      if (far) keep_pass(kept.pass, pass);
      else kept.pass = pass;
      carried = carry_items<far>(a, shared.place, kind, kept);
    }
    team = team_in(kept, kind);
    if (!places && carried) {
      if (kind == pass_push && block_index() == first_sender) raise_round(c, team, load(&kept.epoch));
      end_sending(c, team, kind);
    }
    if (places && is_member(team)) end_placing(a, team, wave_in(kept), carried);
  }
}

// `far`: there are several nodes. Kernels of one node are without what goes on between nodes: code that is not there is
// not fetched either.
template <bool far> TY_DEVICE void dispatch(const DispatchArgs auto &a) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_BEGIN, thread_index() == 0);
  TurnWords turn = ask_turn(c, TY_DIRECTION_DISPATCH);
  // What is loaded again behind an acquisition is a trip to memory.
  i32 found = a.phases & TY_PHASE_SEND ? agree_count(a, find_count(a)) : 0;
  Teams teams = teams_of<far>(c, a.phases, own_choices(a, found).tokens);
  u64 epoch = begin_turn(c, turn, TY_DIRECTION_DISPATCH, a.phases, a.wave, a.handle.call);
  Wave wave = wave_of(c, epoch);
  if (far && wave.epoch != 0 && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, wave);
  } else if (wave.epoch != 0) {
    work_dispatch<far>(a, wave, found, teams, finds_closed(c, turn));
  }
  u64 ended = end_turn(c, TY_DIRECTION_DISPATCH, a.phases, a.handle.call);
  if (ended == 0 || !(a.phases & TY_PHASE_RECEIVE)) return;
  if (far) publish_free(c, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, ended);
  // Used by the epoch before, and by the one behind.
  if (!far && block_index() == 0) store(&state_of(c)->placed[(ended + 1) & 1], 0u);
  if (block_index() == 0 && is_last(c, wave_of(c, ended)))
    store(&pointer<ty_handle_head>(a.handle.head)->state, a.handle.serial);
}

TY_KERNEL(ty_dispatch, ty_dispatch_args) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_nodes, ty_dispatch_args) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_in_place, InPlaceDispatchArgs) { dispatch<false>(a); }

// Plain calls, by layout of the output.
template <bool far> using PlainContiguous = PlainDispatchArgs<far, Plain::nothing_else, TY_LAYOUT_CONTIGUOUS>;
template <bool far> using PlainMasked = PlainDispatchArgs<far, Plain::nothing_else, TY_LAYOUT_MASKED>;
template <bool far> using PlainToken = PlainDispatchArgs<far, Plain::nothing_else, TY_LAYOUT_TOKEN>;
template <bool far> using QuantizeContiguous = PlainDispatchArgs<far, Plain::quantizes, TY_LAYOUT_CONTIGUOUS>;
template <bool far> using QuantizeMasked = PlainDispatchArgs<far, Plain::quantizes, TY_LAYOUT_MASKED>;
TY_KERNEL(ty_dispatch_plain_contiguous, PlainContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_plain_contiguous_nodes, PlainContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_plain_masked, PlainMasked<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_plain_masked_nodes, PlainMasked<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_plain_token, PlainToken<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_plain_token_nodes, PlainToken<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_quantize_contiguous, QuantizeContiguous<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_quantize_contiguous_nodes, QuantizeContiguous<true>) { dispatch<true>(a); }
TY_KERNEL(ty_dispatch_quantize_masked, QuantizeMasked<false>) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_quantize_masked_nodes, QuantizeMasked<true>) { dispatch<true>(a); }

} // namespace ty
