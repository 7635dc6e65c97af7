// The C interface (executor.h): argument checks, and hand-overs between threads. Streams that were not
// destroyed are destroyed with their executor.
#include "ffi/executor.h"

#include <sched.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "schedule.h"

using namespace ty::cpu;

namespace {
constexpr uint32_t default_host_stack = 1u << 20;
constexpr uint32_t default_device_stack = TY_SANITIZED ? 64u << 10 : 16u << 10;
constexpr uint32_t block_limit = 512;         // TY_KERNEL's launch bound
constexpr uint32_t shared_limit = 227u << 10; // as on sm_90 and sm_100
constexpr uint64_t thread_limit = 1u << 20;   // of one launch

const Kernel *find_kernel(const char *name) {
  for (uint32_t i = 0; i < ty_cpu_kernel_count; ++i) {
    if (strcmp(ty_cpu_kernels[i]->name, name) == 0) return ty_cpu_kernels[i];
  }
  return nullptr;
}

int enqueue(ty_stream *stream, Work work) {
  ty_exec &exec = *stream->exec;
  bool sleeping = false;
  {
    std::lock_guard<std::mutex> lock(exec.mutex);
    stream->queue.push_back(std::move(work));
    stream->enqueued.fetch_add(1, std::memory_order_relaxed);
    exec.pump.store(true, std::memory_order_release);
    sleeping = exec.sleeping;
  }
  if (sleeping) exec.wake.notify_one();
  return TY_EXEC_OK;
}
} // namespace

ty_exec::ty_exec(const ty_exec_config &c)
    : config(c), seeded(c.mode == TY_EXEC_SEEDED), hold(seeded && c.hold_stores != 0), random(c.seed),
      temper(Temper::draw(random)),
      device_stacks(c.device_stack_bytes != 0 ? c.device_stack_bytes : default_device_stack),
      host_stacks(c.host_stack_bytes != 0 ? c.host_stack_bytes : default_host_stack) {
  accesses_left = 1 + random.below(2 * temper.preempt_mean);
}

ty_exec::~ty_exec() {
  for (ty_stream *stream : streams) delete stream;
}

ty_exec *ty_exec_create(const ty_exec_config *config) {
  try {
    return new ty_exec(*config);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void ty_exec_destroy(ty_exec *exec) { delete exec; }

int ty_exec_run(ty_exec *exec) {
  executor = exec;
  seeded = exec->seeded;
  time_slice_left = 0;
  const int result = exec->seeded ? exec->run_seeded() : exec->run_free();
  executor = nullptr;
  seeded = false;
  return result;
}

void ty_exec_stop(ty_exec *exec) {
  {
    std::lock_guard<std::mutex> lock(exec->mutex);
    exec->stopping.store(true, std::memory_order_relaxed);
  }
  exec->wake.notify_one();
}

int ty_exec_spawn_host(ty_exec *exec, void (*entry)(void *), void *arg) {
  if (!exec->seeded) return TY_EXEC_BAD_LAUNCH;
  try {
    exec->hosts.emplace_back(new Fiber);
    exec->ready_set.reserve(exec->ready_set.size() + 1);
  } catch (const std::bad_alloc &) {
    return TY_EXEC_NO_MEMORY;
  }
  Fiber &fiber = *exec->hosts.back();
  fiber.host_entry = entry;
  fiber.host_arg = arg;
  fiber.host_index = static_cast<uint32_t>(exec->hosts.size() - 1);
  fiber.id = exec->next_id++;
  ++exec->hosts_live;
  ++exec->progress;
  exec->make_ready(&fiber);
  return TY_EXEC_OK;
}

void ty_exec_host_yield(const char *site) {
  if (ty_exec_on_fiber() != 0) {
    executor->poll(site);
  } else {
    sched_yield();
  }
}

void ty_exec_end_hosts(ty_exec *exec) {
  if (!exec->seeded) return;
  executor = exec;
  seeded = true;
  exec->end_hosts();
  executor = nullptr;
  seeded = false;
}

int ty_exec_ending(void) { return executor != nullptr && executor->ending ? 1 : 0; }

int ty_exec_on_fiber(void) { return executor != nullptr && executor->running != nullptr ? 1 : 0; }

void ty_exec_note_progress(void) {
  if (executor != nullptr) ++executor->progress;
}

uint64_t ty_exec_fiber_now_ns(void) { return executor == nullptr ? 0 : executor->host_ns(); }

ty_stream *ty_stream_create(ty_exec *exec, uint32_t rank) {
  try {
    std::unique_ptr<ty_stream> stream(new ty_stream);
    stream->exec = exec;
    stream->rank = rank;
    std::lock_guard<std::mutex> lock(exec->mutex);
    exec->streams.push_back(stream.get());
    return stream.release();
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void ty_stream_destroy(ty_stream *stream) {
  {
    std::lock_guard<std::mutex> lock(stream->exec->mutex);
    auto &all = stream->exec->streams;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  }
  delete stream;
}

int ty_stream_launch(ty_stream *stream, const char *kernel, uint32_t grid, uint32_t block, uint32_t shared_bytes,
                     const void *args, size_t args_bytes) {
  Work work;
  work.kernel = find_kernel(kernel);
  if (work.kernel == nullptr) return TY_EXEC_UNKNOWN_KERNEL;
  if (grid == 0 || block == 0 || block % warp_lanes != 0 || block > block_limit ||
      static_cast<uint64_t>(grid) * block > thread_limit || shared_bytes > shared_limit ||
      args_bytes != work.kernel->args_bytes) {
    return TY_EXEC_BAD_LAUNCH;
  }
  work.grid = grid;
  work.block = block;
  work.shared_bytes = shared_bytes;
  try {
    work.args.resize((args_bytes + sizeof(ArgsUnit) - 1) / sizeof(ArgsUnit));
    memcpy(work.args.data(), args, args_bytes);
    return enqueue(stream, std::move(work));
  } catch (const std::bad_alloc &) {
    return TY_EXEC_NO_MEMORY;
  }
}

int ty_stream_call(ty_stream *stream, void (*entry)(void *), void *arg) {
  Work work;
  work.call = entry;
  work.call_arg = arg;
  try {
    return enqueue(stream, std::move(work));
  } catch (const std::bad_alloc &) {
    return TY_EXEC_NO_MEMORY;
  }
}

int ty_stream_wait(ty_stream *stream, ty_stream *after) {
  if (stream->exec != after->exec) return TY_EXEC_BAD_LAUNCH;
  try {
    Work passed, waits;
    passed.opens = waits.waits = std::make_shared<bool>(false);
    const int code = enqueue(after, std::move(passed));
    return code == TY_EXEC_OK ? enqueue(stream, std::move(waits)) : code;
  } catch (const std::bad_alloc &) {
    return TY_EXEC_NO_MEMORY;
  }
}

uint64_t ty_stream_enqueued(const ty_stream *stream) { return stream->enqueued.load(std::memory_order_relaxed); }
uint64_t ty_stream_completed(const ty_stream *stream) { return stream->completed.load(std::memory_order_acquire); }

uint64_t ty_exec_now_ns(const ty_exec *exec) {
  return exec->seeded ? exec->clock_ns.load(std::memory_order_relaxed) : exec->clock.now();
}
uint64_t ty_exec_trace_hash(const ty_exec *exec) { return exec->trace; }
void ty_exec::note_load(const void *from) {
  if (host_spans.empty() || running->launch == nullptr) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from);
  auto span = host_spans.upper_bound(at);
  if (span == host_spans.begin() || at - std::prev(span)->first >= std::prev(span)->second) return;
  ty::cpu::Launch &launch = *running->launch;
  ++host_loads;
  if (launch.host_poller == nullptr) launch.host_poller = running;
  if (launch.host_poller != running) ++further_pollers;
}

void ty_exec_share_host(ty_exec *exec, const void *base, uint64_t bytes, int shared) {
  std::lock_guard<std::mutex> lock(exec->mutex);
  const uintptr_t first = reinterpret_cast<uintptr_t>(base);
  try {
    if (shared) exec->host_spans[first] = bytes;
    else exec->host_spans.erase(first);
  } catch (const std::bad_alloc &) {
    // Loads of this memory are not counted.
  }
}

uint64_t ty_exec_host_loads(const ty_exec *exec) { return exec->host_loads; }
uint64_t ty_exec_further_pollers(const ty_exec *exec) { return exec->further_pollers; }
uint64_t ty_exec_switches(const ty_exec *exec) { return exec->switches.load(std::memory_order_relaxed); }
const char *ty_exec_report(const ty_exec *exec) { return exec->report.c_str(); }
int ty_kernel_exists(const char *kernel) { return find_kernel(kernel) != nullptr ? 1 : 0; }
uint64_t ty_exec_guarded_stacks(void) { return guarded_stacks(); }
