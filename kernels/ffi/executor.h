// The CPU device's executor: a fiber scheduler that runs kernels built by the host compiler.
//
// One scheduler runs on one OS thread; fibers never migrate. Two modes:
//   TY_EXEC_FREE    one executor per rank, on a thread of its own; kernels run at full speed.
//   TY_EXEC_SEEDED  the whole world (every rank's host code and kernels) on one thread, under one
//                   seeded schedule with preemption inside every memory primitive; replays exactly.
// C interface, so that Rust binds it (kernels/ffi/executor.rs).
#ifndef TY_EXECUTOR_H
#define TY_EXECUTOR_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ty_exec ty_exec;
typedef struct ty_stream ty_stream;

enum { TY_EXEC_FREE = 0, TY_EXEC_SEEDED = 1 };
enum { TY_EXEC_OK = 0, TY_EXEC_HANG = 1, TY_EXEC_NO_MEMORY = 2, TY_EXEC_UNKNOWN_KERNEL = 3, TY_EXEC_BAD_LAUNCH = 4 };

typedef struct ty_exec_config {
  uint64_t seed;               // of the schedule (seeded mode)
  uint32_t mode;               // TY_EXEC_FREE or TY_EXEC_SEEDED
  uint32_t hold_stores;        // 1: a fiber's plain stores stay in a buffer until its next release (seeded mode)
  uint32_t host_stack_bytes;   // stack of a host fiber, 0 for the default (1 MiB)
  uint32_t device_stack_bytes; // stack of a device fiber, 0 for the default (16 KiB; more under a sanitizer)
  // Seeded mode: after so many switches, kernels of rank stopped_rank - 1 stand still for stopped_ns of the clock;
  // 0: of no rank.
  uint64_t stopped_after;
  uint64_t stopped_ns;
  uint32_t stopped_rank;
  uint32_t reserved;
} ty_exec_config;

// NULL where memory is lacking.
ty_exec *ty_exec_create(const ty_exec_config *config);
void ty_exec_destroy(ty_exec *exec);

// Runs on the calling thread. Free mode: until ty_exec_stop and every stream has drained (sleeps when
// idle, woken by launches). Seeded mode: until every host fiber has returned and every stream has drained.
// Seeded: when a full round of waiting fibers made no progress, writes a report and moves the virtual clock
// forward by 1 s, so that device deadlines fire; after 1000 such jumps in a row without progress: TY_EXEC_HANG.
int ty_exec_run(ty_exec *exec);
void ty_exec_stop(ty_exec *exec); // any thread

// Seeded mode: adds a host fiber that runs entry(arg) (before or during run).
int ty_exec_spawn_host(ty_exec *exec, void (*entry)(void *), void *arg);
// From a host fiber: lets others run; `site` names the wait and must outlive the executor.
void ty_exec_host_yield(const char *site);
// After ty_exec_run answered anything but TY_EXEC_OK, on the same thread: resumes host fibers one after the other, each
// until it yields again or returns, until all have returned. Fibers must leave: entry unwinds from a yield if
// ty_exec_ending answers 1. Nothing else runs any more.
void ty_exec_end_hosts(ty_exec *exec);
int ty_exec_ending(void); // 1 on a host fiber that ty_exec_end_hosts resumed, else 0
// 1 on a fiber of an executor, else 0.
int ty_exec_on_fiber(void);
// From a host fiber: progress was made outside the executor's sight (so that this round is no hang).
void ty_exec_note_progress(void);
// On a fiber of a seeded world: the devices' clock, for which its jumps are shorter, since hosts' waits for kernels are
// to outlast those of kernels. While hosts end (ty_exec_end_hosts) it goes as the system's does.
uint64_t ty_exec_fiber_now_ns(void);

// A stream runs its work in order; streams of one executor run concurrently. Any thread.
ty_stream *ty_stream_create(ty_exec *exec, uint32_t rank);
void ty_stream_destroy(ty_stream *stream); // after it has drained
// Enqueues; copies args. grid blocks of block threads, with shared_bytes of block-shared memory (filled with
// 0xA5 at the start of each block). block must be a multiple of 32.
int ty_stream_launch(ty_stream *stream, const char *kernel, uint32_t grid, uint32_t block, uint32_t shared_bytes,
                     const void *args, size_t args_bytes);
// Enqueues a host function, run by the executor's thread in stream order.
int ty_stream_call(ty_stream *stream, void (*entry)(void *), void *arg);
// Enqueues a wait for all that `after`, of the same executor, has enqueued so far.
int ty_stream_wait(ty_stream *stream, ty_stream *after);
uint64_t ty_stream_enqueued(const ty_stream *stream);  // pieces of work so far
uint64_t ty_stream_completed(const ty_stream *stream); // acquire

uint64_t ty_exec_now_ns(const ty_exec *exec);     // less the time that the process was stopped (free); virtual (seeded)
uint64_t ty_exec_trace_hash(const ty_exec *exec); // of every scheduling decision (seeded)
uint64_t ty_exec_switches(const ty_exec *exec);
// Registers host memory that the kernels share with the host (or, with shared == 0, no longer do), so that loads of it
// are counted (seeded mode): all loads, and loads by threads other than the first of their launch to make one.
void ty_exec_share_host(ty_exec *exec, const void *base, uint64_t bytes, int shared);
uint64_t ty_exec_host_loads(const ty_exec *exec);
uint64_t ty_exec_further_pollers(const ty_exec *exec);
// The last hang report, or "": rank, block, thread and wait site of every waiting fiber, one a line.
const char *ty_exec_report(const ty_exec *exec);
int ty_kernel_exists(const char *kernel);
uint64_t ty_exec_guarded_stacks(void); // fibers' stacks of this process that have a guard page

#ifdef __cplusplus
}
#endif
#endif
