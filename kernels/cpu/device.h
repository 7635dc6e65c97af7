// What the CPU half of ../prim.cuh calls: the calling fiber's place in its grid, and the executor's
// side of each primitive (device.cpp). Only prim.cuh and the executor include this.
#ifndef TY_CPU_DEVICE_H
#define TY_CPU_DEVICE_H
#include <stdint.h>

namespace ty {
namespace cpu {
// The executor is linked statically into one library, so thread-local storage is reached directly.
#define TY_TLS __thread __attribute__((tls_model("initial-exec")))

// A kernel as the table of all (table.cpp) lists it.
struct Kernel {
  const char *name;
  void (*enter)(const void *args);
  uint64_t args_bytes;
};

// A device fiber's place in its grid. The first part of the executor's own record of the fiber.
struct Thread {
  uint32_t thread;
  uint32_t block_threads;
  uint32_t block;
  uint32_t blocks;
  void *shared;
  uint64_t shared_bytes;
};

// How far a release reaches. `none` is relaxed.
enum class Scope : uint32_t { none, block, gpu, sys };

extern TY_TLS Thread *current; // the running device fiber
extern TY_TLS bool seeded;     // this OS thread runs a seeded schedule: every access may be preempted
extern TY_TLS int32_t
    time_slice_left;       // vector accesses until the fiber's time slice ends; seeded: 0, so that each is seen
extern const bool has_fma; // the processor has a fused multiply-add that the build did not assume

[[noreturn]] void shared_too_small(uint64_t bytes);
inline void *shared_memory(uint64_t bytes) {
  if (__builtin_expect(bytes > current->shared_bytes, 0)) shared_too_small(bytes);
  return current->shared;
}

void block_barrier();
bool block_any(bool predicate);
// Meetings of some warps of a block alone, `threads` in all; `id` is 1 to 3. team_arrive() does not wait.
void team_barrier(uint32_t id, uint32_t threads);
void team_arrive(uint32_t id, uint32_t threads);
bool team_any(uint32_t id, uint32_t threads, bool predicate);
void warp_barrier();
uint32_t warp_ballot(bool predicate);
uint32_t warp_or(uint32_t value);
uint64_t warp_shuffle(uint64_t bits, uint32_t lane);
void spin_pause(const char *site);
uint64_t now_ns();

bool end_time_slice(); // seeded: only returns true; free: lets the other ready fibers run, returns false
void seeded_load(const void *from, void *value, uint32_t bytes);
void seeded_store(void *to, const void *value, uint32_t bytes);
void seeded_strong_load(const void *from, void *value, uint32_t bytes);
void seeded_strong_store(void *to, const void *value, uint32_t bytes, Scope release);
void seeded_fence(Scope scope);
uint32_t seeded_add(uint32_t *p, uint32_t value, Scope release);
uint32_t seeded_or(uint32_t *p, uint32_t value, Scope release);
uint32_t seeded_cas(uint32_t *p, uint32_t expected, uint32_t desired, Scope release);
} // namespace cpu
} // namespace ty

// Every kernel (table.cpp).
extern const ty::cpu::Kernel *const ty_cpu_kernels[];
extern const uint32_t ty_cpu_kernel_count;
#endif
