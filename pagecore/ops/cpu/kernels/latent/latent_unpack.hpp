// Rows of a latent cache as bfloat16 or float32: the latent, zeros up to its padded width, then rope and zeros.
//
// Quantised rows are unpacked to bfloat16, which holds every code times a power of two, and every e2m1 code times an
// e4m3 scale. A scale of "fp8_ds_mla" that is not a power of two is multiplied in float32 and rounded.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/latent_args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE IntVec load_bytes(const void* p) {
  return __builtin_convertvector(*static_cast<const LooseByteVec*>(p), IntVec);
}

// The numbers of e4m3 codes. Subnormals are converted from integers, so that no mode of the processor flushes them.
PC_FORCE_INLINE Vec decode_e4m3(IntVec codes) {
  const IntVec magnitude = codes & 0x7f;
  const IntVec normal = (magnitude << 20) + 0x3c000000;
  const IntVec subnormal = (IntVec)(__builtin_convertvector(magnitude, Vec) * 0x1p-9f);
  const IntVec nan = IntVec{} + 0x7fc00000;
  const IntVec bits = magnitude < 8 ? subnormal : normal;
  return (Vec)((magnitude == 0x7f ? nan : bits) | (codes & 0x80) << 24);
}

// The numbers of e2m1 codes, in the four low bits.
PC_FORCE_INLINE Vec decode_e2m1(IntVec codes) {
  const IntVec magnitude = codes & 7;
  const IntVec normal = (magnitude << 22) + (126 << 23);
  const IntVec half = IntVec{} + 0x3f000000;
  const IntVec bits = magnitude > 1 ? normal : (magnitude == 1 ? half : IntVec{});
  return (Vec)(bits | (codes & 8) << 28);
}

// Rounds to bfloat16, ties to even.
PC_FORCE_INLINE void store_bf16(uint16_t* to, Vec v) { store_half(to, narrow_bf16(v)); }

#if defined(__AVX512BW__)

// The bfloat16 numbers of the 128 codes without a sign.
struct E4M3Table {
  alignas(64) uint16_t number[128];
};

constexpr E4M3Table make_e4m3_table() {
  E4M3Table table{};
  for (int code = 8; code < 127; ++code) table.number[code] = static_cast<uint16_t>((code << 4) + 0x3c00);
  constexpr uint16_t kSubnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // code * 2^-9
  for (int code = 0; code < 8; ++code) table.number[code] = kSubnormal[code];
  table.number[127] = 0x7fc0;
  return table;
}

constexpr E4M3Table kE4M3Table = make_e4m3_table();

typedef uint16_t TableVec __attribute__((vector_size(4 * kLanes)));

PC_FORCE_INLINE __m512i scaled_numbers(const uint16_t* numbers, float scale) {
  const HalfVec low = narrow_bf16(widen_bf16(load_half(numbers)) * scale);
  const HalfVec high = narrow_bf16(widen_bf16(load_half(numbers + kLanes)) * scale);
  TableVec both;
  __builtin_memcpy(&both, &low, sizeof low);
  __builtin_memcpy(reinterpret_cast<char*>(&both) + sizeof low, &high, sizeof high);
  return (__m512i)both;
}

// Fills the table of the numbers of all codes without a sign, times `scale`. A power of two that keeps them normal is
// added to their exponents, except to those of 0 and NaN.
PC_FORCE_INLINE void fill_e4m3_table(float scale, __m512i (&table)[4]) {
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof bits);
  const int exponent = static_cast<int>(bits >> 23) - 127;  // of a positive scale
  const bool adds = (bits & 0x807fffff) == 0 && exponent > -100 && exponent < 100;
  const __m512i added = _mm512_set1_epi16(static_cast<short>(exponent * 128));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint16_t* numbers = kE4M3Table.number + 2 * kLanes * i;
    const __mmask32 finite = i == 0 ? 0xfffffffe : i == 3 ? 0x7fffffff : 0xffffffff;
    const __m512i plain = _mm512_load_si512(numbers);
    table[i] = adds ? _mm512_mask_add_epi16(plain, finite, plain, added) : scaled_numbers(numbers, scale);
  }
}

// Unpacks 32 codes at a time by a table of their numbers times `scale`; returns the count of unpacked codes.
PC_FORCE_INLINE int64_t unpack_by_table(const char* codes, int64_t count, float scale, uint16_t* to) {
  if (count < 2 * kLanes) return 0;
  __m512i table[4];
  fill_e4m3_table(scale, table);
  const __m512i high = _mm512_set1_epi16(0x40);
  int64_t d = 0;
  for (; d + 2 * kLanes <= count; d += 2 * kLanes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d));
    const __m512i code = _mm512_maskz_cvtepu8_epi16(~__mmask32{0}, bytes);
    const __m512i small = _mm512_permutex2var_epi16(table[0], code, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], code, table[3]);
    const __m512i number = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, high), small, large);
    const TableVec signs = ((TableVec)code & 0x80) << 8;
    store(reinterpret_cast<float*>(to + d), (Vec)((TableVec)number ^ signs));
  }
  return d;
}

#else

PC_FORCE_INLINE int64_t unpack_by_table(const char*, int64_t, float, uint16_t*) { return 0; }

#endif

// Unpacks `count` e4m3 codes times `scale`; reads no byte past them.
PC_FORCE_INLINE void unpack_e4m3(const char* codes, int64_t count, float scale, uint16_t* to) {
  int64_t d = unpack_by_table(codes, count, scale, to);
  for (; d + kLanes <= count; d += kLanes) store_bf16(to + d, decode_e4m3(load_bytes(codes + d)) * scale);
  if (d == count) return;
  uint8_t rest[kLanes] = {};
  __builtin_memcpy(rest, codes + d, static_cast<size_t>(count - d));
  alignas(64) uint16_t numbers[kLanes];
  store_bf16(numbers, decode_e4m3(load_bytes(rest)) * scale);
  __builtin_memcpy(to + d, numbers, static_cast<size_t>(2 * (count - d)));
}

PC_FORCE_INLINE void unpack_fp8_ds_mla(const char* row, uint16_t* to) {
  for (int64_t tile = 0; tile < kPackedLatentDim / kFp8Tile; ++tile) {
    float scale;
    __builtin_memcpy(&scale, row + kFp8ScaleAt + 4 * tile, sizeof scale);
    unpack_e4m3(row + tile * kFp8Tile, kFp8Tile, scale, to + tile * kFp8Tile);
  }
  __builtin_memcpy(to + kPackedLatentDim, row + kFp8RopeAt, 2 * kPackedRopeDim);
}

// Unpacks a group of 16 e2m1 codes times `scale`.
PC_FORCE_INLINE void unpack_e2m1(const char* codes, float scale, uint16_t* to) {
#if defined(__AVX512BW__)
  const Vec numbers = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  // A dword for each byte: the low nibble in the low half, the high nibble in the high half.
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m256i index = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
  // An e2m1 code times an e4m3 scale has at most 6 significant bits.
  const HalfVec table = __builtin_convertvector((BitVec)(numbers * scale) >> 16, HalfVec);
  store_half(to, (HalfVec)_mm256_permutexvar_epi16(index, (__m256i)table));
#else
  for (int64_t at = 0; at < kNvfp4Tile / 2; at += kLanes) {
    // A byte becomes the two halves of a dword.
    const IntVec code = load_bytes(codes + at);
    const auto even = (BitVec)(decode_e2m1(code & 15) * scale), odd = (BitVec)(decode_e2m1(code >> 4) * scale);
    store(reinterpret_cast<float*>(to + 2 * at), (Vec)(even >> 16 | (odd & 0xffff0000)));
  }
#endif
}

PC_FORCE_INLINE void unpack_nvfp4_ds_mla(const char* row, uint16_t* to) {
  alignas(64) float scales[kPackedLatentDim / kNvfp4Tile];  // in the order of the bytes
  for (int64_t i = 0; i < kPackedLatentDim / kNvfp4Tile; i += kLanes) {
    store(scales + i, decode_e4m3(load_bytes(row + kNvfp4ScaleAt + i)));
  }
  for (int64_t group = 0; group < kPackedLatentDim / kNvfp4Tile; ++group) {
    const float scale = scales[nvfp4_scale_at(group) - kNvfp4ScaleAt];
    unpack_e2m1(row + group * kNvfp4Tile / 2, scale, to + group * kNvfp4Tile);
  }
  unpack_e4m3(row + kNvfp4RopeAt, kPackedRopeDim, 1.0f, to + kPackedLatentDim);
}

// One token of a cache: its latent, or its packed row, and its rope.
struct LatentRow {
  const char* latent;
  const char* rope;
};

PC_FORCE_INLINE LatentRow latent_row(const LatentCache& cache, int64_t block, int64_t offset) {
  return {cache.latent + block * cache.block_stride + offset * cache.token_stride,
          cache.rope + block * cache.rope_block_stride + offset * cache.rope_token_stride};
}

template <typename Number>
PC_FORCE_INLINE void clear_numbers(Number* numbers, int64_t begin, int64_t end) {
  for (int64_t d = begin; d < end; ++d) numbers[d] = 0;
}

// Unpacks a row that is not plain, or plain bfloat16, to bfloat16 [latent_row_width].
PC_FORCE_INLINE void unpack_halves(const LatentCache& cache, const LatentRow& row, uint16_t* to) {
  const int64_t rope_at = latent_width(cache), end = rope_at + cache.rope_dim;
  switch (cache.format) {
    case LatentFormat::Fp8DsMla: return unpack_fp8_ds_mla(row.latent, to);
    case LatentFormat::Nvfp4DsMla: return unpack_nvfp4_ds_mla(row.latent, to);
    case LatentFormat::E4M3:
      unpack_e4m3(row.latent, cache.latent_dim, 1.0f, to);
      unpack_e4m3(row.rope, cache.rope_dim, 1.0f, to + rope_at);
      break;
    default:
      __builtin_memcpy(to, row.latent, static_cast<size_t>(2 * cache.latent_dim));
      __builtin_memcpy(to + rope_at, row.rope, static_cast<size_t>(2 * cache.rope_dim));
  }
  clear_numbers(to, cache.latent_dim, rope_at);
  clear_numbers(to, end, latent_row_width(cache));
}

// Unpacks any row to float32 [latent_row_width]; `halves` is scratch for a row.
inline void unpack_floats(const LatentCache& cache, const LatentRow& row, uint16_t* halves, float* to) {
  const int64_t rope_at = latent_width(cache), width = latent_row_width(cache);
  if (cache.format != LatentFormat::Plain || cache.type == Float::BF16) {
    unpack_halves(cache, row, halves);
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, widen_bf16(load_half(halves + d)));
    return;
  }
  with_float(cache.type, [&]<Float T>() {
    for_each_vector<T>(row.latent, cache.latent_dim, [&](int64_t d, Vec v, int64_t) { store(to + d, v); });
    clear_numbers(to, cache.latent_dim, rope_at);
    for (int64_t d = 0; d < cache.rope_dim; d += kLanes) {
      const char* at = row.rope + d * kSize<T>;
      const int64_t count = cache.rope_dim - d;
      store(to + rope_at + d, count < kLanes ? load_tail<T>(at, count) : load_as_float<T>(at));
    }
  });
  clear_numbers(to, rope_at + cache.rope_dim, width);
}

// Writes the numbers of a row, latent and rope, times `factor`.
inline void read_latent_row(const LatentCache& cache, int64_t block, int64_t offset, float factor, char* out,
                            Float type) {
  alignas(64) uint16_t halves[kLatentWidthMax];
  alignas(64) float numbers[kLatentWidthMax];
  unpack_floats(cache, latent_row(cache, block, offset), halves, numbers);
  const float* rope = numbers + latent_width(cache);
  for (int64_t d = 0; d < cache.rope_dim; ++d) numbers[cache.latent_dim + d] = rope[d];
  const int64_t dim = cache.latent_dim + cache.rope_dim;
  with_float(type, [&]<Float T>() {
    for (int64_t d = 0; d < dim; d += kLanes) {
      store_part<T>(out, d, load(numbers + d) * factor, dim - d < kLanes ? dim - d : kLanes);
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
