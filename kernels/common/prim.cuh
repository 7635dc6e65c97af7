// The primitives that every kernel is written with, in two builds of one source.
//
// Place in the data path: under every kernel; nothing else in kernels/*.cuh touches the machine.
// GPU half: inline PTX and intrinsics (nvcc). CPU half: inline twins over the fiber executor
// (cpu/device.h), built by the host compiler. The two give the same bits; kernels/bench/conformance.cuh
// is the test that runs on both.
//
// Rules for kernels: every access that another thread can see goes through a primitive;
// spin_pause() in every wait loop; no lockstep assumed inside a warp; warp operations are called by
// all 32 lanes; no memory order follows from a shuffle or a ballot; all blocks are resident.
#ifndef TY_PRIM_CUH
#define TY_PRIM_CUH
#include <stdint.h>

#if defined(__CUDACC__)
#define TY_DEVICE __device__ __forceinline__
// Before a loop whose passes must be independent of one another, so that their loads are under way together.
#define TY_UNROLL _Pragma("unroll")
// Before a loop that must stay a loop: code that runs once a call is fetched from memory, which takes longer than
// running it.
#define TY_ROLLED _Pragma("unroll 1")
#else
#define TY_UNROLL
#define TY_ROLLED
#include "cpu/device.h"
#define TY_DEVICE inline
#endif

namespace ty {
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;
constexpr u32 warp_size = 32;

// Sixteen-byte vectors of a row that a lane has under way at once: as many as registers have room for.
constexpr u32 vectors_ahead = 7;

// Sixteen bytes, the unit of row copies. Its address must be a multiple of 16.
#if defined(__CUDACC__)
struct alignas(16) Vec16 {
  u32 w[4];
};
#else
struct __attribute__((may_alias, aligned(16))) Vec16 {
  u32 w[4];
};
#endif

struct FloatPair {
  float low;
  float high;
};

TY_DEVICE constexpr u32 smaller(u32 x, u32 y) { return x < y ? x : y; }

// The same bits as another type of the same size.
template <typename To, typename From> TY_DEVICE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same_bits needs types of one size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
} // namespace ty

#if defined(__CUDACC__)
// ---------------------------------------------------------------------------------------- GPU half

#pragma nv_diag_suppress 186 // comparisons that a constant decides (specialised.cuh)

// Defines a kernel: TY_KERNEL(name, Args) { body uses a }. At most 512 threads a block, or so many: with fewer each has
// more registers.
#define TY_KERNEL(name, Args) TY_KERNEL_OF(name, Args, TY_MAX_BLOCK_THREADS)
#define TY_KERNEL_OF(name, Args, threads)                                                                              \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Args a)

namespace ty {
TY_DEVICE u32 thread_index() { return threadIdx.x; }
TY_DEVICE u32 block_threads() { return blockDim.x; }
TY_DEVICE u32 block_index() { return blockIdx.x; }
TY_DEVICE u32 block_count() { return gridDim.x; }

extern __shared__ __align__(128) unsigned char ty_block_shared[];
// The block's shared memory as one struct; contents unspecified at the start.
template <typename T> TY_DEVICE T &block_shared() { return *reinterpret_cast<T *>(ty_block_shared); }

// Barriers. Block: all threads that have not exited. Warp: all 32 lanes. Both order memory among their threads.
TY_DEVICE void block_barrier() { __syncthreads(); }
TY_DEVICE bool block_any(bool predicate) { return __syncthreads_or(predicate ? 1 : 0) != 0; }
TY_DEVICE void warp_barrier() { __syncwarp(0xffffffffu); }
TY_DEVICE void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at a named barrier without waiting: the caller's earlier accesses happen before whoever waits there goes on.
TY_DEVICE void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TY_DEVICE bool named_any(u32 id, u32 threads, bool predicate) {
  u32 any;
  asm volatile("{\n .reg .pred mine, all;\n setp.ne.u32 mine, %3, 0;\n bar.red.or.pred all, %1, %2, mine;\n"
               " selp.u32 %0, 1, 0, all;\n}"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(predicate ? 1u : 0u)
               : "memory");
  return any != 0;
}

// The value, opaque to the compiler: an address from which others are computed by constant offsets.
TY_DEVICE u64 one_value(u64 value) {
  asm("" : "+l"(value));
  return value;
}

// Plain (weak) accesses; visible to others only after a barrier, fence or release.
template <typename T> TY_DEVICE T load(const T *p) {
  static_assert(sizeof(T) <= 8, "load takes 1, 2, 4 or 8 bytes");
  return *p;
}
template <typename T> TY_DEVICE void store(T *p, T value) {
  static_assert(sizeof(T) <= 8, "store takes 1, 2, 4 or 8 bytes");
  *p = value;
}
TY_DEVICE Vec16 load16(const void *p) {
  const uint4 v = *static_cast<const uint4 *>(p);
  return Vec16{{v.x, v.y, v.z, v.w}};
}
TY_DEVICE void store16(void *p, Vec16 v) { *static_cast<uint4 *>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }
// As load16, of memory that other ranks access meanwhile: each word is seen whole, in no order.
TY_DEVICE Vec16 load16_relaxed_sys(const void *p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return v;
}
TY_DEVICE void store16_relaxed_sys(void *p, Vec16 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.w[0]),
               "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

// Brings global memory, [p, p + bytes), into L2, for loads that come soon. Both multiples of 16.
TY_DEVICE void prefetch(const void *p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes));
}

// Strong accesses to global memory (arena, peer arenas, mapped host memory), by order and scope.
#define TY_GPU_LOAD(name, order)                                                                                       \
  template <typename T> TY_DEVICE T name(const T *p) {                                                                 \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, #name " takes 4 or 8 bytes");                                      \
    if constexpr (sizeof(T) == 4) {                                                                                    \
      u32 v;                                                                                                           \
      asm volatile("ld." order ".global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");       \
      return same_bits<T>(v);                                                                                          \
    } else {                                                                                                           \
      u64 v;                                                                                                           \
      asm volatile("ld." order ".global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");       \
      return same_bits<T>(v);                                                                                          \
    }                                                                                                                  \
  }
#define TY_GPU_STORE(name, order)                                                                                      \
  template <typename T> TY_DEVICE void name(T *p, T value) {                                                           \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, #name " takes 4 or 8 bytes");                                      \
    if constexpr (sizeof(T) == 4) {                                                                                    \
      asm volatile("st." order ".global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(same_bits<u32>(value))  \
                   : "memory");                                                                                        \
    } else {                                                                                                           \
      asm volatile("st." order ".global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(same_bits<u64>(value))  \
                   : "memory");                                                                                        \
    }                                                                                                                  \
  }
TY_GPU_LOAD(load_relaxed_sys, "relaxed.sys")
TY_GPU_LOAD(load_relaxed_gpu, "relaxed.gpu")
TY_GPU_LOAD(load_acquire_sys, "acquire.sys")
TY_GPU_LOAD(load_acquire_gpu, "acquire.gpu")
TY_GPU_STORE(store_relaxed_sys, "relaxed.sys")
TY_GPU_STORE(store_relaxed_gpu, "relaxed.gpu")
TY_GPU_STORE(store_release_sys, "release.sys")
TY_GPU_STORE(store_release_gpu, "release.gpu")
#undef TY_GPU_LOAD
#undef TY_GPU_STORE

TY_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
TY_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Atomics; each returns the previous value. The *_gpu ones are for global memory, the *_block ones for shared.
TY_DEVICE u32 atomic_cas_gpu(u32 *p, u32 expected, u32 desired) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(p)), "r"(expected), "r"(desired)
               : "memory");
  return old;
}
#define TY_GPU_ATOMIC(name, space, how)                                                                                \
  TY_DEVICE u32 name(u32 *p, u32 value) {                                                                              \
    u32 old;                                                                                                           \
    asm volatile("atom." how " %0, [%1], %2;" : "=r"(old) : "l"(__cvta_generic_to_##space(p)), "r"(value) : "memory"); \
    return old;                                                                                                        \
  }
TY_GPU_ATOMIC(atomic_add_gpu, global, "acq_rel.gpu.global.add.u32")
// As atomic_add_gpu, without any order.
TY_GPU_ATOMIC(atomic_next_gpu, global, "relaxed.gpu.global.add.u32")
TY_GPU_ATOMIC(atomic_or_block, shared, "relaxed.cta.shared.or.b32")
TY_GPU_ATOMIC(atomic_add_block, shared, "relaxed.cta.shared.add.u32")
// As atomic_add_block, and orders the block's other accesses.
TY_GPU_ATOMIC(atomic_count_block, shared, "acq_rel.cta.shared.add.u32")
#undef TY_GPU_ATOMIC

// Warp operations; all 32 lanes call them together. The lane is taken modulo 32.
TY_DEVICE u32 warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
TY_DEVICE u32 warp_or(u32 value) { return __reduce_or_sync(0xffffffffu, value); }
TY_DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(0xffffffffu, value); }
TY_DEVICE u32 warp_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }
template <typename T> TY_DEVICE T shuffle(T value, u32 lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffle takes 4 or 8 bytes");
  if constexpr (sizeof(T) == 4) {
    return same_bits<T>(__shfl_sync(0xffffffffu, same_bits<u32>(value), static_cast<int>(lane)));
  } else {
    const u64 bits = same_bits<u64>(value);
    const u32 low = __shfl_sync(0xffffffffu, static_cast<u32>(bits), static_cast<int>(lane));
    const u32 high = __shfl_sync(0xffffffffu, static_cast<u32>(bits >> 32), static_cast<int>(lane));
    return same_bits<T>((static_cast<u64>(high) << 32) | low);
  }
}

// Nanoseconds of a clock that all blocks share.
TY_DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
// In every wait loop, with the name of the wait.
TY_DEVICE void spin_pause(const char *) { asm volatile("" ::: "memory"); }

// Single-precision arithmetic, each rounded once to nearest even, subnormals kept. NaN results are 0x7fffffff.
TY_DEVICE float fma_rn(float x, float y, float z) {
  float r;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
  return r;
}
TY_DEVICE float add_rn(float x, float y) {
  float r;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
TY_DEVICE float mul_rn(float x, float y) {
  float r;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
TY_DEVICE float div_rn(float x, float y) {
  float r;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
// The larger of `most`, which is no NaN and not negative, and |x|; a NaN x does not count.
TY_DEVICE float max_magnitude(float most, float x) {
  float r;
  asm("{\n .reg .f32 magnitude;\n abs.f32 magnitude, %2;\n max.f32 %0, %1, magnitude;\n}"
      : "=f"(r)
      : "f"(most), "f"(x));
  return r;
}

// Conversions, to nearest even; NaN becomes 0x7fff (16 bits) or 0x7fffffff (from fp16 and e4m3).
// bf16_to_float is a shift and keeps a NaN's payload. Overflow becomes infinity.
TY_DEVICE float bf16_to_float(u16 bits) { return same_bits<float>(static_cast<u32>(bits) << 16); }
TY_DEVICE u16 float_to_bf16(float x) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
TY_DEVICE float fp16_to_float(u16 bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}
TY_DEVICE u16 float_to_fp16(float x) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
// Of two numbers, the first in the low byte.
TY_DEVICE FloatPair e4m3_to_floats(u16 pair) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return {fp16_to_float(static_cast<u16>(halves)), fp16_to_float(static_cast<u16>(halves >> 16))};
}
TY_DEVICE float e4m3_to_float(u8 bits) { return e4m3_to_floats(bits).low; }
// Two numbers as e4m3, the first in the low byte. Too large ones, infinities included, become the largest, 448;
// NaN of either sign becomes 0x7f.
TY_DEVICE u16 floats_to_e4m3(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
TY_DEVICE u32 popcount(u32 x) { return static_cast<u32>(__popc(x)); }
TY_DEVICE u32 popcount64(u64 x) { return static_cast<u32>(__popcll(x)); }
// The sum of four bytes, added to another.
TY_DEVICE u32 add_bytes(u32 bytes, u32 sum) { return __dp4a(bytes, 0x01010101u, sum); }
} // namespace ty

#else
// ---------------------------------------------------------------------------------------- CPU half
// A thread is a fiber. Free mode: accesses are the machine's own, after one predictable test.
// Seeded mode: each goes through the executor, which may run other fibers first.

#define TY_KERNEL_OF(name, Args, threads) TY_KERNEL(name, Args)
#define TY_KERNEL(name, Args)                                                                                          \
  static void name##_body(const Args &a);                                                                              \
  static void name##_enter(const void *args) { name##_body(*static_cast<const Args *>(args)); }                        \
  extern const ::ty::cpu::Kernel name;                                                                                 \
  constexpr ::ty::cpu::Kernel name{#name, name##_enter, sizeof(Args)};                                                 \
  static void name##_body([[maybe_unused]] const Args &a)

namespace ty {
TY_DEVICE u32 thread_index() { return cpu::current->thread; }
TY_DEVICE u32 block_threads() { return cpu::current->block_threads; }
TY_DEVICE u32 block_index() { return cpu::current->block; }
TY_DEVICE u32 block_count() { return cpu::current->blocks; }

template <typename T> TY_DEVICE T &block_shared() { return *static_cast<T *>(cpu::shared_memory(sizeof(T))); }
TY_DEVICE u64 one_value(u64 value) { return value; }

TY_DEVICE void block_barrier() { cpu::block_barrier(); }
TY_DEVICE bool block_any(bool predicate) { return cpu::block_any(predicate); }
TY_DEVICE void warp_barrier() { cpu::warp_barrier(); }
TY_DEVICE void named_barrier(u32 id, u32 threads) { cpu::team_barrier(id, threads); }
TY_DEVICE void named_arrive(u32 id, u32 threads) { cpu::team_arrive(id, threads); }
TY_DEVICE bool named_any(u32 id, u32 threads, bool predicate) { return cpu::team_any(id, threads, predicate); }

template <typename T> TY_DEVICE T load(const T *p) {
  static_assert(sizeof(T) <= 8, "load takes 1, 2, 4 or 8 bytes");
  T value;
  if (__builtin_expect(cpu::seeded, 0)) {
    cpu::seeded_load(p, &value, sizeof(T));
  } else {
    __atomic_load(p, &value, __ATOMIC_RELAXED);
  }
  return value;
}
template <typename T> TY_DEVICE void store(T *p, T value) {
  static_assert(sizeof(T) <= 8, "store takes 1, 2, 4 or 8 bytes");
  if (__builtin_expect(cpu::seeded, 0)) {
    cpu::seeded_store(p, &value, sizeof(T));
  } else {
    __atomic_store(p, &value, __ATOMIC_RELAXED);
  }
}
TY_DEVICE void prefetch(const void *, u32) {}
// Vector accesses also end a fiber's time slice now and then: lanes that share cache lines, and that on a GPU would
// run in step, then stay close to one another in memory.
TY_DEVICE Vec16 load16(const void *p) {
  if (__builtin_expect(--cpu::time_slice_left < 0, 0) && cpu::end_time_slice()) {
    Vec16 value;
    cpu::seeded_load(p, &value, sizeof value);
    return value;
  }
  return *static_cast<const Vec16 *>(p);
}
TY_DEVICE void store16(void *p, Vec16 value) {
  if (__builtin_expect(--cpu::time_slice_left < 0, 0) && cpu::end_time_slice()) {
    const Vec16 copy = value; // whose address alone is taken: the fast path keeps its value in a register
    cpu::seeded_store(p, &copy, sizeof copy);
  } else {
    *static_cast<Vec16 *>(p) = value;
  }
}

#define TY_CPU_LOAD(name, order)                                                                                       \
  template <typename T> TY_DEVICE T name(const T *p) {                                                                 \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, #name " takes 4 or 8 bytes");                                      \
    T value;                                                                                                           \
    if (__builtin_expect(cpu::seeded, 0)) {                                                                            \
      cpu::seeded_strong_load(p, &value, sizeof(T));                                                                   \
    } else {                                                                                                           \
      __atomic_load(p, &value, order);                                                                                 \
    }                                                                                                                  \
    return value;                                                                                                      \
  }
#define TY_CPU_STORE(name, order, release)                                                                             \
  template <typename T> TY_DEVICE void name(T *p, T value) {                                                           \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, #name " takes 4 or 8 bytes");                                      \
    if (__builtin_expect(cpu::seeded, 0)) {                                                                            \
      cpu::seeded_strong_store(p, &value, sizeof(T), release);                                                         \
    } else {                                                                                                           \
      __atomic_store(p, &value, order);                                                                                \
    }                                                                                                                  \
  }
TY_CPU_LOAD(load_relaxed_sys, __ATOMIC_RELAXED)
TY_CPU_LOAD(load_relaxed_gpu, __ATOMIC_RELAXED)
TY_CPU_LOAD(load_acquire_sys, __ATOMIC_ACQUIRE)
TY_CPU_LOAD(load_acquire_gpu, __ATOMIC_ACQUIRE)
TY_CPU_STORE(store_relaxed_sys, __ATOMIC_RELAXED, cpu::Scope::none)
TY_CPU_STORE(store_relaxed_gpu, __ATOMIC_RELAXED, cpu::Scope::none)
TY_CPU_STORE(store_release_sys, __ATOMIC_RELEASE, cpu::Scope::sys)
TY_CPU_STORE(store_release_gpu, __ATOMIC_RELEASE, cpu::Scope::gpu)
#undef TY_CPU_LOAD
#undef TY_CPU_STORE

// Two words at a time, which is more than a GPU promises and finer than a lane's vectors.
TY_DEVICE Vec16 load16_relaxed_sys(const void *p) {
  if (__builtin_expect(!cpu::seeded, 1)) {
    if (__builtin_expect(--cpu::time_slice_left < 0, 0)) (void)cpu::end_time_slice();
  }
  Vec16 value;
  for (u32 i = 0; i < 2; ++i) {
    const u64 pair = load_relaxed_sys(static_cast<const u64 *>(p) + i);
    __builtin_memcpy(&value.w[2 * i], &pair, sizeof pair);
  }
  return value;
}
TY_DEVICE void store16_relaxed_sys(void *p, Vec16 value) {
  if (__builtin_expect(!cpu::seeded, 1)) {
    if (__builtin_expect(--cpu::time_slice_left < 0, 0)) (void)cpu::end_time_slice();
  }
  for (u32 i = 0; i < 2; ++i) {
    u64 pair;
    __builtin_memcpy(&pair, &value.w[2 * i], sizeof pair);
    store_relaxed_sys(static_cast<u64 *>(p) + i, pair);
  }
}

TY_DEVICE void fence_acq_rel_sys() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
  if (__builtin_expect(cpu::seeded, 0)) cpu::seeded_fence(cpu::Scope::sys);
}
TY_DEVICE void fence_acq_rel_gpu() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
  if (__builtin_expect(cpu::seeded, 0)) cpu::seeded_fence(cpu::Scope::gpu);
}

TY_DEVICE u32 atomic_add_gpu(u32 *p, u32 value) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_add(p, value, cpu::Scope::gpu);
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}
TY_DEVICE u32 atomic_next_gpu(u32 *p, u32 value) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_add(p, value, cpu::Scope::none);
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
TY_DEVICE u32 atomic_cas_gpu(u32 *p, u32 expected, u32 desired) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_cas(p, expected, desired, cpu::Scope::gpu);
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
TY_DEVICE u32 atomic_or_block(u32 *p, u32 value) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_or(p, value, cpu::Scope::none);
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}
TY_DEVICE u32 atomic_add_block(u32 *p, u32 value) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_add(p, value, cpu::Scope::none);
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
TY_DEVICE u32 atomic_count_block(u32 *p, u32 value) {
  if (__builtin_expect(cpu::seeded, 0)) return cpu::seeded_add(p, value, cpu::Scope::block);
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}

TY_DEVICE u32 warp_ballot(bool predicate) { return cpu::warp_ballot(predicate); }
TY_DEVICE u32 warp_or(u32 value) { return cpu::warp_or(value); }
template <typename T> TY_DEVICE T shuffle(T value, u32 lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffle takes 4 or 8 bytes");
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = cpu::warp_shuffle(bits, lane);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

TY_DEVICE u32 warp_sum(u32 value) {
  for (u32 step = warp_size / 2; step; step /= 2) value += shuffle(value, thread_index() ^ step);
  return value;
}
TY_DEVICE u32 warp_max(u32 value) {
  for (u32 step = warp_size / 2; step; step /= 2) {
    u32 other = shuffle(value, thread_index() ^ step);
    value = other > value ? other : value;
  }
  return value;
}

TY_DEVICE u64 now_ns() { return cpu::now_ns(); }
TY_DEVICE void spin_pause(const char *site) { cpu::spin_pause(site); }

// The GPU's arithmetic has one NaN; x86 and Arm pass on their operands' NaNs.
TY_DEVICE float one_nan(float x) {
  if (__builtin_expect(x != x, 0)) {
    __asm__ volatile(""); // keeps this a branch; a conditional move would lengthen every sum's chain
    return same_bits<float>(0x7fffffffu);
  }
  return x;
}
TY_DEVICE float fma_rn(float x, float y, float z) {
#if defined(__x86_64__) && !defined(__FMA__)
  // The build targets any x86-64; where the processor has the instruction, use it without a call.
  if (__builtin_expect(cpu::has_fma, 1)) {
    __asm__("vfmadd213ss %2, %1, %0" : "+x"(x) : "x"(y), "x"(z));
    return one_nan(x);
  }
#endif
  return one_nan(__builtin_fmaf(x, y, z));
}
TY_DEVICE float add_rn(float x, float y) { return one_nan(x + y); }
TY_DEVICE float mul_rn(float x, float y) { return one_nan(x * y); }
TY_DEVICE float div_rn(float x, float y) { return one_nan(x / y); }
TY_DEVICE float max_magnitude(float most, float x) {
  const float magnitude = __builtin_fabsf(x);
  return magnitude > most ? magnitude : most;
}

TY_DEVICE float bf16_to_float(u16 bits) { return same_bits<float>(static_cast<u32>(bits) << 16); }
TY_DEVICE u16 float_to_bf16(float x) {
  const u32 bits = same_bits<u32>(x);
  if (__builtin_expect((bits & 0x7fffffffu) > 0x7f800000u, 0)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
TY_DEVICE float fp16_to_float(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00u) return same_bits<float>(0x7fffffffu);
  if (magnitude == 0x7c00u) return same_bits<float>(sign | 0x7f800000u);
  if (magnitude >= 0x0400u) return same_bits<float>(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: an integer multiple of 2^-24, exact in single precision.
  return same_bits<float>(sign | same_bits<u32>(static_cast<float>(magnitude) * 0x1p-24f));
}
TY_DEVICE u16 float_to_fp16(float x) {
  const u32 bits = same_bits<u32>(x);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u); // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                                         // below 2^-14: a multiple of 2^-24
    // Adding 0.5 puts the unit of the sum's last place at 2^-24, so that the addition rounds.
    const float sum = same_bits<float>(magnitude) + 0.5f;
    return static_cast<u16>(sign | (same_bits<u32>(sum) - 0x3f000000u));
  }
  const u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<u16>(sign | ((rounded >> 13) - (112u << 10)));
}
TY_DEVICE float e4m3_to_float(u8 bits) {
  const u32 sign = static_cast<u32>(bits & 0x80u) << 24;
  const u32 exponent = (bits >> 3) & 15u;
  const u32 mantissa = bits & 7u;
  if ((bits & 0x7fu) == 0x7fu) return same_bits<float>(0x7fffffffu);
  if (exponent != 0) return same_bits<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  return same_bits<float>(sign | same_bits<u32>(static_cast<float>(mantissa) * 0x1p-9f));
}
TY_DEVICE FloatPair e4m3_to_floats(u16 pair) {
  return {e4m3_to_float(static_cast<u8>(pair)), e4m3_to_float(static_cast<u8>(pair >> 8))};
}
TY_DEVICE u32 float_to_e4m3(float x) {
  const u32 bits = same_bits<u32>(x);
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (__builtin_expect(magnitude > 0x7f800000u, 0)) return 0x7f;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu; // 448 and above
  if (magnitude < 0x3c800000u) {                     // below 2^-6: a multiple of 2^-9
    // Adding 2^14 puts the unit of the sum's last place at 2^-9, so that the addition rounds.
    const float sum = same_bits<float>(magnitude) + 0x1p14f;
    return sign | (same_bits<u32>(sum) - 0x46800000u);
  }
  const u32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | ((rounded >> 20) - (120u << 3));
}
TY_DEVICE u16 floats_to_e4m3(float low, float high) {
  return static_cast<u16>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}
TY_DEVICE u32 popcount(u32 x) { return static_cast<u32>(__builtin_popcount(x)); }
TY_DEVICE u32 popcount64(u64 x) { return static_cast<u32>(__builtin_popcountll(x)); }
TY_DEVICE u32 add_bytes(u32 bytes, u32 sum) {
  return sum + (bytes & 0xff) + (bytes >> 8 & 0xff) + (bytes >> 16 & 0xff) + (bytes >> 24);
}
} // namespace ty
#endif

namespace ty {
TY_DEVICE u32 lane_index() { return thread_index() % warp_size; }
TY_DEVICE u32 warp_index() { return thread_index() / warp_size; }
TY_DEVICE u32 block_warps() { return block_threads() / warp_size; }

// Consecutive warps of a block that work together, the same ones in every block: the whole block, or one of two teams
// that do different work side by side.
struct Team {
  u32 id; // 0: the whole block; 1 or 2: its barrier's
  u32 first_warp;
  u32 warps;
};

TY_DEVICE Team whole_block() { return {0, 0, block_warps()}; }
TY_DEVICE bool is_member(const Team &team) { return warp_index() - team.first_warp < team.warps; }
TY_DEVICE u32 team_threads(const Team &team) { return team.warps * warp_size; }
// The calling thread's number in the team.
TY_DEVICE u32 team_thread(const Team &team) { return thread_index() - team.first_warp * warp_size; }
TY_DEVICE u32 team_warp(const Team &team) { return warp_index() - team.first_warp; }
// Called by all members together; orders memory among them.
TY_DEVICE void team_barrier(const Team &team) {
  if (team.id == 0) block_barrier();
  else named_barrier(team.id, team_threads(team));
}
TY_DEVICE bool team_any(const Team &team, bool predicate) {
  return team.id == 0 ? block_any(predicate) : named_any(team.id, team_threads(team), predicate);
}

TY_DEVICE bool is_one_of_two(const Team &team) { return team.id != 0; }
// Between the two teams of a block, once a launch: every member of one hands over and goes on; every member of the
// other takes over, which waits for all of the first team to hand over.
constexpr u32 hand_over_id = 3;
TY_DEVICE void hand_over() { named_arrive(hand_over_id, block_threads()); }
TY_DEVICE void take_over() { named_barrier(hand_over_id, block_threads()); }
} // namespace ty
#endif
