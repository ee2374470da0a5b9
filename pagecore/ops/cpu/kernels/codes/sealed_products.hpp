// Products of few query rows with the codes of sealed blocks, where the instruction set has them.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/sealed_scores.hpp"
#include "pagecore/ops/cpu/kernels/codes/sealed_values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

PC_FORCE_INLINE bool has_sealed_products(const SealedPlane& plane, const Cache& newest, bool is_key) {
  return is_key ? scores_sealed(plane, newest) : accumulates_sealed(plane, newest);
}

#else

PC_FORCE_INLINE bool has_sealed_products(const SealedPlane&, const Cache&, bool) { return false; }
inline bool score_sealed(const HeadRows&, const SealedPlane&, const Cache&, const RowOffsets&, int64_t, SealedAhead,
                         const Scratch&) {
  __builtin_trap();
}
inline bool accumulate_sealed(const HeadRows&, const SealedPlane&, const Cache&, const RowOffsets&, int64_t,
                              SealedAhead, const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
