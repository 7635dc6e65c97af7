// Streams and launches: makes enqueued work into fibers, and fibers that have ended into completions.
#include "schedule.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

using namespace ty::cpu;

namespace {
constexpr size_t spare_limit = 8;
constexpr uint64_t shared_alignment = 128;
constexpr uint8_t shared_fill = 0xa5; // shared memory starts with garbage, always the same

// False if there is no memory for it.
bool clean_shared(Block &block, uint64_t bytes) {
  if (block.shared_bytes != bytes) { // of the exact size, so that AddressSanitizer sees its end
    void *memory = nullptr;
    if (bytes != 0 && posix_memalign(&memory, shared_alignment, bytes) != 0) return false;
    block.shared = {static_cast<uint8_t *>(memory), free};
    block.shared_bytes = bytes;
  }
  if (bytes != 0) memset(block.shared.get(), shared_fill, bytes);
  return true;
}
} // namespace

// Starts the head of every stream that is free. A host function runs here, on the OS thread's stack.
// False if there is no memory for a launch: then the run loop ends.
bool ty_exec::pump_streams() {
  pump.store(false, std::memory_order_relaxed);
  bool again = false;
  std::unique_lock<std::mutex> lock(mutex);
  for (size_t i = 0; i < streams.size(); ++i) {
    ty_stream *stream = streams[i];
    if (stream->busy || stream->queue.empty()) continue;
    const std::shared_ptr<bool> &gate = stream->queue.front().waits;
    if (gate != nullptr && !*gate) continue; // whatever opens it pumps again
    if (seeded && random.below(4) != 0) {    // work starts late as often as not
      again = true;
      continue;
    }
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    ++progress;
    if (work.kernel != nullptr) {
      if (!start(stream, std::move(work))) return false;
      continue;
    }
    if (work.call != nullptr) {
      lock.unlock();
      work.call(work.call_arg);
      lock.lock();
    }
    if (work.opens != nullptr) *work.opens = true;
    stream->busy = false;
    again = true; // the stream may have more; and streams may have come and gone meanwhile
    stream->completed.fetch_add(1, std::memory_order_release);
  }
  if (again) pump.store(true, std::memory_order_relaxed);
  return true;
}

// Makes a launch of work. False if there is no memory for it.
bool ty_exec::start(ty_stream *stream, Work work) try {
  std::unique_ptr<Launch> launch;
  if (spare_launches.empty()) {
    launch.reset(new Launch);
  } else {
    launch = std::move(spare_launches.back());
    spare_launches.pop_back();
  }
  const uint32_t threads = work.grid * work.block;
  const uint32_t block_warps = work.block / 32;
  launch->stream = stream;
  launch->rank = stream->rank;
  launch->live = threads;
  launch->host_poller = nullptr;
  // Sized exactly, because reports walk the fibers; the fibers' own memory is kept where the size is the same.
  if (launch->fibers.size() != threads) launch->fibers = std::vector<Fiber>(threads);
  if (launch->blocks.size() != work.grid) launch->blocks = std::vector<Block>(work.grid);
  if (launch->warps.size() != work.grid * block_warps) launch->warps = std::vector<Warp>(work.grid * block_warps);
  for (Block &block : launch->blocks) {
    block.live = work.block;
    for (Gathering &gathering : block.gatherings) {
      gathering.arrived = 0;
      gathering.any[0] = gathering.any[1] = false;
    }
    if (!clean_shared(block, work.shared_bytes)) return false;
  }
  for (Warp &warp : launch->warps) {
    warp.exited = 0;
    warp.bits[0] = warp.bits[1] = 0;
  }
  Chain chain;
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber &fiber = launch->fibers[i];
    Block &block = launch->blocks[i / work.block];
    fiber.thread = i % work.block;
    fiber.block_threads = work.block;
    fiber.block = i / work.block;
    fiber.blocks = work.grid;
    fiber.shared = block.shared.get();
    fiber.shared_bytes = work.shared_bytes;
    fiber.block_of = &block;
    fiber.warp_of = &launch->warps[i / 32];
    fiber.launch = launch.get();
    fiber.site = nullptr;
    fiber.started = false;
    fiber.id = next_id++;
    chain.push_back(&fiber);
  }
  launch->work = std::move(work);
  launches.push_back(std::move(launch));
  make_ready(chain);
  return true;
} catch (const std::bad_alloc &) {
  return false;
}

// A thread of a kernel has returned.
void ty_exec::end_thread(Fiber &fiber) {
  Block &block = *fiber.block_of;
  Warp &warp = *fiber.warp_of;
  Launch &launch = *fiber.launch;
  if (warp.arrived != 0) {
    fatal("%s block %u thread %u: exits while other lanes of its warp wait in %s", launch.work.kernel->name,
          fiber.block, fiber.thread, meeting_name(warp.meeting, true));
  }
  ++warp.exited;
  if (hold) fiber.held.move_to(block.held);
  --block.live;
  Gathering &all = block.gatherings[0];
  if (all.arrived != 0 && all.arrived == block.live) { // the others' barrier waits for it no longer
    all.arrived = 0;
    all.any[++all.meeting_number & 1] = false;
    make_ready(all.waiting);
  }
  if (--launch.live == 0) finish(launch);
}

void ty_exec::finish(Launch &launch) {
  if (hold) {
    held_by_rank(launch.rank).move_to_memory();
    for (Block &block : launch.blocks) block.held.move_to_memory();
  }
  // Another block may or may not come to lie in this one's memory: schedules must not depend on it.
  for (const Block &block : launch.blocks) {
    if (starved == &block) starved = nullptr;
  }
  const auto place = std::find_if(launches.begin(), launches.end(),
                                  [&launch](const std::unique_ptr<Launch> &entry) { return entry.get() == &launch; });
  ty_stream *stream = launch.stream;
  if (spare_launches.size() < spare_limit) spare_launches.push_back(std::move(*place));
  launches.erase(place);
  ++progress;
  std::lock_guard<std::mutex> lock(mutex);
  stream->busy = false;
  if (!stream->queue.empty()) pump.store(true, std::memory_order_relaxed);
  stream->completed.fetch_add(1, std::memory_order_release); // from here on the stream may be destroyed
}

bool ty_exec::drained() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::all_of(streams.begin(), streams.end(),
                     [](const ty_stream *stream) { return !stream->busy && stream->queue.empty(); });
}

LineMap &ty_exec::held_by_rank(uint32_t rank) {
  while (rank_held.size() <= rank) rank_held.emplace_back();
  return rank_held[rank];
}
