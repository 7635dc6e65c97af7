// Rows of combine as numbers: eight elements at a time, by dtype.
#pragma once
#include "prim.cuh"

namespace ty {

// Elements handled by one thread at a time. An fp32 row may end after half a group.
constexpr u32 group = 8;

struct Floats {
  float v[group];
};

struct Bf16 {
  static constexpr u32 bytes = 2;
  TY_DEVICE static float widen(u32 bits) { return bf16_to_float(static_cast<u16>(bits)); }
  TY_DEVICE static u32 narrow(float value) { return float_to_bf16(value); }
};

struct Fp16 {
  static constexpr u32 bytes = 2;
  TY_DEVICE static float widen(u32 bits) { return fp16_to_float(static_cast<u16>(bits)); }
  TY_DEVICE static u32 narrow(float value) { return float_to_fp16(value); }
};

struct Fp32 {
  static constexpr u32 bytes = 4;
};

// Loads elements [8g, 8g + 8) of a row of `columns` elements.
template <typename T> TY_DEVICE Floats load_group(const char *row, u32 g, u32) {
  Vec16 data = load16(row + g * 16);
  Floats out;
  for (u32 i = 0; i < 4; ++i) {
    out.v[2 * i] = T::widen(data.w[i] & 0xffffu);
    out.v[2 * i + 1] = T::widen(data.w[i] >> 16);
  }
  return out;
}

template <> TY_DEVICE Floats load_group<Fp32>(const char *row, u32 g, u32 columns) {
  Floats out;
  for (u32 half = 0; half < 2; ++half) {
    bool there = g * group + half * 4 < columns;
    Vec16 data = there ? load16(row + g * 32 + half * 16) : Vec16{{0, 0, 0, 0}};
    for (u32 i = 0; i < 4; ++i) out.v[half * 4 + i] = same_bits<float>(data.w[i]);
  }
  return out;
}

template <typename T> TY_DEVICE void store_group(char *row, u32 g, u32, const Floats &in) {
  Vec16 data;
  for (u32 i = 0; i < 4; ++i) data.w[i] = T::narrow(in.v[2 * i]) | T::narrow(in.v[2 * i + 1]) << 16;
  store16(row + g * 16, data);
}

template <> TY_DEVICE void store_group<Fp32>(char *row, u32 g, u32 columns, const Floats &in) {
  for (u32 half = 0; half < 2; ++half) {
    if (g * group + half * 4 >= columns) return;
    Vec16 data;
    for (u32 i = 0; i < 4; ++i) data.w[i] = same_bits<u32>(in.v[half * 4 + i]);
    store16(row + g * 32 + half * 16, data);
  }
}

} // namespace ty
