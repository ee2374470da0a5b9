// Weights of few query rows times sealed values from their codes, by exact products of integers.
//
// A number of a value is scale * code + least; both belong to its token and its group of channels. The weights of a row
// times the scales of a group are made int16 for each tile, as in integer_weights.hpp. Their products with the least
// numbers are the same for all channels of the group, and are added as float32.
//
// A word of 4 bits has the order of the bytes of int4_token, and codes of 2 bits are spread to 4, so that the products
// are those of integer_values.hpp. There, 16 channels of each quarter are multiplied at once: one group for each
// quarter.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_values.hpp"
#include "pagecore/ops/cpu/kernels/codes/sealed_scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int64_t kLeastGroup = 16;             // channels
constexpr int64_t kChunkDims = 2 * kByteLanes;  // of a vector of codes of 4 bits

// Groups of a row, in whole vectors of four.
PC_FORCE_INLINE int64_t group_stride_of(int64_t groups) { return (groups + 3) / 4 * 4; }

// Weights of few rows with a tile, in int16, and what sums of their products mean.
struct SealedWeights {
  uint32_t* pairs;  // [32, R, stride] for each block of R rows, those of two tokens
  float* units;     // [rows, stride]
  float* excess;    // [rows, stride]
  float* scales;    // [64, stride]
  float* leasts;    // [64, stride]
  float* products;  // [64, R, 4]
  int64_t groups;
  int64_t stride;

  SealedWeights(float* memory, int64_t of_groups) : groups(of_groups), stride(group_stride_of(of_groups)) {
    const auto take = [&memory](int64_t floats) {
      float* const taken = memory;
      memory += floats;
      return taken;
    };
    scales = take(kTileTokens * stride);
    leasts = take(kTileTokens * stride);
    products = take(kTileTokens * kSealedRows * 4);
    units = take(kCodeRows * stride);
    excess = take(kCodeRows * stride);
    pairs = reinterpret_cast<uint32_t*>(take(kTilePairs * kCodeRows * stride + kLanes));
  }

  // The pairs of the block of rows from `row` on.
  [[nodiscard]] PC_FORCE_INLINE uint32_t* pairs_of(int64_t row) const { return pairs + row * kTilePairs * stride; }
};

// The rows of a tile of sealed tokens that follow each other: words and scales.
struct SealedRows {
  const char* words[kTileTokens];
  const char* scales[kTileTokens];

  SealedRows(const SealedPlane& plane, int64_t size, const RowOffsets& places, int64_t head) {
    for_each_sealed_run(places, kWholeTile, size, [&](int t, int last, int64_t block, int64_t token) {
      const SealedHead of_head{plane, block, head};
      for (; t < last; ++t, ++token) {
        words[t] = of_head.words + token * plane.row_stride;
        scales[t] = of_head.scales + token * plane.scales_row_stride;
      }
    });
  }
};

// The scales and the least numbers of a tile, [64, stride]; those past the groups are 0.
inline void load_sealed_scales(const SealedPlane& plane, const SealedRows& tile, const SealedWeights& to) {
  const int64_t bytes = size_of(plane.scale_type);
  const bool are_pairs = plane.scale_type == Float::BF16 && plane.least_stride == bytes &&
                         plane.group_stride == 2 * bytes && to.groups % 4 == 0;
  for (int t = 0; t < kTileTokens; ++t) {
    const char* from = tile.scales[t];
    float* const scales = to.scales + t * to.stride;
    float* const leasts = to.leasts + t * to.stride;
    prefetch_line(from + plane.scales_head_stride);
    if (are_pairs) {
      for (int64_t g = 0; g < to.groups; g += 4) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4 * g));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + g), _mm_slli_epi32(pairs, 16));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(leasts + g), _mm_and_si128(pairs, _mm_set1_epi32(~0xffff)));
      }
      continue;
    }
    for (int64_t g = 0; g < to.stride; ++g, from += plane.group_stride) {
      scales[g] = g < to.groups ? load_scale(plane.scale_type, from) : 0.0f;
      leasts[g] = g < to.groups ? load_scale(plane.scale_type, from + plane.least_stride) : 0.0f;
    }
  }
}

// Makes the weights of R rows from `row` on times the scales of four groups from g on integers. Returns false if a row
// and group has none.
template <int R>
PC_FORCE_INLINE bool make_sealed_weights(const HeadRows& rows, int64_t row, int64_t g, const SealedWeights& to) {
  const float* const weights = rows.scores + row * kTileTokens;
  __m128i largest[R] = {};
  Vec4 excess[R] = {};
  for (int t = 0; t < kTileTokens; ++t) {
    const Vec4 scale = load_four(to.scales + t * to.stride + g), least = load_four(to.leasts + t * to.stride + g);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec4 weight = weights[r * kTileTokens + t] - Vec4{}, product = weight * scale;
      excess[r] = (Vec4)_mm_fmadd_ps((__m128)weight, (__m128)least, (__m128)excess[r]);
      largest[r] = _mm_max_epi32(largest[r], _mm_and_si128((__m128i)product, _mm_set1_epi32(kMagnitudeBits)));
      store_four(to.products + 4 * (t * R + r), product);
    }
  }
  bool made = true;
  for (int r = 0; r < R; ++r) {
    alignas(16) int32_t bits[4];
    alignas(16) float factors[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(bits), largest[r]);
    store_four(to.excess + (row + r) * to.stride + g, excess[r]);
    for (int i = 0; i < 4; ++i) made &= integer_factor(bits[i], factors[i], to.units[(row + r) * to.stride + g + i]);
    const __m128 factor = _mm_load_ps(factors);
    const auto integers = [&](int t) __attribute__((always_inline)) {
      return _mm_cvtps_epi32(_mm_mul_ps((__m128)load_four(to.products + 4 * (t * R + r)), factor));
    };
    uint32_t* pairs = to.pairs_of(row) + r * to.stride + g;
    for (int t = 0; t < kTileTokens; t += 2, pairs += R * to.stride) {
      const __m128i both = _mm_blend_epi16(integers(t), _mm_slli_epi32(integers(t + 1), 16), 0b10101010);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(pairs), both);
    }
  }
  return made;
}

// A vector of codes of 4 bits of a row that has `dims` more.
template <int kBits>
PC_FORCE_INLINE Bytes load_nibbles(const char* row, int64_t dims) {
  if constexpr (kBits == 4) return load_stored(row, dims / 2);
#if defined(__AVX512BW__)
  const auto part = static_cast<__mmask32>(dims >= kChunkDims ? ~uint32_t{0} : 0xffff);
  const auto words = (Words)_mm512_maskz_cvtepu8_epi16(~__mmask32{0}, _mm256_maskz_loadu_epi8(part, row));
#else
  const auto words = (Words)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
#endif
  const Words fours = (words | words << 4) & 0x0f0f;
  return (Bytes)((fours | fours << 2) & 0x3333);
}

// The group of each lane of a chunk from dim d on, with codes of the half kHalf of each quarter, from the first one on.
template <int kHalf>
PC_FORCE_INLINE BitVec groups_of_lanes(int64_t d, int64_t group, int64_t& first) {
  first = (d + kLeastGroup * kHalf) / group;
  BitVec index;
  for (int lane = 0; lane < kLanes; ++lane) {
    index[lane] = static_cast<uint32_t>((d + 2 * kLeastGroup * (lane / 4) + kLeastGroup * kHalf) / group - first);
  }
  return index;
}

PC_FORCE_INLINE Shorts pick_pairs(const uint32_t* pairs, BitVec index) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_permutexvar_epi32(kAllLanes, (__m512i)index, _mm512_loadu_si512(pairs));
#else
  const auto all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
  return (Shorts)_mm256_permutevar8x32_epi32(all, (__m256i)index);
#endif
}

// Adds the sums of R rows over a half of a chunk of dims from d on.
template <int kBits, int kHalf, int R>
PC_FORCE_INLINE void add_sealed_half(const HeadRows& rows, int64_t row, const SealedPlane& plane,
                                     const char* const* tokens, int64_t d, int64_t dim, const SealedWeights& weights) {
  const Int4Integers codes;
  int64_t first;
  const BitVec index = groups_of_lanes<kHalf>(d, plane.group, first);
  IntVec sums[R][4] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    const Bytes a = load_nibbles<kBits>(tokens[t] + d * kBits / 8, dim - d);
    const Bytes b = load_nibbles<kBits>(tokens[t + 1] + d * kBits / 8, dim - d);
    if constexpr (kHalf == 0) {
      prefetch_line(tokens[t] + plane.head_stride + d * kBits / 8);
      prefetch_line(tokens[t + 1] + plane.head_stride + d * kBits / 8);
    }
    Shorts words[2][2];
    operand_pair<Int4Integers, kHalf, 0>(codes, a, b, words[0]);
    operand_pair<Int4Integers, kHalf, 1>(codes, a, b, words[1]);
    const uint32_t* const pairs = weights.pairs_of(row) + t / 2 * R * weights.stride + first;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Shorts weight = pick_pairs(pairs + r * weights.stride, index);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = add_pairs(sums[r][i], words[i / 2][i % 2], weight);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride;
    Vec of_dims[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) of_dims[i] = to_floats(sums[r][i]);
    order_sums<Int4Integers>(of_dims);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t to = d + kLeastGroup * kHalf + i * kLanes / 16 * 32 + i * kLanes % 16;
      if (to >= dim) break;
      const int64_t group = (row + r) * weights.stride + to / plane.group;
      const Vec sum = fma(of_dims[i], splat(weights.units[group]), splat(weights.excess[group]));
      add_product(acc + to, sum, rows.factor + row + r);
    }
  }
}

// True if tiles of whole sealed blocks are multiplied here.
PC_FORCE_INLINE bool accumulates_sealed(const SealedPlane& plane, const Cache& newest) {
  return plane.bits != 0 && plane.group % kLeastGroup == 0 && newest.dim % 64 == 0;
}

// Adds the products of all rows, which attend to the same keys, with a tile of sealed values. Returns false, having
// added nothing, if it has to be unpacked.
inline bool accumulate_sealed(const HeadRows& rows, const SealedPlane& plane, const Cache& newest,
                              const RowOffsets& places, int64_t head, const Scratch& scratch) {
  const int64_t dim = newest.dim;
  const SealedRows rows_of_tile(plane, newest.block_size, places, head);
  const SealedWeights weights(scratch.value, dim / plane.group);
  load_sealed_scales(plane, rows_of_tile, weights);
  bool made = true;
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    for (int64_t g = 0; g < weights.groups; g += 4) made &= make_sealed_weights<R>(rows, row, g, weights);
  });
  if (!made) return false;
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    const auto add = [&]<int kBits>() {
      for (int64_t d = 0; d < dim; d += kChunkDims) {
        add_sealed_half<kBits, 0, R>(rows, row, plane, rows_of_tile.words, d, dim, weights);
        add_sealed_half<kBits, 1, R>(rows, row, plane, rows_of_tile.words, d, dim, weights);
      }
    };
    plane.bits == 2 ? add.template operator()<2>() : add.template operator()<4>();
  });
  return true;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
