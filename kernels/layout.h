// The one definition of every struct and constant that both the host and the device read.
//
// Plain C. The device code includes it; bindings/ffi/layout.rs is generated from it and checked at build
// time. All offsets come from the buffer plan (proxy/plan.rs); kernels never recompute them.
#ifndef TY_LAYOUT_H
#define TY_LAYOUT_H
#include <stdint.h>

// Ranks of one node: a token's ranks are one bit each in a 64-bit mask.
#define TY_MAX_NODE_RANKS 64
// Experts a token may name: a lane of a warp each.
#define TY_MAX_TOP_K 32
// Experts on one rank: their running counts and one token bitmap word each fit in 40 KiB of shared memory.
#define TY_MAX_LOCAL_EXPERTS 2047
// 32-bit words of the token bitmap in shared memory (32 KiB).
#define TY_BITMAP_WORDS 8192
// Threads of a block on a GPU at the most (the launch bound of every kernel).
#define TY_MAX_BLOCK_THREADS 512

// Shared memory of a block, asserted where the structs are defined.
#define TY_DISPATCH_SHARED_BYTES 43520
#define TY_COMBINE_SHARED_BYTES 256

// Phases of a launch, or-ed for a fused call.
#define TY_PHASE_SEND 1
#define TY_PHASE_RECEIVE 2

// Output layouts of dispatch.
#define TY_LAYOUT_CONTIGUOUS 0
#define TY_LAYOUT_MASKED 1
#define TY_LAYOUT_TOKEN 2

// Where weights come from.
#define TY_WEIGHTS_DISPATCH 0
#define TY_WEIGHTS_COMBINE 1
#define TY_WEIGHTS_NONE 2

// Element types of combine's rows and outputs.
#define TY_BF16 0
#define TY_FP16 1
#define TY_FP32 2
#define TY_FP8_E4M3 3

// Low half of a flag: what the sender says of this epoch. The high half is the epoch's low 32 bits.
#define TY_STATUS_OK 0
#define TY_STATUS_BAD_INPUT 1  // dispatch: the source's routing was unusable, it sends nothing
#define TY_STATUS_INCOMPLETE 2 // combine: the expert rank's output overflowed, it sends no rows

// State of a handle.
#define TY_HANDLE_EMPTY 0
#define TY_HANDLE_RECEIVED 1

// Error kinds in an error record.
#define TY_ERROR_NONE 0
#define TY_ERROR_ROUTING_RANGE 1     // a: token, b: choice, c: expert
#define TY_ERROR_ROUTING_DUPLICATE 2 // a: token, b: choice, c: expert
#define TY_ERROR_TOKEN_COUNT 3       // a: count found, b: maximum
#define TY_ERROR_CAPACITY 4          // a: rows needed, b: rows given, c: layout
#define TY_ERROR_INCOMPLETE 5        // peer: the rank whose contributions are missing
#define TY_ERROR_ORDER 6             // a: TY_ORDER_*, b and c: epochs sent and received
#define TY_ERROR_TIMEOUT 7           // site, peer, a: expected, b: seen, c: nanoseconds waited; fatal

// What was out of order.
#define TY_ORDER_DISPATCH_SEND 1
#define TY_ORDER_DISPATCH_RECEIVE 2
#define TY_ORDER_COMBINE_SEND 3
#define TY_ORDER_COMBINE_RECEIVE 4
#define TY_ORDER_HANDLE_EMPTY 5

// Wait sites: every wait on the device has one.
#define TY_SITE_META 1
#define TY_SITE_ROW 2
#define TY_SITE_COMBINE_FLAG 3
#define TY_SITE_PARTIAL 4
#define TY_SITE_BARRIER 5

// The directions, each with its own record and claim.
#define TY_DIRECTION_DISPATCH 0
#define TY_DIRECTION_COMBINE 1
#define TY_DIRECTION_BARRIER 2
#define TY_DIRECTIONS 3

// A region of the arena: address = base + offset + parity * parity_stride + source * source_stride + index * unit.
// Regions addressed by token and slot have source_stride 0.
typedef struct ty_region {
  uint64_t offset;
  uint64_t parity_stride;
  uint64_t source_stride;
} ty_region;

// Where each region lies: the same on every rank.
typedef struct ty_regions {
  ty_region rows;           // [parity][source][token] slots of slot_bytes: payload, then scale words
  ty_region row_tags;       // [parity][source][token] uint64 epoch
  ty_region meta_flags;     // [parity][source] uint64 flag
  ty_region meta_counts;    // [parity][source][max_local_experts + 2] uint32: per expert, then rows, then tokens
  ty_region meta_rows;      // [parity][source][token] int32: which row of this source for this rank, -1 none
  ty_region meta_slots;     // [parity][source][token] int32: the home's slot for this rank's partial row
  ty_region meta_experts;   // [parity][source][token][top_k] int32 local expert, -1 not here
  ty_region meta_positions; // [parity][source][token][top_k] int32 position among this source's rows of the expert
  ty_region meta_weights;   // [parity][source][token][top_k] float
  ty_region partials;       // [parity][token][slot] rows of partial_bytes
  ty_region partial_tags;   // [parity][token][slot] uint64 epoch
  ty_region combine_flags;  // [parity][source] uint64 flag
  ty_region ahead_weights;  // [parity][source][token][top_k] float: weights that come with combine
  ty_region barrier_flags;  // [parity][source] uint64 number of the barrier
} ty_regions;

// Device-local control block of a context. Written by the last block of each kernel, read by all at start.
typedef struct ty_state {
  uint64_t dispatch_sent;     // epoch of the last dispatch sent
  uint64_t dispatch_received; // epoch of the last dispatch received: equals dispatch_sent or is one behind
  uint64_t combine_sent;
  uint64_t combine_received;
  uint64_t barriers;                      // barriers passed
  uint64_t error_sequence[TY_DIRECTIONS]; // even; what the error record's sequence holds when at rest
  uint32_t blocks_done[TY_DIRECTIONS];    // blocks of the running kernel that are through
  uint32_t error_claim[TY_DIRECTIONS];    // 1: some block of the running kernel has reported
  uint32_t closed;                        // 1: a deadline passed; no kernel of this context does anything more
  uint32_t reserved;
} ty_state;

// In host memory; a sequence lock: odd while the device writes, even and larger afterwards.
typedef struct ty_error_record {
  uint64_t sequence;
  uint32_t kind;
  uint32_t site;
  uint32_t peer;
  uint32_t reserved;
  uint64_t epoch;
  uint64_t a;
  uint64_t b;
  uint64_t c;
  uint64_t padding[8];
} ty_error_record;

// Where an expert lives.
typedef struct ty_expert_home {
  uint32_t rank;
  uint32_t local;
} ty_expert_home;

// What is fixed when a context is built. Pointers are device addresses.
typedef struct ty_context {
  uint32_t rank;
  uint32_t ranks;
  uint32_t experts;
  uint32_t local_experts;
  uint32_t top_k;
  uint32_t max_tokens;
  uint32_t hidden;
  uint32_t weights;           // TY_WEIGHTS_*
  uint32_t row_bytes;         // payload of a token row; a multiple of 16
  uint32_t scale_words;       // 4-byte scale words of a row
  uint32_t slot_bytes;        // pitch of a row in the inbox; a multiple of 16
  uint32_t partial_bytes;     // pitch of a partial row; a multiple of 16
  uint32_t slots;             // partial rows a token can get: min(top_k, ranks)
  uint32_t max_local_experts; // over all ranks: pitch of meta_counts is this + 2
  uint64_t timeout_ns;
  uint64_t state;       // ty_state *
  uint64_t errors;      // ty_error_record[TY_DIRECTIONS] *, host memory
  uint64_t expert_home; // const ty_expert_home *, [experts]
  uint64_t local_count; // const uint32_t *, [ranks]: experts of each rank
  ty_regions regions;
  uint64_t peer_base[TY_MAX_NODE_RANKS]; // arenas as this device sees them; own at [rank]
} ty_context;

// What combine needs of a dispatch; lives in device memory, written by dispatch.
typedef struct ty_handle_head {
  uint64_t epoch;       // of the dispatch
  uint32_t state;       // TY_HANDLE_*
  uint32_t incomplete;  // 1: this rank's output overflowed
  uint32_t own_tokens;  // tokens this rank dispatched
  uint32_t own_bad;     // 1: this rank's routing was unusable; its sums are zero
  uint32_t most_tokens; // over all sources
  uint32_t reserved;
  uint32_t source_tokens[TY_MAX_NODE_RANKS];
  uint32_t source_rows[TY_MAX_NODE_RANKS];
} ty_handle_head;

typedef struct ty_handle {
  uint64_t head; // ty_handle_head *
  uint64_t rows; // int32 [ranks][max_tokens][top_k]: output row of each choice, -1 none (token layout: [..][0] alone)
  uint64_t weights;   // float [ranks][max_tokens][top_k]
  uint64_t slots;     // int32 [ranks][max_tokens]: the home's slot, -1: no row here
  uint64_t rank_mask; // uint64 [max_tokens]: ranks each own token went to
} ty_handle;

typedef struct ty_tokens {
  uint64_t x;
  uint64_t x_pitch;          // bytes
  uint64_t scales;           // 0: none
  uint64_t scale_row_stride; // in 4-byte words
  uint64_t scale_column_stride;
  uint64_t topk_idx;
  uint64_t topk_weight; // float [tokens][top_k], 0: none
  uint64_t count_ptr;   // const int32_t *, 0: count below
  uint32_t count;
  uint32_t index_bytes; // 4 or 8
} ty_tokens;

typedef struct ty_output {
  uint64_t rows;
  uint64_t rows_pitch; // bytes
  uint64_t scales;
  uint64_t expert_count;  // int32 [local_experts]
  uint64_t expert_offset; // int32 [local_experts + 1], or 0
  uint64_t row_expert;    // int32 [rows], or 0
  uint64_t source;        // int32 [rows][2], or 0
  uint64_t token_experts; // int32 [rows][top_k], or 0
  uint64_t token_weights; // float [rows][top_k], or 0
  uint64_t row_count;     // int32 [1], or 0
  uint64_t host_counts;   // int32 [local_experts + 1] in host memory, or 0
  uint64_t capacity;      // rows in all (masked: a local expert)
  uint64_t scale_leading; // column-major scales: words from one column to the next; 0: row-major
  uint32_t layout;        // TY_LAYOUT_*
  uint32_t align;
  uint32_t zero_padding;
  uint32_t reserved;
} ty_output;

typedef struct ty_dispatch_args {
  ty_context context;
  ty_handle handle;
  ty_tokens tokens;
  ty_output output;
  uint32_t phases;
  uint32_t reserved;
} ty_dispatch_args;

typedef struct ty_combine_args {
  ty_context context;
  ty_handle handle;
  uint64_t rows;
  uint64_t rows_pitch;  // bytes
  uint64_t topk_weight; // float [tokens][top_k] of this rank's own tokens, or 0
  uint64_t out;
  uint64_t out_pitch; // bytes
  uint32_t out_dtype; // TY_BF16, TY_FP16 or TY_FP32
  uint32_t accumulate;
  uint32_t layout;
  uint32_t phases;
} ty_combine_args;

typedef struct ty_barrier_args {
  ty_context context;
} ty_barrier_args;

// The benchmark's experts: see kernels/bench.cuh.
typedef struct ty_expert_args {
  uint64_t rows;       // dispatched rows
  uint64_t rows_pitch; // bytes
  uint64_t scales;
  uint64_t scale_leading; // 0: row-major
  uint64_t scale_words;
  uint64_t row_expert;    // int32 [row_total] local expert, -1: skip; or 0 in the token layout
  uint64_t token_experts; // int32 [row_total][top_k]; token layout
  uint64_t token_weights; // float [row_total][top_k], or 0 for 1
  uint64_t global_expert; // const uint32_t *, [local_experts]
  uint64_t y;
  uint64_t y_pitch; // bytes
  uint64_t row_total;
  uint64_t rows_per_block; // masked column-major scales: rows of one expert; else 0
  uint32_t hidden;
  uint32_t top_k;
  uint32_t in_dtype;
  uint32_t out_dtype;
  uint32_t ue8m0; // 1: scales are exponents, four to a word
  uint32_t reserved;
} ty_expert_args;

// A bare push: copies `bytes` from source to each destination, 16 bytes a thread: the floor of a link.
typedef struct ty_push_args {
  uint64_t source;
  uint64_t destination[TY_MAX_NODE_RANKS];
  uint64_t bytes[TY_MAX_NODE_RANKS];
  uint32_t destinations;
  uint32_t reserved;
} ty_push_args;

// Holds a stream until the host lets it go: `flag` is in host memory.
typedef struct ty_hold_args {
  uint64_t flag;  // const uint64_t *
  uint64_t value; // lets go once the flag equals this
  uint64_t timeout_ns;
} ty_hold_args;

#endif
