// The benchmark's own kernels: experts that compute different functions, and bare pushes that show what a link gives.
// Not part of the data path. The formulas of the experts are those of tests/reference/expert.rs.
#pragma once
#include "ffi/layout.h"
#include "common/numbers.cuh"

namespace ty {

// Scale of 128 columns as a power of two: the byte is the exponent, biased by 127.
TY_DEVICE float ue8m0_to_float(u32 exponent) {
  return exponent == 0 ? same_bits<float>(0x00400000u) : same_bits<float>(exponent << 23);
}

TY_DEVICE float scale_of(const ty_expert_args &a, u64 row, u32 column) {
  u64 w = a.ue8m0 ? column / 512 : column / 128;
  u64 index = row * a.scale_words + w;
  if (a.scale_leading && a.rows_per_block)
    index = (row / a.rows_per_block * a.scale_words + w) * a.scale_leading + row % a.rows_per_block;
  else if (a.scale_leading) index = w * a.scale_leading + row;
  u32 word = load(reinterpret_cast<const u32 *>(a.scales) + index);
  return a.ue8m0 ? ue8m0_to_float((word >> (column / 128 % 4 * 8)) & 0xff) : same_bits<float>(word);
}

// One element of a dispatched row as a number.
TY_DEVICE float element_of(const ty_expert_args &a, u64 row, u32 column) {
  const char *base = reinterpret_cast<const char *>(a.rows + row * a.rows_pitch);
  if (a.in_dtype == TY_BF16) return bf16_to_float(load(reinterpret_cast<const u16 *>(base) + column));
  if (a.in_dtype == TY_FP16) return fp16_to_float(load(reinterpret_cast<const u16 *>(base) + column));
  if (a.in_dtype == TY_FP32) return load(reinterpret_cast<const float *>(base) + column);
  float value = e4m3_to_float(load(reinterpret_cast<const u8 *>(base) + column));
  return a.scale_words ? mul_rn(value, scale_of(a, row, column)) : value;
}

// a_e of expert e.
TY_DEVICE float factor_of(u32 expert) {
  float magnitude = add_rn(1.0f, mul_rn(static_cast<float>((expert * 5063u) & 8191u), 1.0f / 8192.0f));
  if (expert & 2) magnitude = mul_rn(magnitude, 0.5f);
  return expert & 1 ? -magnitude : magnitude;
}

// a_e * x[(i + r_e) mod H].
TY_DEVICE float expert_value(const ty_expert_args &a, u64 row, u32 local, u32 column) {
  u32 expert = load(reinterpret_cast<const u32 *>(a.global_expert) + local);
  u32 shift = (expert * 7919u + 1u) % a.hidden;
  return mul_rn(factor_of(expert), element_of(a, row, (column + shift) % a.hidden));
}

TY_DEVICE void store_element(const ty_expert_args &a, u64 row, u32 column, float value) {
  char *base = reinterpret_cast<char *>(a.y + row * a.y_pitch);
  if (a.out_dtype == TY_BF16) store(reinterpret_cast<u16 *>(base) + column, float_to_bf16(value));
  else if (a.out_dtype == TY_FP16) store(reinterpret_cast<u16 *>(base) + column, float_to_fp16(value));
  else store(reinterpret_cast<float *>(base) + column, value);
}

// The token layout: a row's weighted sum over its local experts, in top-k order.
TY_DEVICE float token_value(const ty_expert_args &a, u64 row, u32 column) {
  float sum = 0.0f;
  for (u32 k = 0; k < a.top_k; ++k) {
    i32 local = load(reinterpret_cast<const i32 *>(a.token_experts) + row * a.top_k + k);
    if (local < 0) continue;
    float weight = a.token_weights ? load(reinterpret_cast<const float *>(a.token_weights) + row * a.top_k + k) : 1.0f;
    sum = fma_rn(weight, expert_value(a, row, static_cast<u32>(local), column), sum);
  }
  return sum;
}

TY_DEVICE bool has_expert(const ty_expert_args &a, u64 row) {
  for (u32 k = 0; k < a.top_k; ++k)
    if (load(reinterpret_cast<const i32 *>(a.token_experts) + row * a.top_k + k) >= 0) return true;
  return false;
}

// The expert whose payload a row has: in the token layout the first that is here, in top-k order.
TY_DEVICE u32 payload_expert(const ty_expert_args &a, u64 row) {
  i32 local = a.row_expert ? load(reinterpret_cast<const i32 *>(a.row_expert) + row) : -1;
  for (u32 k = a.token_experts ? a.top_k : 0; k > 0; --k) {
    i32 one = load(reinterpret_cast<const i32 *>(a.token_experts) + row * a.top_k + k - 1);
    if (one >= 0) local = one;
  }
  return load(reinterpret_cast<const u32 *>(a.global_expert) + local);
}

// Word j of a row's payload, made of a word of the dispatched row and of the expert: any bits, among them those of -0,
// or a number.
TY_DEVICE u32 payload_word(const ty_expert_args &a, u64 row, u32 j) {
  u32 size = a.in_dtype == TY_FP32 ? 4 : a.in_dtype == TY_FP8_E4M3 ? 1 : 2;
  const u32 *words = reinterpret_cast<const u32 *>(a.rows + row * a.rows_pitch);
  u32 mixed = (load(words + j % (a.hidden * size / 4)) + j) * 2654435769u ^ (payload_expert(a, row) + 1) * 2246822507u;
  if (a.payload_gathered) return mixed % 5 == 0 ? 0x80000000u : mixed;
  return same_bits<u32>(mul_rn(static_cast<float>(static_cast<i32>(mixed) >> 8), 1.0f / 4096.0f));
}

// A block per dispatched row.
TY_KERNEL(ty_bench_expert, ty_expert_args) {
  for (u64 row = block_index(); row < a.row_total; row += block_count()) {
    i32 local = a.row_expert ? load(reinterpret_cast<const i32 *>(a.row_expert) + row) : -1;
    if (a.token_experts ? !has_expert(a, row) : local < 0) continue;
    for (u32 column = thread_index(); column < a.hidden; column += block_threads())
      store_element(a, row, column,
                    a.token_experts ? token_value(a, row, column)
                                    : expert_value(a, row, static_cast<u32>(local), column));
    for (u32 j = thread_index(); j < a.payload_words; j += block_threads())
      store(reinterpret_cast<u32 *>(a.payload) + row * a.payload_words + j, payload_word(a, row, j));
  }
}

// Copies bytes[i] bytes (a multiple of 16) to destination i; blocks are dealt to destinations cyclically.
TY_KERNEL(ty_bench_push, ty_push_args) {
  u32 destination = block_index() % a.destinations;
  u64 blocks = (block_count() - destination + a.destinations - 1) / a.destinations;
  u64 step = blocks * block_threads();
  const char *source = reinterpret_cast<const char *>(a.source);
  char *out = reinterpret_cast<char *>(a.destination[destination]);
  for (u64 v = block_index() / a.destinations * block_threads() + thread_index(); v < a.bytes[destination] / 16;
       v += step)
    store16(out + v * 16, load16(source + v * 16));
}

// One thread waits until the host has enqueued all that is timed; after the deadline it gives up and reports that.
TY_KERNEL(ty_bench_hold, ty_hold_args) {
  if (block_index() != 0 || thread_index() != 0) return;
  u64 *words = reinterpret_cast<u64 *>(a.words);
  u64 start = now_ns();
  while (load_acquire_sys(words) < a.number && now_ns() - start < a.timeout_ns) spin_pause("host");
  // Read by the host once the stream has passed.
  if (load_acquire_sys(words) < a.number) store_relaxed_sys(words + 1, a.number);
}

// One warp reports that its rank is here, and waits until all ranks are; after the deadline it gives up and reports
// that.
TY_KERNEL(ty_bench_meet, ty_meet_args) {
  u64 *words = reinterpret_cast<u64 *>(a.words);
  if (thread_index() == 0) store_release_sys(words + a.rank, a.number);
  u64 start = now_ns();
  for (u32 peer = thread_index(); peer < a.ranks; peer += block_threads()) {
    while (load_acquire_sys(words + peer) < a.number && now_ns() - start < a.timeout_ns) spin_pause("rank");
    // Read by the host once the stream has passed.
    if (load_acquire_sys(words + peer) < a.number) store_relaxed_sys(words + a.ranks + a.rank, (a.number << 32) | peer);
  }
}

} // namespace ty
