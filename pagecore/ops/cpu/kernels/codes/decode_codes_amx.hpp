// Decode with AMX from the codes of a quantised cache: one tile of keys and at most 16 query rows.
//
//   keys     rows of bfloat16, not transposed, the left side of a panel of the queries. The numbers of a row have the
//            order of code_pairs.hpp, which pack_code_queries() gives the queries too; those of mxfp8 are in order.
//            Up to 4 rows are multiplied with e2m1 by group_scores.hpp.
//   values   a panel of pairs of tokens for each 64 dims
//
// The scales of groups are multiplied with the weights of values, and with the sums of keys; those of groups of 16 are
// part of the numbers of keys if there are more than 4 rows.
//
// The next rows are prefetched while keys and values are unpacked. Few rows are unpacked at a time, in memory that
// stays in L1.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/codes/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/codes/group_scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Writes the numbers of a chunk of a key.
template <int kVectors, int kGroup, typename Codes>
PC_FORCE_INLINE void unpack_chunk(const Codes& codes, const StoredTile& tile, int t, int64_t d,
                                  [[maybe_unused]] const uint16_t* scales, uint16_t* to) {
  [[maybe_unused]] Vec scale;
  if constexpr (kGroup != 0) scale = LaneScales<kVectors * kPairLanes / kGroup>{}.of(scales + d / kGroup);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) {
    PairVec pairs[2];
    codes.template keys<kVectors>(tile, t, d, v, pairs);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      auto words = (Words)pairs[i];
      if constexpr (kGroup != 0) words = scaled(words, scale, scale);
      store_words(to + d + (v + i) * kPairLanes, words);
    }
  }
}

// Writes 16 keys [16, dim] from the token `first` on. `scales` are those of convert_scales().
template <int kGroup, typename Codes>
PC_FORCE_INLINE void unpack_keys(const Codes& codes, const StoredTile& tile, const RowAhead& next, int first,
                                 const uint16_t* scales, int64_t dim, uint16_t* rows) {
  const RowAhead ahead = next;
  for (int t = first; t < first + kAmxRows; ++t, rows += dim) {
    ahead.prefetch_streams(t);
    const uint16_t* const of_token = scales + (kGroup == 0 ? 0 : t * dim / kGroup);
    int64_t d = 0;
    for (; d + 4 * kPairLanes <= dim; d += 4 * kPairLanes) unpack_chunk<4, kGroup>(codes, tile, t, d, of_token, rows);
    if (d < dim) unpack_chunk<2, kGroup>(codes, tile, t, d, of_token, rows);
  }
}

template <typename Codes, int kGroup>
void score_rows_of(AmxTiles& tiles, const HeadRows& rows, const uint32_t* query_panel, const StoredTile& tile,
                   const NextRows& next_rows, int64_t dim, const Scratch& scratch) {
  const Codes codes(tile);
  const RowAhead ahead = rows_ahead(next_rows, tile);
  const auto* const scales = reinterpret_cast<const uint16_t*>(scratch.key);
  prefetch_all_scales(next_rows);
  tiles.set_rows(kAmxRows);
  alignas(64) float sums[kTileTokens][kDecodeRows];
  const auto multiply = [&]<int g>() __attribute__((always_inline)) {
    constexpr int kLeft = kLeftTile + g % 2, kRight = kRightTile + g % 2;
    Amx::zero<g>();
    for (int64_t d = 0; d < dim; d += kAmxDepth) {
      Amx::load<kRight>(query_panel + d / 2 * kDecodeRows, 4 * kDecodeRows);
      Amx::load<kLeft>(scratch.unpacked + g % 2 * kAmxRows * dim + d, 2 * dim);
      Amx::multiply<g, kLeft, kRight>();
    }
    Amx::store<g>(sums[g * kAmxRows], sizeof(sums[0]));
  };
  // A tile waits for the stores of its rows: those of the next one come first.
  for_each_constant<kRuns>([&]<int g>() __attribute__((always_inline)) {
    unpack_keys<kGroup>(codes, tile, ahead, g * kAmxRows, scales, dim, scratch.unpacked + g % 2 * kAmxRows * dim);
    if constexpr (g > 0) multiply.template operator()<g - 1>();
  });
  multiply.template operator()<kRuns - 1>();
  store_scores(sums[0], rows.count, rows.scores);
  if constexpr (Codes::kHasZeroPoints) {
    for (int64_t r = 0; r < rows.count; ++r) {
      const float query_sum = sum_query(rows.query_pairs + r * rows.query_stride, dim);
      float* const scores = rows.scores + r * kTileTokens;
      for (int t = 0; t < kTileTokens; t += kLanes) {
        store(scores + t, fma(codes.zero_points(t), splat(-query_sum), load(scores + t)));
      }
    }
  }
}

// Scores of mxfp8: a group of 32 dims has sums of its own, [groups, 16, 16] for 16 keys, which are multiplied with its
// scales. Keys are unpacked a step before they are multiplied, and their sums are added a step later.
inline void score_mxfp8(AmxTiles& tiles, const HeadRows& rows, const uint32_t* query_panel, const StoredTile& tile,
                        const NextRows& next_rows, int64_t dim, const Scratch& scratch) {
  constexpr int kSums = kAmxRows * static_cast<int>(kAmxColumns);
  const int64_t groups = dim / kAmxDepth;
  const Float8Unpacker<E4M3Code> unpacker;
  // Of 16 rows, 8 are prefetched while keys are unpacked, and the rest for each group.
  StreamsAhead ahead(next_rows);
  const int64_t rows_of_group = (4 + groups - 1) / groups;
  prefetch_all_scales(next_rows);
  tiles.set_rows(kAmxRows);
  // Of 64 * dim floats: the scales as words, as float32 [64, groups], and the sums of two steps.
  const auto* const words = reinterpret_cast<const uint16_t*>(scratch.key);
  float* const scales = scratch.key + 4 * dim;
  for (int64_t i = 0; i < groups * kTileTokens; i += kLanes) store(scales + i, widen_bf16(load_half(words + i)));
  const auto sums_of = [&](int first) { return scratch.key + (first / kAmxRows % 2 + 1) * 16 * dim; };
  const auto unpack = [&](int first) __attribute__((always_inline)) {
    ahead.prefetch(kAmxRows / 2);
    unpack_in_order(unpacker, tile.codes + first, kAmxRows, dim, scratch.unpacked + first % (2 * kAmxRows) * dim);
  };
  const auto multiply = [&](int first) __attribute__((always_inline)) {
    float* sums = sums_of(first);
    for (int64_t d = 0; d < dim; d += 2 * kAmxDepth) {
      ahead.prefetch(2 * rows_of_group);
      for_each_constant<2>([&]<int n>() __attribute__((always_inline)) {
        const int64_t at = d + n * kAmxDepth;
        Amx::load<kRightTile + n>(query_panel + at / 2 * kDecodeRows, 4 * kDecodeRows);
        Amx::load<kLeftTile + n>(scratch.unpacked + first % (2 * kAmxRows) * dim + at, 2 * dim);
        Amx::zero<n>();
        Amx::multiply<n, kLeftTile + n, kRightTile + n>();
        Amx::store<n>(sums, kAmxRowBytes);
        sums += kSums;
      });
    }
  };
  alignas(64) float totals[kTileTokens][kDecodeRows];
  const auto add = [&](int first) __attribute__((always_inline)) {
    const float* sums = sums_of(first);
    Vec of_tokens[kAmxRows] = {};
    for (int64_t g = 0; g < groups; ++g, sums += kSums) {
      ahead.prefetch(rows_of_group);
#pragma GCC unroll 16
      for (int t = 0; t < kAmxRows; ++t) {
        of_tokens[t] = fma(load(sums + t * kAmxColumns), splat(scales[(first + t) * groups + g]), of_tokens[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kAmxRows; ++t) store(totals[first + t], of_tokens[t]);
  };
  unpack(0);
  for (int first = 0; first < kTileTokens; first += kAmxRows) {
    if (first + kAmxRows < kTileTokens) unpack(first + kAmxRows);
    multiply(first);
    if (first > 0) add(first - kAmxRows);
  }
  add(static_cast<int>(kTileTokens) - kAmxRows);
  store_scores(totals[0], rows.count, rows.scores);
}

inline void score_codes_amx(AmxTiles& tiles, const HeadRows& rows, const uint32_t* query_panel, const Cache& cache,
                            const StoredTile& tile, const NextRows& next_rows, const Scratch& scratch) {
  const auto score = [&]<typename Codes, int kGroup>() {
    score_rows_of<Codes, kGroup>(tiles, rows, query_panel, tile, next_rows, cache.dim, scratch);
  };
  if (takes_groups(cache, rows.count)) return score_groups(tiles, rows, query_panel, cache, tile, next_rows, scratch);
  if (group_size(cache.format) != 0) convert_scales(cache, tile, reinterpret_cast<uint16_t*>(scratch.key));
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token: return score.template operator()<BytePairs<Float8Unpacker<E4M3Code>>, 0>();
    case Format::E5M2: return score.template operator()<BytePairs<Float8Unpacker<E5M2Code>>, 0>();
    case Format::MXFP8: return score_mxfp8(tiles, rows, query_panel, tile, next_rows, cache.dim, scratch);
    case Format::I8Token: return score.template operator()<BytePairs<Int8Unpacker>, 0>();
    case Format::I4Token: return score.template operator()<NibblePairs<Int4Codes>, 0>();
    case Format::FP4Block16:
    case Format::NVFP4: return score.template operator()<NibblePairs<E2M1Codes>, 16>();
  }
}

// Packs query rows for score_codes_amx(), and overwrites them. `given` is scratch.
inline void pack_code_queries(const Cache& cache, uint16_t* rows, int64_t count, uint16_t* given, uint32_t* panel) {
  if (takes_groups(cache, count)) return pack_group_queries(cache, rows, count, panel);
  if (cache.format != Format::MXFP8) {
    for (int64_t r = 0; r < count; ++r) order_query(cache, rows + r * cache.dim, given);
  }
  pack_query_pairs(rows, cache.dim, count, cache.dim, panel);
}

// Tokens of a step over values, which fill the depth of a tile, and the tokens of each of its parts.
constexpr int kStepTokens = kAmxDepth, kPartTokens = kStepTokens / kValueVectors;

// Writes the values of 64 dims from d on of kPartTokens tokens as pairs of tokens, [kPartTokens / 2, 64]; prefetches
// `rows_ahead` rows for each pair.
template <typename Codes>
PC_FORCE_INLINE void pack_value_part(const Codes& codes, const StoredTile& tile, int first, int64_t d,
                                     int64_t rows_ahead, StreamsAhead& ahead, uint32_t* panel) {
  for (int t = first; t < first + kPartTokens; t += 2, panel += kValueDims) {
    ahead.prefetch(rows_ahead);
    PairVec pairs[kValueVectors];
    codes.values(tile, t, d, pairs);
#pragma GCC unroll 4
    for (int n = 0; n < kValueVectors; ++n) {
      store_words(reinterpret_cast<uint16_t*>(panel + n * kLanes), (Words)pairs[n]);
    }
  }
}

// Multiplies the weights and the values of step kStep of a tile, vector n of its sums. The weights are those of the
// group n / kShared, 16 rows.
template <int kStep, int n, int kShared>
PC_FORCE_INLINE void multiply_values(const uint16_t* weights, const uint32_t* panel) {
  constexpr int kGroup = n / kShared, kLeft = kLeftTile + kGroup % 2, kRight = kRightTile + n % 2;
  if constexpr (kStep == 0) Amx::zero<n>();
  if constexpr (n % kShared == 0) {
    Amx::load<kLeft>(weights + kGroup * kAmxRows * kTileTokens + kStep * kStepTokens, 2 * kTileTokens);
  }
  Amx::load<kRight>(panel + n * kAmxColumns, 4 * kValueDims);
  Amx::multiply<n, kLeft, kRight>();
}

// Adds the sums of 64 dims from d on.
PC_FORCE_INLINE void add_value_sums(const HeadRows& rows, const float* excess, int64_t d) {
  alignas(64) float sums[kAmxRows][kValueDims];
  for_each_constant<kValueVectors>(
      [&]<int n>() __attribute__((always_inline)) { Amx::store<n>(&sums[0][n * kAmxColumns], sizeof(sums[0])); });
  for (int64_t r = 0; r < rows.count; ++r) {
    float* const out = rows.acc + r * rows.acc_stride + d;
#pragma GCC unroll 4
    for (int n = 0; n < kValueVectors; ++n) {
      add_product(out + n * kLanes, load(sums[r] + n * kLanes) - excess[r], rows.factor + r);
    }
  }
}

// Values are packed a step before they are multiplied, a part before each product, so that packing and products
// overlap. `panel` has room for two steps.
template <typename Codes, int kGroup>
void accumulate_rows_of(AmxTiles& tiles, const HeadRows& rows, const StoredTile& tile, const NextRows& next_rows,
                        int64_t dim, const float* scales, uint32_t* panel) {
  constexpr int kGroups = kGroup == 0 ? 1 : kValueDims / kGroup, kShared = kValueVectors / kGroups;
  constexpr int64_t kStepSize = kStepTokens / 2 * kValueDims;
  static_assert(kTileTokens == 2 * kStepTokens);
  const Codes codes(tile);
  prefetch_all_scales(next_rows);
  StreamsAhead ahead(next_rows);
  float excess[kAmxRows];
  for (int64_t r = 0; r < rows.count; ++r) excess[r] = codes.excess(rows.weights + r * kTileTokens);
  alignas(64) uint16_t scaled_weights[kGroups * kAmxRows * kTileTokens];
  const uint16_t* const weights = kGroup == 0 ? rows.weights : scaled_weights;
  const int64_t rows_ahead = dim > kValueDims ? 1 : 2;
  const auto pack = [&]<int kStep, int kPart>(int64_t d) __attribute__((always_inline)) {
    pack_value_part(codes, tile, kStep * kStepTokens + kPart * kPartTokens, d, rows_ahead, ahead,
                    panel + kStep * kStepSize + kPart * (kPartTokens / 2) * kValueDims);
  };
  const auto multiply = [&]<int kStep, int n>() __attribute__((always_inline)) {
    multiply_values<kStep, n, kShared>(weights, panel + kStep * kStepSize);
  };
  tiles.set_rows(kAmxRows);
  for (int64_t d = 0; d < dim; d += kValueDims) {
    for_each_constant<kValueVectors>([&]<int n>() __attribute__((always_inline)) {
      pack.template operator()<0, n>(d);
      if (d > 0) multiply.template operator()<1, n>();
    });
    if (d > 0) add_value_sums(rows, excess, d - kValueDims);
    if constexpr (kGroup != 0) {
      scale_weights_of_groups<kGroups, kAmxRows>(rows.scores, rows.count, scales + d / kGroup * kTileTokens,
                                                 scaled_weights);
    }
    for_each_constant<kValueVectors>([&]<int n>() __attribute__((always_inline)) {
      pack.template operator()<1, n>(d);
      multiply.template operator()<0, n>();
    });
  }
  for_each_constant<kValueVectors>([&]<int n>()
                                       __attribute__((always_inline)) { multiply.template operator()<1, n>(); });
  add_value_sums(rows, excess, dim - kValueDims);
}

// Adds the products of all rows; all attend to the same keys.
inline void accumulate_codes_amx(AmxTiles& tiles, const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const NextRows& next_rows, const Scratch& scratch) {
  auto* const panel = reinterpret_cast<uint32_t*>(scratch.value);
  float* const scales = scratch.key;
  const auto add = [&]<typename Codes, int kGroup>() {
    accumulate_rows_of<Codes, kGroup>(tiles, rows, tile, next_rows, cache.dim, scales, panel);
  };
  if (group_size(cache.format) != 0) expand_scales(cache, tile, scales);
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token: return add.template operator()<BytePairs<Float8Unpacker<E4M3Code>>, 0>();
    case Format::E5M2: return add.template operator()<BytePairs<Float8Unpacker<E5M2Code>>, 0>();
    case Format::MXFP8: return add.template operator()<BytePairs<Float8Unpacker<E4M3Code>>, 32>();
    case Format::I8Token: return add.template operator()<BytePairs<Int8Unpacker>, 0>();
    case Format::I4Token: return add.template operator()<NibblePairs<Int4Codes>, 0>();
    case Format::FP4Block16:
    case Format::NVFP4: return add.template operator()<NibblePairs<E2M1Codes>, 16>();
  }
}

#else

inline void score_codes_amx(AmxTiles&, const HeadRows&, const uint32_t*, const Cache&, const StoredTile&,
                            const NextRows&, const Scratch&) {
  __builtin_trap();
}
inline void pack_code_queries(const Cache&, uint16_t*, int64_t, uint16_t*, uint32_t*) { __builtin_trap(); }
inline void accumulate_codes_amx(AmxTiles&, const HeadRows&, const Cache&, const StoredTile&, const NextRows&,
                                 const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
