// Rows of combine as numbers: a group of columns at a time, by dtype.
#pragma once
#include "common/quantize.cuh"

namespace ty {

// The types of rows. `group`: columns that a thread handles at a time where partial rows are of the type, in sums of
// rows of any type. `block`: columns of which pieces hold whole multiples.
struct Bf16 {
  static constexpr u32 bytes = 2, group = 8, block = 8;
  TY_DEVICE static float widen(u32 bits) { return bf16_to_float(static_cast<u16>(bits)); }
  TY_DEVICE static u32 narrow(float value) { return float_to_bf16(value); }
};

struct Fp16 {
  static constexpr u32 bytes = 2, group = 8, block = 8;
  TY_DEVICE static float widen(u32 bits) { return fp16_to_float(static_cast<u16>(bits)); }
  TY_DEVICE static u32 narrow(float value) { return float_to_fp16(value); }
};

// A row may end after half a group of 8.
struct Fp32 {
  static constexpr u32 bytes = 4, group = 8, block = 8;
};

// e4m3 elements, then a float scale for each block of columns, made as in quantize.cuh. Partial rows alone.
struct Fp8 {
  static constexpr u32 bytes = 1, group = 16, block = group * block_vectors;
};

// Columns [n * g, n * g + n) of a row.
template <u32 n> struct Floats { float v[n]; };

template <u32 n> TY_DEVICE void add_to(Floats<n> &sum, const Floats<n> &row) {
  for (u32 i = 0; i < n; ++i) sum.v[i] = add_rn(sum.v[i], row.v[i]);
}

// 16-byte vectors of a group of n columns.
template <typename T, u32 n> constexpr u32 vectors_of = n / (sizeof(Vec16) / T::bytes);

// A group as it lies in memory.
template <typename T, u32 n> struct Raw { Vec16 part[vectors_of<T, n>]; };
template <u32 n> struct Raw<Fp8, n> {
  Vec16 part[vectors_of<Fp8, n>];
  float scale;
};

TY_DEVICE float *partial_scales(char *row, u32 columns) { return reinterpret_cast<float *>(row + columns); }
TY_DEVICE const float *partial_scales(const char *row, u32 columns) {
  return reinterpret_cast<const float *>(row + columns);
}

// Whether vector i of group g is within a row of `columns`, in which the group begins.
template <typename T, u32 n> TY_DEVICE bool is_within(u64 g, u32 i, u32 columns) {
  return T::bytes < 4 || i == 0 || g * n + i * (sizeof(Vec16) / T::bytes) < columns;
}

// Calls vector(i, offset) for the 16-byte vectors of group g of a row of `columns` elements.
template <typename T, u32 n, typename Vector> TY_DEVICE void each_vector(u64 g, u32 columns, Vector vector) {
  for (u32 i = 0; i < vectors_of<T, n>; ++i)
    if (is_within<T, n>(g, i, columns)) vector(i, (g * vectors_of<T, n> + i) * sizeof(Vec16));
}

// Loads group g of a row of `columns` elements.
template <typename T, u32 n> TY_DEVICE Raw<T, n> load_raw(const char *row, u64 g, u32 columns) {
  Raw<T, n> raw{};
  each_vector<T, n>(g, columns, [&](u32 i, u64 offset) { raw.part[i] = load16(row + offset); });
  if constexpr (T::bytes == Fp8::bytes) raw.scale = load(partial_scales(row, columns) + g * n / Fp8::block);
  return raw;
}

// ---- LL rows ---------------------------------------------------------------------------------------------------
//
// A reader looks at an LL row while another rank stores it: a word that is 0 has not arrived yet. So the stores need no
// fence and no tag after them, and the reader leaves zeros for the next row. A sum stores no zero word: +0 is sent as
// -0, which adds up to the same (additions begin with +0).

// Stores words of a sum, into an LL row (`ll`) or into a tagged row.
TY_DEVICE void store_words(char *at, Vec16 data, bool ll) {
  if (!ll) return store16(at, data);
  for (u32 w = 0; w < 4; ++w) data.w[w] = data.w[w] == 0 ? 1u << 31 : data.w[w];
  store16_relaxed_sys(at, data);
}

// A group whose words have all arrived.
template <typename T, u32 n> TY_DEVICE Raw<T, n> all_ones() {
  Raw<T, n> raw;
  for (u32 i = 0; i < vectors_of<T, n>; ++i) raw.part[i] = Vec16{{~0u, ~0u, ~0u, ~0u}};
  if constexpr (T::bytes == Fp8::bytes) raw.scale = same_bits<float>(~0u);
  return raw;
}

// As load_raw, of an LL row; all ones beyond the row's columns.
template <typename T, u32 n> TY_DEVICE Raw<T, n> look_at_raw(const char *row, u64 g, u32 columns) {
  Raw<T, n> raw = all_ones<T, n>();
  each_vector<T, n>(g, columns, [&](u32 i, u64 offset) { raw.part[i] = load16_relaxed_sys(row + offset); });
  if constexpr (T::bytes == Fp8::bytes) raw.scale = load_relaxed_sys(partial_scales(row, columns) + g * n / Fp8::block);
  return raw;
}

// The least word of a group: 0 until all words have arrived.
template <typename T, u32 n> TY_DEVICE u32 least_word(const Raw<T, n> &raw) {
  u32 least = ~0u;
  for (u32 i = 0; i < vectors_of<T, n>; ++i)
    for (u32 w = 0; w < 4; ++w) least = smaller(least, raw.part[i].w[w]);
  if constexpr (T::bytes == Fp8::bytes) least = smaller(least, same_bits<u32>(raw.scale));
  return least;
}

// Replaces a group with zeros. Lanes that share a block must all have read its scale before.
template <typename T, u32 n> TY_DEVICE void clear_raw(char *row, u64 g, u32 columns) {
  each_vector<T, n>(g, columns, [&](u32, u64 offset) { store16(row + offset, Vec16{}); });
  if constexpr (T::bytes == Fp8::bytes) {
    if (g % block_vectors == 0) store(partial_scales(row, columns) + g / block_vectors, 0.0f);
  }
}

template <typename T, u32 n> TY_DEVICE Floats<n> widen(const Raw<T, n> &raw) {
  Floats<n> out;
  if constexpr (T::bytes == 4) {
    for (u32 i = 0; i < n; ++i) out.v[i] = same_bits<float>(raw.part[i / 4].w[i % 4]);
  } else if constexpr (T::bytes == 2) {
    for (u32 i = 0; i < n; i += 2) {
      u32 pair = raw.part[i / 8].w[i / 2 % 4];
      out.v[i] = T::widen(pair & 0xffffu);
      out.v[i + 1] = T::widen(pair >> 16);
    }
  } else {
    for (u32 i = 0; i < n; i += 2) {
      FloatPair pair = e4m3_to_floats(static_cast<u16>(raw.part[i / 16].w[i / 4 % 4] >> (i % 4 * 8)));
      out.v[i] = mul_rn(pair.low, raw.scale);
      out.v[i + 1] = mul_rn(pair.high, raw.scale);
    }
  }
  return out;
}

template <typename T, u32 n> TY_DEVICE Floats<n> load_group(const char *row, u64 g, u32 columns) {
  return widen<T, n>(load_raw<T, n>(row, g, columns));
}

// Stores group g of a row of `columns` elements of 2 or 4 bytes.
template <typename T, u32 n>
TY_DEVICE void store_group(char *row, u64 g, u32 columns, const Floats<n> &in, bool ll = false) {
  constexpr u32 each = sizeof(Vec16) / T::bytes;
  for (u32 i = 0; i < vectors_of<T, n>; ++i) {
    if (!is_within<T, n>(g, i, columns)) return;
    Vec16 data;
    for (u32 w = 0; w < 4; ++w) {
      if constexpr (T::bytes == 4) data.w[w] = same_bits<u32>(in.v[i * each + w]);
      else data.w[w] = T::narrow(in.v[i * each + 2 * w]) | T::narrow(in.v[i * each + 2 * w + 1]) << 16;
    }
    store_words(row + (g * vectors_of<T, n> + i) * sizeof(Vec16), data, ll);
  }
}

// Stores group g of a partial row, where it is `there`. By a warp, whose lanes hold consecutive groups from the start
// of a block on; a block is there as a whole or not at all.
template <typename T>
TY_DEVICE void store_partial(char *row, u64 g, bool there, u32 columns, const Floats<T::group> &in, bool ll) {
  if constexpr (T::bytes == Fp8::bytes) {
    auto at = [&](u32 i) { return in.v[i]; };
    BlockScale scale = scale_of(TY_QUANTIZE_F32, amax_of(at));
    if (!there) return;
    store_words(row + g * sizeof(Vec16), to_e4m3(at, scale.inverse), ll);
    if (g % block_vectors != 0) return;
    float *scales = partial_scales(row, columns) + g / block_vectors, value = same_bits<float>(scale.bits);
    if (ll) store_relaxed_sys(scales, value);
    else store(scales, value);
  } else if (there) {
    store_group<T, T::group>(row, g, columns, in, ll);
  }
}

} // namespace ty
