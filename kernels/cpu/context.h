// Stacks and the switch between them: the machine-dependent part of the executor.
//
// Runs on the executor's thread; independent of schedules. x86-64 has a hand-written switch of a few
// nanoseconds; other processors use ucontext. Floating-point control words are not switched: all code
// of a process runs under the default ones.
#ifndef TY_CPU_CONTEXT_H
#define TY_CPU_CONTEXT_H
#include <stddef.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define TY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TY_ASAN 1
#endif
#endif
#ifndef TY_ASAN
#define TY_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__) || TY_ASAN
#define TY_SANITIZED 1
#else
#define TY_SANITIZED 0
#endif

namespace ty {
namespace cpu {
struct Stack {
  char *low = nullptr; // lowest usable byte; the page below is inaccessible where that came cheap
  size_t bytes = 0;
};

// Stacks of one size, in mapped chunks. Chunks outlive their pool: a process that makes many executors,
// as tests do, maps their stacks once.
class StackPool {
public:
  explicit StackPool(size_t stack_bytes);
  ~StackPool();
  StackPool(const StackPool &) = delete;
  StackPool &operator=(const StackPool &) = delete;
  Stack take(); // low == nullptr where memory is lacking
  void give(Stack stack) { free_.push_back(stack); }

  struct Chunk {
    char *base = nullptr;
    size_t stacks = 0;
    size_t stack_bytes = 0;
    bool guarded = false; // counted against the limit of guard pages
  };

private:
  void grow();
  size_t stack_bytes_;
  std::vector<Stack> free_;
  std::vector<Chunk> chunks_;
  size_t next_chunk_ = 16; // stacks in the next new chunk; doubles up to a limit
};

// Stacks that have a guard page now, in all executors and in what is kept for the next.
size_t guarded_stacks();

// A suspended flow of control.
struct Context {
  void *sp = nullptr;   // the saved stack pointer (ucontext: the saved record)
  Stack stack;          // the stack it runs on; for the thread's own, learnt at the first switch away
  void *fake = nullptr; // AddressSanitizer's shadow of its frames
};

// Lays `context` out on `stack` so that the first switch to it calls entry(), which never returns.
void context_make(Context &context, Stack stack, void (*entry)());
// Suspends `from` (the running one) and resumes `to`. With `ends`, `from` is never resumed.
void context_switch(Context &from, Context &to, bool ends);
// The first thing that entry() calls; `thread` is the context of the OS thread's own stack.
void context_started(Context &thread);
} // namespace cpu
} // namespace ty
#endif
