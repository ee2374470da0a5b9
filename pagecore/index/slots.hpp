// Slots as they are written for callers: of two widths, in runs.
#pragma once

#include <cstdint>

#include "pagecore/native/ids.hpp"

namespace pagecore {

// Slots are written as int64, or as int32 for users without 64-bit integers.
enum class SlotType : int { Int32 = 0, Int64 = 1 };

inline constexpr int64_t kMaxNarrowSlots = int64_t{1} << 31;  // that int32 can name

// Where slots go.
struct SlotsOut {
  void* data;
  int64_t size;
  SlotType type;
};

// Writes `count` consecutive slots; returns the end.
template <typename Slot>
Slot* write_run(Slot* out, SlotId first, int64_t count) {
  const auto start = static_cast<Slot>(first);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Slot>(start + static_cast<Slot>(i));
  return out + count;
}

}  // namespace pagecore
