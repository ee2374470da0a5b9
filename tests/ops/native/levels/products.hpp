// The packing and the products of one level, as a driver can call them.
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
  void (*pack_keys)(cpu::Float, const TileView&, int64_t dim, float* panel);
  void (*pack_key_pairs)(const TileView&, int64_t dim, uint32_t* panel);
  bool (*pack_values)(cpu::Float, const TileView&, int64_t dim, float* panel);
  bool (*pack_value_pairs)(const TileView&, int64_t dim, uint32_t* panel);
  void (*multiply_floats)(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          const float* factor, int64_t rows, int64_t depth, int64_t columns);
  void (*multiply_pairs)(const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                         const float* factor, int64_t rows, int64_t depth, int64_t columns);
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
