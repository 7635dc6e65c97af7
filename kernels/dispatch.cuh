// Dispatch. Inside a node: Ds publishes META and pushes every token's row once to each rank that holds one of its
// experts; Dr places the rows expert by expert.
//
//   Ds  block b: META of (tile, rank) pairs b, b + blocks, ... -> META words     a quarter of the warps, or half where
//       rows are few: rows -> inbox[me][token] on each rank -> tags (release, N2)
//   Dr  the other warps: counts of all sources -> starts of all segments
//       warp per (source, token), or a part of its row: META words, tag (acquire) -> copies to final positions ->
//       handle
//
// In one launch both go on side by side. Between nodes: dispatch_wire.cuh, by the sending warps. A warp goes through
// its passes one after the other, and carries what there is in each by the same code (carry_row). Rows leave without
// waiting for counts: a row's inbox slot is (source, token), and counts decide only its final position. Receive order
// is (source rank, token) within each expert.
#pragma once
#include "dispatch_receive.cuh"

namespace ty {

// What the relay does while the others work. By its thread 0.
TY_DEVICE void relay_dispatch(const ty_dispatch_args &a, const Wave &wave) {
  const ty_context &c = a.context;
  if ((a.phases & TY_PHASE_SEND) && !relay_staging(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, wave.epoch)) return;
  if (a.phases & TY_PHASE_RECEIVE)
    relay_landed(c, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, wave.epoch,
                 [&](u32 j) { return landed_wave(c, wave.epoch, j).shape.rows; });
}

// Heads of messages first, since their way is the longest; both on other blocks, where there are enough. By a whole
// block. False once a deadline passed.
template <bool far>
TY_DEVICE bool publish(const ty_dispatch_args &a, const Choices &in, MetaShared &shared, const Wave &wave) {
  const ty_context &c = a.context;
  u32 links = far ? lane_of(c, TY_LANE_DISPATCH).targets : 0;
  u32 tiles = wave.number == 0 ? tile_count(c, in.tokens) : 0;
  for (u32 i = block_index(); i < links + tiles * c.node_ranks; i += worker_count(c)) {
    // The last tile first: with it go the counts.
    u32 pair = i - links;
    if (i >= links) publish_own_meta(a, in, shared, wave, pair % c.node_ranks, tiles - 1 - pair / c.node_ranks);
    else if (far && !pack_head(a, in, shared, wave, i)) return false;
    block_barrier();
  }
  return true;
}

// Whether this rank has so few tokens that its warps have a part of one row each at the most.
TY_DEVICE bool has_few(const ty_context &c, u32 tokens) {
  return tokens * c.ranks <= worker_count(c) * block_warps() / 8;
}

// Who does what in a block. Sending and receiving go on side by side, each by warps of its own.
struct Teams {
  u32 sending; // warps; 0: all warps do one after the other

  TY_DEVICE Team send() const { return sending ? Team{1, 0, sending} : whole_block(); }
  TY_DEVICE Team receive() const { return sending ? Team{2, sending, block_warps() - sending} : whole_block(); }
};

// Few rows are cut finer, and leave sooner, by more warps; many are held up by the links, and their receivers by
// memory.
template <bool far> TY_DEVICE Teams teams_of(const ty_context &c, u32 phases, u32 tokens) {
  u32 warps = block_warps();
  if (!(phases & TY_PHASE_RECEIVE) || (!(phases & TY_PHASE_SEND) && !far) || warps < 2) return {0};
  return {has_few(c, tokens) ? warps / 2 : warps < 4 ? 1 : warps / 4};
}

// What the warps of a block carry, pass by pass: rows for other nodes, rows for the own one, what other nodes sent for
// it, rows to their final places. Senders go through the first three, those that place through the last.
constexpr u32 pass_pack = 0, pass_push = 1, pass_forward = 2, pass_place = 3;

// Carries the items of a pass. By a warp. False once a deadline passed.
template <bool far>
TY_DEVICE bool carry_items(const ty_dispatch_args &a, const PlaceShared &shared, const Wave &wave, u32 kind,
                           const Pass &pass) {
  const ty_context &c = a.context;
  bool places = kind == pass_place, packs = far && kind == pass_pack, forwards = far && kind == pass_forward;
  TY_ROLLED
  for (u32 i = load(&pass.work.first); i < load(&pass.work.end); i += load(&pass.work.step)) {
    u32 cut = load(&pass.work.cut), slot = i >> cut, source = c.rank, token = load(&pass.first) + slot;
    Slices slices = part_of_row(i, cut);
    TokenMeta said;
    RowAt from;
    if (places) {
      source = slot % c.ranks;
      slot /= c.ranks;
      if (slot >= wave_tokens_of(shared, source)) continue;
      token = load(&shared.source_first[source]) + slot;
      Arrival arrival = wait_row(a, wave, source, token, slot, slices, fits(a, shared), said);
      if (arrival == Arrival::failed) return false;
      if (arrival == Arrival::absent) continue;
      RowTo at = inbox_row(c, c.local, wave.epoch, source, slot);
      from = {at.payload, at.scales, 1, TY_QUANTIZE_NONE};
    } else if (forwards) {
      source = served_home(c, load(&pass.served));
      if (!wait_row_landed(c, wave, load(&pass.served), slot)) return false;
      from = landed_row(c, load(&pass.headers), wave, load(&pass.served), slot);
    } else {
      from = own_row(a, token);
    }
    i32 mine = -1; // output row of this lane's choice
    u64 mask = carry_row(
        c, from, slices, places ? scale_stride(a) : 1,
        [&]() -> u64 {
          if (forwards) return landed_ranks(a, wave, load(&pass.served), slot, token);
          if (packs) return packed_nodes(a, token);
          if (!places) return warp_ranks_of(c, caller_choices(a), token);
          mine = row_of_choice(a, shared, source, said);
          if (slices.first == 0) describe_choice(a, source, token, said, mine);
          return warp_ballot(mine >= 0);
        },
        [&](u32 bit) {
          if (places) return output_row(a, static_cast<u64>(mine));
          return packs ? staging_row(a, wave, token, bit) : inbox_row(c, bit, wave.epoch, source, slot);
        });
    if (packs) count_row(a, wave, token, mask, slices);
    else if (!places) raise_tags(c, mask, wave.epoch, source, slot, slices);
    if (kind == pass_push && slices.first == 0 && lane_index() == 0)
      store(pointer<u64>(a.handle.rank_mask) + token, mask);
  }
  return true;
}

// What comes before the items of a sending pass. By a team. False if there is nothing to do, or a deadline passed.
template <bool far>
TY_DEVICE bool begin_sending(const ty_dispatch_args &a, const Team &team, MetaShared &shared, const Wave &wave,
                             u32 kind) {
  const ty_context &c = a.context;
  if (!far) return true;
  if (kind == pass_pack) return wait_packed(c, team, TY_DIRECTION_DISPATCH, TY_LANE_DISPATCH, wave.epoch);
  if (!wait_free(c, team, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, wave.epoch)) return false;
  if (kind == pass_push) return true;
  return lane_of(c, TY_LANE_DISPATCH).sources != 0 && forward_metas(a, team, shared, wave);
}

static_assert(TY_STAGE_NEAR == TY_STAGE_FAR + pass_push && TY_STAGE_RAIL == TY_STAGE_FAR + pass_forward, "by pass");

// What comes behind. By a team.
TY_DEVICE void end_sending(const ty_context &c, const Team &team, const Wave &wave, u32 kind) {
  if (kind == pass_push && block_index() == 0) raise_round(c, team, wave.epoch);
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_FAR + kind, team_thread(team) == 0);
}

template <bool far> TY_DEVICE void work_dispatch(const ty_dispatch_args &a, const Wave &wave) {
  const ty_context &c = a.context;
  DispatchShared &shared = block_shared<DispatchShared>();
  bool sends = (a.phases & TY_PHASE_SEND) != 0, receives = (a.phases & TY_PHASE_RECEIVE) != 0;
  u32 tokens = 0;
  if (sends) {
    Choices in = own_choices(a);
    tokens = in.tokens;
    if (!publish<far>(a, in, shared.meta, wave)) return;
  }
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_PUBLISHED, sends && thread_index() == 0);
  Teams teams = teams_of<far>(c, a.phases, tokens);
  u32 kind = pass_place;
  if (is_member(teams.send()) && sends) kind = far ? pass_pack : pass_push;
  else if (is_member(teams.send()) && far) kind = pass_forward;
  TY_ROLLED
  for (; kind <= pass_place; ++kind) {
    bool places = kind == pass_place, forwards = far && kind == pass_forward;
    if ((!far && kind == pass_forward) || ((places || forwards) && !receives)) continue;
    u32 busy = sends ? busy_blocks(c, wave, tokens) : 0;
    Pass pass{};
    Served served{0, 1, 0};
    u32 sources = 1;
    if (places) {
      if (!is_member(teams.receive()) || !wait_counts(c, teams.receive(), shared.place, wave)) return;
      begin_placing(a, teams.receive(), shared.place, wave);
      pass.work = place_work(c, teams.receive(), shared.place, busy);
    } else if (!begin_sending<far>(a, teams.send(), shared.meta, wave, kind)) {
      kind = pass_forward;
      continue;
    } else if (forwards) {
      served = served_by(c, teams.send());
      sources = lane_of(c, TY_LANE_DISPATCH).sources;
    } else {
      Range range = own_range(c, wave, tokens);
      pass.first = range.first;
      pass.work = share_rows(c, teams.send(), busy, range.end - range.first);
    }
    bool carried = true;
    TY_ROLLED
    for (u32 j = served.first; carried && j < sources; j += served.step) {
      if (forwards) {
        carried = wait_row_landed(c, wave, j, 0);
        if (!carried) break;
        WireWave landed = landed_wave(c, wave.epoch, j);
        pass = {served_rows(c, served, j, landed.shape.rows), landed.rows.first, j, landed.shape.headers};
      }
      keep_pass(shared.pass[warp_index()], pass);
      carried = carry_items<far>(a, shared.place, wave, kind, shared.pass[warp_index()]);
    }
    if (places) end_placing(a, teams.receive(), shared.place, wave, carried);
    else if (carried) end_sending(c, teams.send(), wave, kind);
    else kind = pass_forward;
  }
}

// `far`: there are several nodes. Kernels of one node are without what goes on between nodes: code that is not there is
// not fetched either.
template <bool far> TY_DEVICE void dispatch(const ty_dispatch_args &a) {
  const ty_context &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_BEGIN, thread_index() == 0);
  Turn turn = begin_turn(c, TY_DIRECTION_DISPATCH, a.phases, TY_ORDER_DISPATCH_SEND, TY_ORDER_DISPATCH_RECEIVE);
  Wave wave = wave_of(c, turn.epoch);
  if (far && turn.go && is_relay(c)) {
    if (thread_index() == 0) relay_dispatch(a, wave);
  } else if (turn.go) {
    work_dispatch<far>(a, wave);
  }
  if (!end_turn(c, TY_DIRECTION_DISPATCH, a.phases, turn) || !(a.phases & TY_PHASE_RECEIVE)) return;
  if (far) publish_free(c, TY_DIRECTION_DISPATCH, c.regions.dispatch_free, turn.epoch);
  if (block_index() == 0 && is_last(c, wave))
    store(&pointer<ty_handle_head>(a.handle.head)->state, static_cast<u32>(TY_HANDLE_RECEIVED));
}

TY_KERNEL(ty_dispatch, ty_dispatch_args) { dispatch<false>(a); }
TY_KERNEL(ty_dispatch_nodes, ty_dispatch_args) { dispatch<true>(a); }

} // namespace ty
