// One kernel that uses every primitive of prim.cuh and stores each result, so that a host test can hold the CPU twin
// and the GPU to the same expectations, worked out separately from both.
//
// Launch: grid 2, block 64, shared memory TY_CONFORMANCE_SHARED_BYTES. Not on the data path.
#pragma once
#include "common/quantize.cuh"

#define TY_CONFORMANCE_GRID 2
#define TY_CONFORMANCE_BLOCK 64
#define TY_CONFORMANCE_THREADS 128
#define TY_CONFORMANCE_SHARED_BYTES 2048
#define TY_CONFORMANCE_WORK_BYTES 4096
#define TY_CONFORMANCE_ROUNDS 32
#define TY_CONFORMANCE_COLUMNS 640
#define TY_CONFORMANCE_QUANTIZED_WORDS 165

typedef struct ty_conformance_args {
  uint64_t input;       // const uint8_t[64], aligned to 16: any pattern
  uint64_t floats;      // const uint32_t[float_count]: bits of single-precision numbers
  uint64_t triples;     // const uint32_t[triple_count][3]: bits of x, y, z
  uint64_t work;        // TY_CONFORMANCE_WORK_BYTES, aligned to 256, zeroed by the host before each launch
  uint64_t timeout_ns;  // of each wait for a message
  uint64_t conversions; // out, uint32_t[2][65536]: bf16 to float, fp16 to float, by input bits
  uint64_t e4m3;        // out, uint32_t[3][256]: e4m3 to float, by input bits i; in a pair with i the low one, and with
                        // i the high one
  uint64_t narrowed;    // out, uint32_t[float_count][3]: to bf16, to fp16, it and the next one to e4m3
  uint64_t arithmetic;  // out, uint32_t[triple_count][5]: fma_rn(x, y, z), add_rn, mul_rn, div_rn and the larger
                        // magnitude of x and y
  uint64_t threads;     // out, uint32_t[128][35] by block * 64 + thread; the words are named below
  uint64_t vectors;   // out, uint32_t[3][128][4], aligned to 16: input line t % 4; the same by way of shared memory; by
                      // relaxed accesses
  uint64_t stores8;   // out, uint64_t[128]: 0x100000001 * t + 7
  uint64_t stores2;   // out, uint16_t[128]: 257 * t + 3
  uint64_t stores1;   // out, uint8_t[128]: 255 - t
  uint64_t messages;  // out, uint32_t[16], zeroed by the host; see messages()
  uint64_t rows;      // const uint16_t[row_count][TY_CONFORMANCE_COLUMNS], aligned to 16: bf16 rows
  uint64_t quantized; // out, uint32_t[2][row_count][TY_CONFORMANCE_QUANTIZED_WORDS]: e4m3, then words of fp32 or of
                      // UE8M0 scales; words after those are untouched
  uint32_t float_count;
  uint32_t triple_count;
  uint32_t row_count;
  uint32_t reserved;
} ty_conformance_args;

// Words of a thread's row in `threads`.
enum {
  TY_CONF_THREAD = 0, // thread_index and its kin
  TY_CONF_BLOCK_THREADS,
  TY_CONF_BLOCK,
  TY_CONF_BLOCKS,
  TY_CONF_LANE,
  TY_CONF_WARP,
  TY_CONF_WARPS,
  TY_CONF_BALLOT,       // of (7 * thread + block) % 3 == 0
  TY_CONF_SHUFFLE,      // of 1000 * thread + block, from lane + 5 (taken modulo 32)
  TY_CONF_SHUFFLE8_LOW, // of (thread << 33) + 3 * block + 1, from lane ^ 1
  TY_CONF_SHUFFLE8_HIGH,
  TY_CONF_SHUFFLE_FLOAT, // bits; of thread + 0.5f, from 31 - lane
  TY_CONF_ANY,           // block_any(block 1's last thread): 0 in block 0, 1 in block 1
  TY_CONF_NONE,          // block_any(false)
  TY_CONF_BLOCK_BARRIER, // 3 * s + 1 of s = (thread + 33) % 64, handed over by block_barrier
  TY_CONF_WARP_BARRIER,  // 5 * s + 2 of the next lane's thread s in the warp, handed over by warp_barrier
  TY_CONF_ADD_BLOCK,     // the olds of a block are 0 to 63 in some order
  TY_CONF_OR_BLOCK,      // the old lacks the own lane's bit
  TY_CONF_ADD_BLOCK_SUM, // 64
  TY_CONF_OR_BLOCK_SUM,  // 0xffffffff
  TY_CONF_ADD_GPU,       // the olds of the grid are 0, 2, ... 254 in some order
  TY_CONF_CAS_GPU,       // 0 for one thread t of the grid, t + 1 for all others
  TY_CONF_LOAD1,         // input[t % 64]
  TY_CONF_LOAD2,         // at byte 2t % 64
  TY_CONF_LOAD4,         // at byte 4t % 64
  TY_CONF_LOAD8_LOW,     // at byte 8t % 64
  TY_CONF_LOAD8_HIGH,
  TY_CONF_POPCOUNT,     // of LOAD4
  TY_CONF_POPCOUNT64,   // of LOAD8
  TY_CONF_CLOCK,        // 1: a later now_ns() was not smaller
  TY_CONF_CAS_GPU_MISS, // 5: the old of a compare-and-swap that must not store, of a word that stays 5
  TY_CONF_TEAM_ANY,     // team_any(thread 40) of a team that is one warp: 0 in warp 0, 1 in warp 1
  TY_CONF_TEAM_BARRIER, // 7 * s + 3 of s = lane ^ 1 of the same warp, handed over by team_barrier
  TY_CONF_WARP_OR,      // of (3 * thread + block) << lane / 2
  TY_CONF_WARP_SUM,     // of 0xf0000000 + 5 * thread + block, modulo 2^32
  TY_CONF_WARP_MAX,     // of (thread * 0x9e3779b9) ^ block
  TY_CONF_NEXT_GPU,     // the olds of the grid are 0, 3, ... 381 in some order
  TY_CONF_TAKEN_OVER,   // 11 * s + 4 of s = lane ^ 1 of warp 0, handed over by it to warp 1; 0 in warp 0
  TY_CONF_END           // 0xc0ffee
};

namespace ty {
namespace conformance {
struct Shared {
  Vec16 lines[TY_CONFORMANCE_BLOCK];
  u32 by_block[TY_CONFORMANCE_BLOCK];
  u32 by_warp[TY_CONFORMANCE_BLOCK];
  u32 by_team[TY_CONFORMANCE_BLOCK];
  u32 handed[warp_size];
  u32 counter;
  u32 warps_done;
  u32 bits[TY_CONFORMANCE_BLOCK / warp_size];
};
static_assert(sizeof(Shared) <= TY_CONFORMANCE_SHARED_BYTES, "launches pass too little shared memory");

// One direction of one message at a time: data is overwritten only after its receiver has acknowledged it.
struct Mailbox {
  u32 data[warp_size];
  u64 flag;
  u32 flag_u32;
  u32 pad;
  u64 taken;
};

struct Work {
  Mailbox boxes[5];
  u32 added;
  u32 swapped;
  u32 next;
  u32 blocks_done;
  u32 by_thread[TY_CONFORMANCE_THREADS];
  u32 fives[TY_CONFORMANCE_THREADS];
  u32 counted[TY_CONFORMANCE_THREADS];
};
static_assert(sizeof(Work) <= TY_CONFORMANCE_WORK_BYTES, "the host passes too little work space");

template <typename T> TY_DEVICE T *at(u64 address) { return reinterpret_cast<T *>(address); }
TY_DEVICE u32 grid_thread() { return block_index() * block_threads() + thread_index(); }

// Where the thread is in the grid, and what its warp and block exchange.
TY_DEVICE void meetings(const ty_conformance_args &, u32 *row) {
  const u32 thread = thread_index(), block = block_index(), lane = lane_index();
  store(&row[TY_CONF_THREAD], thread);
  store(&row[TY_CONF_BLOCK_THREADS], block_threads());
  store(&row[TY_CONF_BLOCK], block);
  store(&row[TY_CONF_BLOCKS], block_count());
  store(&row[TY_CONF_LANE], lane);
  store(&row[TY_CONF_WARP], warp_index());
  store(&row[TY_CONF_WARPS], block_warps());
  store(&row[TY_CONF_BALLOT], warp_ballot((7 * thread + block) % 3 == 0));
  store(&row[TY_CONF_SHUFFLE], shuffle(1000 * thread + block, lane + 5));
  const u64 wide = shuffle((static_cast<u64>(thread) << 33) + 3 * block + 1, lane ^ 1u);
  store(&row[TY_CONF_SHUFFLE8_LOW], static_cast<u32>(wide));
  store(&row[TY_CONF_SHUFFLE8_HIGH], static_cast<u32>(wide >> 32));
  store(&row[TY_CONF_SHUFFLE_FLOAT], same_bits<u32>(shuffle(static_cast<float>(thread) + 0.5f, 31 - lane)));
  store(&row[TY_CONF_ANY], block_any(block == 1 && thread + 1 == block_threads()) ? 1u : 0u);
  store(&row[TY_CONF_NONE], block_any(false) ? 1u : 0u);
  const Team team{1 + warp_index(), warp_index(), 1};
  store(&row[TY_CONF_TEAM_ANY], team_any(team, thread == 40) ? 1u : 0u);
  Shared &shared = block_shared<Shared>();
  store(&shared.by_team[thread], 7 * lane + 3);
  team_barrier(team);
  if (warp_index() == 0) {
    store(&shared.handed[lane], 11 * lane + 4);
    hand_over();
    store(&row[TY_CONF_TAKEN_OVER], 0u);
  } else {
    take_over();
    store(&row[TY_CONF_TAKEN_OVER], load(&shared.handed[lane ^ 1u]));
  }
  store(&row[TY_CONF_WARP_OR], warp_or((3 * thread + block) << (lane / 2)));
  store(&row[TY_CONF_WARP_SUM], warp_sum(0xf0000000u + 5 * thread + block));
  store(&row[TY_CONF_WARP_MAX], warp_max((thread * 0x9e3779b9u) ^ block));
  store(&row[TY_CONF_TEAM_BARRIER], load(&shared.by_team[thread ^ 1u]));
}

TY_DEVICE void shared_memory(const ty_conformance_args &a, u32 *row) {
  Shared &shared = block_shared<Shared>();
  const u32 thread = thread_index(), lane = lane_index(), t = grid_thread();
  prefetch(at<const u8>(a.input), 64); // shown only by a correct load after it
  const Vec16 line = load16(at<const u8>(a.input) + 16 * (t % 4));
  store16(at<u8>(a.vectors) + 16 * t, line);
  store16_relaxed_sys(at<u8>(a.vectors) + 16 * (2 * TY_CONFORMANCE_THREADS + t),
                      load16_relaxed_sys(at<const u8>(a.input) + 16 * (t % 4)));
  store16(&shared.lines[thread], line);
  store(&shared.by_block[thread], 3 * thread + 1);
  if (thread == 0) store(&shared.counter, 0u);
  if (thread == 0) store(&shared.warps_done, 0u);
  if (lane == 0) store(&shared.bits[warp_index()], 0u);
  store(&shared.by_warp[thread], 5 * thread + 2);
  warp_barrier();
  store(&row[TY_CONF_WARP_BARRIER], load(&shared.by_warp[thread - lane + (lane + 1) % warp_size]));
  block_barrier();
  store(&row[TY_CONF_BLOCK_BARRIER], load(&shared.by_block[(thread + 33) % block_threads()]));
  // The line of a thread whose t is the same modulo 4, in the other warp.
  store16(at<u8>(a.vectors) + 16 * (TY_CONFORMANCE_THREADS + t), load16(&shared.lines[thread ^ 32u]));
  store(&row[TY_CONF_ADD_BLOCK], atomic_add_block(&shared.counter, 1));
  store(&row[TY_CONF_OR_BLOCK], atomic_or_block(&shared.bits[warp_index()], 1u << lane));
  block_barrier();
  store(&row[TY_CONF_ADD_BLOCK_SUM], load(&shared.counter));
  store(&row[TY_CONF_OR_BLOCK_SUM], load(&shared.bits[warp_index()]));
}

TY_DEVICE void global_memory(const ty_conformance_args &a, u32 *row) {
  Work *work = at<Work>(a.work);
  const u32 t = grid_thread();
  const u8 *input = at<const u8>(a.input);
  store(&row[TY_CONF_ADD_GPU], atomic_add_gpu(&work->added, 2));
  store(&row[TY_CONF_NEXT_GPU], atomic_next_gpu(&work->next, 3));
  store(&row[TY_CONF_CAS_GPU], atomic_cas_gpu(&work->swapped, 0, t + 1));
  store(&work->fives[t], 5u);
  store(&row[TY_CONF_CAS_GPU_MISS], atomic_cas_gpu(&work->fives[t], 4, 9) * 10 + load(&work->fives[t]) - 50);
  store(&row[TY_CONF_LOAD1], static_cast<u32>(load(input + t % 64)));
  store(&row[TY_CONF_LOAD2], static_cast<u32>(load(reinterpret_cast<const u16 *>(input + 2 * t % 64))));
  const u32 word = load(reinterpret_cast<const u32 *>(input + 4 * t % 64));
  const u64 wide = load(reinterpret_cast<const u64 *>(input + 8 * t % 64));
  store(&row[TY_CONF_LOAD4], word);
  store(&row[TY_CONF_LOAD8_LOW], static_cast<u32>(wide));
  store(&row[TY_CONF_LOAD8_HIGH], static_cast<u32>(wide >> 32));
  store(&row[TY_CONF_POPCOUNT], popcount(word));
  store(&row[TY_CONF_POPCOUNT64], popcount64(wide));
  store(at<u64>(a.stores8) + t, (static_cast<u64>(t) << 32) + t + 7);
  store(at<u16>(a.stores2) + t, static_cast<u16>(257 * t + 3));
  store(at<u8>(a.stores1) + t, static_cast<u8>(255 - t));
  const u64 before = now_ns();
  store(&row[TY_CONF_CLOCK], now_ns() >= before ? 1u : 0u);
}

// How a mailbox's data is published and taken: each release with the acquire that it needs.
enum Way { release_gpu, release_sys, fence_gpu, fence_sys, atomic_gpu, ways };

TY_DEVICE void publish(Mailbox *box, Way way, u32 round) {
  switch (way) {
  case release_gpu:
    store_release_gpu(&box->flag_u32, round);
    break;
  case release_sys:
    store_release_sys(&box->flag, static_cast<u64>(round));
    break;
  case fence_gpu:
    fence_acq_rel_gpu();
    store_relaxed_sys(&box->flag_u32, round);
    break;
  case fence_sys:
    fence_acq_rel_sys();
    store_relaxed_sys(&box->flag, static_cast<u64>(round));
    break;
  default:
    (void)atomic_add_gpu(&box->flag_u32, 1);
  }
}

TY_DEVICE bool arrived(const Mailbox *box, Way way, u32 round) {
  switch (way) {
  case release_sys:
    return load_acquire_sys(&box->flag) == round;
  case fence_gpu:
    if (load_relaxed_gpu(&box->flag_u32) != round) return false;
    fence_acq_rel_gpu();
    return true;
  case fence_sys:
    if (load_relaxed_sys(&box->flag) != round) return false;
    fence_acq_rel_sys();
    return true;
  default:
    return load_acquire_gpu(&box->flag_u32) == round;
  }
}

// Block 0's first warp sends 32 rounds of 32 words to block 1's first warp, one mailbox for each way.
// messages[way] counts the words that arrived right, 1024; messages[8 + way] is 1 after a wait timed out.
TY_DEVICE void messages(const ty_conformance_args &a) {
  if (warp_index() != 0) return;
  Work *work = at<Work>(a.work);
  const bool sender = block_index() == 0;
  const u32 lane = lane_index();
  for (u32 w = 0; w < ways; ++w) {
    const Way way = static_cast<Way>(w);
    Mailbox *box = &work->boxes[w];
    u32 right = 0;
    for (u32 round = 1; round <= TY_CONFORMANCE_ROUNDS; ++round) {
      const u64 start = now_ns();
      bool late = false;
      while (lane == 0 && !late && !(sender ? load_acquire_sys(&box->taken) == round - 1 : arrived(box, way, round))) {
        spin_pause(sender ? "conformance: mailbox taken" : "conformance: mailbox filled");
        late = now_ns() - start > a.timeout_ns;
      }
      if (warp_ballot(late) != 0) {
        if (lane == 0) (void)atomic_add_gpu(at<u32>(a.messages) + 8 + w, 1);
        return;
      }
      warp_barrier();
      const u32 expected = (round * 0x9e3779b9u) ^ (w * 0x01000193u + lane);
      if (sender) {
        store(&box->data[lane], expected);
        warp_barrier();
        if (lane == 0) publish(box, way, round);
      } else {
        right += load(&box->data[lane]) == expected ? 1u : 0u;
        warp_barrier();
        if (lane == 0) store_release_sys(&box->taken, static_cast<u64>(round));
      }
    }
    if (!sender) (void)atomic_add_gpu(at<u32>(a.messages) + w, right);
  }
}

// The last block to finish sees what every thread of the grid stored: messages[6] = 1 + 2 + ... + 128 = 8256,
// messages[7] counts last blocks, 1.
TY_DEVICE void last_block(const ty_conformance_args &a) {
  Work *work = at<Work>(a.work);
  store(&work->by_thread[grid_thread()], grid_thread() + 1);
  block_barrier();
  if (thread_index() != 0 || atomic_add_gpu(&work->blocks_done, 1) + 1 != block_count()) return;
  u32 sum = 0;
  for (u32 t = 0; t < TY_CONFORMANCE_THREADS; ++t) sum += load(&work->by_thread[t]);
  store(at<u32>(a.messages) + 6, sum);
  (void)atomic_add_gpu(at<u32>(a.messages) + 7, 1);
}

// The last warp of a block to finish sees what every thread of the block stored: messages[13] = 2 (1 + 2 + ... + 64) =
// 4160 of both blocks, messages[14] counts last warps, 2. After a barrier of the block.
TY_DEVICE void last_warp(const ty_conformance_args &a) {
  Work *work = at<Work>(a.work);
  u32 *counted = &work->counted[block_index() * block_threads()];
  store(&counted[thread_index()], thread_index() + 1);
  warp_barrier();
  if (lane_index() != 0) return;
  if (atomic_count_block(&block_shared<Shared>().warps_done, 1) + 1 != block_warps()) return;
  u32 sum = 0;
  for (u32 t = 0; t < block_threads(); ++t) sum += load(&counted[t]);
  (void)atomic_add_gpu(at<u32>(a.messages) + 13, sum);
  (void)atomic_add_gpu(at<u32>(a.messages) + 14, 1);
}

TY_DEVICE void numbers(const ty_conformance_args &a) {
  const u32 step = block_count() * block_threads();
  u32 *out = at<u32>(a.conversions);
  for (u32 i = grid_thread(); i < 65536; i += step) {
    store(&out[i], same_bits<u32>(bf16_to_float(static_cast<u16>(i))));
    store(&out[65536 + i], same_bits<u32>(fp16_to_float(static_cast<u16>(i))));
  }
  for (u32 i = grid_thread(); i < 256; i += step) {
    u32 *result = at<u32>(a.e4m3) + i, other = (7 * i + 3) % 256;
    store(result, same_bits<u32>(e4m3_to_float(static_cast<u8>(i))));
    store(result + 256, same_bits<u32>(e4m3_to_floats(static_cast<u16>(i | other << 8)).low));
    store(result + 512, same_bits<u32>(e4m3_to_floats(static_cast<u16>(other | i << 8)).high));
  }
  for (u32 i = grid_thread(); i < a.float_count; i += step) {
    const float x = load(at<const float>(a.floats) + i);
    const float next = load(at<const float>(a.floats) + (i + 1) % a.float_count);
    store(at<u32>(a.narrowed) + 3 * i, static_cast<u32>(float_to_bf16(x)));
    store(at<u32>(a.narrowed) + 3 * i + 1, static_cast<u32>(float_to_fp16(x)));
    store(at<u32>(a.narrowed) + 3 * i + 2, static_cast<u32>(floats_to_e4m3(x, next)));
  }
  for (u32 i = grid_thread(); i < a.triple_count; i += step) {
    const float *triple = at<const float>(a.triples) + 3 * i;
    const float x = load(triple), y = load(triple + 1), z = load(triple + 2);
    u32 *result = at<u32>(a.arithmetic) + 5 * i;
    store(&result[0], same_bits<u32>(fma_rn(x, y, z)));
    store(&result[1], same_bits<u32>(add_rn(x, y)));
    store(&result[2], same_bits<u32>(mul_rn(x, y)));
    store(&result[3], same_bits<u32>(div_rn(x, y)));
    store(&result[4], same_bits<u32>(max_magnitude(max_magnitude(0.0f, x), y)));
  }
}

// Rows by warps; every second one in the shortest parts that there can be.
TY_DEVICE void quantized(const ty_conformance_args &a) {
  const u32 vectors = TY_CONFORMANCE_COLUMNS / 16, step = block_count() * block_warps();
  for (u32 i = block_index() * block_warps() + warp_index(); i < 2 * a.row_count; i += step) {
    const u32 quantize = i < a.row_count ? TY_QUANTIZE_F32 : TY_QUANTIZE_UE8M0;
    const u64 row = a.rows + i % a.row_count * (2 * TY_CONFORMANCE_COLUMNS);
    u32 *out = at<u32>(a.quantized) + i * TY_CONFORMANCE_QUANTIZED_WORDS;
    const u32 part = i % 2 == 0 ? vectors : scale_word_vectors(quantize);
    for (u32 first = 0; first < vectors; first += part) {
      quantize_row(
          quantize, row, first, first + part < vectors ? first + part : vectors,
          [&](u32 v, Vec16 data, bool there) {
            for (u32 j = 0; there && j < 4; ++j) store(&out[4 * v + j], data.w[j]);
          },
          [&](u32 word, u32 scale, bool there) {
            if (there) store(&out[4 * vectors + word], scale);
          });
    }
  }
}
} // namespace conformance

TY_KERNEL(ty_conformance, ty_conformance_args) {
  u32 *row = conformance::at<u32>(a.threads) + (TY_CONF_END + 1) * conformance::grid_thread();
  conformance::meetings(a, row);
  conformance::shared_memory(a, row);
  conformance::global_memory(a, row);
  conformance::numbers(a);
  conformance::quantized(a);
  conformance::messages(a);
  conformance::last_warp(a);
  conformance::last_block(a);
  store(&row[TY_CONF_END], 0xc0ffeeu);
}
} // namespace ty
