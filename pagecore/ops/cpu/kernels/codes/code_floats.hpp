// Codes of 8 bits as float32, in registers.
//
// A step makes four vectors of numbers from kByteLanes codes, in parts for which there are registers. Their lanes are
// in the order of the instructions that make them: order_floats() gives queries the same order, and in_order() puts
// sums over values in that of the dims.
//
//   e4m3, AVX-512 VBMI   lookups give the bytes of bfloat16; even and odd words are widened to float32
//   float8               even and odd bytes become words of float16, which instructions widen
//   int8                 in the order of the dims
//
// The bits of a float8 number, moved to the top of a word, are those of a float16 number: e5m2 is one, and e4m3 is 256
// times as large if its sign is moved apart. Instructions for float16 widen subnormals, infinities and NaN. The NaN of
// e4m3 becomes 480: NanCodes finds them, and results with NaN are replaced afterwards (float_products.hpp).
#pragma once

#include <type_traits>

#include "pagecore/ops/cpu/kernels/codes/integer_codes.hpp"

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

// The places of a step, of one row or of all, at which the codes have a NaN of e4m3.
class NanCodes {
 public:
  PC_FORCE_INLINE void add(Bytes codes) { most_ = larger(most_, codes | 0x80); }
  // 0xff at each of the places, 0 at others.
  [[nodiscard]] PC_FORCE_INLINE Bytes places() const { return (Bytes)(most_ == 0xff); }
  [[nodiscard]] PC_FORCE_INLINE bool any() const {
    typedef uint64_t Longs __attribute__((vector_size(kByteLanes)));
    const auto found = (Longs)places();
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

// Vectors h and 2 + h have the even and the odd codes of half h of a step.
struct Float8Floats {
  static constexpr bool kOfHalves = true;

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

struct E5M2Floats : Float8Floats {
  static constexpr bool kFindsNan = false;
  static constexpr float kUnit = 1.0f;

  template <int kPart>
  PC_FORCE_INLINE void numbers(const char* row, int64_t count, Vec (&to)[kPartVectors]) const {
    const Bytes codes = load_row(row, count);
    widen(kPart == 0 ? (Words)codes << 8 : (Words)codes & 0xff00, to);
    if constexpr (kStepParts == 1) widen((Words)codes & 0xff00, to + 2);
  }
};

#if defined(__AVX512VBMI__)

// Vectors 2 i and 2 i + 1 have the even and the odd codes of each half i of 16.
class E4M3Floats {
 public:
  static constexpr bool kFindsNan = false, kOfHalves = false;
  static constexpr float kUnit = 1.0f;

  static constexpr int dim_of(int vector, int lane) {
    return lane / 4 * 16 + vector / 2 * 8 + lane % 4 * 2 + vector % 2;
  }
  static constexpr int group_of(int, int lane) { return lane / 8; }

  template <int kPart>
  PC_FORCE_INLINE void numbers(const char* row, int64_t count, Vec (&to)[kPartVectors]) const {
    const BytePair bytes = unpacker_.bytes_of(load_row(row, count));
    const Words low = zip_low(bytes.low, bytes.high), high = zip_high(bytes.low, bytes.high);
    to[0] = even_floats(low), to[1] = odd_floats(low), to[2] = even_floats(high), to[3] = odd_floats(high);
  }

 private:
  const Float8Unpacker<E4M3Code> unpacker_{};
};

#else

struct E4M3Floats : Float8Floats {
  static constexpr bool kFindsNan = true;
  static constexpr float kUnit = 256.0f;

  template <int kPart>
  PC_FORCE_INLINE void numbers(const char* row, int64_t count, Vec (&to)[kPartVectors]) const {
    const Bytes codes = load_row(row, count);
    widen(kPart == 0 ? even(codes) : odd(codes), to);
    if constexpr (kStepParts == 1) widen(odd(codes), to + 2);
  }

 private:
  PC_FORCE_INLINE static Words even(Bytes codes) { return (Words)((Shorts)((Words)codes << 8) >> 1) & 0xbfff; }
  PC_FORCE_INLINE static Words odd(Bytes codes) { return (Words)((Shorts)codes >> 1) & 0xbf80; }
};

#endif

struct Int8Floats {
  static constexpr bool kFindsNan = false, kOfHalves = false;
  static constexpr float kUnit = 1.0f;

  static constexpr int dim_of(int vector, int lane) { return vector * kLanes + lane; }
  static constexpr int group_of(int, int) { return 0; }

  template <int kPart>
  PC_FORCE_INLINE void numbers(const char* row, int64_t count, Vec (&to)[kPartVectors]) const {
    alignas(64) char last[kByteLanes];
    if (count < kByteLanes) [[unlikely]] {
      *reinterpret_cast<LooseBytes*>(last) = load_row(row, count);
      row = last;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) {
      const auto* const from = reinterpret_cast<const __m128i*>(row + (kPart * kPartVectors + v) * kLanes);
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
PC_FORCE_INLINE void numbers_at(const Codes& codes, const StoredTile& tile, int t, int64_t d, int64_t dim,
                                NanCodes& nans, Vec (&numbers)[kPartVectors]) {
  const char* const row = tile.codes[t] + d;
  if constexpr (Codes::kFindsNan && kPart == 0) nans.add(load_row(row, dim - d));
  codes.template numbers<kPart>(row, dim - d, numbers);
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

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
