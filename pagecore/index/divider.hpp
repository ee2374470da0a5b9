// Division by a block size that is fixed at construction.
//
// D. Lemire, O. Kaser, N. Kurz, "Faster remainder by direct computation" (2019): n / d is the upper half of n *
// ceil(2^64 / d), exactly, for every 32-bit n and d > 1. A step divides twice for each row, and the division
// instruction is slow.
#pragma once

#include <cstdint>

#include "pagecore/native/ids.hpp"

namespace pagecore {

class Divider {
 public:
  // Precondition: divisor > 0.
  explicit Divider(TokenCount divisor)
      : divisor_(divisor), reciprocal_(~uint64_t{0} / static_cast<uint32_t>(divisor) + 1) {}

  [[nodiscard]] TokenCount divisor() const { return divisor_; }

  // Precondition: dividend >= 0. Uses the division instruction from 2^32 on.
  [[nodiscard]] int64_t floor_wide(int64_t dividend) const {
    if (divisor_ == 1) return dividend;
    if (dividend >> 32 != 0) return dividend / divisor_;
    return static_cast<int64_t>((Wide{reciprocal_} * static_cast<uint32_t>(dividend)) >> 64);
  }

  // Precondition: dividend >= 0.
  [[nodiscard]] int32_t floor(TokenCount dividend) const {
    if (divisor_ == 1) return dividend;
    return static_cast<int32_t>((Wide{reciprocal_} * static_cast<uint32_t>(dividend)) >> 64);
  }
  [[nodiscard]] int32_t ceil(TokenCount dividend) const { return dividend == 0 ? 0 : floor(dividend - 1) + 1; }

 private:
  __extension__ using Wide = unsigned __int128;

  TokenCount divisor_;
  uint64_t reciprocal_;
};

}  // namespace pagecore
