// Weights of few query rows times the scales of sealed values, as digits (sealed_digits.hpp).
//
// A number of a value is scale * code + least; both belong to its token and its group of channels. The weights of a row
// times the scales of a group are made digits for each tile. Their products with the least numbers are the same for all
// channels of the group, and are added as float32.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/sealed_ahead.hpp"
#include "pagecore/ops/cpu/kernels/codes/sealed_digits.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int kTilePanels = static_cast<int>(kTileTokens) / kPanel;

// Weights of few rows with a tile, as digits, and what sums of their products mean.
struct SealedWeights {
  int8_t* digits;  // [groups, 2, R] panels for each block of R rows
  float* units;    // [rows, groups]
  float* excess;   // [rows, groups]
  float* scales;   // [groups, 64]
  float* leasts;   // [groups, 64]
  int64_t groups;

  SealedWeights(float* memory, int64_t of_groups) : groups(of_groups) {
    const auto take = [&memory](int64_t floats) {
      float* const taken = memory;
      memory += floats;
      return taken;
    };
    scales = take(kTileTokens * groups);
    leasts = take(kTileTokens * groups);
    digits = reinterpret_cast<int8_t*>(take(kCodeRows * groups * kTilePanels * kPanelBytes / 4));
    units = take(kCodeRows * groups);
    excess = take(kCodeRows * groups);
  }

  // The digits of R rows from `row` on.
  template <int R>
  [[nodiscard]] PC_FORCE_INLINE int8_t* digits_of(int64_t row, int64_t group) const {
    return digits + (row * groups + group * R) * kTilePanels * kPanelBytes;
  }
};

// The rows of a tile of sealed tokens that follow each other: words and scales.
struct SealedRows {
  const char* words[kTileTokens];
  const char* scales[kTileTokens];

  SealedRows(const SealedPlane& plane, int64_t size, const RowOffsets& places, int64_t head) {
    for_each_sealed_block(places, size, [&](int t, int last, int64_t block, int64_t token) {
      const SealedHead of_head{plane, block, head};
      for (; t < last; ++t, ++token) {
        words[t] = of_head.words + token * plane.row_stride;
        scales[t] = of_head.scales + token * plane.scales_row_stride;
      }
    });
  }
};

// True if four groups of a token have their scales and least numbers, in bfloat16, one after the other.
PC_FORCE_INLINE bool are_scale_pairs(const SealedPlane& plane, int64_t groups) {
  const int64_t bytes = size_of(plane.scale_type);
  return plane.scale_type == Float::BF16 && plane.least_stride == bytes && plane.group_stride == 2 * bytes &&
         groups % 4 == 0;
}

// Writes the scales and the least numbers of four groups from g on.
inline void transpose_scale_pairs(const char* const* tokens, int64_t g, const SealedWeights& to) {
  for (int t = 0; t < kTileTokens; t += kLanes) {
    Vec pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto four = [&](int k) __attribute__((always_inline)) {
        return reinterpret_cast<const float*>(tokens[t + 4 * k + i] + 4 * g);
      };
#if defined(__AVX512F__)
      pairs[i] = load_quarters(four(0), four(1), four(2), four(3));
#else
      const Vec4 a = load_four(four(0)), b = load_four(four(1));
      pairs[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
#endif
    }
    transpose_squares(pairs);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      store(to.scales + (g + i) * kTileTokens + t, even_floats((Words)pairs[i]));
      store(to.leasts + (g + i) * kTileTokens + t, odd_floats((Words)pairs[i]));
    }
  }
}

// Writes the scales and the least numbers of a tile, [groups, 64].
inline void load_sealed_scales(const SealedPlane& plane, const SealedRows& tile, const SealedWeights& to) {
  if (are_scale_pairs(plane, to.groups)) {
    for (int64_t g = 0; g < to.groups; g += 4) transpose_scale_pairs(tile.scales, g, to);
    return;
  }
  for (int t = 0; t < kTileTokens; ++t) {
    const char* from = tile.scales[t];
    for (int64_t g = 0; g < to.groups; ++g, from += plane.group_stride) {
      to.scales[g * kTileTokens + t] = load_scale(plane.scale_type, from);
      to.leasts[g * kTileTokens + t] = load_scale(plane.scale_type, from + plane.least_stride);
    }
  }
}

// Makes the weights of R rows from `row` on times the scales of a group digits. Returns false if one of them cannot be
// written so.
template <int R>
PC_FORCE_INLINE bool make_group_weights(const HeadRows& rows, int64_t row, int64_t group, const SealedWeights& to) {
  alignas(64) float products[kTileTokens * R];
  const float* const weights = rows.scores + row * kTileTokens;
  const float *const scales = to.scales + group * kTileTokens, *const leasts = to.leasts + group * kTileTokens;
  DigitRows<R> digits;
  Vec excess[R] = {};
#pragma GCC unroll 8
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const Vec scale = load(scales + t), least = load(leasts + t);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = load(weights + r * kTileTokens + t);
      excess[r] = fma(weight, least, excess[r]);
      digits.put(products + t / kPanel * R * kPanel + t % kPanel, r, weight * scale);
    }
  }
  const Vec4 sums = sum_each(excess);
  float units[R];
  const bool made = digits.write(products, kTilePanels, to.template digits_of<R>(row, group), units);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    to.units[(row + r) * to.groups + group] = units[r];
    to.excess[(row + r) * to.groups + group] = sums[r];
  }
  return made;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
