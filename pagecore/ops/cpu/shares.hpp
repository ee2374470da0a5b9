// How writing is shared out among threads: by the place that is written, so that what goes to one place stays in one
// share, in its order, and the last one stays. Forced inline: see args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// One of 2^bits shares.
struct Share {
  int32_t bits = 0;
  uint64_t index = 0;
};

// The share that a stretch of places belongs to. The high bits of a product, because the places in use, such as the
// next slots of sequences of equal length, may all be alike in their low bits.
PC_FORCE_INLINE uint64_t share_of(uint64_t stretch, int32_t bits) {
  return bits == 0 ? 0 : stretch * 0x9e3779b97f4a7c15 >> (64 - bits);
}

// More shares than threads, because stretches do not fall evenly among them.
PC_FORCE_INLINE int32_t share_bits(int64_t num_threads) {
  return 66 - __builtin_clzll(static_cast<uint64_t>(num_threads));
}

// The slots of a call are dealt out in stretches of so many.
inline constexpr int64_t kSlotStretch = 16;

// What the kernel that writes keys and values is told. Slots that are not in the cache are skipped.
struct WritePart {
  const WriteArgs* args = nullptr;
  bool streams = false;  // past the caches: more is written than they hold
  Share share;
};

}  // namespace pagecore::cpu
