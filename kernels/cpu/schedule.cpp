// Who runs next. Fibers switch straight to each other; the run loops on the OS thread's own stack are
// entered only to start work, at the end of a round of waiting fibers, and to sleep.
#include "schedule.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace ty {
namespace cpu {
TY_TLS Thread *current = nullptr;
TY_TLS bool seeded = false;
TY_TLS ty_exec *executor = nullptr;

namespace {
constexpr uint64_t step_ns = 100;           // what one scheduling step takes on the virtual clock
constexpr uint64_t jump_ns = 1000000000;    // how far the clock jumps when nothing moves
constexpr uint32_t rounds_before_jump = 16; // a fiber may wait for several things one after the other
constexpr uint32_t rounds_between_jumps = 2;
constexpr uint32_t jumps_before_hang = 1000;
// How much less of a jump passes for hosts. Kernels look at the clock once in 32 polls, that is once in 16 jumps, and a
// host's wait for a kernel must outlast the kernel's own, also where both have the same deadline.
constexpr uint32_t host_share = 64;
constexpr uint32_t yields_before_sleep = 64;
// Rounds in which all fibers waited in vain, before the thread sleeps between them: others may need its core.
constexpr uint32_t idle_before_sleep = 256;
constexpr uint32_t idle_sleep_us = 50;
} // namespace

void fatal(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fputs("tokenyard CPU device: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  abort();
}

const char *meeting_name(Meeting meeting, bool of_warp) {
  switch (meeting) {
  case Meeting::barrier:
    return of_warp ? "warp_barrier" : "block_barrier";
  case Meeting::any:
    return "block_any";
  case Meeting::ballot:
    return "warp_ballot";
  case Meeting::either:
    return "warp_or";
  case Meeting::shuffle:
    return "shuffle";
  case Meeting::none:
    break;
  }
  return "nothing";
}

void Chain::push_front(Fiber *fiber) {
  fiber->next = head;
  head = fiber;
  if (tail == nullptr) tail = fiber;
}

void Chain::push_front(Chain &chain) {
  if (chain.empty()) return;
  chain.tail->next = head;
  head = chain.head;
  if (tail == nullptr) tail = chain.tail;
  chain = Chain();
}

void Chain::push_back(Fiber *fiber) {
  fiber->next = nullptr;
  (tail == nullptr ? head : tail->next) = fiber;
  tail = fiber;
}

Fiber *Chain::pop_front() {
  Fiber *fiber = head;
  if (fiber != nullptr) {
    head = fiber->next;
    if (head == nullptr) tail = nullptr;
  }
  return fiber;
}

Temper Temper::draw(Random &random) {
  static const uint32_t newest[] = {0, 4, 12, 15};
  static const uint32_t spells[] = {0, 500, 5000, 50000};
  static const uint32_t drains[] = {0, 16, 64, 256};
  Temper temper;
  temper.preempt_mean = 2u << random.below(8);
  temper.newest_of_16 = newest[random.below(4)];
  temper.poller_one_in = 4u << random.below(5);
  temper.starve_steps = spells[random.below(4)];
  temper.drain_one_in = drains[random.below(4)];
  return temper;
}
} // namespace cpu
} // namespace ty

using namespace ty::cpu;

void ty_exec::make_ready(Fiber *fiber) {
  if (seeded) {
    ready_set.push_back(fiber);
  } else {
    ready.push_front(fiber);
  }
}

void ty_exec::make_ready(Chain &chain) {
  if (seeded) {
    for (Fiber *fiber = chain.head; fiber != nullptr; fiber = fiber->next) ready_set.push_back(fiber);
    chain = Chain();
  } else {
    ready.push_front(chain);
  }
}

void ty_exec::end_time_slice() {
  if (!preempted.empty() && preempted.head->warp_of != running->warp_of) ready.push_front(preempted);
  preempted.push_back(running);
  leave();
}

Fiber *ty_exec::take(std::vector<Fiber *> &set, uint32_t index) {
  Fiber *fiber = set[index];
  set[index] = set.back();
  set.pop_back();
  return fiber;
}

// A ready fiber's index: the newest, or any, passing over the starved block where others are ready.
uint32_t ty_exec::choose_ready() {
  const uint32_t count = static_cast<uint32_t>(ready_set.size());
  if (temper.starve_steps != 0) {
    if (starve_left == 0) {
      starved = starved == nullptr ? ready_set[random.below(count)]->block_of : nullptr;
      starve_left = 1 + random.below(temper.starve_steps);
    }
    --starve_left;
  }
  uint32_t index = random.below(16) < temper.newest_of_16 ? count - 1 : random.below(count);
  for (int tries = 0; tries < 4 && starved != nullptr && ready_set[index]->block_of == starved; ++tries) {
    index = random.below(count);
  }
  return index;
}

// Whether a fiber is of the rank that stands still now; afterwards all its fibers are ready again.
bool ty_exec::stands_still(const Fiber &fiber) {
  if (config.stopped_rank == 0 || stopped_until == ~0ull) return false;
  const uint64_t now = clock_ns.load(std::memory_order_relaxed);
  if (stopped_until == 0) {
    if (switches.load(std::memory_order_relaxed) < config.stopped_after) return false;
    stopped_until = now + config.stopped_ns;
  }
  if (now >= stopped_until) {
    stopped_until = ~0ull;
    ready_set.insert(ready_set.end(), stopped_set.begin(), stopped_set.end());
    stopped_set.clear();
    return false;
  }
  return fiber.launch != nullptr && fiber.launch->rank == config.stopped_rank - 1;
}

// The next fiber, taken off its list; nullptr sends the caller to the run loop.
Fiber *ty_exec::pick_seeded() {
  if (ending) return nullptr; // back to end_hosts
  for (;;) {
    const bool any_ready = !ready_set.empty();
    if (pump.load(std::memory_order_relaxed) && (!any_ready || random.below(8) == 0)) return nullptr;
    clock_ns.store(clock_ns.load(std::memory_order_relaxed) + step_ns, std::memory_order_relaxed);
    Fiber *fiber = nullptr;
    if (any_ready && (pollers_set.empty() || random.below(temper.poller_one_in) != 0)) {
      fiber = take(ready_set, choose_ready());
    } else if (!pollers_set.empty()) {
      fiber = take(pollers_set, random.below(static_cast<uint32_t>(pollers_set.size())));
      fiber->polling = false;
    } else {
      return nullptr;
    }
    if (!stands_still(*fiber)) {
      trace = (trace ^ fiber->id) * 0x100000001b3ull;
      return fiber;
    }
    stopped_set.push_back(fiber);
  }
}

inline Fiber *ty_exec::pick() {
  if (seeded) return pick_seeded();
  if (!preempted.empty() && (ready.empty() || ready.head->warp_of != preempted.head->warp_of))
    ready.push_front(preempted);
  Fiber *fiber = ready.pop_front();
  if (fiber != nullptr) return fiber;
  fiber = pollers.pop_front();
  if (fiber != nullptr) fiber->polling = false;
  return fiber;
}

// Gives a fiber a stack. False if there is no memory: then the run loop ends.
bool ty_exec::start(Fiber &fiber) {
  const Stack stack = fiber.launch != nullptr ? device_stacks.take() : host_stacks.take();
  if (stack.low == nullptr) {
    lacks_memory = true;
    return false;
  }
  context_make(fiber.context, stack, fiber_main);
  fiber.started = true;
  return true;
}

// Switches from `from` to next, or to the run loop where next is nullptr, or has no stack.
inline void ty_exec::go(Context &from, Fiber *next, bool ends) {
  running = next;
  current = next;
  switches.store(switches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (next == nullptr) {
    context_switch(from, thread, ends);
    return;
  }
  if (!next->started && !start(*next)) {
    running = nullptr;
    current = nullptr;
    if (&from != &thread) context_switch(from, thread, ends);
    return;
  }
  context_switch(from, next->context, ends);
}

void ty_exec::leave() {
  Fiber *self = running;
  Fiber *next = pick();
  if (next != self) go(self->context, next, false);
}

void ty_exec::poll(const char *site) {
  Fiber *self = running;
  // A host fiber's work is out of sight; waiting elsewhere now shows that it did some.
  if (self->launch == nullptr && self->site != site) ++progress;
  self->site = site;
  self->polling = true;
  if (ending) return leave();
  if (seeded) {
    polled_set.push_back(self);
  } else {
    polled.push_back(self);
  }
  leave();
}

void ty_exec::preempt() {
  accesses_left = 1 + random.below(2 * temper.preempt_mean);
  ready_set.push_back(running);
  leave();
}

void ty_exec::end_fiber(Fiber &fiber) {
  ++progress;
  if (fiber.launch != nullptr) {
    end_thread(fiber);
  } else {
    fiber.ended = true;
    --hosts_live;
  }
}

// Every fiber's life. A device thread that ends hands its stack to the next one that has yet to start.
void ty_exec::fiber_main() {
  ty_exec &exec = *executor;
  context_started(exec.thread);
  for (;;) {
    Fiber *self = exec.running;
    const Stack stack = self->context.stack;
    const bool host = self->launch == nullptr;
    if (host) {
      self->host_entry(self->host_arg);
    } else {
      self->launch->work.kernel->enter(self->launch->work.args.data());
    }
    exec.end_fiber(*self); // a launch that ends with it may be reused from here on
    Fiber *next = exec.pick();
    if (next != nullptr && !next->started && next->launch != nullptr && !host) {
      next->context.stack = stack;
      next->started = true;
      exec.running = next;
      current = next;
      continue;
    }
    Context dead;
    // Lays the next fiber out before this stack is given back, so that it gets another stack.
    if (next != nullptr && !next->started && !exec.start(*next)) next = nullptr;
    (host ? exec.host_stacks : exec.device_stacks).give(stack);
    exec.go(dead, next, true);
  }
}

int ty_exec::run_free() {
  uint32_t yields = 0;
  clock.resume();
  for (;;) {
    if (pump.load(std::memory_order_acquire) && !pump_streams()) return TY_EXEC_NO_MEMORY;
    if (ready.empty() && pollers.empty() && !polled.empty()) {
      // Every waiting fiber has polled in this round.
      (void)clock.look();
      idle_rounds = progress == round_progress ? idle_rounds + 1 : 0;
      if (idle_rounds > idle_before_sleep) {
        usleep(idle_sleep_us);
      } else if (idle_rounds > 0) {
        sched_yield();
      }
      round_progress = progress;
      std::swap(pollers, polled);
    }
    Fiber *next = pick();
    if (next != nullptr) {
      yields = 0;
      go(thread, next, false);
      if (lacks_memory) return TY_EXEC_NO_MEMORY;
      continue;
    }
    if (!launches.empty()) {
      fatal("every thread of a kernel waits for another one to arrive\n%s", waiting_report().c_str());
    }
    if (pump.load(std::memory_order_acquire)) continue;
    if (yields < yields_before_sleep) {
      ++yields;
      sched_yield();
      continue;
    }
    yields = 0;
    std::unique_lock<std::mutex> lock(mutex);
    if (stopping.load(std::memory_order_relaxed) && !pump.load(std::memory_order_relaxed)) return TY_EXEC_OK;
    sleeping = true;
    wake.wait(lock,
              [this] { return pump.load(std::memory_order_relaxed) || stopping.load(std::memory_order_relaxed); });
    sleeping = false;
    clock.resume();
  }
}

// No fiber is ready and every waiting fiber has polled in this round. False: nothing can ever move again.
bool ty_exec::end_of_seeded_round() {
  if (polled_set.empty()) {
    report = waiting_report();
    return false;
  }
  if (progress != round_progress) {
    idle_rounds = 0;
    idle_jumps = 0;
  } else if (++idle_rounds >= rounds_before_jump) {
    if (idle_jumps == 0) report = waiting_report();
    if (idle_jumps++ == jumps_before_hang) return false;
    idle_rounds = rounds_before_jump - rounds_between_jumps;
    clock_ns.store(clock_ns.load(std::memory_order_relaxed) + jump_ns, std::memory_order_relaxed);
    jumped_ns += jump_ns;
  }
  round_progress = progress;
  std::swap(pollers_set, polled_set);
  return true;
}

int ty_exec::run_seeded() {
  for (;;) {
    if (pump.load(std::memory_order_relaxed) && !pump_streams()) return TY_EXEC_NO_MEMORY;
    if (hosts_live == 0 && drained()) return TY_EXEC_OK;
    Fiber *next = pick();
    if (next != nullptr) {
      go(thread, next, false);
      if (lacks_memory) return TY_EXEC_NO_MEMORY;
    } else if (!pump.load(std::memory_order_relaxed) && ready_set.empty() && pollers_set.empty()) {
      if (!end_of_seeded_round()) return TY_EXEC_HANG;
    }
  }
}

uint64_t ty_exec::host_ns() const {
  return clock_ns.load(std::memory_order_relaxed) - jumped_ns + jumped_ns / host_share;
}

void ty_exec::end_hosts() {
  ending = true;
  const uint64_t ended_ns = clock_ns.load(std::memory_order_relaxed);
  const auto began = std::chrono::steady_clock::now();
  const uint64_t scheduled = switches.load(std::memory_order_relaxed);
  while (hosts_live != 0) {
    bool any = false;
    for (const auto &host : hosts) {
      if (host->ended || !host->started) continue;
      any = true;
      go(thread, host.get(), false);
    }
    if (!any) break;
    sched_yield(); // some wait as they leave, for their deadlines or for threads
    const std::chrono::nanoseconds since = std::chrono::steady_clock::now() - began;
    clock_ns.store(ended_ns + static_cast<uint64_t>(since.count()), std::memory_order_relaxed);
  }
  switches.store(scheduled, std::memory_order_relaxed);
  ending = false;
}

std::string ty_exec::waiting_report() const {
  std::string text;
  char line[256];
  for (const auto &host : hosts) {
    if (!host->polling) continue;
    snprintf(line, sizeof line, "host %u: waits at %s\n", host->host_index, host->site);
    text += line;
  }
  for (const auto &launch : launches) {
    for (const Fiber &fiber : launch->fibers) {
      const char *where = nullptr;
      if (fiber.polling) {
        where = fiber.site;
      } else {
        for (const Gathering &gathering : fiber.block_of->gatherings) {
          for (const Fiber *f = gathering.waiting.head; f != nullptr; f = f->next) {
            if (f == &fiber) where = meeting_name(gathering.meeting, false);
          }
        }
        for (const Fiber *f = fiber.warp_of->waiting.head; f != nullptr; f = f->next) {
          if (f == &fiber) where = meeting_name(fiber.warp_of->meeting, true);
        }
      }
      if (where == nullptr) continue;
      snprintf(line, sizeof line, "rank %u: %s block %u thread %u: waits at %s\n", launch->rank,
               launch->work.kernel->name, fiber.block, fiber.thread, where);
      text += line;
    }
  }
  return text;
}
