// Scores of few query rows from the codes of keys: pairs of bfloat16 of 16 keys are made in registers and multiplied at
// once, so that the loads, the lookups and the products of neighbouring steps overlap.
//
// 64 bytes of 16 rows are transposed, so that a lane is a key. A step makes four vectors of pairs, of eight dims:
//
//   codes of 4 bits    a dword is the dims d .. d + 7      pairs {d, d + 4} {d + 1, d + 5} {d + 2, d + 6} {d + 3, d +
//   7} codes of 8 bits    a dword is the dims d .. d + 3      pairs {d, d + 2} {d + 1, d + 3}, and those of the next
//   dword
//
// order_queries() gives the query rows that order. Sums of groups are multiplied with the scales of the groups.
#pragma once

#include "pagecore/ops/cpu/kernels/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/group_scales.hpp"
#include "pagecore/ops/cpu/kernels/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Up to this number of query rows, codes are multiplied without a panel.
constexpr int64_t kCodeRows = 8;

#if defined(__AVX512VBMI__)

// Vectors of pairs that a step makes, and their dims.
constexpr int kStepVectors = 4;
constexpr int64_t kStepDims = 8;

// Prefetches rows, one at each step. Few variables, because the products need the registers.
class StepPrefetch {
 public:
  PC_FORCE_INLINE StepPrefetch() = default;
  // The rows at the indices from `place` on, `count` of them.
  PC_FORCE_INLINE StepPrefetch(const NextRows& next_rows, int place, int count)
      : base_(next_rows.rows.base),
        next_(next_rows.rows.offsets + place),
        end_(base_ == nullptr ? next_ : next_ + count),
        last_line_((next_rows.row_bytes - 1) / kLine * kLine) {
    for (int i = place; i < place + count; ++i) prefetch_scales(next_rows, i);
  }

  PC_FORCE_INLINE void step() {
    if (next_ == end_) return;
    const char* row = base_ + *next_++;
    prefetch_line_near(row);
    for (int64_t i = kLine; i < last_line_; i += kLine) prefetch_line_near(row + i);
    prefetch_line_near(row + last_line_);
  }
  PC_FORCE_INLINE void rest() {
    while (next_ != end_) step();
  }

 private:
  const char* base_ = nullptr;
  const int64_t *next_ = nullptr, *end_ = nullptr;
  int64_t last_line_ = 0;
};

// Loads 32 bytes of the rows k, k + 4, k + 8, k + 12: the first and the last 16 bytes of each row, one row a quarter.
PC_FORCE_INLINE void load_quarters(const char* const* rows, int64_t at, int k, Bytes& first, Bytes& second) {
  const auto half = [&](int row) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + at));
  };
  const auto both = [&](int row) __attribute__((always_inline)) {
    return (Vec)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(row)), half(row + 4), 1);
  };
  const Vec a = both(k), b = both(k + 8);
  first = (Bytes)even_quarters(a, b), second = (Bytes)odd_quarters(a, b);
}

// Writes `bytes` bytes of 16 rows as [bytes / 16][4] vectors: vector k has 16 bytes of the rows k, k + 4, k + 8, k
// + 12.
PC_FORCE_INLINE void gather_quarters(const char* const* rows, int64_t bytes, float* to) {
  for (int64_t at = 0; at < bytes; at += 32, to += 8 * kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      Bytes first, second;
      load_quarters(rows, at, k, first, second);
      store(to + k * kLanes, (Vec)first);
      store(to + (4 + k) * kLanes, (Vec)second);
    }
  }
}

// The four dwords of 16 bytes of 16 rows, one row a lane.
PC_FORCE_INLINE void load_dwords(const float* quarters, Vec* dwords) {
  const Vec k0 = load(quarters), k1 = load(quarters + kLanes), k2 = load(quarters + 2 * kLanes),
            k3 = load(quarters + 3 * kLanes);
  const Vec a = zip_low(k0, k2), b = zip_low(k1, k3), c = zip_high(k0, k2), d = zip_high(k1, k3);
  dwords[0] = zip_low(a, b), dwords[1] = zip_high(a, b);
  dwords[2] = zip_low(c, d), dwords[3] = zip_high(c, d);
}

// Adds the products of one step to its sums. `query` has eight numbers of each row.
template <typename Codes, int R, int kChains>
PC_FORCE_INLINE void multiply_step(const Codes& codes, const Vec* dwords, const uint16_t* query,
                                   Vec (&sums)[R][kChains]) {
  PairVec pairs[kStepVectors];
#pragma GCC unroll 2
  for (int i = 0; i < Codes::kStepDwords; ++i) {
    codes.keys(dwords[i], pairs + i * kStepVectors / Codes::kStepDwords);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) {
      sums[r][v % kChains] = dot_splat(pairs[v], query + r * kStepDims + 2 * v, sums[r][v % kChains]);
    }
  }
}

// Scores [R, 64] of 16 keys from gather_quarters(). `scales` are those of their groups, [groups, 64].
template <typename Codes, int kGroup, int R>
PC_FORCE_INLINE void score_sixteen(const Codes& codes, const uint16_t* query, const float* quarters, int64_t dim,
                                   const float* scales, StepPrefetch prefetch, float* scores) {
  constexpr int kChains = kGroup == 0 ? kStepVectors : 2, kDwords = Codes::kStepDwords, kSteps = 4;
  Vec sums[R][kChains] = {};
  [[maybe_unused]] Vec totals[R] = {};
  for (int64_t d = 0; d < dim; d += kSteps * kStepDims) {
    Vec dwords[kSteps * kDwords];
#pragma GCC unroll 2
    for (int i = 0; i < kDwords; ++i, quarters += 4 * kLanes) load_dwords(quarters, dwords + 4 * i);
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step, query += R * kStepDims) {
      prefetch.step();
      multiply_step(codes, dwords + step * kDwords, query, sums);
      if constexpr (kGroup != 0) {
        if ((step + 1) * kStepDims % kGroup != 0) continue;
        const Vec scale = load(scales);
        scales += kTileTokens;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          totals[r] = fma(sums[r][0] + sums[r][1], scale, totals[r]);
          sums[r][0] = sums[r][1] = Vec{};
        }
      }
    }
  }
  prefetch.rest();
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if constexpr (kGroup == 0) totals[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
    store(scores + r * kTileTokens, totals[r]);
  }
}

template <typename Codes, int kGroup>
void score_codes_of(const HeadRows& rows, const StoredTile& tile, const NextRows& ahead, const float* scales,
                    const Cache& cache, float* quarters) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim, bytes = row_bytes(cache);
  Codes codes(tile);
  for (int t = 0; t < kTileTokens; t += kLanes) {
    codes.set_tokens(t);
    gather_quarters(tile.codes + t, bytes, quarters);
    for_each_row_block(rows.count, [&]<int R>(int64_t row) __attribute__((always_inline)) {
      score_sixteen<Codes, kGroup, R>(codes, rows.query_pairs + row * rows.query_stride, quarters, dim, scales + t,
                                      row == 0 ? StepPrefetch(next_rows, t, kLanes) : StepPrefetch(),
                                      rows.scores + row * kTileTokens + t);
    });
  }
}

// Scores of all rows. The queries are in the order of order_queries().
inline void score_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows,
                        const Scratch& scratch) {
  float* scales = scratch.key;
  auto* quarters = reinterpret_cast<float*>(scratch.unpacked);
  if (group_size(cache.format) != 0) expand_scales(cache, tile, scales);
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 0>(rows, tile, next_rows, scales, cache, quarters);
    case Format::E5M2:
      return score_codes_of<BytePairs<Float8Unpacker<E5M2Code>>, 0>(rows, tile, next_rows, scales, cache, quarters);
    case Format::MXFP8:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 32>(rows, tile, next_rows, scales, cache, quarters);
    case Format::I8Token:
      return score_codes_of<BytePairs<Int8Unpacker>, 0>(rows, tile, next_rows, scales, cache, quarters);
    case Format::I4Token:
      return score_codes_of<NibblePairs<Int4Codes>, 0>(rows, tile, next_rows, scales, cache, quarters);
    case Format::FP4Block16:
    case Format::NVFP4:
      return score_codes_of<NibblePairs<E2M1Codes>, 16>(rows, tile, next_rows, scales, cache, quarters);
  }
}

// Orders the numbers of `count` query rows for score_codes(): for each block of rows, those of a step are together, and
// the first and the second half of the dims of a dword alternate. `given` is scratch.
inline void order_queries(const Cache& cache, uint16_t* rows, int64_t count, uint16_t* given) {
  const int64_t half = row_bytes(cache) == cache.dim ? 2 : 4, dim = cache.dim;
  for (int64_t first = 0; first < count; first += kBlockRows, rows += kBlockRows * dim) {
    const int64_t block = count - first < kBlockRows ? count - first : kBlockRows;
    __builtin_memcpy(given, rows, static_cast<size_t>(block * dim) * sizeof *rows);
    uint16_t* to = rows;
    for (int64_t d = 0; d < dim; d += kStepDims) {
      for (int64_t r = 0; r < block; ++r) {
        const uint16_t* from = given + r * dim + d;
        for (int64_t i = 0; i < kStepDims; ++i) *to++ = from[i / (2 * half) * (2 * half) + i / 2 % half + i % 2 * half];
      }
    }
  }
}

#else

inline void score_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}
inline void order_queries(const Cache&, uint16_t*, int64_t, uint16_t*) {}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
