// Scores and sums of few query rows from codes of 8 bits, which become float32 in registers.
//
// A step makes four vectors of numbers from kByteLanes codes, in parts for which there are registers. Their lanes are
// in the order of the instructions that make them: order_floats() gives queries the same order, and in_order() puts
// sums over values in that of the dims.
//
//   float8, AVX-512 VBMI   lookups give the bytes of bfloat16; even and odd words are widened to float32
//   float8                 even and odd bytes become words of float16, which instructions widen
//   int8                   in the order of the dims
//
// The bits of a float8 number, moved to the top of a word, are those of a float16 number: e5m2 is one, and e4m3 is 256
// times as large if its sign is moved apart. Instructions for float16 widen subnormals, infinities and NaN. The NaN of
// e4m3 becomes 480: Seen collects the codes of each place, and results with NaN are replaced afterwards.
#pragma once

#include <type_traits>

#include "pagecore/ops/cpu/kernels/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/integer_codes.hpp"
#include "pagecore/ops/cpu/kernels/multiply.hpp"
#include "pagecore/ops/cpu/kernels/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// Vectors of numbers of a step, and of a part.
constexpr int kStepVectors = 4, kPartVectors = kLanes == 16 ? 4 : 2, kStepParts = kStepVectors / kPartVectors;

// kByteLanes codes of a row that has `count` more, a multiple of 16; those past its end are 0.
PC_FORCE_INLINE Bytes load_row(const char* p, int64_t count) {
#if !defined(__AVX512BW__)
  if (count < kByteLanes) return (Bytes)_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
  return load_stored(p, count);
}

// The codes of a row, or of all rows, by their place in a step: which of them have been seen.
class Seen {
 public:
  PC_FORCE_INLINE void add(Bytes codes) { most_ = larger(most_, codes | 0x80); }
  // Lanes of 0xff where a NaN of e4m3 has been seen.
  [[nodiscard]] PC_FORCE_INLINE Bytes nans() const { return (Bytes)(most_ == 0xff); }
  [[nodiscard]] PC_FORCE_INLINE bool has_nans() const {
    typedef uint64_t Longs __attribute__((vector_size(kByteLanes)));
    const auto found = (Longs)nans();
    uint64_t any = 0;
    for (int i = 0; i < kByteLanes / 8; ++i) any |= found[i];
    return any != 0;
  }

 private:
  PC_FORCE_INLINE static Bytes larger(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_maskz_max_epu8(~__mmask64{0}, (__m512i)a, (__m512i)b);
#else
    return (Bytes)_mm256_max_epu8((__m256i)a, (__m256i)b);
#endif
  }

  Bytes most_{};
};

// ---- numbers of codes

#if defined(__AVX512VBMI__)

// Vectors 2 i and 2 i + 1 have the even and the odd codes of each half i of 16.
template <typename Code>
class Float8Floats {
 public:
  static constexpr bool kFindsNan = false;
  static constexpr float kUnit = 1.0f;

  static constexpr int dim_of(int vector, int lane) {
    return lane / 4 * 16 + vector / 2 * 8 + lane % 4 * 2 + vector % 2;
  }
  static constexpr int group_of(int, int lane) { return lane / 8; }

  template <int kPart>
  PC_FORCE_INLINE void numbers(Bytes codes, Vec (&to)[kPartVectors]) const {
    const BytePair bytes = unpacker_.bytes_of(codes);
    const Words low = zip_low(bytes.low, bytes.high), high = zip_high(bytes.low, bytes.high);
    to[0] = even_floats(low), to[1] = odd_floats(low), to[2] = even_floats(high), to[3] = odd_floats(high);
  }

 private:
  const Float8Unpacker<Code> unpacker_{};
};

using E4M3Floats = Float8Floats<E4M3Code>;
using E5M2Floats = Float8Floats<E5M2Code>;

#else

// Vectors h and 2 + h have the even and the odd codes of half h of a step.
struct Float8Floats {
  static constexpr int dim_of(int vector, int lane) { return vector % 2 * kWordLanes + 2 * lane + vector / 2; }
  static constexpr int group_of(int vector, int) { return vector % 2 * kWordLanes / 32; }

 protected:
  // Numbers of words of float16.
  PC_FORCE_INLINE static void widen(Words words, Vec* to) {
#if defined(__AVX512F__)
    const auto longs = (__m512i)words;
    to[0] = widen_f16((HalfVec)__builtin_shufflevector(longs, longs, 0, 1, 2, 3));
    to[1] = widen_f16((HalfVec)__builtin_shufflevector(longs, longs, 4, 5, 6, 7));
#else
    to[0] = widen_f16((HalfVec)_mm256_castsi256_si128((__m256i)words));
    to[1] = widen_f16((HalfVec)_mm256_extracti128_si256((__m256i)words, 1));
#endif
  }
};

struct E4M3Floats : Float8Floats {
  static constexpr bool kFindsNan = true;
  static constexpr float kUnit = 256.0f;

  template <int kPart>
  PC_FORCE_INLINE void numbers(Bytes codes, Vec (&to)[kPartVectors]) const {
    widen(kPart == 0 ? even(codes) : odd(codes), to);
    if constexpr (kStepParts == 1) widen(odd(codes), to + 2);
  }

 private:
  PC_FORCE_INLINE static Words even(Bytes codes) { return (Words)((Shorts)((Words)codes << 8) >> 1) & 0xbfff; }
  PC_FORCE_INLINE static Words odd(Bytes codes) { return (Words)((Shorts)codes >> 1) & 0xbf80; }
};

struct E5M2Floats : Float8Floats {
  static constexpr bool kFindsNan = false;
  static constexpr float kUnit = 1.0f;

  template <int kPart>
  PC_FORCE_INLINE void numbers(Bytes codes, Vec (&to)[kPartVectors]) const {
    widen(kPart == 0 ? (Words)codes << 8 : (Words)codes & 0xff00, to);
    if constexpr (kStepParts == 1) widen((Words)codes & 0xff00, to + 2);
  }
};

#endif

struct Int8Floats {
  static constexpr bool kFindsNan = false;
  static constexpr float kUnit = 1.0f;

  static constexpr int dim_of(int vector, int lane) { return vector * kLanes + lane; }
  static constexpr int group_of(int, int) { return 0; }

  template <int kPart>
  PC_FORCE_INLINE void numbers(Bytes codes, Vec (&to)[kPartVectors]) const {
    alignas(64) char bytes[kByteLanes];
    __builtin_memcpy(bytes, &codes, sizeof codes);
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) {
      const auto* const from = reinterpret_cast<const __m128i*>(bytes + (kPart * kPartVectors + v) * kLanes);
#if defined(__AVX512F__)
      to[v] = to_floats((IntVec)_mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128(from)));
#else
      to[v] = to_floats((IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(from)));
#endif
    }
  }
};

// Codes times the scales of groups of 32.
struct ScaledE4M3Floats : E4M3Floats {};

template <typename Codes>
constexpr bool kHasScales = std::is_same_v<Codes, ScaledE4M3Floats>;

// A part of the numbers of a step from dim d on of the token t, divided by kUnit.
template <int kPart, typename Codes>
PC_FORCE_INLINE void numbers_at(const Codes& codes, const StoredTile& tile, int t, int64_t d, int64_t dim, Seen& seen,
                                Vec (&numbers)[kPartVectors]) {
  const Bytes stored = load_row(tile.codes[t] + d, dim - d);
  if constexpr (Codes::kFindsNan && kPart == 0) seen.add(stored);
  codes.template numbers<kPart>(stored, numbers);
  if constexpr (kHasScales<Codes>) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(tile.scales[t]) + d / 32;
    const Vec first = splat(tile.numbers[bytes[0]]);
    const Vec second = kByteLanes > 32 && d + 32 < dim ? splat(tile.numbers[bytes[1]]) : first;
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) {
      Vec scale = Codes::group_of(v, 0) == 0 ? first : second;
#if defined(__AVX512F__)
      if constexpr (Codes::group_of(0, 0) != Codes::group_of(0, kLanes - 1)) scale = blend(first, second, 0xff00);
#endif
      numbers[v] = numbers[v] * scale;
    }
  }
}

// ---- scores

// Puts a query row in the order of the numbers, whole steps of them; the row has `stride` numbers.
template <typename Codes>
inline void order_floats(float* row, int64_t dim, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kByteLanes) {
    float given[kByteLanes];
    for (int i = 0; i < kByteLanes; ++i) given[i] = d + i < dim ? row[d + i] : 0.0f;
    for (int i = 0; i < kByteLanes; ++i) row[d + i] = given[Codes::dim_of(i / kLanes, i % kLanes)];
  }
}

// The scores of keys with a NaN of e4m3 become NaN.
[[gnu::noinline]] inline void replace_nan_scores(const StoredTile& tile, int64_t dim, int64_t count, float* scores) {
  for (int t = 0; t < kTileTokens; ++t) {
    Seen seen;
    for (int64_t d = 0; d < dim; d += kByteLanes) seen.add(load_row(tile.codes[t] + d, dim - d));
    if (!seen.has_nans()) continue;
    for (int64_t r = 0; r < count; ++r) scores[r * kTileTokens + t] = __builtin_nanf("");
  }
}

// Keys that are multiplied together.
constexpr int kFloatKeys = kLanes == 16 ? kBlockTokens : 1;

// The lanes of the sums over the dims of some keys from the token t on, and R query rows.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_float_keys(const Codes& codes, const StoredTile& tile, int t, int64_t dim,
                                         const float* query, int64_t stride, Seen& seen, Vec (&sums)[kFloatKeys][R]) {
  const auto multiply = [&]<int kPart>(int64_t d) __attribute__((always_inline)) {
    const float* const from = query + d + kPart * kPartVectors * kLanes;
#pragma GCC unroll 4
    for (int k = 0; k < kFloatKeys; ++k) {
      Vec numbers[kPartVectors];
      numbers_at<kPart>(codes, tile, t + k, d, dim, seen, numbers);
#pragma GCC unroll 4
      for (int v = 0; v < kPartVectors; ++v) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[k][r] = fma(load(from + r * stride + v * kLanes), numbers[v], sums[k][r]);
      }
    }
  };
  for (int64_t d = 0; d < dim; d += kByteLanes) {
    multiply.template operator()<0>(d);
    if constexpr (kStepParts == 2) multiply.template operator()<1>(d);
  }
}

// Scores [R, 64].
template <typename Codes, int R>
void score_floats_of(const StoredTile& tile, int64_t dim, const float* query, int64_t stride, const RowAhead& next,
                     float* scores) {
  const RowAhead ahead = next;
  const Codes codes;
  Seen seen;
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int first = 0; first < kBlockTokens; first += kFloatKeys) {
      Vec lanes[kFloatKeys][R] = {};
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys; ++k) ahead.prefetch_streams(t + first + k);
      multiply_float_keys(codes, tile, t + first, dim, query, stride, seen, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys; ++k) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][first + k] = lanes[k][r] * Codes::kUnit;
      }
    }
    store_sums<R>(sums, scores + t);
  }
  if (seen.has_nans()) [[unlikely]]
    replace_nan_scores(tile, dim, R, scores);
}

// ---- sums over values

// Four vectors of sums in the order of the dims.
template <typename Codes>
PC_FORCE_INLINE void in_order(Vec (&v)[kStepVectors]) {
  if constexpr (Codes::dim_of(0, 1) == 1) return;
#if defined(__AVX512VBMI__)
  transpose_quarters(zip_low(v[0], v[1]), zip_high(v[0], v[1]), zip_low(v[2], v[3]), zip_high(v[2], v[3]), v);
#else
  const Vec low[2] = {zip_low(v[0], v[2]), zip_low(v[1], v[3])}, high[2] = {zip_high(v[0], v[2]), zip_high(v[1], v[3])};
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
#if defined(__AVX512F__)
    v[2 * h] = __builtin_shufflevector(low[h], high[h], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    v[2 * h + 1] =
        __builtin_shufflevector(low[h], high[h], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#else
    v[2 * h] = __builtin_shufflevector(low[h], high[h], 0, 1, 2, 3, 8, 9, 10, 11);
    v[2 * h + 1] = __builtin_shufflevector(low[h], high[h], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
  }
#endif
}

// The sums over values with a NaN of e4m3 become NaN: those of a step of dims from d on.
[[gnu::noinline]] inline void replace_nan_sums(const Seen& seen, const HeadRows& rows, int64_t row, int64_t count,
                                               int64_t d, int64_t dim) {
  const Bytes nans = seen.nans();
  for (int i = 0; i < kByteLanes && d + i < dim; ++i) {
    if (nans[i] == 0) continue;
    for (int64_t r = row; r < row + count; ++r) rows.acc[r * rows.acc_stride + d + i] = __builtin_nanf("");
  }
}

// Sums over a tile of a part of a step of dims from d on, for R rows.
template <int kPart, typename Codes, int R, bool kPrefetches>
PC_FORCE_INLINE void multiply_float_values(const Codes& codes, const StoredTile& tile, int64_t d, int64_t dim,
                                           const float* weights, const PassAhead& next, Seen& seen,
                                           Vec (&out)[R][kStepVectors]) {
  const PassAhead ahead = next;
  Vec sums[R][kPartVectors] = {};
  for (int t = 0; t < kTileTokens; ++t) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    Vec numbers[kPartVectors];
    numbers_at<kPart>(codes, tile, t, d, dim, seen, numbers);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTileTokens + t]);
#pragma GCC unroll 4
      for (int v = 0; v < kPartVectors; ++v) sums[r][v] = fma(weight, numbers[v], sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) out[r][kPart * kPartVectors + v] = sums[r][v] * Codes::kUnit;
  }
}

// Adds the products of a step of dims from d on for R rows.
template <typename Codes, int R, bool kPrefetches>
void accumulate_floats_of(const HeadRows& rows, int64_t row, const StoredTile& tile, int64_t d, int64_t dim,
                          PassAhead ahead, int64_t pass) {
  const Codes codes;
  const float* const weights = rows.scores + row * kTileTokens;
  Seen seen;
  Vec sums[R][kStepVectors];
  multiply_float_values<0, Codes, R, kPrefetches>(codes, tile, d, dim, weights, ahead, seen, sums);
  if constexpr (kStepParts == 2) {
    ahead.begin(pass + 1);
    multiply_float_values<1, Codes, R, kPrefetches>(codes, tile, d, dim, weights, ahead, seen, sums);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
    in_order<Codes>(sums[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) {
      if (d + v * kLanes >= dim) break;
      add_product(acc + v * kLanes, sums[r][v], rows.factor + row + r);
    }
  }
  if (seen.has_nans()) [[unlikely]]
    replace_nan_sums(seen, rows, row, R, d, dim);
}

// Calls visit.operator()<Codes>() for the codes of a format.
template <typename Visit>
PC_FORCE_INLINE void with_floats(Format format, Visit&& visit) {
  switch (format) {
    case Format::I8Token: return visit.template operator()<Int8Floats>();
    case Format::E5M2: return visit.template operator()<E5M2Floats>();
    case Format::MXFP8: return visit.template operator()<ScaledE4M3Floats>();
    default: return visit.template operator()<E4M3Floats>();
  }
}

// True if the products of a format and dim are made here.
PC_FORCE_INLINE bool has_floats(const Cache& cache) {
  const bool known = cache.format == Format::E4M3 || cache.format == Format::E4M3Token ||
                     cache.format == Format::E5M2 || cache.format == Format::MXFP8 || cache.format == Format::I8Token;
  return known && cache.dim % 16 == 0;
}

// Puts queries in the order of score_floats().
inline void order_floats(const Cache& cache, float* rows, int64_t stride, int64_t count) {
  with_floats(cache.format, [&]<typename Codes>() {
    for (int64_t r = 0; r < count; ++r) order_floats<Codes>(rows + r * stride, cache.dim, stride);
  });
}

inline void score_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      const RowAhead ahead = row == 0 ? rows_ahead(next_rows, tile) : RowAhead(tile);
      score_floats_of<Codes, R>(tile, cache.dim, rows.query + row * rows.query_stride, rows.query_stride, ahead,
                                rows.scores + row * kTileTokens);
    });
  });
}

// Adds the products of all rows, which attend to the same keys.
inline void accumulate_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                              const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  const int64_t dim = cache.dim;
  PassAhead ahead(next_rows, (dim + kByteLanes - 1) / kByteLanes * kStepParts);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      int64_t pass = 0;
      for (int64_t d = 0; d < dim; d += kByteLanes, pass += kStepParts) {
        if (row == 0 && ahead.begin(pass)) {
          accumulate_floats_of<Codes, R, true>(rows, row, tile, d, dim, ahead, pass);
        } else {
          accumulate_floats_of<Codes, R, false>(rows, row, tile, d, dim, ahead, pass);
        }
      }
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
