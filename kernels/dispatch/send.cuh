// Dispatch, the sending phase inside a node: rows into the receive buffers of the ranks that need them.
#pragma once
#include "dispatch/meta.cuh"
#include "common/quantize.cuh"

namespace ty {

// The passes that warps go through: announcements ahead of rows, rows for other nodes, rows for the own node, rows that
// arrived from other nodes for this one, rows to their final places. All warps announce; senders go through the next
// three; placers go through the last, in which senders describe the output, and help where there is much to do.
constexpr u32 pass_announce = 0, pass_pack = 1, pass_push = 2, pass_forward = 3, pass_place = 4, passes = 5;

// Shared memory for placing rows.
struct PlaceShared {
  u32 before[TY_MAX_COUNTS];           // [source][local expert]: rows of the expert from sources before
  u32 rows[TY_MAX_LOCAL_EXPERTS + 1];  // of each local expert
  u32 start[TY_MAX_LOCAL_EXPERTS + 1]; // first output row of each local expert's segment, and the end of all
  u32 source_rows[TY_MAX_RANKS];
  u32 source_start[TY_MAX_RANKS]; // token layout: first output row of each source
  u32 source_first[TY_MAX_RANKS]; // tokens [first, end) of each source are of this round
  u32 source_end[TY_MAX_RANKS];
  u32 needed;
  u32 used;
  u32 most;          // tokens of a source in this round
  u32 tokens;        // of all sources
  u32 planned;       // 1: the members above are known
  u32 helped;        // 1: warps that have sent help to place
  u32 taken[passes]; // in each pass whose items warps take: items of this block that are taken
  u32 absent;        // ranks of whose counts the team lacks some, a bit each; where ranks may be absent
};

// Items that a team's warps carry: parts of rows. This warp's are first, first + step, ... below end. With step 0 warps
// take items: of the block's, which are first, first + the number of blocks that share them, ...; or, for placing with
// dedicated senders, of all items.
struct Work {
  u32 first;
  u32 end;
  u32 step;
  u32 cut; // rows are in 2^cut parts
};

// What a warp carries in a pass.
struct Pass {
  Work work;
  u32 first;  // the round's first row among the call's: of own tokens, or of the source that is forwarded
  u32 served; // which source that is
};

// What a warp keeps from pass to pass: between nodes in shared memory, since registers are few.
struct Kept {
  Pass pass;
  i32 found;     // the caller's token count
  u32 tokens;    // how many of them are sent: all, or none
  u32 busy;      // blocks that announce something
  u32 dedicated; // as dedicated_senders: of the last blocks (one node)
  u32 refused;   // 1: a choice is faulty (between nodes)
  u32 sending;   // as Teams
  u32 round;     // as Round
  u64 epoch;
  u64 call;
};

// Stores all but `pass`, which each pass adds. By one lane.
TY_DEVICE void store_kept(Kept &kept, const Kept &from) {
  store(&kept.found, from.found);
  store(&kept.tokens, from.tokens);
  store(&kept.busy, from.busy);
  store(&kept.dedicated, from.dedicated);
  store(&kept.refused, from.refused);
  store(&kept.sending, from.sending);
  store(&kept.round, from.round);
  store(&kept.epoch, from.epoch);
  store(&kept.call, from.call);
}

TY_DEVICE Round round_in(const Kept &kept) { return {load(&kept.epoch), load(&kept.call), load(&kept.round)}; }

// Shared memory of a dispatch block, 98 KiB: for building metadata and for placing rows, side by side.
struct DispatchShared {
  LaunchShared launch;
  MetaShared meta;
  PlaceShared place;
  ty_handle_head head; // of a dispatch by an earlier handle
};
static_assert(sizeof(DispatchShared) <= TY_DISPATCH_SHARED_BYTES, "layout.h sizes the launch");

// ---- send: rows --------------------------------------------------------------------------------------------

// Where a row is read: payload, and scale words `scale_stride` words apart.
struct RowAt {
  u64 payload;
  u64 scales;
  u32 scale_stride;
  u32 quantize; // TY_QUANTIZE_*; with any the payload is bf16, and there are no scales
};

// A row of as many parts as it has slices.
constexpr u32 most_cuts = 3;
static_assert(TY_SLICES == 1u << most_cuts, "parts are made of whole slices");

// Slices [first, end) of a row: what a warp carries at once.
struct Slices {
  u32 first;
  u32 end;
};

// How often rows are halved, each part being carried by a warp: as often as leaves none of `warps` warps with more than
// one part, since each part costs trips to memory of its own. Parts of all rows are numbered with 32 bits: row numbers
// fit in 31, and only few rows are cut.
TY_DEVICE u32 cut_for(u64 rows, u64 warps) {
  u32 cut = most_cuts;
  TY_ROLLED
  while (cut > 0 && (rows << cut) > warps) --cut;
  return cut;
}

// The slices of a part: parts of a row have consecutive numbers.
TY_DEVICE Slices part_of_row(u32 part, u32 cut) {
  u32 slices = TY_SLICES >> cut, first = (part & ((1u << cut) - 1)) * slices;
  return {first, first + slices};
}

// Where slice s of `units` units begins: at a multiple of `grain`.
TY_DEVICE u32 slice_begin(u32 units, u32 s, u32 grain) {
  return s == TY_SLICES ? units : units * s / TY_SLICES / grain * grain;
}

// Vectors [begin, end) of a row, this lane's of a batch of vectors_ahead a lane.
struct Batch {
  Vec16 data[vectors_ahead];
};

TY_DEVICE Batch load_batch(u64 from, u32 first, u32 end) {
  Batch batch;
  u64 at = from + static_cast<u64>(first) * 16;
  TY_UNROLL
  for (u32 i = 0; i < vectors_ahead; ++i)
    if (first + i * warp_size < end) batch.data[i] = load16(pointer<const void>(at + i * warp_size * 16));
  return batch;
}

TY_DEVICE void store_batch(char *to, const Batch &batch, u32 first, u32 end) {
  char *at = pointer<char>(one_value(reinterpret_cast<u64>(to) + static_cast<u64>(first) * 16));
  TY_UNROLL
  for (u32 i = 0; i < vectors_ahead; ++i)
    if (first + i * warp_size < end) store16(at + i * warp_size * 16, batch.data[i]);
}

// Where the scale words of slice s begin: those of its vectors.
TY_DEVICE u32 scale_begin(const Context auto &c, u32 s) {
  return s == TY_SLICES ? c.scale_words : slice_begin(c.row_bytes / 16, s, warp_size) >> c.scale_shift;
}

// Where a row goes.
struct RowTo {
  u64 payload;
  u64 scales; // of word 0
};

// A row with its scales after it.
TY_DEVICE RowTo row_to(const Context auto &c, const char *at) {
  u64 payload = reinterpret_cast<u64>(at);
  return {payload, payload + c.row_bytes};
}

// The slot of a source's row at a rank of this node.
TY_DEVICE RowTo recv_buffer_row(const Context auto &c, u32 owner, u64 epoch, u32 source, u32 slot) {
  return row_to(c,
                in_arena<const char>(c, owner, c.regions.rows, epoch, source) + static_cast<u64>(slot) * c.slot_bytes);
}

// `bits` rotated right by `first` < 32: bit i of the result is bit i + first.
TY_DEVICE u32 rotated(u32 bits, u32 first) { return bits >> first | bits << ((warp_size - first) % warp_size); }

// Copies slices of a row, read once, to place_of(bit) for every bit of the mask that mask_of() returns; mask_of is
// called once, while the first loads are under way. Returns the mask. Bits from `first` on come first. Scale words of a
// place are `to_stride` apart. By a warp.
//
// A kernel calls it in one place: rows are packed, pushed, forwarded and placed by the same code, fetched once for all
// passes.
template <typename MaskOf, typename PlaceOf>
TY_DEVICE u64 carry_row(const Context auto &c, const RowAt &from, const Slices &slices, u32 to_stride, u32 first,
                        MaskOf mask_of, PlaceOf place_of) {
  u32 vectors = c.row_bytes / 16, end = slice_begin(vectors, slices.end, warp_size);
  u32 begin = slice_begin(vectors, slices.first, warp_size);
  u32 scale_end = scale_begin(c, slices.end), first_scale = scale_begin(c, slices.first);
  bool raw = from.quantize == TY_QUANTIZE_NONE;
  auto load_payload = [&](u32 v) { return load_batch(from.payload, v + lane_index(), raw ? end : 0); };
  auto load_scale = [&](u32 w) {
    bool there = raw && w + lane_index() < scale_end;
    return there ? load(pointer<const u32>(from.scales) + static_cast<u64>(w + lane_index()) * from.scale_stride) : 0;
  };
  Batch batch = load_payload(begin);
  u32 scale = load_scale(first_scale);
  u64 mask = mask_of();
  // A lane holds one place; a mask wider than the warp takes the row twice.
  TY_ROLLED
  for (u32 base = 0; base < 64 && (mask >> base) != 0; base += warp_size) {
    u32 here = rotated(static_cast<u32>(mask >> base), first);
    RowTo own{0, 0};
    if ((here >> lane_index()) & 1) own = place_of(base + (lane_index() + first) % warp_size);
    auto payload_of = [&](u32 left) { return pointer<char>(shuffle(own.payload, lowest_bit(left))); };
    auto scale_of = [&](u32 left, u32 w) {
      return pointer<u32>(shuffle(own.scales, lowest_bit(left))) + static_cast<u64>(w) * to_stride;
    };
    if (raw) {
      TY_ROLLED
      for (u32 v = begin; v < end; v += vectors_ahead * warp_size) {
        if (base + v != begin) batch = load_payload(v);
        TY_ROLLED
        for (u32 left = here; left; left &= left - 1) store_batch(payload_of(left), batch, v + lane_index(), end);
      }
      TY_ROLLED
      for (u32 w = first_scale; w < scale_end; w += warp_size) {
        if (base + w != first_scale) scale = load_scale(w);
        TY_ROLLED
        for (u32 left = here; left; left &= left - 1) {
          u32 *to = scale_of(left, w + lane_index());
          if (w + lane_index() < scale_end) store(to, scale);
        }
      }
    } else {
      quantize_row(
          from.quantize, from.payload, begin, end,
          [&](u32 v, Vec16 data, bool there) {
            TY_ROLLED
            for (u32 left = here; left; left &= left - 1) {
              char *to = payload_of(left);
              if (there) store16(to + v * 16, data);
            }
          },
          [&](u32 w, u32 word, bool there) {
            TY_ROLLED
            for (u32 left = here; left; left &= left - 1) {
              u32 *to = scale_of(left, w);
              if (there) store(to, word);
            }
          });
    }
  }
  return mask;
}

// In a tag: the source sends no row. Only in dispatches by earlier handles.
constexpr u64 tag_absent = 1ull << 63;

// Raises the tags of slices of a source's row at every rank of the mask, after the row. By a warp. `absent`: 0, or
// tag_absent.
TY_DEVICE void raise_tags(const Context auto &c, u64 mask, u64 epoch, u32 source, u32 slot, const Slices &slices,
                          u64 absent = 0) {
  warp_barrier();
  // N2: the warp's stores happen before this fence; wait_row acquires.
  if (mask) fence_acq_rel_sys();
  // The number of slices is a power of two.
  u32 carried = slices.end - slices.first, shift = popcount(carried - 1);
  for (u32 i = lane_index(); i >> shift < c.node_ranks; i += warp_size) {
    u32 rank = i >> shift, slice = slices.first + (i & (carried - 1));
    if (!((mask >> rank) & 1)) continue;
    store_relaxed_sys(in_arena<u64>(c, rank, c.regions.row_tags, epoch, source) + slot * TY_SLICES + slice,
                      epoch | absent);
  }
}

// Whether own rows are placed directly from the caller's memory. A launch that only receives may come when the caller
// no longer has them; and quantising takes long, so it is done before it is known where rows go.
TY_DEVICE bool places_own(const DispatchArgs auto &a) {
  return a.phases == (TY_PHASE_SEND | TY_PHASE_RECEIVE) && quantization(a.context) == TY_QUANTIZE_NONE;
}

TY_DEVICE RowAt own_row(const DispatchArgs auto &a, u32 token) {
  const auto &t = a.tokens;
  return {t.x + token * t.x_pitch, t.scales + 4 * token * t.scale_row_stride, t.scale_column_stride,
          quantization(a.context)};
}

// In again.cuh.
TY_DEVICE u32 dispatch_status(const DispatchArgs auto &a);

// Closes the context since ranks gave handles of different dispatches, or one gave choices, or rows of different
// formats: `own` and `theirs` as dispatch_status. By a thread.
TY_DEVICE void refuse_other(const DispatchArgs auto &a, u64 epoch, u32 peer, u32 own, u32 theirs) {
  u64 number = own & 1 ? load(&pointer<const ty_handle_head>(a.handle.head)->epoch) : 0;
  u32 format = a.context.format >> 1;
  u32 kind = (own | theirs) & 1 ? TY_ERROR_PAIRING : TY_ERROR_FORMAT;
  keep_fault({kind, 0, peer, epoch, number, theirs & 1 ? theirs >> 1 ^ format : 0, 0});
  close(a.context);
}

// Notifies every node peer that this rank's reads of the epoch before are over. By the team of one block. `status`: as
// dispatch_status.
TY_DEVICE void raise_epoch(const Context auto &c, const Team &team, u64 epoch, u32 status) {
  // N1: acquired by wait_round.
  for (u32 rank = team_thread(team); rank < c.node_ranks; rank += team_threads(team))
    if (!is_left_out(c, rank))
      store_release_sys(in_arena<u64>(c, rank, c.regions.meta_flags, epoch, c.local), flag_value(epoch, status));
}

// Blocks that build metadata and heads of messages for a call of `tokens` tokens: the first of the grid.
TY_DEVICE u32 busy_blocks(const DispatchArgs auto &a, const Round &round, u32 tokens) {
  const auto &c = a.context;
  if (!(a.phases & TY_PHASE_SEND)) return 0;
  u32 links = spans_nodes(c) ? layout_of(c, TY_DIRECTION_DISPATCH).targets : 0;
  return links + (round.number == 0 && !goes_again(a) ? tile_count(c, tokens) * c.node_ranks : 0);
}

// The warps among which rows are shared out, and the calling warp's number.
struct Share {
  u32 warps;
  u32 own; // `warps` or more: not one of them
};

// A team's warps on all workers; where rows are few, only on workers that are not busy with announcements. Consecutive
// numbers are in different blocks, from the far end of the grid, so that busy blocks get their rows last.
TY_DEVICE Share share_of(const Context auto &c, const Team &team, u32 busy, u32 rows) {
  u32 workers = worker_count(c), block = block_index();
  if (2 * busy <= workers && rows <= (workers - busy) * team.warps) {
    workers -= busy;
    if (block < busy) return {workers * team.warps, ~0u};
    block -= busy;
  }
  return {workers * team.warps, team_warp(team) * workers + workers - 1 - block};
}

// By a warp that has finished the pass before.
TY_DEVICE void keep_pass(Pass &kept, const Pass &pass) {
  warp_barrier();
  if (lane_index() == 0) {
    store(&kept.work.first, pass.work.first);
    store(&kept.work.end, pass.work.end);
    store(&kept.work.step, pass.work.step);
    store(&kept.work.cut, pass.work.cut);
    store(&kept.first, pass.first);
    store(&kept.served, pass.served);
  }
  warp_barrier();
}

// Shares out `rows` rows, cut for warps or for blocks. Each part of a row that is sent inside the node costs a fence,
// which waits for what all warps of the block send; quantising a row takes a warp longer than that.
TY_DEVICE Work share_rows(const Context auto &c, const Team &team, u32 busy, u32 rows, bool for_blocks) {
  Share share = share_of(c, team, busy, rows);
  u32 cut = cut_for(rows, for_blocks ? share.warps / team.warps : share.warps);
  return {share.own, rows << cut, share.warps, cut};
}

// Likewise for rows to send. Warps take rows where there is more than one for each warp, or where senders are
// dedicated; again from the far end of the grid. By a team. `closed`: as finds_closed; on return as the warp agreed, or
// as the whole team where it has to meet: rows that no metadata announces are never looked at.
TY_DEVICE Work share_sent(const Context auto &c, const Team &team, PlaceShared &shared, u32 kind, const Kept &kept,
                          u32 rows, bool &closed) {
  if (load(&kept.dedicated) == 0) {
    bool for_blocks = kind == pass_push && quantization(c) == TY_QUANTIZE_NONE;
    Work work = share_rows(c, team, load(&kept.busy), rows, for_blocks);
    if (rows <= work.step) {
      closed = agrees_late(c) && warp_ballot(closed) != 0;
      return work;
    }
  }
  if (team_thread(team) == 0) store(&shared.taken[kind], 0u);
  closed = !meet_open(c, team, closed);
  return {worker_count(c) - 1 - block_index(), rows, 0, 0};
}

} // namespace ty
