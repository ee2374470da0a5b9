// Products of the bfloat16 rows of a tile where they are, for AVX-512 with bfloat16 instructions. No tile is packed.
//
//   scores^T [64 tokens, rows] = tile . queries
//     A vector of the query panel has four query rows x four pairs of depth. Four pairs of a token are repeated in each
//     quarter of a vector, so a block of four tokens x 16 rows takes eight loads for 16 products. A lane sums every
//     fourth pair; the four lanes of a row are added at the end.
//
//   sums [rows, latent] = factor * sums + weights [rows, 64] . values [64, latent]
//     The values of two tokens are interleaved in registers, 32 columns at a time, for eight rows.
//
// Each sum adds its products in one order, so the bits of a row do not depend on the other rows.
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_multiply.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Adjacent tokens of a tile whose unpacked rows are adjacent.
constexpr int kGroupTokens = 16;
constexpr int kTileGroups = static_cast<int>(kTileTokens) / kGroupTokens;

// The unpacked rows of groups [first, last) of a tile, `stride` bytes apart in each.
struct TileRows {
  const char* group[kTileGroups];
  int64_t stride;
  int first = 0;
  int last = kTileGroups;
};

// Rows to prefetch during the products of a tile: one for each of its tokens, `advance` bytes in each step.
struct RowsAhead {
  const char* const* rows = nullptr;
  int count = 0;
  int64_t advance = 0;
};

// The right side of the scores, and where they go.
struct QuadScores {
  const float* panel;
  int64_t width;
  int64_t columns;
  float scale;
  float* scores;  // [64, columns]
  float* top;     // [columns], raised to the greatest score of each row
};

// The weights of a tile, pairs of tokens, and the sums that they are added to.
struct ValueProduct {
  const uint32_t* weights;  // [rows, 32]
  float* acc;               // [rows, stride]
  int64_t stride;
  const float* factor;  // [rows]
};

#if defined(__AVX512BF16__) && !defined(PC_AMX)

constexpr bool kHasQuads = true;

constexpr int kQuadTokens = 4;  // of a block of scores
constexpr int kQuadBytes = 16;  // four pairs
constexpr int kValueRows = 8;   // of a block of sums
constexpr int64_t kValueColumns = 2 * kLanes;

PC_FORCE_INLINE Vec add_pairs(Vec sum, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

PC_FORCE_INLINE Vec repeat_quad(const char* p) {
  return (Vec)_mm512_maskz_broadcast_i32x4(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Writes query row `row` of `width` numbers to the panel [width / 8][columns / 16][4 vectors]. Row 4 q + i of 16 is
// quarter q of vector i, so that score_quads() gives the rows in order.
inline void pack_quads(const uint16_t* numbers, int64_t width, int64_t columns, int64_t row, float* panel) {
  const int64_t place = row / kLanes * kLanes + row % 4 * 4 + row % kLanes / 4;
  char* to = reinterpret_cast<char*>(panel) + place * kQuadBytes;
  for (int64_t d = 0; d < width; d += kQuadBytes / 2, to += columns * kQuadBytes) {
    __builtin_memcpy(to, numbers + d, kQuadBytes);
  }
}

// Lines to prefetch during the `steps` of a block: four rows, or one run of lines.
struct LinesAhead {
  const char* run[kQuadTokens];
  int runs;
  int64_t steps;  // of each run
  int64_t advance;
};

// Returns the rows to prefetch for four tokens from `place` on; `tokens` again if there are none.
PC_FORCE_INLINE LinesAhead lines_ahead(const RowsAhead& next, int place, const char* tokens, int64_t width) {
  const int64_t steps = width / (kQuadBytes / 2), row = steps / kQuadTokens * next.advance;
  if (place + kQuadTokens > next.count) return {{tokens}, 1, steps, 0};
  const char* const* rows = next.rows + place;
  if (rows[1] - rows[0] == row && rows[2] - rows[1] == row && rows[3] - rows[2] == row) {
    return {{rows[0]}, 1, steps, next.advance};
  }
  return {{rows[0], rows[1], rows[2], rows[3]}, kQuadTokens, steps / kQuadTokens, next.advance};
}

// Writes the scores of four tokens and 16 query rows to out [4, columns], and prefetches lines meanwhile.
//
// Not inlined: its loop needs all registers.
[[gnu::noinline]] inline void score_quads(const QuadScores& p, const char* tokens, int64_t stride, int64_t column,
                                          float* out, const LinesAhead& ahead) {
  const float* panel = p.panel + 4 * column;
  const int64_t panel_stride = 4 * p.columns, advance = ahead.advance;
  Vec sums[kQuadTokens][4] = {};
#pragma GCC unroll 1
  for (int run = 0; run < ahead.runs; ++run) {
    const char* line = ahead.run[run];
    int64_t step = ahead.steps;
    do {
      __builtin_prefetch(line, 0, 3);
      Vec quads[kQuadTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kQuadTokens; ++t) quads[t] = repeat_quad(tokens + t * stride);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Vec queries = load(panel + i * kLanes);
#pragma GCC unroll 4
        for (int t = 0; t < kQuadTokens; ++t) sums[t][i] = add_pairs(sums[t][i], quads[t], queries);
      }
      line += advance;
      panel += panel_stride;
      tokens += kQuadBytes;
    } while (--step > 0);
  }
  Vec top = load(p.top + column);
#pragma GCC unroll 4
  for (int t = 0; t < kQuadTokens; ++t) {
    const Vec x =
        join_ones<Add>(join_twos<Add>(sums[t][0], sums[t][2]), join_twos<Add>(sums[t][1], sums[t][3])) * p.scale;
    store(out + t * p.columns, x);
    top = max(top, x);
  }
  store(p.top + column, top);
}

// Writes the scores of tokens [first, last) of a group, and of up to three tokens on either side.
inline void score_group(const TileRows& tile, int group, int first, int last, const QuadScores& p,
                        const RowsAhead& next) {
  for (int64_t column = 0; column < p.columns; column += kLanes) {
    for (int t = first / kQuadTokens * kQuadTokens; t < last; t += kQuadTokens) {
      const char* tokens = tile.group[group] + t * tile.stride;
      const int place = group * kGroupTokens + t;
      const LinesAhead ahead = lines_ahead(column == 0 ? next : RowsAhead{}, place, tokens, p.width);
      score_quads(p, tokens, tile.stride, column, p.scores + place * p.columns + column, ahead);
    }
  }
}

// {quarter kFrom of a, of b, quarter kFrom + 1 of a, of b}
template <int kFrom, int... I>
PC_FORCE_INLINE Vec zip_quarters(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I / 8 + kFrom) * 4 + I / 4 % 2 * kLanes + I % 4)...);
}

// Adds the products of 16 or 32 columns for eight rows.
template <int N>
[[gnu::noinline]] void add_value_block(const TileRows& tile, int64_t column, const ValueProduct& p, int64_t row) {
  Vec sums[kValueRows][2] = {};
  const uint32_t* weights = p.weights + (row * kTileTokens + tile.first * kGroupTokens) / 2;
#pragma GCC unroll 1
  for (int group = tile.first; group < tile.last; ++group) {
    const char* values = tile.group[group] + 2 * column;
#pragma GCC unroll 1
    for (int t = 0; t < kGroupTokens; t += 2, values += 2 * tile.stride, ++weights) {
      // A row has 32 numbers or more from any multiple of 16 on.
      const auto a = (Halves)load(reinterpret_cast<const float*>(values));
      const auto b = (Halves)load(reinterpret_cast<const float*>(values + tile.stride));
      // Zips in each quarter of a vector take any port of the processor; the quarters change places below.
      const Vec pairs[2] = {(Vec)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b),
                            (Vec)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b)};
#pragma GCC unroll 8
      for (int r = 0; r < kValueRows; ++r) {
        const Vec weight = (Vec)(BitVec{} + weights[r * kTileTokens / 2]);
        sums[r][0] = add_pairs(sums[r][0], weight, pairs[0]);
        sums[r][1] = add_pairs(sums[r][1], weight, pairs[1]);
      }
    }
  }
  float* out = p.acc + row * p.stride + column;
#pragma GCC unroll 8
  for (int r = 0; r < kValueRows; ++r, out += p.stride) {
    const Vec parts[2] = {zip_quarters<0>(sums[r][0], sums[r][1], Lanes{}),
                          zip_quarters<2>(sums[r][0], sums[r][1], Lanes{})};
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      store(out + n * kLanes, fma(load(out + n * kLanes), splat(p.factor[row + r]), parts[n]));
    }
  }
}

// Adds the products of `rows` rows, a multiple of 8, with the first `latent` numbers of each token.
inline void add_values(const TileRows& tile, int64_t latent, const ValueProduct& p, int64_t rows) {
  for (int64_t column = 0; column < latent; column += kValueColumns) {
    for (int64_t row = 0; row < rows; row += kValueRows) {
      if (latent - column < kValueColumns) {
        add_value_block<1>(tile, column, p, row);
      } else {
        add_value_block<2>(tile, column, p, row);
      }
    }
  }
}

// Returns true if the first `latent` numbers of all tokens are finite.
inline bool are_finite(const TileRows& tile, int64_t latent) {
  Halves top = {};  // exponents
  for (int group = tile.first; group < tile.last; ++group) {
    const char* row = tile.group[group];
    for (int t = 0; t < kGroupTokens; ++t, row += tile.stride) {
      int64_t d = 0;
      for (; d + kValueColumns <= latent; d += kValueColumns) {
        top = max(top, (Halves)load(reinterpret_cast<const float*>(row + 2 * d)) & 0x7f80);
      }
      if (d < latent) top = max(top, (Halves)_mm512_maskz_loadu_epi16(0xffff, row + 2 * d) & 0x7f80);
    }
  }
  return _mm512_cmpeq_epi16_mask((__m512i)top, _mm512_set1_epi16(0x7f80)) == 0;
}

#else

constexpr bool kHasQuads = false;

inline void pack_quads(const uint16_t*, int64_t, int64_t, int64_t, float*) { __builtin_trap(); }
inline void score_group(const TileRows&, int, int, int, const QuadScores&, const RowsAhead&) { __builtin_trap(); }
inline void add_values(const TileRows&, int64_t, const ValueProduct&, int64_t) { __builtin_trap(); }
inline bool are_finite(const TileRows&, int64_t) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
