// A tile of keys or values widened to float32 and laid out row by row, padded with zeros.
#pragma once

#include "pagecore/ops/cpu/kernels/scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Which tokens of a tile some row attends to: [first, last), and of those where `used` is not 0. The rest must not be
// read.
struct TileUse {
  int first;
  int last;
  const uint8_t* used;  // [64], or null: all
};

// Returns false when a number is not finite. Tokens that are not used become zeros.
template <Float T>
bool pack_tile(const Tokens& tokens, const TileUse& use, int64_t dim, float* packed) {
  const int64_t stride = padded(dim);
  const int begin = use.first & ~(kBlockTokens - 1);
  const int end = (use.last + kBlockTokens - 1) & ~(kBlockTokens - 1);
  Vec rest = {};  // becomes NaN where a number is not finite
  for (int token = begin; token < end; ++token) {
    float* row = packed + token * stride;
    const bool used = token >= use.first && token < use.last && (use.used == nullptr || use.used[token] != 0);
    if (!used) {
      for (int64_t d = 0; d < stride; d += kLanes) store(row + d, Vec{});
      continue;
    }
    for_each_vector<T>(tokens.base + tokens.offsets[token], dim, [&](int64_t d, Vec v, int64_t) {
      rest += v - v;
      store(row + d, v);
    });
    for (int64_t d = (dim + kLanes - 1) / kLanes * kLanes; d < stride; d += kLanes) store(row + d, Vec{});
  }
  return sum(rest) == 0.0f;
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
