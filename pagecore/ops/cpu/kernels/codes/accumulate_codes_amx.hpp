// Weights of at most 16 query rows times values from their codes, with AMX: one tile of values.
//
//   left    [16 rows][32 tokens]              weights
//   right   [16 pairs of tokens][16 dims]     codes as bfloat16, in a panel of pairs of tokens for each 64 dims
//   sums    [16 rows][16 dims]
//
// The scales of groups are multiplied with the weights: each group of dims has weights of its own.
//
// The next rows are prefetched while values are unpacked, a few at a time, in memory that stays in L1.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/codes/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/codes/group_weights.hpp"
#include "pagecore/ops/cpu/kernels/products/packed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Tokens of a step over values, which fill the depth of a tile, and the tokens of each of its parts.
constexpr int kStepTokens = kAmxDepth, kPartTokens = kStepTokens / kValueVectors;

// Tiles of 64 dims: an operand of values is the right side of 16 dims.
//
//   in order        operand n has the dims 16 n .. 16 n + 15, which are of one group
//   interleaved     operands 2 h and 2 h + 1 have the even and the odd dims of half h, which take fewer shuffles of
//   4-bit
//                   codes, and are of two groups. The left side of a half has kRows rows of each of them.
//
// To store a tile takes the port that unpacks codes 16 cycles. With 4 rows, both halves therefore share two tiles of
// sums, and the left side of a half has zeros in the rows of the other. Only finite codes may share sums: the product
// of 0 and an infinite number is NaN.
template <int kGroup, int kRows>
struct ValueTiles {
  static constexpr bool kInterleaved = kRows < kAmxRows, kStacked = kRows == kAmxRows / 4;
  static constexpr int kGroups = kGroup == 0 ? 1 : kValueDims / kGroup;
  static constexpr int kLefts = kInterleaved ? 2 : kGroups, kGroupsOfLeft = kGroups / kLefts;
  static constexpr int kShared = kValueVectors / kLefts;  // operands that have the same left side
  static constexpr int kSums = kStacked ? 2 : kValueVectors;
  static_assert(kGroupsOfLeft == (kInterleaved ? 2 : 1));

  static constexpr int sums_of(int operand) { return operand % kSums; }
  // The first row of the sums of an operand and of the group `group` of its left side.
  static constexpr int first_row(int operand, int group) {
    return (kStacked ? operand / 2 * kAmxRows / 2 : 0) + group * kRows;
  }
  // The first row of a left side, and of the weights of a group. Stacked left sides have the same eight rows of zeros.
  static constexpr int first_left(int side) { return side * (kStacked ? kAmxRows / 2 : kAmxRows); }
  static constexpr int first_weight(int group) {
    return group / kGroupsOfLeft * kAmxRows + group % kGroupsOfLeft * kRows;
  }
};

// Writes the values of 64 dims from d on of kPartTokens tokens as pairs of tokens, [kPartTokens / 2, 64]; prefetches
// `rows_ahead` rows for each pair.
template <bool kInterleaved, typename Codes>
PC_FORCE_INLINE void pack_value_part(const Codes& codes, const StoredTile& tile, int first, int64_t d,
                                     int64_t rows_ahead, StreamsAhead& ahead, uint32_t* panel) {
  for (int t = first; t < first + kPartTokens; t += 2, panel += kValueDims) {
    ahead.prefetch(rows_ahead);
    PairVec pairs[kValueVectors];
    if constexpr (kInterleaved) {
      codes.interleaved_values(tile, t, d, pairs);
    } else {
      codes.values(tile, t, d, pairs);
    }
#pragma GCC unroll 4
    for (int n = 0; n < kValueVectors; ++n) {
      store_words(reinterpret_cast<uint16_t*>(panel + n * kLanes), (Words)pairs[n]);
    }
  }
}

// Multiplies the weights and the values of step kStep of a tile, operand n.
template <typename Tiles, int kStep, int n>
PC_FORCE_INLINE void multiply_values(const uint16_t* weights, const uint32_t* panel) {
  constexpr int kSide = n / Tiles::kShared, kLeft = kLeftTile + kSide % 2, kRight = kRightTile + n % 2;
  constexpr int kSum = Tiles::sums_of(n);
  if constexpr (kStep == 0 && n == kSum) Amx::zero<kSum>();
  if constexpr (n % Tiles::kShared == 0) {
    Amx::load<kLeft>(weights + Tiles::first_left(kSide) * kTileTokens + kStep * kStepTokens, 2 * kTileTokens);
  }
  Amx::load<kRight>(panel + n * kAmxColumns, 4 * kValueDims);
  Amx::multiply<kSum, kLeft, kRight>();
}

// The lanes from 8 kHalf on of both vectors, in turns.
template <int kHalf, int... I>
PC_FORCE_INLINE Vec interleave_half(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (kHalf * kLanes / 2 + I / 2 + I % 2 * kLanes)...);
}

// Adds the sums of 64 dims from d on.
template <typename Tiles>
PC_FORCE_INLINE void add_value_sums(const HeadRows& rows, const float* excess, int64_t d) {
  alignas(64) float sums[kAmxRows][Tiles::kSums * kAmxColumns];
  for_each_constant<Tiles::kSums>(
      [&]<int n>() __attribute__((always_inline)) { Amx::store<n>(&sums[0][n * kAmxColumns], sizeof(sums[0])); });
  for (int64_t r = 0; r < rows.count; ++r) {
    const auto sums_of = [&]<int n, int group>() __attribute__((always_inline)) {
      return load(sums[Tiles::first_row(n, group) + r] + Tiles::sums_of(n) * kAmxColumns);
    };
    float* const out = rows.acc + r * rows.acc_stride + d;
    for_each_constant<kValueVectors>([&]<int n>() __attribute__((always_inline)) {
      Vec of_dims;
      if constexpr (Tiles::kInterleaved) {
        constexpr int kEven = n / 2 * 2, kHalf = n % 2;
        of_dims = interleave_half<kHalf>(sums_of.template operator()<kEven, kHalf>(),
                                         sums_of.template operator()<kEven + 1, kHalf>(), Lanes{});
      } else {
        of_dims = sums_of.template operator()<n, 0>() - excess[r];
      }
      add_product(out + n * kLanes, of_dims, rows.factor + r);
    });
  }
}

// Values are packed a step before they are multiplied, a part before each product, so that packing and products
// overlap. `panel` has room for two steps.
template <typename Codes, int kGroup, int kRows>
void accumulate_rows_of(AmxTiles& tiles, const HeadRows& rows, const StoredTile& tile, const NextRows& next_rows,
                        int64_t dim, const GroupScales& scales, uint32_t* panel) {
  using Tiles = ValueTiles<kGroup, kRows>;
  constexpr int64_t kStepSize = kStepTokens / 2 * kValueDims, kHalfLeft = kAmxRows / 2 * kTileTokens;
  static_assert(kTileTokens == 2 * kStepTokens);
  const Codes codes(tile);
  prefetch_all_scales(next_rows);
  StreamsAhead ahead(next_rows);
  float excess[kAmxRows];
  for (int64_t r = 0; r < rows.count; ++r) excess[r] = codes.excess(rows.weights + r * kTileTokens);
  alignas(64) uint16_t scaled_weights[Tiles::kLefts * kAmxRows * kTileTokens];
  const uint16_t* const weights = kGroup == 0 ? rows.weights : scaled_weights;
  if constexpr (Tiles::kStacked) __builtin_memset(scaled_weights + kHalfLeft, 0, sizeof(*weights) * kHalfLeft);
  const int64_t rows_ahead = dim > kValueDims ? 1 : 2;
  const auto pack = [&]<int kStep, int kPart>(int64_t d) __attribute__((always_inline)) {
    pack_value_part<Tiles::kInterleaved>(codes, tile, kStep * kStepTokens + kPart * kPartTokens, d, rows_ahead, ahead,
                                         panel + kStep * kStepSize + kPart * (kPartTokens / 2) * kValueDims);
  };
  const auto multiply = [&]<int kStep, int n>() __attribute__((always_inline)) {
    multiply_values<Tiles, kStep, n>(weights, panel + kStep * kStepSize);
  };
  tiles.set_rows(kAmxRows);
  for (int64_t d = 0; d < dim; d += kValueDims) {
    for_each_constant<kValueVectors>([&]<int n>() __attribute__((always_inline)) {
      pack.template operator()<0, n>(d);
      if (d > 0) multiply.template operator()<1, n>();
    });
    if (d > 0) add_value_sums<Tiles>(rows, excess, d - kValueDims);
    if constexpr (kGroup != 0) {
      for (int g = 0; g < Tiles::kGroups; ++g) {
        scales.scale(d / kGroup + g, rows.scores, rows.weights, rows.count,
                     scaled_weights + Tiles::first_weight(g) * kTileTokens);
      }
    }
    for_each_constant<kValueVectors>([&]<int n>() __attribute__((always_inline)) {
      pack.template operator()<1, n>(d);
      multiply.template operator()<0, n>();
    });
  }
  for_each_constant<kValueVectors>([&]<int n>()
                                       __attribute__((always_inline)) { multiply.template operator()<1, n>(); });
  add_value_sums<Tiles>(rows, excess, dim - kValueDims);
}

// Adds the products of all rows; all attend to the same keys.
inline void accumulate_codes_amx(AmxTiles& tiles, const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const NextRows& next_rows, const Scratch& scratch) {
  auto* const panel = reinterpret_cast<uint32_t*>(scratch.value);
  const GroupScales scales(cache, tile, scratch.key);
  const auto add = [&]<typename Codes, int kGroup, int kRows = kAmxRows>() {
    accumulate_rows_of<Codes, kGroup, kRows>(tiles, rows, tile, next_rows, cache.dim, scales, panel);
  };
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token: return add.template operator()<BytePairs<Float8Unpacker<E4M3Code>>, 0>();
    case Format::E5M2: return add.template operator()<BytePairs<Float8Unpacker<E5M2Code>>, 0>();
    case Format::MXFP8: return add.template operator()<BytePairs<Float8Unpacker<E4M3Code>>, 32>();
    case Format::I8Token: return add.template operator()<BytePairs<Int8Unpacker>, 0>();
    case Format::I4Token: return add.template operator()<NibblePairs<Int4Codes>, 0>();
    case Format::FP4Block16:
    case Format::NVFP4:
      if (rows.count <= 4) return add.template operator()<NibblePairs<E2M1Codes>, 16, 4>();
      if (rows.count <= 8) return add.template operator()<NibblePairs<E2M1Codes>, 16, 8>();
      return add.template operator()<NibblePairs<E2M1Codes>, 16>();
  }
}

#else

inline void accumulate_codes_amx(AmxTiles&, const HeadRows&, const Cache&, const StoredTile&, const NextRows&,
                                 const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
