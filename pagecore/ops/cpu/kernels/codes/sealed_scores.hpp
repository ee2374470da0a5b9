// Scores of few query rows from the codes of sealed keys, by exact products of digits.
//
// A number of a key is scale * code + least; both belong to its channel and its group of tokens. For each group, the
// query rows times the scales are made digits (sealed_digits.hpp). Their products with the least numbers are the same
// for all tokens of the group, and are added as float32.
//
// A quarter of a vector has eight tokens, whose codes of one channel are one word of 4-bit codes, or half a word of
// 2-bit codes. Of four channels, a lane has two tokens:
//
//   words    c0 c1 c2 c3                  bytes of a lane of quarters   c0 c1 c2 c3
//   4 bits   byte l                       token 2 l in the low nibbles, 2 l + 1 in the high ones
//   2 bits   nibble l of a half           the same in the low nibbles, with 2 bits each
#pragma once

#include "pagecore/ops/cpu/kernels/codes/sealed_ahead.hpp"
#include "pagecore/ops/cpu/kernels/codes/sealed_digits.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int kQuarters = kLanes / 4;  // of a vector, which are multiplied together
constexpr int kKeyTokens = kQuarterTokens * kQuarters;
// Dims of keys whose sums 32 bits hold.
constexpr int64_t kMostKeyDims = 2048;
static_assert(kMostKeyDims * kMostCode * 128 * 256 <= INT32_MAX);

// ---- queries

// A group of keys for R query rows: the rows times the scales, and what a sum of their integers means.
template <int R>
struct SealedQuery {
  int8_t* digits;  // [dim / 32, R] panels
  float unit[R];
  float excess[R];  // products with the least numbers
};

// Makes R rows times the scales of a group digits. Returns false if one of them cannot be written so.
template <int R>
PC_FORCE_INLINE bool make_sealed_query(const HeadRows& rows, int64_t row, const SealedPlane& plane, const char* scales,
                                       int64_t dim, float* products, SealedQuery<R>& made) {
  const int64_t stride = rows.query_stride;
  const float* query = rows.query + row * stride;
  const char* leasts = scales + plane.least_stride;
  DigitRows<R> digits;
  Vec excess[R] = {};
  float* to = products;
  for (int64_t d = 0; d < dim; d += kPanel, to += (R - 1) * kPanel) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanel; i += kLanes, query += kLanes, to += kLanes) {
      const Vec scale = load_scales(plane.scale_type, scales), least = load_scales(plane.scale_type, leasts);
      scales += kLanes * size_of(plane.scale_type), leasts += kLanes * size_of(plane.scale_type);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec number = load(query + r * stride);
        excess[r] = fma(number, least, excess[r]);
        digits.put(to, r, number * scale);
      }
    }
  }
  const Vec4 sums = sum_each(excess);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) made.excess[r] = sums[r];
  return digits.write(products, dim / kPanel, made.digits, made.unit);
}

// ---- keys

// The order of the bytes of quarters, for vectors that begin with an even or an odd quarter of their block.
struct QuarterOrder {
  alignas(64) uint8_t bytes[kByteLanes];
};

template <int kBits>
constexpr QuarterOrder quarter_order(int first) {
  QuarterOrder order{};
  for (int i = 0; i < kByteLanes; ++i) {
    const int lane = i / 4 % 4, half = (first + i / 16) % 2;
    order.bytes[i] = static_cast<uint8_t>(i % 4 * 4 + (kBits == 4 ? lane : 2 * half + lane / 2));
  }
  return order;
}

// The words of the quarters of a head from `token` on; those past `count` tokens repeat the last.
template <int kBits>
struct KeyQuarters {
  const char* rows[kQuarters];
  Bytes order;

  PC_FORCE_INLINE KeyQuarters(const SealedHead& head, int64_t token, int64_t count) {
    static constexpr QuarterOrder kOrders[2] = {quarter_order<kBits>(0), quarter_order<kBits>(1)};
    for (int i = 0; i < kQuarters; ++i) {
      const int64_t at = kQuarterTokens * i < count ? kQuarterTokens * i : count - kQuarterTokens;
      rows[i] = head.words + (token + at) / kCodesInWord<kBits> * head.plane.row_stride;
    }
    order = *reinterpret_cast<const LooseBytes*>(kOrders[token / kQuarterTokens % 2].bytes);
  }

  // The bytes of channels d to d + 3.
  [[nodiscard]] PC_FORCE_INLINE Bytes bytes(int64_t d) const {
    const auto quarter = [&](int i) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + 4 * d));
    };
#if defined(__AVX512F__)
    __m512i words = _mm512_castsi128_si512(quarter(0));
    words = _mm512_mask_broadcast_i32x4(words, 0x00f0, quarter(1));
    words = _mm512_mask_broadcast_i32x4(words, 0x0f00, quarter(2));
    words = _mm512_mask_broadcast_i32x4(words, 0xf000, quarter(3));
#else
    const __m256i words = _mm256_inserti128_si256(_mm256_castsi128_si256(quarter(0)), quarter(1), 1);
#endif
    const Bytes ordered = look_up((Bytes)words, order);
    return kBits == 4 ? ordered : (Bytes)((BitVec)ordered >> nibble_shifts());
  }
};

// Scores [R, stride] of the tokens of a vector.
template <int kBits, int R>
PC_FORCE_INLINE void score_quarters(const SealedQuery<R>& query, const KeyQuarters<kBits>& keys, SealedAhead& ahead,
                                    int64_t dim, float* scores, int64_t stride) {
  DigitSum sums[R][2];
  const int8_t* digits = query.digits;
  for (int64_t d = 0; d < dim; d += kPanel, digits += R * kPanelBytes) {
    ahead.step();
    add_panel_products<kBits, R>(
        digits, [&](int i) __attribute__((always_inline)) { return keys.bytes(d + 4 * i); }, sums);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Vec even = sums[r][0].total(), odd = sums[r][1].total();
    interleave(even, odd);
    store(scores + r * stride, fma(even, splat(query.unit[r]), splat(query.excess[r])));
    store(scores + r * stride + kLanes, fma(odd, splat(query.unit[r]), splat(query.excess[r])));
  }
}

// Scores [R, 64] of `count` tokens of a block from `token` on, which share a group.
template <int kBits, int R>
void score_sealed_group(const SealedQuery<R>& query, const SealedHead& head, int64_t token, int64_t count,
                        SealedAhead& ahead, int64_t dim, float* scores) {
  for (; count >= kKeyTokens; token += kKeyTokens, count -= kKeyTokens, scores += kKeyTokens) {
    score_quarters(query, KeyQuarters<kBits>(head, token, count), ahead, dim, scores, kTileTokens);
  }
  if (count == 0) return;
  alignas(64) float part[R][kKeyTokens];
  score_quarters(query, KeyQuarters<kBits>(head, token, count), ahead, dim, part[0], kKeyTokens);
  for (int r = 0; r < R; ++r) {
    for (int64_t t = 0; t < count; ++t) scores[r * kTileTokens + t] = part[r][t];
  }
}

// True if tiles of whole sealed blocks are multiplied here.
PC_FORCE_INLINE bool scores_sealed(const SealedPlane& plane, const Cache& newest) {
  return plane.bits != 0 && plane.group % kQuarterTokens == 0 && newest.block_size % kQuarterTokens == 0 &&
         newest.dim % 64 == 0 && newest.dim <= kMostKeyDims;
}

// Scores of all rows with a tile of sealed keys. Returns false if it has to be unpacked. Prefetches `ahead`.
inline bool score_sealed(const HeadRows& rows, const SealedPlane& plane, const Cache& newest, const RowOffsets& places,
                         int64_t head, SealedAhead ahead, const Scratch& scratch) {
  const int64_t dim = newest.dim;
  auto* const products = reinterpret_cast<float*>(scratch.unpacked);
  bool made = true;
  ahead.begin(kTileTokens / kKeyTokens * dim / kPanel);
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    SealedQuery<R> query{};
    query.digits = reinterpret_cast<int8_t*>(scratch.query_integers);
    const auto score = plane.bits == 2 ? score_sealed_group<2, R> : score_sealed_group<4, R>;
    for_each_sealed_block(places, newest.block_size, [&](int t, int last, int64_t block, int64_t token) {
      const SealedHead of_head{plane, block, head};
      while (made && t < last) {
        const int64_t group = token / plane.group, left = (group + 1) * plane.group - token;
        const int64_t count = left < last - t ? left : last - t;
        const char* const scales = of_head.scales + group * plane.scales_row_stride;
        made = make_sealed_query(rows, row, plane, scales, dim, products, query);
        if (made) score(query, of_head, token, count, ahead, dim, rows.scores + row * kTileTokens + t);
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
