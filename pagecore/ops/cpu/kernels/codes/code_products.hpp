// Products of few query rows with the codes of a tile without AMX: which there are for a format, and their calls.
//
//   numbers                      bfloat16, AVX-512 bf16     queries of 16 bits     float32 queries
//   integers, 8 bits             int16                      int16                  float32
//   integers and e2m1, 4 bits    int16                      int16                  none: tiles are unpacked
//   float8                       pairs of bfloat16          float32                float32
//
// Emerald Rapids multiplies pairs of int16 four times as fast as pairs of bfloat16, which are left for float8.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/float_products.hpp"
#include "pagecore/ops/cpu/kernels/codes/integer_values.hpp"
#include "pagecore/ops/cpu/kernels/codes/pair_values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

enum class CodeProducts : uint8_t { None, Integers, Floats, Pairs };

#if defined(__AVX512BF16__) && !defined(PC_AMX)

// True if pairs of bfloat16 are multiplied for a format and dim.
PC_FORCE_INLINE bool has_code_pairs(const Cache& cache) {
  return !is_plain(cache) && !has_integers(cache.format) && cache.dim % kValueDims == 0;
}

#else

PC_FORCE_INLINE bool has_code_pairs(const Cache&) { return false; }
inline void order_pair_queries(const Cache&, uint16_t*, int64_t, uint16_t*) { __builtin_trap(); }
inline void score_pair_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}
inline void accumulate_pair_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}

#endif

#if defined(__AVX2__)

PC_FORCE_INLINE CodeProducts products_of(const Cache& cache, bool pairs, bool integers) {
  if (pairs) return CodeProducts::Pairs;
  if (integers && has_integers(cache)) return CodeProducts::Integers;
  return has_floats(cache) ? CodeProducts::Floats : CodeProducts::None;
}

inline void score_products(CodeProducts products, const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                           const NextRows& next_rows, const Scratch& scratch) {
  if (products == CodeProducts::Pairs) return score_pair_codes(rows, cache, tile, next_rows, scratch);
  if (products == CodeProducts::Floats) return score_floats(rows, cache, tile, next_rows);
  score_integers(rows, cache, tile, next_rows, scratch);
}
// Returns false, having changed nothing, if the tile has to be unpacked.
inline bool accumulate_products(CodeProducts products, const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                const NextRows& next_rows, const Scratch& scratch) {
  if (products == CodeProducts::Integers) return accumulate_integers(rows, cache, tile, next_rows, scratch);
  if (products == CodeProducts::Pairs) {
    accumulate_pair_codes(rows, cache, tile, next_rows, scratch);
  } else {
    accumulate_floats(rows, cache, tile, next_rows);
  }
  return true;
}

#else

PC_FORCE_INLINE CodeProducts products_of(const Cache&, bool, bool) { return CodeProducts::None; }
inline bool make_integers(const float*, int64_t, int64_t, const Cache&, int16_t*, int16_t*, IntegerRow*) {
  __builtin_trap();
}
inline void order_floats(const Cache&, float*, int64_t, int64_t) { __builtin_trap(); }
inline void score_products(CodeProducts, const HeadRows&, const Cache&, const StoredTile&, const NextRows&,
                           const Scratch&) {
  __builtin_trap();
}
inline bool accumulate_products(CodeProducts, const HeadRows&, const Cache&, const StoredTile&, const NextRows&,
                                const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
