// Slot arrays: element types and writing of consecutive slots.
#pragma once

#include <cstdint>

#include "pagecore/native/ids.hpp"

namespace pagecore {

// Element type of slots: int64, or int32 for kernels without 64-bit indices.
enum class SlotType : int { Int32 = 0, Int64 = 1 };

inline constexpr int64_t kMaxNarrowSlots = int64_t{1} << 31;  // most slots that int32 can index

// Destination of slots, owned by the caller.
struct SlotsOut {
  void* data;
  int64_t size;
  SlotType type;
};

// Writes `count` consecutive slots; returns a pointer past the last.
template <typename Slot>
Slot* write_run(Slot* out, SlotId first, int64_t count) {
  const auto start = static_cast<Slot>(first);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Slot>(start + static_cast<Slot>(i));
  return out + count;
}

}  // namespace pagecore
