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

// A group as it lies in memory.
template <typename T> struct Raw { Vec16 part[T::bytes / 2]; };

// Loads elements [8g, 8g + 8) of a row of `columns` elements.
template <typename T> TY_DEVICE Raw<T> load_raw(const char *row, u64 g, u32) { return {{load16(row + g * 16)}}; }

template <> TY_DEVICE Raw<Fp32> load_raw<Fp32>(const char *row, u64 g, u32 columns) {
  bool whole = g * group + 4 < columns;
  return {{load16(row + g * 32), whole ? load16(row + g * 32 + 16) : Vec16{{0, 0, 0, 0}}}};
}

template <typename T> TY_DEVICE Floats widen(const Raw<T> &raw) {
  Floats out;
  for (u32 i = 0; i < 4; ++i) {
    out.v[2 * i] = T::widen(raw.part[0].w[i] & 0xffffu);
    out.v[2 * i + 1] = T::widen(raw.part[0].w[i] >> 16);
  }
  return out;
}

template <> TY_DEVICE Floats widen<Fp32>(const Raw<Fp32> &raw) {
  Floats out;
  for (u32 i = 0; i < group; ++i) out.v[i] = same_bits<float>(raw.part[i / 4].w[i % 4]);
  return out;
}

template <typename T> TY_DEVICE Floats load_group(const char *row, u64 g, u32 columns) {
  return widen(load_raw<T>(row, g, columns));
}

template <typename T> TY_DEVICE void store_group(char *row, u64 g, u32, const Floats &in) {
  Vec16 data;
  for (u32 i = 0; i < 4; ++i) data.w[i] = T::narrow(in.v[2 * i]) | T::narrow(in.v[2 * i + 1]) << 16;
  store16(row + g * 16, data);
}

template <> TY_DEVICE void store_group<Fp32>(char *row, u64 g, u32 columns, const Floats &in) {
  for (u32 half = 0; half < 2; ++half) {
    if (static_cast<u32>(g) * group + half * 4 >= columns) return;
    Vec16 data;
    for (u32 i = 0; i < 4; ++i) data.w[i] = same_bits<u32>(in.v[half * 4 + i]);
    store16(row + g * 32 + half * 16, data);
  }
}

} // namespace ty
