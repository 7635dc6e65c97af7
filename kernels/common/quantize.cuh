// Quantisation of rows to fp8, while they are sent: one scale for each block of 128 columns. Of a bf16 row in dispatch,
// and with fp32 scales of a partial row in combine (numbers.cuh).
//
// amax of a block is its largest magnitude, at least 1e-4; NaNs do not count. With fp32 scales, scale = amax / 448
// and inverse = 448 / amax; with UE8M0, scale is the smallest power of two that is not below amax / 448, and inverse
// its reciprocal. An element becomes x * inverse as e4m3. Every step is exact or rounded once, to nearest even, so that
// all devices agree on every bit (docs/design.md, Quantisation).
//
// A warp quantises 16 columns a lane: a block is 8 lanes. It writes nothing itself; the caller passes where to store.
#pragma once
#include "ffi/layout.h"
#include "common/prim.cuh"

namespace ty {

// 16-byte vectors of fp8 that share a scale, and that share a 4-byte word of scales.
constexpr u32 block_vectors = 8;
TY_DEVICE u32 scale_word_vectors(u32 quantize) {
  return quantize == TY_QUANTIZE_UE8M0 ? 4 * block_vectors : block_vectors;
}

// Sixteen columns of bf16: two vectors.
struct WideVector {
  Vec16 half[2];
};

// Columns [16v, 16v + 16) of a row.
TY_DEVICE WideVector load_wide(u64 row, u32 v) {
  const char *at = reinterpret_cast<const char *>(row) + static_cast<u64>(v) * sizeof(WideVector);
  return {{load16(at), load16(at + sizeof(Vec16))}};
}

// Column i of a vector.
TY_DEVICE float wide_at(const WideVector &x, u32 i) {
  u32 pair = x.half[i / 8].w[i % 8 / 2];
  return bf16_to_float(static_cast<u16>(i % 2 == 0 ? pair : pair >> 16));
}

// The least that amax can be, so that blocks of zeros have a scale.
constexpr float least_amax = 1e-4f;
// The largest e4m3 number.
constexpr float e4m3_max = 448.0f;

// amax of a block, by its 8 lanes; at(i) is column i of a lane's 16.
template <typename At> TY_DEVICE float amax_of(At at) {
  float most = least_amax;
  for (u32 i = 0; i < 16; ++i) most = max_magnitude(most, at(i));
  for (u32 step = block_vectors / 2; step > 0; step /= 2)
    most = max_magnitude(most, shuffle(most, lane_index() ^ step));
  return most;
}

struct BlockScale {
  u32 bits; // of a float, or a UE8M0 exponent
  float inverse;
};

TY_DEVICE BlockScale scale_of(u32 quantize, float amax) {
  if (quantize == TY_QUANTIZE_F32) return {same_bits<u32>(div_rn(amax, e4m3_max)), div_rn(e4m3_max, amax)};
  // amax = m * 2^e with 1 <= m < 2, and 448 = 1.75 * 2^8: the quotient is above 2^(e-9), and at most 2^(e-8) or
  // 2^(e-7), as m is at most 1.75 or not. An infinity has no such power; 255 is UE8M0's NaN.
  u32 bits = same_bits<u32>(amax);
  if (bits >= 0x7f800000u) return {255u, 0.0f};
  u32 exponent = (bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return {exponent, same_bits<float>((254u - exponent) << 23)};
}

// Sixteen elements, of columns at(i).
template <typename At> TY_DEVICE Vec16 to_e4m3(At at, float inverse) {
  Vec16 out{{0, 0, 0, 0}};
  for (u32 i = 0; i < 16; i += 2) {
    u32 pair = floats_to_e4m3(mul_rn(at(i), inverse), mul_rn(at(i + 1), inverse));
    out.w[i / 4] |= pair << (i % 4 * 8);
  }
  return out;
}

// Sixteen elements; in the first lane of each word of scales, that word too.
struct Quantized {
  Vec16 data;
  u32 scale_word;
};

// Quantises 16 columns a lane; by a warp, whose lanes hold consecutive vectors from the start of a word of scales on.
// `there` is false in lanes past the row's end.
TY_DEVICE Quantized quantize_vectors(u32 quantize, const WideVector &x, bool there) {
  auto at = [&](u32 i) { return wide_at(x, i); };
  BlockScale scale = scale_of(quantize, amax_of(at));
  Quantized out{to_e4m3(at, scale.inverse), scale.bits};
  if (quantize == TY_QUANTIZE_UE8M0) {
    // Four blocks' exponents; bytes of blocks past the end are zero.
    u32 word = there ? scale.bits << (lane_index() / block_vectors * 8) : 0;
    word |= shuffle(word, lane_index() ^ block_vectors);
    out.scale_word = word | shuffle(word, lane_index() ^ 2 * block_vectors);
  }
  return out;
}

// Quantises the part of a row that becomes fp8 vectors [first, end), by a warp. All lanes together call store_vector(v,
// data, there) for each of their vectors, and store_scale(word, bits, there) for the word of scales of that vector. A
// vector is there where the row has one; a word is there where it begins with that vector. `first` must be a multiple
// of scale_word_vectors (8, or 32 with UE8M0); `end` must be one, too, or the row's end.
template <typename StoreVector, typename StoreScale>
TY_DEVICE void quantize_row(u32 quantize, u64 row, u32 first, u32 end, StoreVector store_vector,
                            StoreScale store_scale) {
  u32 word_vectors = scale_word_vectors(quantize);
  for (u32 base = first; base < end; base += warp_size) {
    u32 v = base + lane_index();
    bool there = v < end;
    WideVector x = there ? load_wide(row, v) : WideVector{{{{0, 0, 0, 0}}, {{0, 0, 0, 0}}}};
    Quantized out = quantize_vectors(quantize, x, there);
    store_vector(v, out.data, there);
    store_scale(v / word_vectors, out.scale_word, there && v % word_vectors == 0);
  }
}

} // namespace ty
