// Packing, matrix products and batches of groups of one instruction set, for drivers.
#pragma once

#include <string>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::test {

struct TileView {
  const char* base;
  const int64_t* offsets;
  int first;
  int last;
  const uint8_t* used;
};

struct Products {
  const char* name;
  bool has_pairs;
  void (*pack_keys)(Float, const TileView&, int64_t dim, float* panel);
  void (*pack_key_pairs)(const TileView&, int64_t dim, uint32_t* panel);
  bool (*pack_values)(Float, const TileView&, int64_t dim, float* panel);
  bool (*pack_value_pairs)(const TileView&, int64_t dim, uint32_t* panel);
  void (*multiply_floats)(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          const float* factor, int64_t rows, int64_t depth, int64_t columns);
  // Computes the first rows in a separate call.
  void (*multiply_pairs)(int64_t first_rows, const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                         int64_t ldc, const float* factor, int64_t rows, int64_t depth, int64_t columns);
  // Null without AMX. `panel` is for the packed query, `copy` for keys.
  void (*score_amx)(const TileView& keys, int64_t dim, const uint16_t* query, int64_t stride, int64_t rows,
                    uint32_t* panel, uint16_t* copy, float* scores);
  void (*accumulate_amx)(const uint16_t* weights, const uint32_t* values, int64_t columns, float* acc, int64_t stride,
                         const float* factor, int64_t rows);
  // Adds left [16, 64] times right [16, 16, 4], four numbers of the depth in turn, to sums [16, 16].
  void (*multiply_bytes)(const int8_t* left, const int8_t* right, int32_t* sums);
  // Misuses of AMX that the hardware would reject.
  void (*load_unconfigured)();
  void (*multiply_mismatched)();
  // Quantises rows of bfloat16 in groups of 16, of which those without `magnitude` are unusual and the others used.
  // Returns true if every batch is usual; writes codes of 0.
  bool (*are_usual)(float magnitude, const char* numbers, int64_t rows, int64_t groups, char* codes, char* scales);
};

namespace v2 {
extern const Products kProducts;
}
namespace v3 {
extern const Products kProducts;
}
namespace v4 {
extern const Products kProducts;
}
namespace v4_bf16 {
extern const Products kProducts;
}
namespace v4_amx {
extern const Products kProducts;
}
namespace neon {
extern const Products kProducts;
}

}  // namespace pagecore::test
