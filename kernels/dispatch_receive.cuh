// Dispatch, the receiving phase: where segments start, rows to their final places, the handle for combine.
#pragma once
#include "dispatch_wire.cuh"

namespace ty {

// ---- receive: where rows go ----------------------------------------------------------------------------------

TY_DEVICE const u32 *counts_of(const ty_context &c, u64 epoch, u32 source) {
  return in_arena<const u32>(c, c.local, c.regions.meta_counts, epoch, source);
}

// Rows of a local expert from sources before `sources`.
TY_DEVICE u32 rows_before(const ty_context &c, u64 epoch, u32 expert, u32 sources) {
  u32 count = 0;
  for (u32 s = 0; s < sources; ++s) count += load(counts_of(c, epoch, s) + expert);
  return count;
}

// Waits for META of every source. False once a deadline passed. Every thread may read all META afterwards.
TY_DEVICE bool wait_meta(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  bool failed = false;
  for (u32 s = thread_index(); s < c.ranks; s += block_threads()) {
    const u64 *flag = in_arena<const u64>(c, c.local, c.regions.meta_flags, epoch, s);
    bool seen = wait_flag(c, TY_DIRECTION_DISPATCH, flag, epoch, TY_SITE_META, s, "META");
    store(&shared.source_tokens[s], seen ? load(counts_of(c, epoch, s) + c.max_local_experts + 1) : 0u);
    failed |= !seen;
  }
  return !block_any(failed);
}

// Rows of each local expert, in the shared memory that sending used for its bitmap.
TY_DEVICE u32 *expert_rows(DispatchShared &shared) { return shared.bitmap; }
TY_DEVICE const u32 *expert_rows(const DispatchShared &shared) { return shared.bitmap; }

// Counts every local expert's rows, a thread an expert. By a block.
TY_DEVICE void count_rows(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  for (u32 e = thread_index(); e < c.local_experts; e += block_threads())
    store(expert_rows(shared) + e, rows_before(c, epoch, e, c.ranks));
  block_barrier();
}

// Exclusive sums of the aligned expert counts into shared.start, the end of all in its last entry. By a block.
TY_DEVICE void start_segments(const ty_dispatch_args &a, DispatchShared &shared) {
  u32 experts = a.context.local_experts, align = a.output.align;
  u32 carry = 0;
  for (u32 first = 0; first < experts; first += block_threads()) {
    u32 e = first + thread_index();
    u32 rows = e < experts ? load(expert_rows(shared) + e) : 0;
    u32 aligned = (rows + align - 1) / align * align;
    u32 sum = aligned;
    store(&shared.scan[thread_index()], sum);
    block_barrier();
    for (u32 step = 1; step < block_threads() && step < experts - first; step *= 2) {
      u32 other = thread_index() >= step ? load(&shared.scan[thread_index() - step]) : 0;
      block_barrier();
      sum += other;
      store(&shared.scan[thread_index()], sum);
      block_barrier();
    }
    if (e < experts) store(&shared.start[e], carry + sum - aligned);
    u32 last = experts - first < block_threads() ? experts - first : block_threads();
    carry += load(&shared.scan[last - 1]);
    block_barrier();
  }
  if (thread_index() == 0) store(&shared.start[experts], carry);
  block_barrier();
}

// Layout of this epoch's output, the same in every thread.
struct Placement {
  u64 needed; // rows, alignment included (masked: of the fullest expert)
  u64 used;   // rows up to the end of the last segment (masked: of all experts)
  bool fits;
};

TY_DEVICE Placement plan_output(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  const ty_context &c = a.context;
  u64 needed = 0, used = 0;
  count_rows(a, shared, epoch);
  if (a.output.layout == TY_LAYOUT_CONTIGUOUS) {
    start_segments(a, shared);
    needed = load(&shared.start[c.local_experts]);
  } else if (a.output.layout == TY_LAYOUT_MASKED) {
    for (u32 e = 0; e < c.local_experts; ++e) {
      u32 rows = load(expert_rows(shared) + e);
      needed = rows > needed ? rows : needed;
      used += rows;
    }
  } else {
    for (u32 s = 0; s < c.ranks; ++s) {
      if (thread_index() == 0) store(&shared.source_start[s], static_cast<u32>(needed));
      needed += load(counts_of(c, epoch, s) + c.max_local_experts);
    }
    block_barrier();
  }
  return {needed, a.output.layout == TY_LAYOUT_MASKED ? used : needed, needed <= a.output.capacity};
}

// First output row of a local expert.
TY_DEVICE u64 segment_start(const ty_dispatch_args &a, const DispatchShared &shared, u32 expert) {
  if (a.output.layout == TY_LAYOUT_MASKED) return expert * a.output.capacity;
  return load(&shared.start[expert]);
}

// ---- receive: rows -------------------------------------------------------------------------------------------

// Address of scale word w of an output row.
TY_DEVICE u32 *scale_at(const ty_dispatch_args &a, u64 row, u32 w) {
  u32 *scales = pointer<u32>(a.output.scales);
  u64 leading = a.output.scale_leading;
  if (leading == 0) return scales + row * a.context.scale_words + w;
  if (a.output.layout != TY_LAYOUT_MASKED) return scales + w * leading + row;
  u64 expert = row / a.output.capacity;
  return scales + (expert * a.context.scale_words + w) * leading + row % a.output.capacity;
}

// Copies a row from the inbox to an output row. By a warp.
TY_DEVICE void copy_row(const ty_dispatch_args &a, const char *slot, u64 row) {
  const ty_context &c = a.context;
  char *out = pointer<char>(a.output.rows) + row * a.output.rows_pitch;
  for (u32 v = lane_index(); v < c.row_bytes / 16; v += warp_size) store16(out + v * 16, load16(slot + v * 16));
  const u32 *scales = reinterpret_cast<const u32 *>(slot + c.row_bytes);
  for (u32 w = lane_index(); w < c.scale_words; w += warp_size) store(scale_at(a, row, w), load(scales + w));
}

// Says what an output row is. By a thread. `source` is a rank of this world, or -1: callers get to see its name.
TY_DEVICE void describe_row(const ty_dispatch_args &a, u64 row, i32 expert, i32 source, i32 token) {
  const ty_output &out = a.output;
  if (out.row_expert) store(pointer<i32>(out.row_expert) + row, expert);
  if (!out.source) return;
  const i32 *names = pointer<const i32>(a.context.rank_names);
  store(pointer<i32>(out.source) + 2 * row, source < 0 ? -1 : load(names + source));
  store(pointer<i32>(out.source) + 2 * row + 1, token);
}

// The number of a source's token at its home. Sources of other nodes are here without the tokens that are not.
TY_DEVICE i32 token_at_home(const ty_context &c, const MetaOut &meta, u32 source, u32 token) {
  return source - c.node_first < c.node_ranks ? static_cast<i32>(token) : load(meta.tokens + token);
}

// The output row of this lane's choice, -1 for none; the handle and the row's description are written.
TY_DEVICE i32 place_choice(const ty_dispatch_args &a, const DispatchShared &shared, const MetaOut &meta, u64 epoch,
                           u32 source, u32 token, i32 token_row) {
  const ty_context &c = a.context;
  const ty_output &out = a.output;
  u32 k = lane_index();
  if (k >= c.top_k) return -1;
  u64 index = static_cast<u64>(token) * c.top_k + k;
  u64 handle_index = static_cast<u64>(source) * c.max_tokens * c.top_k + index;
  i32 expert = load(meta.experts + index);
  float weight = expert >= 0 ? load(meta.weights + index) : 0.0f;
  i32 row = -1;
  if (out.layout == TY_LAYOUT_TOKEN) {
    u64 first = load(&shared.source_start[source]) + static_cast<u64>(token_row);
    if (out.token_experts) store(pointer<i32>(out.token_experts) + first * c.top_k + k, expert);
    if (out.token_weights) store(pointer<float>(out.token_weights) + first * c.top_k + k, weight);
    if (k == 0) row = static_cast<i32>(first);
    if (k == 0) describe_row(a, first, -1, static_cast<i32>(source), token_at_home(c, meta, source, token));
  } else if (expert >= 0) {
    u64 position =
        rows_before(c, epoch, static_cast<u32>(expert), source) + static_cast<u64>(load(meta.positions + index));
    row = static_cast<i32>(segment_start(a, shared, static_cast<u32>(expert)) + position);
    describe_row(a, static_cast<u64>(row), expert, static_cast<i32>(source), token_at_home(c, meta, source, token));
  }
  store(pointer<i32>(a.handle.rows) + handle_index, row);
  store(pointer<float>(a.handle.weights) + handle_index, weight);
  return row;
}

// Everything of one (source, token): by a warp. False once a deadline passed.
TY_DEVICE bool place_token(const ty_dispatch_args &a, const DispatchShared &shared, u64 epoch, u32 source, u32 token,
                           bool fits) {
  const ty_context &c = a.context;
  MetaOut meta = meta_of(c, c.local, source, epoch);
  i32 token_row = load(meta.rows + token);
  if (lane_index() == 0)
    store(pointer<i32>(a.handle.slots) + static_cast<u64>(source) * c.max_tokens + token,
          token_row < 0 ? -1 : load(meta.slots + token));
  if (token_row < 0 || !fits) return true;
  i32 mine = place_choice(a, shared, meta, epoch, source, token, token_row);
  bool failed = false;
  if (lane_index() == 0) {
    const u64 *tag = in_arena<const u64>(c, c.local, c.regions.row_tags, epoch, source) + token;
    failed = !wait_tag(c, TY_DIRECTION_DISPATCH, tag, epoch, TY_SITE_ROW, source, "row");
  }
  // Lane 0 acquired; the ballot orders the other lanes' loads behind it.
  warp_barrier();
  if (warp_ballot(failed)) return false;
  const char *slot =
      in_arena<const char>(c, c.local, c.regions.rows, epoch, source) + static_cast<u64>(token) * c.slot_bytes;
  for (u32 placed = warp_ballot(mine >= 0); placed; placed &= placed - 1)
    copy_row(a, slot, static_cast<u64>(shuffle(mine, lowest_bit(placed))));
  return true;
}

TY_DEVICE void place_rows(const ty_dispatch_args &a, const DispatchShared &shared, u64 epoch, bool fits) {
  const ty_context &c = a.context;
  u32 most = 0;
  for (u32 s = 0; s < c.ranks; ++s) {
    u32 tokens = load(&shared.source_tokens[s]);
    most = tokens > most ? tokens : most;
  }
  u64 warps = static_cast<u64>(worker_count(c)) * block_warps();
  for (u64 i = static_cast<u64>(block_index()) * block_warps() + warp_index(); i < static_cast<u64>(most) * c.ranks;
       i += warps) {
    u32 source = static_cast<u32>(i % c.ranks), token = static_cast<u32>(i / c.ranks);
    if (token >= load(&shared.source_tokens[source])) continue;
    if (!place_token(a, shared, epoch, source, token, fits)) return;
  }
}

// ---- receive: what surrounds the rows --------------------------------------------------------------------------

// Marks an output row that no token got. By a thread.
TY_DEVICE void mark_unused(const ty_dispatch_args &a, u64 row) {
  const ty_output &out = a.output;
  describe_row(a, row, -1, -1, -1);
  if (out.layout != TY_LAYOUT_TOKEN) return;
  for (u64 i = row * a.context.top_k; i < (row + 1) * a.context.top_k; ++i) {
    if (out.token_experts) store(pointer<i32>(out.token_experts) + i, -1);
    if (out.token_weights) store(pointer<float>(out.token_weights) + i, 0.0f);
  }
}

// Zeroes an output row. By a warp.
TY_DEVICE void zero_row(const ty_dispatch_args &a, u64 row) {
  const ty_context &c = a.context;
  char *out = pointer<char>(a.output.rows) + row * a.output.rows_pitch;
  for (u32 v = lane_index(); v < c.row_bytes / 16; v += warp_size) store16(out + v * 16, Vec16{{0, 0, 0, 0}});
  for (u32 w = lane_index(); w < c.scale_words; w += warp_size) store(scale_at(a, row, w), 0u);
}

// Marks rows [first, end) by all threads of the grid.
TY_DEVICE void mark_rest(const ty_dispatch_args &a, u64 first, u64 end) {
  u64 step = static_cast<u64>(worker_count(a.context)) * block_threads();
  for (u64 row = first + static_cast<u64>(block_index()) * block_threads() + thread_index(); row < end; row += step)
    mark_unused(a, row);
}

// The contiguous layout: rows between an expert's last and the next segment, a warp an expert; zeroed on request, since
// a grouped GEMM reads them.
TY_DEVICE void pad_segments(const ty_dispatch_args &a, const DispatchShared &shared) {
  u32 warps = worker_count(a.context) * block_warps();
  for (u32 e = block_index() * block_warps() + warp_index(); e < a.context.local_experts; e += warps) {
    u64 first = load(&shared.start[e]) + load(expert_rows(shared) + e), end = load(&shared.start[e + 1]);
    for (u64 row = first + lane_index(); row < end; row += warp_size) mark_unused(a, row);
    for (u64 row = first; a.output.zero_padding && row < end; ++row) zero_row(a, row);
  }
}

// The masked layout: rows behind each expert's last.
TY_DEVICE void mark_masked(const ty_dispatch_args &a, const DispatchShared &shared) {
  u64 capacity = a.output.capacity, rows = capacity * a.context.local_experts;
  u64 step = static_cast<u64>(worker_count(a.context)) * block_threads();
  for (u64 row = static_cast<u64>(block_index()) * block_threads() + thread_index(); row < rows; row += step)
    if (row % capacity >= load(expert_rows(shared) + row / capacity)) mark_unused(a, row);
}

// Every row that no token got: alignment padding, the unused part of a masked segment, the rest of the output.
TY_DEVICE void pad_output(const ty_dispatch_args &a, const DispatchShared &shared, const Placement &placement) {
  const ty_output &out = a.output;
  bool masked = out.layout == TY_LAYOUT_MASKED;
  if (!placement.fits) {
    mark_rest(a, 0, masked ? out.capacity * a.context.local_experts : out.capacity);
  } else if (masked) {
    mark_masked(a, shared);
  } else {
    if (out.layout == TY_LAYOUT_CONTIGUOUS) pad_segments(a, shared);
    mark_rest(a, placement.needed, out.capacity);
  }
}

// Counts and offsets; all zero if the output overflowed, so that nothing downstream reads rows that are not there.
// By a whole block.
TY_DEVICE void write_counts(const ty_dispatch_args &a, const DispatchShared &shared, u64 epoch,
                            const Placement &placement) {
  const ty_context &c = a.context;
  const ty_output &out = a.output;
  for (u32 e = thread_index(); e <= c.local_experts; e += block_threads()) {
    bool is_end = e == c.local_experts;
    u32 rows = placement.fits && !is_end ? load(expert_rows(shared) + e) : 0;
    if (!is_end) store(pointer<i32>(out.expert_count) + e, static_cast<i32>(rows));
    if (out.host_counts && !is_end) store_relaxed_sys(pointer<u32>(out.host_counts) + e, rows);
    if (out.expert_offset && out.layout == TY_LAYOUT_CONTIGUOUS)
      store(pointer<i32>(out.expert_offset) + e, placement.fits ? static_cast<i32>(load(&shared.start[e])) : 0);
    if (out.expert_offset && out.layout == TY_LAYOUT_MASKED)
      store(pointer<i32>(out.expert_offset) + e, static_cast<i32>(e * out.capacity));
  }
  if (thread_index() != 0) return;
  u32 rows = placement.fits ? static_cast<u32>(placement.used) : 0;
  if (out.row_count) store(pointer<i32>(out.row_count), static_cast<i32>(rows));
  if (out.host_counts) store_relaxed_sys(pointer<u32>(out.host_counts) + c.local_experts, rows);
  if (!placement.fits)
    report(c, TY_DIRECTION_DISPATCH, TY_ERROR_CAPACITY, 0, c.rank, epoch, placement.needed, out.capacity, out.layout);
}

// What combine needs to know of the whole dispatch. By a whole block.
TY_DEVICE void write_head(const ty_dispatch_args &a, const DispatchShared &shared, u64 epoch, bool fits) {
  const ty_context &c = a.context;
  ty_handle_head *head = pointer<ty_handle_head>(a.handle.head);
  for (u32 s = thread_index(); s < c.ranks; s += block_threads())
    store(pointer<u32>(a.handle.source_tokens) + s, load(&shared.source_tokens[s]));
  if (thread_index() != 0) return;
  u32 most = 0;
  for (u32 s = 0; s < c.ranks; ++s) {
    u32 tokens = load(&shared.source_tokens[s]);
    most = tokens > most ? tokens : most;
  }
  store(&head->epoch, epoch);
  store(&head->incomplete, fits ? 0u : 1u);
  store(&head->most_tokens, most);
}

TY_DEVICE void dispatch_receive(const ty_dispatch_args &a, DispatchShared &shared, u64 epoch) {
  if (spans_nodes(a.context)) {
    if (!wait_free(a.context, TY_DIRECTION_DISPATCH, a.context.regions.dispatch_free, epoch)) return;
    if (!forward(a, shared, epoch)) return;
  }
  block_barrier();
  if (!wait_meta(a, shared, epoch)) return;
  Placement placement = plan_output(a, shared, epoch);
  if (block_index() == 0) write_counts(a, shared, epoch, placement);
  if (block_index() == 0) write_head(a, shared, epoch, placement.fits);
  place_rows(a, shared, epoch, placement.fits);
  pad_output(a, shared, placement);
}

} // namespace ty
