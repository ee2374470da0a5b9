// A tile of rows of a quantised cache, the scales of its groups, and lookups of its 4-bit codes.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/scale_rows.hpp"
#include "pagecore/ops/cpu/kernels/codes/unpack.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// A tile of stored rows: the codes and the scales of each token. Those of a token that must not be read are `zeros`.
struct StoredTile {
  PC_FORCE_INLINE StoredTile(const CodeTables& code_tables, const float* scale_numbers, const TokenRows& code_rows,
                             const TokenRows& scale_rows, const TileUse& use, const char* zeros)
      : tables(code_tables), numbers(scale_numbers) {
    fill(code_rows, use, zeros, codes);
    fill(scale_rows, use, zeros, scales);
  }

  const CodeTables& tables;
  const float* numbers;  // of the scale bytes of groups
  const char* codes[kTileTokens];
  const char* scales[kTileTokens];

#if defined(__AVX512BW__)
  [[nodiscard]] PC_FORCE_INLINE const Address* scale_addresses() const {
    return reinterpret_cast<const Address*>(scales);
  }
#endif

 private:
  PC_FORCE_INLINE static void fill(const TokenRows& tokens, const TileUse& use, const char* zeros,
                                   const char* (&rows)[kTileTokens]) {
    const char* const base = tokens.base;
    if (base == nullptr) return;
    for (int t = 0; t < kTileTokens; ++t) rows[t] = base + tokens.offsets[t];
    if (use.used == nullptr && use.first == 0 && use.last == kTileTokens) return;
    for (int t = 0; t < kTileTokens; ++t) {
      const bool used = t >= use.first && t < use.last && (use.used == nullptr || use.used[t] != 0);
      if (!used) rows[t] = zeros;
    }
  }
};

#if defined(__AVX2__)

// Vectors of a number for each token of a tile.
constexpr int kTokenVectors = static_cast<int>(kTileTokens) / kLanes;

// The zero points of a tile of int4. With AVX-512 they are loaded as vectors, for the reason in scale_rows.hpp.
PC_FORCE_INLINE void load_zero_points(const StoredTile& tile, Vec (&points)[kTokenVectors]) {
#if defined(__AVX512BW__)
  load_dword_rows(tile.scale_addresses(), 0, points);
#else
  alignas(32) float scales[kTileTokens];
  for (int t = 0; t < kTileTokens; ++t) __builtin_memcpy(scales + t, tile.scales[t], sizeof(float));
  for (int i = 0; i < kTokenVectors; ++i) points[i] = load(scales + i * kLanes);
#endif
#pragma GCC unroll 8
  for (int i = 0; i < kTokenVectors; ++i) points[i] = __builtin_convertvector((IntVec)points[i] & 15, Vec);
}

#endif

#if defined(__AVX512VBMI__)

// True if tiles of a format and dim are packed here.
PC_FORCE_INLINE bool packs_codes(const Cache& cache) { return !is_plain(cache) && cache.dim % 64 == 0; }

PC_FORCE_INLINE Words scaled(Words words, Vec even, Vec odd) {
  return high_halves(even_floats(words) * even, odd_floats(words) * odd);
}

// The scales of a tile for up to eight groups, transposed. Loaded for all tokens before any is used, because a vector
// that is loaded soon after its lanes were stored waits for all these stores.
class TileScales {
 public:
  static constexpr int64_t kGroups = 8;

  PC_FORCE_INLINE void load(const StoredTile& tile, int64_t first, int64_t groups) {
    const float* const numbers = tile.numbers;
    for (int t = 0; t < kTileTokens; ++t) {
      const auto* row = reinterpret_cast<const uint8_t*>(tile.scales[t]) + first;
      for (int64_t g = 0; g < groups; ++g) numbers_[g][t] = numbers[row[g]];
    }
  }
  PC_FORCE_INLINE Vec of(int64_t group, int first) const {
    return ::pagecore::cpu::PC_ISA::load(numbers_[group] + first);
  }

 private:
  alignas(64) float numbers_[kGroups][kTileTokens];
};

// int4: indices of the numbers -15 .. 15, shifted by 15 minus the zero point.
struct Int4Lookup {
  __m512i table;
  PC_FORCE_INLINE explicit Int4Lookup(const CodeTables& tables) : table(_mm512_load_si512(tables.integers)) {}
  PC_FORCE_INLINE Words of(BitVec index, BitVec offset) const {
    const BitVec shifted = (index & 0x000f000f) + offset;
    return of_low_bits(shifted);
  }
  // Of the low five bits of each word.
  PC_FORCE_INLINE Words of_low_bits(BitVec index) const {
    return (Words)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, table);
  }
};

struct E2M1Lookup {
  __m512i table;
  PC_FORCE_INLINE explicit E2M1Lookup(const CodeTables& tables) : table(join(tables.ue8m0[127], tables.ue8m0[127])) {}
  PC_FORCE_INLINE Words of(BitVec index) const { return of_low_bits(index); }
  // Of the low four bits of each word.
  PC_FORCE_INLINE Words of_low_bits(BitVec index) const {
    return (Words)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, table);
  }
};

PC_FORCE_INLINE uint32_t int4_offset(const char* scale) {
  uint32_t bits;
  __builtin_memcpy(&bits, scale, sizeof bits);
  return (15 - (bits & 15)) * 0x10001;
}

#else

PC_FORCE_INLINE bool packs_codes(const Cache&) { return false; }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
