// The one definition of every struct and constant that both the host and the device read.
//
// Plain C. The device code includes it; kernels/ffi/layout.rs is generated from it and checked at build
// time. All offsets come from the buffer plan (bindings/api/plan.rs); kernels never recompute them.
#ifndef TY_LAYOUT_H
#define TY_LAYOUT_H
#include <stdint.h>

// Ranks of a world: a few words each in a block's shared memory.
#define TY_MAX_RANKS 512
// Ranks of one node: a token's ranks are one bit each in a 64-bit mask.
#define TY_MAX_NODE_RANKS 64
// Nodes of a world: a token's nodes are one bit each in a 64-bit mask.
#define TY_MAX_NODES 64
// Experts a token may name: one warp lane each.
#define TY_MAX_TOP_K 32
// Experts on one rank: 11 bits of a metadata word, and two words each in shared memory, for tiles of 32 tokens.
#define TY_MAX_LOCAL_EXPERTS 2047
// Tokens of a call: 20 bits of a metadata word.
#define TY_MAX_TOKENS (1 << 20)
// Output rows of a dispatch whose handle is compact: 26 bits of an entry of ty_handle.slots.
#define TY_MAX_COMPACT_ROWS ((1 << 26) - 1)
// Ranks of a node whose masks of ranks in ty_handle.rail_mask are a byte each.
#define TY_NARROW_RANKS 8
// 32-bit words of the token bitmap, and of the rows before each group of 32 tokens, in shared memory (32 KiB).
#define TY_BITMAP_WORDS 8192
// Words of the bitmaps of tokens that go to each node, in shared memory of kernels of several nodes (32 KiB): 4096
// tokens to each of 64 nodes.
#define TY_NODES_BITMAP_WORDS 8256
// Ranks times experts of one rank: their counts are in shared memory (32 KiB).
#define TY_MAX_COUNTS 8192
// Ranks of a node with in-place output: one warp lane each keeps where a row goes, and a bit of 32 whether there is
// room.
#define TY_MAX_IN_PLACE_RANKS 32
// Slices of a dispatched row: each may be carried by a warp of its own, and has a tag of its own.
#define TY_SLICES 8
// Threads of a block on a GPU at the most (the launch bound of every kernel).
#define TY_MAX_BLOCK_THREADS 512
#define TY_ABSENCE_BLOCK_THREADS 384 // between nodes, where ranks may be absent: fewer, as each needs more registers

// Shared memory of a block, asserted where the structs are defined.
#define TY_DISPATCH_SHARED_BYTES 100352
#define TY_DISPATCH_NODES_SHARED_BYTES 168192
#define TY_DISPATCH_IN_PLACE_SHARED_BYTES 172032
#define TY_COMBINE_SHARED_BYTES 12288

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

// Scales of own rows that are quantised to fp8 on sending, if they are: such rows come as bf16, without scales.
#define TY_QUANTIZE_NONE 0
#define TY_QUANTIZE_F32 1
#define TY_QUANTIZE_UE8M0 2

// Element types of combine's rows and outputs.
#define TY_BF16 0
#define TY_FP16 1
#define TY_FP32 2
#define TY_FP8_E4M3 3

// Low half of a flag, except of combine flags (combine_status in kernels/combine/send.cuh) and of metadata flags
// (dispatch_status in kernels/dispatch/again.cuh): the sender's status in this epoch. The high half is the epoch's low
// 32 bits. Also the status word of a message's head.
#define TY_STATUS_OK 0
#define TY_STATUS_BAD_INPUT 1  // dispatch: the source's routing was unusable, it sends nothing
#define TY_STATUS_INCOMPLETE 2 // combine: the expert rank's output overflowed, it sends no rows

// State of a handle that holds no received dispatch; else the state is the serial of the handle that was received.
#define TY_HANDLE_EMPTY 0

// Error kinds in an error record.
#define TY_ERROR_NONE 0
#define TY_ERROR_ROUTING_RANGE 1     // a: token, b: choice, c: expert
#define TY_ERROR_ROUTING_DUPLICATE 2 // a: token, b: choice, c: expert; where an expert may be named once alone
#define TY_ERROR_TOKEN_COUNT 3       // a: count found, b: maximum
#define TY_ERROR_CAPACITY 4          // a: rows needed, b: rows given, c: layout
#define TY_ERROR_INCOMPLETE 5        // peer: the rank whose contributions are missing
#define TY_ERROR_ORDER 6             // a: TY_ORDER_*, b and c: epochs sent and received
#define TY_ERROR_TIMEOUT 7           // site, peer, a: expected, b: seen, c: nanoseconds waited; fatal
#define TY_ERROR_PEER_LOST 8         // site, peer: the proxy lost it; fatal
#define TY_ERROR_OVERLAP 9           // a: direction, b and c: as of TY_ERROR_ORDER; fatal
#define TY_ERROR_PAIRING 10     // peer, a: the dispatch of this rank's handle, b: 31 bits of the peer's, 0: none; fatal
#define TY_ERROR_OTHER_COUNT 11 // a: count found, b: count of the handle's dispatch
#define TY_ERROR_FORMAT 12      // peer, whose call has rows of another format; fatal

// What was out of order.
#define TY_ORDER_DISPATCH_SEND 1
#define TY_ORDER_DISPATCH_RECEIVE 2
#define TY_ORDER_COMBINE_SEND 3
#define TY_ORDER_COMBINE_RECEIVE 4
#define TY_ORDER_HANDLE_EMPTY 5
#define TY_ORDER_ROUND 6
#define TY_ORDER_DISPATCH_CALL 7
#define TY_ORDER_COMBINE_CALL 8
#define TY_ORDER_HANDLE_INCOMPLETE 9

// Wait sites: every wait on the device has one.
#define TY_SITE_METADATA 1
#define TY_SITE_ROW 2
#define TY_SITE_COMBINE_FLAG 3
#define TY_SITE_PARTIAL 4
#define TY_SITE_BARRIER 5
#define TY_SITE_ARRIVED 6 // a chunk from another node
#define TY_SITE_STAGING 7 // wire staging that the network still reads
#define TY_SITE_FREE 8    // a node peer's receive buffer of the epoch before
#define TY_SITE_TILE 9    // metadata of earlier tokens, by another block of this rank
#define TY_SITE_AHEAD_WEIGHTS 10

// What moves: one numbering for kernels, proxy and reports (proxy/wire.rs: Direction). The first three are calls, each
// with its own record and claim. Between nodes each has links, epochs, staging and a receive buffer of its own.
#define TY_DIRECTION_DISPATCH 0
#define TY_DIRECTION_COMBINE 1
#define TY_DIRECTION_BARRIER 2
#define TY_DIRECTION_WEIGHTS 3 // sent ahead of a combine, along the links of dispatch
#define TY_DIRECTIONS 4
#define TY_CALL_DIRECTIONS 3
// Error records: one per call direction for errors that a context survives, then one per call direction for errors that
// close it, so that neither kind overwrites the other.
#define TY_RECORDS 6

// At most so many blocks are few: see has_few_blocks in kernels/common/wire.cuh.
#define TY_FEW_BLOCKS 48

// Stages of a kernel. Each block notes when it reached the end of each stage: see ty_context.stats.
#define TY_STAGE_BEGIN 0
#define TY_STAGE_PUBLISHED 1  // dispatch: metadata and heads of messages; combine: flags and weights
#define TY_STAGE_INTER_NODE 2 // rows for other nodes packed, or their partial rows sent
#define TY_STAGE_INTRA_NODE 3 // rows of this node sent
#define TY_STAGE_RAIL 4       // what this rank does as a rail
#define TY_STAGE_NOTIFIED 5   // counts of all sources, or flags of all node peers
#define TY_STAGE_ROWS 6       // rows placed, or sums formed
#define TY_STAGE_DONE 7       // nothing left but to count the blocks
#define TY_STAGES 8

// Bytes at the head of every message between nodes: ty_wire_head.
#define TY_WIRE_HEAD_BYTES 32
// An arrival, by which the proxy reports that a chunk is in the receive buffer:
//
//   63..........21 20......10 9......0
//       epoch        source    chunk
//
// The 43 bits of the epoch do not wrap in the life of a machine (2^43 calls); the word can stay unwritten for any
// number of epochs.
#define TY_ARRIVAL_CHUNK_BITS 10
#define TY_ARRIVAL_SOURCE_BITS 11
// Polled words of host memory lie so many words apart, in a 32-byte sector each: a GPU makes its loads from one sector
// one after the other, each a trip over PCIe (H200: eight of a line take 7 us, of eight sectors 1.2).
#define TY_POLLED_PITCH 4

// A region of the arena: address = base + offset + parity * parity_stride + source * source_stride + index * unit.
// Tokens of rows and partial rows are counted from the round's first token, those of metadata from the call's.
// Regions that exist once have parity_stride 0.
typedef struct ty_region {
  uint64_t offset;
  uint64_t parity_stride;
  uint64_t source_stride;
} ty_region;

// Where each region lies: the same on every rank. A source is a rank of the world. What a rail received for its node
// is stored under the source's number; only tokens that have experts in the node are counted.
typedef struct ty_regions {
  ty_region rows;       // [source][token] slots of slot_bytes: elements, then scale words, then a side payload
  ty_region row_tags;   // [source][token][TY_SLICES] uint64 epoch
  ty_region meta_flags; // [parity][local rank] uint64 flag: that rank has read its receive buffer of the epoch before

  // Metadata words, uint64 {epoch's low half, 1 + value}: each shows by itself whether it has arrived.
  ty_region meta_counts; // [parity][source][max_local_experts + 1 + rounds]: rows by expert, rows or meta_refused, ends
  ty_region meta_tokens; // [parity][source][token]: 0 not here, else 1 + (row of this source << 5 | slot at the owner)
  ty_region meta_source_tokens; // [parity][source][token]: its number at its source, for sources of other nodes
  ty_region meta_choices;       // [parity][source][token][top_k]: 0 not here, else 1 + (position << 11 | local expert)
  ty_region meta_weights;       // [parity][source][token][top_k]: bits of a float, where the choice is here
  ty_region partials;      // [part][token][slot] rows of partial_bytes; part 0: own tokens, 1 + j: of served source j
  ty_region partial_tags;  // [part][token][slot] uint64 epoch, unless partial rows are LL rows
  ty_region combine_flags; // [parity][local rank] uint64 flag
  ty_region ahead_weights; // [parity][source][token][top_k] float: weights that come with combine
  ty_region ahead_flags;   // [parity][source] uint64 epoch: they are there
  ty_region barrier_flags; // [parity][local rank] uint64 number of the barrier
  ty_region dispatch_free; // [local rank] uint64: the last dispatch whose receive buffer that rank has read
  ty_region combine_free;  // [local rank] uint64: the last combine likewise

  // In one node, with in-place output: peers store rows directly into the output in the arena.
  ty_region in_place_rows;    // rows of the output, row_bytes apart; source_stride 0: there is none
  ty_region in_place_scales;  // their scale words, [row][scale_words]
  ty_region all_counts;       // [parity][source][local rank][max_local_experts + 1] metadata words: as the first of
                              // meta_counts, of every rank
  ty_region in_place_choices; // [token][top_k] metadata words: as meta_choices, of own tokens for all ranks; local

  // Where calls go on without missing ranks. The last region, beside ty_context.absences.
  ty_region signs; // [local rank] uint64 [1 + ranks]: that rank's signs of life; which ranks it has masked
} ty_regions;

// The first bytes of a message between nodes.
typedef struct ty_wire_head {
  uint64_t epoch;
  uint32_t status;   // TY_STATUS_*
  uint32_t rows;     // rows that follow
  uint32_t rank;     // with TY_STATUS_INCOMPLETE: whose rows are missing
  uint32_t headers;  // row headers that come first: of all rows of the call, in its first round
  uint32_t dispatch; // of sums: number of the dispatch that is combined, as in combine flags; of rows: dispatch_status
  uint32_t reserved;
} ty_wire_head;

// One direction between nodes, as proxy/wire.rs lays it out. A message is a head, then rows headers of header_bytes,
// then, rows_offset from its start, rows of row_bytes, chunk_rows to a chunk. With headers, chunk 0 ends before the
// rows.
typedef struct ty_wire_layout {
  uint64_t staging; // bytes from the own arena's start, of link 0 and parity 0
  uint64_t staging_parity;
  uint64_t staging_link;
  uint64_t recv_buffer; // likewise, of messages to this rank, by source
  uint64_t recv_buffer_parity;
  uint64_t recv_buffer_source;
  uint32_t rows_offset; // from a message's start to its rows
  uint32_t chunk_rows;
  uint32_t chunk_shift;  // row r is in chunk (r + chunk_shift) / chunk_rows
  uint32_t header_bytes; // 0: rows have no headers
  uint32_t row_bytes;    // 0: a message has headers alone
  uint32_t chunks;       // most of a message; 0: the direction is not used
  uint32_t targets;      // links of this rank
  uint32_t sources;      // links to this rank
  uint32_t links;        // most links of any rank: stride of the words below
  uint32_t recv_buffers; // most sources of any rank
  uint32_t first_doorbell;
  uint32_t first_link_word;
  uint32_t first_arrived;
  uint32_t first_counter; // of [link][chunk]
  uint32_t chunk_inverse; // floor((2^32 - 1) / chunk_rows), as divide() takes it
  uint32_t reserved;
} ty_wire_layout;

// Words that a rank shares with its proxy, and tables that go with them. Words are 64 bits.
typedef struct ty_wire {
  ty_wire_layout layouts[TY_DIRECTIONS];
  uint64_t doorbells; // host memory, [doorbell]: {epoch's low half, bytes}, by the device
  uint64_t
      chunk_counts; // host memory, [link word]: chunks of the message, by the device; [life_word]: its signs of life
  uint64_t host_arrivals; // host memory, [first_arrived + parity * receive buffers * chunks + n] of polled words: the
                          // n-th arrival of an epoch, by the proxy; polled by one thread alone
  uint64_t host_free;     // host memory, [link word] of polled words: epochs, by the proxy; polled by the same thread
  uint64_t host_lost; // host memory, polled words by the proxy: 1 + the rank that was lost last; then for each rank of
                      // the first generation all ones if it is lost, else its signs of life; polled likewise
  uint64_t arrived; // device memory, [first_arrived + (parity * receive buffers + source) * chunks + chunk]: epochs, by
                    // that thread for all others
  uint64_t free;    // device memory, [link word]: copies of host_free
  uint64_t counters; // device memory, uint32: things packed of a chunk
  uint64_t rails;    // const uint32_t *: rail of each link of dispatch, node by node without the own
  uint64_t served;   // const uint32_t *: source rank that each source of dispatch is
} ty_wire;

// Progress of a direction, in every block's own words: read as a launch begins, written as the block ends. All blocks
// write alike.
typedef struct ty_progress {
  uint64_t sent;     // epoch of the last one sent
  uint64_t received; // epoch of the last one received: equals `sent` or is one behind; of barriers, those passed
  uint32_t launches; // kernels of the direction that have ended, modulo 2^32
  uint32_t call;     // ty_handle.call of the last one, where calls have several launches
  uint32_t ended;    // of those, the guarded ones; modulo 2^32
  uint32_t begun;    // guarded ones that have begun; more than have ended: another one runs
} ty_progress;

// Device-local control block of a context. After it: ty_progress [TY_CALL_DIRECTIONS][blocks].
typedef struct ty_state {
  uint64_t error_sequence[TY_RECORDS];      // even; what the error record's sequence holds when at rest
  uint32_t blocks_done[TY_CALL_DIRECTIONS]; // with free flags: blocks of the running kernel that have finished
  uint32_t error_claim[TY_RECORDS];         // number of the last launch of which some block has reported; 1 for good in
                                            // records of errors that close a context
  uint32_t placed[2];                       // by parity of dispatch's epoch: rows to place that warps have taken
  uint32_t closed;                          // 1: a fatal error closed the context; its kernels do nothing more
  uint32_t ended[TY_CALL_DIRECTIONS];       // blocks of all guarded launches that have ended, modulo 2^32
  uint32_t reserved[5];                     // the blocks' words begin at a line
} ty_state;

// Of each rank, in contexts whose calls go on without missing ranks: see kernels/common/absence.cuh.
typedef struct ty_absence {
  uint64_t dropped[2]; // of dispatch and combine: the last epoch whose rows of this rank did not all come
  uint64_t last_sign;  // when its last sign of life came, and which
  uint32_t decided[2]; // of dispatch and combine: whether it takes part in the last epoch
  uint32_t masked;     // 1: for good
  uint32_t reserved;
} ty_absence;

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

// The rank that holds an expert.
typedef struct ty_expert_owner {
  uint16_t node;
  uint16_t rank;  // within the node
  uint32_t local; // which of the rank's experts
} ty_expert_owner;

// Where partial rows of a source's tokens go.
typedef struct ty_source_owner {
  uint16_t node;  // of the source
  uint16_t owner; // rank of this node: the source itself, or its rail
  uint32_t part;  // of the owner's partials
} ty_source_owner;

// Of contexts whose calls go on without missing ranks. With ty_regions.signs before it 64 bytes, which other calls do
// not read: what lies behind is placed in lines of 64 bytes as if there were none.
typedef struct ty_absences {
  uint64_t ranks;    // ty_absence *, [ranks]; 0: calls do not go on without missing ranks
  uint64_t mask;     // uint32 [ranks], also written by the caller; not 0: the rank is masked
  uint64_t silences; // uint64 [ranks], host memory: epoch << 2 | 1 + direction in which a deadline masked a rank; 0:
                     // none
  uint32_t masks_silent; // 1: a deadline masks the rank that is waited for, instead of closing the context
  uint32_t life_word;    // of this rank's signs of life among chunk_counts, between nodes
  uint64_t reserved;
} ty_absences;

// What is fixed when a context is built. Pointers are device addresses.
typedef struct ty_context {
  uint32_t rank;  // in the world
  uint32_t ranks; // of the world
  uint32_t local; // this rank within its node
  uint32_t node_ranks;
  uint32_t node_first; // rank of the node's first; a node's ranks are consecutive
  uint32_t node;
  uint32_t nodes;
  uint32_t experts;
  uint32_t local_experts;
  uint32_t top_k;
  uint32_t max_tokens;
  uint32_t rounds;       // launches of a call, an epoch each
  uint32_t round_tokens; // tokens of each rank in one of them
  uint32_t hidden;
  uint32_t weights;     // TY_WEIGHTS_*
  uint32_t row_bytes;   // elements of a token row; a multiple of 16
  uint32_t scale_words; // 4-byte scale words of a row
  uint32_t scale_shift; // 16-byte vectors of a row that share one of them, as a power of 2: 32 at the most; 31 without
                        // scales
  uint32_t slot_bytes;  // pitch of a row in the receive buffer; a multiple of 16
  uint32_t partial_bytes;     // pitch of a partial row, scales and payload included; a multiple of 16
  uint32_t slots;             // partial rows a token can get in a node: min(top_k, ranks of the largest node)
  uint32_t max_local_experts; // over all ranks: pitch of meta_counts is this + 1 + rounds
  uint32_t tile_words;        // groups of 32 tokens of a tile at the most
  uint32_t quantize;          // TY_QUANTIZE_*
  uint32_t max_tiles;         // tiles of a call at the most
  uint32_t even_experts;      // of every rank, where rank r has those from r * this, in nodes of equal size; or 0: see
                              // the table
  uint64_t even_inverse;      // floor(2^32 / even_experts) + 1
  uint64_t even_nodes;        // floor(2^32 / node_ranks) + 1; 0 of one node
  uint32_t ranks_inverse;     // floor((2^32 - 1) / ranks), as divide() takes it
  uint32_t counts_inverse;    // the same of local_experts + 3
  uint32_t choice_inverse;    // floor(2^16 / top_k) + 1
  uint32_t free_flags;        // 1: rows and partial rows are kept once, and their readers publish when they are free
  uint64_t replicas;        // const uint32_t *, [logical_experts][2^replica_bits]: the expert that choices of a logical
                            // expert go to; 0: choices name experts themselves
  uint64_t rank_experts;    // const int32_t *, by rank in the first generation: its first expert, or -1
  uint32_t logical_experts; // that choices may name: `experts` where there are no replicas
  uint32_t replica_bits;
  uint32_t guarded;     // 1: launches that overlap a launch of this context are detected, since other libraries' graphs
                        // may make some
  uint32_t bitmap_bits; // of a token in a row of a tile's bitmap: 1; where a token may name an expert several times 4,
                        // or 8 if top_k has more than 4 bits
  uint32_t format;      // a number of the call's format, even, by which ranks recognise that they differ; 0: that of
                        // the context
  uint32_t most_tokens; // of any call of the context: max_tokens is the call's
  uint64_t timeout_ns;
  uint64_t first_epoch;
  uint64_t state;        // ty_state *
  uint64_t errors;       // ty_error_record[TY_RECORDS] *, host memory
  uint64_t expert_owner; // const ty_expert_owner *, [experts]
  uint64_t rank_names;   // const uint32_t *, [ranks]: rank in the first generation; 0: the same as now
  uint64_t source_owner; // const ty_source_owner *, [ranks]
  // Statistics, uint64 in host memory, or 0: nanoseconds [direction: 2][blocks][TY_STAGES], then
  // [direction: 2][TY_MAX_RANKS] when block 0 was notified by each peer, then [TY_MAX_RANKS] bytes of rows that
  // dispatch sent to each.
  uint64_t stats;
  uint64_t blocks;    // of every launch of dispatch and combine
  uint64_t tile_rows; // uint32 [1 + served][node_ranks][max_tiles][max_local_experts + 1]: see tile_rows()
  uint64_t tile_tags; // uint64 [1 + served][node_ranks][max_tiles]: epoch of those
  uint64_t refused;   // uint64 [ranks], host memory: the last dispatch that each other rank refused to send; 0: none
  ty_regions regions;
  ty_absences absences;
  ty_wire wire;
  uint64_t peer_base[TY_MAX_NODE_RANKS]; // node peers' arenas in this device's addresses; own at [local]
} ty_context;

// What combine needs of a dispatch; in device memory, written by dispatch.
typedef struct ty_handle_head {
  uint64_t epoch;       // of the dispatch
  uint32_t state;       // TY_HANDLE_EMPTY, or the serial of the handle whose dispatch was received
  uint32_t incomplete;  // 1: this rank's output overflowed
  uint32_t own_tokens;  // tokens this rank dispatched
  uint32_t own_bad;     // 1: this rank's routing was unusable; its sums are zero
  uint32_t most_tokens; // of a source in a round
  uint32_t reserved;
} ty_handle_head;

typedef struct ty_handle {
  uint64_t head;   // ty_handle_head *
  uint32_t serial; // not TY_HANDLE_EMPTY; different for each dispatch
  uint32_t call;   // different for each call, the same in its halves and rounds
  uint64_t rows;   // int32 [ranks][max_tokens][top_k]: output row of each choice, -1 none (token layout: [..][0] alone)
  uint64_t weights;       // float [ranks][max_tokens][top_k]
  uint64_t slots;         // int32 [ranks][max_tokens]: the slot at the owner, -1: no row here
  uint64_t row_choices;   // 0, or in a compact handle, instead of rows and weights: uint64 [rows of the output], and
                          // slots name first rows, too: see RowChoice in kernels/common/context.cuh
  uint64_t output_rows;   // of the dispatch; for combine alone
  uint64_t source_tokens; // uint32 [ranks][rounds + 1]: where rounds begin in each source's tokens, as numbered here;
                          // the first at 0
  uint64_t rank_mask;     // uint64 [max_tokens]: ranks of the own node that each own token went to
  uint64_t wire_row;      // int32 [links][max_tokens]: which row of the message to that node, -1 none
  uint64_t wire_rows;     // uint32 [links][rounds + 1]: where rounds begin in those rows
  uint64_t rail_mask; // uint64 [served][max_tokens]: ranks of the own node that each row of a served source went to;
                      // uint8 if the node has at most TY_NARROW_RANKS ranks
  uint64_t
      rail_rows; // uint32 [served][rounds + 1]: where rounds begin in the rows of each served source; the first at 0
} ty_handle;

typedef struct ty_tokens {
  uint64_t x;
  uint64_t x_pitch;          // bytes
  uint64_t scales;           // 0: none
  uint64_t scale_row_stride; // in 4-byte words
  uint64_t topk_idx;         // [tokens][choices], of index_bytes each
  uint64_t topk_weight;      // float [tokens][choices], 0: none
  uint64_t count_ptr;        // const int32_t *, 0: count below
  uint32_t count;
  uint32_t index_bytes;         // 4 or 8: numbers of experts; 1: for each rank whether the token goes there
  uint32_t scale_column_stride; // in 4-byte words
  uint32_t choices;             // of each token, at most top_k; the others are none
  uint32_t index_pitch;         // bytes from token to token
  uint32_t index_stride;        // bytes from choice to choice
  uint32_t weight_pitch;        // likewise
  uint32_t weight_stride;
  uint64_t payload;       // uint32 [tokens][payload_words]: bits of floats, beside each row; or 0
  uint32_t payload_words; // 0: there is none
  uint32_t reserved;
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
  uint64_t source_ranges; // int64 [local_experts][ranks]: begin << 32 | count, or 0
  uint64_t total_counts;  // int32 [local_experts], added to, or 0
  uint64_t wait_times;    // int64 [ranks], added to: nanoseconds until each rank's counts were here, or 0
  uint64_t payload;       // uint32 [rows][payload_words of the tokens], or 0
  uint64_t capacity;      // rows in all (masked: a local expert)
  uint32_t scale_leading; // column-major scales: words from one column to the next; 0: row-major
  uint32_t layout;        // TY_LAYOUT_*
  uint32_t align;
  uint32_t align_inverse; // floor((2^32 - 1) / align), as divide() takes it
  uint32_t zero_padding;
  uint32_t drop_overflow; // rows without room are left out, where otherwise the whole output stays empty
} ty_output;

typedef struct ty_dispatch_args {
  ty_context context;
  ty_handle handle;
  ty_tokens tokens;
  ty_output output;
  uint64_t first_counts;  // uint64 [local_experts + ranks] in host memory, of a call whose counts come first: rows of
                          // each expert, then tokens of each rank that have a row here, each with counts_number in the
                          // upper half; or 0
  uint32_t counts_number; // another one than that of the words' last use
  uint32_t reserved;
  uint32_t phases;
  uint32_t round; // of the call
} ty_dispatch_args;

typedef struct ty_combine_args {
  ty_context context;
  ty_handle handle;
  uint64_t rows;
  uint64_t rows_pitch;  // bytes
  uint64_t topk_weight; // float [tokens][top_k] of this rank's own tokens, or 0
  uint64_t out;
  uint64_t out_pitch;  // bytes
  uint64_t wait_times; // as ty_output.wait_times: until rows of each rank of the node, and of each other node, come
  uint32_t tokens;     // for which `out` and `topk_weight` have room
  uint32_t out_dtype;  // TY_BF16, TY_FP16 or TY_FP32
  uint32_t accumulate;
  uint32_t layout;
  uint32_t phases;
  uint32_t round;            // of the call
  uint64_t payload;          // uint32 [rows][payload_words]: bits of floats, beside each row; or 0
  uint64_t payload_out;      // uint32 [tokens][payload_words], or [tokens][top_k][payload_words]
  uint32_t payload_words;    // 0: there is none
  uint32_t payload_gathered; // 1: choice by choice; 0: summed
  uint32_t payload_offset;   // bytes from the start of a partial row to its payload
  uint32_t reserved;
} ty_combine_args;

typedef struct ty_barrier_args {
  ty_context context;
} ty_barrier_args;

// The benchmark's experts: see kernels/bench/bench.cuh.
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
  uint32_t ue8m0;            // 1: scales are exponents, four to a word
  uint32_t payload_words;    // 0: none
  uint64_t payload;          // uint32 [row_total][payload_words]
  uint32_t payload_gathered; // 1: any bits; 0: numbers
  uint32_t reserved;
} ty_expert_args;

// A bare push: copies `bytes` from source to each destination, 16 bytes a thread. Its time is the floor of a link.
typedef struct ty_push_args {
  uint64_t source;
  uint64_t destination[TY_MAX_NODE_RANKS];
  uint64_t bytes[TY_MAX_NODE_RANKS];
  uint32_t destinations;
  uint32_t reserved;
} ty_push_args;

// Holds a stream until the host releases it. The words are in host memory: the number that was released, and the number
// that was given up.
typedef struct ty_hold_args {
  uint64_t words;  // uint64_t [2]
  uint64_t number; // goes on once the first word has reached this
  uint64_t timeout_ns;
} ty_hold_args;

// A meeting of the ranks of one process. Each has a word in host memory, and a second: {number, peer} that it gave up.
typedef struct ty_meet_args {
  uint64_t words;  // uint64_t [2][ranks]
  uint64_t number; // of the meeting, below 2^32; later ones are greater
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t ranks;
} ty_meet_args;

// The emulated NIC: see kernels/nic/nic.cuh and transport/network/emulated/mod.rs.

// Requests of one NIC that may be outstanding; a power of two.
#define TY_NIC_SLOTS 256
// In `posted`, beside the count: end once all posted requests are carried out.
#define TY_NIC_STOP (1ull << 63)

// One copy; request n, counted from 0, is in slot n % TY_NIC_SLOTS.
typedef struct ty_nic_request {
  uint64_t source;
  uint64_t target;
  uint64_t bytes;
  uint64_t reserved; // none of them crosses a line
} ty_nic_request;

// In host memory: first what the host writes, then what the device writes, each on lines of their own.
typedef struct ty_nic_host {
  uint64_t posted; // by the host: requests posted since the beginning, perhaps with TY_NIC_STOP
  uint64_t padding0[15];
  uint64_t
      relayed;    // by the device as a launch ends: requests carried out since ever, for the next launch to begin with
  uint64_t ended; // by the device, after `relayed`: number of the launch that has ended
  uint64_t padding1[14];
  uint64_t completed[TY_NIC_SLOTS];      // by the device: 1 + the request of this slot that was carried out last
  ty_nic_request requests[TY_NIC_SLOTS]; // by the host
} ty_nic_host;

// In device memory; zeroed before the first launch.
typedef struct ty_nic_device {
  uint64_t relayed; // requests passed on since the beginning
  uint64_t ending;  // number of the launch that passes on no more
  uint32_t leaving; // blocks of this launch that have finished
  uint32_t reserved;
  uint32_t counted[TY_NIC_SLOTS]; // blocks that have finished with the request of this slot
  ty_nic_request requests[TY_NIC_SLOTS];
} ty_nic_device;

typedef struct ty_nic_args {
  uint64_t host;   // ty_nic_host *
  uint64_t device; // ty_nic_device *
  uint64_t launch; // number of this launch, from 1
  uint64_t begin;  // requests that earlier launches have carried out
  uint64_t idle_ns;
  uint32_t group_blocks; // that carry a request out together
  uint32_t reserved;
} ty_nic_args;

#endif
