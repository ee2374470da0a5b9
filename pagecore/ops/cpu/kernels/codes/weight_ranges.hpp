// The factors that make rows of weights integers, where the scales of groups multiply them.
//
// The scales of a group are divided by the largest of them in the tile, and those of all groups share the factor that
// makes a row of weights integers. Rows in which a group would have only small integers are not served.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int kWeightVectors = static_cast<int>(kTileTokens) / kLanes;

// The largest and the smallest scale of each token, among those of its groups that are divided.
struct ScaleRange {
  Vec largest[kWeightVectors], smallest[kWeightVectors];
};

// A row's largest weight times scale is up to this multiple of the largest in each group, which then has integers of at
// least 510.
constexpr float kGroupRange = 64.0f;

// Divides the scales [groups, 64] by the largest of each group. A group without scales above 0 stays as it is.
inline ScaleRange divide_scales(float* scales, int64_t groups, float unit, float* of_groups) {
  ScaleRange range{};
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) range.largest[i] = Vec{}, range.smallest[i] = splat(1.0f);
  for (int64_t g = 0; g < groups; ++g, scales += kTileTokens) {
    IntVec bits{};
#pragma GCC unroll 8
    for (int i = 0; i < kWeightVectors; ++i) bits = max(bits, (IntVec)load(scales + i * kLanes) & kMagnitudeBits);
    const float top = __builtin_bit_cast(float, max_of_lanes(bits)[0]);
    of_groups[g] = top * unit;
    if (top == 0.0f) continue;
    const float inverse = 1.0f / top;
#pragma GCC unroll 8
    for (int i = 0; i < kWeightVectors; ++i) {
      const Vec scale = load(scales + i * kLanes) * inverse;
      store(scales + i * kLanes, scale);
      const IntVec magnitude = (IntVec)scale & kMagnitudeBits;
      range.largest[i] = (Vec)max((IntVec)range.largest[i], magnitude);
      range.smallest[i] = (Vec)min((IntVec)range.smallest[i], magnitude);
    }
  }
  return range;
}

// The factor that makes the weights of a row integers up to `most`. Returns false if one is infinite or NaN, or the row
// too small.
PC_FORCE_INLINE bool weight_factor(const float* row, float most, float& factor, float& unit) {
  IntVec largest{};
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) largest = max(largest, (IntVec)load(row + i * kLanes) & kMagnitudeBits);
  return integer_factor(max_of_lanes(largest)[0], factor, unit, most);
}

// The same of weights times the scales of groups. Returns false too if a group is too small next to others.
PC_FORCE_INLINE bool weight_factor(const float* row, const ScaleRange& range, float most, float& factor, float& unit) {
  IntVec largest{}, smallest{};  // what the largest group has, and what every group has at least
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) {
    const Vec weight = load(row + i * kLanes);
    largest = max(largest, (IntVec)(weight * range.largest[i]) & kMagnitudeBits);
    smallest = max(smallest, (IntVec)(weight * range.smallest[i]) & kMagnitudeBits);
  }
  const int32_t top = max_of_lanes(largest)[0];
  const float least = __builtin_bit_cast(float, max_of_lanes(smallest)[0]);
  return integer_factor(top, factor, unit, most) && least * kGroupRange >= __builtin_bit_cast(float, top);
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
