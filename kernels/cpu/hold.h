// Store buffers of the seeded mode's hold_stores: plain stores that their releases have not yet published.
//
// A store starts in its fiber's buffer. A block or warp barrier moves it to the block's buffer, a gpu-scope release to
// the rank's, a system-scope release to memory; the end of a kernel publishes all. A load looks through the caller's
// own three buffers, newest first, then memory, so that a missing or too narrow release shows as stale bytes to the
// threads that lacked it. The unit is a line of 16 bytes with a mask of the bytes that are held. Not modelled: missing
// acquires; loads always see the newest bytes that they may see. A release to its own block alone (atomic_count_block)
// has a warp barrier before it, so only the conformance test on a GPU can find it missing.
#ifndef TY_CPU_HOLD_H
#define TY_CPU_HOLD_H
#include <stddef.h>
#include <stdint.h>
#include <vector>

namespace ty {
namespace cpu {
constexpr uintptr_t line_bytes = 16;

struct Line {
  alignas(16) uint8_t bytes[line_bytes];
  uintptr_t address; // a multiple of line_bytes
  uint32_t mask;     // bit i: bytes[i] is held
};

// Held lines by address. The dense array's order depends on the program alone, never on addresses.
class LineMap {
public:
  bool empty() const { return lines_.empty(); }
  size_t size() const { return lines_.size(); }
  const Line &at(size_t index) const { return lines_[index]; }
  const Line *find(uintptr_t address) const;
  void put(uintptr_t address, uint32_t mask, const uint8_t *bytes); // newer than what is held
  void drop(uintptr_t address, uint32_t mask);                      // forgets those bytes
  void clear();
  void move_to(LineMap &outer); // outer's bytes are older
  void move_to_memory();

private:
  size_t slot_of(uintptr_t address) const;
  size_t first_slot(uintptr_t address) const { return (address / line_bytes * 0x9e3779b97f4a7c15ull) >> shift_; }
  void rebuild(size_t slots);
  void remove(size_t slot);
  std::vector<Line> lines_;
  std::vector<uint32_t> slots_; // index + 1 into lines_, 0 where free; linear probing
  unsigned shift_ = 64;
};

void write_line(const Line &line); // to memory
} // namespace cpu
} // namespace ty
#endif
