// The executor's own records, shared by its parts: schedule.cpp (who runs next), launch.cpp (streams,
// launches), device.cpp (the primitives), executor.cpp (the C interface).
//
// All of it belongs to the executor's thread, except what ty_exec's mutex and atomics cover.
#ifndef TY_CPU_SCHEDULE_H
#define TY_CPU_SCHEDULE_H
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "context.h"
#include "device.h"
#include "ffi/executor.h"
#include "hold.h"

namespace ty {
namespace cpu {
struct Fiber;
struct Launch;

constexpr uint32_t warp_lanes = 32;

// The operations in which threads of a block or warp meet. Threads that meet must be in the same operation.
enum class Meeting : uint8_t { none, barrier, any, ballot, either, shuffle };
const char *meeting_name(Meeting meeting, bool of_warp);

// Fibers linked through Fiber::next.
struct Chain {
  Fiber *head = nullptr;
  Fiber *tail = nullptr;
  bool empty() const { return head == nullptr; }
  void push_front(Fiber *fiber);
  void push_front(Chain &chain); // empties it
  void push_back(Fiber *fiber);
  Fiber *pop_front();
};

// Results are kept by the parity of `meeting_number`: nobody arrives at meeting n + 2 before all have left n.
struct Warp {
  Chain waiting;
  uint32_t arrived = 0;
  uint32_t exited = 0;
  uint32_t meeting_number = 0;
  Meeting meeting = Meeting::none;
  uint32_t bits[2] = {0, 0};
  uint64_t value[2][32];
};

struct Gathering {
  Chain waiting;
  uint32_t arrived = 0;
  uint32_t meeting_number = 0;
  Meeting meeting = Meeting::none;
  bool any[2] = {false, false};
};

// Gatherings of a block: of all its threads, and of teams of its warps.
constexpr uint32_t block_gatherings = 4;

struct Block {
  Gathering gatherings[block_gatherings];
  uint32_t live = 0; // threads that have not exited
  std::unique_ptr<uint8_t[], void (*)(void *)> shared{nullptr, nullptr};
  uint64_t shared_bytes = 0;
  LineMap held;
};

// A device thread, or (launch == nullptr) a host fiber of the seeded mode.
struct Fiber : Thread {
  Fiber *next = nullptr;
  Block *block_of = nullptr;
  Warp *warp_of = nullptr;
  Launch *launch = nullptr;
  const char *site = nullptr; // of its last wait loop; nullptr if it has not waited
  bool started = false;
  bool polling = false; // on a poller list
  bool ended = false;   // a host fiber that has returned
  uint32_t id = 0;      // by order of creation; what the trace hash is made of
  Context context;
  LineMap held;
  void (*host_entry)(void *) = nullptr;
  void *host_arg = nullptr;
  uint32_t host_index = 0;
};

struct alignas(64) ArgsUnit {
  uint8_t bytes[64];
};

// One piece of a stream's work: a kernel; a host function where kernel == nullptr; only a gate where call == nullptr,
// too. It begins once the gate that it waits for is open, and opens its own gate when it is done (gates are guarded by
// the executor's mutex).
struct Work {
  std::shared_ptr<bool> waits;
  std::shared_ptr<bool> opens;
  const Kernel *kernel = nullptr;
  uint32_t grid = 0;
  uint32_t block = 0;
  uint32_t shared_bytes = 0;
  std::vector<ArgsUnit> args;
  void (*call)(void *) = nullptr;
  void *call_arg = nullptr;
};

// A kernel under way. Records are reused, with the arrays that they have grown.
struct Launch {
  ty_stream *stream = nullptr;
  Work work;
  uint32_t rank = 0;
  uint32_t live = 0;                  // threads that have not exited
  const Fiber *host_poller = nullptr; // the first to load from shared host memory
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
};

// A small generator (wyrand's shape): 64-bit state, one multiplication a draw.
class Random {
public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0xa0761d6478bd642full;
    const unsigned __int128 product = static_cast<unsigned __int128>(state_) * (state_ ^ 0xe7037ed1a0b428dbull);
    return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
  }
  uint32_t below(uint32_t limit) { return static_cast<uint32_t>(((next() >> 32) * limit) >> 32); }

private:
  uint64_t state_;
};

// The character of one seed's schedule. Seeds differ in these numbers too, so that bursts, fine interleavings
// and long starvation all occur.
struct Temper {
  uint32_t preempt_mean; // accesses between preemptions
  uint32_t newest_of_16; // chance that the newest ready fiber runs next
  uint32_t poller_one_in;
  uint32_t starve_steps; // longest spell during which a block is passed over; 0 for never
  uint32_t drain_one_in; // chance that a store lets a held line out early; 0 for never
  static Temper draw(Random &random);
};

uint64_t monotonic_ns();

// The clock of the free mode. A process may be stopped (SIGSTOP, a suspended virtual machine) while its threads wait.
// The time of the stop is no peer's delay, and no deadline may count it. So between two looks the clock advances by one
// step at most. The executor looks once a round of waiting fibers, far more often than once a step, so in a running
// process the clock keeps the time of day. Where the system holds a thread back for longer than a step, deadlines come
// later by the rest. Only the executor's thread looks.
class RunningClock {
public:
  uint64_t look() { return at(monotonic_ns()); }
  // Time without work is no gap: nothing waits, and the clocks of executors stay together.
  void resume() { looked_ns_ = monotonic_ns(); }
  // Any thread; without a look, so a stop that the executor has yet to see counts as time.
  uint64_t now() const { return monotonic_ns() - skipped_ns_.load(std::memory_order_relaxed); }

private:
  static constexpr uint64_t step_ns_ = 100000000;
  uint64_t at(uint64_t now_ns) {
    const uint64_t gap_ns = now_ns - looked_ns_;
    uint64_t skipped_ns = skipped_ns_.load(std::memory_order_relaxed);
    if (gap_ns > step_ns_) skipped_ns_.store(skipped_ns += gap_ns - step_ns_, std::memory_order_relaxed);
    looked_ns_ = now_ns;
    return now_ns - skipped_ns;
  }
  uint64_t looked_ns_ = monotonic_ns();
  std::atomic<uint64_t> skipped_ns_{0};
};

// For mistakes in a kernel and lack of memory under way; nothing could go on.
[[noreturn]] void fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
} // namespace cpu
} // namespace ty

struct ty_stream {
  ty_exec *exec = nullptr;
  uint32_t rank = 0;
  bool busy = false; // guarded by the executor's mutex, as is the queue
  std::deque<ty::cpu::Work> queue;
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> completed{0};
};

struct ty_exec {
  explicit ty_exec(const ty_exec_config &config);
  ~ty_exec();

  const ty_exec_config config;
  const bool seeded;
  const bool hold;
  ty::cpu::Random random;
  const ty::cpu::Temper temper;

  // Other threads' side.
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<ty_stream *> streams;
  bool sleeping = false;
  std::atomic<bool> stopping{false};
  std::atomic<bool> pump{false}; // some stream may have work to start

  // Scheduling.
  ty::cpu::StackPool device_stacks;
  ty::cpu::StackPool host_stacks;
  ty::cpu::Context thread; // the OS thread's own stack, where the run loops live
  ty::cpu::Fiber *running = nullptr;
  ty::cpu::Chain ready;                    // free mode: newest first
  ty::cpu::Chain preempted;                // free mode: fibers of one warp whose time slice ended
  ty::cpu::Chain pollers, polled;          // free mode: fibers that are still to poll in this round, and that have
  std::vector<ty::cpu::Fiber *> ready_set; // the same three in seeded mode, picked from at random
  std::vector<ty::cpu::Fiber *> pollers_set, polled_set;
  std::vector<ty::cpu::Fiber *> stopped_set; // of the rank that stands still
  uint64_t stopped_until = 0;                // 0: not yet; ~0: no more
  bool stands_still(const ty::cpu::Fiber &fiber);
  uint64_t host_ns() const;    // the clock of waits of hosts
  uint64_t progress = 0;       // grows when something happened that a waiting fiber may have waited for
  uint64_t round_progress = 0; // its value when this round of pollers began
  uint32_t idle_rounds = 0;    // rounds without progress in a row
  uint32_t idle_jumps = 0;     // jumps of the clock in a row
  uint32_t accesses_left = 1;  // until the next preemption
  const ty::cpu::Block *starved = nullptr;
  uint32_t starve_left = 0;
  std::atomic<uint64_t> clock_ns{0}; // virtual (seeded mode)
  uint64_t jumped_ns = 0;            // how much of it passed in jumps
  ty::cpu::RunningClock clock;       // free mode
  std::atomic<uint64_t> switches{0};
  uint64_t trace = 0xcbf29ce484222325ull;
  uint32_t next_id = 0;
  std::string report;

  // Host memory that kernels share with the host, by address, and loads of it.
  std::map<uintptr_t, uint64_t> host_spans;
  uint64_t host_loads = 0;
  uint64_t further_pollers = 0;
  void note_load(const void *from);

  // Work under way.
  std::vector<std::unique_ptr<ty::cpu::Launch>> launches, spare_launches;
  std::vector<std::unique_ptr<ty::cpu::Fiber>> hosts;
  uint32_t hosts_live = 0;
  bool lacks_memory = false; // a fiber has no stack: the run ends
  bool ending = false;       // seeded mode: the run hung, and host fibers are resumed one at a time to leave
  std::deque<ty::cpu::LineMap> rank_held;

  // schedule.cpp
  int run_free();
  int run_seeded();
  void end_hosts();
  void make_ready(ty::cpu::Fiber *fiber);
  void make_ready(ty::cpu::Chain &chain); // empties it
  void end_time_slice();                  // free mode: the running fiber goes after its warp's ready ones
  void leave();                           // the running fiber is on some list: runs others until it is picked
  void poll(const char *site);            // the running fiber waits in a loop
  void preempt();                         // seeded: lets others run first
  void access() {                         // seeded: before each access to memory
    if (__builtin_expect(--accesses_left == 0, 0)) preempt();
  }
  void end_fiber(ty::cpu::Fiber &fiber);
  std::string waiting_report() const;

  // launch.cpp
  bool pump_streams();
  bool start(ty_stream *stream, ty::cpu::Work work);
  void end_thread(ty::cpu::Fiber &fiber);
  void finish(ty::cpu::Launch &launch);
  bool drained();
  ty::cpu::LineMap &held_by_rank(uint32_t rank);

private:
  ty::cpu::Fiber *pick();
  ty::cpu::Fiber *pick_seeded();
  ty::cpu::Fiber *take(std::vector<ty::cpu::Fiber *> &set, uint32_t index);
  uint32_t choose_ready();
  bool start(ty::cpu::Fiber &fiber);
  void go(ty::cpu::Context &from, ty::cpu::Fiber *next, bool ends);
  bool end_of_seeded_round();
  static void fiber_main();
};

namespace ty {
namespace cpu {
extern TY_TLS ty_exec *executor; // of this OS thread, while it runs

inline Fiber *running_fiber() { return static_cast<Fiber *>(current); }
} // namespace cpu
} // namespace ty
#endif
