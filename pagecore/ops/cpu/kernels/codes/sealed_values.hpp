// Weights of few query rows times sealed values from their codes, by exact products of digits (sealed_weights.hpp).
//
// A part of a vector has a run of channels of a token. Of four tokens, a lane then has two channels:
//
//   parts    t0 t1 t2 t3                  bytes of a lane   t0 t1 t2 t3
//   4 bits   byte l                       channel 2 l in the low nibbles, 2 l + 1 in the high ones
//   2 bits   nibble l of half a part      the same in the low nibbles, with 2 bits each
#pragma once

#include "pagecore/ops/cpu/kernels/codes/sealed_weights.hpp"
#include "pagecore/ops/cpu/kernels/products/multiply.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int64_t kLeastGroup = 16;         // channels
constexpr int64_t kChunkDims = 2 * kLanes;  // of a part

// The bytes of four parts as lanes of the same place in each. With AVX-512 VBMI one instruction orders them; otherwise
// dwords are ordered, then the bytes of each quarter.
template <int kBits>
class PartOrder {
 public:
  [[nodiscard]] PC_FORCE_INLINE Bytes lanes(Bytes parts) const {
#if defined(__AVX512VBMI__)
    const auto ordered = (Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, bytes_, (__m512i)parts);
#elif defined(__AVX512F__)
    const Bytes ordered = look_up((Bytes)_mm512_maskz_permutexvar_epi32(kAllLanes, dwords_, (__m512i)parts), bytes_);
#else
    const Bytes ordered = look_up((Bytes)_mm256_permutevar8x32_epi32((__m256i)parts, dwords_), bytes_);
#endif
    return kBits == 4 ? ordered : (Bytes)((BitVec)ordered >> nibble_shifts());
  }

 private:
  // The byte of a part that a lane has.
  static constexpr int byte_of(int lane) { return kBits == 4 ? lane : lane / 2; }

#if defined(__AVX512VBMI__)
  static constexpr auto kBytes = table_64([](int i) { return i % 4 * kLanes + byte_of(i / 4); });
  const __m512i bytes_ = _mm512_load_si512(kBytes.bytes);
#else
  struct Table {
    alignas(64) int32_t dwords[kLanes];
    alignas(64) uint8_t bytes[kByteLanes];
  };
  static constexpr auto kTable = [] {
    Table table{};
    for (int i = 0; i < kByteLanes; ++i) {
      const int lane = i / 4, part = i % 4;
      table.dwords[lane] = lane % 4 * (kLanes / 4) + byte_of(lane / 4 * 4) / 4;
      table.bytes[i] = static_cast<uint8_t>(4 * part + byte_of(lane) % 4);
    }
    return table;
  }();
#if defined(__AVX512F__)
  const __m512i dwords_ = _mm512_load_si512(kTable.dwords);
#else
  const __m256i dwords_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(kTable.dwords));
#endif
  const Bytes bytes_ = *reinterpret_cast<const LooseBytes*>(kTable.bytes);
#endif
};

// Four parts from byte `at` of the words of four tokens on. Parts of 2 bits are loaded twice.
template <int kBits>
PC_FORCE_INLINE Bytes load_parts(const char* const* tokens, int64_t at) {
#if defined(__AVX512F__)
  const auto part = [&](__m512i rest, __mmask16 lanes, int i) __attribute__((always_inline)) {
    const __m128i* const from = reinterpret_cast<const __m128i*>(tokens[i] + at);
    if constexpr (kBits == 4) return _mm512_mask_broadcast_i32x4(rest, lanes, _mm_loadu_si128(from));
    const auto qwords = static_cast<__mmask8>(0b11 << 2 * i);
    return _mm512_mask_broadcastq_epi64(rest, qwords, _mm_loadl_epi64(from));
  };
  __m512i parts = part(__m512i{}, 0x000f, 0);
  parts = part(parts, 0x00f0, 1), parts = part(parts, 0x0f00, 2), parts = part(parts, 0xf000, 3);
  return (Bytes)parts;
#else
  const auto part = [&](int i) __attribute__((always_inline)) {
    int64_t qword = 0;
    __builtin_memcpy(&qword, tokens[i] + at, static_cast<size_t>(kLanes * kBits / 4));
    return kBits == 4 ? _mm256_set1_epi64x(qword) : _mm256_set1_epi32(static_cast<int32_t>(qword));
  };
  const __m256i low = _mm256_blend_epi32(part(0), part(1), 0b00001100);
  return (Bytes)_mm256_blend_epi32(low, _mm256_blend_epi32(part(2), part(3), 0b11000000), 0b11110000);
#endif
}

// Writes the lanes of all parts of a tile, [parts of a row, 16].
template <int kBits>
void order_parts(const char* const* tokens, int64_t dim, char* to) {
  const PartOrder<kBits> order;
  const int64_t bytes = dim * kBits / 8;
  for (int t = 0; t < kTileTokens; t += 4) {
    char* part = to + t * kLanes;
    for (int64_t at = 0; at < bytes; at += kLanes * kBits / 4, part += kTileTokens * kLanes) {
      *reinterpret_cast<LooseBytes*>(part) = order.lanes(load_parts<kBits>(tokens + t, at));
    }
  }
}

// Sums of R rows over a tile of lanes of a part.
template <int kBits, int R>
PC_FORCE_INLINE void add_part(const char* lanes, const int8_t* digits, SealedAhead& ahead, DigitSum (&sums)[R][2]) {
#pragma GCC unroll 1
  for (int i = 0; i < kTilePanels; ++i, digits += R * kPanelBytes, lanes += kPanel * kLanes) {
    ahead.step();
    add_panel_products<kBits, R>(
        digits,
        [&](int i)
            __attribute__((always_inline)) { return *reinterpret_cast<const LooseBytes*>(lanes + i * kByteLanes); },
        sums);
  }
}

// Adds the sums of R rows over the dims of a part from d on, which may have channels of several groups.
template <int kBits, int R>
void add_sealed_dims(const HeadRows& rows, int64_t row, const SealedPlane& plane, const SealedWeights& weights,
                     const char* lanes, int64_t d, SealedAhead& ahead) {
  for (int64_t group = d / plane.group; group * plane.group < d + kChunkDims; ++group) {
    DigitSum sums[R][2];
    add_part<kBits, R>(lanes, weights.template digits_of<R>(row, group), ahead, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
      const int64_t at = (row + r) * weights.groups + group;
      const float *const unit = weights.units + at, *const excess = weights.excess + at;
      Vec of_dims[2] = {sums[r][0].total(), sums[r][1].total()};
      interleave(of_dims[0], of_dims[1]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if ((d + i * kLanes) / plane.group != group) continue;
        add_product(acc + i * kLanes, fma(of_dims[i], splat(*unit), splat(*excess)), rows.factor + row + r);
      }
    }
  }
}

// True if tiles of whole sealed blocks are multiplied here.
PC_FORCE_INLINE bool accumulates_sealed(const SealedPlane& plane, const Cache& newest) {
  return plane.bits != 0 && plane.group % kLeastGroup == 0 && newest.dim % 64 == 0;
}

// Adds the products of all rows, which attend to the same keys, with a tile of sealed values. Returns false, having
// added nothing, if it has to be unpacked. Prefetches `ahead`.
inline bool accumulate_sealed(const HeadRows& rows, const SealedPlane& plane, const Cache& newest,
                              const RowOffsets& places, int64_t head, SealedAhead ahead, const Scratch& scratch) {
  const SealedRows tile(plane, newest.block_size, places, head);
  const SealedWeights weights(scratch.value, newest.dim / plane.group);
  load_sealed_scales(plane, tile, weights);
  bool made = true;
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    for (int64_t g = 0; g < weights.groups; ++g) made &= make_group_weights<R>(rows, row, g, weights);
  });
  if (!made) return false;
  ahead.begin(newest.dim / kChunkDims * kTilePanels);
  auto* const lanes = reinterpret_cast<char*>(scratch.unpacked);
  plane.bits == 2 ? order_parts<2>(tile.words, newest.dim, lanes) : order_parts<4>(tile.words, newest.dim, lanes);
  for_each_even_block<kSealedRows>(rows.count, [&]<int R>(int64_t row) {
    const auto add = plane.bits == 2 ? add_sealed_dims<2, R> : add_sealed_dims<4, R>;
    for (int64_t d = 0; d < newest.dim; d += kChunkDims)
      add(rows, row, plane, weights, lanes + d * kTileTokens / 2, d, ahead);
  });
  return true;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
