// Dispatch, the receiving phase: starts of segments, rows to their final places, the handle for combine.
#pragma once
#include "dispatch/payload.cuh"
#include "dispatch/wire.cuh"

namespace ty {

// ---- receive: where rows go ----------------------------------------------------------------------------------

// A source's number of rows, from its metadata. By the thread that waited for the word.
TY_DEVICE u32 rows_received(const Context auto &c, const Round &round, u32 source, u32 value) {
  if (value != meta_refused) return value;
  // The source has reported the error to its own host.
  if (block_index() == 0 && source != c.rank) note_refused(c, source, round.call);
  return 0;
}

// Words awaited of each source: rows of each expert, rows of all, where the round ends, and where it begins.
TY_DEVICE u32 counted_words(const Context auto &c) { return c.local_experts + 3; }

// The block that writes what accompanies the rows: it has neither metadata nor the first rows.
TY_DEVICE bool is_describer(const Context auto &c) { return block_index() == worker_count(c) / 2; }

// Keeps word number `word` of those awaited of a source: after the experts' counts all rows, then the round's end, then
// its begin.
TY_DEVICE void keep_count(const Context auto &c, PlaceShared &shared, const Round &round, u32 source, u32 word,
                          u32 value) {
  u32 past = word - c.local_experts;
  if (word < c.local_experts) store(&shared.before[source * c.local_experts + word], value);
  else if (past == 0) store(&shared.source_rows[source], rows_received(c, round, source, value));
  else if (past == 1) store(&shared.source_end[source], value);
  else store(&shared.source_first[source], value);
}

// Where that word is; the begin of a round is the end of the round before.
TY_DEVICE const u64 *count_word(const Context auto &c, const Round &round, u32 source, u32 word) {
  u32 past = word - c.local_experts;
  u32 place = word < c.local_experts ? word : c.max_local_experts + (past == 0 ? 0 : round.number + 2 - past);
  return in_arena<const u64>(c, c.local, c.regions.meta_counts, round.call, source) + place;
}

// Where ranks may be absent: decides which sources take part in a call, after a team has waited. Those of which another
// block has all counts do: what this team lacks of them is here by then. Of others no tokens count. By a team, which
// noted in `shared.absent` of which sources it lacks counts; `seen`: the word of each thread's first source. False once
// the context is closed.
TY_DEVICE bool decide_sources(const Context auto &c, const Team &team, PlaceShared &shared, const Round &round,
                              u32 seen) {
  u32 lacking = load(&shared.absent);
  bool failed = false;
  for (u32 source = team_thread(team); source < c.ranks; source += team_threads(team)) {
    bool lacks = ((lacking >> source) & 1) != 0;
    u32 *decided = part_word(c, TY_DIRECTION_DISPATCH, source);
    if (source >= team_threads(team)) seen = load_relaxed_gpu(decided);
    Part part = decide_part(decided, seen, round.call, lacks ? Part::absent : Part::present);
    if (!lacks && part == Part::present) continue;
    for (u32 word = 0; word < counted_words(c); ++word) {
      u32 value = 0;
      if (part == Part::present && word != c.local_experts + 2)
        failed |= !wait_meta(c, round.call, c.rank, count_word(c, round, source, word), value);
      keep_count(c, shared, round, source, word, value);
    }
  }
  return !team_any(team, failed);
}

// Waits for the counts of every source, and for where the round begins and ends in its tokens, and keeps them. By a
// team. False once a deadline passed. `closed`: as finds_closed.
TY_DEVICE bool wait_counts(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Round &round,
                           bool closed) {
  const auto &c = a.context;
  WaitTimes waits = begin_waits(is_describer(c) ? a.output.wait_times : 0);
  bool failed = closed;
  u32 words = counted_words(c);
  u32 seen = 0; // before the counts, which take longer to come
  if (tolerates_absence(c)) {
    if (team_thread(team) < c.ranks) seen = load_relaxed_gpu(part_word(c, TY_DIRECTION_DISPATCH, team_thread(team)));
    if (team_thread(team) == 0) store(&shared.absent, 0u);
    team_barrier(team);
  }
  for (u32 i = team_thread(team); i < words * c.ranks; i += team_threads(team)) {
    auto [source, e] = divide(i, words, c.counts_inverse);
    u32 value = 0;
    const u64 *word = count_word(c, round, source, e);
    bool first = e == c.local_experts + 2 && round.number == 0;
    bool received = first || (!was_cut_off(c, source) && wait_meta(c, round.call, source, word, value));
    failed |= fails(c, received);
    if (tolerates_absence(c) && !received) atomic_or_block(&shared.absent, 1u << source);
    // A word that did not arrive belongs to an earlier call.
    if (!received || first) value = 0;
    keep_count(c, shared, round, source, e, value);
    if (e != c.local_experts || (!received && !tolerates_absence(c))) continue;
    if (received) note_notified(c, TY_DIRECTION_DISPATCH, source);
    waits.add(source);
  }
  if (team_any(team, failed)) return false;
  return !tolerates_absence(c) || decide_sources(c, team, shared, round, seen);
}

// Tokens of a source in this round. Rails bound the ranges of other nodes' sources, whatever those reported
// (arrived_round).
TY_DEVICE u32 round_tokens_of(const PlaceShared &shared, u32 source) {
  return load(&shared.source_end[source]) - load(&shared.source_first[source]);
}

// Warps that have sent help if each placing warp has at least so many rows: with fewer it finishes before they come.
constexpr u32 rows_to_help = 2;
TY_DEVICE bool needs_help(const Context auto &c, const Team &team, u32 tokens) {
  return is_one_of_two(team) && tokens > rows_to_help * worker_count(c) * team.warps;
}

// Computes, from the counts, where segments start, how many tokens the round has, and whether the other team helps. By
// a warp of the placing team.
TY_DEVICE void plan_segments(const DispatchArgs auto &a, const Team &team, PlaceShared &shared) {
  const auto &c = a.context;
  u32 needed = 0, used = 0;
  if (a.output.layout == TY_LAYOUT_CONTIGUOUS) {
    needed = used = scan(shared.start, shared.rows, c.local_experts, a.output.align, a.output.align_inverse);
    if (lane_index() == 0) store(&shared.start[c.local_experts], needed);
  } else if (a.output.layout == TY_LAYOUT_MASKED) {
    used = scan(shared.start, shared.rows, c.local_experts);
    for (u32 e = lane_index(); e < c.local_experts; e += warp_size) {
      u32 rows = load(&shared.rows[e]);
      needed = rows > needed ? rows : needed;
    }
    needed = warp_max(needed);
  } else {
    needed = used = scan(shared.source_start, shared.source_rows, c.ranks);
  }
  u32 most = 0, tokens = 0;
  for (u32 s = lane_index(); s < c.ranks; s += warp_size) {
    // Ends that stem from two different calls make no round: see "Calls that overlap" in docs/failure.md.
    if (c.rounds > 1 && round_tokens_of(shared, s) > c.round_tokens)
      store(&shared.source_end[s], load(&shared.source_first[s]));
    u32 here = round_tokens_of(shared, s);
    most = here > most ? here : most;
    tokens += here;
  }
  most = warp_max(most);
  tokens = warp_sum(tokens);
  if (lane_index() != 0) return;
  store(&shared.needed, needed);
  store(&shared.used, used);
  store(&shared.most, most);
  store(&shared.tokens, tokens);
  store(&shared.helped, needs_help(c, team, tokens) ? 1u : 0u);
  store(&shared.taken[pass_place], 0u);
  store(&shared.planned, 1u);
}

// Sources whose counts are loaded together.
constexpr u32 sources_ahead = 4;

// Sums the rows of every expert, and the part from earlier sources; calls keep(expert, rows). By a team.
template <typename Keep>
TY_DEVICE void add_sources(const Context auto &c, const Team &team, PlaceShared &shared, Keep keep) {
  TY_ROLLED
  for (u32 e = team_thread(team); e < c.local_experts; e += team_threads(team)) {
    u32 sum = 0;
    TY_ROLLED
    for (u32 first = 0; first < c.ranks; first += sources_ahead) {
      u32 *rows = &shared.before[first * c.local_experts + e], own[sources_ahead];
      TY_UNROLL
      for (u32 i = 0; i < sources_ahead; ++i) own[i] = first + i < c.ranks ? load(rows + i * c.local_experts) : 0;
      TY_UNROLL
      for (u32 i = 0; i < sources_ahead; sum += own[i], ++i)
        if (first + i < c.ranks) store(rows + i * c.local_experts, sum);
    }
    keep(e, sum);
  }
}

// Gives the host the rows of each expert and the tokens of each source that have a row here, as they will be placed. By
// a team of one block. `closed`: as finds_closed.
TY_DEVICE void give_counts(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Round &round,
                           bool closed) {
  const auto &c = a.context;
  if (!wait_counts(a, team, shared, round, closed)) return;
  u64 number = static_cast<u64>(a.counts_number) << 32;
  auto give = [&](u32 i, u32 count) { store_relaxed_sys(pointer<u64>(a.first_counts) + i, number | count); };
  add_sources(c, team, shared, give);
  TY_ROLLED
  for (u32 source = team_thread(team); source < c.ranks; source += team_threads(team))
    give(c.local_experts + source, load(&shared.source_rows[source]));
}

// After wait_counts. By a team.
TY_DEVICE void plan_output(const DispatchArgs auto &a, const Team &team, PlaceShared &shared) {
  add_sources(a.context, team, shared, [&](u32 e, u32 rows) { store(&shared.rows[e], rows); });
  team_barrier(team);
  if (team_warp(team) == 0) plan_segments(a, team, shared);
  team_barrier(team);
}

// Whether the output has room, or takes what it has room for, once it is planned.
TY_DEVICE bool fits(const DispatchArgs auto &a, const PlaceShared &shared) {
  return a.output.drop_overflow || load(&shared.needed) <= a.output.capacity;
}

// Rows of a local expert that are placed, in an output that fits.
TY_DEVICE u32 rows_placed(const DispatchArgs auto &a, const PlaceShared &shared, u32 expert) {
  u32 rows = load(&shared.rows[expert]);
  if (!a.output.drop_overflow) return rows;
  u64 start = a.output.layout == TY_LAYOUT_MASKED ? 0 : load(&shared.start[expert]);
  u64 room = start < a.output.capacity ? a.output.capacity - start : 0;
  return rows < room ? rows : static_cast<u32>(room);
}

// First output row of a local expert.
TY_DEVICE u64 segment_start(const DispatchArgs auto &a, const PlaceShared &shared, u32 expert) {
  if (a.output.layout == TY_LAYOUT_MASKED) return expert * a.output.capacity;
  return load(&shared.start[expert]);
}

// ---- receive: rows -------------------------------------------------------------------------------------------

// Words from one scale of an output row to the next.
TY_DEVICE u32 scale_stride(const DispatchArgs auto &a) { return a.output.scale_leading ? a.output.scale_leading : 1; }

// An output row. Its scales: [row][word], or [word][row], in the masked layout by expert.
TY_DEVICE RowTo output_row(const DispatchArgs auto &a, u64 row) {
  u64 words = a.context.scale_words, first = row;
  u32 leading = a.output.scale_leading, capacity = static_cast<u32>(a.output.capacity);
  if (leading == 0) {
    first = row * words;
  } else if (a.output.layout == TY_LAYOUT_MASKED) {
    // Rows are numbered with 31 bits.
    u32 expert = static_cast<u32>(row) / capacity;
    first += expert * (words * leading - capacity);
  }
  return {a.output.rows + row * a.output.rows_pitch, a.output.scales + 4 * first};
}

// Describes an output row. By a thread. `source` is a rank of this world, or -1; callers see its name.
TY_DEVICE void describe_row(const DispatchArgs auto &a, u64 row, i32 expert, i32 source, i32 token) {
  const auto &out = a.output;
  if (out.row_expert) store(pointer<i32>(out.row_expert) + row, expert);
  if (!out.source) return;
  const i32 *names = pointer<const i32>(a.context.rank_names);
  store(pointer<i32>(out.source) + 2 * row, source < 0 || !names ? source : load(names + source));
  store(pointer<i32>(out.source) + 2 * row + 1, token);
}

// The metadata of a token; lane k has that of choice k.
struct TokenMeta {
  u32 token;  // as meta_tokens
  u32 choice; // as meta_choices, of this lane's choice
  float weight;
  u32 source_token; // the token's number at its source
};

// Waits for metadata of a token: this lane's share. Loads all words before it looks at any, and calls peek() once
// meanwhile. False once a deadline passed.
template <typename Peek>
TY_DEVICE bool wait_token_meta(const Context auto &c, const Meta &meta, u64 epoch, u32 source, u32 token,
                               TokenMeta &token_meta, Peek peek) {
  token_meta = {0, 0, 0.0f, token};
  // Tokens of other nodes' sources are numbered by message row, so their number at the source is a word of its own.
  bool waits = lane_index() < c.top_k, foreign = !is_node_peer(c, source);
  u64 index = static_cast<u64>(token) * c.top_k + lane_index(), start = 0;
  TY_ROLLED
  for (u32 poll = 0;; ++poll) {
    u64 choice = waits ? load_relaxed_sys(meta.choices + index) : 0, here = load_relaxed_sys(meta.tokens + token);
    u64 weight = waits ? load_relaxed_sys(meta.weights + index) : 0;
    u64 number = foreign ? load_relaxed_sys(meta.source_tokens + token) : 0;
    if (poll == 0) peek();
    bool known = meta_value(epoch, here, token_meta.token);
    u64 seen = here; // of a word that is missing
    if (known && token_meta.token != 0) {
      u32 bits = 0;
      if (waits && !meta_value(epoch, choice, token_meta.choice)) seen = choice, known = false;
      else if (foreign && !meta_value(epoch, number, token_meta.source_token)) seen = number, known = false;
      else if (token_meta.choice && !meta_value(epoch, weight, bits)) seen = weight, known = false;
      token_meta.weight = same_bits<float>(bits);
    }
    if (known) return true;
    if (poll != 0 && !may_wait(c, meta_wait(c, epoch, source), poll, start, epoch & 0xffffffffu, seen >> 32))
      return false;
    spin_pause("metadata");
  }
}

// Rows of an output, numbered with 31 bits.
TY_DEVICE u32 output_rows(const DispatchArgs auto &a) {
  u32 rows = static_cast<u32>(a.output.capacity);
  return a.output.layout == TY_LAYOUT_MASKED ? rows * a.context.local_experts : rows;
}

// The output row of this lane's choice, -1 for none. Counts and positions may lead anywhere if the source's choices
// changed meanwhile, or if they stem from two overlapping calls: a row outside of the output counts as none.
TY_DEVICE i32 row_of_choice(const DispatchArgs auto &a, const PlaceShared &shared, u32 source,
                            const TokenMeta &token_meta) {
  const auto &c = a.context;
  u32 row = ~0u;
  if (a.output.layout == TY_LAYOUT_TOKEN) {
    u32 first = load(&shared.source_start[source]) + ((token_meta.token - 1) >> meta_slot_bits);
    if (lane_index() == 0) row = first;
  } else if (token_meta.choice != 0) {
    u32 code = token_meta.choice - 1, expert = code & ((1u << meta_expert_bits) - 1);
    u32 position = load(&shared.before[source * c.local_experts + expert]) + (code >> meta_expert_bits);
    // In the masked layout behind the expert's rows are those of the next one.
    bool there = !a.output.drop_overflow || position < a.output.capacity;
    if (there) row = static_cast<u32>(segment_start(a, shared, expert)) + position;
  }
  return row < output_rows(a) ? static_cast<i32>(row) : -1;
}

// Lists a token's choices, a lane each, in a compact handle. By a warp.
TY_DEVICE void list_choices(const DispatchArgs auto &a, u32 source, u32 token, const TokenMeta &token_meta, i32 row) {
  u32 k = lane_index(), here = warp_ballot(row >= 0), later = k == warp_size - 1 ? 0 : here >> (k + 1) << (k + 1);
  u32 next = shuffle(static_cast<u32>(row) + 1, later ? lowest_bit(later) : 0);
  // Without rows that of lane 0, which is 0, too.
  u32 first = shuffle(static_cast<u32>(row) + 1, here ? lowest_bit(here) : 0);
  if (row >= 0)
    store(pointer<u64>(a.handle.row_choices) + row, RowChoice{k, later ? next : 0, token_meta.weight}.packed());
  u32 slot = (token_meta.token - 1) & ((1u << meta_slot_bits) - 1);
  if (k == 0)
    store(pointer<u32>(a.handle.slots) + static_cast<u64>(source) * a.context.max_tokens + token,
          first << handle_slot_bits | slot);
}

// Describes this lane's choice in the output and in the handle.
TY_DEVICE void describe_choice(const DispatchArgs auto &a, u32 source, u32 token, const TokenMeta &token_meta,
                               i32 row) {
  const auto &c = a.context;
  const auto &out = a.output;
  u32 k = lane_index();
  i32 expert = token_meta.choice ? static_cast<i32>((token_meta.choice - 1) & ((1u << meta_expert_bits) - 1)) : -1;
  if (out.layout == TY_LAYOUT_TOKEN) {
    i32 own = shuffle(row, 0);
    u64 first = static_cast<u64>(own) * c.top_k;
    bool there = k < c.top_k && own >= 0;
    if (there && out.token_experts) store(pointer<i32>(out.token_experts) + first + k, expert);
    if (there && out.token_weights) store(pointer<float>(out.token_weights) + first + k, token_meta.weight);
    expert = -1;
  }
  if (row >= 0)
    describe_row(a, static_cast<u64>(row), expert, static_cast<i32>(source), static_cast<i32>(token_meta.source_token));
  if (a.handle.row_choices) return list_choices(a, source, token, token_meta, row);
  if (k >= c.top_k) return;
  u64 index = (static_cast<u64>(source) * c.max_tokens + token) * c.top_k + k;
  store(pointer<i32>(a.handle.rows) + index, row);
  store(pointer<float>(a.handle.weights) + index, token_meta.weight);
}

// What a warp carries at once: slices of one row.
struct Item {
  u32 source; // the rank whose token it is
  u32 token;  // number of the token: of the rank's own, or as numbered here, of the source's
  u32 slot;   // number of the row in the round: in the receive buffer, or in the message
  Slices slices;
  TokenMeta meta; // of a row to be placed
};

// The result of waiting for slices of a row.
enum class Arrival : u32 { failed, absent, here };

// Where a row of one (source, token of the round) is placed from: its slot in the receive buffer, the message it
// arrived in, or the caller's tokens.
enum class RowFrom : u32 { recv_buffer, arrived, own };

// The word that shows whether a slice of a row is here, a lane a slice: it equals the epoch then. Null where the row is
// here from the beginning.
struct RowNews {
  const u64 *word;
  u32 site;
};

TY_DEVICE RowNews row_news(const Context auto &c, u64 epoch, u32 source, u32 slot, u32 slice, RowFrom from) {
  if (from == RowFrom::own) return {nullptr, TY_SITE_ROW};
  if (from == RowFrom::recv_buffer)
    return {in_arena<const u64>(c, c.local, c.regions.row_tags, epoch, source) + slot * TY_SLICES + slice, TY_SITE_ROW};
  const ty_wire_layout &l = layout_of(c, TY_DIRECTION_DISPATCH);
  u32 word = arrived_word(l, epoch, link_of_source(c, source), chunk_of_row(l, slot));
  return {pointer<const u64>(c.wire.arrived) + word, TY_SITE_ARRIVED};
}

// Waits for an item's slices and for its token's metadata, which it fills in; with the first slice stores the slot at
// the owner in the handle. By a warp. Absent also if the output has no `room`.
TY_DEVICE Arrival wait_row(const DispatchArgs auto &a, const Round &round, Item &item, RowFrom from, bool room) {
  const auto &c = a.context;
  u32 slice = item.slices.first + lane_index();
  RowNews news = row_news(c, round.epoch, item.source, item.slot, slice, from);
  bool carries = room && slice < item.slices.end && news.word, pushed = false;
  // N2, or E6 of a row that is placed from where it arrived.
  bool failed = !wait_token_meta(c, meta_of(c, c.local, item.source, round.call), round.call, item.source, item.token,
                                 item.meta, [&] { pushed = carries && load_acquire_sys(news.word) == round.epoch; });
  if (!failed && item.meta.token && carries && !pushed)
    failed = !wait_tag(c, news.word, round.epoch, news.site, item.source, "row");
  // Some lanes acquired; the barrier orders the other lanes' loads after that.
  warp_barrier();
  if (warp_ballot(failed)) {
    if (!tolerates_absence(c) || closed_for_warp(c)) return Arrival::failed;
    if (lane_index() == 0) drop_rank(c, TY_DIRECTION_DISPATCH, round.epoch, item.source);
    return Arrival::absent;
  }
  if (item.slices.first == 0 && lane_index() == 0)
    store(pointer<i32>(a.handle.slots) + static_cast<u64>(item.source) * c.max_tokens + item.token,
          item.meta.token ? static_cast<i32>((item.meta.token - 1) & ((1u << meta_slot_bits) - 1)) : -1);
  return item.meta.token != 0 && room ? Arrival::here : Arrival::absent;
}

// Shares out the rows to be placed: every (token of the round, source).
TY_DEVICE Work place_work(const Context auto &c, const Team &team, const PlaceShared &shared, const Kept &kept) {
  u32 all = load(&shared.most) * c.ranks;
  if (load(&kept.dedicated)) return {0, all, 0, 0};
  if (load(&shared.helped)) return {block_index(), all, 0, 0};
  // Cut so that a warp gets one part, present or not: absent tokens have numbers, too.
  return share_rows(c, team, load(&kept.busy), all, false);
}

// ---- receive: what surrounds the rows --------------------------------------------------------------------------

// Marks an output row that no token fills. By a thread.
TY_DEVICE void mark_unused(const DispatchArgs auto &a, u64 row) {
  const auto &out = a.output;
  describe_row(a, row, -1, -1, -1);
  for (u64 i = row * a.context.top_k; out.layout == TY_LAYOUT_TOKEN && i < (row + 1) * a.context.top_k; ++i) {
    if (out.token_experts) store(pointer<i32>(out.token_experts) + i, -1);
    if (out.token_weights) store(pointer<float>(out.token_weights) + i, 0.0f);
  }
}

// Zeroes an output row. By a warp.
TY_DEVICE void zero_row(const DispatchArgs auto &a, u64 row) {
  const auto &c = a.context;
  RowTo out = output_row(a, row);
  for (u32 v = lane_index(); v < c.row_bytes / 16; v += warp_size)
    store16(pointer<char>(out.payload) + v * 16, Vec16{{0, 0, 0, 0}});
  for (u32 w = lane_index(); w < c.scale_words; w += warp_size)
    store(pointer<u32>(out.scales) + static_cast<u64>(w) * scale_stride(a), 0u);
  if (carries_payload(a)) zero_payload(a, row);
}

// The calling thread's number in a team on all workers, and the number of such threads.
TY_DEVICE u64 worker_thread(const Team &team) {
  return static_cast<u64>(block_index()) * team_threads(team) + team_thread(team);
}
TY_DEVICE u64 worker_threads(const Context auto &c, const Team &team) {
  return static_cast<u64>(worker_count(c)) * team_threads(team);
}

TY_DEVICE void mark_rest(const DispatchArgs auto &a, const Team &team, u64 first, u64 end) {
  for (u64 row = first + worker_thread(team); row < end; row += worker_threads(a.context, team)) mark_unused(a, row);
}

// The contiguous layout: rows between an expert's last and the next segment, a warp an expert; zeroed on request, since
// a grouped GEMM reads them.
TY_DEVICE void pad_segments(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared) {
  u32 warps = worker_count(a.context) * team.warps;
  for (u32 e = block_index() * team.warps + team_warp(team); e < a.context.local_experts; e += warps) {
    u64 first = load(&shared.start[e]) + load(&shared.rows[e]), end = load(&shared.start[e + 1]);
    if (a.output.drop_overflow && end > a.output.capacity) end = a.output.capacity;
    for (u64 row = first + lane_index(); row < end; row += warp_size) mark_unused(a, row);
    for (u64 row = first; a.output.zero_padding && row < end; ++row) zero_row(a, row);
  }
}

// The masked layout: rows after each expert's last.
TY_DEVICE void mark_masked(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared) {
  u64 capacity = a.output.capacity, rows = capacity * a.context.local_experts;
  for (u64 row = worker_thread(team); row < rows; row += worker_threads(a.context, team))
    if (row % capacity >= load(&shared.rows[row / capacity])) mark_unused(a, row);
}

// Every row that no token fills: alignment padding, the unused part of a masked segment, the rest of the output.
TY_DEVICE void pad_output(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared) {
  const auto &out = a.output;
  bool masked = out.layout == TY_LAYOUT_MASKED;
  if (!fits(a, shared)) {
    mark_rest(a, team, 0, masked ? out.capacity * a.context.local_experts : out.capacity);
  } else if (masked) {
    mark_masked(a, team, shared);
  } else {
    if (out.layout == TY_LAYOUT_CONTIGUOUS) pad_segments(a, team, shared);
    mark_rest(a, team, load(&shared.needed), out.capacity);
  }
}

// A source's rows of an expert among the expert's that are placed.
TY_DEVICE Range rows_of_source(const DispatchArgs auto &a, const PlaceShared &shared, u32 source, u32 e) {
  const auto &c = a.context;
  u32 begin = load(&shared.before[source * c.local_experts + e]);
  u32 end = source + 1 < c.ranks ? load(&shared.before[(source + 1) * c.local_experts + e]) : load(&shared.rows[e]);
  if (!a.output.drop_overflow) return {begin, end};
  u32 placed = rows_placed(a, shared, e);
  return {smaller(begin, placed), smaller(end, placed)};
}

// Where each source's rows of each expert begin among the expert's rows, and how many they are. By a team of one block.
TY_DEVICE void write_ranges(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared, bool room) {
  const auto &c = a.context;
  TY_ROLLED
  for (u32 i = team_thread(team); i < c.local_experts * c.ranks; i += team_threads(team)) {
    Quotient place = divide(i, c.ranks, c.ranks_inverse);
    u32 e = place.whole, source = place.rest;
    Range rows = rows_of_source(a, shared, source, e);
    u64 range = room ? static_cast<u64>(rows.first) << 32 | (rows.end - rows.first) : 0;
    store(pointer<u64>(a.output.source_ranges) + i, range);
  }
}

// Counts and offsets of the rows that are placed; all zero if the output overflowed, so that nothing downstream reads
// rows that are not there. What stands for all rows counts those without room, too. By a team of one block.
TY_DEVICE void write_counts(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared, u64 epoch) {
  const auto &c = a.context;
  const auto &out = a.output;
  bool room = fits(a, shared);
  for (u32 e = team_thread(team); e <= c.local_experts; e += team_threads(team)) {
    bool is_end = e == c.local_experts;
    u32 rows = room && !is_end ? rows_placed(a, shared, e) : 0;
    if (!is_end) store(pointer<i32>(out.expert_count) + e, static_cast<i32>(rows));
    if (out.host_counts && !is_end) store_relaxed_sys(pointer<u32>(out.host_counts) + e, rows);
    if (out.total_counts && !is_end) {
      u32 *total = pointer<u32>(out.total_counts) + e;
      store(total, load(total) + rows);
    }
    if (out.expert_offset && out.layout == TY_LAYOUT_CONTIGUOUS) {
      u32 start = room ? load(&shared.start[e]) : 0;
      if (out.drop_overflow && start > out.capacity) start = static_cast<u32>(out.capacity);
      store(pointer<i32>(out.expert_offset) + e, static_cast<i32>(start));
    }
    if (out.expert_offset && out.layout == TY_LAYOUT_MASKED)
      store(pointer<i32>(out.expert_offset) + e, static_cast<i32>(e * out.capacity));
  }
  if (out.source_ranges) write_ranges(a, team, shared, room);
  if (team_thread(team) != 0) return;
  u32 rows = room ? load(&shared.used) : 0;
  if (out.row_count) store(pointer<i32>(out.row_count), static_cast<i32>(rows));
  if (out.host_counts) store_relaxed_sys(pointer<u32>(out.host_counts) + c.local_experts, rows);
  if (!room) keep_fault({TY_ERROR_CAPACITY, 0, c.rank, epoch, load(&shared.needed), out.capacity, out.layout});
}

// Where ranks may be absent: takes back what came of sources whose rows did not all come, once all other blocks have
// ended: their output rows are unused. Combine sends them nothing, as they are masked. By a whole block; `ended`: as
// is_last_worker's, whose answer it returns.
TY_DEVICE bool drop_sources(const DispatchArgs auto &a, u64 ended) {
  const auto &c = a.context;
  if (!is_last_worker(c, TY_DIRECTION_DISPATCH, ended)) return false;
  const PlaceShared &shared = block_shared<DispatchShared>().place;
  u64 epoch = load(&block_shared<LaunchShared>().epoch);
  bool token = a.output.layout == TY_LAYOUT_TOKEN, room = fits(a, shared);
  for (u32 source = 0; source < c.ranks; ++source) {
    if (!is_dropped(c, TY_DIRECTION_DISPATCH, epoch, source)) continue;
    for (u32 e = 0; room && e < (token ? 1 : c.local_experts); ++e) {
      u32 start = load(&shared.source_start[source]);
      Range rows =
          token ? Range{start, start + load(&shared.source_rows[source])} : rows_of_source(a, shared, source, e);
      u64 first = token ? 0 : segment_start(a, shared, e);
      for (u32 row = rows.first + thread_index(); row < rows.end; row += block_threads()) mark_unused(a, first + row);
    }
  }
  return true;
}

// Writes what combine needs of the whole dispatch. By a team of one block.
TY_DEVICE void write_head(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared, const Round &round) {
  const auto &c = a.context;
  ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
  for (u32 s = team_thread(team); s < c.ranks; s += team_threads(team)) {
    store(round_starts(c, a.handle.source_tokens, s) + round.number + 1, load(&shared.source_end[s]));
  }
  if (team_thread(team) != 0) return;
  u32 most = load(&shared.most), before = round.number == 0 ? 0 : load(&head->most_tokens);
  if (before > most) most = before;
  store(&head->epoch, round.call);
  store(&head->incomplete, fits(a, shared) ? 0u : 1u);
  store(&head->most_tokens, most);
}

// Waits until every node peer has reported that it has read its receive buffer of the epoch before; this rank writes
// there again in the epoch after the next. By a team of one block. False once a deadline passed, or if a peer's call
// does not go with this one.
TY_DEVICE bool wait_round(const DispatchArgs auto &a, const Team &team, u64 epoch) {
  const auto &c = a.context;
  bool failed = false;
  for (u32 peer = team_thread(team); peer < c.node_ranks; peer += team_threads(team)) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.meta_flags, epoch, peer);
    Wait wait{TY_SITE_METADATA, world_rank(c, peer), epoch, 0};
    u64 found = 0;
    bool here = !is_left_out(c, peer) && wait_value(c, wait, flag, 32, epoch & 0xffffffffu, "metadata flag", found);
    if (tolerates_absence(c) && !here && !is_closed(c)) continue;
    failed |= !here;
    // All calls with in-place output are alike.
    if (in_place(c) || failed || static_cast<u32>(found) == dispatch_status(a)) continue;
    refuse_other(a, epoch, world_rank(c, peer), dispatch_status(a), static_cast<u32>(found));
    failed = true;
  }
  return !team_any(team, failed);
}

// In again.cuh.
TY_DEVICE void plan_again(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Round &round);
TY_DEVICE void end_round(const DispatchArgs auto &a, const Team &team, const Round &round);

// Before rows are placed. By the placing team. False once a deadline passed. `closed`: as finds_closed.
TY_DEVICE bool begin_placing(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Round &round,
                             bool closed) {
  const auto &c = a.context;
  bool received = goes_again(a) || wait_counts(a, team, shared, round, closed);
  // There the team agrees on whether the context is closed; here it does so where nothing is awaited.
  if (goes_again(a)) received = meet_open(c, team, closed);
  if (received) {
    note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_NOTIFIED, team_thread(team) == 0);
    if (goes_again(a)) plan_again(a, team, shared, round);
    else plan_output(a, team, shared);
  } else if (team_thread(team) == 0) {
    store(&shared.helped, 0u);
    store(&shared.planned, 0u);
  }
  // N11: the plan happens before; the other team takes over.
  if (is_one_of_two(team)) hand_over();
  return received;
}

// Writes what accompanies the rows: counts, the handle's head, unused rows. By a team of each block.
TY_DEVICE void describe_output(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared,
                               const Round &round) {
  const auto &c = a.context;
  if (is_describer(c)) {
    if (round.number == 0) write_counts(a, team, shared, round.epoch);
    write_head(a, team, shared, round);
  }
  if (is_last(c, round)) pad_output(a, team, shared);
}

// After rows are placed. By a team; `placed` is each warp's own.
TY_DEVICE void end_placing(const DispatchArgs auto &a, const Team &team, const Round &round, bool placed) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_ROWS, team_thread(team) == 0);
  // A warp that failed belongs to a team that must meet.
  if (block_index() != 0 || team_any(team, !placed) || !wait_round(a, team, round.epoch)) return;
  if (goes_again(a)) end_round(a, team, round);
}

} // namespace ty
