// What one instruction set offers, and the working memory that it is lent. Plain structs: see args.hpp.
#pragma once

#include <cstdint>

#include "cuda_src/abi.h"
#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu {

// Keys are worked on in tiles that start at multiples of 64, and sums are folded at multiples of kFoldTokens: so a
// row's bits depend neither on where its window starts nor on splits at the places where sums are folded.
inline constexpr int64_t kTileTokens = 64;
inline constexpr int64_t kFoldTokens = 1024;
inline constexpr int64_t kSplitFloor = 512;
// Query rows (queries x heads of a group) up to which several heads go through a tile together, so that the cache is
// read in the order in which it lies in memory.
inline constexpr int64_t kPassRows = 64;
// Query rows that a prompt's item aims at: each tile is packed once for all of them, and their sums stay in the cache.
inline constexpr int64_t kPromptRows = 128;
// Rows of one of AMX's tiles.
inline constexpr int64_t kDecodeRows = 16;
// Rows are padded with zeros to a multiple of this many numbers.
inline constexpr int64_t kPadding = 16;

PC_FORCE_INLINE int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

// Pairs of bfloat16 are multiplied 32 numbers at a time: a row of one of AMX's tiles.
inline constexpr int64_t kPairDepth = 32;

// What a row of bfloat16 that meets a panel of pairs is padded to, with zeros.
PC_FORCE_INLINE int64_t pair_padded(int64_t dim) { return (dim + kPairDepth - 1) / kPairDepth * kPairDepth; }

// Packed tiles (kernels/panels.hpp), in numbers of four bytes.
PC_FORCE_INLINE int64_t key_panel_size(int64_t dim) { return padded(dim) * kTileTokens; }
PC_FORCE_INLINE int64_t key_pairs_size(int64_t dim) { return pair_padded(dim) / 2 * kTileTokens; }
PC_FORCE_INLINE int64_t value_panel_size(int64_t dim) { return kTileTokens * padded(dim); }
PC_FORCE_INLINE int64_t value_pairs_size(int64_t dim) { return kTileTokens / 2 * padded(dim); }

// A batch whose contents have been checked, in plain int32.
struct AttentionBatch {
  const int32_t* cu_query_lens = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* rows = nullptr;         // of the block table
  const int64_t* mask_starts = nullptr;  // where a sequence's mask begins; null without a mask
  float* partial_out = nullptr;          // [partial row, query head, padded value dim], not normalised
  float* partial_stats = nullptr;        // [partial row, query head, (max, sum)]
  bool from_cache = false;               // keys and values are so few that they may be in the processor's cache
  bool invariant = false;                // a row's bits must not depend on how many rows there are
};

// The working memory of one pass: `heads` key heads with `rows` query rows each.
struct Scratch {
  float* query;  // [heads, rows, padded dim], scaled; or of bfloat16, [heads, rows, pair_padded dim]
  float* key;    // a packed tile
  float* value;
  float* scores;          // [heads, rows, 64], then the weights
  uint16_t* weights;      // [heads, rows, 64], bfloat16, and kDecodeRows rows more
  uint32_t* query_panel;  // [heads, pair_padded dim / 2, kDecodeRows] where rows < kDecodeRows, else empty
  float* scale;           // [heads], what scores are multiplied by
  float* zeros;           // [padded value dim]
  float* acc;             // [heads, rows, padded value dim], of the keys since the last fold
  float* max;             // [heads, rows]
  float* sum;
  float* total_acc;  // of the keys before
  float* total_max;
  float* total_sum;
  float* factor;  // [heads, rows], what a tile's new maximum multiplies older sums by
  int32_t* low;   // [rows], the keys of the tile that a row attends to
  int32_t* high;
  uint8_t* keep;  // [queries, 64], the mask within the tile
};

// Lays a Scratch out from `base` on (64-byte aligned, or 0 to measure) and returns the floats it takes.
PC_FORCE_INLINE int64_t carve(uintptr_t base, int64_t heads, int64_t rows, int64_t dim, int64_t value_dim,
                              Scratch& scratch) {
  const int64_t d = padded(dim), dv = padded(value_dim), all = heads * rows;
  uintptr_t next = base;
  const auto take = [&next](int64_t floats) __attribute__((always_inline)) {
    float* taken = reinterpret_cast<float*>(next);
    next += static_cast<uintptr_t>(padded(floats)) * sizeof(float);
    return taken;
  };
  scratch.query = take(all * (d > pair_padded(dim) / 2 ? d : pair_padded(dim) / 2));
  scratch.key = take(key_panel_size(dim) > key_pairs_size(dim) ? key_panel_size(dim) : key_pairs_size(dim));
  scratch.value = take(value_panel_size(value_dim));
  scratch.scores = take(all * kTileTokens);
  scratch.weights = reinterpret_cast<uint16_t*>(take((all + kDecodeRows) * kTileTokens / 2));
  scratch.query_panel =
      reinterpret_cast<uint32_t*>(take(rows < kDecodeRows ? heads * pair_padded(dim) / 2 * kDecodeRows : 0));
  scratch.scale = take(heads);
  scratch.zeros = take(dv);
  scratch.acc = take(all * dv);
  scratch.max = take(all);
  scratch.sum = take(all);
  scratch.total_acc = take(all * dv);
  scratch.total_max = take(all);
  scratch.total_sum = take(all);
  scratch.factor = take(all);
  scratch.low = reinterpret_cast<int32_t*>(take(rows));
  scratch.high = reinterpret_cast<int32_t*>(take(rows));
  scratch.keep = reinterpret_cast<uint8_t*>(take(rows * kTileTokens / 4));
  return static_cast<int64_t>((next - base) / sizeof(float));
}

PC_FORCE_INLINE int64_t heads_per_pass(int64_t rows, int64_t heads) {
  const int64_t together = kPassRows / rows;
  return together < 1 ? 1 : together < heads ? together : heads;
}

struct KernelTable {
  // Item x key heads head_begin .. head_begin + head_count, at most heads_per_pass of them.
  void (*attend)(const AttentionArgs&, const AttentionBatch&, const PcWorkItem&, int64_t head_begin, int64_t head_count,
                 float* scratch);
  // The output of a query tile from the partial rows of its splits; `item` is the first of them.
  void (*merge_splits)(const AttentionArgs&, const AttentionBatch&, const PcWorkItem& item, float* scratch);
  // Rows of the output that belong to no query: 0, and -inf for lse.
  void (*clear)(const AttentionArgs&, int64_t token_begin, int64_t token_end);
  void (*merge)(const MergeArgs&);
  void (*write)(const WritePart&);
  // The places must have been checked, and the two sides must not overlap.
  void (*move)(const Move&, const Run* runs, int64_t num_runs);
};

// One for each isa/*.cpp that this build has.
namespace v2 {
extern const KernelTable kTable;
}
namespace v3 {
extern const KernelTable kTable;
}
namespace v4 {
extern const KernelTable kTable;
}
namespace v4_bf16 {
extern const KernelTable kTable;
}
namespace v4_amx {
extern const KernelTable kTable;
}
namespace neon {
extern const KernelTable kTable;
}

}  // namespace pagecore::cpu
