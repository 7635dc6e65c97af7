// Dispatch, the receiving phase: where segments start, rows to their final places, the handle for combine.
#pragma once
#include "dispatch/wire.cuh"

namespace ty {

// ---- receive: where rows go ----------------------------------------------------------------------------------

// How many rows a source has, from its META. By the thread that waited for the word.
TY_DEVICE u32 rows_heard(const Context auto &c, const Wave &wave, u32 source, u32 value) {
  if (value != meta_refused) return value;
  // The source has reported it to its own host.
  if (block_index() == 0 && source != c.rank) note_refused(c, source, wave.call);
  return 0;
}

// What is waited for of each source: rows of each expert, rows of all, where the wave ends, and where it begins.
TY_DEVICE u32 counted_words(const Context auto &c) { return c.local_experts + 3; }

// Waits for the counts of every source, and where the wave begins and ends in its tokens, and keeps them. By a team.
// False once a deadline passed. `closed`: as finds_closed.
TY_DEVICE bool wait_counts(const Context auto &c, const Team &team, PlaceShared &shared, const Wave &wave,
                           bool closed) {
  bool failed = closed;
  u32 words = counted_words(c);
  for (u32 i = team_thread(team); i < words * c.ranks; i += team_threads(team)) {
    auto [source, e] = divide(i, words, c.counts_inverse);
    u32 value = 0;
    const u64 *counts = in_arena<const u64>(c, c.local, c.regions.meta_counts, wave.call, source);
    // Behind the experts' counts: all rows, then the wave's end, then its begin, which is the end of the one before.
    u32 behind = e - c.local_experts;
    u32 place = e < c.local_experts ? e : c.max_local_experts + (behind == 0 ? 0 : wave.number + 2 - behind);
    bool first = e == c.local_experts + 2 && wave.number == 0;
    bool heard = first || wait_meta(c, wave.call, source, counts + place, value);
    failed |= !heard;
    // A word that did not come tells of an earlier call.
    if (!heard || first) value = 0;
    if (e < c.local_experts) store(&shared.before[source * c.local_experts + e], value);
    else if (behind == 0) store(&shared.source_rows[source], rows_heard(c, wave, source, value));
    else if (behind == 1) store(&shared.source_end[source], value);
    else store(&shared.source_first[source], value);
    if (heard && e == c.local_experts) note_heard(c, TY_DIRECTION_DISPATCH, source);
  }
  return !team_any(team, failed);
}

// Tokens of a source in this wave. What rails tell of other nodes' homes fits, whatever those said (landed_wave).
TY_DEVICE u32 wave_tokens_of(const PlaceShared &shared, u32 source) {
  return load(&shared.source_end[source]) - load(&shared.source_first[source]);
}

// Rows a placing warp from which on warps that have sent help: with fewer it would be through before they come.
constexpr u32 rows_to_help = 2;

// Where segments start, from the counts, how many tokens the wave has, and whether the other team is to help. By a warp
// of the placing team.
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
    // Ends of two waves that are two calls' make none: see "Calls that overlap" in docs/design.md.
    if (c.waves > 1 && wave_tokens_of(shared, s) > c.wave_tokens)
      store(&shared.source_end[s], load(&shared.source_first[s]));
    u32 here = wave_tokens_of(shared, s);
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
  store(&shared.helped, is_one_of_two(team) && tokens > rows_to_help * worker_count(c) * team.warps ? 1u : 0u);
  store(&shared.taken[pass_place], 0u);
  store(&shared.planned, 1u);
}

// Sources whose counts are looked up at once.
constexpr u32 sources_ahead = 4;

// Rows of every expert, and those of them from sources before. By a team, whose members are to meet behind it.
TY_DEVICE void add_sources(const Context auto &c, const Team &team, PlaceShared &shared) {
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
    store(&shared.rows[e], sum);
  }
}

// Behind wait_counts. By a team.
TY_DEVICE void plan_output(const DispatchArgs auto &a, const Team &team, PlaceShared &shared) {
  add_sources(a.context, team, shared);
  team_barrier(team);
  if (team_warp(team) == 0) plan_segments(a, team, shared);
  team_barrier(team);
}

// Whether the output has room, once it is planned.
TY_DEVICE bool fits(const DispatchArgs auto &a, const PlaceShared &shared) {
  return load(&shared.needed) <= a.output.capacity;
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

// Says what an output row is. By a thread. `source` is a rank of this world, or -1: callers get to see its name.
TY_DEVICE void describe_row(const DispatchArgs auto &a, u64 row, i32 expert, i32 source, i32 token) {
  const auto &out = a.output;
  if (out.row_expert) store(pointer<i32>(out.row_expert) + row, expert);
  if (!out.source) return;
  const i32 *names = pointer<const i32>(a.context.rank_names);
  store(pointer<i32>(out.source) + 2 * row, source < 0 || !names ? source : load(names + source));
  store(pointer<i32>(out.source) + 2 * row + 1, token);
}

// What META says of a token, to one lane each of its choices.
struct TokenMeta {
  u32 token;  // as meta_tokens
  u32 choice; // as meta_choices, of this lane's choice
  float weight;
  u32 home; // the token's number at its home
};

// Waits for META of a token: this lane's share of it. All words are asked for before any is looked at, and meanwhile
// peek() is called, once. False once a deadline passed.
template <typename Peek>
TY_DEVICE bool wait_token_meta(const Context auto &c, const Meta &meta, u64 epoch, u32 source, u32 token,
                               TokenMeta &said, Peek peek) {
  said = {0, 0, 0.0f, token};
  // Tokens of other nodes' sources are here without those that have nothing to do here.
  bool waits = lane_index() < c.top_k, foreign = !is_node_peer(c, source);
  u64 index = static_cast<u64>(token) * c.top_k + lane_index(), start = 0;
  TY_ROLLED
  for (u32 turn = 0;; ++turn) {
    u64 choice = waits ? load_relaxed_sys(meta.choices + index) : 0, here = load_relaxed_sys(meta.tokens + token);
    u64 weight = waits ? load_relaxed_sys(meta.weights + index) : 0;
    u64 home = foreign ? load_relaxed_sys(meta.homes + token) : 0;
    if (turn == 0) peek();
    bool known = meta_value(epoch, here, said.token);
    u64 seen = here; // of a word that is missing
    if (known && said.token != 0) {
      u32 bits = 0;
      if (waits && !meta_value(epoch, choice, said.choice)) seen = choice, known = false;
      else if (foreign && !meta_value(epoch, home, said.home)) seen = home, known = false;
      else if (said.choice && !meta_value(epoch, weight, bits)) seen = weight, known = false;
      said.weight = same_bits<float>(bits);
    }
    if (known) return true;
    if (turn != 0 && !may_wait(c, meta_wait(c, epoch, source), turn, start, epoch & 0xffffffffu, seen >> 32))
      return false;
    spin_pause("META");
  }
}

// Rows of an output, numbered with 31 bits.
TY_DEVICE u32 output_rows(const DispatchArgs auto &a) {
  u32 rows = static_cast<u32>(a.output.capacity);
  return a.output.layout == TY_LAYOUT_MASKED ? rows * a.context.local_experts : rows;
}

// The output row of this lane's choice, -1 for none. Counts and positions lead anywhere if the source's choices changed
// meanwhile, or if they are of two calls that overlap: what is no row of the output is none.
TY_DEVICE i32 row_of_choice(const DispatchArgs auto &a, const PlaceShared &shared, u32 source, const TokenMeta &said) {
  const auto &c = a.context;
  u32 row = ~0u;
  if (a.output.layout == TY_LAYOUT_TOKEN) {
    u32 first = load(&shared.source_start[source]) + ((said.token - 1) >> meta_slot_bits);
    if (lane_index() == 0) row = first;
  } else if (said.choice != 0) {
    u32 code = said.choice - 1, expert = code & ((1u << meta_expert_bits) - 1);
    u32 position = load(&shared.before[source * c.local_experts + expert]) + (code >> meta_expert_bits);
    row = static_cast<u32>(segment_start(a, shared, expert)) + position;
  }
  return row < output_rows(a) ? static_cast<i32>(row) : -1;
}

// Writes down what this lane's choice is, in the output and in the handle.
TY_DEVICE void describe_choice(const DispatchArgs auto &a, u32 source, u32 token, const TokenMeta &said, i32 row) {
  const auto &c = a.context;
  const auto &out = a.output;
  u32 k = lane_index();
  i32 expert = said.choice ? static_cast<i32>((said.choice - 1) & ((1u << meta_expert_bits) - 1)) : -1;
  if (out.layout == TY_LAYOUT_TOKEN) {
    i32 own = shuffle(row, 0);
    u64 first = static_cast<u64>(own) * c.top_k;
    bool there = k < c.top_k && own >= 0;
    if (there && out.token_experts) store(pointer<i32>(out.token_experts) + first + k, expert);
    if (there && out.token_weights) store(pointer<float>(out.token_weights) + first + k, said.weight);
    expert = -1;
  }
  if (row >= 0) describe_row(a, static_cast<u64>(row), expert, static_cast<i32>(source), static_cast<i32>(said.home));
  if (k >= c.top_k) return;
  u64 index = (static_cast<u64>(source) * c.max_tokens + token) * c.top_k + k;
  store(pointer<i32>(a.handle.rows) + index, row);
  store(pointer<float>(a.handle.weights) + index, said.weight);
}

// What became of waiting for slices of a row.
enum class Arrival : u32 { failed, absent, here };

// Where a row of one (source, token of the wave) is placed from: its inbox, where it landed, or the caller's tokens.
enum class RowFrom : u32 { inbox, landed, own };

// Where to look for slices of a row, of which a lane looks at one: a word that is the epoch's number once it is here.
// Null for what is here from the beginning.
struct RowNews {
  const u64 *word;
  u32 site;
};

TY_DEVICE RowNews row_news(const Context auto &c, u64 epoch, u32 source, u32 slot, u32 slice, RowFrom from) {
  if (from == RowFrom::own) return {nullptr, TY_SITE_ROW};
  if (from == RowFrom::inbox)
    return {in_arena<const u64>(c, c.local, c.regions.row_tags, epoch, source) + slot * TY_SLICES + slice, TY_SITE_ROW};
  const ty_lane &l = lane_of(c, TY_LANE_DISPATCH);
  u32 word = landed_word(l, epoch, served_source(c, source), chunk_of_row(l, slot));
  return {pointer<const u64>(c.wire.landed) + word, TY_SITE_LANDED};
}

// Waits for slices of one (source, token of the wave), and what META says of it; with the first of them writes down the
// slot at its owner. By a warp. Absent is also what is not wanted, the output having no room.
TY_DEVICE Arrival wait_row(const DispatchArgs auto &a, const Wave &wave, u32 source, u32 token, u32 slot_index,
                           const Slices &slices, bool room, RowFrom from, TokenMeta &said) {
  const auto &c = a.context;
  u32 slice = slices.first + lane_index();
  RowNews news = row_news(c, wave.epoch, source, slot_index, slice, from);
  bool carries = room && slice < slices.end && news.word, pushed = false;
  // N2, or E6 of a row that is placed from where it landed.
  bool failed = !wait_token_meta(c, meta_of(c, c.local, source, wave.call), wave.call, source, token, said,
                                 [&] { pushed = carries && load_acquire_sys(news.word) == wave.epoch; });
  if (!failed && said.token && carries && !pushed)
    failed = !wait_tag(c, news.word, wave.epoch, news.site, source, "row");
  // Some lanes acquired; this orders the other lanes' loads behind them.
  warp_barrier();
  if (warp_ballot(failed)) return Arrival::failed;
  if (slices.first == 0 && lane_index() == 0)
    store(pointer<i32>(a.handle.slots) + static_cast<u64>(source) * c.max_tokens + token,
          said.token ? static_cast<i32>((said.token - 1) & ((1u << meta_slot_bits) - 1)) : -1);
  return said.token != 0 && room ? Arrival::here : Arrival::absent;
}

// The rows that are to be placed, shared out: every (token of the wave, source).
TY_DEVICE Work place_work(const Context auto &c, const Team &team, const PlaceShared &shared, const Kept &kept) {
  u32 all = load(&shared.most) * c.ranks;
  if (load(&kept.apart)) return {0, all, 0, 0};
  if (load(&shared.helped)) return {block_index(), all, 0, 0};
  // Cut so that a warp gets one part, whatever it is of: absent tokens have numbers, too.
  return share_rows(c, team, load(&kept.busy), all, false);
}

// ---- receive: what surrounds the rows --------------------------------------------------------------------------

// Marks an output row that no token got. By a thread.
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
}

// Number of the calling thread among those of a team on all workers, and how many they are.
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
    for (u64 row = first + lane_index(); row < end; row += warp_size) mark_unused(a, row);
    for (u64 row = first; a.output.zero_padding && row < end; ++row) zero_row(a, row);
  }
}

// The masked layout: rows behind each expert's last.
TY_DEVICE void mark_masked(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared) {
  u64 capacity = a.output.capacity, rows = capacity * a.context.local_experts;
  for (u64 row = worker_thread(team); row < rows; row += worker_threads(a.context, team))
    if (row % capacity >= load(&shared.rows[row / capacity])) mark_unused(a, row);
}

// Every row that no token got: alignment padding, the unused part of a masked segment, the rest of the output.
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

// Counts and offsets; all zero if the output overflowed, so that nothing downstream reads rows that are not there.
// By a team of one block.
TY_DEVICE void write_counts(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared, u64 epoch) {
  const auto &c = a.context;
  const auto &out = a.output;
  bool room = fits(a, shared);
  for (u32 e = team_thread(team); e <= c.local_experts; e += team_threads(team)) {
    bool is_end = e == c.local_experts;
    u32 rows = room && !is_end ? load(&shared.rows[e]) : 0;
    if (!is_end) store(pointer<i32>(out.expert_count) + e, static_cast<i32>(rows));
    if (out.host_counts && !is_end) store_relaxed_sys(pointer<u32>(out.host_counts) + e, rows);
    if (out.expert_offset && out.layout == TY_LAYOUT_CONTIGUOUS)
      store(pointer<i32>(out.expert_offset) + e, room ? static_cast<i32>(load(&shared.start[e])) : 0);
    if (out.expert_offset && out.layout == TY_LAYOUT_MASKED)
      store(pointer<i32>(out.expert_offset) + e, static_cast<i32>(e * out.capacity));
  }
  if (team_thread(team) != 0) return;
  u32 rows = room ? load(&shared.used) : 0;
  if (out.row_count) store(pointer<i32>(out.row_count), static_cast<i32>(rows));
  if (out.host_counts) store_relaxed_sys(pointer<u32>(out.host_counts) + c.local_experts, rows);
  if (!room) keep_fault({TY_ERROR_CAPACITY, 0, c.rank, epoch, load(&shared.needed), out.capacity, out.layout});
}

// What combine needs to know of the whole dispatch. By a team of one block.
TY_DEVICE void write_head(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared, const Wave &wave) {
  const auto &c = a.context;
  ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
  for (u32 s = team_thread(team); s < c.ranks; s += team_threads(team)) {
    store(wave_starts(c, a.handle.source_tokens, s) + wave.number + 1, load(&shared.source_end[s]));
  }
  if (team_thread(team) != 0) return;
  u32 most = load(&shared.most), before = wave.number == 0 ? 0 : load(&head->most_tokens);
  if (before > most) most = before;
  store(&head->epoch, wave.call);
  store(&head->incomplete, fits(a, shared) ? 0u : 1u);
  store(&head->most_tokens, most);
}

// Waits until every node peer has said that it read its inbox of the epoch before: from the next epoch but one on this
// rank writes there again. By a team of one block. False once a deadline passed.
TY_DEVICE bool wait_round(const Context auto &c, const Team &team, u64 epoch) {
  bool failed = false;
  for (u32 peer = team_thread(team); peer < c.node_ranks; peer += team_threads(team)) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.meta_flags, epoch, peer);
    failed |= !wait_flag(c, flag, epoch, TY_SITE_META, world_rank(c, peer), "META flag");
  }
  return !team_any(team, failed);
}

// What comes before rows are placed. By the placing team. False once a deadline passed. `closed`: as finds_closed.
TY_DEVICE bool begin_placing(const DispatchArgs auto &a, const Team &team, PlaceShared &shared, const Wave &wave,
                             bool closed) {
  const auto &c = a.context;
  bool heard = wait_counts(c, team, shared, wave, closed);
  if (heard) {
    note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_HEARD, team_thread(team) == 0);
    plan_output(a, team, shared);
  } else if (team_thread(team) == 0) {
    store(&shared.helped, 0u);
    store(&shared.planned, 0u);
  }
  // N11: the plan happens before; the other team takes over.
  if (is_one_of_two(team)) hand_over();
  return heard;
}

// What goes with the rows: counts, what combine needs, what is no row. By a team of each block.
TY_DEVICE void describe_output(const DispatchArgs auto &a, const Team &team, const PlaceShared &shared,
                               const Wave &wave) {
  const auto &c = a.context;
  // A block with neither META nor the first rows.
  if (block_index() == worker_count(c) / 2) {
    if (wave.number == 0) write_counts(a, team, shared, wave.epoch);
    write_head(a, team, shared, wave);
  }
  if (is_last(c, wave)) pad_output(a, team, shared);
}

// What comes behind. By a team; `placed` is each warp's own.
TY_DEVICE void end_placing(const DispatchArgs auto &a, const Team &team, const Wave &wave, bool placed) {
  const auto &c = a.context;
  note_stage(c, TY_DIRECTION_DISPATCH, TY_STAGE_ROWS, team_thread(team) == 0);
  // A warp that failed is one of a team that must meet.
  if (block_index() == 0 && !team_any(team, !placed)) (void)wait_round(c, team, wave.epoch);
}

} // namespace ty
