// What the kernels that gather, scatter and transfer are told: how the elements of a plane lie on both sides, and which
// of them move. Plain structs: see args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// `count` tokens (or blocks) from place `source` to place `target`; what a place is, each Move says for its two sides.
struct Run {
  int64_t source;  // kZeros: zeros are written
  int64_t target;
  int64_t count;
};

inline constexpr int64_t kZeros = -1;

struct MoveAxis {
  int64_t size;
  int64_t source_stride;
  int64_t target_stride;
};

// One plane. The elements of a run are those of `axes`, longest target stride first, so that the target is written in
// the order in which it lies in memory, and of `row`, the elements that follow one another on both sides. One of them
// grows with the run's count.
//
//   axes[0] ... axes[num_axes - 1] | row         sizes[varying] = count * scale; varying == num_axes: the row
struct Move {
  const char* source = nullptr;
  char* target = nullptr;
  int64_t source_unit = 0;  // bytes from one place to the next
  int64_t target_unit = 0;
  // A run is moved in pieces of this count, because what follows lies elsewhere: a block's tokens, where blocks do not
  // continue each other.
  int64_t piece = 1;
  int64_t source_piece = 0;  // bytes from one piece to the next
  int64_t target_piece = 0;
  int64_t source_itemsize = 1;
  int64_t target_itemsize = 1;
  int64_t row = 1;
  int64_t scale = 1;
  int32_t varying = 0;
  int32_t num_axes = 0;
  MoveAxis axes[8] = {};
  bool converts = false;
  bool streams = false;  // past the caches: more is written than they hold
  Float from = Float::F32;
  Float to = Float::F32;
};

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
