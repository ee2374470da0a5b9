// The factors that make rows of weights integers, where the scales of groups multiply them.
//
// The scales of a group are divided by the largest of them in the tile, and multiply the integers of a row of weights.
// Rows in which a group would have only small integers are not served.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int kWeightVectors = static_cast<int>(kTileTokens) / kLanes;

// The smallest scale of each token, among those of its groups that are divided.
struct LeastScales {
  Vec of_tokens[kWeightVectors];
};

// A row's largest weight is up to this multiple of the largest weight times scale in each group, which then has
// integers of at least 510.
constexpr float kGroupRange = 64.0f;

// Divides the scales [groups, 64] by the largest of each group and makes them integers up to kLargestShort. A group
// without scales above 0 has zeros. Returns false if one is infinite or NaN, or a group too small.
inline bool make_integer_scales(const float* scales, int64_t groups, float unit, int16_t* to, float* of_groups,
                                LeastScales& least) {
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) least.of_tokens[i] = splat(1.0f);
  bool made = true;
  for (int64_t g = 0; g < groups; ++g, scales += kTileTokens, to += kTileTokens) {
    IntVec bits{};
#pragma GCC unroll 8
    for (int i = 0; i < kWeightVectors; ++i) bits = max(bits, (IntVec)load(scales + i * kLanes) & kMagnitudeBits);
    const int32_t top = max_of_lanes(bits)[0];
    float factor;
    made &= integer_factor(top, factor, of_groups[g]);
    of_groups[g] *= unit;
    const float inverse = factor / kLargestShort;
#pragma GCC unroll 8
    for (int i = 0; i < kWeightVectors; i += 2) {
      const Vec low = load(scales + i * kLanes), high = load(scales + (i + 1) * kLanes);
      store_shorts(to + i * kLanes, nearest(low * factor), nearest(high * factor));
      if (top == 0) continue;
      const auto keep_least = [&](int k, Vec scale) __attribute__((always_inline)) {
        const IntVec magnitude = (IntVec)(scale * inverse) & kMagnitudeBits;
        least.of_tokens[k] = (Vec)min((IntVec)least.of_tokens[k], magnitude);
      };
      keep_least(i, low), keep_least(i + 1, high);
    }
  }
  return made;
}

// The factor that makes the weights of a row integers up to `most`. Returns false if one is infinite or NaN, or the row
// too small.
PC_FORCE_INLINE bool weight_factor(const float* row, float most, float& factor, float& unit) {
  IntVec largest{};
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) largest = max(largest, (IntVec)load(row + i * kLanes) & kMagnitudeBits);
  return integer_factor(max_of_lanes(largest)[0], factor, unit, most);
}

// weight_factor() of weights that are multiplied with scales afterwards. Returns false too if a group is too small next
// to the weights.
PC_FORCE_INLINE bool weight_factor(const float* row, const LeastScales& scales, float& factor, float& unit) {
  if (!weight_factor(row, kLargestShort, factor, unit)) return false;
  IntVec least{};  // what every group has at least
#pragma GCC unroll 8
  for (int i = 0; i < kWeightVectors; ++i) {
    least = max(least, (IntVec)(load(row + i * kLanes) * scales.of_tokens[i]) & kMagnitudeBits);
  }
  return __builtin_bit_cast(float, max_of_lanes(least)[0]) * kGroupRange >= unit * kLargestShort;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
