// The kernels of one instruction set, and the scratch memory of a pass. Plain structs: see args.hpp.
#pragma once

#include <cstdint>

#include "cuda_src/abi/types.h"
#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/code_tables.hpp"
#include "pagecore/ops/cpu/codec.hpp"
#include "pagecore/ops/cpu/moves.hpp"
#include "pagecore/ops/cpu/select_args.hpp"
#include "pagecore/ops/hadamard_rows.hpp"

namespace pagecore::cpu {

// Tiles of keys start at multiples of 64, and running sums are folded at multiples of kFoldTokens. A row's bits
// therefore do not depend on where its window starts, nor on splits at multiples of kFoldTokens.
inline constexpr int64_t kTileTokens = 64;
inline constexpr int64_t kFoldTokens = 1024;
inline constexpr int64_t kSplitFloor = 512;
// Up to this number of query rows (queries x heads of a group), several heads share a pass, so that the cache is read
// in memory order.
inline constexpr int64_t kPassRows = 64;
// Target number of query rows of a prompt's item: a tile is packed once for all of them, and their sums stay in the
// cache.
inline constexpr int64_t kPromptRows = 256;
// Up to this number of query rows, products are made straight from the codes of a quantised cache.
inline constexpr int64_t kCodeRows = 8;
// Rows of an AMX tile.
inline constexpr int64_t kDecodeRows = 16;
// Rows are zero-padded to a multiple of this many elements.
inline constexpr int64_t kPadding = 16;

PC_FORCE_INLINE int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

// Pairs of bfloat16 are multiplied 32 elements at a time: a row of an AMX tile.
inline constexpr int64_t kPairDepth = 32;

// Padded length of a bfloat16 row that is multiplied with a panel of pairs.
PC_FORCE_INLINE int64_t pair_padded(int64_t dim) { return (dim + kPairDepth - 1) / kPairDepth * kPairDepth; }

// Sizes of packed tiles (kernels/panels.hpp), in 4-byte elements.
PC_FORCE_INLINE int64_t key_panel_size(int64_t dim) { return padded(dim) * kTileTokens; }
PC_FORCE_INLINE int64_t key_pairs_size(int64_t dim) { return pair_padded(dim) / 2 * kTileTokens; }
PC_FORCE_INLINE int64_t value_panel_size(int64_t dim) { return kTileTokens * padded(dim); }

// Zeros that replace a row of keys or values that must not be read.
PC_FORCE_INLINE int64_t zero_numbers(int64_t dim, int64_t value_dim) {
  return padded(dim > value_dim ? dim : value_dim);
}

// Numbers from one row to the next of a quantised tile that is unpacked to bfloat16: whole cache lines, and room for a
// vector of codes.
PC_FORCE_INLINE int64_t unpacked_stride(int64_t dim) { return (dim + 63) / 64 * 64; }

// Length of a query row in int16: whole vectors of 4-bit codes, of 64 bytes.
PC_FORCE_INLINE int64_t integer_padded(int64_t dim) { return (dim + 127) / 128 * 128; }

// A query row in int16 times `unit`; `sum` is that of the integers.
struct IntegerRow {
  float unit;
  float sum;
};

// A checked batch, in int32.
struct AttentionBatch {
  const int32_t* cu_query_lens = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* rows = nullptr;         // [num_sequences], rows of the block table
  const int64_t* mask_starts = nullptr;  // [num_sequences], offset of each sequence's mask; null without a mask
  float* partial_out = nullptr;          // [partial row, query head, padded value dim], not normalised
  float* partial_stats = nullptr;        // [partial row, query head, (max, sum)]
  const CodeTables* code_tables = nullptr;
  bool from_cache = false;                  // keys and values are small enough to be in the processor's caches
  bool invariant = false;                   // batch-invariant: a row's bits must not depend on the other rows
  bool multiplies_pairs = true;             // pairs of bfloat16, where the kernels have products of them
  bool reads_by_pages = false;              // contiguous rows are read page by page (prefetch.hpp)
  const int32_t* tree_positions = nullptr;  // [num_tokens]; null without a tree
  // A selection: lists [num_sequences, key heads, width], ascending, and their lengths; null without one.
  const int32_t* selected = nullptr;
  const int32_t* selected_counts = nullptr;
  const int32_t* sealed_lens = nullptr;  // [num_sequences]; null without sealed blocks
};

// Scratch memory of one pass: `heads` key heads with `rows` query rows each.
struct Scratch {
  float* query;       // [heads, rows, unpacked_stride dim] or less, scaled; or bfloat16 [heads, rows, pair_padded dim]
  float* key;         // packed tile of keys
  float* value;       // packed tile of values
  float* scores;      // [heads, rows, 64]; overwritten by the weights
  uint16_t* weights;  // [heads, rows, 64], bfloat16, plus kDecodeRows rows of slack
  uint32_t* query_panel;  // [heads, pair_padded dim / 2, kDecodeRows] if rows < kDecodeRows, else empty
  float* scale;           // [heads], factor of the scores
  float* zeros;           // [zero_numbers]
  float* acc;             // [heads, rows, padded value dim], sums since the last fold
  float* max;             // [heads, rows]
  float* sum;
  float* total_acc;  // sums before the last fold
  float* total_max;
  float* total_sum;
  float* factor;  // [heads, rows], rescales older sums to a tile's new maximum
  int32_t* low;   // [rows]; row r attends to keys [low[r], high[r]) of the tile
  int32_t* high;
  uint8_t* keep;  // [queries, 64], mask over the tile
  // [64, unpacked_stride of the wider dim], keys or values of a quantised tile; float32 with sealed blocks
  uint16_t* unpacked;
  // Empty if rows > kCodeRows.
  int16_t* query_integers;   // [heads, rows, integer_padded dim]
  IntegerRow* integer_rows;  // [heads, rows]
};

// Lays out a Scratch at `base` (64-byte aligned, or 0 to measure) and returns its size in floats.
PC_FORCE_INLINE int64_t carve(uintptr_t base, int64_t heads, int64_t rows, int64_t dim, int64_t value_dim,
                              Scratch& scratch) {
  const int64_t dv = padded(value_dim), all = heads * rows;
  uintptr_t next = base;
  const auto take = [&next](int64_t floats) __attribute__((always_inline)) {
    float* taken = reinterpret_cast<float*>(next);
    next += static_cast<uintptr_t>(padded(floats)) * sizeof(float);
    return taken;
  };
  scratch.query = take(all * unpacked_stride(dim));
  scratch.key = take(key_panel_size(dim) > key_pairs_size(dim) ? key_panel_size(dim) : key_pairs_size(dim));
  scratch.value = take(value_panel_size(value_dim));
  scratch.scores = take(all * kTileTokens);
  scratch.weights = reinterpret_cast<uint16_t*>(take((all + kDecodeRows) * kTileTokens / 2));
  scratch.query_panel =
      reinterpret_cast<uint32_t*>(take(rows < kDecodeRows ? heads * pair_padded(dim) / 2 * kDecodeRows : 0));
  scratch.scale = take(heads);
  scratch.zeros = take(zero_numbers(dim, value_dim));
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
  scratch.unpacked =
      reinterpret_cast<uint16_t*>(take(kTileTokens * unpacked_stride(dim > value_dim ? dim : value_dim)));
  const int64_t few = rows <= kCodeRows ? all : 0;
  scratch.query_integers = reinterpret_cast<int16_t*>(take(few * integer_padded(dim) / 2));
  scratch.integer_rows = reinterpret_cast<IntegerRow*>(take(few * 2));
  return static_cast<int64_t>((next - base) / sizeof(float));
}

// Key heads that share a pass.
PC_FORCE_INLINE int64_t heads_per_pass(int64_t rows, int64_t heads) {
  const int64_t together = kPassRows / rows;
  return together < 1 ? 1 : together < heads ? together : heads;
}

struct LatentKernels;

struct KernelTable {
  // Attends the key heads head_begin .. head_begin + head_count of an item; head_count is at most heads_per_pass().
  void (*attend)(const AttentionArgs&, const AttentionBatch&, const PcWorkItem&, int64_t head_begin, int64_t head_count,
                 float* scratch);
  // Computes the output of a query tile from the partial rows of its splits; `item` is the first of them.
  void (*merge_splits)(const AttentionArgs&, const AttentionBatch&, const PcWorkItem& item, float* scratch);
  // Clears output rows past the last query: 0, and -inf for lse.
  void (*clear)(const AttentionArgs&, int64_t token_begin, int64_t token_end);
  void (*merge)(const MergeArgs&);
  // Rows [begin, end), where row i is head i % num_heads of token i / num_heads.
  void (*merge_many)(const MergeManyArgs&, int64_t begin, int64_t end);
  void (*write)(const WritePart&);
  // Rows [begin, end) to codes and scales, and back.
  void (*quantize)(const Codec&, int64_t begin, int64_t end);
  void (*dequantize)(const Codec&, int64_t begin, int64_t end);
  // Rows [begin, end), where row i is inner row i % inner of outer row i / inner.
  void (*hadamard)(const HadamardRows&, int64_t begin, int64_t end);
  // The caller has checked all source and target indices; source and target must not overlap.
  void (*move)(const Move&, const CopyRun* runs, int64_t num_runs);
  // `rows` is scratch for 2 * queries of a group * padded(dim) numbers.
  void (*score)(const ScoreArgs&, const ScorePart&, float* rows);
  // Summarises the new keys of heads head_begin .. head_end.
  void (*summarise)(const SummaryArgs&, int64_t head_begin, int64_t head_end);
  const LatentKernels* latent;  // latent_args.hpp
};

// One table per isa/*.cpp of this build.
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
extern const KernelTable kTableWithoutPairs;  // executes no instruction of AVX-512 bf16
}  // namespace v4_bf16
namespace v4_amx {
extern const KernelTable kTable;
}
namespace neon {
extern const KernelTable kTable;
}

}  // namespace pagecore::cpu
