// How fast a GPU's blocks move bytes, in bare copies and sums of rows, in two ways: loads and stores of 16 bytes per
// lane, or bulk copies through shared memory (cp.async.bulk with mbarriers). The floor of large calls, and why kernels/
// has no bulk copies: docs/notebook.md, "24 SMs".
//
// tests/gpu.sh builds and runs it (section copies), which prints JSON.
//
// Rows of 7392 bytes (fp8 with scales, hidden 7168) are copied, to one place each or to four, in the GPU's own memory
// ("own", in older results "near") or a second GPU's ("peer", "far"); sums are of 4 rows of 7168 bf16 each. Medians of
// 20 launches, in microseconds; "gbs" counts bytes read and written. All rows are random: equal bits would cost the
// memory less.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#ifndef COMMIT
#define COMMIT ""
#endif

namespace {
constexpr uint32_t threads = 512, block_warps = threads / 32, rows = 8160, row_bytes = 7392,
                   row_vectors = row_bytes / 16;
constexpr uint32_t sum_bytes = 14336, sum_vectors = sum_bytes / 16, terms = 4;
constexpr uint32_t shared_bytes = 225 * 1024, barrier_bytes = 2048;

void check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "copies: %s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

__device__ uint32_t in_shared(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void barrier_init(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(in_shared(barrier)) : "memory");
}

// Starts a load of `bytes` of global memory that the barrier counts.
__device__ void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(in_shared(barrier)), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_shared(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(in_shared(barrier))
      : "memory");
}

__device__ void bulk_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred there;\n wait: mbarrier.try_wait.parity.shared.b64 there, [%0], %1;\n @!there bra wait;\n}" ::"r"(
          in_shared(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void bulk_store(void *to, const void *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(in_shared(from)), "r"(bytes)
               : "memory");
}

extern __shared__ __align__(128) unsigned char shared[];

// ---- copies --------------------------------------------------------------------------------------------------------

// A warp per row, 7 vectors per lane in flight, as in kernels/.
__global__ void __launch_bounds__(threads, 1) copy_by_lanes(const char *from, char *to, uint32_t places, uint32_t) {
  constexpr uint32_t ahead = 7;
  uint32_t lane = threadIdx.x % 32;
  for (uint32_t row = blockIdx.x * block_warps + threadIdx.x / 32; row < rows; row += gridDim.x * block_warps) {
    for (uint32_t first = lane; first < row_vectors; first += ahead * 32) {
      uint4 data[ahead];
#pragma unroll
      for (uint32_t i = 0; i < ahead; ++i)
        if (first + i * 32 < row_vectors)
          data[i] = reinterpret_cast<const uint4 *>(from + uint64_t{row} * row_bytes)[first + i * 32];
#pragma unroll 1
      for (uint32_t place = 0; place < places; ++place)
#pragma unroll
        for (uint32_t i = 0; i < ahead; ++i)
          if (first + i * 32 < row_vectors)
            reinterpret_cast<uint4 *>(to + (uint64_t{row} * places + place) * row_bytes)[first + i * 32] = data[i];
    }
  }
}

// A warp per row, two rows of shared memory each; a lane per place.
__global__ void __launch_bounds__(threads, 1)
    copy_in_bulk(const char *from, char *to, uint32_t places, uint32_t warps) {
  constexpr uint32_t stages = 2, pitch = 7424;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= warps) return;
  uint32_t begin = blockIdx.x * warps + warp, step = gridDim.x * warps;
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared) + warp * stages;
  unsigned char *rows_here = shared + barrier_bytes + warp * stages * pitch;
  auto ask = [&](uint32_t n) {
    uint32_t row = begin + n * step, stage = n % stages;
    if (lane == 0 && row < rows)
      bulk_load(rows_here + stage * pitch, from + uint64_t{row} * row_bytes, row_bytes, barriers + stage);
  };
  if (lane == 0)
    for (uint32_t stage = 0; stage < stages; ++stage) barrier_init(barriers + stage);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  ask(0);
  for (uint32_t n = 0, row = begin; row < rows; ++n, row += step) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
    ask(n + 1);
    bulk_wait(barriers + n % stages, n / stages & 1);
    if (lane < places)
      bulk_store(to + (uint64_t{row} * places + lane) * row_bytes, rows_here + n % stages * pitch, row_bytes);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- sums ----------------------------------------------------------------------------------------------------------

__device__ void add(float (&sum)[8], const uint4 &data, float weight) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
  }
}

__device__ uint4 rounded(const float (&sum)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = *reinterpret_cast<uint32_t *>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp per sum, 8 vectors per lane in flight: of 2 rows, as in kernels/.
__global__ void __launch_bounds__(threads, 1) sum_by_lanes(const char *from, char *to, uint32_t, uint32_t warps) {
  constexpr uint32_t groups = 4;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= warps) return;
  for (uint32_t row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps) {
    for (uint32_t first = lane; first < sum_vectors; first += groups * 32) {
      float sums[groups][8] = {};
      for (uint32_t term = 0; term < terms; term += 2) {
        uint4 data[2][groups];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
          for (uint32_t i = 0; i < groups; ++i)
            data[r][i] =
                reinterpret_cast<const uint4 *>(from + (uint64_t{row} * terms + term + r) * sum_bytes)[first + i * 32];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
          for (uint32_t i = 0; i < groups; ++i) add(sums[i], data[r][i], 0.5f + static_cast<float>(term + r));
      }
#pragma unroll
      for (uint32_t i = 0; i < groups; ++i)
        reinterpret_cast<uint4 *>(to + uint64_t{row} * sum_bytes)[first + i * 32] = rounded(sums[i]);
    }
  }
}

// A warp per sum; pieces of its rows, 1 KiB each, in `slots` places of shared memory.
template <uint32_t slots>
__global__ void __launch_bounds__(threads, 1) sum_in_bulk(const char *from, char *to, uint32_t, uint32_t warps) {
  constexpr uint32_t piece = 1024, vectors = piece / 512, pieces = sum_bytes / piece * terms;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= warps) return;
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared) + warp * slots;
  unsigned char *ring = shared + barrier_bytes + warp * slots * piece;
  if (lane == 0)
    for (uint32_t slot = 0; slot < slots; ++slot) barrier_init(barriers + slot);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  uint32_t asked = 0, taken = 0; // of all rows
  for (uint32_t row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps) {
    uint32_t n = 0; // of this row
    auto ask = [&] {
      if (n == pieces) return;
      const char *at = from + (uint64_t{row} * terms + n % terms) * sum_bytes + n / terms * piece;
      if (lane == 0) bulk_load(ring + asked % slots * piece, at, piece, barriers + asked % slots);
      ++asked;
      ++n;
    };
    while (n < slots) ask();
    for (uint32_t first = 0; first < sum_bytes; first += piece) {
      float sums[vectors][8] = {};
      for (uint32_t term = 0; term < terms; ++term, ++taken) {
        bulk_wait(barriers + taken % slots, taken / slots & 1);
        const uint4 *data = reinterpret_cast<const uint4 *>(ring + taken % slots * piece);
#pragma unroll
        for (uint32_t i = 0; i < vectors; ++i) add(sums[i], data[lane + i * 32], 0.5f + static_cast<float>(term));
        __syncwarp();
        ask();
      }
#pragma unroll
      for (uint32_t i = 0; i < vectors; ++i)
        reinterpret_cast<uint4 *>(to + uint64_t{row} * sum_bytes + first)[lane + i * 32] = rounded(sums[i]);
    }
  }
}

// ---- the table -----------------------------------------------------------------------------------------------------

__global__ void fill(uint32_t *words, uint64_t count) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
    words[i] = ((x ^ x >> 15) & 0x3fff3fffu); // bf16 pairs without infinities
  }
}

struct Way {
  const char *name;
  void (*kernel)(const char *, char *, uint32_t, uint32_t);
  uint32_t warps;
  bool sums;
};
} // namespace

int main() {
  const Way ways[] = {
      {"copy by lanes", copy_by_lanes, 16, false},      {"copy in bulk", copy_in_bulk, 14, false},
      {"sum by lanes", sum_by_lanes, 12, true},         {"sum by lanes", sum_by_lanes, 16, true},
      {"sum in bulk, 6 KiB", sum_in_bulk<6>, 16, true}, {"sum in bulk, 12 KiB", sum_in_bulk<12>, 16, true}};
  constexpr uint64_t bytes = uint64_t{rows} * terms * sum_bytes;
  int devices = 0;
  cudaDeviceProp device;
  check(cudaGetDeviceCount(&devices), "counting GPUs");
  check(cudaGetDeviceProperties(&device, 0), "asking GPU 0");
  char *from = nullptr, *places[2] = {};
  check(cudaMalloc(&from, bytes), "memory to read");
  check(cudaMalloc(&places[0], bytes), "memory to write");
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t *>(from), bytes / 4);
  check(cudaDeviceSynchronize(), "filling");
  if (devices > 1) {
    check(cudaSetDevice(1), "GPU 1");
    check(cudaMalloc(&places[1], bytes), "memory of GPU 1");
    check(cudaSetDevice(0), "GPU 0");
    check(cudaDeviceEnablePeerAccess(1, 0), "access to GPU 1");
  }
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event");
  check(cudaEventCreate(&end), "an event");
  char date[16];
  const time_t now = time(nullptr);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  printf("{\"device_name\": \"%s\", \"commit\": \"%s\", \"date\": \"%s\", \"rows\": [", device.name, COMMIT, date);
  const char *separator = "\n";
  for (uint32_t blocks : {24u, static_cast<uint32_t>(device.multiProcessorCount)})
    for (const Way &way : ways)
      for (uint32_t copies : {1u, 4u})
        for (int peer = 0; peer < 2; ++peer) {
          if (!places[peer] || (copies > 1 && (peer || way.sums))) continue;
          check(cudaFuncSetAttribute(way.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), way.name);
          std::vector<float> times;
          for (int i = 0; i < 20; ++i) {
            check(cudaEventRecord(begin), "an event");
            way.kernel<<<blocks, threads, shared_bytes>>>(from, places[peer], copies, way.warps);
            check(cudaGetLastError(), way.name);
            check(cudaEventRecord(end), "an event");
            check(cudaEventSynchronize(end), way.name);
            float milliseconds = 0;
            check(cudaEventElapsedTime(&milliseconds, begin, end), "a time");
            times.push_back(milliseconds * 1000);
          }
          std::sort(times.begin(), times.end());
          float median = times[times.size() / 2];
          double moved = way.sums ? double{rows} * sum_bytes * (terms + 1) : double{rows} * row_bytes * (1 + copies);
          printf("%s  {\"way\": \"%s\", \"blocks\": %u, \"warps\": %u, \"places\": %u, \"to\": \"%s\", \"us\": %.1f, "
                 "\"gbs\": %.0f}",
                 separator, way.name, blocks, way.warps, copies, peer ? "peer" : "own", median, moved / median * 1e-3);
          separator = ",\n";
        }
  printf("\n]}\n");
  return 0;
}
