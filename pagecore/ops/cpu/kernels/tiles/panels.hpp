// Packing of key and value tiles as the right sides of matrix products.
//
//   product                  right side   float panel                pairs of bfloat16, one dword each
//   scores = query . key^T   keys         [padded dim][64 tokens]    [pair_padded(dim) / 2][64]: numbers 2k, 2k + 1
//   sums = weights . value   values       [64][padded dim]           [32][padded dim]: tokens 2p, 2p + 1
//
// Unused tokens and the padding of a row become zeros and are not read. `next_rows` is prefetched meanwhile.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/bytes.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/transpose.hpp"
#include "pagecore/ops/cpu/kernels/tiles/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));
using TwiceLanes = std::make_integer_sequence<int, 2 * kLanes>;

// {a0, b0, a1, b1 ...} from element kFrom of each on.
template <int kFrom, int... I>
PC_FORCE_INLINE Halves zip(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (kFrom + I / 2 + (I & 1) * 2 * kLanes)...);
}

// The row of each token; null for a token that must not be read.
PC_FORCE_INLINE void rows_in_use(const TokenRows& tokens, const TileUse& use, const char* (&rows)[kTileTokens]) {
  for (int t = 0; t < kTileTokens; ++t) {
    const bool used = t >= use.first && t < use.last && (use.used == nullptr || use.used[t] != 0);
    rows[t] = used ? tokens.base + tokens.offsets[t] : nullptr;
  }
}

// kLanes numbers from byte `at` of the row on; zeros from byte `end` on.
template <Float T>
PC_FORCE_INLINE Vec load_inside(const char* row, int64_t at, int64_t end) {
  if (row == nullptr || at >= end) return Vec{};
  if (at + kLanes * kSize<T> <= end) return load_as_float<T>(row + at);
  alignas(64) char bytes[kLanes * kSize<T>] = {};
  __builtin_memcpy(bytes, row + at, static_cast<size_t>(end - at));
  return load_as_float<T>(bytes);
}

// Calls put(i, vector of tokens first .. first + kLanes, first) for each number i < depth of rows of `bytes` bytes.
template <Float T, typename Put>
PC_FORCE_INLINE void for_each_column(const TokenRows& tokens, const TileUse& use, const NextRows& next_rows,
                                     int64_t bytes, int64_t depth, Put&& put) {
  const char* rows[kTileTokens];
  rows_in_use(tokens, use, rows);
  for (int64_t d = 0; d < depth; d += kLanes) {
    const int64_t at = d * kSize<T>;
    for (int t = 0; t < kTileTokens; t += kLanes) {
      for (int i = 0; i < kLanes; ++i) prefetch_elsewhere(next_rows, t + i, at, kLanes * kSize<T>);
      bool whole = at + kLanes * kSize<T> <= bytes;
      for (int i = 0; i < kLanes; ++i) whole = whole && rows[t + i] != nullptr;
      Vec square[kLanes];
      if (whole) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = load_as_float<T>(rows[t + i] + at);
      } else {
        for (int i = 0; i < kLanes; ++i) square[i] = load_inside<T>(rows[t + i], at, bytes);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (d + i < depth) put(d + i, square[i], t);
      }
    }
  }
}

// Packs bfloat16 keys. A pair is moved like one float32.
inline void pack_key_pairs(const TokenRows& tokens, const TileUse& use, int64_t dim, uint32_t* panel,
                           const NextRows& next_rows = {}) {
  const auto put = [panel](int64_t pair, Vec v, int first) __attribute__((always_inline)) {
    store(reinterpret_cast<float*>(panel) + pair * kTileTokens + first, v);
  };
  for_each_column<Float::F32>(tokens, use, next_rows, dim * kSize<Float::BF16>, pair_padded(dim) / 2, put);
}

template <Float T>
void pack_keys(const TokenRows& tokens, const TileUse& use, int64_t dim, float* panel, const NextRows& next_rows = {}) {
  if constexpr (T == Float::BF16) {
    // Transposed as pairs and split afterwards, which halves the transposes.
    const auto put = [panel](int64_t pair, Vec v, int first) __attribute__((always_inline)) {
      store(panel + 2 * pair * kTileTokens + first, (Vec)((BitVec)v << 16));
      store(panel + (2 * pair + 1) * kTileTokens + first, (Vec)((BitVec)v & 0xffff0000));
    };
    for_each_column<Float::F32>(tokens, use, next_rows, dim * kSize<T>, padded(dim) / 2, put);
  } else {
    const auto put = [panel](int64_t number, Vec v, int first)
                         __attribute__((always_inline)) { store(panel + number * kTileTokens + first, v); };
    for_each_column<T>(tokens, use, next_rows, dim * kSize<T>, padded(dim), put);
  }
}

// Tests whether numbers are finite, by their largest exponent.
class Finite {
 public:
  PC_FORCE_INLINE void see(Vec v) {
    const IntVec exponents = (IntVec)v & 0x7f800000;
    top_ = top_ > exponents ? top_ : exponents;  // an integer maximum is one instruction everywhere
  }
  [[nodiscard]] PC_FORCE_INLINE bool all() const { return max_lane((Vec)top_) < __builtin_inff(); }

 private:
  IntVec top_ = {};
};

// Returns true if all numbers that it read are finite. Otherwise a weight of 0 does not keep a number out of a product.
template <Float T>
bool pack_values(const TokenRows& tokens, const TileUse& use, int64_t dim, float* panel,
                 const NextRows& next_rows = {}) {
  const char* rows[kTileTokens];
  rows_in_use(tokens, use, rows);
  const int64_t bytes = dim * kSize<T>, whole = dim / kLanes * kLanes, width = padded(dim);
  Finite finite;
  for (int t = 0; t < kTileTokens; ++t) {
    prefetch_elsewhere(next_rows, t, 1);
    float* to = panel + t * width;
    int64_t d = 0;
    for (; d < whole && rows[t] != nullptr; d += kLanes) {
      const Vec v = load_as_float<T>(rows[t] + d * kSize<T>);
      finite.see(v);
      store(to + d, v);
    }
    for (; d < width; d += kLanes) {
      const Vec v = load_inside<T>(rows[t], d * kSize<T>, bytes);
      finite.see(v);
      store(to + d, v);
    }
  }
  return finite.all();
}

// pack_values for bfloat16, with two tokens interleaved.
inline bool pack_value_pairs(const TokenRows& tokens, const TileUse& use, int64_t dim, uint32_t* panel,
                             const NextRows& next_rows = {}) {
  const char* rows[kTileTokens];
  rows_in_use(tokens, use, rows);
  const int64_t whole = dim / (2 * kLanes) * (2 * kLanes), width = padded(dim);
  Halves top = {};  // exponents
  for (int t = 0; t < kTileTokens; t += 2) {
    prefetch_elsewhere(next_rows, t, 2);
    const char *first = rows[t], *second = rows[t + 1];
    auto* to = reinterpret_cast<float*>(panel + t / 2 * width);
    int64_t d = 0;
    for (; d < whole && first != nullptr && second != nullptr; d += 2 * kLanes) {
      const auto a = (Halves)load_as_float<Float::F32>(first + 2 * d);
      const auto b = (Halves)load_as_float<Float::F32>(second + 2 * d);
      top = max(top, a & 0x7f80);
      top = max(top, b & 0x7f80);
      store(to + d, (Vec)zip<0>(a, b, TwiceLanes{}));
      store(to + d + kLanes, (Vec)zip<kLanes>(a, b, TwiceLanes{}));
    }
    for (; d < width; d += kLanes) {
      const auto a = (BitVec)load_inside<Float::BF16>(first, 2 * d, 2 * dim);
      const auto b = (BitVec)load_inside<Float::BF16>(second, 2 * d, 2 * dim);
      const BitVec pairs = (a >> 16) | b;
      top = max(top, (Halves)pairs & 0x7f80);
      store(to + d, (Vec)pairs);
    }
  }
  Finite finite;
  finite.see((Vec)(BitVec)top);
  finite.see((Vec)((BitVec)top << 16));
  return finite.all();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
