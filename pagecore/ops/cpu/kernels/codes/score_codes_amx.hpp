// Scores of at most 16 query rows from the codes of keys, with AMX: one tile of keys.
//
//   left    [16 keys][32 dims]     rows of bfloat16, not transposed. Their numbers have the order of code_pairs.hpp,
//                                  which pack_code_queries() gives the queries too; those of mxfp8 are in order.
//   right   [16 pairs of dims][16 rows]     queries
//   sums    [16 keys][16 rows]
//
// Few rows are multiplied with e2m1 and mxfp8 by group_scores.hpp. With more, the scales of mxfp8 are multiplied with
// sums, and those of groups of 16 with the numbers of keys.
//
// The next rows are prefetched while keys are unpacked, a few at a time, in memory that stays in L1.
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

#else

inline void score_codes_amx(AmxTiles&, const HeadRows&, const uint32_t*, const Cache&, const StoredTile&,
                            const NextRows&, const Scratch&) {
  __builtin_trap();
}
inline void pack_code_queries(const Cache&, uint16_t*, int64_t, uint16_t*, uint32_t*) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
