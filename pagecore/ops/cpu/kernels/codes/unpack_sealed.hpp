// Tiles of keys and values whose older tokens are in sealed blocks, unpacked to float32: rounded to bfloat16, keys
// would change scores by more than their bound. Rows of newer tokens are widened, so that the products see one kind of
// row.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

typedef uint32_t LooseBitVec __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));

template <int kBits>
constexpr int kCodesInWord = 32 / kBits;

template <int kBits>
PC_FORCE_INLINE Vec low_codes(BitVec words) {
  return __builtin_convertvector((IntVec)(words & ((1u << kBits) - 1)), Vec);
}

// A vector of scales, or one scale. The dtype is a branch, not a parameter, to compile this once.
PC_FORCE_INLINE Vec load_scales(Float type, const char* p) {
  return with_float(type, [&]<Float T>() __attribute__((always_inline)) { return load_as_float<T>(p); });
}
PC_FORCE_INLINE float load_scale(Float type, const char* p) {
  if (type == Float::F32) {
    float number;
    __builtin_memcpy(&number, p, sizeof number);
    return number;
  }
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  if (type == Float::BF16) return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  return widen_f16(HalfVec{} + bits)[0];
}

// The words of one head in one block, and its scales.
struct SealedHead {
  const SealedPlane& plane;
  const char* words;
  const char* scales;

  PC_FORCE_INLINE SealedHead(const SealedPlane& of, int64_t block, int64_t head)
      : plane(of),
        words(of.words + block * of.block_stride + head * of.head_stride),
        scales(of.scales + block * of.scales_block_stride + head * of.scales_head_stride) {}
};

// Unpacking prefetches the words and scales of the next head.

// Keys of tokens [first, last) of the 16 or 8 of a word, which share a group. A word has codes of one channel, and a
// vector of words those of a vector of channels.
template <int kBits>
PC_FORCE_INLINE void unpack_key_words(const SealedPlane& plane, const char* words, const char* scales, int first,
                                      int last, int64_t dim, float* rows, int64_t stride) {
  for (int64_t d = 0; d < dim; d += kLanes, rows += kLanes) {
    const char* const at = scales + d * size_of(plane.scale_type);
    const Vec scale = load_scales(plane.scale_type, at), least = load_scales(plane.scale_type, at + plane.least_stride);
    const BitVec codes = *reinterpret_cast<const LooseBitVec*>(words + 4 * d) >> static_cast<uint32_t>(first * kBits);
    prefetch_line(words + plane.head_stride + 4 * d);
    if (first == 0) prefetch_line(at + plane.scales_head_stride);
    if (last - first == kCodesInWord<kBits>) [[likely]] {
      for_each_constant<kCodesInWord<kBits>>([&]<int I>() __attribute__((always_inline)) {
        store(rows + I * stride, fma(low_codes<kBits>(codes >> I * kBits), scale, least));
      });
      continue;
    }
    for (int i = 0; i < last - first; ++i) {
      store(rows + i * stride, fma(low_codes<kBits>(codes >> static_cast<uint32_t>(i * kBits)), scale, least));
    }
  }
}

// Keys of tokens [begin, end) of a block.
template <int kBits>
void unpack_sealed_keys(const SealedHead& head, int64_t begin, int64_t end, int64_t dim, float* rows, int64_t stride) {
  constexpr int kCodes = kCodesInWord<kBits>;
  const SealedPlane& plane = head.plane;
  for (int64_t token = begin; token < end;) {
    const int64_t group = token / plane.group, word = token / kCodes;
    int64_t last = end < (group + 1) * plane.group ? end : (group + 1) * plane.group;
    last = last < (word + 1) * kCodes ? last : (word + 1) * kCodes;
    unpack_key_words<kBits>(plane, head.words + word * plane.row_stride, head.scales + group * plane.scales_row_stride,
                            static_cast<int>(token - word * kCodes), static_cast<int>(last - word * kCodes), dim,
                            rows + (token - begin) * stride, stride);
    token = last;
  }
}

// The codes of kLanes consecutive channels in the low bits of each lane; a word may have more or fewer.
template <int kBits>
PC_FORCE_INLINE BitVec codes_of_channels(const char* words) {
  constexpr int kBytes = kLanes * kBits / 8;
  BitVec lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<uint32_t>(lane);
  if constexpr (kBytes <= 4) {
    uint32_t codes = 0;
    __builtin_memcpy(&codes, words, kBytes);
    return (BitVec{} + codes) >> lanes * kBits;
  } else {
    uint32_t halves[2];
    __builtin_memcpy(halves, words, sizeof halves);
    return (lanes < kLanes / 2 ? BitVec{} + halves[0] : BitVec{} + halves[1]) >> lanes * kBits % 32;
  }
}

// Turns codes in the low bits of each lane to numbers of one group: by a table of its numbers if one vector holds it.
template <int kBits>
class SealedNumbers {
 public:
  PC_FORCE_INLINE SealedNumbers(Vec scale, Vec least) : scale_(scale), least_(least) {
#if defined(__AVX512F__)
    BitVec codes;
    for (int lane = 0; lane < kLanes; ++lane) codes[lane] = static_cast<uint32_t>(lane);
    table_ = fma(low_codes<kBits>(codes), scale, least);
#endif
  }
  PC_FORCE_INLINE Vec of(BitVec codes) const {
#if defined(__AVX512F__)  // of an index, 4 bits count
    return (Vec)_mm512_maskz_permutexvar_ps(kAllLanes, (__m512i)codes, (__m512)table_);
#else
    return fma(low_codes<kBits>(codes), scale_, least_);
#endif
  }

 private:
  [[maybe_unused]] Vec scale_, least_, table_;
};

// Values of tokens [begin, end) of a block. A word has codes of consecutive channels.
template <int kBits>
void unpack_sealed_values(const SealedHead& head, int64_t begin, int64_t end, int64_t dim, float* rows,
                          int64_t stride) {
  const SealedPlane& plane = head.plane;
  for (int64_t token = begin; token < end; ++token, rows += stride) {
    const char* words = head.words + token * plane.row_stride;
    const char* scales = head.scales + token * plane.scales_row_stride;
    prefetch_bytes(words + plane.head_stride, dim * kBits / 8);
    prefetch_line(scales + plane.scales_head_stride);
    for (int64_t d = 0; d < dim; scales += plane.group_stride) {
      const SealedNumbers<kBits> numbers(splat(load_scale(plane.scale_type, scales)),
                                         splat(load_scale(plane.scale_type, scales + plane.least_stride)));
      for (const int64_t last = d + plane.group; d < last; d += kLanes, words += kLanes * kBits / 8) {
        store(rows + d, numbers.of(codes_of_channels<kBits>(words)));
      }
    }
  }
}

// Calls visit(first, last, block, token) for each run of sealed tokens in use that follow each other in a block.
template <typename Visit>
PC_FORCE_INLINE void for_each_sealed_run(const RowOffsets& places, const TileUse& use, int64_t block_size,
                                         Visit&& visit) {
  const int end = use.last < places.num_sealed ? use.last : places.num_sealed;
  for (int t = use.first; t < end;) {
    const int64_t slot = places.codes[t], block = slot / block_size, token = slot - block * block_size;
    int last = t + 1;
    while (last < end && last - t < block_size - token && places.codes[last] == slot + last - t) ++last;
    visit(t, last, block, token);
    t = last;
  }
}

// The same for a tile of sealed tokens alone, which follow each other in the sequence.
template <typename Visit>
PC_FORCE_INLINE void for_each_sealed_block(const RowOffsets& places, int64_t block_size, Visit&& visit) {
  for (int t = 0; t < kTileTokens;) {
    const int64_t slot = places.codes[t], block = slot / block_size, token = slot - block * block_size;
    const int64_t count = block_size - token, left = kTileTokens - t;
    const int last = t + static_cast<int>(count < left ? count : left);
    visit(t, last, block, token);
    t = last;
  }
}

// Rows of the tokens after the sealed ones.
inline void widen_newest(const Cache& cache, const RowOffsets& places, int64_t head, const TileUse& use, float* rows,
                         int64_t stride) {
  const char* const base = cache.data + head * cache.head_stride;
  with_float(cache.type, [&]<Float T>() {
    for (int t = use.first > places.num_sealed ? use.first : places.num_sealed; t < use.last; ++t) {
      if (use.used != nullptr && use.used[t] == 0) continue;
      const char* const from = base + places.codes[t];
      for (int64_t d = 0; d < cache.dim; d += kLanes) {
        store(rows + t * stride + d, load_as_float<T>(from + d * kSize<T>));
      }
    }
  });
}

// Writes the rows of a head of the tokens in use to rows [64, stride]. `newest` has the tokens after the sealed ones.
inline void unpack_sealed(const SealedPlane& plane, bool is_key, const Cache& newest, const RowOffsets& places,
                          int64_t head, const TileUse& use, float* rows, int64_t stride) {
  const auto keys = plane.bits == 2 ? unpack_sealed_keys<2> : unpack_sealed_keys<4>;
  const auto values = plane.bits == 2 ? unpack_sealed_values<2> : unpack_sealed_values<4>;
  const auto unpack = is_key ? keys : values;
  for_each_sealed_run(places, use, newest.block_size, [&](int first, int last, int64_t block, int64_t token) {
    unpack({plane, block, head}, token, token + last - first, newest.dim, rows + first * stride, stride);
  });
  widen_newest(newest, places, head, use, rows, stride);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
