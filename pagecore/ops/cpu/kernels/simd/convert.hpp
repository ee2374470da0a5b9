// Conversion of vectors between float32 and float16 or bfloat16. Widening is exact. Narrowing rounds to nearest, ties
// to even, and keeps NaN a NaN.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE HalfVec load_half(const void* p) { return *static_cast<const LooseHalfVec*>(p); }
PC_FORCE_INLINE void store_half(void* p, HalfVec v) { *static_cast<LooseHalfVec*>(p) = v; }

PC_FORCE_INLINE Vec widen_bf16(HalfVec h) {
#if defined(__AVX512F__)  // GCC 12 widens the halves apart
  return (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)h) << 16);
#elif defined(__AVX2__)
  return (Vec)((BitVec)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (Vec)(__builtin_convertvector(h, BitVec) << 16);
#endif
}

PC_FORCE_INLINE HalfVec narrow_bf16(Vec v) {
  const BitVec bits = (BitVec)v;
  const BitVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const BitVec quiet = bits | 0x00400000;
  return __builtin_convertvector((v == v ? rounded : quiet) >> 16, HalfVec);
}

PC_FORCE_INLINE Vec widen_f16(HalfVec h) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)h);
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16((float16x4_t)h);
#else
  const BitVec bits = __builtin_convertvector(h, BitVec);
  // 2^112 is the difference of the exponent biases; multiplying by it also handles subnormals.
  const Vec two_112 = (Vec)(BitVec{} + 0x77800000);
  const BitVec number = (BitVec)((Vec)((bits & 0x7fff) << 13) * two_112);
  const BitVec special = number | 0x7f800000;
  const BitVec magnitude = (bits & 0x7c00) == 0x7c00 ? special : number;
  return (Vec)(magnitude | ((bits & 0x8000) << 16));
#endif
}

PC_FORCE_INLINE HalfVec narrow_f16(Vec v) {
#if defined(__AVX512F__)
  return (HalfVec)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (HalfVec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (HalfVec)vcvt_f16_f32((float32x4_t)v);
#else
  const BitVec bits = (BitVec)v;
  const BitVec sign = bits & 0x80000000;
  const BitVec magnitude = bits ^ sign;
  // Adding 0.5 leaves the rounded bits of a subnormal at the low end of the sum.
  const BitVec half = BitVec{} + 0x3f000000;
  const BitVec subnormal = (BitVec)((Vec)magnitude + (Vec)half) - half;
  const BitVec normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const BitVec infinite = BitVec{} + 0x7c00;
  const BitVec nan = BitVec{} + 0x7e00;
  const BitVec special = magnitude > 0x7f800000 ? nan : infinite;
  const BitVec finite = magnitude < 0x38800000 ? subnormal : normal;
  return __builtin_convertvector((magnitude >= 0x47800000 ? special : finite) | (sign >> 16), HalfVec);
#endif
}

template <Float T>
PC_FORCE_INLINE Vec load_as_float(const void* p) {
  if constexpr (T == Float::F32) return load(static_cast<const float*>(p));
  if constexpr (T == Float::F16) return widen_f16(load_half(p));
  if constexpr (T == Float::BF16) return widen_bf16(load_half(p));
}

template <Float T>
PC_FORCE_INLINE void store_from_float(void* p, Vec v) {
  if constexpr (T == Float::F32) store(static_cast<float*>(p), v);
  if constexpr (T == Float::F16) store_half(p, narrow_f16(v));
  if constexpr (T == Float::BF16) store_half(p, narrow_bf16(v));
}

template <Float T>
constexpr int64_t kSize = T == Float::F32                       ? 4
                          : T == Float::F16 || T == Float::BF16 ? 2
                                                                : 1;

// The last `count` numbers of a row, padded with zeros.
template <Float T>
PC_FORCE_INLINE Vec load_tail(const char* p, int64_t count) {
  alignas(64) char padded[kLanes * kSize<T>] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(count * kSize<T>));
  return load_as_float<T>(padded);
}

template <Float T>
PC_FORCE_INLINE void store_tail(char* p, Vec v, int64_t count) {
  alignas(64) char padded[kLanes * kSize<T>];
  store_from_float<T>(padded, v);
  __builtin_memcpy(p, padded, static_cast<size_t>(count * kSize<T>));
}

// Calls visit(offset, vector, count) for each vector of a row of `dim` numbers. The last may be partial.
template <Float T, typename Visit>
PC_FORCE_INLINE void for_each_vector(const char* row, int64_t dim, Visit&& visit) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) visit(d, load_as_float<T>(row + d * kSize<T>), kLanes);
  if (d < dim) visit(d, load_tail<T>(row + d * kSize<T>, dim - d), dim - d);
}

template <Float T>
PC_FORCE_INLINE void store_part(char* row, int64_t offset, Vec v, int64_t count) {
  char* p = row + offset * kSize<T>;
  if (count == kLanes) {
    store_from_float<T>(p, v);
  } else {
    store_tail<T>(p, v, count);
  }
}

// Calls f.template operator()<T>() for dtype `type`.
template <typename F>
PC_FORCE_INLINE auto with_float(Float type, F&& f) {
  switch (type) {
    case Float::F16: return f.template operator()<Float::F16>();
    case Float::BF16: return f.template operator()<Float::BF16>();
    default: return f.template operator()<Float::F32>();
  }
}

// One number of a per-head array; `absent` if there is no array.
PC_FORCE_INLINE float head_value(const PerHead& values, int64_t head, float absent) {
  if (values.data == nullptr) return absent;
  const char* p = values.data + head * values.stride;
  return with_float(values.type, [&]<Float T>() { return load_tail<T>(p, 1)[0]; });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
