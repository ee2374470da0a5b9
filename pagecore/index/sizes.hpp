// Checks of the sizes that a caller chooses.
#pragma once

#include <cstdint>
#include <limits>

#include "pagecore/native/checks.hpp"

namespace pagecore {

inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Returns `value`, which must be in [least, most].
template <typename T = int32_t>
[[nodiscard]] T checked_size(const char* name, int64_t value, int64_t least, int64_t most) {
  PC_EXPECTS(value >= least && value <= most, ShapeError, name, " is ", value, "; use ", least, " to ", most);
  return static_cast<T>(value);
}

}  // namespace pagecore
