#include "context.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>

#if TY_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// TY_PORTABLE_SWITCH asks for ucontext where the hand-written switch exists, to test it.
#if defined(__x86_64__) && !defined(TY_PORTABLE_SWITCH)
#define TY_OWN_SWITCH 1
#else
#define TY_OWN_SWITCH 0
#include <ucontext.h>
#endif

namespace ty {
namespace cpu {
namespace {
// A guard page splits a mapping in two, and a process has some 65,000 of those; past this many stacks
// none is guarded.
constexpr size_t guards_limit = 8192;
constexpr size_t chunk_limit = 256;
constexpr size_t kept_limit = 64; // chunks kept for the next executor

std::mutex kept_mutex;
size_t guards = 0;

// Never destroyed: an executor may outlive static destruction on another thread.
std::vector<StackPool::Chunk> &kept_chunks() {
  static auto *kept = new std::vector<StackPool::Chunk>;
  return *kept;
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

StackPool::Chunk map_chunk(size_t stacks, size_t stack_bytes) {
  const size_t page = page_bytes();
  const size_t span = stack_bytes + page;
  void *mapped =
      mmap(nullptr, span * stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return {};
  char *base = static_cast<char *>(mapped);
  const bool guarded = guards + stacks <= guards_limit;
  if (guarded) {
    guards += stacks;
    // A stack without its guard still works.
    for (size_t i = 0; i < stacks; ++i) (void)mprotect(base + i * span, page, PROT_NONE);
  }
  return {base, stacks, stack_bytes, guarded};
}
} // namespace

size_t guarded_stacks() {
  std::lock_guard<std::mutex> lock(kept_mutex);
  return guards;
}

StackPool::StackPool(size_t stack_bytes)
    : stack_bytes_((stack_bytes + page_bytes() - 1) / page_bytes() * page_bytes()) {}

StackPool::~StackPool() {
  std::lock_guard<std::mutex> lock(kept_mutex);
  for (const Chunk &chunk : chunks_) {
    if (kept_chunks().size() < kept_limit) {
      kept_chunks().push_back(chunk);
      continue;
    }
    const size_t bytes = chunk.stacks * (chunk.stack_bytes + page_bytes());
#if TY_ASAN
    __asan_unpoison_memory_region(chunk.base, bytes);
#endif
    munmap(chunk.base, bytes);
    if (chunk.guarded) guards -= chunk.stacks;
  }
}

void StackPool::grow() {
  std::lock_guard<std::mutex> lock(kept_mutex);
  std::vector<Chunk> &kept = kept_chunks();
  const auto place =
      std::find_if(kept.begin(), kept.end(), [this](const Chunk &chunk) { return chunk.stack_bytes == stack_bytes_; });
  Chunk chunk;
  if (place != kept.end()) {
    chunk = *place;
    kept.erase(place);
  } else {
    chunk = map_chunk(next_chunk_, stack_bytes_);
    if (chunk.base == nullptr) return;
    if (next_chunk_ < chunk_limit) next_chunk_ *= 2;
  }
  chunks_.push_back(chunk);
  const size_t span = stack_bytes_ + page_bytes();
  for (size_t i = chunk.stacks; i-- > 0;) free_.push_back({chunk.base + i * span + page_bytes(), stack_bytes_});
}

Stack StackPool::take() {
  if (free_.empty()) grow();
  if (free_.empty()) return {};
  const Stack stack = free_.back();
  free_.pop_back();
#if TY_ASAN
  __asan_unpoison_memory_region(stack.low, stack.bytes);
#endif
  return stack;
}

#if TY_OWN_SWITCH
extern "C" {
void ty_context_swap(void **save, void *load);
void ty_context_enter();
}
// Callee-saved registers go on the stack. It leaves by `ret`: fibers mostly suspend and resume in the same
// chain of calls, so that the processor's return predictions stay right. ty_context_enter ends the unwinder's walk.
__asm__(R"(
.text
.p2align 4
.hidden ty_context_swap
.globl ty_context_swap
.type ty_context_swap, @function
ty_context_swap:
  .cfi_startproc
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .cfi_endproc
.size ty_context_swap, .-ty_context_swap
.p2align 4
.hidden ty_context_enter
.globl ty_context_enter
.type ty_context_enter, @function
ty_context_enter:
  .cfi_startproc
  .cfi_undefined rip
  callq *%rbx
  ud2
  .cfi_endproc
.size ty_context_enter, .-ty_context_enter
)");

void context_make(Context &context, Stack stack, void (*entry)()) {
  // From the top: two words of padding that keep the call in ty_context_enter aligned, then what
  // ty_context_swap pops: the address to return to, rbp, rbx (the entry), r12 to r15.
  void **top = reinterpret_cast<void **>(stack.low + stack.bytes) - 2;
  void **sp = top - 7;
  memset(sp, 0, 9 * sizeof(void *));
  sp[6] = reinterpret_cast<void *>(ty_context_enter);
  sp[4] = reinterpret_cast<void *>(entry);
  context.sp = sp;
  context.stack = stack;
  context.fake = nullptr;
}

static inline void swap(Context &from, Context &to) { ty_context_swap(&from.sp, to.sp); }
#else
void context_make(Context &context, Stack stack, void (*entry)()) {
  // The record lives at the stack's low end.
  ucontext_t *record = new (stack.low) ucontext_t;
  getcontext(record);
  record->uc_stack.ss_sp = stack.low + sizeof(ucontext_t);
  record->uc_stack.ss_size = stack.bytes - sizeof(ucontext_t);
  record->uc_link = nullptr;
  makecontext(record, entry, 0);
  context.sp = record;
  context.stack = stack;
  context.fake = nullptr;
}

static inline void swap(Context &from, Context &to) {
  ucontext_t record;
  from.sp = &record;
  swapcontext(&record, static_cast<ucontext_t *>(to.sp));
}
#endif

#if TY_ASAN
void context_switch(Context &from, Context &to, bool ends) {
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake, to.stack.low, to.stack.bytes);
  swap(from, to);
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
}
void context_started(Context &thread) {
  const void *low = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
  if (thread.stack.low == nullptr) thread.stack = {const_cast<char *>(static_cast<const char *>(low)), bytes};
}
#else
void context_switch(Context &from, Context &to, bool) { swap(from, to); }
void context_started(Context &) {}
#endif
} // namespace cpu
} // namespace ty
