// Scores of few query rows from codes of keys with scales of groups, with AMX: products of all groups have sums of
// their own, which are multiplied with the scales in float32.
//
// e2m1, groups of 16, up to 8 rows: 4 groups of 4 rows, or 2 groups of 8 rows
//
//   left    [groups x rows][32 dims]         queries; a row of a tile has the dims of its group, and 0 for the others
//   right   [16 pairs of dims][16 keys]      codes as bfloat16: transposed, so that a column is a key. A pair has the
//                                            numbers i and i + 4 of 8 dims, whose codes are in the words of a dword
//   sums    [groups x rows][16 keys]         of 64 or 32 dims
//
// mxfp8, groups of 32, up to 4 rows
//
//   left    [16 keys][32 dims]
//   right   [16 pairs of dims][4 groups x 4 rows]     queries; a column has the dims of its group
//   sums    [16 keys][4 groups x 4 rows]              of 128 dims
#pragma once

#include "pagecore/ops/cpu/kernels/codes/group_scales.hpp"
#include "pagecore/ops/cpu/kernels/codes/pack_key_codes.hpp"
#include "pagecore/ops/cpu/kernels/products/packed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Query rows that a tile has for each of its groups.
constexpr int kFewRows = 4, kMostRows = 8;
constexpr int64_t kTileNumbers = kAmxRows * kAmxColumns;
constexpr int64_t kKeyGroups = kAmxRows / kFewRows;  // of mxfp8

// True if this many query rows are multiplied here.
PC_FORCE_INLINE bool takes_groups(const Cache& cache, int64_t rows) {
  const int64_t size = group_size(cache.format);
  return size == 16 ? rows <= kMostRows : size == 32 && rows <= kFewRows && cache.dim % (size * kKeyGroups) == 0;
}

// ---- groups of 16

// Packs query rows [count, dim] as left sides, [dim / 32, 16, 32].
inline void pack_left_queries(const uint16_t* query, int64_t count, int64_t dim, uint32_t* panel) {
  const int64_t group_rows = count <= kFewRows ? kFewRows : kMostRows, groups = kAmxRows / group_rows;
  auto* const numbers = reinterpret_cast<uint16_t*>(panel);
  __builtin_memset(numbers, 0, static_cast<size_t>(dim * kAmxRows) * sizeof *numbers);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t d = 0; d < dim; d += 16) {
      const int64_t row = d / 16 % groups * group_rows + r;
      uint16_t* const to = numbers + (d / kAmxDepth * kAmxRows + row) * kAmxDepth + d % kAmxDepth;
      for (int i = 0; i < 16; ++i) to[i] = query[r * dim + d + i / 8 * 8 + i % 2 * 4 + i % 8 / 2];
    }
  }
}

// Writes 32 dims of 16 keys from byte `at` of their rows on, as a right side.
PC_FORCE_INLINE void pack_group_keys(const E2M1Lookup& lookup, const char* const* keys, int64_t at, uint32_t* panel) {
  constexpr int kDwords = 4;
  Vec dwords[kDwords];
#pragma GCC unroll 4
  for (int i = 0; i < kDwords; ++i) {
    const auto quarter = [&](int n) __attribute__((always_inline)) {
      return reinterpret_cast<const float*>(keys[n + i] + at);
    };
    dwords[i] = load_quarters(quarter(0), quarter(4), quarter(8), quarter(12));
  }
  transpose_squares(dwords);
#pragma GCC unroll 4
  for (int j = 0; j < kDwords; ++j, panel += 4 * kAmxColumns) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      store_words(reinterpret_cast<uint16_t*>(panel + i * kAmxColumns), lookup.of_low_bits((BitVec)dwords[j] >> 4 * i));
    }
  }
}

// Tiles of score_e2m1_groups(): the queries of 128 dims stay in theirs.
constexpr int kQueryTile = 4, kKeyTile = 2;
constexpr int64_t kQueryTiles = 4;

// Multiplies 32 dims with query tile kPart. Stores the sums [16, 16] of 64 dims if these have room for 4 rows, and
// of 32 dims if they have room for 8.
template <int kRows, int kPart>
PC_FORCE_INLINE void multiply_group_keys(const uint32_t* keys, float* sums) {
  constexpr bool kShared = kRows == kFewRows;
  constexpr int kHalf = kPart % 2, kRight = kKeyTile + kHalf, kSum = kShared ? kPart / 2 : kHalf;
  if constexpr (kHalf == 0 || !kShared) Amx::zero<kSum>();
  Amx::load<kRight>(keys, kAmxRowBytes);
  Amx::multiply<kSum, kQueryTile + kPart, kRight>();
  if constexpr (kHalf == 1 || !kShared) Amx::store<kSum>(sums + (kShared ? 0 : kHalf) * kTileNumbers, kAmxRowBytes);
}

// Stores the scores of 16 keys. `scales` are those of the first group, 64 from one group to the next.
template <int kRows>
PC_FORCE_INLINE void add_group_sums(const float* sums, const float* scales, int64_t dim, int64_t count, float* scores) {
  Vec of_rows[kRows] = {};
  for (int64_t g = 0; g < dim / 16; ++g, sums += kRows * kAmxColumns, scales += kTileTokens) {
    const Vec scale = load(scales);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) of_rows[r] = fma(load(sums + r * kAmxColumns), scale, of_rows[r]);
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r) {
    if (r == count) break;
    store(scores + r * kTileTokens, of_rows[r]);
  }
}

// Prefetches 8 rows from the place kFirst on.
template <int kFirst>
PC_FORCE_INLINE void prefetch_eight(const RowAhead& ahead) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) ahead.prefetch_streams(kFirst + i);
}

// Scores of up to kRows rows. The dim is a constant if kDim is not 0. Keys are packed a step before they are
// multiplied, and their sums are added a step later, so that products wait neither for stores nor for each other.
// Packing takes turns with products, so that they overlap.
template <int kRows, int64_t kDim>
inline void score_e2m1_groups(const HeadRows& rows, const uint32_t* queries, const Cache& cache, const StoredTile& tile,
                              const NextRows& next_rows, const Scratch& scratch) {
  const int64_t dim = kDim == 0 ? cache.dim : kDim;
  const int64_t sums_size = dim * kRows, keys_size = dim / kAmxDepth * kTileNumbers;
  const E2M1Lookup lookup(tile.tables);
  const RowAhead ahead = rows_ahead(next_rows, tile);
  static_assert(kDim == 0 || kDim == kQueryTiles * kAmxDepth);
  // Of 64 * dim floats: the scales [groups, 64], the sums and the keys of two steps.
  float* const scales = scratch.key;
  float* const sums = scales + dim / 16 * kTileTokens;
  auto* const keys = reinterpret_cast<uint32_t*>(sums + 2 * sums_size);
  expand_scales(cache, tile, scales);
  const auto pack = [&](int run, int64_t part) __attribute__((always_inline)) {
    pack_group_keys(lookup, tile.codes + run * kAmxRows, part * kAmxDepth / 2,
                    keys + run % 2 * keys_size + part * kTileNumbers);
  };
  const auto add = [&](int run) __attribute__((always_inline)) {
    const int64_t first = run * kAmxRows;
    add_group_sums<kRows>(sums + run % 2 * sums_size, scales + first, dim, rows.count, rows.scores + first);
  };
  const int64_t parts = dim / kAmxDepth;
  const auto load_queries = [&](int64_t part) __attribute__((always_inline)) {
    for_each_constant<kQueryTiles>([&]<int i>() __attribute__((always_inline)) {
      if (part + i < parts) Amx::load<kQueryTile + i>(queries + (part + i) * kTileNumbers, kAmxRowBytes);
    });
  };
  for (int64_t part = 0; part < parts; ++part) pack(0, part);
  if (kDim != 0) load_queries(0);
  for_each_constant<kRuns>([&]<int run>() __attribute__((always_inline)) {
    prefetch_eight<run * kAmxRows>(ahead);
    for (int64_t first = 0; first < parts; first += kQueryTiles) {
      if (kDim == 0) load_queries(first);
      for_each_constant<kQueryTiles>([&]<int i>() __attribute__((always_inline)) {
        const int64_t part = first + i;
        if (part >= parts) return;
        if constexpr (run + 1 < kRuns) pack(run + 1, part);
        multiply_group_keys<kRows, i>(keys + run % 2 * keys_size + part * kTileNumbers,
                                      sums + run % 2 * sums_size + part / 2 * 2 * kAmxDepth * kRows);
      });
    }
    prefetch_eight<run * kAmxRows + 8>(ahead);
    if constexpr (run > 0) add(run - 1);
  });
  add(kRuns - 1);
}

// ---- groups of 32

// Packs up to 4 query rows [count, dim] as right sides, [dim / 2, 16].
inline void pack_right_queries(const uint16_t* query, int64_t count, int64_t dim, uint32_t* panel) {
  __builtin_memset(panel, 0, static_cast<size_t>(dim / 2 * kAmxColumns) * sizeof *panel);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
      const int64_t column = pair / 16 % kKeyGroups * kFewRows + r;
      __builtin_memcpy(panel + pair * kAmxColumns + column, query + r * dim + 2 * pair, sizeof *panel);
    }
  }
}

// Writes `count` keys of codes of 8 bits, in the order of their dims.
template <typename Unpacker>
PC_FORCE_INLINE void unpack_in_order(const Unpacker& unpacker, const char* const* keys, int count, int64_t dim,
                                     uint16_t* rows) {
  for (int i = 0; i < count; ++i, rows += dim) {
    for (int64_t d = 0; d < dim; d += kByteLanes) {
      unpacker.unpack((Bytes)_mm512_loadu_si512(keys[i] + d),
                      [&](int at, Words words) __attribute__((always_inline)) { store_words(rows + d + at, words); });
    }
  }
}

// Adds the products of quarter kQuarter of the dims of 16 keys, and stores the sums [dim / 128, 16, 16].
template <int kQuarter>
PC_FORCE_INLINE void multiply_key_groups(const uint32_t* queries, const uint16_t* keys, int64_t dim, float* sums) {
  constexpr int kLeft = kLeftTile + kQuarter % 2, kRight = kRightTile + kQuarter % 2;
  constexpr int64_t kTileDims = kKeyGroups * kAmxDepth;
  for (int64_t d = kQuarter * dim / 4; d < (kQuarter + 1) * dim / 4; d += kAmxDepth) {
    if (d % kTileDims == 0) Amx::zero<0>();
    Amx::load<kRight>(queries + d / 2 * kAmxColumns, kAmxRowBytes);
    Amx::load<kLeft>(keys + d, 2 * dim);
    Amx::multiply<0, kLeft, kRight>();
    if ((d + kAmxDepth) % kTileDims == 0) Amx::store<0>(sums + d / kTileDims * kTileNumbers, kAmxRowBytes);
  }
}

// Stores the scores of 16 keys, whose scales are bfloat16 [16, groups].
PC_FORCE_INLINE void add_key_sums(const float* sums, const uint16_t* scales, int64_t dim, int64_t count,
                                  float* scores) {
  const LaneScales<static_cast<int>(kKeyGroups)> lanes;
  const int64_t groups = dim / 32;
  Vec of_keys[kAmxRows] = {};
  for (int64_t g = 0; g < groups; g += kKeyGroups, sums += kTileNumbers) {
#pragma GCC unroll 16
    for (int i = 0; i < kAmxRows; ++i) {
      of_keys[i] = fma(load(sums + i * kAmxColumns), lanes.of(scales + i * groups + g), of_keys[i]);
    }
  }
  const auto add_quarters = [](Vec a, Vec b)
                                __attribute__((always_inline)) { return even_quarters(a, b) + odd_quarters(a, b); };
  Vec of_rows[kFewRows];
#pragma GCC unroll 4
  for (int i = 0; i < kFewRows; ++i) {
    of_rows[i] = add_quarters(add_quarters(of_keys[i], of_keys[4 + i]), add_quarters(of_keys[8 + i], of_keys[12 + i]));
  }
  transpose_squares(of_rows);
#pragma GCC unroll 4
  for (int64_t r = 0; r < kFewRows; ++r) {
    if (r == count) break;
    store(scores + r * kTileTokens, of_rows[r]);
  }
}

// As score_e2m1_groups().
template <int64_t kDim>
inline void score_mxfp8_groups(const HeadRows& rows, const uint32_t* queries, const Cache& cache,
                               const StoredTile& tile, const NextRows& next_rows, const Scratch& scratch) {
  const int64_t dim = kDim == 0 ? cache.dim : kDim;
  const Float8Unpacker<E4M3Code> unpacker;
  const RowAhead ahead = rows_ahead(next_rows, tile);
  // Of 64 * dim floats: the scales, and the sums of two steps.
  auto* const scales = reinterpret_cast<uint16_t*>(scratch.key);
  float* const sums = scratch.key + 16 * dim;
  convert_scales(cache, tile, scales);
  const auto keys_of = [&](int run) { return scratch.unpacked + run % 2 * kAmxRows * dim; };
  const auto sums_of = [&](int run) { return sums + run % 2 * kAmxRows * dim; };
  const auto add = [&](int run) __attribute__((always_inline)) {
    const int64_t first = run * kAmxRows;
    add_key_sums(sums_of(run), scales + first * dim / 32, dim, rows.count, rows.scores + first);
  };
  unpack_in_order(unpacker, tile.codes, kAmxRows, dim, keys_of(0));
  for_each_constant<kRuns>([&]<int run>() __attribute__((always_inline)) {
    for_each_constant<4>([&]<int quarter>() __attribute__((always_inline)) {
      constexpr int kKeys = kAmxRows / 4, kFirst = quarter * kKeys;
      if constexpr (quarter % 2 == 0) prefetch_eight<run * kAmxRows + kFirst>(ahead);
      if constexpr (run + 1 < kRuns) {
        unpack_in_order(unpacker, tile.codes + (run + 1) * kAmxRows + kFirst, kKeys, dim,
                        keys_of(run + 1) + kFirst * dim);
      }
      multiply_key_groups<quarter>(queries, keys_of(run), dim, sums_of(run));
    });
    if constexpr (run > 0) add(run - 1);
  });
  add(kRuns - 1);
}

// ---- both

// Packs query rows [count, dim].
inline void pack_group_queries(const Cache& cache, const uint16_t* query, int64_t count, uint32_t* panel) {
  const auto pack = group_size(cache.format) == 16 ? pack_left_queries : pack_right_queries;
  pack(query, count, cache.dim, panel);
}

// The queries are those of pack_group_queries().
inline void score_groups(AmxTiles& tiles, const HeadRows& rows, const uint32_t* queries, const Cache& cache,
                         const StoredTile& tile, const NextRows& next_rows, const Scratch& scratch) {
  constexpr int64_t kUsualDim = 128;
  const bool usual = cache.dim == kUsualDim, few = rows.count <= kFewRows;
  prefetch_all_scales(next_rows);
  tiles.set_rows(kAmxRows);
  auto* score = usual ? score_e2m1_groups<kFewRows, kUsualDim> : score_e2m1_groups<kFewRows, 0>;
  if (!few) score = usual ? score_e2m1_groups<kMostRows, kUsualDim> : score_e2m1_groups<kMostRows, 0>;
  if (cache.format == Format::MXFP8) score = usual ? score_mxfp8_groups<kUsualDim> : score_mxfp8_groups<0>;
  score(rows, queries, cache, tile, next_rows, scratch);
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
