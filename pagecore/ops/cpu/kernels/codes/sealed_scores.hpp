// Scores of few query rows from the codes of sealed keys, by exact products of integers.
//
// A number of a key is scale * code + least; both belong to its channel and its group of tokens. For each group, the
// query rows times the scales are made int16, as in integer_scores.hpp. Their products with the least numbers are the
// same for all tokens of the group, and are added as float32.
//
//   words   a and b   codes of the channels d + i and d + kLanes + i, of 8 or 16 tokens
//   pairs   low       {low half of a, low half of b} in each lane: codes of both channels of the older tokens
//           high      {high half of a, high half of b}: those of the newer ones
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_scores.hpp"
#include "pagecore/ops/cpu/kernels/codes/unpack_sealed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// Keys whose codes are multiplied together.
constexpr int kSealedKeys = 8;
// Rows of the largest blocks whose sums over four keys have registers.
constexpr int kSealedRows = kLanes == 16 ? 4 : 2;

// A group of keys for R query rows: the rows times the scales, and what a sum of their integers means.
template <int R>
struct SealedQuery {
  int16_t* pairs;  // [dim / 2 kLanes, R, kLanes], two channels each
  float unit[R];
  float excess[R];  // products with the least numbers
};

// Makes the rows times the scales of a group integers. Returns false if one of them cannot be written so.
template <int R>
PC_FORCE_INLINE bool make_sealed_query(const HeadRows& rows, int64_t row, const SealedPlane& plane, const char* scales,
                                       int64_t dim, float* products, SealedQuery<R>& made) {
  const int64_t size = size_of(plane.scale_type);
  IntVec largest[R] = {};
  Vec excess[R] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec scale = load_scales(plane.scale_type, scales + d * size);
    const Vec least = load_scales(plane.scale_type, scales + d * size + plane.least_stride);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec query = load(rows.query + (row + r) * rows.query_stride + d), product = query * scale;
      largest[r] = max(largest[r], (IntVec)product & kMagnitudeBits);
      excess[r] = fma(query, least, excess[r]);
      store(products + d * R + r * kLanes, product);
    }
  }
  bool is_made = true;
  float factor[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    made.excess[r] = sum(excess[r]);
    is_made &= integer_factor(max_of_lanes(largest[r])[0], factor[r], made.unit[r]);
  }
  if (!is_made) return false;
  int16_t* to = made.pairs;
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r, to += kWordLanes) {
      const float* const of_row = products + d * R + r * kLanes;
      const auto a = (BitVec)nearest(load(of_row) * factor[r]),
                 b = (BitVec)nearest(load(of_row + R * kLanes) * factor[r]);
      *reinterpret_cast<LooseShorts*>(to) = (Shorts)((a & 0xffff) | b << 16);
    }
  }
  return true;
}

// Scores [R, 64] of four keys that share words, from code 4 kFour of each word on.
template <int kBits, int kFour, int R>
PC_FORCE_INLINE void score_four_sealed(const SealedQuery<R>& query, const char* words, int64_t dim, float* scores) {
  constexpr int kCodesInHalf = 16 / kBits, kHalf = kFour * 4 / kCodesInHalf, kFirst = kFour * 4 % kCodesInHalf;
  constexpr auto kMask = static_cast<uint16_t>((1 << kBits) - 1);
  const int16_t* pairs = query.pairs;
  IntVec sums[R][4] = {};
  for (int64_t d = 0; d < dim; d += 2 * kLanes, pairs += R * kWordLanes) {
    const char* const from = words + 4 * d;
    const BitVec a = *reinterpret_cast<const LooseBitVec*>(from);
    const BitVec b = *reinterpret_cast<const LooseBitVec*>(from + 4 * kLanes);
    const auto both = (Words)(kHalf == 0 ? (a & 0xffff) | b << 16 : a >> 16 | (b & 0xffff0000));
    Shorts codes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) codes[i] = (Shorts)(both >> kBits * (kFirst + i) & kMask);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Shorts numbers = load_shorts(pairs + r * kWordLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = add_pairs(sums[r][i], codes[i], numbers);
    }
  }
  Vec of_keys[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) of_keys[r][i] = to_floats(sums[r][i]) * query.unit[r];
  }
  store_sums<R>(of_keys, scores);
}

// Scores [R, 64] of the tokens [begin, end) of a block, which share a group.
template <int kBits, int R>
void score_sealed_group(const SealedQuery<R>& query, const SealedHead& head, int64_t begin, int64_t end, int64_t dim,
                        float* scores) {
  constexpr int kCodes = kCodesInWord<kBits>;
  float* to = scores;
  for (int64_t token = begin; token < end; token += kSealedKeys, to += kSealedKeys) {
    const char* const words = head.words + token / kCodes * head.plane.row_stride;
    prefetch_bytes(words + head.plane.head_stride, 4 * dim);
    const auto score = [&]<int kFour>() __attribute__((always_inline)) {
      score_four_sealed<kBits, kFour, R>(query, words, dim, to);
      score_four_sealed<kBits, kFour + 1, R>(query, words, dim, to + 4);
    };
    if (token % kCodes == 0) {
      score.template operator()<0>();
    } else {
      if constexpr (kBits == 2) score.template operator()<2>();
    }
  }
  for (int r = 0; r < R; ++r) {
    float* const row = scores + r * kTileTokens;
    for (int64_t t = 0; t < end - begin; ++t) row[t] += query.excess[r];
  }
}

// True if tiles of whole sealed blocks are multiplied here.
PC_FORCE_INLINE bool scores_sealed(const SealedPlane& plane, const Cache& newest) {
  return plane.bits != 0 && plane.group % kSealedKeys == 0 && newest.block_size % kSealedKeys == 0 &&
         newest.dim % 64 == 0 && newest.dim <= 2048;
}

// Scores of all rows with a tile of sealed keys. Returns false if it has to be unpacked.
inline bool score_sealed(const HeadRows& rows, const SealedPlane& plane, const Cache& newest, const RowOffsets& places,
                         int64_t head, const Scratch& scratch) {
  const int64_t dim = newest.dim;
  auto* const products = reinterpret_cast<float*>(scratch.unpacked);
  bool made = true;
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    SealedQuery<R> query{};
    query.pairs = scratch.query_integers;
    const auto score = plane.bits == 2 ? score_sealed_group<2, R> : score_sealed_group<4, R>;
    for_each_sealed_run(places, kWholeTile, newest.block_size, [&](int t, int last, int64_t block, int64_t token) {
      const SealedHead of_head{plane, block, head};
      while (made && t < last) {
        const int64_t group = token / plane.group, left = (group + 1) * plane.group - token;
        const int64_t count = left < last - t ? left : last - t;
        const char* const scales = of_head.scales + group * plane.scales_row_stride;
        made = make_sealed_query(rows, row, plane, scales, dim, products, query);
        if (made) score(query, of_head, token, token + count, dim, rows.scores + row * kTileTokens + t);
        t += static_cast<int>(count);
        token += count;
      }
    });
  });
  return made;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
