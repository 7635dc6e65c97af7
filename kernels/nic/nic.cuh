// The emulated NIC: a kernel that stays on the GPU of a source rank and copies what the host asks for.
//
// Beside the data path: for runs between GPUs of one host whose ranks count as several nodes. The link's speed is set
// by transport/network/emulated/mod.rs; this kernel copies as fast as it can. On a stream of its own.
//
//   host ring ──▶ block 0, warp 0 ──▶ device ring ──▶ groups of blocks, request n to group n mod groups: its blocks
//                 (one thread polls host memory)     copy their parts, fence and count; the last to count notifies the
//                 host
//
// There are several groups, so that no request waits for the fences of the one before; completions may come out of
// order. A launch ends when the host asks for it, or once nothing was requested for idle_ns; the host launches the
// kernel again when there is work. So whoever waits for the GPU to be idle waits no longer than idle_ns. The waits here
// are the only ones without a deadline: block 0 ends by those two conditions, and all others when block 0 publishes its
// end.
#pragma once
#include "common/waits.cuh"

namespace ty {

// Vectors that a thread has under way.
constexpr u32 nic_vectors = 8;
// Looks at the ring between two checks of the clock.
constexpr u32 nic_polls_between_checks = 32;

struct NicShared {
  u64 until;
};

TY_DEVICE ty_nic_host *nic_host(const ty_nic_args &a) { return pointer<ty_nic_host>(a.host); }
TY_DEVICE ty_nic_device *nic_device(const ty_nic_args &a) { return pointer<ty_nic_device>(a.device); }

// The calling block's group.
struct NicGroup {
  u32 number;
  u32 groups;
  u32 place; // of the block among the group's
  u32 blocks;
};

TY_DEVICE NicGroup nic_group(const ty_nic_args &a) {
  u32 blocks = block_count() - 1, groups = blocks / a.group_blocks;
  u32 own = block_index() - 1, number = own % groups;
  return {number, groups, own / groups, (blocks - number + groups - 1) / groups};
}

// Parts that a request is copied in: each is what a block has under way at once, as far as there are blocks.
TY_DEVICE u32 nic_parts(u64 bytes, u32 blocks) {
  u64 part_bytes = 16 * nic_vectors * block_threads(), parts = (bytes + part_bytes - 1) / part_bytes;
  return parts < blocks ? static_cast<u32>(parts) : blocks;
}

// ---- block 0 ---------------------------------------------------------------------------------------------

// Requests that are passed on together: one trip over PCIe for all of them.
constexpr u32 nic_batch = 8;
constexpr u32 nic_request_words = sizeof(ty_nic_request) / sizeof(u64);
static_assert(nic_batch * nic_request_words <= warp_size, "a lane a word");

// Passes `count` requests on, a word a lane. The slots are free: the host posts request n only once request
// n - TY_NIC_SLOTS is completed, and so read by all of its group. By a warp.
TY_DEVICE void pass_on(const ty_nic_args &a, u64 first, u32 count) {
  u64 slot = (first + lane_index() / nic_request_words) % TY_NIC_SLOTS;
  u64 at = slot * nic_request_words + lane_index() % nic_request_words;
  if (lane_index() < count * nic_request_words) {
    const u64 *from = reinterpret_cast<const u64 *>(nic_host(a)->requests) + at;
    store(reinterpret_cast<u64 *>(nic_device(a)->requests) + at, load_relaxed_sys(from));
  }
  warp_barrier();
  // C1: acquired by follow.
  if (lane_index() == 0) store_release_gpu(&nic_device(a)->relayed, first + count);
}

// By warp 0 of block 0, whose first thread is the one that polls host memory.
TY_DEVICE void relay(const ty_nic_args &a) {
  u64 relayed = a.begin, since = now_ns();
  bool leads = lane_index() == 0;
  for (u32 poll = 1;; ++poll) {
    // C1: released by the host after the requests; the barrier orders the other lanes' loads after the acquire.
    u64 word = shuffle(leads ? load_acquire_sys(&nic_host(a)->posted) : 0, 0);
    warp_barrier();
    u64 posted = word & ~TY_NIC_STOP;
    if (relayed < posted) {
      u32 count = posted - relayed < nic_batch ? static_cast<u32>(posted - relayed) : nic_batch;
      pass_on(a, relayed, count);
      relayed += count;
      since = now_ns();
      continue;
    }
    if (word & TY_NIC_STOP) break;
    bool looks = leads && poll % nic_polls_between_checks == 0;
    if (warp_ballot(looks && now_ns() - since > a.idle_ns) != 0) break;
    spin_pause("network request");
  }
  // C1: acquired by follow, which then sees the last request that was passed on.
  if (leads) store_release_gpu(&nic_device(a)->ending, a.launch);
}

// ---- the other blocks ------------------------------------------------------------------------------------

// Waits until request `next` is there. Returns how many there are by now: `next` or fewer if it will never come. By
// thread 0.
TY_DEVICE u64 follow(const ty_nic_args &a, u64 next) {
  for (;;) {
    // C1, in this order: a thread that sees the end sees all that was passed on before it.
    u64 ending = load_acquire_gpu(&nic_device(a)->ending);
    u64 relayed = load_acquire_gpu(&nic_device(a)->relayed);
    if (relayed > next || ending == a.launch) return relayed;
    spin_pause("network relay");
  }
}

// Copies vectors begin to end, all of a thread's loads ahead of their stores.
TY_DEVICE void copy_vectors(char *to, const char *from, u64 begin, u64 end) {
  u64 step = block_threads();
  for (u64 v = begin + thread_index(); v < end; v += nic_vectors * step) {
    Vec16 row[nic_vectors];
    TY_UNROLL
    for (u32 i = 0; i < nic_vectors; ++i)
      if (v + i * step < end) row[i] = load16(from + (v + i * step) * 16);
    TY_UNROLL
    for (u32 i = 0; i < nic_vectors; ++i)
      if (v + i * step < end) store16(to + (v + i * step) * 16, row[i]);
  }
}

TY_DEVICE void copy_bytes(char *to, const char *from, u64 begin, u64 end) {
  for (u64 i = begin + thread_index(); i < end; i += block_threads())
    store(reinterpret_cast<u8 *>(to) + i, load(reinterpret_cast<const u8 *>(from) + i));
}

// Copies one of the parts of a request: vectors where both ends are alike modulo 16, as they are on the data path; the
// few bytes before and after them go with the first part. Byte by byte where the ends are not alike.
TY_DEVICE void copy_part(const ty_nic_request &r, u32 part, u32 parts) {
  char *to = reinterpret_cast<char *>(r.target);
  const char *from = reinterpret_cast<const char *>(r.source);
  if ((r.source ^ r.target) % 16 != 0) {
    copy_bytes(to, from, r.bytes * part / parts, r.bytes * (part + 1) / parts);
    return;
  }
  u64 head = (16 - r.source % 16) % 16;
  if (head > r.bytes) head = r.bytes;
  u64 vectors = (r.bytes - head) / 16;
  copy_vectors(to + head, from + head, vectors * part / parts, vectors * (part + 1) / parts);
  if (part != 0) return;
  copy_bytes(to, from, 0, head);
  copy_bytes(to, from, head + vectors * 16, r.bytes);
}

// Carries out one request, by a whole block of its group: its part, if it has one, and its count. Every block of the
// group counts every request of the group, so that a completion shows that no block looks at the slot any more.
TY_DEVICE void carry_out(const ty_nic_args &a, const NicGroup &group, u64 number) {
  ty_nic_device *device = nic_device(a);
  const ty_nic_request *slot = &device->requests[number % TY_NIC_SLOTS];
  const ty_nic_request r{load(&slot->source), load(&slot->target), load(&slot->bytes), 0};
  u32 parts = nic_parts(r.bytes, group.blocks);
  if (group.place < parts) copy_part(r, group.place, parts);
  block_barrier();
  if (thread_index() != 0) return;
  // C2: each block's part before its count, all parts before the last block's word.
  if (group.place < parts) fence_acq_rel_sys();
  u32 *counted = &device->counted[number % TY_NIC_SLOTS];
  if (atomic_add_gpu(counted, 1u) != group.blocks - 1) return;
  store(counted, 0u);
  // C2: acquired by the host: the payload is in place.
  store_release_sys(&nic_host(a)->completed[number % TY_NIC_SLOTS], number + 1);
}

// The last block of a launch notifies the host that the launch has ended. By thread 0.
TY_DEVICE void leave(const ty_nic_args &a) {
  ty_nic_device *device = nic_device(a);
  // C3: no block reads a request any more.
  if (atomic_add_gpu(&device->leaving, 1u) != block_count() - 1) return;
  store(&device->leaving, 0u);
  store_relaxed_sys(&nic_host(a)->relayed, load_relaxed_gpu(&device->relayed));
  // C3: acquired by the host, which may launch again.
  store_release_sys(&nic_host(a)->ended, a.launch);
}

// Two blocks or more.
TY_KERNEL(ty_nic, ty_nic_args) {
  if (block_index() == 0) {
    if (warp_index() != 0) return;
    relay(a);
    if (lane_index() == 0) leave(a);
    return;
  }
  NicShared &shared = block_shared<NicShared>();
  NicGroup group = nic_group(a);
  u64 next = a.begin + group.number;
  for (;;) {
    if (thread_index() == 0) store(&shared.until, follow(a, next));
    block_barrier();
    u64 until = load(&shared.until);
    // Before thread 0 writes it again.
    block_barrier();
    if (until <= next) break;
    for (; next < until; next += group.groups) carry_out(a, group, next);
  }
  if (thread_index() == 0) leave(a);
}

} // namespace ty
