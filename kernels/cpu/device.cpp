// The primitives' CPU side: meetings of a block's and a warp's threads, waiting, and in seeded mode every
// access to memory. Runs on device fibers.
#include "device.h"

#include <string.h>
#include <time.h>

#include "schedule.h"

namespace ty {
namespace cpu {
TY_TLS int32_t time_slice_left = 0;

namespace {
// Some 1 KiB of a row's reads and writes by each lane: a few times a switch's cost, a fraction of a cache.
constexpr int32_t time_slice_accesses = 64;
} // namespace

#if defined(__x86_64__)
const bool has_fma = __builtin_cpu_supports("fma");
#else
const bool has_fma = false;
#endif

void shared_too_small(uint64_t bytes) {
  fatal("%s: uses %llu bytes of shared memory and was launched with %llu", running_fiber()->launch->work.kernel->name,
        static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(current->shared_bytes));
}

// ---------------------------------------------------------------------------------- meetings

namespace {
[[noreturn]] void mismatch(const Fiber &self, Meeting met, Meeting own, bool of_warp) {
  fatal("%s block %u thread %u: calls %s while others of its %s wait in %s", self.launch->work.kernel->name, self.block,
        self.thread, meeting_name(own, of_warp), of_warp ? "warp" : "block", meeting_name(met, of_warp));
}

// A barrier orders memory among its threads: bytes that a thread held are visible to the block from here on.
void arrive(Fiber &self, bool orders_memory) {
  if (__builtin_expect(!seeded, 1)) return;
  executor->access();
  if (orders_memory && executor->hold) self.held.move_to(self.block_of->held);
}

// Returns when `expected` threads are here, or at once without `waits`; the result is the OR of `predicate`.
bool meet(Gathering &gathering, uint32_t expected, Meeting meeting, bool predicate, bool waits) {
  Fiber &self = *running_fiber();
  arrive(self, true);
  if (gathering.arrived == 0) {
    gathering.meeting = meeting;
  } else if (gathering.meeting != meeting) {
    mismatch(self, gathering.meeting, meeting, false);
  }
  const uint32_t parity = gathering.meeting_number & 1;
  if (predicate) gathering.any[parity] = true;
  if (++gathering.arrived == expected) {
    gathering.arrived = 0;
    gathering.any[++gathering.meeting_number & 1] = false;
    executor->make_ready(gathering.waiting);
  } else if (waits) {
    gathering.waiting.push_front(&self);
    executor->leave();
  }
  return gathering.any[parity];
}

// Every thread of the block that has not exited.
bool meet_block(Meeting meeting, bool predicate) {
  Block &block = *running_fiber()->block_of;
  return meet(block.gatherings[0], block.live, meeting, predicate, true);
}

bool meet_team(uint32_t id, uint32_t threads, Meeting meeting, bool predicate, bool waits = true) {
  if (id == 0 || id >= block_gatherings) fatal("a team's barrier is 1 to %u, not %u", block_gatherings - 1, id);
  return meet(running_fiber()->block_of->gatherings[id], threads, meeting, predicate, waits);
}

// Waits for all 32 lanes. Returns the parity under which the warp keeps their values.
uint32_t meet_warp(Warp &warp, Fiber &self, Meeting meeting) {
  const uint32_t parity = warp.meeting_number & 1;
  if (++warp.arrived == warp_lanes) {
    warp.arrived = 0;
    warp.bits[++warp.meeting_number & 1] = 0;
    executor->make_ready(warp.waiting);
  } else {
    warp.meeting = meeting;
    warp.waiting.push_front(&self);
    executor->leave();
  }
  return parity;
}

Warp &check_warp(Fiber &self, Meeting meeting) {
  Warp &warp = *self.warp_of;
  if (__builtin_expect(warp.arrived != 0 && warp.meeting != meeting, 0)) mismatch(self, warp.meeting, meeting, true);
  if (__builtin_expect(warp.exited != 0, 0)) {
    fatal("%s block %u thread %u: calls %s after other lanes of its warp have exited", self.launch->work.kernel->name,
          self.block, self.thread, meeting_name(meeting, true));
  }
  return warp;
}
} // namespace

void block_barrier() { (void)meet_block(Meeting::barrier, false); }
bool block_any(bool predicate) { return meet_block(Meeting::any, predicate); }

void team_barrier(uint32_t id, uint32_t threads) { (void)meet_team(id, threads, Meeting::barrier, false); }
void team_arrive(uint32_t id, uint32_t threads) { (void)meet_team(id, threads, Meeting::barrier, false, false); }
bool team_any(uint32_t id, uint32_t threads, bool predicate) { return meet_team(id, threads, Meeting::any, predicate); }

void warp_barrier() {
  Fiber &self = *running_fiber();
  arrive(self, true);
  (void)meet_warp(check_warp(self, Meeting::barrier), self, Meeting::barrier);
}

namespace {
// The OR of the values of all 32 lanes.
uint32_t meet_or(uint32_t bits, Meeting meeting) {
  Fiber &self = *running_fiber();
  arrive(self, false);
  Warp &warp = check_warp(self, meeting);
  warp.bits[warp.meeting_number & 1] |= bits;
  return warp.bits[meet_warp(warp, self, meeting)];
}
} // namespace

uint32_t warp_ballot(bool predicate) {
  return meet_or(static_cast<uint32_t>(predicate) << (running_fiber()->thread % warp_lanes), Meeting::ballot);
}

uint32_t warp_or(uint32_t value) { return meet_or(value, Meeting::either); }

uint64_t warp_shuffle(uint64_t bits, uint32_t lane) {
  Fiber &self = *running_fiber();
  arrive(self, false);
  Warp &warp = check_warp(self, Meeting::shuffle);
  warp.value[warp.meeting_number & 1][self.thread % warp_lanes] = bits;
  return warp.value[meet_warp(warp, self, Meeting::shuffle)][lane % warp_lanes];
}

bool end_time_slice() {
  if (seeded) {
    time_slice_left = 0;
    return true;
  }
  time_slice_left = time_slice_accesses;
  executor->end_time_slice();
  return false;
}

void spin_pause(const char *site) { executor->poll(site); }

uint64_t now_ns() { return seeded ? executor->clock_ns.load(std::memory_order_relaxed) : executor->clock.look(); }

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// ---------------------------------------------------------------------------------- seeded memory

namespace {
// The buffers whose stores this fiber sees, oldest first.
struct View {
  LineMap *maps[3];
  explicit View(Fiber &self) : maps{&executor->held_by_rank(self.launch->rank), &self.block_of->held, &self.held} {}
};

void check_alignment(const void *p, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    fatal("%s block %u thread %u: access of %u bytes at %p is not aligned", running_fiber()->launch->work.kernel->name,
          current->block, current->thread, bytes, p);
  }
}

uintptr_t line_of(const void *p) { return reinterpret_cast<uintptr_t>(p) & ~(line_bytes - 1); }
uint32_t offset_in_line(const void *p) { return reinterpret_cast<uintptr_t>(p) % line_bytes; }
uint32_t mask_of(const void *p, uint32_t bytes) { return ((1u << bytes) - 1u) << offset_in_line(p); }

void copy(void *to, const void *from, uint32_t bytes) {
  switch (bytes) { // of a constant size, so that none is a call
  case 1:
    memcpy(to, from, 1);
    break;
  case 2:
    memcpy(to, from, 2);
    break;
  case 4:
    memcpy(to, from, 4);
    break;
  default:
    memcpy(to, from, 8);
    break;
  }
}

// What this fiber may see at `from`.
void read(const View &view, const void *from, void *value, uint32_t bytes) {
  copy(value, from, bytes);
  const uint32_t offset = offset_in_line(from);
  for (const LineMap *map : view.maps) {
    const Line *line = map->find(line_of(from));
    if (line == nullptr) continue;
    for (uint32_t i = 0; i < bytes; ++i) {
      if ((line->mask >> (offset + i)) & 1u) static_cast<uint8_t *>(value)[i] = line->bytes[offset + i];
    }
  }
}

// Publishes the bytes of a line that this fiber sees to memory: no buffer holds them afterwards.
void publish_bytes(const View &view, uintptr_t address, uint32_t mask) {
  for (LineMap *map : view.maps) {
    const Line *held = map->find(address);
    if (held == nullptr || (held->mask & mask) == 0) continue;
    Line line = *held;
    line.mask &= mask;
    write_line(line);
    map->drop(address, mask);
  }
}

// A machine may let any held store out early, in any order, and the two halves of 16 bytes apart.
void drain_one(const View &view, ty_exec &exec) {
  static const uint32_t parts[] = {0xffff, 0x00ff, 0xff00};
  const LineMap &own = *view.maps[2];
  const Line &line = own.at(exec.random.below(static_cast<uint32_t>(own.size())));
  publish_bytes(view, line.address, parts[exec.random.below(3)]);
}

// What a release at `scope` publishes: all that this fiber sees and `scope` does not.
void publish(const View &view, Scope scope) {
  if (scope == Scope::gpu) {
    view.maps[1]->move_to(*view.maps[0]);
    view.maps[2]->move_to(*view.maps[0]);
  } else if (scope == Scope::sys) {
    for (LineMap *map : view.maps) map->move_to_memory();
  }
}

// Before a strong access: a preemption, the release, and this fiber's own bytes of the word.
void strong_access(const void *p, uint32_t bytes, Scope release) {
  check_alignment(p, bytes);
  executor->access();
  if (!executor->hold) return;
  const View view(*running_fiber());
  publish(view, release);
  publish_bytes(view, line_of(p), mask_of(p, bytes));
}

template <typename Change> uint32_t change_word(uint32_t *p, Scope release, Change change) {
  strong_access(p, sizeof *p, release);
  const uint32_t old = *p;
  const uint32_t value = change(old);
  if (value != old) {
    *p = value;
    ++executor->progress;
  }
  return old;
}
} // namespace

namespace {
void load_part(const void *from, void *value, uint32_t bytes) {
  executor->access();
  if (executor->hold) {
    read(View(*running_fiber()), from, value, bytes);
  } else {
    copy(value, from, bytes);
  }
}

void store_part(void *to, const void *value, uint32_t bytes) {
  ty_exec &exec = *executor;
  exec.access();
  if (!exec.hold) {
    if (memcmp(to, value, bytes) != 0) ++exec.progress;
    copy(to, value, bytes);
    return;
  }
  Fiber &self = *running_fiber();
  const View view(self);
  uint8_t seen[line_bytes];
  read(view, to, seen, bytes);
  if (memcmp(seen, value, bytes) != 0) ++exec.progress;
  uint8_t line[line_bytes] = {};
  copy(line + offset_in_line(to), value, bytes);
  self.held.put(line_of(to), mask_of(to, bytes), line);
  if (exec.temper.drain_one_in != 0 && exec.random.below(exec.temper.drain_one_in) == 0) drain_one(view, exec);
}
} // namespace

// Sixteen bytes go as two halves: the GPU promises no more of a vector access.
void seeded_load(const void *from, void *value, uint32_t bytes) {
  check_alignment(from, bytes);
  const uint32_t part = bytes < 8 ? bytes : 8;
  for (uint32_t at = 0; at < bytes; at += part) {
    load_part(static_cast<const uint8_t *>(from) + at, static_cast<uint8_t *>(value) + at, part);
  }
}

void seeded_store(void *to, const void *value, uint32_t bytes) {
  check_alignment(to, bytes);
  const uint32_t part = bytes < 8 ? bytes : 8;
  for (uint32_t at = 0; at < bytes; at += part) {
    store_part(static_cast<uint8_t *>(to) + at, static_cast<const uint8_t *>(value) + at, part);
  }
}

void seeded_strong_load(const void *from, void *value, uint32_t bytes) {
  strong_access(from, bytes, Scope::none);
  executor->note_load(from);
  copy(value, from, bytes);
}

void seeded_strong_store(void *to, const void *value, uint32_t bytes, Scope release) {
  strong_access(to, bytes, release);
  if (memcmp(to, value, bytes) != 0) ++executor->progress;
  copy(to, value, bytes);
}

void seeded_fence(Scope scope) {
  executor->access();
  if (executor->hold) publish(View(*running_fiber()), scope);
}

uint32_t seeded_add(uint32_t *p, uint32_t value, Scope release) {
  return change_word(p, release, [value](uint32_t old) { return old + value; });
}

uint32_t seeded_or(uint32_t *p, uint32_t value, Scope release) {
  return change_word(p, release, [value](uint32_t old) { return old | value; });
}

uint32_t seeded_cas(uint32_t *p, uint32_t expected, uint32_t desired, Scope release) {
  return change_word(p, release, [=](uint32_t old) { return old == expected ? desired : old; });
}
} // namespace cpu
} // namespace ty
