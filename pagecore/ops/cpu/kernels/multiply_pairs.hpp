// multiply.hpp of bfloat16 in pairs, for the levels that have kHasPairs.
#pragma once

#include "pagecore/ops/cpu/kernels/multiply.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

struct OfPairs {
  using Left = uint32_t;
  PC_FORCE_INLINE static Vec add(Vec sum, Left left, Vec right) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(BitVec{} + left), (__m512bh)right);
  }
};

inline void multiply_pairs(const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                           const float* factor, int64_t rows, int64_t depth, int64_t columns) {
  multiply<OfPairs>({reinterpret_cast<const char*>(a), 2 * lda, reinterpret_cast<const float*>(b), ldb, c, ldc, factor,
                     rows, depth / 2, columns});
}
#else
constexpr bool kHasPairs = false;

// So that code that asks kHasPairs first compiles.
inline void multiply_pairs(const uint16_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, const float*, int64_t,
                           int64_t, int64_t) {
  __builtin_trap();
}
#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
