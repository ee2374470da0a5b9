// Quantised writes of one token of a latent cache or of the indexer.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/convert_rows.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize_nvfp4.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The largest magnitude of the numbers that are not NaN, at most the largest finite number. `is_finite` becomes true if
// all numbers are finite.
template <Float From>
PC_FORCE_INLINE float known_magnitude(const char* source, int64_t dim, bool& is_finite) {
  int32_t bits = row_magnitude<From, false>(source, dim);
  is_finite = bits <= kLargestBits;
  if (bits > kInfinityBits) bits = row_magnitude<From, true>(source, dim);
  if (bits > kLargestBits) bits = kLargestBits;
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

// The least power of two that is at least x, for normal x > 0.
PC_FORCE_INLINE float power_of_two_above(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x007fffff) & kInfinityBits;
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

// Stores the codes of e4m3 of numbers, divided by a power of two that is at least their largest magnitude / 448.
template <Float From>
PC_FORCE_INLINE void store_by_power(const char* source, int64_t dim, char* codes, float power, bool is_finite) {
  const Vec inverse = splat(1.0f / power);
  if (is_finite) {
    store_e4m3_row<From, true>(source, dim, codes, inverse);
  } else {
    store_e4m3_row<From, false>(source, dim, codes, inverse);
  }
}

template <Float From>
PC_FORCE_INLINE void write_fp8_latent(const char* latent, char* row) {
  for (int64_t tile = 0; tile < kPackedLatentDim / kFp8Tile; ++tile) {
    const char* source = latent + tile * kFp8Tile * kSize<From>;
    bool is_finite;
    const float least = known_magnitude<From>(source, kFp8Tile, is_finite) / E4M3::kLargest;
    const float scale = power_of_two_above(least > 1e-4f ? least : 1e-4f);
    store_by_power<From>(source, kFp8Tile, row + tile * kFp8Tile, scale, is_finite);
    __builtin_memcpy(row + kFp8ScaleAt + 4 * tile, &scale, sizeof scale);
  }
}

// A NaN makes the scale of its group NaN, because e2m1 has none. Scales are at least the least code.
template <Float From>
PC_FORCE_INLINE void write_nvfp4_latent(const char* latent, char* row) {
  constexpr int64_t kGroups = kPackedLatentDim / kNvfp4Tile;
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& divisor) __attribute__((always_inline)) {
    const IntVec least = max((IntVec)((Vec)min(amax, splat_bits(kLargestBits)) / splat(6.0f)), bits_of(0x1p-9f));
    bytes = e4m3_codes((Vec)select(amax <= kInfinityBits, least, amax), divisor);
  };
  char scales[kGroups];
  constexpr NvQuotient kQuotient = From == Float::BF16 ? NvQuotient::Words : NvQuotient::Corrected;
  quantize_nvfp4_by<From, kQuotient>({latent, row, scales, 0, 0, 0, 1, kPackedLatentDim, 1.0f}, scale_of);
  for (int64_t group = 0; group < kGroups; ++group) row[nvfp4_scale_at(group)] = scales[group];
}

inline void write_latent_row(const LatentCache& cache, int64_t block, int64_t offset, const LatentNumbers& numbers,
                             float factor) {
  char* const row = cache.latent + block * cache.block_stride + offset * cache.token_stride;
  const auto convert = [&](const char* source, Float from, Float to, char* target, int64_t dim) {
    conversion(from, to, factor != 1.0f)(source, target, dim, factor);
  };
  const Float latent_type = numbers.latent_type, rope_type = numbers.rope_type;
  switch (cache.format) {
    case LatentFormat::Fp8DsMla:
      with_float(latent_type, [&]<Float From>() { write_fp8_latent<From>(numbers.latent, row); });
      return convert(numbers.rope, rope_type, Float::BF16, row + kFp8RopeAt, kPackedRopeDim);
    case LatentFormat::Nvfp4DsMla:
      with_float(latent_type, [&]<Float From>() { write_nvfp4_latent<From>(numbers.latent, row); });
      return convert(numbers.rope, rope_type, Float::F8E4M3FN, row + kNvfp4RopeAt, kPackedRopeDim);
    default:
      convert(numbers.latent, latent_type, Float::F8E4M3FN, row, cache.latent_dim);
      convert(numbers.rope, rope_type, Float::F8E4M3FN,
              cache.rope + block * cache.rope_block_stride + offset * cache.rope_token_stride, cache.rope_dim);
  }
}

inline void write_index_key(const char* key, Float type, int64_t dim, char* codes, char* scale) {
  with_float(type, [&]<Float From>() {
    bool is_finite;
    const float magnitude = known_magnitude<From>(key, dim, is_finite);
    const float power = power_of_two_above((magnitude > 1e-4f ? magnitude : 1e-4f) / E4M3::kLargest);
    store_by_power<From>(key, dim, codes, power, is_finite);
    __builtin_memcpy(scale, &power, sizeof power);
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
