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

#include "pagecore/ops/cpu/kernels/latent_multiply.hpp"
#include "pagecore/ops/cpu/kernels/panels.hpp"

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

// Writes the scores of four tokens and 16 query rows to out [4, columns].
inline void score_quads(const char* tokens, int64_t stride, const float* panel, int64_t width, int64_t columns,
                        float* out, RowPrefetch& prefetch) {
  RowPrefetch next = prefetch;
  Vec sums[kQuadTokens][4] = {};
  for (int64_t d = 0; d < width; d += kQuadBytes / 2, panel += 4 * columns, tokens += kQuadBytes) {
    next.step();
    Vec quads[kQuadTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kQuadTokens; ++t) quads[t] = repeat_quad(tokens + t * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec queries = load(panel + i * kLanes);
#pragma GCC unroll 4
      for (int t = 0; t < kQuadTokens; ++t) sums[t][i] = add_pairs(sums[t][i], quads[t], queries);
    }
  }
  prefetch = next;
#pragma GCC unroll 4
  for (int t = 0; t < kQuadTokens; ++t) {
    store(out + t * columns, add_ones(add_twos(sums[t][0], sums[t][2]), add_twos(sums[t][1], sums[t][3])));
  }
}

// Writes the scores of tokens [first, last) of a group, and of up to three tokens on either side.
inline void score_group(const TileRows& tile, int group, int first, int last, const float* panel, int64_t width,
                        int64_t columns, float* scores, RowPrefetch& prefetch) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    for (int t = first / kQuadTokens * kQuadTokens; t < last; t += kQuadTokens) {
      score_quads(tile.group[group] + t * tile.stride, tile.stride, panel + 4 * column, width, columns,
                  scores + (group * kGroupTokens + t) * columns + column, prefetch);
    }
  }
}

// Adds the products of 16 or 32 columns for eight rows.
template <int N>
void add_value_block(const TileRows& tile, int64_t column, const ValueProduct& p, int64_t row, RowPrefetch& prefetch) {
  RowPrefetch next = prefetch;
  Vec sums[kValueRows][N] = {};
  const uint32_t* weights = p.weights + (row * kTileTokens + tile.first * kGroupTokens) / 2;
#pragma GCC unroll 1
  for (int group = tile.first; group < tile.last; ++group) {
    const char* values = tile.group[group] + 2 * column;
    for (int t = 0; t < kGroupTokens; t += 2, values += 2 * tile.stride, ++weights) {
      next.step();
      // A row has 32 numbers or more from any multiple of 16 on.
      const auto a = (Halves)load(reinterpret_cast<const float*>(values));
      const auto b = (Halves)load(reinterpret_cast<const float*>(values + tile.stride));
      const Vec pairs[2] = {(Vec)zip<0>(a, b, TwiceLanes{}), (Vec)zip<kLanes>(a, b, TwiceLanes{})};
#pragma GCC unroll 8
      for (int r = 0; r < kValueRows; ++r) {
        const Vec weight = (Vec)(BitVec{} + weights[r * kTileTokens / 2]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sums[r][n] = add_pairs(sums[r][n], weight, pairs[n]);
      }
    }
  }
  prefetch = next;
#pragma GCC unroll 8
  for (int r = 0; r < kValueRows; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      add_product(p.acc + (row + r) * p.stride + column + n * kLanes, sums[r][n], p.factor + row + r);
    }
  }
}

// Adds the products of `rows` rows, a multiple of 8, with the first `latent` numbers of each token.
inline void add_values(const TileRows& tile, int64_t latent, const ValueProduct& p, int64_t rows,
                       RowPrefetch& prefetch) {
  for (int64_t column = 0; column < latent; column += kValueColumns) {
    for (int64_t row = 0; row < rows; row += kValueRows) {
      if (latent - column < kValueColumns) {
        add_value_block<1>(tile, column, p, row, prefetch);
      } else {
        add_value_block<2>(tile, column, p, row, prefetch);
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
inline void score_group(const TileRows&, int, int, int, const float*, int64_t, int64_t, float*, RowPrefetch&) {
  __builtin_trap();
}
inline void add_values(const TileRows&, int64_t, const ValueProduct&, int64_t, RowPrefetch&) { __builtin_trap(); }
inline bool are_finite(const TileRows&, int64_t) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
