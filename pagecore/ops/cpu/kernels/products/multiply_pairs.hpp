// Matrix products of bfloat16 pairs, for instruction sets with kHasPairs.
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply.hpp"
#if defined(PC_AMX)
#include "pagecore/ops/cpu/kernels/products/accumulate_amx.hpp"
#endif

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

#if !defined(PC_AMX)
// State that pair products need; only AMX has any.
class AmxTiles {
 public:
  AmxTiles() {}
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  PC_FORCE_INLINE void keep_awake() {}
};
#endif

#if defined(__AVX512BF16__) && !defined(PC_AMX)
struct OfPairs {
  using Left = uint32_t;
  PC_FORCE_INLINE static Vec add(Vec sum, Left left, Vec right) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(BitVec{} + left), (__m512bh)right);
  }
};
#endif

// a [rows, depth] bfloat16, b [depth / 2, columns] pairs, c [rows, columns]; strides in elements of each. `depth` is a
// multiple of kPairDepth, `columns` of kPadding. Denormals count as zero. Traps without kHasPairs.
inline void multiply_pairs([[maybe_unused]] AmxTiles& tiles, [[maybe_unused]] const uint16_t* a,
                           [[maybe_unused]] int64_t lda, [[maybe_unused]] const uint32_t* b,
                           [[maybe_unused]] int64_t ldb, [[maybe_unused]] float* c, [[maybe_unused]] int64_t ldc,
                           [[maybe_unused]] const float* factor, [[maybe_unused]] int64_t rows,
                           [[maybe_unused]] int64_t depth, [[maybe_unused]] int64_t columns) {
#if defined(PC_AMX)
  const AmxProduct product{a, lda, b, ldb, c, ldc, factor, depth, columns, rows < kAmxRows ? rows : kAmxRows};
  if (factor == nullptr || depth != kTileTokens) return multiply_amx(tiles, product, rows);
  accumulate_rows_amx(tiles, product, rows);
#elif defined(__AVX512BF16__)
  multiply<OfPairs>({reinterpret_cast<const char*>(a), 2 * lda, reinterpret_cast<const float*>(b), ldb, c, ldc, factor,
                     rows, depth / 2, columns});
#else
  __builtin_trap();
#endif
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
