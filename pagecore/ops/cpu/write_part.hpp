// What the kernel that writes keys and values is told: plain structs, see args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// The slots of a call are shared out by stretches of so many, so that tokens of one slot stay together and in order.
inline constexpr int64_t kStretch = 16;

// One thread's part of a call. Slots that are not in the cache are skipped.
struct WritePart {
  const WriteArgs* args = nullptr;
  bool streams = false;  // past the caches: more is written than they hold
  int32_t bits = 0;      // there are 2^bits parts
  uint64_t index = 0;
};

}  // namespace pagecore::cpu
