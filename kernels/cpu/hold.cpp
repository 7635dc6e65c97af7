#include "hold.h"

#include <string.h>

#include <algorithm>

namespace ty {
namespace cpu {
static void overlay(uint8_t *bytes, const uint8_t *newer, uint32_t mask) {
  if (mask == 0xffff) {
    memcpy(bytes, newer, line_bytes);
    return;
  }
  for (uint32_t i = 0; i < line_bytes; ++i) {
    if ((mask >> i) & 1u) bytes[i] = newer[i];
  }
}

void write_line(const Line &line) { overlay(reinterpret_cast<uint8_t *>(line.address), line.bytes, line.mask); }

// The slot that holds `address`, or the free slot where it would go.
size_t LineMap::slot_of(uintptr_t address) const {
  size_t slot = first_slot(address);
  while (slots_[slot] != 0 && lines_[slots_[slot] - 1].address != address) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void LineMap::rebuild(size_t slots) {
  slots_.assign(slots, 0);
  shift_ = 64 - static_cast<unsigned>(__builtin_ctzll(slots));
  for (size_t i = 0; i < lines_.size(); ++i) slots_[slot_of(lines_[i].address)] = static_cast<uint32_t>(i + 1);
}

const Line *LineMap::find(uintptr_t address) const {
  if (lines_.empty()) return nullptr;
  const uint32_t index = slots_[slot_of(address)];
  return index == 0 ? nullptr : &lines_[index - 1];
}

void LineMap::put(uintptr_t address, uint32_t mask, const uint8_t *bytes) {
  if ((lines_.size() + 1) * 2 > slots_.size()) rebuild(std::max<size_t>(16, slots_.size() * 2));
  const size_t slot = slot_of(address);
  if (slots_[slot] == 0) {
    Line line;
    memcpy(line.bytes, bytes, line_bytes);
    line.address = address;
    line.mask = mask;
    lines_.push_back(line);
    slots_[slot] = static_cast<uint32_t>(lines_.size());
    return;
  }
  Line &line = lines_[slots_[slot] - 1];
  overlay(line.bytes, bytes, mask);
  line.mask |= mask;
}

void LineMap::drop(uintptr_t address, uint32_t mask) {
  if (lines_.empty()) return;
  const size_t slot = slot_of(address);
  if (slots_[slot] == 0) return;
  Line &line = lines_[slots_[slot] - 1];
  line.mask &= ~mask;
  if (line.mask == 0) remove(slot);
}

void LineMap::remove(size_t hole) {
  const size_t index = slots_[hole] - 1;
  // Close the gap in the probe chain.
  const size_t last = slots_.size() - 1;
  slots_[hole] = 0;
  for (size_t slot = (hole + 1) & last; slots_[slot] != 0; slot = (slot + 1) & last) {
    const size_t distance = (slot - first_slot(lines_[slots_[slot] - 1].address)) & last;
    if (distance >= ((slot - hole) & last)) {
      slots_[hole] = slots_[slot];
      slots_[slot] = 0;
      hole = slot;
    }
  }
  // Fill the gap in the dense array with its last line.
  if (index + 1 != lines_.size()) {
    slots_[slot_of(lines_.back().address)] = static_cast<uint32_t>(index + 1);
    lines_[index] = lines_.back();
  }
  lines_.pop_back();
}

void LineMap::clear() {
  if (lines_.size() * 8 < slots_.size()) {
    // Few lines in a table that once was full. From the last put on, so that each is still found.
    for (size_t i = lines_.size(); i-- > 0;) remove(slot_of(lines_[i].address));
  } else {
    std::fill(slots_.begin(), slots_.end(), 0u);
  }
  lines_.clear();
}

void LineMap::move_to(LineMap &outer) {
  for (const Line &line : lines_) outer.put(line.address, line.mask, line.bytes);
  clear();
}

void LineMap::move_to_memory() {
  for (const Line &line : lines_) write_line(line);
  clear();
}
} // namespace cpu
} // namespace ty
