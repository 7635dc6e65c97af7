// Dispatch by an earlier dispatch's handle: new rows go where those of the earlier one went. Nothing is announced and
// no counts are awaited, since every rank's handle has what the metadata said. As for any dispatch but:
//
//   pack      messages of heads and rows, without headers
//   push      to the ranks in the handle, as many tokens as the handle's dispatch had
//   forward   to the ranks in the rail's handle
//   place     at the rows in the handle; nothing is described
//
// A rank whose number of tokens is another than the handle's sends no rows: it raises tags that say so, and its message
// heads say so to rails. All ranks must give the handles of one dispatch: N1 carries its number, as combine flags do,
// and so do message heads.
#pragma once
#include "dispatch/receive.cuh"

namespace ty {

// The handle's head: a copy that the block shares where the handle_may_change, after begin_launch.
TY_DEVICE const ty_handle_head *head_of(const DispatchArgs auto &a) {
  if (handle_may_change(a.context)) return &block_shared<DispatchShared>().head;
  return pointer<const ty_handle_head>(a.handle.head);
}

// By thread 0, before begin_launch.
TY_DEVICE void keep_head(const DispatchArgs auto &a) {
  const ty_handle_head *live = pointer<const ty_handle_head>(a.handle.head);
  ty_handle_head &kept = block_shared<DispatchShared>().head;
  store(&kept.epoch, load(&live->epoch));
  store(&kept.state, load(&live->state));
  store(&kept.incomplete, load(&live->incomplete));
  store(&kept.own_tokens, load(&live->own_tokens));
  store(&kept.own_bad, load(&live->own_bad));
}

// The epoch of a launch whose handle has been received; else 0, and the launch does nothing. By a whole block, after
// begin_launch.
TY_DEVICE u64 check_handle(const DispatchArgs auto &a, const Progress &progress, u64 epoch) {
  if (epoch == 0 || load(&head_of(a)->state) == a.handle.serial) return epoch;
  if (thread_index() == 0) keep_epoch(0);
  if (block_index() == 0 && thread_index() == 0 && progress.closed == 0)
    keep_fault({TY_ERROR_ORDER, 0, a.context.rank, epoch, TY_ORDER_HANDLE_EMPTY, 0, 0});
  return 0;
}

// Own tokens that the handle's dispatch sent.
TY_DEVICE u32 tokens_sent(const DispatchArgs auto &a) {
  const ty_handle_head *head = head_of(a);
  u32 tokens = load(&head->own_bad) ? 0 : load(&head->own_tokens);
  return smaller(tokens, a.context.max_tokens);
}

// Whether the call has another number of tokens, `found`; reported by one thread of the rank in the first round.
// `closed`: as finds_closed.
TY_DEVICE bool differs_in_tokens(const DispatchArgs auto &a, const Round &round, i32 found, bool closed) {
  const ty_handle_head *head = head_of(a);
  u32 tokens = load(&head->own_tokens);
  if (load(&head->own_bad) || static_cast<u32>(found) == tokens) return false;
  if (round.number == 0 && !closed && block_index() == 0 && thread_index() == 0)
    keep_fault(
        {TY_ERROR_OTHER_COUNT, 0, a.context.rank, round.call, static_cast<u64>(static_cast<i64>(found)), tokens, 0});
  return true;
}

// What N1 and message heads say of a dispatch, for others to compare with their own: of one by an earlier handle the
// number of the handle's dispatch, mixed with that of the format, and 1 in the lowest bit; else the format's number,
// which is even.
TY_DEVICE u32 dispatch_status(const DispatchArgs auto &a) {
  u32 format = a.context.format;
  return goes_again(a) ? (static_cast<u32>(load(&head_of(a)->epoch)) << 1 ^ format) | 1 : format;
}

// Whether a node peer has raised N1 for the handle of another dispatch; its rows may then never come. By a thread.
TY_DEVICE bool gave_other(const DispatchArgs auto &a, u64 epoch, u32 source) {
  const auto &c = a.context;
  if (!is_node_peer(c, source)) return false;
  const u64 *flag = in_arena<const u64>(c, c.local, c.regions.meta_flags, epoch, source - c.node_first);
  u64 seen = load_relaxed_sys(flag);
  u32 theirs = static_cast<u32>(seen);
  if (seen >> 32 != (epoch & 0xffffffffu) || theirs == dispatch_status(a)) return false;
  refuse_other(a, epoch, source, dispatch_status(a), theirs);
  return true;
}

// The word by which a rank of this node learns, from a rail, that a source of another node has sent the round. Among
// the words that an announced dispatch waits for there are others, which are no words of this epoch.
TY_DEVICE u64 *sent_word(const Context auto &c, const Meta &meta, const Round &round) {
  return meta.counts + c.max_local_experts + 1 + round.number;
}

// Publishes for a rank of this node that a source has sent the round. Words that this epoch leaves out must not come to
// look new (see refreshed_token): those that every announced dispatch writes, and those of that token, become no words
// of any epoch. By a team.
TY_DEVICE void publish_sent(const Context auto &c, const Team &team, const Round &round, u32 destination, u32 source) {
  Meta meta = meta_of(c, destination, source, round.call);
  u64 *sent = sent_word(c, meta, round), word = meta_word(round.call, 0);
  if (round.number != 0) {
    if (team_thread(team) == 0) store_relaxed_sys(sent, word);
    return;
  }
  u32 counts = c.max_local_experts + 1 + c.rounds, token = refreshed_token(c, round.call);
  u64 first = static_cast<u64>(token) * c.top_k;
  for (u32 i = team_thread(team); i < counts; i += team_threads(team))
    store_relaxed_sys(meta.counts + i, meta.counts + i == sent ? word : u64{0});
  for (u32 k = team_thread(team); k < c.top_k; k += team_threads(team)) {
    store_relaxed_sys(meta.choices + first + k, u64{0});
    store_relaxed_sys(meta.weights + first + k, u64{0});
  }
  if (team_thread(team) != 0) return;
  store_relaxed_sys(meta.tokens + token, u64{0});
  if (spans_nodes(c)) store_relaxed_sys(meta.source_tokens + token, u64{0});
}

// After wait_round: waits until every source of other nodes has sent the round. All sources have then finished the
// epoch before, as counts show in announced dispatches: whoever is two epochs ahead would write where this rank still
// reads. By a team of one block.
TY_DEVICE void end_round(const DispatchArgs auto &a, const Team &team, const Round &round) {
  const auto &c = a.context;
  for (u32 source = team_thread(team); spans_nodes(c) && source < c.ranks; source += team_threads(team)) {
    u32 value = 0;
    if (!is_node_peer(c, source))
      (void)wait_meta(c, round.call, source, sent_word(c, meta_of(c, c.local, source, round.call), round), value);
  }
}

// ---- sending -----------------------------------------------------------------------------------------------------

// Marks which own tokens went to each other node, as mark_nodes does. By a whole block, whose threads meet at the end.
TY_DEVICE void mark_nodes_again(const DispatchArgs auto &a, u32 tokens) {
  const auto &c = a.context;
  NodesShared &shared = block_shared<NodesShared>();
  u32 words = tokens / 32 + 1;
  TY_ROLLED
  for (u32 first = warp_index() * warp_size; first < words * 32; first += block_threads()) {
    u32 token = first + lane_index();
    TY_ROLLED
    for (u32 node = 0; node < c.nodes; ++node) {
      const i32 *rows = pointer<const i32>(a.handle.wire_row) + static_cast<u64>(link_of_node(c, node)) * c.max_tokens;
      u32 here = warp_ballot(node != c.node && token < tokens && load(rows + token) >= 0);
      u32 word = nodes_word(c, node, first);
      if (lane_index() == 0) store(&shared.bitmap[word], here);
      if (lane_index() == 0) store(&shared.before[word], popcount(here));
    }
  }
  block_barrier();
  for (u32 node = warp_index(); node < c.nodes; node += block_warps()) {
    u32 row = nodes_word(c, node, 0);
    (void)scan(&shared.before[row], &shared.before[row], words);
  }
}

// The ranks of this node that an own token went to, one value for all lanes. By a warp.
TY_DEVICE u64 mask_again(const DispatchArgs auto &a, u32 token) {
  RankMasks masks = own_masks(a.handle);
  u64 all = a.context.node_ranks == 64 ? ~0ull : (1ull << a.context.node_ranks) - 1;
  if (!handle_may_change(a.context)) return masks.at(token) & all;
  return shuffle(lane_index() == 0 ? masks.at(token) : 0, 0) & all;
}

// ---- rail --------------------------------------------------------------------------------------------------------

// The round's range among the rows of served source j, by the handle.
TY_DEVICE Range range_again(const DispatchArgs auto &a, const Round &round, u32 j) {
  const auto &c = a.context;
  Range range = round_range(c, a.handle.rail_rows, j, round);
  range.end = smaller(range.end, c.max_tokens);
  return {smaller(range.first, range.end), range.end};
}

// Whether the rows of a message whose chunk 0 has arrived are as many as the handle has, and usable.
TY_DEVICE bool comes_again(const DispatchArgs auto &a, const Round &round, u32 j) {
  const ty_wire_head *head = wire_head(a.context, TY_DIRECTION_DISPATCH, round.epoch, j);
  Range range = range_again(a, round, j);
  return load(&head->status) == TY_STATUS_OK && load(&head->rows) == range.end - range.first;
}

// ---- placing -----------------------------------------------------------------------------------------------------

// What plan_output computes from counts, by the handle; without what describes the output. By a team.
TY_DEVICE void plan_again(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Round &round) {
  const auto &c = a.context;
  for (u32 s = team_thread(team); s < c.ranks; s += team_threads(team)) {
    Range range = round_range(c, a.handle.source_tokens, s, round);
    u32 end = smaller(range.end, c.max_tokens);
    store(&shared.source_first[s], smaller(range.first, end));
    store(&shared.source_end[s], end);
  }
  team_barrier(team);
  if (team_warp(team) == 0) {
    u32 most = 0, tokens = 0;
    for (u32 s = lane_index(); s < c.ranks; s += warp_size) {
      u32 here = round_tokens_of(shared, s);
      most = here > most ? here : most;
      tokens += here;
    }
    most = warp_max(most);
    tokens = warp_sum(tokens);
    bool incomplete = load(&head_of(a)->incomplete) != 0;
    if (lane_index() == 0) {
      // An output of the handle's dispatch that was too small has no rows to go to.
      store(&shared.needed, incomplete ? ~0u : 0u);
      store(&shared.most, most);
      store(&shared.tokens, tokens);
      store(&shared.helped, needs_help(c, team, tokens) ? 1u : 0u);
      store(&shared.taken[pass_place], 0u);
      store(&shared.planned, 0u);
      if (incomplete && round.number == 0 && block_index() == 0)
        keep_fault({TY_ERROR_ORDER, 0, c.rank, round.epoch, TY_ORDER_HANDLE_INCOMPLETE, 0, 0});
    }
  }
  team_barrier(team);
}

// The output row of this lane's choice of a token, by the handle; -1 for none. By a warp.
TY_DEVICE i32 row_again(const DispatchArgs auto &a, u32 source, u32 token) {
  const auto &c = a.context;
  u64 at = static_cast<u64>(source) * c.max_tokens + token;
  i32 slot = load(pointer<const i32>(a.handle.slots) + at), mine = -1;
  if (handle_may_change(c)) slot = shuffle(slot, 0);
  if (slot < 0) return -1;
  if (!a.handle.row_choices) {
    if (lane_index() < c.top_k) mine = load(pointer<const i32>(a.handle.rows) + at * c.top_k + lane_index());
  } else {
    // At most a row a choice, whatever another dispatch writes meanwhile.
    u32 next = static_cast<u32>(slot) >> handle_slot_bits;
    TY_ROLLED
    for (u32 k = 0; k < c.top_k && next != 0 && next <= output_rows(a); ++k) {
      u64 entry = load(pointer<const u64>(a.handle.row_choices) + next - 1);
      RowChoice choice = RowChoice::of(handle_may_change(c) ? shuffle(entry, 0) : entry);
      if (choice.choice == lane_index()) mine = static_cast<i32>(next - 1);
      next = choice.next;
    }
  }
  return static_cast<u32>(mine) < output_rows(a) ? mine : -1;
}

// Waits for the word of a slice, in which its source may say that it sends no row. By a thread. False once a deadline
// passed.
TY_DEVICE bool wait_slice(const DispatchArgs auto &a, const RowNews &news, u64 epoch, u32 source, bool &absent) {
  const auto &c = a.context;
  u64 start = 0;
  for (u32 poll = 0;; ++poll) {
    u64 seen = load_relaxed_sys(news.word);
    if ((seen & ~tag_absent) == epoch) {
      // N2, or E6 of a row that is placed from where it arrived: acquired once.
      absent = load_acquire_sys(news.word) != epoch;
      return true;
    }
    if (poll != 0 && !may_wait(c, Wait{news.site, source, epoch, 0}, poll, start, epoch, seen)) return false;
    if (poll % polls_between_checks == polls_between_checks - 1 && gave_other(a, epoch, source)) return false;
    spin_pause("row");
  }
}

// Waits for an item's slices, and looks up the rows that it goes to: `mine` for this lane's choice. By a warp. Absent
// also if its source sends none, or the output has no `room`.
TY_DEVICE Arrival wait_again(const DispatchArgs auto &a, const Kept &kept, const Item &item, RowFrom from, bool room,
                             i32 &mine) {
  const auto &c = a.context;
  Round round = round_in(kept);
  u32 slice = item.slices.first + lane_index();
  RowNews news = row_news(c, round.epoch, item.source, item.slot, slice, from);
  mine = room ? row_again(a, item.source, item.token) : -1;
  if (warp_ballot(mine >= 0) == 0) return Arrival::absent;
  bool failed = false, absent = from == RowFrom::own && load(&kept.refused) != 0;
  if (slice < item.slices.end && news.word) failed = !wait_slice(a, news, round.epoch, item.source, absent);
  // Chunks come in any order, and the head is in the first.
  if (from == RowFrom::arrived) failed |= !wait_chunk(c, round, link_of_source(c, item.source), 0);
  // Some lanes acquired; the barrier orders the other lanes' loads after that.
  warp_barrier();
  if (warp_ballot(failed)) return Arrival::failed;
  if (from == RowFrom::arrived) absent = !comes_again(a, round, link_of_source(c, item.source));
  if (!warp_ballot(absent)) return Arrival::here;
  // The source has reported the error to its own host.
  if (from != RowFrom::own && lane_index() == 0) note_refused(c, item.source, round.call);
  return Arrival::absent;
}

} // namespace ty
