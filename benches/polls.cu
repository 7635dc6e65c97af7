// Time in which a GPU's thread reads words of host memory: one, or eight at various distances. The source of
// TY_POLLED_PITCH (kernels/ffi/layout.h); docs/notebook-nodes.md, "Arrivals in a list, metadata ahead".
//
// tests/gpu.sh builds and runs it (section copies), which prints JSON: "look_us" is the mean of 2000 reads one after
// the other, "back_us" the median from the processor's store of the first word until it sees the GPU's answer.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include <cuda_runtime.h>

#ifndef COMMIT
#define COMMIT ""
#endif

namespace {
using Word = unsigned long long;
using Clock = std::chrono::steady_clock;
constexpr uint32_t rounds = 2000, words_there = 512;
constexpr uint64_t patience_ns = 2'000'000'000;

void check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "polls: %s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

__device__ Word load(const Word *word) {
  Word value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Loads `Count` words, `Pitch` words apart, and returns the first.
template <uint32_t Count, uint32_t Pitch> __device__ Word look(const Word *words) {
  Word seen[Count], others = 0;
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) seen[i] = load(words + i * Pitch);
#pragma unroll
  for (uint32_t i = 1; i < Count; ++i) others |= seen[i];
  // The other words stay 0.
  return seen[0] | others;
}

template <uint32_t Count, uint32_t Pitch> __global__ void looks(const Word *words, Word *took_ns) {
  Word all = 0;
  uint64_t begin = now_ns();
  // Each read begins when the one before has ended; all its words are 0.
  for (uint32_t i = 0; i < rounds; ++i) all |= look<Count, Pitch>(words + all);
  *took_ns = (now_ns() - begin) | all;
}

template <uint32_t Count, uint32_t Pitch> __global__ void answers(const Word *words, Word *answer) {
  for (Word round = 1; round <= rounds; ++round) {
    uint64_t begin = now_ns();
    while (look<Count, Pitch>(words) != round)
      if (now_ns() - begin > patience_ns) return;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(answer), "l"(round) : "memory");
  }
}

struct Way {
  uint32_t count, pitch;
  void (*looks)(const Word *, Word *);
  void (*answers)(const Word *, Word *);
};
template <uint32_t Count, uint32_t Pitch> constexpr Way way{Count, Pitch, looks<Count, Pitch>, answers<Count, Pitch>};

double back_us(const Way &way, Word *words, Word *answer) {
  std::atomic_ref<Word> word(*words), answered(*answer);
  std::vector<double> times;
  way.answers<<<1, 1>>>(words, answer);
  check(cudaGetLastError(), "starting to answer");
  for (Word round = 1; round <= rounds; ++round) {
    // At any time within a read.
    auto pause = std::chrono::nanoseconds(2000 + round * 7919 % 3000);
    for (auto since = Clock::now(); Clock::now() - since < pause;) {
    }
    auto begin = Clock::now();
    word.store(round, std::memory_order_release);
    while (answered.load(std::memory_order_acquire) != round)
      if (Clock::now() - begin > std::chrono::nanoseconds(patience_ns))
        check(cudaErrorTimeout, "waiting for an answer");
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  check(cudaDeviceSynchronize(), "answering");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
} // namespace

int main() {
  const Way ways[] = {way<1, 1>, way<2, 1>, way<2, 4>, way<4, 1>, way<8, 1>, way<8, 2>, way<8, 4>, way<8, 16>};
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "asking GPU 0");
  Word *words = nullptr, *answer = nullptr;
  check(cudaHostAlloc(&words, words_there * sizeof(Word), cudaHostAllocMapped), "words");
  check(cudaHostAlloc(&answer, words_there * sizeof(Word), cudaHostAllocMapped), "an answer");
  char date[16];
  const time_t now = time(nullptr);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  printf("{\"device_name\": \"%s\", \"commit\": \"%s\", \"date\": \"%s\", \"rows\": [", device.name, COMMIT, date);
  const char *separator = "\n";
  for (const Way &way : ways) {
    std::fill(words, words + words_there, 0);
    *answer = 0;
    way.looks<<<1, 1>>>(words, answer);
    check(cudaGetLastError(), "starting to look");
    check(cudaDeviceSynchronize(), "looking");
    double look = *answer * 1e-3 / rounds;
    *answer = 0;
    printf("%s  {\"way\": \"words\", \"count\": %u, \"apart_bytes\": %u, \"look_us\": %.2f, \"back_us\": %.2f}",
           separator, way.count, static_cast<uint32_t>(way.pitch * sizeof(Word)), look, back_us(way, words, answer));
    separator = ",\n";
  }
  printf("\n]}\n");
  return 0;
}
