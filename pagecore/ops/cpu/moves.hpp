// Arguments of the kernels that gather, scatter, transfer and write: the layout of a plane on both sides, the runs to
// copy, and the share of a thread. Plain structs: see args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// A copy of `count` tokens or blocks from index `source` to index `target`. Each Move defines the unit of its indices.
struct CopyRun {
  int64_t source;  // kZeros: write zeros
  int64_t target;
  int64_t count;
};

inline constexpr int64_t kZeros = -1;

struct MoveAxis {
  int64_t size;
  int64_t source_stride;
  int64_t target_stride;
};

// The copy of one plane. The elements of a run are those of `axes`, longest target stride first so that the target is
// written in memory order, and of `row`, which is contiguous on both sides. One of them scales with the run's count:
//
//   axes[0] ... axes[num_axes - 1] | row         size of axis `varying` = count * scale; varying == num_axes: the row
struct Move {
  const char* source = nullptr;
  char* target = nullptr;
  int64_t source_unit = 0;  // bytes per index
  int64_t target_unit = 0;
  // A run is copied in pieces of this count, for example the tokens of a block if the blocks are not contiguous.
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
  bool streams = false;  // use streaming stores: more is written than the caches hold
  Float from = Float::F32;
  Float to = Float::F32;
};

// One of 2^bits shares of a call. Work is divided by the place that is written: all writes to one place are in one
// share, in their original order, so the last one wins.
struct Share {
  int32_t bits = 0;
  uint64_t index = 0;
};

// The share of a stretch of slots or blocks. The high bits of a product, because the indices in use, such as the next
// slots of sequences of equal length, may all agree in their low bits.
PC_FORCE_INLINE uint64_t share_of(uint64_t stretch, int32_t bits) {
  return bits == 0 ? 0 : stretch * 0x9e3779b97f4a7c15 >> (64 - bits);
}

// More shares than threads, because hashing distributes the stretches unevenly.
PC_FORCE_INLINE int32_t share_bits(int64_t num_threads) {
  return 66 - __builtin_clzll(static_cast<uint64_t>(num_threads));
}

// Slots per stretch.
inline constexpr int64_t kSlotStretch = 16;

// Arguments of the write kernel. Slots outside the cache are skipped.
struct WritePart {
  const WriteArgs* args = nullptr;
  bool streams = false;  // use streaming stores: more is written than the caches hold
  Share share;
};

}  // namespace pagecore::cpu
