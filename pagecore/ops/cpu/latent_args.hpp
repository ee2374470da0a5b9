// Arguments of latent attention on the host, its kernels, and the scratch memory of a pass. Plain structs: see
// ops/args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu {

enum class LatentFormat : int32_t {
  Plain = 0,   // float32, float16 or bfloat16
  E4M3,        // one byte a number, times a factor of the layer
  Fp8DsMla,    // 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16
  Nvfp4DsMla,  // 352 bytes: 256 of two e2m1, 64 e4m3, 32 permuted e4m3 scales
};

// Sizes of a packed row, in numbers and bytes.
inline constexpr int64_t kPackedLatentDim = 512, kPackedRopeDim = 64;
inline constexpr int64_t kFp8RowBytes = 656, kFp8ScaleAt = 512, kFp8RopeAt = 528, kFp8Tile = 128;
inline constexpr int64_t kNvfp4RowBytes = 352, kNvfp4RopeAt = 256, kNvfp4ScaleAt = 320, kNvfp4Tile = 16;

// Limit of latent_row_width(), and of the dim of an index key.
inline constexpr int64_t kLatentWidthMax = 4096;

PC_FORCE_INLINE bool is_packed(LatentFormat format) {
  return format == LatentFormat::Fp8DsMla || format == LatentFormat::Nvfp4DsMla;
}

// The byte of a packed row that holds the scale of a group of 16 numbers.
PC_FORCE_INLINE int64_t nvfp4_scale_at(int64_t group) { return kNvfp4ScaleAt + 8 * (group & 3) + (group >> 2); }

// Latent and rope numbers of a cache, logically [block, token]; the numbers of a row are contiguous. A packed format
// keeps both in the row at `latent`.
struct LatentCache {
  char* latent = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  char* rope = nullptr;
  int64_t rope_block_stride = 0;
  int64_t rope_token_stride = 0;
  Float type = Float::F32;  // of plain numbers
  LatentFormat format = LatentFormat::Plain;
  int64_t num_blocks = 0;
  int64_t block_size = 1;
  int64_t latent_dim = 0;
  int64_t rope_dim = 0;
};

PC_FORCE_INLINE int64_t latent_size(const LatentCache& cache) {
  return cache.format == LatentFormat::Plain ? size_of(cache.type) : 1;
}

// Bytes of a token, in both planes.
PC_FORCE_INLINE int64_t latent_token_bytes(const LatentCache& cache) {
  if (cache.format == LatentFormat::Fp8DsMla) return kFp8RowBytes;
  if (cache.format == LatentFormat::Nvfp4DsMla) return kNvfp4RowBytes;
  return (cache.latent_dim + cache.rope_dim) * latent_size(cache);
}

// Bytes of a token that are contiguous at its latent.
PC_FORCE_INLINE int64_t latent_row_bytes(const LatentCache& cache) {
  const int64_t latent = cache.latent_dim * latent_size(cache);
  const bool joint = cache.rope == cache.latent + latent && cache.rope_token_stride == cache.token_stride &&
                     cache.rope_block_stride == cache.block_stride;
  return is_packed(cache.format) || joint ? latent_token_bytes(cache) : latent;
}

// A call of latent attention. `call` holds everything that it shares with paged attention: query is the latent part of
// the query, and key and value describe one head over the blocks of the cache. A sparse call attends to listed slots:
// call.table holds them, [query, n], negative entries are skipped, and blocks have one token.
struct LatentArgs {
  AttentionArgs call;
  TokenArray query_rope;
  LatentCache cache;
  bool sparse = false;
};

// Scores of the indexer: sum over heads of weight * relu(query . key), times the scale of the key.
struct IndexScoreArgs {
  TokenArray query;      // [token, head, dim]
  const float* weights;  // [token, head], contiguous
  Cache keys;            // one head; e4m3 codes or plain numbers
  ScalePlane scales;     // float32, one a token; absent: 1
  Table table;
  float* out;  // [token, stride]
  int64_t out_stride;
  int64_t width;  // columns of out
};

// One query token of the indexer: keys [begin, end) of a row of the block table; those up to `visible` have scores.
struct IndexScoreItem {
  int64_t token;
  int64_t row;
  int64_t begin;
  int64_t end;
  int64_t visible;
};

// Padded numbers of an unpacked row: the latent, then rope.
PC_FORCE_INLINE int64_t latent_width(const LatentCache& cache) { return padded(cache.latent_dim); }
PC_FORCE_INLINE int64_t latent_row_width(const LatentCache& cache) {
  return pair_padded(latent_width(cache) + cache.rope_dim);
}

// Scratch memory of one pass with `rows` query rows, padded to `columns`.
struct LatentScratch {
  float* query;      // the queries as the kernel multiplies them: bfloat16 or float32 [width, columns]
  uint16_t* halves;  // bfloat16 [64, width], the unpacked rows of a tile
  float* floats;     // float32 [64, width]
  float* values;     // a packed strip of the values: pairs [32, 32], or floats [64, 32]
  float* scores;     // [64, columns]
  float* top;        // [columns], greatest scores of a tile
  float* weights;    // [columns, 64], float32 or bfloat16
  float* acc;        // [columns, latent width], sums since the last fold
  float* max;        // [columns]
  float* sum;
  float* total_acc;  // sums before the last fold
  float* total_max;
  float* total_sum;
  float* factor;
  int32_t* low;  // [columns]; row r attends to keys [low[r], high[r]) of the tile
  int32_t* high;
};

// Lays out a LatentScratch at `base` (64-byte aligned, or 0 to measure) and returns its size in floats.
PC_FORCE_INLINE int64_t carve_latent(uintptr_t base, int64_t rows, int64_t latent, int64_t width,
                                     LatentScratch& scratch) {
  const int64_t columns = padded(rows);
  uintptr_t next = base;
  const auto take = [&next](int64_t floats) __attribute__((always_inline)) {
    float* taken = reinterpret_cast<float*>(next);
    next += static_cast<uintptr_t>(padded(floats)) * sizeof(float);
    return taken;
  };
  scratch.query = take(width * columns);
  scratch.halves = reinterpret_cast<uint16_t*>(take(kTileTokens * width / 2));
  scratch.floats = take(kTileTokens * width);
  scratch.values = take(kTileTokens * 32);
  scratch.scores = take(kTileTokens * columns);
  scratch.top = take(columns);
  scratch.weights = take(kTileTokens * columns);
  scratch.acc = take(columns * latent);
  scratch.max = take(columns);
  scratch.sum = take(columns);
  scratch.total_acc = take(columns * latent);
  scratch.total_max = take(columns);
  scratch.total_sum = take(columns);
  scratch.factor = take(columns);
  scratch.low = reinterpret_cast<int32_t*>(take(columns));
  scratch.high = reinterpret_cast<int32_t*>(take(columns));
  return static_cast<int64_t>((next - base) / sizeof(float));
}

// The numbers of a token that is written: float32, float16 or bfloat16.
struct LatentNumbers {
  const char* latent;
  Float latent_type;
  const char* rope;
  Float rope_type;
};

// The kernels of latent attention of one instruction set.
struct LatentKernels {
  // Attends all heads of an item.
  void (*attend)(const LatentArgs&, const AttentionBatch&, const PcWorkItem&, float* scratch);
  // Writes the row of a token, latent and rope, times `factor` to `out` in dtype `type`.
  void (*read_row)(const LatentCache&, int64_t block, int64_t offset, float factor, char* out, Float type);
  // Writes the scores of an item; keys that the token does not see get -inf. Scratch as for attend, with one row for
  // each head.
  void (*score)(const IndexScoreArgs&, const IndexScoreItem&, float* scratch);
  // Quantises a token to a cache with a format; codes of E4M3 are those of numbers divided by `factor`.
  void (*write_row)(const LatentCache&, int64_t block, int64_t offset, const LatentNumbers&, float factor);
  // Quantises a key of the indexer to e4m3 codes and a float32 scale, a power of two.
  void (*write_key)(const char* key, Float type, int64_t dim, char* codes, char* scale);
};

namespace v2 {
extern const LatentKernels kLatentKernels;
}
namespace v3 {
extern const LatentKernels kLatentKernels;
}
namespace v4 {
extern const LatentKernels kLatentKernels;
}
namespace v4_bf16 {
extern const LatentKernels kLatentKernels;
}
namespace v4_amx {
extern const LatentKernels kLatentKernels;
}
namespace neon {
extern const LatentKernels kLatentKernels;
}

}  // namespace pagecore::cpu
