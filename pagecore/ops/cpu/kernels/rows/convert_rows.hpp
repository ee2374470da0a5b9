// Conversion of rows to another dtype, divided by a number: nearest even; NaN remains NaN; float8 saturates.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quad_codes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Converts `count` numbers, divided by `divisor`.
using Convert = void (*)(const char* source, char* target, int64_t count, float divisor);

template <Float From, Float To, bool kScales>
void convert_row(const char* source, char* target, int64_t count, float divisor) {
  const auto scaled = [=](Vec v, int) __attribute__((always_inline)) { return kScales ? v / divisor : v; };
  if constexpr (To == Float::F8E4M3FN || To == Float::F8E5M2) {
    using Code = std::conditional_t<To == Float::F8E4M3FN, E4M3, E5M2>;
    const uint8_t flips = kScales && bits_of(divisor)[0] < 0 ? 0x80 : 0;
    store_quads<From, 1>(source, count, target, [=](const char* from, int64_t) __attribute__((always_inline)) {
      return float8_quad<Code, From, false>(from, scaled, flips);
    });
  } else {
    for_each_vector<From>(source, count,
                          [&](int64_t i, Vec v, int64_t part) { store_part<To>(target, i, scaled(v, 0), part); });
  }
}

// Calls f.template operator()<T>() for the dtype of a target, which may be float8.
template <typename F>
PC_FORCE_INLINE auto with_target(Float type, F&& f) {
  switch (type) {
    case Float::F8E4M3FN: return f.template operator()<Float::F8E4M3FN>();
    case Float::F8E5M2: return f.template operator()<Float::F8E5M2>();
    default: return with_float(type, f);
  }
}

inline Convert conversion(Float from, Float to, bool scales) {
  return with_float(from, [&]<Float From>() {
    return with_target(
        to, [&]<Float To>() -> Convert { return scales ? convert_row<From, To, true> : convert_row<From, To, false>; });
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
